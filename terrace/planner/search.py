"""Best-first search by lower bounds; candidates bounded above the best found are never evaluated.

1. Shapes (mapping tables) with the same tensor ranks and stages, each with the micro-batch that gives a rank the same
   number of tokens, form a group: for any data and context ranks they compute equally long, or longer with context
   messages. A group gets one bound: on its compute, then with its potentially fastest schedule, then with the messages
   of data ranks. If its shapes may divide stacks, the group is then split into groups of one division each, which
   are bounded again in this way, with the routed messages on the busiest lane, and finally with the chunks in which
   tokens travel, each time along the critical paths of orders (terrace.planner.paths).
2. The group with the lowest bound is opened: members that do not fit with all states sharded as far as possible are
   dropped, the messages of context ranks are counted, each schedule gets a bound, then the bound with its cheapest
   placement, then each of the shape's context forms likewise.
3. Next its orders are played, and every placement and unit gets its own bounds on time and memory.
4. Finally it is evaluated: its step is built and simulated.

Bounds never exceed the evaluation, so the `count` best are known once `count` evaluations lie below every remaining
bound: the result equals an evaluation of the whole space (checked by tests/planner/test_planner.py and
tests/planner/test_groups.py). `limit` stops earlier; `Found.least_s` is then a lower bound on everything left. The
search is deterministic; practically equal candidates are ordered by `terrace.planner.ranking`.
"""

import heapq
import math
from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from itertools import islice

