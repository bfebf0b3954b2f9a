"""The least price of a group of shapes (terrace.planner.space), whatever is chosen later.

What a group's shapes differ in costs little, so a block's seconds are those of the shape with the least; messages of
context ranks are the least over the shapes. A schedule's part is arithmetic on a few numbers of it, which depend on
stages and micro-batches alone, so groups share them.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple

from terrace.base.errors import PlanError
from terrace.plan.mesh import Mesh
from terrace.plan.recompute import WHOLE
from terrace.planner.bubbles import equal_shape, least_bubble, shares_of
from terrace.planner.inner import PassSeconds
from terrace.planner.parts import Work, work_of_runs
from terrace.planner.price import Prices
from terrace.planner.schedule_pins import schedules
from terrace.planner.space import Group, OpenMesh, Space, context_forms, forms_of
from terrace.planner.stages import MOST_PASSES, SERIAL, has_halves, longest_stage, passes_rounds
from terrace.planner.task import Candidate
from terrace.program.schedules.registry import takes_unit

_PARTS = 64  # in which the cost of the logits is rounded down, so that groups share numbers


class Least(NamedTuple):
    """The least seconds of a step without messages of states, and the computing that may hide the first and the last
    of these.
    """

    schedule: str
    chunks: int
    step_s: float
    forward_s: float
    backward_s: float


class Form(NamedTuple):
    """A shape of a group with Ulysses degrees, before stacks are divided, and what context ranks add to all blocks."""

    waits_s: float
    mesh: Mesh
    ulysses: tuple[int, ...]
    micro_batch: int

    def whole(self, group: Group) -> Mesh:
        mesh = self.mesh.with_stacks_of(group.shape.mesh)
        return mesh.with_ulysses(self.ulysses) if self.ulysses else mesh


class _Numbers(NamedTuple):
    """A schedule of equal stages: its bubble, and the seconds before the first forward and after the last backward of
    the first stage's chunks, in those of a stage.
    """

    schedule: str
    chunks: int
    in_rounds: bool
    bubble: float
    before: float
    after: float
    own: float  # part of the model in a chunk's first and last unit of micro-batches
    halves: bool


class _Forms(NamedTuple):
    alike: tuple[tuple[OpenMesh, int], ...]  # kept alive, since its identity is the key
    least: dict[int, PassSeconds]  # by kind
    least_s: float
    each: tuple[Form, ...]


_Waits = tuple[
    float, dict[int, PassSeconds], tuple[int, ...]
]  # (seconds of all blocks, those of each kind, Ulysses degrees)


class GroupPrices:
    """Least prices of the groups of one space, cached by the numbers that they depend on."""

    def __init__(self, space: Space, prices: Prices) -> None:
        self.space, self.prices, self.estimator = space, prices, prices.estimator
        self._schedules: dict[int, tuple[tuple[str, int], ...]] = {}
        self._forms: dict[int, _Forms] = {}
        self._waiting: dict[int, tuple[object, bool]] = {}
        self._waits_known: dict[tuple[Mesh, bool, int], list[_Waits]] = {}
        self._attending = [(kind, count) for kind, count in prices.whole if self.estimator.specs[kind].attends]

    def schedules(self, stages: int) -> tuple[tuple[str, int], ...]:
        """Names and chunks of the schedules of so many stages."""
        if stages not in self._schedules:
            self._schedules[stages] = tuple(schedules(self.space, stages))
        return self._schedules[stages]

    def some_schedule(self, stages: int) -> list[tuple[bool, str]]:
        """A schedule of so many stages with whole backwards, and one with backwards in halves, if there are."""
        return sorted({has_halves(schedule): schedule for schedule, _ in self.schedules(stages)}.items())

    def works(self, group: Group, candidate: Candidate, *, context: bool = True, exact: bool = True) -> list[Work]:
        """`Prices.works` of a group of shapes with a candidate's numbers, the least over the shapes.

        Without `context` also without messages of context ranks, and if not `exact` as in `Estimator.block`: both take
        less time. If the group is open, with the best experts.
        """
        mesh, micro_batch = group.shape.mesh, group.micro_batch
        halves = has_halves(candidate.schedule or SERIAL)
        numbers = mesh, micro_batch, candidate.recompute, candidate.first
        found = self.prices.works_of(*numbers, context=False, exact=exact, halves=halves)
        if group.shape.divides:
            found = [self._with_least_stacks(kind, work, mesh, micro_batch) for kind, work in enumerate(found)]
        if not context or not self._waits(group):
            return found
        whole = self.prices.again.values[candidate.recompute].parts == WHOLE
        found = list(found)
        for kind, (forward_s, backward_s, recompute_s) in self._forms_of(group).least.items():
            own = found[kind]
            found[kind] = own[0] + forward_s, own[1] + backward_s + whole * recompute_s, own[2]
        return found

    def forms(self, group: Group) -> list[tuple[float, Form]]:
        """Each shape of a group in each form, with the seconds by which its micro-batch waits longer than is counted
        in `works`, on a stage in the mean; the longest first.
        """
        found, stages = self._forms_of(group), group.shape.mesh.total("pipeline")
        least_s = found.least_s if self._waits(group) else 0.0
        return [((form.waits_s - least_s) / stages, form) for form in found.each]

    def _waits(self, group: Group) -> bool:
        # By identity: groups with other divisions of stacks have the same shapes.
        known = self._waiting.get(id(group.alike))
        if known is None:
            waits = all(shape.mesh.total("context") > 1 for shape, _ in group.alike)
            known = self._waiting[id(group.alike)] = group.alike, waits
        return known[1]

    def _forms_of(self, group: Group) -> _Forms:
        found = self._forms.get(id(group.alike))
        if found is None:
            least, each = dict[int, PassSeconds](), list[Form]()
            for shape, size in group.alike:
                for waits_s, waits, ulysses in self._waits_of(shape, size):
                    each.append(Form(waits_s, shape.mesh, ulysses, size))
                    for kind, seconds in waits.items():
                        if kind not in least or seconds[0] + seconds[1] < least[kind][0] + least[kind][1]:
                            least[kind] = seconds
            least_s = sum([count * sum(least[kind][:2]) for kind, count in self._attending])
            each.sort(key=lambda form: form.waits_s, reverse=True)
            found = self._forms[id(group.alike)] = _Forms(group.alike, least, least_s, tuple(each))
        return found

    def _waits_of(self, shape: OpenMesh, micro_batch: int) -> list[_Waits]:
        """How long blocks wait for context messages, in each form of a shape's context ranks."""
        key = shape.mesh.inside, shape.is_open, micro_batch
        found = self._waits_known.get(key)
        if found is None:
            each = forms_of(self.space, shape.mesh) if shape.is_open else ((),)
            forms = context_forms(self.space, OpenMesh(*key[:2]))
            found = self._waits_known[key] = []
            for form, ulysses in zip(forms, each, strict=True):
                waits = {kind: self.estimator.context(kind, form, micro_batch) for kind, _ in self._attending}
                waits_s = sum([count * (waits[kind][0] + waits[kind][1]) for kind, count in self._attending])
                found.append((waits_s, waits, ulysses))
        return found

    def _with_least_stacks(self, kind: int, work: Work, mesh: Mesh, micro_batch: int) -> Work:
        estimator = self.estimator
        if not estimator.specs[kind].has_stacks:
            return work
        accumulate = estimator.accumulates(mesh, micro_batch)
        more = estimator.experts.least_longer(kind, estimator.work(mesh, micro_batch), accumulate)
        return work[0] + more[0], work[1] + more[1] + more[2], work[2] + more[2]

    def least_s(self, group: Group, works: Sequence[Work]) -> float:
        """The least price over schedules and placements, if stages are equal but for whole layers."""
        prices, stages = self.prices, group.shape.mesh.total("pipeline")
        work = work_of_runs(works, prices.whole)
        whole_s = work[0] + work[1]
        if stages == 1:
            return group.num_micros * whole_s
        busiest_s = whole_s / stages
        if prices.split.alike is not None:
            layer = works[prices.split.alike]
            busiest_s = max(busiest_s, -(-prices.num_inner // stages) * (layer[0] + layer[1]))
        most_chunks = (prices.num_inner + prices.task.ends) // stages
        bubble = least_bubble(most_chunks, self.schedules(stages), *shares_of(work, 10))
        return group.num_micros * busiest_s + bubble * (whole_s - busiest_s)

    def least_of_each(self, group: Group, works: Sequence[Work]) -> list[Least]:
        """The least price with each schedule that takes the group's numbers, without messages of states."""
        prices, stages, micros = self.prices, group.shape.mesh.total("pipeline"), group.num_micros
        forward_s, backward_s, weight_s = work = work_of_runs(works, prices.whole)
        if stages == 1:
            numbers = micros * (forward_s + backward_s), micros * forward_s, micros * backward_s
            return [Least(*each, *numbers) for each in self.schedules(1)]
        mean_s, alike = (forward_s + backward_s) / stages, prices.split.alike
        layer_s = 0.0 if alike is None else works[alike][0] + works[alike][1]
        logits = 0.0 if alike is None else _rounded(prices.split.logits_in_layers(works))
        layers = prices.num_inner, prices.task.ends
        found = []
        for each in _numbers(self.schedules(stages), stages, micros, sum(layers), *shares_of(work, 10)):
            longest_s = max(mean_s, layer_s * _longest(*layers, stages, each.chunks, logits, each.in_rounds))
            found.append(
                Least(
                    each.schedule,
                    each.chunks,
                    micros * longest_s + each.bubble * mean_s,
                    each.before * mean_s + each.own * forward_s,
                    each.after * mean_s + each.own * (weight_s if each.halves else backward_s),
                )
            )
        return found


def _rounded(value: float) -> float:
    mantissa, exponent = math.frexp(value)
    return math.ldexp(int(_PARTS * mantissa) / _PARTS, exponent)


@lru_cache(maxsize=65536)
def _longest(num_layers: int, ends: int, stages: int, chunks: int, logits: float, in_rounds: bool) -> float:
    return longest_stage(num_layers, stages, chunks, logits, ends, in_rounds=in_rounds)


@lru_cache(maxsize=65536)
def _numbers(
    among: Sequence[tuple[str, int]], stages: int, micros: int, most_virtual: int, forward: float, weight: float
) -> tuple[_Numbers, ...]:
    found = list[_Numbers]()
    for schedule, chunks in among:
        if stages * chunks > most_virtual or stages * chunks * micros > MOST_PASSES:
            continue
        with suppress(PlanError):  # numbers that the schedule does not take
            shape = equal_shape(schedule, stages, chunks, micros, forward, weight)
            found.append(
                _Numbers(
                    schedule,
                    chunks,
                    passes_rounds(schedule, stages, chunks, micros),
                    shape.bubble,
                    max(shape.before),
                    max(shape.after),
                    (micros if takes_unit(schedule) else 1) / (stages * chunks),
                    has_halves(schedule),
                )
            )
    return tuple(found)
