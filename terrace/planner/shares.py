"""Layer counts for pipeline bounds: of the lightest, the last and the busiest virtual stage."""

from functools import lru_cache
from typing import NamedTuple

from terrace.planner.stages import share_before

Heavy = tuple[int, bool, bool]  # layers of a stage, and whether it is the first of the model and the last


class Shares(NamedTuple):
    """Layers of the lightest virtual stage before the last, and of the last; if looped, also of the busiest last stage.

    `heavy`: the stage with the most layers, if the schedule's placement determines it.
    """

    least: int
    last: int
    most: int
    last_stage: int
    heavy: Heavy | None


@lru_cache(maxsize=65536)
def shares_of(num_layers: int, num_stages: int, chunks: int, last: int, is_looped: bool, is_folded: bool) -> Shares:
    """Shares of `num_layers` over `num_stages`, where the last virtual stage has `last`."""
    counts = share_before(num_layers, num_stages * chunks, last)
    least = min(counts[:-1] or counts)
    # Other placements may group the virtual stages in any way, so nothing is known about whole stages.
    if not is_looped and not is_folded:
        return Shares(least, counts[-1], 0, 0, None)
    if is_looped:
        layers, final = [sum(counts[stage::num_stages]) for stage in range(num_stages)], num_stages - 1
    else:
        # In a V the first stage also has the last virtual stage, and so the logits.
        layers, final = [counts[stage] + counts[-1 - stage] for stage in range(num_stages)], 0
    heavy = max((count, stage == 0, stage == final) for stage, count in enumerate(layers))
    return Shares(least, counts[-1], max(layers), layers[-1], heavy)
