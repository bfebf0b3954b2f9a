"""The spread of `balance = "tokens"`: every row of a micro-batch is a ring over all places (terrace.plan.context).

A place attends to its chunks of every row; its parts hold even shares of that, so that nothing is remapped and with one
part nothing moves. All members hold the same number of rows and send messages of the same sizes, padding included.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

from terrace.plan.context import chunk_tokens, local_tokens
from terrace.plan.mesh import Mesh
from terrace.plan.plan import Plan
from terrace.sequence.build import build_token_layout
from terrace.sequence.group_layout import GroupLayout
from terrace.sequence.segments import Segment
from terrace.sequence.token_layout import Run, TokenLayout, cut_runs

_KEPT = 8  # spreads of a rank: without documents all micro-batches are alike, with them those that begin as another did


def static_token_layouts(
    plan: Plan, mesh: Mesh, sequence: int, window: int, member: int
) -> Callable[[tuple[int, ...]], TokenLayout]:
    """Return `static_token_layout` of a member as a function of the documents, which keeps the last few spreads."""
    return lru_cache(maxsize=_KEPT)(
        lambda documents: static_token_layout(plan, mesh, sequence, window, documents, member)
    )


def static_token_layout(
    plan: Plan, mesh: Mesh, sequence: int, window: int, documents: Sequence[int], member: int
) -> TokenLayout:
    """Return the spread of a member for a micro-batch of rows of `sequence` tokens, whatever the plan's balance is.

    `documents` are the tokens, row after row, with which documents begin, rising; every row begins one.
    """
    return build_token_layout(static_group_layout(plan, mesh, sequence, window, documents), member)


def static_group_layout(plan: Plan, mesh: Mesh, sequence: int, window: int, documents: Sequence[int]) -> GroupLayout:
    """Return the layout of all members; arguments are those of `static_token_layout`."""
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