from terrace.base.collection import no_collection
from terrace.base.errors import PlanError
from terrace.plan.layout import DEVICE
from terrace.plan.mesh import Mesh
from terrace.planner.bound import Bounds, Excess
from terrace.planner.candidate import SLACK, PartialCandidate
from terrace.planner.chains import Choices
from terrace.planner.estimate import Estimator
from terrace.planner.evaluate import Evaluator
from terrace.planner.least_recomputation import Needs, recomputations
from terrace.planner.patience import ENDLESS, Patience
from terrace.planner.ranking import Estimate, Window, ranked, window
from terrace.planner.schedule_pins import schedules
from terrace.planner.space import (
    Group,
    OpenMesh,
    Space,
    closed,
    context_forms,
    divided_groups,
    groups,
    passing_units,
    placements,
    units,
)
from terrace.planner.spans import Span
from terrace.planner.stages import has_halves
from terrace.planner.task import Candidate, Placement, check_searched
from terrace.planner.ties import FINALISTS
from terrace.program.schedules.registry import takes_unit


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best candidates and statistics of the search.

    `least_s` bounds everything that was not evaluated (infinite if nothing is left). If nothing fits, `nearest` is the
    candidate that lacks the least memory.
    """

    best: tuple[Estimate, ...]
    nearest: Estimate | None
    num_roots: int  # shapes and micro-batches, with and without recomputation
    num_opened: int  # of these, with a bound of their own
    num_played: int  # pipelines whose orders were played
    num_evaluated: int
    least_s: float
    proved: bool  # whether no other candidate of the space can be better


class Level(IntEnum):
    """Stage of refinement of a search entry."""

    GROUP = 0  # computing and stages alone, over all schedules
    SCHEDULED = 1  # a group, with the schedule that may be fastest
    CHAINED = 2  # and the messages of data ranks
    CHUNKED = 3  # and the chunks in which routed tokens travel
    ROOT = 4  # a shape and micro-batch, with the messages of context ranks
    CORE = 5  # with a schedule: the bound in closed form
    CHEAPEST = 6  # with the messages of its cheapest placement
    PLACED = 7  # a whole candidate


# Bound, level, tie break, group or candidate, placement, unit; then the entries that follow this one in ascending
# order. Each enters the heap when the one before it leaves, since most of a search's entries are never reached.
Entry = tuple[float, Level, tuple[object, ...], Group | PartialCandidate, Placement, int, "Iterator[Entry]"]
_CHECKS = 10  # of memory, which take as long as an evaluation
_NOWHERE = Placement(DEVICE, DEVICE, DEVICE)  # of an entry without placement
_NONE: Iterator[Entry] = iter(())  # follow an entry that is alone


class Search:
    def __init__(self, space: Space, evaluator: Evaluator, capacity_bytes: float) -> None:
        self.space, self.evaluator, self.capacity_bytes = space, evaluator, capacity_bytes
        self.bounds, self.needs = evaluator.bounds, Needs(space, evaluator, capacity_bytes)
        self._smallest: tuple[float, Candidate] | None = None
        self._schedules: dict[int, list[tuple[str, int]]] = {}
        self._num_roots = self._num_opened = self._num_played = 0
        self._spans: dict[tuple[object, ...], list[Span]] = {}  # of groups on level `SCHEDULED`
        self._excesses: dict[tuple[object, ...], list[Excess]] = {}
        self._delayed: dict[tuple[object, ...], list[Excess]] = {}
        self._known_choices: dict[tuple[tuple[int, ...], bool | int], Choices] = {}

    def run(self, count: int = 5, limit: int = 400, patience: Patience = ENDLESS) -> Found:
        """The `count` best candidates after at most `limit` evaluations. Raises `OutOfTimeError` after `patience`."""
        heap = list(self._groups())
        heapq.heapify(heap)
        tried = checked = 0
        fitting: list[Estimate] = []  # in ascending order of time
        open_window = window(fitting, count)
        while heap and heap[0][0] <= open_window.end_s and tried + checked // _CHECKS < limit:
            patience.check()
            entry = heapq.heappop(heap)
            # More recomputation is never faster, so it is added only when the bound of a group is final.
            for following in islice(entry[6], entry[1] not in (Level.GROUP, Level.SCHEDULED)):
                heapq.heappush(heap, (max(entry[0], following[0]), *following[1:]))
            # Any other entry is refined, and its parts return to the heap with bounds no lower than its own.
            if entry[1] is not Level.PLACED:
                for further in self._opened(entry):
                    heapq.heappush(heap, further)
                continue
            if self._is_worse(entry, open_window):
                continue
            core, placement, unit = entry[3:6]
            assert isinstance(core, PartialCandidate), "a group has no placement"
            if self.needs.are_less(core, placement, unit):
                continue
            if self.needs.are_open(core):
                if first := self.needs.first(core, placement, unit):
                    partly = self.bounds.partly(core, first)
                    bound_s = max(entry[0], self.bounds.placed_s(partly, placement, unit))
                    tie_break = (*partly.key, placement, unit)
                    heapq.heappush(heap, (bound_s, Level.PLACED, tie_break, partly, placement, unit, _NONE))
                continue
            candidate = core.candidate(placement, unit)
            # Memory is known without a play, and separates candidates while few of them fit.
            if len(fitting) < count and not self._has_memory(candidate):
                checked += 1
                continue
            tried += 1
            estimate = attempt(self.evaluator, candidate, open_window.end_s)
            if estimate is not None and self._has_room(estimate.needed_bytes, partial(core.candidate, placement, unit)):
                # The window shrinks as better candidates are found, and ends the search once no bound lies within it.
                insort(fitting, estimate, key=lambda each: each.step_s)
                open_window = window(fitting, count)
        nearest = None if fitting or self._smallest is None else attempt(self.evaluator, self._smallest[1])
        best, least_s = ranked(fitting)[:count], heap[0][0] if heap else math.inf
        return Found(
            best=tuple(best),
            nearest=nearest,
            num_roots=self._num_roots,
            num_opened=self._num_opened,
            num_played=self._num_played,
            num_evaluated=tried,
            least_s=least_s,
            proved=not heap or (bool(best) and window(fitting, len(best)).end_s < least_s),
        )

    def _is_worse(self, entry: Entry, open_window: Window) -> bool:
        bound_s, _, _, core, placement, unit, _ = entry
        assert isinstance(core, PartialCandidate), "a group has no placement"
        # It may still lead a group. A slower candidate only matters if it is simpler than the worst of its group.
        if bound_s <= open_window.leader_s:
            return False
        return (core.recompute, self.bounds.least_bytes(core, placement, unit)) > open_window.worst

    def _groups(self) -> Iterator[Entry]:
        for group in groups(self.space, by_tokens=self.evaluator.estimator.computes_by_tokens):
            again = recomputations(self.space, group.shape.mesh)
            self._num_roots += len(group.alike) * len(again)
            # Recomputation takes longer, so most groups with it never need a bound.
            yield from islice(self._bounded([group._replace(recompute=each) for each in again]), 1)

    def _bounded(self, found: Sequence[Group]) -> Iterator[Entry]:
        following = self._bounded(found[1:])
        for group in found[:1]:
            yield self.bounds.group_s(group), Level.GROUP, group.key, group, _NOWHERE, 0, following

    def _opened(self, entry: Entry) -> Iterator[Entry]:
        bound_s, level, _, core, _, _, following = entry
        if isinstance(core, Group):
            yield from self._opened_group(bound_s, level, core, following)
        elif level is Level.ROOT:
            yield from islice(self._cores(bound_s, core), 1)
        elif level is Level.CORE and not core.played:
            # A schedule may reject these numbers; then there is nothing to open.
            with suppress(PlanError):
                core = self.bounds.tightened(core)
                # The first has the shortest messages: a bound over all placements, before any order is played.
                for excess_s, _, _ in self._placed(core)[:1]:
                    at_least_s = self.bounds.least_s(core, excess_s)
                    yield max(bound_s, at_least_s), Level.CHEAPEST, core.key, core, _NOWHERE, 0, _NONE
        elif core.shape.is_open:
            for further in self._closed(core):
                yield max(bound_s, further.bound_s), Level.CORE, further.key, further, _NOWHERE, 0, _NONE
        else:
            yield from self._all_placed(bound_s, core)

    def _opened_group(self, bound_s: float, level: Level, group: Group, following: Iterator[Entry]) -> Iterator[Entry]:
        if level is Level.CHUNKED or (level is Level.CHAINED and not self.space.task.divides_stacks):
            for root in self._members(group):
                yield max(bound_s, root.bound_s), Level.ROOT, root.key, root, _NOWHERE, 0, _NONE
        elif level is Level.CHAINED and group.shape.divides:
            for each in divided_groups(self.space, group):
                yield max(bound_s, self.bounds.group_s(each)), Level.GROUP, each.key, each, _NOWHERE, 0, _NONE
        elif level is Level.CHAINED:
            each_s = self._chained_s(group, self._group_spans(group, exact=True), exact=True)
            yield max(bound_s, each_s), Level.CHUNKED, group.key, group, _NOWHERE, 0, _NONE
        elif level is Level.SCHEDULED:
            each_s = self._chained_s(group, self._spans.pop(group.key))
            yield max(bound_s, each_s), Level.CHAINED, group.key, group, _NOWHERE, 0, following
        elif spans := self._group_spans(group):  # else no schedule takes its numbers
            self._spans[group.key] = spans
            each_s = min(span.span_s for span in spans) * SLACK
            yield max(bound_s, each_s), Level.SCHEDULED, group.key, group, _NOWHERE, 0, following

    def _group_spans(self, group: Group, *, exact: bool = False) -> list[Span]:
        schedules = self._schedules_of(group.shape.mesh.total("pipeline"))
        return self.bounds.group_spans(group, schedules, exact=exact)

    def _chained_s(self, group: Group, spans: list[Span], *, exact: bool = False) -> float:
        choices = self._choices(group.member.mesh, group.num_micros)
        return self.bounds.group_along_s(group, spans, choices, exact=exact) * SLACK

    def _choices(self, mesh: Mesh, num_micros: int) -> Choices:
        pipelined = mesh.total("pipeline") > 1
        # In a pipeline, units do not depend on the number of micro-batches.
        key = mesh.state, pipelined or num_micros
        found = self._known_choices.get(key)
        if found is None:
            each = ((place, units(self.space, num_micros, place, pipelined)) for place in placements(self.space, mesh))
            found = self._known_choices[key] = tuple([(place, longest[-1]) for place, longest in each if longest])
        return found

    def _members(self, group: Group) -> Iterator[PartialCandidate]:
        for shape, micro_batch in group.members:
            if group.recompute and group.recompute not in recomputations(self.space, shape.mesh):
                continue
            outline = self.bounds.outline(shape, micro_batch, group.recompute)
            if self._fits_somewhere(outline, placements(self.space, shape.mesh)[::-1]):
                self._num_opened += 1
                yield self.bounds.bounded(outline)

    def _cores(self, bound_s: float, root: PartialCandidate) -> Iterator[Entry]:
        spans = self.bounds.spans(root, self._schedules_of(root.sizes.num_stages))
        each_s = self.bounds.root_scheduled_s(root, spans, self._fitting(root))
        found = iter(sorted((max(bound_s, own_s * SLACK), span) for own_s, span in zip(each_s, spans, strict=True)))

        def following() -> Iterator[Entry]:
            for core_s, span in found:
                for core in in_units(self.space, self.bounds.spanning(root, span)):
                    yield core_s, Level.CORE, core.key, core, _NOWHERE, 0, entries

        entries = following()
        return entries

    def _all_placed(self, bound_s: float, core: PartialCandidate) -> Iterator[Entry]:
        played = core if core.played else self._played(core)
        if played is None:
            return
        for excess_s, placement, unit in self._placed(played):
            if self._fits(played, placement, unit):
                placed_s = max(bound_s, self.bounds.least_s(played, excess_s))
                if self.needs.are_open(played):
                    first = self.needs.least_first(played, placement, unit)
                    if first is None:
                        continue
                    placed_s = max(placed_s, self.bounds.placed_s(self.bounds.partly(played, first), placement, unit))
                yield placed_s, Level.PLACED, (*core.key, placement, unit), played, placement, unit, _NONE

    def _closed(self, core: PartialCandidate) -> Iterator[PartialCandidate]:
        places = placements(self.space, core.shape.mesh)[::-1]
        for mesh in context_forms(self.space, core.shape):
            root = self.bounds.root(OpenMesh(mesh), core.micro_batch, core.recompute)
            found = self.bounds.core(root, core.schedule, core.chunks) if self._fits_somewhere(root, places) else None
            if found is not None:
                yield found.passing(core.unit) if core.unit else found

    def _schedules_of(self, stages: int) -> list[tuple[str, int]]:
        if stages not in self._schedules:
            self._schedules[stages] = schedules(self.space, stages)
        return self._schedules[stages]

    def _played(self, core: PartialCandidate) -> PartialCandidate | None:
        staged = self.bounds.staged(core)
        # Memory is checked first, since playing the orders is the expensive step.
        if not any(self._fits(staged, placement, unit) for _, placement, unit in self._placed(staged)):
            return None
        self._num_played += 1
        return self.bounds.play(core)

    def _placed(self, core: PartialCandidate) -> list[Excess]:
        # `excess_s` reads only these of a core, so cores of one root with equal busiest stages share the list.
        halves = has_halves(core.schedule, core.shape.mesh)
        numbers = (core.unit, core.chunks if core.unit else 0, halves)
        key = (core.shape, core.micro_batch, core.recompute, core.heavy, *numbers)
        found = self._excesses.get(key)
        if found is None:
            root = self.bounds.root(core.shape, core.micro_batch, core.recompute)
            found = self._excesses[key] = sorted(
                (self.bounds.chains.excess_s(core, placement, unit), placement, unit)
                for placement in placements(self.space, core.shape.mesh)
                for unit in units_of(self.space, core, placement)
                if self._fits(root, placement, unit)
            )
        further = (*key, core.schedule, core.chunks)
        if further not in self._delayed:
            self._delayed[further] = self.bounds.delayed(core, found)
        return self._delayed[further]

    def _fitting(self, root: PartialCandidate) -> Choices:
        choices = self._choices(root.shape.mesh, root.num_micros)
        return tuple([each for each in choices if self._fits(root, each[0], 1)])

    def _fits_somewhere(self, root: PartialCandidate, places: Sequence[Placement]) -> bool:
        return any(self._fits(root, placement, 1) for placement in places)

    def _fits(self, core: PartialCandidate, placement: Placement, unit: int) -> bool:
        least = self.bounds.least_bytes(core, placement, unit)
        return least <= self.capacity_bytes or self._has_room(least, partial(self._whole, core, placement, unit))

    def _whole(self, core: PartialCandidate, placement: Placement, unit: int) -> Candidate:
        mesh = closed(self.space, core.shape)[0]
        return core._replace(shape=OpenMesh(mesh)).candidate(placement, unit)

    def _has_memory(self, candidate: Candidate) -> bool:
        # Broken rules of the schedule are found by the evaluation.
        with suppress(PlanError):
            return self._has_room(self.evaluator.needed_bytes(candidate), lambda: candidate)
        return True

    def _has_room(self, needed_bytes: float, candidate: Callable[[], Candidate]) -> bool:
        if needed_bytes <= self.capacity_bytes:
            return True
        # Remembered for the error message in case that nothing fits.
        if self._smallest is None or needed_bytes < self._smallest[0]:
            self._smallest = (needed_bytes, candidate())
        return False


def in_units(space: Space, core: PartialCandidate) -> Iterable[PartialCandidate]:
    """The core itself or, if its schedule passes chunks in units, one core per allowed unit."""
    if not takes_unit(core.schedule):
        return (core,)
    return [core.passing(unit) for unit in passing_units(space, core.num_micros)]


def units_of(space: Space, core: PartialCandidate, placement: Placement) -> tuple[int, ...]:
    """Possible units of a core with a placement."""
    pipelined = core.shape.mesh.total("pipeline") > 1
    return (core.unit,) if core.unit else units(space, core.num_micros, placement, pipelined)


def attempt(evaluator: Evaluator, candidate: Candidate, within_s: float = math.inf) -> Estimate | None:
    """The estimate; None if the step exceeds `within_s` or the candidate breaks a rule when it is built."""
    try:
        return None if evaluator.is_slower(candidate, within_s) else evaluator.evaluate(candidate)
    except PlanError:
        return None


def find(
    space: Space,
    count: int = 5,
    limit: int = 400,
    evaluator: Evaluator | None = None,
    capacity_bytes: float | None = None,
    patience: Patience = ENDLESS,
) -> tuple[Found, Evaluator]:
    """Search a space; also returns the evaluator for further queries. Memory defaults to that of the cluster's device.

    `Search` ranks by the orders of schedules; the best are then simulated as programs and sorted again, finalists
    separately from the rest, so that the finalists do not depend on `count`.
    """
    check_searched(space.task)
    evaluator = evaluator or Evaluator(Bounds(Estimator(space.task)))
    with no_collection():
        search = Search(space, evaluator, capacity_bytes or space.task.cluster.device.usable_bytes)
        found = search.run(count, limit, patience)
        # The programs may order nearly equal plans differently, so they are sorted again.
        played = [evaluator.played(each.candidate) for each in found.best]
        best = ranked(played[:FINALISTS]) + ranked(played[FINALISTS:])
    return replace(found, best=tuple(best)), evaluator
