"""The search: enumerate, price, play the best.

A plan is chosen number by number: tensor ranks, stages and tokens of a micro-batch (a group of shapes), the division
of experts, the schedule, placement with unit and recomputation, at last data and context ranks. At every level the
closed price (terrace.planner.price) counts what is chosen, so the cheapest so far is completed first, and most of a
space never gets a whole price.

Whole candidates leave this queue in ascending price. Those that fit in memory are played as programs
(terrace.simulate.step) until `count` have been and the next is dearer than the first by more than `MARGIN`, and not
cheaper than the best step that was played; `limit` stops earlier. The played are ranked by their played seconds
(terrace.planner.ranking). A price is a few percent off a play, and `MARGIN` covers that: tests/planner/test_regret.py
plays whole small spaces and measures by how much the best plan found is slower than the best there is.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from terrace.base.collection import no_collection
from terrace.base.errors import PlanError
from terrace.plan.mesh import Mesh
from terrace.planner.bubbles import in_flight
from terrace.planner.evaluate import Evaluator
from terrace.planner.floors import Counts, Exposed, least_exposed_s
from terrace.planner.parts import Work, work_of_runs
from terrace.planner.patience import ENDLESS, Patience
from terrace.planner.price import Pace, Schedules
from terrace.planner.ranking import Estimate, ranked
from terrace.planner.schedule_pins import schedules
from terrace.planner.space import (
    Group,
    Space,
    context_forms,
    divided_groups,
    groups,
    passing_units,
    placements,
    recomputations,
    units,
)
from terrace.planner.stages import SERIAL, has_halves
from terrace.planner.task import Candidate, Placement, check_searched, num_micros
from terrace.planner.ties import FINALISTS
from terrace.program.schedules.registry import takes_unit

MARGIN = 0.02  # part of the lowest price by which a plan's price may be higher and its step still the shortest
MOST_PLAYED = 24
_PARTS = 8  # of the layers, in which the number of recomputed first ones is estimated
_CHECKS = 10  # of memory, which take as long as a play
_SURELY = 0.9  # part of the estimated memory that a plan needs at least
_Left = list[tuple[float, Placement]]  # placements that are still to be priced, with the least prices
_Paces = dict[tuple[int, int], Pace]  # by recomputation and its number of first layers
_NOWHERE = Placement(-1, -1, -1)


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best candidates, and how many were priced and played.

    If nothing fits, `nearest` is the candidate that lacks the least memory of those that were looked at.
    """

    best: tuple[Estimate, ...]
    nearest: Estimate | None
    num_shapes: int  # meshes with open context forms, and micro-batches
    num_priced: int  # whole candidates
    num_played: int
    is_complete: bool  # whether the search ended before its limit


class Level(IntEnum):
    """What is chosen of a candidate."""

    GROUP = 0  # tensor ranks, stages, tokens of a micro-batch
    CONTEXT = 1  # the same, with the least messages of context ranks; and the division of experts
    SCHEDULED = 2
    PACED = 3  # the same, with the schedule's numbers
    PLACED = 4  # also with a unit and the least recomputation
    WHOLE = 5  # also with data and context ranks
    FITTING = 6  # with as much recomputation as it needs to fit in memory


class Entry(NamedTuple):
    """A candidate of which the numbers up to `level` are chosen, with the price of these; sorts by price.

    Below `WHOLE`, its mesh is that of some shape of `group`, and prices hold for the cheapest.
    """

    price_s: float
    level: Level
    number: int  # in the order of the space, for equal prices
    candidate: Candidate
    group: Group


