"""The search: enumerate, price, play the best.

Candidates come in ascending price (terrace.planner.choices), with as much recomputation as they need to fit
(terrace.planner.fitting). They are played as programs (terrace.simulate.step) until `count` have been and no further
one is likely to be the fastest (`_Likely`); `limit` stops earlier. The played are ranked by their played seconds
(terrace.planner.ranking). A price is a few percent off a play, and tests/planner/test_regret.py plays whole small
spaces and measures by how much the best plan found is slower than the best there is.
"""

import math
from contextlib import suppress
from dataclasses import dataclass

from terrace.base.collection import no_collection
from terrace.base.errors import PlanError
from terrace.plan.search_limits import FINALISTS, MOST_PLAYED
from terrace.planner.choices import Choices, Level
from terrace.planner.evaluate import Evaluator
from terrace.planner.fitting import Fitting
from terrace.planner.patience import ENDLESS, Patience
from terrace.planner.ranking import Estimate, ranked
from terrace.planner.space import Space
from terrace.planner.task import check_searched

_MARGIN = 0.015  # part of the lowest price by which a plan's price may be higher and its step still the shortest
_NEAR = 0.002  # part of the best step by which a plan's must be shorter to be worth a play: twice a tie
_SEVERAL = 5  # plays tell by how much prices are too high at most
_ALIKE = 1.1  # steps that are longer by more than this miss something that other plans need not miss
_CHECKS = 20  # of memory, which take as long as a play
_MORE_CHECKS = 10  # times as many are made while nothing fits: some seconds, after which few plans are left unseen
_SURELY = 0.9  # part of the least price that a step takes at least


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best candidates, and how many were priced and played.

    The first `FINALISTS` of `best` do not depend on how many more were asked for.
    If nothing fits, `nearest` is the candidate that lacks the least memory of those that were looked at.
    """

    best: tuple[Estimate, ...]
    nearest: Estimate | None
    num_shapes: int  # meshes with open context forms, and micro-batches
    num_priced: int  # whole candidates
    num_played: int
    is_complete: bool  # whether the search ended before its limit


class _Likely:
    """The highest price with which a plan may still be the fastest, from those that were played."""

    def __init__(self) -> None:
        self.num = 0
        self._first_s = self._best_s = self._least_ratio = self.price_s = math.inf

    def add(self, price_s: float, step_s: float) -> None:
        self.num += 1
        self._first_s, self._best_s = min(self._first_s, price_s), min(self._best_s, step_s)
        self._least_ratio = min(self._least_ratio, step_s / price_s)
        # A first plan with too low a price does not end the search.
        self.price_s = max((1 + _MARGIN) * self._first_s, (1 - _MARGIN / 2) * self._best_s)
        if self.num >= _SEVERAL:
            self.price_s = min(self.price_s, (1 + _NEAR) * self._best_s / min(self._least_ratio, _ALIKE))


class Search:
    """One search of a space, for plans that fit in `capacity_bytes`."""

    def __init__(self, space: Space, evaluator: Evaluator, capacity_bytes: float) -> None:
        self.space, self.evaluator = space, evaluator
        self.fitting = Fitting(space, evaluator.estimator, evaluator.needed_bytes, capacity_bytes)
        self.choices = Choices(space, evaluator.prices, evaluator.floors, self.fitting)

    def run(self, count: int, limit: int, patience: Patience = ENDLESS) -> Found:
        """The `count` best candidates after at most `limit` plays. Raises `OutOfTimeError` after `patience`."""
        played, likely, is_complete, finalists = list[Estimate](), _Likely(), True, list[Estimate]()
        for entry in self.choices.by_price(patience):
            if entry.price_s > likely.price_s and len(played) >= min(count, FINALISTS):
                if not self.choices.are_plain:  # what margins have held back may be faster
                    self.choices.are_plain = True
                    continue
                if len(played) >= count:
                    break
                if len(played) >= FINALISTS and not finalists:  # those of a search that shows fewer
                    finalists = ranked(played)[:FINALISTS]
            checks = self.fitting.num_checked // (_CHECKS if played else _MORE_CHECKS * _CHECKS)
            if len(played) + checks >= limit:
                is_complete = False
                break
            if entry.level is not Level.FITTING:
                continue
            with suppress(PlanError):  # a rule that only a program shows
                estimate = self.evaluator.played(entry.candidate)
                if estimate.needed_bytes <= self.fitting.capacity_bytes:  # its blocks may be split in another way
                    played.append(estimate)
                    likely.add(entry.price_s, estimate.step_s)
        nearest = None
        if not played and (smallest := self.fitting.smallest()) is not None:
            with suppress(PlanError):  # as above
                nearest = self.evaluator.played(smallest)
            if nearest is not None and nearest.needed_bytes <= self.fitting.capacity_bytes:  # less than was estimated
                played, nearest = [nearest], None
        further = [each for each in ranked(played) if each not in finalists]
        return Found(
            best=(*finalists, *further)[:count],
            nearest=nearest,
            num_shapes=self.choices.num_shapes,
            num_priced=self.choices.num_priced,
            num_played=len(played),
            is_complete=is_complete,
        )

    def least_s(self) -> float:
        """A step that no plan of the space falls below; infinite for an empty space."""
        return _SURELY * min((entry.plain.price_s for entry in self.choices.groups()), default=math.inf)


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
