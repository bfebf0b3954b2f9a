"""A partial candidate of the search: a candidate without placement and unit, with its lower bounds."""

from typing import NamedTuple

from terrace.planner.parts import Runs
from terrace.planner.space import OpenMesh
from terrace.planner.stages import SERIAL, SIMPLEST
from terrace.planner.task import Candidate, Placement

SLACK = 1 - 1e-9  # sums in another order may differ in their last bits


class Sizes(NamedTuple):
    """Numbers that the roots of a shape share: degrees, and elements of each kind of block on a rank and of the model.

    `stacks` and `all_stacks` are the same for stacks that ranks divide. `gathered_bytes` is a lower bound on the bytes
    gathered where parameters are sharded: one block. `kept` and `all_kept` are the bytes that a block of each kind, and
    the model, keep per sequence.
    """

    num_stages: int
    data: int
    numels: tuple[int, ...]
    all_numel: int
    stacks: tuple[int, ...]
    all_stacks: int
    gathered_bytes: int
    kept: list[int]
    all_kept: int


class PartialCandidate(NamedTuple):
    """A candidate without placement and unit, with lower bounds on its compute.

    `span_s`: compute seconds; `heavy`: blocks of the stage with the most compute, if known. `stages`: (parameters per
    tensor rank, peak bytes of one micro-batch in flight, parameters of stacks that ranks divide) of the stages that may
    need the most memory.
    """

    shape: OpenMesh
    micro_batch: int
    recompute: int
    schedule: str
    chunks: int
    num_micros: int
    heavy: Runs | None
    span_s: float
    stages: tuple[tuple[float, float, float], ...]
    sizes: Sizes
    played: bool = False
    unit: int = 0  # if the schedule passes chunks in units: its order depends on it, and `stages` count it
    first: int = 0  # layers that `recompute` names, where that is known and not all

    @property
    def bound_s(self) -> float:
        """Lower bound in seconds over all placements."""
        return self.span_s * SLACK

    @property
    def key(self) -> tuple[int, str, int, int, OpenMesh, int]:
        """Tie break between cores of equal bound."""
        return self.recompute, self.schedule, self.chunks, self.micro_batch, self.shape, self.unit

    def passing(self, unit: int) -> "PartialCandidate":
        """The core with units of `unit` micro-batches, all of which a stage keeps before its first backward.

        Its messages are of whole chunks (`Chains.excess_s`), so the blocks of a stage do not apply.
        """
        stages = tuple((numel, unit * kept, stack) for numel, kept, stack in self.stages)
        return self._replace(unit=unit, stages=stages, heavy=None)

    def candidate(self, placement: Placement, unit: int) -> Candidate:
        """The complete candidate; a root gets its simplest schedule."""
        schedule = self.schedule or (SIMPLEST if self.shape.mesh.total("pipeline") > 1 else SERIAL)
        chosen = self.recompute, unit, schedule, self.chunks, self.micro_batch, placement, self.shape.mesh
        return Candidate(*chosen, self.first)
