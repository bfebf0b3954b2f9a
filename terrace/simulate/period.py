"""The predicted period: the sum over its turns, each played alone as a steady repetition of its programs.

A step that follows an evaluation is therefore priced as one that follows a step: refreshes that a program leaves under
way are waited for at the next start of the same program. Programs are played whole, however many micro-batches they
have.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from terrace.program.period import Period
from terrace.program.program import Program
from terrace.program.report import StepReport
from terrace.simulate.step import play_stages
from terrace.simulate.work import Work


@dataclass(frozen=True, kw_only=True)
class PeriodPrediction:
    """A steady period: `turns` has the reports of one run of each turn, by stage; `reports` those of the period."""

    period: Period
    turns: tuple[tuple[StepReport, ...], ...]
    reports: tuple[StepReport, ...]


def predict_period(period: Period, work: Work | Sequence[float]) -> PeriodPrediction:
    """Seconds, bytes and memory of a period, by stage; `work` as in `Step`.

    Raises `PlanError` when the plan and the work disagree.
    """
    known: dict[tuple[int, ...], tuple[StepReport, ...]] = {}
    turns = []
    for turn in period.turns:
        if turn.key not in known:
            known[turn.key] = tuple(map(Program.report, turn.programs, play_stages(turn.programs, work)[1]))
        turns.append(known[turn.key])
    reports = []
    for stage in range(period.num_stages):
        time_s = defaultdict[str, float](float)
        for turn, of_turn in zip(period.turns, turns, strict=True):
            for category, seconds in of_turn[stage].time_s.items():
                time_s[category] += turn.times * seconds
        sent, held = period.sent_bytes(stage), period.state_bytes(stage)
        reports.append(StepReport(time_s=dict(time_s), sent_bytes=sent, memory_bytes=held))
    return PeriodPrediction(period=period, turns=tuple(turns), reports=tuple(reports))