class Search:
    """One search of a space, for plans that fit in `capacity_bytes`."""

    def __init__(self, space: Space, evaluator: Evaluator, capacity_bytes: float) -> None:
        self.space, self.evaluator, self.capacity_bytes = space, evaluator, capacity_bytes
        self.task, self.prices = space.task, evaluator.prices
        self.num_shapes = self.num_priced = 0
        self._smallest: tuple[float, Candidate] | None = None
        self._schedules: dict[int, tuple[tuple[str, int], ...]] = {}
        self._left: dict[int, tuple[_Left, _Paces]] = {}  # by numbers of entries
        self._number = self._num_checked = 0

    def run(self, count: int, limit: int, patience: Patience = ENDLESS) -> Found:
        """The `count` best candidates after at most `limit` plays. Raises `OutOfTimeError` after `patience`."""
        played, enough_s, is_complete = list[Estimate](), math.inf, True
        first_s = best_s = math.inf
        for entry in self.by_price(patience):
            if len(played) >= count and entry.price_s > enough_s:
                break
            # A check of memory takes a tenth of a play. While nothing fits, more of them are made.
            checks = self._num_checked // (_CHECKS if played else 10 * _CHECKS)
            if len(played) + checks >= limit:
                is_complete = False
                break
            if entry.level is not Level.FITTING:
                continue
            with suppress(PlanError):  # a rule that only a program shows
                estimate = self.evaluator.played(entry.candidate)
                if estimate.needed_bytes <= self.capacity_bytes:  # its blocks may be split in another way
                    played.append(estimate)
                    # A first plan with too low a price does not end the search.
                    first_s = min(first_s, entry.price_s)
                    best_s = min(best_s, estimate.step_s)
                    enough_s = max((1 + MARGIN) * first_s, (1 - MARGIN / 2) * best_s)
        nearest = None
        if not played and self._smallest is not None:
            nearest = self.evaluator.played(self._smallest[1])
            if nearest.needed_bytes <= self.capacity_bytes:  # less than was estimated
                played, nearest = [nearest], None
        return Found(
            best=tuple(ranked(played)[:count]),
            nearest=nearest,
            num_shapes=self.num_shapes,
            num_priced=self.num_priced,
            num_played=len(played),
            is_complete=is_complete,
        )

    def least_s(self) -> float:
        """A step that no plan of the space falls below; infinite for an empty space."""
        return _SURELY * min((entry.price_s for entry in self._groups()), default=math.inf)

    def by_price(self, patience: Patience = ENDLESS) -> Iterator[Entry]:
        """Whole candidates in ascending price; those of level `FITTING` fit in memory."""
        heap = list(self._groups())
        heapify(heap)
        while heap:
            patience.check()
            entry = heappop(heap)
            if entry.level >= Level.WHOLE:
                yield entry
            for further in self._further(entry):
                heappush(heap, further)

    def _entry(self, price_s: float, level: Level, candidate: Candidate, group: Group) -> Entry:
        self._number += 1
        return Entry(price_s, level, self._number, candidate, group)

    def _groups(self) -> Iterator[Entry]:
        for group in groups(self.space, by_tokens=self.prices.estimator.computes_by_tokens):
            self.num_shapes += len(group.alike)
            candidate, works = self._group(group, context=False)
            price_s = self._paced_s(candidate, group, works, self._schedules_of(candidate.mesh.total("pipeline")))
            yield self._entry(price_s, Level.GROUP, candidate, group)

    def _group(self, group: Group, *, context: bool) -> tuple[Candidate, list[Work]]:
        """A member of the group, and the least seconds of its blocks."""
        mesh, micro_batch = group.members[0][0].mesh, group.members[0][1]
        candidate = Candidate(0, 1, "", 1, micro_batch, _NOWHERE, mesh)
        return candidate, self.prices.of_group(self.space, group, candidate, context=context, exact=False)

    def _paced_s(self, candidate: Candidate, group: Group, works: Sequence[Work], among: Schedules) -> float:
        return self.prices.least_s(works, candidate.mesh.total("pipeline"), group.num_micros, among)

    def _in_context(self, group: Group) -> Iterator[Entry]:
        """The group with messages of context ranks and, once stacks are divided, the least messages of states."""
        candidate, works = self._group(group, context=True)
        mesh = candidate.mesh
        stages = mesh.total("pipeline")
        if group.shape.divides:
            price_s = self._paced_s(candidate, group, works, self._schedules_of(stages))
            yield self._entry(price_s, Level.CONTEXT, candidate, group)
            return
        least = self._least_by_schedule(candidate, group, works, self._schedules_of(stages))
        if least:
            yield self._entry(min(least)[0], Level.CONTEXT, candidate, group)

    def _least_by_schedule(
        self, candidate: Candidate, group: Group, works: Sequence[Work], among: Schedules
    ) -> list[tuple[float, str, int]]:
        """The least prices of schedules and their chunks, over placements that may fit."""
        possible = self._possible(candidate, self._mean_stage(candidate.mesh))
        found = list[tuple[float, str, int]]()
        if not possible:
            return found
        work, stages = work_of_runs(works, self.prices.whole), candidate.mesh.total("pipeline")
        least = self.prices.least_of_each(works, stages, group.num_micros, among)
        for (schedule, chunks), paced_s in zip(among, least, strict=True):
            if paced_s < math.inf:
                hidden, halves = _shared(paced_s, work), has_halves(schedule)
                exposed_s = least_exposed_s(possible, *hidden, halves=halves)
                found.append((paced_s + exposed_s, schedule, chunks))
        return found

    def _mean_stage(self, mesh: Mesh) -> Counts:
        stages = mesh.total("pipeline")
        return tuple([(kind, count / stages) for kind, count in self.prices.whole])

    def _possible(self, candidate: Candidate, counts: Counts, flying: float = 1.0) -> list[Exposed]:
        """The placements with which a first stage of `counts` may fit, with the most recomputation."""
        mesh, among = candidate.mesh, placements(self.space, candidate.mesh)
        recompute = recomputations(self.space, mesh)[-1]
        numel, stacks, kept = self.prices.least_held(mesh, counts, recompute)
        kept *= flying * candidate.micro_batch
        possible, least = list[Exposed](), (math.inf, _NOWHERE)
        for each in self.prices.floors.of(mesh, among, counts):
            held = numel * each.bytes_each[0] + stacks * each.bytes_each[1] + kept
            needed = _SURELY * self.prices.estimator.whole_bytes(held)
            if needed <= self.capacity_bytes:
                possible.append(each)
            least = min(least, (needed, each.placement))
        if not possible and among:
            found = candidate._replace(recompute=recompute, placement=least[1])
            for schedule, chunks in self._schedules_of(mesh.total("pipeline"))[:1]:
                self._remember(least[0], found if found.schedule else found._replace(schedule=schedule, chunks=chunks))
        return possible

    def _further(self, entry: Entry) -> Iterator[Entry]:
        if entry.level is Level.GROUP:
            yield from self._in_context(entry.group)
        elif entry.level is Level.CONTEXT:
            if entry.group.shape.divides:
                for each in divided_groups(self.space, entry.group):
                    yield from self._in_context(each)
            else:
                yield from self._scheduled(entry)
        elif entry.level is Level.SCHEDULED:
            yield from self._paced(entry)
        elif entry.level is Level.PACED:
            yield from self._placed(entry)
        elif entry.level is Level.PLACED:
            yield from self._whole(entry)
        elif entry.level is Level.WHOLE:
            yield from self._fitting(entry)

    def _schedules_of(self, stages: int) -> tuple[tuple[str, int], ...]:
        if stages not in self._schedules:
            self._schedules[stages] = tuple(schedules(self.space, stages))
        return self._schedules[stages]

    def _scheduled(self, entry: Entry) -> Iterator[Entry]:
        candidate, group = entry.candidate, entry.group
        for halves in (False, True):
            among = tuple(
                [each for each in self._schedules_of(candidate.mesh.total("pipeline")) if has_halves(each[0]) is halves]
            )
            if not among:
                continue
            works = self.prices.of_group(self.space, group, candidate._replace(schedule=among[0][0]))
            for least_s, schedule, chunks in self._least_by_schedule(candidate, group, works, among):
                for unit in passing_units(self.space, group.num_micros) if takes_unit(schedule) else (1,):
                    found = candidate._replace(schedule=schedule, chunks=chunks, unit=unit)
                    yield self._entry(max(least_s, entry.price_s), Level.SCHEDULED, found, group)

    def _paced(self, entry: Entry) -> Iterator[Entry]:
        found, works = entry.candidate, self.prices.of_group(self.space, entry.group, entry.candidate)
        with suppress(PlanError):  # numbers that the schedule does not take
            pace = self.prices.pace(found, works)
            # The cheapest is taken from the end.
            left = [(pace.step_s + least_s, placement) for least_s, placement in self._exposed(found, pace)]
            left.sort(reverse=True)
            yield from self._paced_again(entry, found, left, {(found.recompute, found.first): pace})

    def _paced_again(self, entry: Entry, candidate: Candidate, left: _Left, paces: _Paces) -> Iterator[Entry]:
        if left:
            found = self._entry(max(entry.price_s, left[-1][0]), Level.PACED, candidate, entry.group)
            self._left[found.number] = left, paces
            yield found

    def _exposed(self, candidate: Candidate, pace: Pace) -> list[tuple[float, Placement]]:
        """What each placement with which the candidate may fit exposes at least."""
        flying, halves = 1.0, has_halves(candidate.schedule)
        if candidate.schedule == SERIAL:
            hidden = _shared(pace.step_s, work_of_runs(pace.works, self.prices.whole))
        else:
            stages, micros = candidate.mesh.total("pipeline"), num_micros(self.task, candidate)
            flying = max(candidate.unit, in_flight(candidate.schedule, stages, candidate.chunks, micros))
            hidden = 0.0, 0.0
            for runs, before_s, after_s in zip(pace.cut.first, pace.before_s, pace.after_s, strict=True):
                own = work_of_runs(pace.works, runs)
                behind_s = own[2] if halves else own[1]
                hidden = (
                    max(hidden[0], before_s + candidate.unit * own[0]),
                    max(hidden[1], after_s + candidate.unit * behind_s),
                )
        possible = self._possible(candidate, pace.cut.stages[0][0], flying)
        return [(each.least_s(*hidden, halves=halves), each.placement) for each in possible]

    def _placed(self, entry: Entry) -> Iterator[Entry]:
        """The candidate with the next placement, and itself for those after it."""
        candidate, group, micros = entry.candidate, entry.group, entry.group.num_micros
        left, paces = self._left.pop(entry.number)
        _, placement = left.pop()
        if takes_unit(candidate.schedule):
            each: Sequence[int] = (candidate.unit,)
        else:
            each = units(self.space, micros, placement, candidate.schedule != SERIAL)
        for unit in each:
            placed = candidate._replace(placement=placement, unit=unit)
            for found in self._recomputing(placed):
                key = found.recompute, found.first
                if key not in paces:
                    works = self.prices.of_group(self.space, group, found)
                    paces[key] = self.prices.pace(found, works)
                least = _SURELY * self.prices.memory_bytes(found, paces[key])
                if least <= self.capacity_bytes:
                    self.num_priced += 1
                    price_s = self.prices.placed_s(found, paces[key])
                    yield self._entry(price_s, Level.PLACED, found, group)
                    break
                self._remember(least, found)
        yield from self._paced_again(entry, candidate, left, paces)

    def _recomputing(self, candidate: Candidate) -> Iterator[Candidate]:
        """The candidate with each recomputation, least first; of first layers, with a few numbers of them."""
        values = self.task.recomputations.values
        for value in recomputations(self.space, candidate.mesh):
            if not values[value].is_partial:
                yield candidate._replace(recompute=value)
                continue
            num = len(self.task.inner)
            for first in sorted({max(1, part * num // _PARTS) for part in range(1, _PARTS)} - {num}):
                yield candidate._replace(recompute=value, first=first)

    def _whole(self, entry: Entry) -> Iterator[Entry]:
        for shape, micro_batch in entry.group.members:
            for mesh in context_forms(self.space, shape):
                if entry.candidate.recompute not in recomputations(self.space, mesh):
                    continue
                found = entry.candidate._replace(mesh=mesh, micro_batch=micro_batch)
                yield self._entry(self.prices.step_s(found), Level.WHOLE, found, entry.group)

    def _fitting(self, entry: Entry) -> Iterator[Entry]:
        """The candidate, or the one that recomputes as little more as it needs to fit; nothing if none fits."""
        candidate, values = entry.candidate, self.task.recomputations.values
        chain = recomputations(self.space, candidate.mesh)
        for value in chain[chain.index(candidate.recompute) :]:
            found = candidate._replace(recompute=value, first=0)
            if values[value].is_partial:
                first = self._least_first(found)
                if first is None:
                    continue
                found = found._replace(first=first)
            elif not self._fits(found):
                continue
            price_s = entry.price_s if found == candidate else self.prices.step_s(found)
            yield self._entry(price_s, Level.FITTING, found, entry.group)
            return

    def _least_first(self, candidate: Candidate) -> int | None:
        """The fewest first layers to recompute with which a candidate fits; None if all are too few, or one more than
        too many.
        """
        enough = len(self.task.inner) - 1
        if enough < 1 or not self._fits(candidate._replace(first=enough)):
            return None
        numbers = range(1, enough + 1)
        return numbers[bisect_left(numbers, True, key=lambda first: self._fits(candidate._replace(first=first)))]

    def _fits(self, candidate: Candidate) -> bool:
        self._num_checked += 1
        try:
            needed = self.evaluator.needed_bytes(candidate)
        except PlanError:
            return False
        if needed > self.capacity_bytes:
            self._remember(needed, candidate)
        return needed <= self.capacity_bytes

    def _remember(self, needed_bytes: float, candidate: Candidate) -> None:
        if self._smallest is None or needed_bytes < self._smallest[0]:
            self._smallest = (needed_bytes, candidate)


def _shared(step_s: float, work: Work) -> tuple[float, float]:
    """The parts of a step in forwards and in backwards."""
    forward_s = step_s * work[0] / (work[0] + work[1])
    return forward_s, step_s - forward_s


def find(
    space: Space,
    count: int = FINALISTS,
    limit: int = MOST_PLAYED,
    evaluator: Evaluator | None = None,
    capacity_bytes: float | None = None,
    patience: Patience = ENDLESS,
) -> tuple[Found, Evaluator]:
    """Search a space; also returns the evaluator for further queries. Memory is by default that of a device."""
    check_searched(space.task)
    evaluator = evaluator or Evaluator(space.task)
    with no_collection():
        search = Search(space, evaluator, capacity_bytes or space.task.cluster.device.usable_bytes)
        return search.run(count, max(count, limit), patience), evaluator
