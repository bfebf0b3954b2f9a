"""Memory of a candidate, estimated before it is played: the states of the fullest stage, each over the ranks that shard
it, and what its micro-batches in flight keep.
"""

from collections.abc import Sequence

from terrace.plan.boundaries import leaving
from terrace.plan.mesh import Mesh
from terrace.planner.bubbles import in_flight
from terrace.planner.cuts import Cut
from terrace.planner.estimate import Estimator
from terrace.planner.parts import Counts, Runs
from terrace.planner.stages import SERIAL
from terrace.planner.task import Candidate, Task, num_micros
from terrace.program.schedules.registry import takes_unit
from terrace.simulate.activations import activations_of


class Memory:
    """Memory of one task's candidates, cached by the numbers that it depends on."""

    def __init__(self, task: Task, estimator: Estimator) -> None:
        self.task, self.estimator, self.again = task, estimator, task.recomputations
        self.num_inner = len(task.inner)
        gone, kinds = leaving(task.keep, task.blocks), task.kinds.order
        # Of the blocks of each kind, those whose inputs are kept below the device.
        self._left = [
            sum(kinds[block] == kind for block in gone) / kinds.count(kind) for kind in range(len(estimator.specs))
        ]
        self._held: dict[tuple[object, ...], list[tuple[list[float], float]]] = {}

    def whole_bytes(self, candidate: Candidate, cut: Cut) -> float:
        mesh, micro_batch, placement = candidate.mesh, candidate.micro_batch, candidate.placement
        estimator, micros = self.estimator, num_micros(self.task, candidate)
        states = estimator.group_bytes(mesh, placement)
        flying = float(candidate.unit)
        if candidate.schedule != SERIAL:
            flying = in_flight(candidate.schedule, mesh.total("pipeline"), candidate.chunks, micros)
            flying = max(flying, candidate.unit) if takes_unit(candidate.schedule) else flying
        most = 0.0
        for numels, kept in self._stages_held(candidate, cut):
            held = sum([numel * each for numel, each in zip(numels, states, strict=True)])
            most = max(most, held + flying * micro_batch * kept)
            flying = 1.0  # later stages keep fewer, and at least one
        layout, _ = estimator.layout(mesh.state, placement)
        gathered = max(map(sum, zip(*self.groups(mesh), strict=True))) * estimator.item if layout.frees else 0
        return estimator.whole_bytes(most + gathered)

    def least_kept(self, mesh: Mesh, counts: Counts, recompute: int) -> float:
        """Bytes kept of a sequence by blocks of each kind that all `recompute`."""
        again = self.again.all_layers(recompute, least=False)
        return sum([count * self._kept(kind, mesh, again) for kind, count in counts])

    def groups(self, mesh: Mesh) -> list[tuple[int, ...]]:
        """Elements of a block of each kind, by group as `Estimator.group_bytes`."""
        trained, frozen, _ = self.estimator.numels.elements(mesh)
        return [*trained, *frozen]

    def _stages_held(self, candidate: Candidate, cut: Cut) -> list[tuple[list[float], float]]:
        """Elements by group, and bytes kept of a sequence, of each distinct stage; of the first stage first."""
        mesh = candidate.mesh
        key = (mesh.inside_degrees, mesh.stack_degrees, candidate.recompute, candidate.first, cut.stages)
        found = self._held.get(key)
        if found is None:
            again, rest = (self.again.all_layers(candidate.recompute, least=least) for least in (False, True))
            kinds = range(len(self.estimator.specs))
            kept = [float(self._kept(kind, mesh, again)) for kind in kinds]
            if rest != again:
                share = candidate.first / self.num_inner
                kept = [share * kept[kind] + (1 - share) * self._kept(kind, mesh, rest) for kind in kinds]
            groups = self.groups(mesh)
            found = self._held[key] = [
                ([total(sizes, runs) for sizes in groups], total(kept, runs)) for runs, _ in cut.stages
            ]
        return found

    def _kept(self, kind: int, mesh: Mesh, recompute: int) -> int:
        estimator, spec = self.estimator, self.estimator.specs[kind]
        if spec.at_an_end:
            return 0
        kept = estimator.kept_bytes(kind, mesh, 1, recompute)
        if self._left[kind]:
            left = activations_of(estimator.work(mesh, 1), spec, self.task.backend).input_bytes
            kept -= int(self._left[kind] * left)
        return kept


def total(sizes: Sequence[float], runs: Runs) -> float:
    """Sum over the blocks of `runs` of what a block of each kind has."""
    return sum([count * sizes[kind] for kind, count in runs])
