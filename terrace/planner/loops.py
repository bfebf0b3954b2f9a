"""The outer loop of a plan with islands: the least that hides the link between them.

Local steps and rounding change the training itself, so the search uses as little as possible. Among all loops within
the bounds whose mean step is at most `NEAR` longer than that of the fastest, it takes the smallest `every`; then the
smallest `delay`; then the widest format on the outer tier, and on inner tiers; then the fewest fragments. Every loop
is simulated as a whole cycle (terrace.simulate.cycle), so coding, the islands' compute and the slow-down by messages
all count.

A larger `every` spreads an exchange over more steps, a larger `delay` gives it more time, and neither makes a step
longer except for a copy of a slice. So the fastest loop has the largest of both, and each is found by bisection, once
per format and number of fragments. `tests/planner/test_loops.py` compares this with trying everything.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from terrace.base.errors import PlanError
from terrace.base.words import counted
from terrace.plan.outer import Outer
from terrace.plan.plan import Plan
from terrace.plan.wire import MessageClass
from terrace.plan.wire_rules import crossing
from terrace.planner.evaluate import Evaluator, step_of
from terrace.planner.formats import Allowed
from terrace.planner.outer_bounds import OuterBounds
from terrace.planner.pins import STATES, Pins
from terrace.planner.ranking import Estimate
from terrace.planner.task import Islands, Task
from terrace.simulate.cycle import Cycle
from terrace.simulate.step import Prediction, predict_step

NEAR = 0.03  # part of the fastest step by which the least may be longer: predictions are off by as much
_SLACK = 1 - 1e-9  # sums in another order may differ in their last bits
Row = tuple[tuple[str, str], ...]  # formats of exchanges by tier, where they are not the plan's own
Pair = tuple[Row, int]  # and the number of fragments


def island_task(task: Task, bounds: OuterBounds, rows: Sequence[Row]) -> Task:
    """The task of one island: a member of the outermost tier, with its share of the batch.

    Memory is counted with the largest loop of the bounds. Raises `PlanError` if there are no islands.
    """
    tier = task.cluster.tiers[-1]
    if tier.size == 1:
        raise PlanError(
            f"--outer: tier {tier.name!r} has one member, so there is one island; leave --outer out, or give --nodes"
        )
    if task.batch % tier.size:
        below = task.batch // tier.size * tier.size
        near = " or ".join(str(each) for each in (below, below + tier.size) if each)
        raise PlanError(
            f"--batch {task.batch} does not divide over the {counted(tier.size, 'island')} of tier {tier.name!r}: "
            f"use {near}"
        )
    fed_back = [row for row in rows if any(name.endswith("+feedback") for _, name in row)]
    islands = Islands(num=tier.size, outer=bounds.outer, formats=dict((fed_back or rows)[0]))
    # Islands wait for each other, so the slowest sets the pace.
    island = replace(task.cluster.resized(1), around=task.cluster.world_size)
    return replace(task, cluster=island, batch=task.batch // tier.size, islands=islands)


def island_pins(task: Task, pins: Pins) -> Pins:
    """The pins with all states inside an island. Raises `PlanError` for a state pinned outside."""
    ranges, last = dict(pins.ranges), len(task.cluster.tiers) - 1
    for name in {*STATES, "params_backward"} & ranges.keys():
        low, high = ranges[name]
        if low >= last:
            raise PlanError(
                f"--pin {name}={task.cluster.tiers[-1].name}: with --outer every island keeps all states; pin a tier "
                "further in"
            )
        ranges[name] = (low, min(high, last - 1))
    return Pins(ranges, pins.schedule)


def rows_of(allowed: Allowed, tiers: Sequence[str]) -> list[Row]:
    """Formats of exchanges by tier, in order of preference: wide on the outermost tier first, then on inner ones."""
    choices = {tier: choice for (message, tier), choice in allowed.items() if message == MessageClass.OUTER.value}
    named = [tier for tier in reversed(tiers) if tier in choices]
    found = []
    for names in product(*(choices[tier].formats for tier in named)):
        pairs = zip(named, names, strict=True)
        found.append(tuple((tier, name) for tier, name in pairs if name != choices[tier].default))
    return found


@dataclass(frozen=True, kw_only=True)
class Loop:
    """The chosen loop: the task of all islands, their plan, its cost, its prediction and the predicted cycle.

    `fastest_s` is the mean step of the fastest loop within `bounds`, `num_played` the number of loops played.
    """

    task: Task
    bounds: OuterBounds
    plan: Plan
    estimate: Estimate
    prediction: Prediction
    cycle: Cycle
    fastest_s: float
    num_played: int


def least_loop(task: Task, estimate: Estimate, plan: Plan, bounds: OuterBounds, rows: Sequence[Row]) -> Loop:
    """The least loop within the bounds for `plan`, the plan of `estimate`; both, and `task`, are of one island.

    `rows` are the possible formats of exchanges, widest first. Raises `PlanError` if no loop can run.
    """
    return _Loops(task, estimate, plan, bounds, rows).least()


class _Loops:
    def __init__(self, task: Task, estimate: Estimate, plan: Plan, bounds: OuterBounds, rows: Sequence[Row]) -> None:
        self.task, self.islands, self.estimate, self.plan, self.bounds = task, task.islands, estimate, plan, bounds
        self.whole = replace(task, cluster=task.whole_cluster, batch=task.whole_batch, islands=Islands())
        self._played: dict[tuple[Outer, Row], Prediction | None] = {}
        self._busy_s: dict[Pair, float] = {}
        self._memory: dict[tuple[Row, bool], Mapping[str, int]] = {}
        self._error: PlanError | None = None
        low, high = bounds.fragments
        trained = sum(block.num_trainable > 0 for block in task.blocks)
        self.fragments = range(low, max(low, min(high, trained)) + 1)
        crossing_rows = dict.fromkeys(self._crossing(row) for row in rows)
        # A wider format takes precedence over fewer fragments.
        self.pairs = [(row, number) for row in crossing_rows for number in self.fragments if self._everies(number)]
        self.limit_s = math.inf

    def least(self) -> Loop:
        if not self.pairs:
            raise self._no_multiple()
        fastest_s = min(self._least_s(pair, self._everies(pair[1])[-1]) for pair in self.pairs)
        if fastest_s == math.inf:
            raise self._error or PlanError("--outer: with no loop of the bounds the plan fits; write delay=0")
        self.limit_s = (1 + NEAR) * fastest_s
        every = self._least_every()
        delay = self._least_delay(every)
        pairs = (pair for pair in self.pairs if every % pair[1] == 0)
        pair = next(pair for pair in pairs if self._is_near(pair, every, delay))
        return self._loop(self.bounds.loop(every, delay, pair[1]), pair[0], fastest_s)

    def _no_multiple(self) -> PlanError:
        (first, high), delay, numbers = self.bounds.every, self.bounds.delay[0], self.fragments
        low = max(first, delay)
        below = max((low - 1) // number * number for number in numbers)
        above = min((high // number + 1) * number for number in numbers)
        near = " or ".join(f"every={each}" for each in (below, above) if each >= max(1, delay))
        why = f", since delay is at least {delay}" if delay > first else ""
        return PlanError(
            f"--outer: every ({_span(low, high)}{why}) is no multiple of fragments ({_span(numbers[0], numbers[-1])}): "
            f"use {near}"
        )

    def _least_every(self) -> int:
        found = self.bounds.every[1] + 1
        for pair in self.pairs:
            options = [each for each in self._everies(pair[1]) if each < found]
            near = _first(options, partial(self._is_near_somehow, pair))
            found = found if near is None else near
        assert found <= self.bounds.every[1], "the fastest loop is one of them"
        return found

    def _least_delay(self, every: int) -> int:
        low, found = self.bounds.delay[0], min(self.bounds.delay[1], every) + 1
        for pair in self.pairs:
            if every % pair[1] or low >= found:
                continue
            if self._is_near(pair, every, low):
                return low
            options = range(low + 1, found)
            near = _first(options, partial(self._is_near, pair, every))
            found = found if near is None else near
        return found

    def _everies(self, fragments: int) -> range:
        low = max(self.bounds.every[0], self.bounds.delay[0])
        return range(-(-low // fragments) * fragments, self.bounds.every[1] + 1, fragments)

    def _delays(self, every: int) -> tuple[int, int]:
        # The fastest of these has either the most time, or no copies of changes in flight.
        return min(self.bounds.delay[1], every), self.bounds.delay[0]

    def _least_s(self, pair: Pair, every: int) -> float:
        return min(self._step_s(pair, every, delay) for delay in self._delays(every))

    def _is_near_somehow(self, pair: Pair, every: int) -> bool:
        return any(self._is_near(pair, every, delay) for delay in self._delays(every))

    def _is_near(self, pair: Pair, every: int, delay: int) -> bool:
        # The link carries every exchange of a cycle, hidden or not. A loop that was played is known exactly.
        played = (self.bounds.loop(every, delay, pair[1]), pair[0]) in self._played
        if not played and _SLACK * self._busy_s.get(pair, 0.0) / every > self.limit_s:
            return False
        return self._step_s(pair, every, delay) <= self.limit_s

    def _step_s(self, pair: Pair, every: int, delay: int) -> float:
        row, fragments = pair
        found = self._predicted(self.bounds.loop(every, delay, fragments), row)
        if found is None or found.cycle is None:
            return math.inf
        self._busy_s[pair] = found.cycle.busy_s
        return found.step_s

    def _predicted(self, outer: Outer, row: Row) -> Prediction | None:
        """Prediction of a loop; None if it breaks a rule or does not fit."""
        if (outer, row) not in self._played:
            self._played[outer, row] = None
            try:
                if sum(self._memory_bytes(outer, row).values()) <= self.task.cluster.device.usable_bytes:
                    self._played[outer, row] = predict_step(step_of(self.whole, self._joined(outer, row)))
            except PlanError as error:
                self._error = error
        return self._played[outer, row]

    def _memory_bytes(self, outer: Outer, row: Row) -> Mapping[str, int]:
        key = row, outer.delay > 0  # of a loop's numbers, memory depends on no other
        if key not in self._memory:
            task = replace(self.task, islands=replace(self.islands, outer=outer, formats=dict(row)))
            self._memory[key] = Evaluator(task).played(self.estimate.candidate).memory_bytes
        return self._memory[key]

    def _joined(self, outer: Outer, row: Row) -> Plan:
        return replace(self.islands, outer=outer, formats=dict(row)).joined(self.plan)

    def _crossing(self, row: Row) -> Row:
        plan = crossing(self.whole.cluster, self._joined(self.bounds.outer, row))
        return tuple(plan.wire.get(MessageClass.OUTER.value, {}).items())

    def _loop(self, outer: Outer, row: Row, fastest_s: float) -> Loop:
        found = self._predicted(outer, row)
        assert found is not None, "a loop that was refused is not near"
        assert found.cycle is not None, "the plan has islands"
        sent = max(found.expected_bytes, key=lambda each: sum(each.values()))
        estimate = replace(
            self.estimate,
            step_s=found.step_s,
            time_s=found.times_s[found.busiest],
            memory_bytes=self._memory_bytes(outer, row),
            sent_bytes={(message.value, tier): size for (message, tier), size in sent.items()},
        )
        return Loop(
            task=self.whole,
            bounds=self.bounds,
            plan=self._joined(outer, row),
            estimate=estimate,
            prediction=found,
            cycle=found.cycle,
            fastest_s=fastest_s,
            num_played=len(self._played),
        )


def _span(low: int, high: int) -> str:
    return str(low) if low == high else f"{low} to {high}"


def _first(options: Sequence[int], holds: Callable[[int], bool]) -> int | None:
    """The first option that holds, if all later ones hold too; None if the last does not."""
    if not options or not holds(options[-1]):
        return None
    before, found = -1, len(options) - 1
    while found - before > 1:
        middle = (before + found) // 2
        if holds(options[middle]):
            found = middle
        else:
            before = middle
    return options[found]
