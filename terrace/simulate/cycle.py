"""The predicted cycle of a plan with islands: its mean step, and how much of its exchanges is hidden.

A step of the cycle is the step that all commands show, with the exchange at its end (terrace.program.cycle). Steps are
played in sequence (terrace.simulate.carried), so an exchange in flight overlaps the steps that hide it.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from terrace.plan.outer import Outer
from terrace.plan.wire import MessageClass
from terrace.program.cycle import cycle
from terrace.program.instruction import Op
from terrace.program.period import Period, Turn
from terrace.program.program import Program
from terrace.simulate.carried import Times, play_period
from terrace.simulate.cost import Costs
from terrace.simulate.noting import WAIT_OUTER
from terrace.simulate.work import Work

_WAIT_PIPELINE = f"wait {MessageClass.PIPELINE.value}"
_ROUNDED = 1e-12  # part of a cycle by which sums of seconds differ in their last bits

Sent = Mapping[tuple[MessageClass, str], int]


@dataclass(frozen=True, kw_only=True)
class Cycle:
    """A steady cycle. `turns_s` has seconds by category, summed over all runs of each turn, by turn and stage.

    `plain_s` is the duration of a step without exchanges on the first stage.
    """

    period: Period
    costs: tuple[Costs, ...]
    turns_s: tuple[tuple[Times, ...], ...]
    plain_s: float
    unplayed: tuple[Times, ...] = ()  # of a step of each stage, where its programs are not whole

    @property
    def outer(self) -> Outer:
        return self.period.turns[0].programs[0].plan.outer

    @property
    def cycle_s(self) -> float:
        stages = zip(*self.turns_s, strict=True)
        return max(math.fsum(second for turn in stage for second in turn.values()) for stage in stages)

    @cached_property
    def mean_times_s(self) -> tuple[Times, ...]:
        """Seconds by category of the mean step, by stage.

        While the cycle is played, a stage with shorter exchanges may gain a lead on the others. All stages meet in
        every step, so the lead is charged as waiting.
        """
        found = []
        for stage in range(self.period.num_stages):
            total = defaultdict[str, float](float)
            for turn in self.turns_s:
                for category, seconds in turn[stage].items():
                    total[category] += seconds / self.outer.every
            lead_s = self.cycle_s / self.outer.every - math.fsum(total.values())
            if lead_s > _ROUNDED * self.cycle_s:
                total[_WAIT_PIPELINE] += lead_s
            found.append(dict(total))
        return tuple(found)

    def mean_bytes(self, steps: Sequence[Program], of_steps: Sequence[Sent]) -> tuple[Sent, ...]:
        """Bytes of the mean step by stage, rounded; `of_steps` are those of a step of `steps` without exchanges."""
        every, found = self.outer.every, []
        for stage, (step, of_step) in enumerate(zip(steps, of_steps, strict=True)):
            total = Counter({key: every * size for key, size in of_step.items()})
            for turn in self.period.turns:
                total.update({key: turn.times * size for key, size in turn.programs[stage].expected_bytes.items()})
            total.subtract({key: every * size for key, size in step.expected_bytes.items()})
            found.append({key: round(size / every) for key, size in total.items()})
        return tuple(found)

    @property
    def sent_bytes(self) -> Sent:
        """Bytes of exchanges per cycle, on the stage that sends most."""
        of_stages = map(self.period.sent_bytes, range(self.period.num_stages))
        found = [{key: size for key, size in each.items() if key[0] is MessageClass.OUTER} for each in of_stages]
        return max(found, key=lambda each: sum(each.values()))

    @cached_property
    def waiting_stage(self) -> int:
        """The stage that waits longest for exchanges."""
        return max(range(self.period.num_stages), key=lambda stage: self.mean_times_s[stage].get(WAIT_OUTER, 0.0))

    @property
    def waited_s(self) -> float:
        """Seconds per cycle that the most delayed stage waits for exchanges."""
        return max(self.outer.every * times.get(WAIT_OUTER, 0.0) for times in self.mean_times_s)

    @cached_property
    def exchange_s(self) -> float:
        """Message seconds of the longest exchange."""
        return max(map(max, self._lanes_s))

    @property
    def busy_s(self) -> float:
        """Seconds per cycle that exchanges occupy the link between islands: a lower bound of the cycle."""
        turns = zip(self.period.turns, self._lanes_s, strict=True)
        totals = ([turn.times * seconds for seconds in lanes_s] for turn, lanes_s in turns)
        return max(map(math.fsum, zip(*totals, strict=True)))

    @cached_property
    def _lanes_s(self) -> list[list[float]]:
        """Message seconds of the exchange at the end of each turn's steps, by turn and stage."""
        return [list(map(self._lane_s, self.costs, turn.programs)) for turn in self.period.turns]

    def _lane_s(self, costs: Costs, program: Program) -> float:
        return math.fsum(
            costs.of_stage(program, costs.update_s).collective_s(each) * times
            for each, times in program.counts.items()
            if each.op in (Op.OUTER_COUNT, Op.OUTER_START)
        )


def play_cycle(
    programs: Sequence[Program], work: Work | Sequence[float], costs: Sequence[Costs], times_s: Sequence[Times] | None
) -> Cycle:
    """The cycle of the training programs of all stages, with their costs; `work` as in `Step`.

    `times_s` are seconds of a whole step by stage, where it has more micro-batches than its programs.
    """
    period = cycle(programs)
    unplayed: list[Times] = []
    plain = Period((Turn(tuple(programs)),))
    (played,) = play_period(plain, work, costs)
    if times_s is not None:
        for whole, part in zip(times_s, played, strict=True):
            names = dict.fromkeys((*whole, *part))
            unplayed.append({name: whole.get(name, 0.0) - part.get(name, 0.0) for name in names})
    turns = play_period(period, work, costs, unplayed)
    return Cycle(
        period=period,
        costs=tuple(costs),
        turns_s=tuple(tuple(turn) for turn in turns),
        plain_s=sum((times_s or played)[0].values()),
        unplayed=tuple(unplayed),
    )
