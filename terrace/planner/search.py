"""The search: best first by lower bounds, and no choice is evaluated whose bound is above what was found.

1. Every mapping table, micro-batch, recomputation and schedule gets the bound of its computing. What cannot fit
   with all states sharded as far as possible is dropped.
2. The best of these is taken up: every placement and unit of it gets its own bounds of time and of memory.
3. The best of those is evaluated: its step is built and played.

Bounds never exceed what the evaluation finds, so the `count` best are found when `count` evaluations lie below every
bound that is left: the answer is that of evaluating the whole space (tests/test_planner.py does). `limit` stops
earlier; `Found.least_s` then says what nothing left can be faster than. Everything is deterministic: equal
costs are ordered by memory, then by the choice itself.
"""

import heapq
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from terrace.base.errors import PlanError
from terrace.cluster import Cluster, Device, Tier
from terrace.plan import AXES, Plan, validate
from terrace.planner.bound import Bounds, Core
from terrace.planner.estimate import Estimator
from terrace.planner.evaluate import Estimate, Evaluator
from terrace.planner.space import Shape, Space, micro_batches, placements, shapes, units
from terrace.planner.stages import ONLY_PINNED, SERIAL, traits
from terrace.planner.task import Choice, Placement, Task, plan_of


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best choices, and how they were found.

    `least_s` is a bound for all that was not evaluated (infinite: nothing was left). `nearest` is, where nothing
    fits, the choice that lacks least memory.
    """

    best: tuple[Estimate, ...]
    nearest: Estimate | None
    num_roots: int
    num_evaluated: int
    least_s: float

    @property
    def proved(self) -> bool:
        """Whether no other choice of the space can be better."""
        return not self.best or self.best[-1].step_s <= self.least_s


Entry = tuple[float, int, tuple[object, ...], Core, Placement | None, int]


class Search:
    """One search; `run` does it."""

    def __init__(self, space: Space, evaluator: Evaluator, capacity_bytes: float) -> None:
        self.space, self.evaluator, self.capacity_bytes = space, evaluator, capacity_bytes
        self.bounds = evaluator.bounds
        self._smallest: tuple[float, Choice] | None = None
        self._schedules: dict[int, list[tuple[str, int]]] = {}

    def run(self, count: int = 5, limit: int = 400) -> Found:
        """Return the `count` best choices, after at most `limit` evaluations."""
        best: list[Estimate] = []
        heap: list[Entry] = [(core.bound_s, 0, core.key, core, None, 0) for core in self._roots()]
        heapq.heapify(heap)
        num_roots, tried = len(heap), 0
        while heap and not (len(best) == count and heap[0][0] > best[-1].step_s) and tried < limit:
            entry = heapq.heappop(heap)
            core, placement, unit = entry[3:]
            if placement is None:
                for further in self._opened(core):
                    heapq.heappush(heap, further)
                continue
            tried += 1
            estimate = attempt(self.evaluator, core.choice(placement, unit))
            if estimate is not None and self._has_room(estimate.needed_bytes, estimate.choice):
                best = sorted([*best, estimate], key=lambda each: each.order)[:count]
        nearest = None if best or self._smallest is None else attempt(self.evaluator, self._smallest[1])
        least_s = heap[0][0] if heap else math.inf
        return Found(best=tuple(best), nearest=nearest, num_roots=num_roots, num_evaluated=tried, least_s=least_s)

    def _roots(self) -> Iterator[Core]:
        """Yield the roots that may fit. Memory grows with the micro-batch, so the first that cannot ends a shape."""
        space = self.space
        for shape in shapes(space):
            places = placements(space, shape)[::-1]  # the one that shards most first
            for micro_batch in micro_batches(space, shape.data):
                fitting = [
                    root
                    for root in roots_of(space, self.bounds, shape, micro_batch)
                    if any(self._fits(root, placement, 1) for placement in places)
                ]
                yield from fitting
                if not fitting:
                    break

    def _opened(self, core: Core) -> Iterator[Entry]:
        """Yield what a core stands for: its schedules, then itself played, then its placements."""
        if not core.schedule:
            stages = core.shape.pipeline
            if stages not in self._schedules:
                self._schedules[stages] = schedules(self.space, stages)
            for further in self.bounds.cores(core, self._schedules[stages]):
                yield further.bound_s, 0, further.key, further, None, 0
        elif not core.played:
            with suppress(PlanError):
                played = self.bounds.play(core)
                yield max(core.bound_s, played.bound_s), 0, played.key, played, None, 0
        else:
            for placement in placements(self.space, core.shape):
                for unit in units(self.space, core.num_micros, placement, core.schedule != SERIAL):
                    if self._fits(core, placement, unit):
                        bound_s = max(core.bound_s, self.bounds.placed_s(core, placement, unit))
                        yield bound_s, 1, (*core.key, placement, unit), core, placement, unit

    def _fits(self, core: Core, placement: Placement, unit: int) -> bool:
        least = self.bounds.least_bytes(core, placement, unit)
        return least <= self.capacity_bytes or self._has_room(least, core.choice(placement, unit))

    def _has_room(self, needed_bytes: float, choice: Choice) -> bool:
        if needed_bytes <= self.capacity_bytes:
            return True
        if self._smallest is None or needed_bytes < self._smallest[0]:
            self._smallest = (needed_bytes, choice)
        return False


def cores_of(space: Space, bounds: Bounds, shape: Shape) -> Iterator[Core]:
    """Yield every choice of a shape without placement and unit."""
    for micro_batch in micro_batches(space, shape.data):
        for root in roots_of(space, bounds, shape, micro_batch):
            for schedule, chunks in schedules(space, shape.pipeline):
                core = bounds.core(root, schedule, chunks)
                if core is not None:
                    yield core


def roots_of(space: Space, bounds: Bounds, shape: Shape, micro_batch: int) -> list[Core]:
    """Return the roots of a shape and a micro-batch: with and without recomputation, as the pins allow."""
    return [bounds.root(shape, micro_batch, again) for again in (0, 1) if space.pins.allows("recompute", again)]


def schedules(space: Space, num_stages: int) -> list[tuple[str, int]]:
    """Return (name, chunks) of the schedules for a number of stages."""
    if num_stages == 1:
        known = [(SERIAL, 1)]
    else:
        searched = [name for name in traits() if name not in ONLY_PINNED or space.pins.schedule == name]
        known = [(name, chunks) for name in searched for chunks in traits()[name].chunks]
    pins = space.pins
    return [each for each in known if pins.schedule in (None, each[0]) and pins.allows("chunks", each[1])]


def attempt(evaluator: Evaluator, choice: Choice) -> Estimate | None:
    """Return the evaluation, or None where the choice breaks a rule that shows only when its step is built."""
    try:
        return evaluator.evaluate(choice)
    except PlanError:
        return None


def exhaustive(space: Space, evaluator: Evaluator, capacity_bytes: float) -> list[Estimate]:
    """Return every choice of a small space that fits, best first: what the search must agree with."""
    found = []
    for core in (core for shape in shapes(space) for core in cores_of(space, evaluator.bounds, shape)):
        for placement in placements(space, core.shape):
            for unit in units(space, core.num_micros, placement, core.schedule != SERIAL):
                estimate = attempt(evaluator, core.choice(placement, unit))
                if estimate is not None and estimate.needed_bytes <= capacity_bytes:
                    found.append(estimate)
    return sorted(found, key=lambda each: each.order)


def runs_today(task: Task, choice: Choice) -> str | None:
    """Return why this version cannot run a choice, or None where it can."""
    try:
        validate(task.cluster, plan_of(task, choice), task.blocks)
    except PlanError as error:
        return str(error)
    return None


def runnable_axes() -> tuple[str, ...]:
    """Return the axes that this version's runtime takes, as the check of plans says."""
    tier = Tier(name="pair", size=2, bandwidth_bytes_per_s=1.0, latency_s=0.0)
    device = Device(name="any", memory_bytes=1.0, memory_bandwidth_bytes_per_s=1.0, peak_flops_per_s={"fp32": 1.0})
    cluster = Cluster(name="pair", device=device, tiers=(tier,))
    found = []
    for axis in AXES:
        plan = Plan(params="device", grads="device", optimizer="device", mapping={"pair": {axis: 2}})
        with suppress(PlanError):
            validate(cluster, plan, ())
            found.append(axis)
    return tuple(found)


def find(space: Space, count: int = 5, limit: int = 400) -> tuple[Found, Evaluator]:
    """Search a space on the memory of its cluster's device; the evaluator can say more about what was found."""
    evaluator = Evaluator(Bounds(Estimator(space.task)))
    return Search(space, evaluator, space.task.cluster.device.memory_bytes).run(count, limit), evaluator
