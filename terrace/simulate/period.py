"""The predicted period: its programs played one after the other (terrace.simulate.carried).

Programs are played whole, however many micro-batches they have.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from terrace.program.period import Period
from terrace.program.report import StepReport
from terrace.simulate.carried import play_period
from terrace.simulate.work import Work


@dataclass(frozen=True, kw_only=True)
class PeriodPrediction:
    """A steady period: `turns` has the mean report of a run of each turn, by stage; `reports` those of the period."""

    period: Period
    turns: tuple[tuple[StepReport, ...], ...]
    reports: tuple[StepReport, ...]


def predict_period(period: Period, work: Work | Sequence[float]) -> PeriodPrediction:
    """Seconds, bytes and memory of a period, by stage; `work` as in `Step`.

    Raises `PlanError` when the plan and the work disagree.
    """
    played = play_period(period, work)
    turns = []
    for turn, by_stage in zip(period.turns, played, strict=True):
        means = ({name: seconds / turn.times for name, seconds in times.items()} for times in by_stage)
        turns.append(tuple(program.report(mean) for program, mean in zip(turn.programs, means, strict=True)))
    reports = []
    for stage in range(period.num_stages):
        time_s = defaultdict[str, float](float)
        for by_stage in played:
            for category, seconds in by_stage[stage].items():
                time_s[category] += seconds
        sent, held = period.sent_bytes(stage), period.state_bytes(stage)
        reports.append(StepReport(time_s=dict(time_s), sent_bytes=sent, memory_bytes=held))
    return PeriodPrediction(period=period, turns=tuple(turns), reports=tuple(reports))
