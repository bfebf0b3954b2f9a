"""The search: best first by lower bounds, and no choice is evaluated whose bound is above what was found.

1. Every mapping table, micro-batch and recomputation gets the bound of its computing, one for all forms of its context
   ranks. What cannot fit with all states sharded as far as possible is dropped.
2. The best of these is taken up: each of its schedules gets a bound, then that of its cheapest placement, then each
   form of its context ranks the same.
3. The best of those is played, and every placement and unit of it gets its own bounds of time and of memory.
4. The best of those is evaluated: its step is built and played.

Bounds never exceed what the evaluation finds, so the `count` best are found when `count` evaluations lie below every
bound that is left: the answer is that of evaluating the whole space (tests/planner/test_planner.py does). `limit` stops
earlier; `Found.least_s` then says what nothing left can be faster than. Everything is deterministic; what is as good
as equally fast is ordered by `terrace.planner.ranking`.
"""

import gc
import heapq
import math
from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial

from terrace.base.errors import PlanError
from terrace.plan import validate
from terrace.plan.layout import DEVICE
from terrace.planner.bound import Bounds
from terrace.planner.candidate import PartialCandidate
from terrace.planner.estimate import Estimator
from terrace.planner.evaluate import Estimate, Evaluator
from terrace.planner.ranking import Window, ranked, window
from terrace.planner.space import (
    OpenMesh,
    Space,
    closed,
    meshes,
    micro_batches,
    open_meshes,
    passing_units,
    placements,
    units,
)
from terrace.planner.stages import ONLY_PINNED, SERIAL, traits
from terrace.planner.task import Choice, Placement, Task, plan_of
from terrace.program.schedules import takes_unit


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best choices, and how they were found.

    `least_s` is a bound for all that was not evaluated (infinite: nothing was left). `nearest` is, where nothing
    fits, the choice that lacks least memory.
    """

    best: tuple[Estimate, ...]
    nearest: Estimate | None
    num_roots: int
    num_played: int  # pipelines whose orders were played
    num_evaluated: int
    least_s: float
    proved: bool  # whether no other choice of the space can be better


class Level(IntEnum):
    """What is known of an entry of the search."""

    ROOT = 0  # no schedule yet
    CORE = 1  # the bound in closed form
    CHEAPEST = 2  # with the messages of its cheapest placement
    PLACED = 3  # a whole choice


Entry = tuple[float, Level, tuple[object, ...], PartialCandidate, Placement, int]
Excess = tuple[float, Placement, int]  # seconds beyond the computing, of a placement and a unit

_NOWHERE = Placement(DEVICE, DEVICE, DEVICE)  # of an entry without placement


class Search:
    """One search; `run` does it."""

    def __init__(self, space: Space, evaluator: Evaluator, capacity_bytes: float) -> None:
        self.space, self.evaluator, self.capacity_bytes = space, evaluator, capacity_bytes
        self.bounds = evaluator.bounds
        self._smallest: tuple[float, Choice] | None = None
        self._schedules: dict[int, list[tuple[str, int]]] = {}
        self._num_played = 0
        self._excesses: dict[tuple[object, ...], list[Excess]] = {}

    def run(self, count: int = 5, limit: int = 400) -> Found:
        """Return the `count` best choices, after at most `limit` evaluations."""
        heap: list[Entry] = [(core.bound_s, Level.ROOT, core.key, core, _NOWHERE, 0) for core in self._roots()]
        heapq.heapify(heap)
        num_roots, tried = len(heap), 0
        fitting: list[Estimate] = []  # in ascending order of time
        open_window = window(fitting, count)
        while heap and heap[0][0] <= open_window.end_s and tried < limit:
            entry = heapq.heappop(heap)
            if entry[1] is not Level.PLACED:
                for further in self._opened(entry):
                    heapq.heappush(heap, further)
                continue
            if self._is_worse(entry, open_window):
                continue
            tried += 1
            core, placement, unit = entry[3:]
            estimate = attempt(self.evaluator, core.choice(placement, unit))
            if estimate is not None and self._has_room(estimate.needed_bytes, partial(core.choice, placement, unit)):
                insort(fitting, estimate, key=lambda each: each.step_s)
                open_window = window(fitting, count)
        nearest = None if fitting or self._smallest is None else attempt(self.evaluator, self._smallest[1])
        best, least_s = ranked(fitting)[:count], heap[0][0] if heap else math.inf
        return Found(
            best=tuple(best),
            nearest=nearest,
            num_roots=num_roots,
            num_played=self._num_played,
            num_evaluated=tried,
            least_s=least_s,
            proved=not heap or (bool(best) and window(fitting, len(best)).end_s < least_s),
        )

    def _is_worse(self, entry: Entry, open_window: Window) -> bool:
        """Tell whether a choice can at best be as fast as enough others that are simpler."""
        bound_s, _, _, core, placement, unit = entry
        if bound_s <= open_window.leader_s:
            return False
        return (core.recompute, self.bounds.least_bytes(core, placement, unit)) > open_window.worst

    def _roots(self) -> Iterator[PartialCandidate]:
        """Yield the roots that may fit. Memory grows with the micro-batch, so the first that cannot ends a shape."""
        space = self.space
        for shape in open_meshes(space):
            places = placements(space, shape.mesh)[::-1]  # the one that shards most first
            for micro_batch in micro_batches(space, shape.mesh.total("data")):
                roots = roots_of(space, self.bounds, shape, micro_batch)
                fitting = [root for root in roots if self._fits_somewhere(root, places)]
                yield from fitting
                if not fitting:
                    break

    def _opened(self, entry: Entry) -> Iterator[Entry]:
        """Yield what an entry stands for, one level further."""
        bound_s, level, _, core, _, _ = entry
        if level is Level.ROOT:
            for open_core in self.bounds.cores(core, self._schedules_of(core.shape.mesh.total("pipeline"))):
                for further in in_units(self.space, open_core):
                    yield max(bound_s, further.bound_s), Level.CORE, further.key, further, _NOWHERE, 0
        elif level is Level.CORE and not core.played:
            for excess_s, _, _ in self._placed(core)[:1]:
                at_least_s = self.bounds.least_s(core, excess_s)
                yield max(bound_s, at_least_s), Level.CHEAPEST, core.key, core, _NOWHERE, 0
        elif core.shape.is_open:
            for further in self._closed(core):
                yield max(bound_s, further.bound_s), Level.CORE, further.key, further, _NOWHERE, 0
        else:
            with suppress(PlanError):
                chained = core if core.played else self.bounds.chained(core)
                if chained.span_s > core.span_s:
                    at_least_s = self.bounds.least_s(chained, self._placed(core)[0][0])
                    yield max(bound_s, at_least_s), Level.CHEAPEST, core.key, chained, _NOWHERE, 0
                    return
                yield from self._all_placed(bound_s, core)

    def _all_placed(self, bound_s: float, core: PartialCandidate) -> Iterator[Entry]:
        """Yield the whole choices of a core, which is played first; raises `PlanError` as the schedule does."""
        played = core if core.played else self._played(core)
        if played is None:
            return
        for excess_s, placement, unit in self._placed(played):
            if self._fits(played, placement, unit):
                placed_s = max(bound_s, self.bounds.least_s(played, excess_s))
                yield placed_s, Level.PLACED, (*core.key, placement, unit), played, placement, unit

    def _closed(self, core: PartialCandidate) -> Iterator[PartialCandidate]:
        """Yield a core of an open shape in every form that its context ranks can have."""
        places = placements(self.space, core.shape.mesh)[::-1]
        for mesh in closed(self.space, core.shape.mesh):
            root = self.bounds.root(OpenMesh(mesh), core.micro_batch, core.recompute)
            found = self.bounds.core(root, core.schedule, core.chunks) if self._fits_somewhere(root, places) else None
            if found is not None:
                yield found.passing(core.unit) if core.unit else found

    def _schedules_of(self, stages: int) -> list[tuple[str, int]]:
        if stages not in self._schedules:
            self._schedules[stages] = schedules(self.space, stages)
        return self._schedules[stages]

    def _played(self, core: PartialCandidate) -> PartialCandidate | None:
        """Return a core played, unless what its stages keep fits nowhere; raises `PlanError` as the schedule does."""
        staged = self.bounds.staged(core)
        if not any(self._fits(staged, placement, unit) for _, placement, unit in self._placed(staged)):
            return None
        self._num_played += 1
        return self.bounds.play(core)

    def _placed(self, core: PartialCandidate) -> list[Excess]:
        """Return the placements and units that may fit, those of the shortest messages first.

        They are those of the root, for all its cores whose busiest stages hold the same.
        """
        key = (core.shape, core.micro_batch, core.recompute, core.heavy, core.unit, core.chunks if core.unit else 0)
        found = self._excesses.get(key)
        if found is None:
            root = self.bounds.root(core.shape, core.micro_batch, core.recompute)
            found = self._excesses[key] = sorted(
                (self.bounds.excess_s(core, placement, unit), placement, unit)
                for placement in placements(self.space, core.shape.mesh)
                for unit in units_of(self.space, core, placement)
                if self._fits(root, placement, unit)
            )
        return found

    def _fits_somewhere(self, root: PartialCandidate, places: Sequence[Placement]) -> bool:
        return any(self._fits(root, placement, 1) for placement in places)

    def _fits(self, core: PartialCandidate, placement: Placement, unit: int) -> bool:
        least = self.bounds.least_bytes(core, placement, unit)
        return least <= self.capacity_bytes or self._has_room(least, partial(self._choice, core, placement, unit))

    def _choice(self, core: PartialCandidate, placement: Placement, unit: int) -> Choice:
        mesh = closed(self.space, core.shape.mesh)[0] if core.shape.is_open else core.shape.mesh
        return core._replace(shape=OpenMesh(mesh)).choice(placement, unit)

    def _has_room(self, needed_bytes: float, choice: Callable[[], Choice]) -> bool:
        if needed_bytes <= self.capacity_bytes:
            return True
        if self._smallest is None or needed_bytes < self._smallest[0]:
            self._smallest = (needed_bytes, choice())
        return False


def cores_of(space: Space, bounds: Bounds, shape: OpenMesh) -> Iterator[PartialCandidate]:
    """Yield every choice of a shape without placement and unit."""
    for micro_batch in micro_batches(space, shape.mesh.total("data")):
        for root in roots_of(space, bounds, shape, micro_batch):
            for schedule, chunks in schedules(space, shape.mesh.total("pipeline")):
                core = bounds.core(root, schedule, chunks)
                if core is not None:
                    yield from in_units(space, core)


def in_units(space: Space, core: PartialCandidate) -> Iterable[PartialCandidate]:
    """Return a core, or where its schedule passes chunks in units, what it is with each unit that is allowed."""
    if not takes_unit(core.schedule):
        return (core,)
    return [core.passing(unit) for unit in passing_units(space, core.num_micros)]


def units_of(space: Space, core: PartialCandidate, placement: Placement) -> tuple[int, ...]:
    """Return the units of a core at a placement."""
    pipelined = core.shape.mesh.total("pipeline") > 1
    return (core.unit,) if core.unit else units(space, core.num_micros, placement, pipelined)


def roots_of(space: Space, bounds: Bounds, shape: OpenMesh, micro_batch: int) -> list[PartialCandidate]:
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
    for core in (core for mesh in meshes(space) for core in cores_of(space, evaluator.bounds, OpenMesh(mesh))):
        for placement in placements(space, core.shape.mesh):
            for unit in units_of(space, core, placement):
                estimate = attempt(evaluator, core.choice(placement, unit))
                if estimate is not None and estimate.needed_bytes <= capacity_bytes:
                    found.append(estimate)
    return ranked(found)


def runs_today(task: Task, choice: Choice) -> str | None:
    """Return why a choice cannot be trained, or None where it can."""
    try:
        validate(task.cluster, plan_of(task, choice), task.blocks)
    except PlanError as error:
        return str(error)
    return None


def find(space: Space, count: int = 5, limit: int = 400) -> tuple[Found, Evaluator]:
    """Search a space on the memory of its cluster's device; the evaluator can say more about what was found.

    The best are played as programs and ordered by that. `Search` knows them by the orders of their schedules.
    """
    evaluator = Evaluator(Bounds(Estimator(space.task)))
    with _no_collection():
        found = Search(space, evaluator, space.task.cluster.device.memory_bytes).run(count, limit)
        best = ranked(evaluator.played(each.choice) for each in found.best)
    return replace(found, best=tuple(best)), evaluator


@contextmanager
def _no_collection() -> Iterator[None]:
    """Let the garbage collector rest: a search keeps nearly all that it makes, so looking for cycles finds nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
