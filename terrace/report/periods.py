"""Table of a period for the terminal: its turns, their seconds and bytes, and a training step's share."""

from rich.table import Table

from terrace.program.report import StepReport
from terrace.report.tables import bytes_words, new_table, seconds
from terrace.simulate.period import PeriodPrediction


def period_table(predicted: PeriodPrediction, stage: int = 0) -> Table:
    """A row for each turn of a stage, per run; then the period, and its mean per training step, if it has any."""
    period = predicted.period
    tiers = period.turns[0].programs[stage].layout.tiers
    rows = [
        [turn.phase.value, str(turn.times), *_cells(reports[stage], tiers)]
        for turn, reports in zip(period.turns, predicted.turns, strict=True)
    ]
    whole = predicted.reports[stage]
    table = new_table(
        "a period: its programs in order",
        ("program", "runs", "seconds", *(f"sent on {tier}" for tier in tiers)),
        left=("program",),
        rows=rows,
        total=["period", "1", *_cells(whole, tiers)],
    )
    if period.num_steps:
        table.add_row("a step of it", "", *_cells(whole, tiers, period.num_steps))
    return table


def _cells(report: StepReport, tiers: tuple[str, ...], share: int = 1) -> list[str]:
    sent = (sum(size for (_, tier), size in report.sent_bytes.items() if tier == name) for name in tiers)
    return [seconds(report.step_s / share), *(bytes_words(round(size / share)) for size in sent)]
