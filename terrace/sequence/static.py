"""The spread of `balance = "tokens"`: every row of a micro-batch is a ring over all places (terrace.plan.context).

A place attends to its chunks of every row; its parts hold even shares of that, so that nothing is remapped and with one
part nothing moves. All members hold the same number of rows and send messages of the same sizes, padding included.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

from terrace.plan.context import chunk_tokens, local_tokens
from terrace.plan.mesh import Mesh
from terrace.plan.plan import Plan
from terrace.sequence.build import spread
from terrace.sequence.layout import Layout
from terrace.sequence.segments import Segment
from terrace.sequence.view import Run, Spread, cut_runs

_KEPT = 8  # spreads of a rank: without documents all micro-batches are alike, with them those that begin as another did


def static_spreads(
    plan: Plan, mesh: Mesh, sequence: int, window: int, member: int
) -> Callable[[tuple[int, ...]], Spread]:
    """Return `static_spread` of a member as a function of the documents, which keeps the last few spreads."""
    return lru_cache(maxsize=_KEPT)(lambda documents: static_spread(plan, mesh, sequence, window, documents, member))


def static_spread(plan: Plan, mesh: Mesh, sequence: int, window: int, documents: Sequence[int], member: int) -> Spread:
    """Return the spread of a member for a micro-batch of rows of `sequence` tokens, whatever the plan's balance is.

    `documents` are the tokens, row after row, with which documents begin, rising; every row begins one.
    """
    return spread(static_layout(plan, mesh, sequence, window, documents), member)


def static_layout(plan: Plan, mesh: Mesh, sequence: int, window: int, documents: Sequence[int]) -> Layout:
    """Return the layout of all members; arguments are those of `static_spread`."""
    degrees = tuple(degree for degree in mesh.group("ring") if degree > 1) or (1,)
    ulysses, num_places = mesh.total("ulysses"), mesh.total("ring")
    chunk, places = chunk_tokens(sequence, num_places), tuple(range(num_places))
    starts = range(0, plan.micro_batch * sequence, sequence)
    segments = tuple(Segment(start, start + sequence, places, degrees, chunk) for start in starts)
    num_held = local_tokens(plan, mesh, sequence)
    held: list[tuple[Run, ...]] = []
    for place in places:
        runs = [run for segment in segments for run in segment.shard(place)]
        held += (cut_runs(runs, part * num_held, (part + 1) * num_held) for part in range(ulysses))
    return Layout(
        segments=segments,
        documents=tuple(documents),
        held=tuple(held),
        ulysses=ulysses,
        num_held=num_held,
        num_attended=ulysses * num_held,
        window=window,
    )
