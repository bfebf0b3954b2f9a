"""Layers that bounds of a pipeline count: of its lightest virtual stage, of its last and of its busiest."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from terrace.planner.stages import share_layers

Counts = tuple[int, int, int]  # embeddings, layers and heads


class Shares(NamedTuple):
    """Layers of the lightest virtual stage and of the last, and of looped stages: of the busiest and of the last.

    `heavy` counts the blocks of the stage with most layers, where the placement of the schedule tells.
    """

    least: int
    last: int
    most: int
    last_stage: int
    heavy: Counts | None


@lru_cache(maxsize=65536)
def shares_of(
    num_layers: int, num_stages: int, chunks: int, head_layers: float, is_looped: bool, is_folded: bool
) -> Shares:
    """The shares of `num_layers` on `num_stages`."""
    counts = share_layers(num_layers, num_stages * chunks, head_layers)
    return _shared(counts, num_stages, is_looped, is_folded)


@lru_cache(maxsize=65536)
def _shared(counts: tuple[int, ...], num_stages: int, is_looped: bool, is_folded: bool) -> Shares:
    """The shares of a count of layers by virtual stage; of other placements than these two, little is said."""
    if not is_looped and not is_folded:
        return Shares(min(counts), counts[-1], 0, 0, None)
    if is_looped:
        layers, last = [sum(counts[stage::num_stages]) for stage in range(num_stages)], num_stages - 1
    else:
        layers, last = [counts[stage] + counts[-1 - stage] for stage in range(num_stages)], 0
    held = [(count, int(stage == 0), int(stage == last)) for stage, count in enumerate(layers)]
    return Shares(min(counts), counts[-1], max(layers), layers[-1], heaviest(held))


def heaviest(stages: Sequence[tuple[int, int, int]]) -> Counts:
    """The stage with most layers, of stages with (layers, embeddings, heads)."""
    layers, embeddings, heads = max(stages)
    return embeddings, layers, heads
