"""A partial candidate of the search: a choice whose placement and unit are still open, with its lower bounds."""

from typing import NamedTuple

from terrace.planner.shares import Counts
from terrace.planner.space import OpenMesh
from terrace.planner.stages import SERIAL, SIMPLEST
from terrace.planner.task import Choice, Placement

SLACK = 1 - 1e-9  # sums in another order may differ in their last bits


class PartialCandidate(NamedTuple):
    """A choice without placement and unit: what its computing takes at least.

    `span_s` are the seconds of the computing, `mean_s` those of a stage in the mean, `heavy` what the stage with most
    layers holds, if known. `stages` holds (parameters per tensor rank, bytes of one micro-batch that wait at the peak)
    of stages of which one needs most memory.
    """

    shape: OpenMesh
    micro_batch: int
    recompute: int
    schedule: str
    chunks: int
    num_micros: int
    heavy: Counts | None
    mean_s: float
    span_s: float
    stages: tuple[tuple[int, int], ...]
    played: bool
    unit: int = 0  # of a schedule that passes chunks in units, whose order depends on it; `stages` then count it

    @property
    def bound_s(self) -> float:
        """Seconds that no choice of placement gets below."""
        return self.span_s * SLACK

    @property
    def key(self) -> tuple[int, str, int, int, OpenMesh, int]:
        """What orders cores of one bound."""
        return self.recompute, self.schedule, self.chunks, self.micro_batch, self.shape, self.unit

    def passing(self, unit: int) -> "PartialCandidate":
        """Return the core with units of so many micro-batches, all of which a stage keeps before its first backward.

        Its messages are those of whole chunks (`Bounds._chunks_excess_s`), so what a stage holds tells nothing.
        """
        stages = tuple((numel, unit * kept) for numel, kept in self.stages)
        return self._replace(unit=unit, stages=stages, heavy=None)

    def choice(self, placement: Placement, unit: int) -> Choice:
        """Return the whole choice; a root stands for its simplest schedule."""
        schedule = self.schedule or (SIMPLEST if self.shape.mesh.total("pipeline") > 1 else SERIAL)
        return Choice(self.recompute, unit, schedule, self.chunks, self.micro_batch, placement, self.shape.mesh)
