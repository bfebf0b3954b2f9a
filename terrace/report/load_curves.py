"""Curves of the load of experts over the steps of a run."""

from collections.abc import Callable, Sequence
from operator import attrgetter

from terrace.report.loads import LOAD_TITLE
from terrace.report.run_curves import Curve
from terrace.train.metrics import StepRecord

Line = Callable[[Callable[[StepRecord], float | None]], list[tuple[int, float]]]


def load_curves(records: Sequence[StepRecord], line: Line) -> list[Curve]:
    """Curves of expert load and dropped choices; `line(value)` returns the points of a value of each record."""
    curves = list[Curve]()
    if any(record.load for record in records):
        named = {"busiest expert": "busiest_expert", "busiest rank": "busiest_rank", "MaxVio": "max_vio"}
        lines = {words: line(lambda record, name=name: record.load.get(name)) for words, name in named.items()}  # type: ignore[misc]
        lines = {words: points for words, points in lines.items() if points}
        curves.append(Curve(title=LOAD_TITLE, unit="over the mean", lines=lines, smooth=True, from_zero=True))
    dropped = line(attrgetter("dropped"))
    if dropped:
        curves.append(Curve(title="Choices of experts dropped", unit="in a step", lines={"dropped": dropped}))
    return curves
