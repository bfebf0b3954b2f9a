"""Cached seconds of one task's experts, where ranks hold different experts or slices of them.

Tokens are dispatched in the fastest numbers of chunks for a layer (terrace.simulate.chunks), which depend on the
division of the experts, on the tokens that a rank routes and on little else of a plan.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from terrace.base.errors import PlanError
from terrace.plan.expert_traffic import NO_TRAFFIC, ExpertTraffic
from terrace.plan.mesh import STACK_AXES, Mesh
from terrace.plan.tensor_traffic import TensorTraffic
from terrace.planner.task import Candidate, Placement, Task, plan_of
from terrace.simulate.chunks import Layer, Numbers, Orders, best_chunks
from terrace.simulate.layers import seconds_of
from terrace.simulate.masks import work_in
from terrace.simulate.mixture import Divided, Seconds, launches
from terrace.simulate.routed import RoutedSeconds, priced_experts
from terrace.simulate.trained import trained_part
from terrace.simulate.work import Work

_NOTHING: Seconds = (0.0, 0.0, 0.0)
_WHOLE = Numbers()
_Priced = tuple[RoutedSeconds, Divided]


class Experts:
    def __init__(self, task: Task) -> None:
        self.task = task
        specs, order = task.kinds.specs, task.kinds.order
        self._stacked = [(order.count(kind), kind) for kind, spec in enumerate(specs) if spec.has_stacks]
        self._trained = [trained_part(spec, task.blocks) for spec in specs]
        self._layers: dict[tuple[object, ...], Layer | None] = {}
        self._traffics: dict[tuple[object, ...], ExpertTraffic] = {}
        self._orders: Orders = {}
        self._numbers: dict[tuple[object, ...], Numbers] = {}
        self._priced: dict[tuple[object, ...], _Priced] = {}
        self._least: dict[tuple[object, ...], Divided] = {}

    def chunks(self, mesh: Mesh, work: Work, accumulate: bool) -> Numbers:
        if not mesh.divides_stacks or not self.task.runs_all:
            return _WHOLE
        key = (_division(mesh), *_load(work), accumulate)
        found = self._numbers.get(key)
        if found is None:
            each = ((times, self._layer(kind, mesh, work, accumulate)) for times, kind in self._stacked)
            layers = [(times, layer) for times, layer in each if layer is not None]
            found = self._numbers[key] = best_chunks(layers) if layers else _WHOLE
        return found

    def divided(self, kind: int, mesh: Mesh, work: Work, accumulate: bool, pieces: int) -> Divided | None:
        """Corrections of a block's seconds for the division of its experts; None if undivided."""
        layer = self._layer(kind, mesh, work, accumulate)
        if layer is None:
            return None
        return self._of(kind, mesh.stack_degrees, work, accumulate, layer.traffic, pieces)[1]

    def waits(self, kind: int, mesh: Mesh, work: Work, accumulate: bool, halves: bool) -> Seconds:
        """(Forward, backward, recomputation) seconds of waits for messages with free lanes.

        With `halves`, weight gradients are a separate pass.
        """
        layer = self._layer(kind, mesh, work, accumulate)
        if layer is None:
            return _NOTHING
        numbers = self.chunks(mesh, work, accumulate)
        forward_s, backward_s = layer.waits_s(numbers, halves=halves)
        return forward_s, backward_s, forward_s - layer.tables_s(numbers)

    def least_waits(self, kind: int, mesh: Mesh, work: Work, accumulate: bool) -> Seconds:
        """Lower bounds on `waits` beside the compute of one piece, for any chunks.

        A pass takes at least its compute and at least the rows on a lane; compute as in `least_divided`.
        """
        layer = self._layer(kind, mesh, work, accumulate)
        if layer is None:
            return _NOTHING
        passed, shared, _, _ = self._of(kind, mesh.stack_degrees, work, accumulate, layer.traffic, 1)[0]
        tables_s, forward_s, backward_s = layer.least_s()
        recompute_s = max(0.0, forward_s - passed[0] - shared[0])
        backward_s = max(0.0, backward_s - sum(passed[1:]) - sum(shared[1:]))
        return tables_s + recompute_s, backward_s, recompute_s

    def least_longer(self, kind: int, work: Work, accumulate: bool) -> Seconds:
        """Lower bound, over all divisions, on the extra seconds relative to all experts on every rank.

        (Forward, input gradient, weight gradient); negative where a division makes them shorter.
        """
        device, spec = self.task.cluster.device, self.task.kinds.specs[kind]
        least = self.least_divided(kind, work, accumulate)
        each = (least, least._replace(launches=0.0), None)
        least_s, free, whole = (seconds_of(device, work, spec, accumulate=accumulate, divided=one) for one in each)
        # Host overhead of a backward may be in either half; it is attributed to weight gradients, which may be delayed.
        weight_s = least_s.input_s + least_s.weight_s - free.input_s - whole.weight_s
        trained = self._trained[kind]
        return least_s.forward_s - whole.forward_s, free.input_s - whole.input_s, trained * weight_s

    def least_divided(self, kind: int, work: Work, accumulate: bool) -> Divided:
        """Minimum of each number of `divided` over all divisions of the experts.

        For one piece: several products over the same rows in total fill no fewer tiles and need more launches.
        """
        key = (kind, *_load(work), accumulate)
        found = self._least.get(key)
        if found is None:
            spec = self.task.kinds.specs[kind]
            mixture = work_in(work, spec, self.task.backend).layer.mixture
            each = [Divided(*_NOTHING, launches(work, mixture))]
            for own, cut in self._degrees():
                traffic = self._traffic(kind, _alone(len(self.task.cluster.tiers), own, cut), work)
                if traffic.way:
                    each.append(self._of(kind, (own, cut), work, accumulate, traffic, 1)[1])
            found = self._least[key] = Divided(*map(min, zip(*each, strict=True)))
        return found

    def _degrees(self) -> list[tuple[int, int]]:
        ranks = self.task.cluster.world_size
        most = [math.gcd(size, ranks) for size in self.task.stack_sizes]
        degrees = [[each for each in range(1, number + 1) if number % each == 0] for number in most]
        # Narrower products are no shorter, so experts are cut only where there are no more of them.
        return [
            (own, cut)
            for own in degrees[0]
            for cut in degrees[1]
            if own * cut > 1 and (cut == 1 or own == degrees[0][-1]) and ranks % (own * cut) == 0
        ]

    def _layer(self, kind: int, mesh: Mesh, work: Work, accumulate: bool) -> Layer | None:
        key = (kind, _division(mesh), *_load(work), accumulate)
        if key not in self._layers:
            traffic = self._traffic(kind, mesh, work)
            self._layers[key] = None
            if traffic.way:
                seconds_of = partial(self._seconds, kind, mesh.stack_degrees, work, accumulate)
                self._layers[key] = Layer(self.task.cluster, traffic, seconds_of, self._orders)
        return self._layers[key]

    def _seconds(
        self, kind: int, degrees: tuple[int, int], work: Work, accumulate: bool, traffic: ExpertTraffic
    ) -> RoutedSeconds:
        return self._of(kind, degrees, work, accumulate, traffic, traffic.pieces)[0]

    def _of(
        self, kind: int, degrees: tuple[int, int], work: Work, accumulate: bool, traffic: ExpertTraffic, pieces: int
    ) -> _Priced:
        # Compute does not depend on tiers.
        key = (kind, degrees, *_load(work), accumulate, pieces)
        found = self._priced.get(key)
        if found is None:
            device, spec = self.task.cluster.device, self.task.kinds.specs[kind]
            own, trained = work_in(work, spec, self.task.backend), self._trained[kind]
            cut = replace(traffic, chunks=(pieces, pieces))
            found = self._priced[key] = priced_experts(device, own, cut, accumulate, trained)
        return found

    def _traffic(self, kind: int, mesh: Mesh, work: Work) -> ExpertTraffic:
        spec = self.task.kinds.specs[kind]
        if not mesh.divides_stacks or not spec.has_stacks:
            return NO_TRAFFIC
        # For another number of tokens under the same division only this number changes, unless routing is even.
        key = (kind, _division(mesh), work.tensor == 1)
        known = self._traffics.get(key)
        if known is not None and not known.is_even:
            return replace(known, tokens=work.routed)
        # States, schedule and batch do not affect messages inside a block.
        plan = plan_of(self.task, Candidate(0, 1, "", 1, work.micro_batch, Placement(-1, -1, -1), mesh))
        tiers = [tier.name for tier in self.task.cluster.tiers]
        with suppress(PlanError):  # a number of tokens that cannot be routed evenly: evaluation refuses it
            found = ExpertTraffic.of(TensorTraffic.of(mesh, tiers, plan, self.task.sequence), spec)
            # A bound prices divisions without the tensor ranks of a work.
            found = replace(found, tokens=work.routed, shares=found.shares and work.tensor == 1)
            self._traffics[key] = found
            return found
        return NO_TRAFFIC


def _division(mesh: Mesh) -> Sequence[tuple[int, ...]]:
    return () if not mesh.divides_stacks else tuple(map(mesh.stacks.group, STACK_AXES))


def _load(work: Work) -> tuple[int, bool]:
    # Tokens that a rank routes, and whether it also has a whole shared expert.
    return work.routed, work.tensor == 1


def _alone(num_tiers: int, expert: int, rows: int) -> Mesh:
    inside = (1,) * (num_tiers - 1)
    of_experts = Mesh.build(num_tiers, expert=(*inside, expert), rows=(*inside, rows))
    return Mesh(Mesh.build(num_tiers).degrees, of_experts)
