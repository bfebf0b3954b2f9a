"""Rows of a batch for members with shares, dealt as no code of the runtime deals them: rank after rank."""

from terrace.runtime.batch import Batch
from terrace.runtime.engine import Engine
from tests.support.parity import Case, cut_rows


def micros_of(world_size: int, shares: tuple[int, ...]) -> list[range]:
    """The micro-batches of each rank, all of which are data ranks. Any deal has the same sum."""
    counts = [share for share in shares for _ in range(world_size // len(shares))]
    stops = [sum(counts[: rank + 1]) for rank in range(world_size)]
    return [range(stop - count, stop) for stop, count in zip(stops, counts, strict=True)]


def own_rows(engine: Engine, case: Case, step: int) -> list[Batch]:
    """The micro-batches of a rank."""
    plan, size = case.plan, case.plan.micro_batch
    dealt = micros_of(engine.program.cluster.world_size, plan.shares)
    batch = case.rows.batch(step, dealt[-1].stop * size)
    return [cut_rows(batch, size * micro, size * (micro + 1)) for micro in dealt[engine.rank]]
