"""Seconds of the experts of one task where ranks hold different ones, or parts of them; each is found once."""

import math
from contextlib import suppress

from terrace.base.errors import PlanError
from terrace.plan.expert_traffic import ExpertTraffic
from terrace.plan.mesh import Mesh
from terrace.plan.tensor_traffic import TensorTraffic
from terrace.planner.task import Candidate, Placement, Task, plan_of
from terrace.program.block_program.experts import expert_steps
from terrace.program.block_program.steps import moves_rows
from terrace.program.instruction import Op
from terrace.simulate.experts import ExpertSeconds, alone_s, pass_steps, priced_experts
from terrace.simulate.inside import InBlockPrices
from terrace.simulate.masks import work_in
from terrace.simulate.mixture import Seconds
from terrace.simulate.work import Work

_NOTHING: Seconds = (0.0, 0.0, 0.0)


class Experts:
    """The experts of one task."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._priced: dict[tuple[object, ...], tuple[ExpertSeconds, Seconds]] = {}
        self._waits: dict[tuple[object, ...], Seconds] = {}
        self._least: dict[tuple[object, ...], Seconds] = {}

    def longer(self, kind: int, mesh: Mesh, work: Work, accumulate: bool) -> Seconds:
        """Seconds by which a block's forward, input gradients and weight gradients are longer than with all experts
        on every rank, messages aside.
        """
        return self._of(kind, mesh, work, accumulate)[1]

    def waits(self, kind: int, mesh: Mesh, work: Work, accumulate: bool) -> Seconds:
        """Seconds that a forward, a backward and a recomputation wait for messages that meet no others."""
        key = (kind, mesh.experts, work.tokens, accumulate)
        found = self._waits.get(key)
        if found is None:
            traffic, (own, _) = self._traffic(kind, mesh, work.micro_batch), self._of(kind, mesh, work, accumulate)
            if traffic is None:
                return _NOTHING
            prices = InBlockPrices(self.task.cluster, None, None, experts=traffic)
            forward, backward = expert_steps(traffic)
            passes = (Op.FORWARD, forward), (Op.BACKWARD, backward), (Op.BACKWARD, tuple(filter(moves_rows, forward)))
            forward_s, backward_s, again_s = (
                alone_s(tuple(pass_steps(steps, op, "", kind, own, prices))) - sum(map(own.of, steps))
                for op, steps in passes
            )
            found = self._waits[key] = forward_s, backward_s, again_s
        return found

    def least_longer(self, kind: int, work: Work, accumulate: bool) -> Seconds:
        """The least of `longer` over all divisions of the experts."""
        key = (kind, work.tokens, accumulate)
        found = self._least.get(key)
        if found is None:
            num_tiers = len(self.task.cluster.tiers)
            alone = (1,) * (num_tiers - 1)
            meshes = [
                Mesh(mesh.degrees, mesh)
                for own, cut in self._degrees()
                for mesh in [Mesh.build(num_tiers, expert=(*alone, own), rows=(*alone, cut))]
            ]
            each = [_NOTHING, *(self.longer(kind, mesh, work, accumulate) for mesh in meshes)]
            forward_s, input_s, weight_s = map(min, zip(*each, strict=True))
            found = self._least[key] = forward_s, input_s, weight_s
        return found

    def _degrees(self) -> list[tuple[int, int]]:
        experts, ranks = self.task.experts, self.task.cluster.world_size
        if experts is None:
            return []
        most = math.gcd(experts.num_experts, ranks), math.gcd(experts.intermediate_size, ranks)
        degrees = [[each for each in range(1, number + 1) if number % each == 0] for number in most]
        return [(own, cut) for own in degrees[0] for cut in degrees[1] if own * cut > 1 and ranks % (own * cut) == 0]

    def _of(self, kind: int, mesh: Mesh, work: Work, accumulate: bool) -> tuple[ExpertSeconds, Seconds]:
        key = (kind, mesh.expert_degrees, work.tokens, accumulate)
        found = self._priced.get(key)
        if found is None:
            traffic, spec = self._traffic(kind, mesh, work.micro_batch), self.task.kinds.specs[kind]
            if traffic is None:
                found = ExpertSeconds(), _NOTHING
            else:
                device = self.task.cluster.device
                found = priced_experts(device, work_in(work, spec, self.task.backend), traffic, accumulate)
            self._priced[key] = found
        return found

    def _traffic(self, kind: int, mesh: Mesh, micro_batch: int) -> ExpertTraffic | None:
        spec = self.task.kinds.specs[kind]
        if mesh.experts is None or not spec.has_stacks:
            return None
        # States, schedule and batch say nothing about messages inside a block.
        plan = plan_of(self.task, Candidate(0, 1, "", 1, micro_batch, Placement(-1, -1, -1), mesh))
        tiers = [tier.name for tier in self.task.cluster.tiers]
        with suppress(PlanError):  # a number of tokens that cannot be routed evenly: evaluation refuses it
            return ExpertTraffic.of(TensorTraffic.of(mesh, tiers, plan, self.task.sequence), spec)
        return None
