"""The token layout of `balance = "tokens"`: every row of a micro-batch is a ring over all ring ranks
(terrace.plan.context).

A ring rank attends to its chunks of every row, and its Ulysses ranks hold even shares of them, so no token moves to
another ring rank, and with one Ulysses rank none moves at all. All members hold equally many rows and send messages of
equal sizes, padding included.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from terrace.plan.context import chunk_tokens, local_tokens
from terrace.plan.mesh import Mesh
from terrace.plan.plan import Plan
from terrace.sequence.build import build_token_layout
from terrace.sequence.group_layout import GroupLayout
from terrace.sequence.segments import Segment
from terrace.sequence.token_layout import Run, TokenLayout, cut_runs

_KEPT = 8  # cached token layouts per rank; micro-batches with equal document starts share one


def static_token_layouts(
    plan: Plan, mesh: Mesh, sequence: int, window: int, member: int, other_windows: tuple[int, ...] = ()
) -> Callable[[tuple[int, ...]], TokenLayout]:
    """`static_token_layout` of a member as a function of the documents, with the last few layouts cached."""
    return lru_cache(maxsize=_KEPT)(
        lambda documents: static_token_layout(plan, mesh, sequence, window, documents, member, other_windows)
    )


def static_token_layout(
    plan: Plan,
    mesh: Mesh,
    sequence: int,
    window: int,
    documents: Sequence[int],
    member: int,
    other_windows: tuple[int, ...] = (),
) -> TokenLayout:
    """Token layout of a member for a micro-batch of rows of `sequence` tokens; ignores `plan.balance`.

    `documents` are the ascending token indices, over the concatenated rows, at which documents begin; every row begins
    a document. Layers have the `window`, or one of `other_windows`.
    """
    whole = static_group_layout(plan, mesh, sequence, window, documents)
    return build_token_layout(replace(whole, other_windows=other_windows), member)


def static_group_layout(plan: Plan, mesh: Mesh, sequence: int, window: int, documents: Sequence[int]) -> GroupLayout:
    """Group layout of all members; arguments as in `static_token_layout`."""
    degrees = tuple(degree for degree in mesh.group("ring") if degree > 1) or (1,)
    ulysses, num_ring_ranks = mesh.total("ulysses"), mesh.total("ring")
    chunk, ring_ranks = chunk_tokens(sequence, num_ring_ranks), tuple(range(num_ring_ranks))
    starts = range(0, plan.micro_batch * sequence, sequence)
    segments = tuple(Segment(start, start + sequence, ring_ranks, degrees, chunk) for start in starts)
    num_local_tokens = local_tokens(plan, mesh, sequence)
    held: list[tuple[Run, ...]] = []
    for ring_rank in ring_ranks:
        runs = [run for segment in segments for run in segment.shard(ring_rank)]
        held += (
            cut_runs(runs, ulysses_rank * num_local_tokens, (ulysses_rank + 1) * num_local_tokens)
            for ulysses_rank in range(ulysses)
        )
    return GroupLayout(
        segments=segments,
        documents=tuple(documents),
        local_runs=tuple(held),
        ulysses=ulysses,
        num_local_tokens=num_local_tokens,
        num_attention_tokens=ulysses * num_local_tokens,
        window=window,
    )
