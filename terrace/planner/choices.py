"""Candidates of a space in ascending price, of which the numbers are chosen one by one.

At every level the closed price counts what is chosen, and what is dearest to count comes last:

    inside     the group of shapes: tensor ranks, stages, tokens of a micro-batch
    timed      with the bubble of the schedules
    divided    with a division of experts and messages of context ranks
    with states  with the least messages of states of the placements that may fit
    scheduled  with each schedule, and messages of experts in their chunks
    paced      with the schedule's own stages
    placed     with a placement, a unit and the least recomputation that seems to fit
    whole      with data and context ranks
    fitting    with as much recomputation as it needs

The cheapest so far is completed first, so most of a space never gets a whole price. Prices of open candidates have
margins for what is still to be chosen, so that fewer of them are opened; before a search ends they lose these, and what
is then cheap enough is opened, too.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from enum import IntEnum
from functools import partial
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from terrace.base.errors import PlanError
from terrace.planner.bubbles import in_flight
from terrace.planner.fitting import Fitting
from terrace.planner.floors import Exposed, Floors, least_exposed_s
from terrace.planner.group_price import Form, GroupPrices
from terrace.planner.parts import Counts, Work, work_of_runs
from terrace.planner.patience import ENDLESS, Patience
from terrace.planner.price import Pace, Prices
from terrace.planner.space import Group, Space, divided_groups, groups, passing_units, placements, recomputations, units
from terrace.planner.stages import SERIAL, has_halves
from terrace.planner.task import Candidate, Placement, num_micros
from terrace.program.schedules.registry import takes_unit

# A price grows with what is chosen later, on large clusters by a tenth to a half; part of that is added in advance,
# until a search would end (`Choices.are_plain`): where nothing is waited for, a price does not grow.
INSIDE = 1.1
_TIMED = 1.08
_WITH_STATES = 1.05
_PACED = 1.02
_NOWHERE = Placement(-1, -1, -1)
_Paces = dict[tuple[int, int], Pace]  # by recomputation and its number of first layers


class Level(IntEnum):
    OPEN = 0
    WHOLE = 1
    FITTING = 2


class Entry(NamedTuple):
    """A candidate, its price with the numbers that are chosen, and the entries with one more; sorts by price.

    Of an open one, the mesh is that of some shape of a group, and the price is the least of these.
    """

    price_s: float
    number: int  # in the order of the space, for equal prices
    level: Level
    candidate: Candidate
    further: Callable[[], Iterable["Entry"]]
    margin: float = 1.0  # by which the price was multiplied in advance

    @property
    def plain(self) -> "Entry":
        """The entry at its price without a margin."""
        return self._replace(price_s=self.price_s / self.margin, margin=1.0)


_Turns = list[tuple[float, Callable[[], Iterable[Entry]]]]  # the cheapest last


class Choices:
    def __init__(self, space: Space, prices: Prices, floors: Floors, fitting: Fitting) -> None:
        self.space, self.task = space, space.task
        self.prices, self.floors, self.fitting = prices, floors, fitting
        self.group_prices = GroupPrices(space, self.prices)
        self.num_shapes = self.num_priced = self._number = 0
        self.are_plain = False  # whether prices of open entries have no margins

    def by_price(self, patience: Patience = ENDLESS) -> Iterator[Entry]:
        """Entries of whole candidates in ascending price, and of those that fit."""
        heap, are_plain = list(self.groups()), False
        heapify(heap)
        while heap:
            patience.check()
            entry = heappop(heap)
            if entry.level is not Level.OPEN:
                yield entry
            if self.are_plain and not are_plain:  # the entry comes again, after what is cheaper without margins
                heap, are_plain = [each.plain for each in (*heap, entry)], True
                heapify(heap)
                continue
            for further in entry.further():
                heappush(heap, further.plain if are_plain else further)

    def _entry(
        self,
        price_s: float,
        candidate: Candidate,
        further: Callable[[], Iterable[Entry]],
        level: Level = Level.OPEN,
        margin: float = 1.0,
    ) -> Entry:
        self._number += 1
        return Entry(margin * price_s, self._number, level, candidate, further, margin)

    def _in_turn(self, candidate: Candidate, turns: _Turns, margin: float = 1.0) -> Iterator[Entry]:
        """The entries of each of the turns, which begin with the cheapest."""
        if turns:
            further = partial(self._next, candidate, turns, margin)
            yield self._entry(turns[-1][0], candidate, further, margin=margin)

    def _next(self, candidate: Candidate, turns: _Turns, margin: float) -> Iterator[Entry]:
        _, further = turns.pop()
        yield from further()
        yield from self._in_turn(candidate, turns, margin)

    def groups(self) -> Iterator[Entry]:
        for group in groups(self.space, by_tokens=self.prices.estimator.computes_by_tokens):
            self.num_shapes += len(group.alike)
            mesh, micro_batch = group.member.mesh, group.alike[0][1]
            candidate = Candidate(0, 1, "", 1, micro_batch, _NOWHERE, mesh)
            works = self.group_prices.works(group, candidate, context=False, exact=False)
            price_s = self.group_prices.least_s(group, works)
            yield self._entry(price_s, candidate, partial(self._timed, group, candidate, works), margin=INSIDE)

    def _timed(self, group: Group, candidate: Candidate, works: Sequence[Work]) -> Iterator[Entry]:
        price_s = self._least_s(group, works)
        if price_s < math.inf:
            yield self._entry(price_s, candidate, partial(self._divided, group, candidate), margin=_TIMED)

    def _least_s(self, group: Group, works: Sequence[Work]) -> float:
        return min([least.step_s for least in self.group_prices.least_of_each(group, works)], default=math.inf)

    def _divided(self, group: Group, candidate: Candidate) -> Iterator[Entry]:
        """The group with each division of its experts, and messages of context ranks."""
        for each in divided_groups(self.space, group) if group.shape.divides else (group,):
            found = candidate._replace(mesh=each.member.mesh)
            works = self.group_prices.works(each, found, exact=False)
            further = partial(self._with_states, each, found, works)
            yield self._entry(self._least_s(each, works), found, further, margin=_TIMED)

    def _with_states(self, group: Group, candidate: Candidate, works: Sequence[Work]) -> Iterator[Entry]:
        """The group, with the least messages of states of the placements that may fit."""
        stages = candidate.mesh.total("pipeline")
        possible = self._possible(candidate, tuple([(kind, count / stages) for kind, count in self.prices.whole]))
        if possible:
            price_s = self._least_exposing_s(group, works, possible)
            further = partial(self._scheduled, group, candidate, possible)
            yield self._entry(price_s, candidate, further, margin=_WITH_STATES)

    def _least_exposing_s(self, group: Group, works: Sequence[Work], possible: Sequence[Exposed]) -> float:
        """The least of the prices of `_exposing`."""
        least_s, unhidden_s = math.inf, possible[0].unhidden_s
        for each in sorted(self.group_prices.least_of_each(group, works), key=lambda least: least.step_s):
            if each.step_s + unhidden_s >= least_s:
                break
            hidden_s = each.forward_s, each.backward_s
            exposed_s = least_exposed_s(possible, *hidden_s, halves=has_halves(each.schedule))
            least_s = min(least_s, each.step_s + exposed_s)
        return least_s

    def _exposing(
        self, group: Group, works: Sequence[Work], possible: Sequence[Exposed]
    ) -> Iterator[tuple[float, str, int]]:
        """The least price of a group with each schedule, and its name and chunks."""
        for schedule, chunks, step_s, *hidden_s in self.group_prices.least_of_each(group, works):
            yield step_s + least_exposed_s(possible, *hidden_s, halves=has_halves(schedule)), schedule, chunks

    def _scheduled(self, group: Group, candidate: Candidate, possible: Sequence[Exposed]) -> Iterator[Entry]:
        for halves, named in self.group_prices.some_schedule(candidate.mesh.total("pipeline")):
            works = self.group_prices.works(group, candidate._replace(schedule=named))
            for price_s, schedule, chunks in self._exposing(group, works, possible):
                if has_halves(schedule) is not halves:
                    continue
                for unit in passing_units(self.space, group.num_micros) if takes_unit(schedule) else (1,):
                    found = candidate._replace(schedule=schedule, chunks=chunks, unit=unit)
                    further = partial(self._paced, group, found)
                    yield self._entry(price_s, found, further, margin=_WITH_STATES)

    def _possible(self, candidate: Candidate, counts: Counts, flying: float = 1.0) -> list[Exposed]:
        """The placements with which a first stage of `counts` may fit, with the most recomputation."""
        mesh, among = candidate.mesh, placements(self.space, candidate.mesh)
        recompute = recomputations(self.space, mesh)[-1]
        kept = flying * candidate.micro_batch * self.prices.memory.least_kept(mesh, counts, recompute)
        possible, least = list[Exposed](), (math.inf, _NOWHERE)
        for each in self.floors.of(mesh, among, counts):
            needed = self.prices.estimator.whole_bytes(each.state_bytes + kept)
            if self.fitting.may_fit(needed):
                possible.append(each)
            least = min(least, (needed, each.placement))
        if not possible and among:
            found = candidate._replace(recompute=recompute, placement=least[1])
            for schedule, chunks in self.group_prices.schedules(mesh.total("pipeline")):
                named = found if found.schedule else found._replace(schedule=schedule, chunks=chunks)
                self.fitting.remember(least[0], named)
        return possible

    def _paced(self, group: Group, candidate: Candidate) -> Iterator[Entry]:
        """The candidate with its own stages, for each placement in turn."""
        works = self.group_prices.works(group, candidate)
        with suppress(PlanError):  # numbers that the schedule does not take
            pace = self.prices.pace(candidate, works)
            paces = {(candidate.recompute, candidate.first): pace}
            turns: _Turns = [
                (pace.step_s + least_s, partial(self._placed, group, candidate._replace(placement=placement), paces))
                for least_s, placement in sorted(self._exposed(candidate, pace), reverse=True)
            ]
            yield from self._in_turn(candidate, turns, _PACED)

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

    def _placed(self, group: Group, candidate: Candidate, paces: _Paces) -> Iterator[Entry]:
        if takes_unit(candidate.schedule):
            each: Sequence[int] = (candidate.unit,)
        else:
            each = units(self.space, group.num_micros, candidate.placement, candidate.schedule != SERIAL)
        for unit in each:
            for found in self.fitting.recomputing(candidate._replace(unit=unit)):
                key = found.recompute, found.first
                if key not in paces:
                    paces[key] = self.prices.pace(found, self.group_prices.works(group, found))
                needed = self.prices.memory.whole_bytes(found, paces[key].cut)
                if self.fitting.may_fit(needed):
                    self.num_priced += 1
                    price_s = self.prices.placed_s(found, paces[key])
                    yield self._entry(price_s, found, partial(self._whole, group, found, price_s, needed))
                    break
                self.fitting.remember(needed, found)

    def _whole(self, group: Group, candidate: Candidate, price_s: float, needed: float) -> Iterator[Entry]:
        """The candidate with the data and context ranks of each shape in turn."""
        micros = group.num_micros
        turns: _Turns = [
            (price_s + micros * waits_s, partial(self._formed, group, candidate, needed, form))
            for waits_s, form in self.group_prices.forms(group)
        ]
        yield from self._in_turn(candidate, turns)

    def _formed(self, group: Group, candidate: Candidate, needed: float, form: Form) -> Iterator[Entry]:
        mesh = form.whole(group)
        if candidate.recompute in recomputations(self.space, mesh):
            found = candidate._replace(mesh=mesh, micro_batch=form.micro_batch)
            price_s = self.prices.step_s(found)
            yield self._entry(price_s, found, partial(self._fitting, found, price_s, needed), Level.WHOLE)

    def _fitting(self, candidate: Candidate, price_s: float, needed: float) -> Iterator[Entry]:
        """The candidate, or the one that recomputes as little more as it needs to fit."""
        found = self.fitting.fitting(candidate, needed)
        if found is not None:
            yield self._entry(price_s if found == candidate else self.prices.step_s(found), found, tuple, Level.FITTING)


def _shared(step_s: float, work: Work) -> tuple[float, float]:
    """The parts of a step in forwards and in backwards."""
    forward_s = step_s * work[0] / (work[0] + work[1])
    return forward_s, step_s - forward_s
