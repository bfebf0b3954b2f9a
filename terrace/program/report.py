"""StepReport: the cost of a step, predicted by the simulator or measured by the runtime."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from terrace.plan.wire import BY_BATCH, MessageClass

LEAST_STEPS = 10  # fewer say little about a steady step


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """Cost of one rank's step.

    `time_s` has the compute categories (forward, backward, update), the time spent waiting for messages by class (`wait
    gather`, ...) and `other`; it sums to the step time. `sent_bytes` is keyed by (message class, tier). `memory_bytes`
    is the peak of each category of model state, `load` the expert load statistics of the stage (terrace.program.loads),
    averaged over measured steps.
    """

    time_s: Mapping[str, float]
    sent_bytes: Mapping[tuple[MessageClass, str], int]
    memory_bytes: Mapping[str, int]
    load: Mapping[str, float] = field(default_factory=dict)

    @property
    def step_s(self) -> float:
        return sum(self.time_s.values())


def together(report: StepReport, *others: StepReport) -> StepReport:
    """A step with what runs beside it: sums of seconds, bytes and peaks, by category."""
    if not others:
        return report
    time_s, sent, held = (
        {key: sum(getattr(each, name).get(key, 0) for each in (report, *others)) for key in keys}
        for name in ("time_s", "sent_bytes", "memory_bytes")
        for keys in [dict.fromkeys(key for each in (report, *others) for key in getattr(each, name))]
    )
    return replace(report, time_s=time_s, sent_bytes=sent, memory_bytes=held)


def with_beside(reports: Iterable[StepReport], beside: Sequence[StepReport]) -> tuple[StepReport, ...]:
    """Reports by stage with what runs before the step, if anything; its seconds are among theirs already."""
    pairs = zip_longest(reports, (replace(each, time_s={}) for each in beside))
    return tuple(together(own, *filter(None, (other,))) for own, other in pairs)


def times_beside(times_s: Iterable[Mapping[str, float]], beside: Sequence[StepReport]) -> tuple[dict[str, float], ...]:
    """Seconds by stage and category, with those of what runs before the step."""
    return tuple({**own, **each.time_s} for own, each in zip(times_s, beside, strict=True))


def plain(report: StepReport) -> dict[str, Any]:
    """The report as a dict of plain values; `read_plain` is the inverse."""
    sent = {f"{message.value}.{tier}": count for (message, tier), count in sorted(report.sent_bytes.items())}
    load = {"load": dict(report.load)} if report.load else {}
    return {"time_s": dict(report.time_s), "sent_bytes": sent, "memory_bytes": dict(report.memory_bytes), **load}


def read_plain(table: Mapping[str, Any]) -> StepReport:
    """Inverse of `plain`."""
    sent = {}
    for key, count in table["sent_bytes"].items():
        message, _, tier = key.partition(".")
        sent[MessageClass(message), tier] = count
    load = table.get("load", {})
    return StepReport(time_s=table["time_s"], sent_bytes=sent, memory_bytes=table["memory_bytes"], load=load)


def declared_ahead(sent: Mapping[tuple[MessageClass, str], int]) -> dict[tuple[MessageClass, str], int]:
    """Bytes by message class and tier, without those of routed messages and rows, which depend on the batch."""
    return {key: size for key, size in sent.items() if key[0] not in BY_BATCH}


def why_no_verdict(num_timed: int, busy: str = "") -> str:
    """Why `num_timed` averaged steps allow no verdict on a prediction; "" if they do.

    `busy` says who else used the machine while its constants or the steps were measured; "" for nobody.
    """
    few = f"{num_timed} of at least {LEAST_STEPS} timed steps" if num_timed < LEAST_STEPS else ""
    return " and ".join(filter(None, (few, busy)))


def judged(error: float, limit: float, why_not: str = "", where: str = "") -> str:
    """The relative error of a prediction, and whether it is within its limit or why there is no verdict.

    A verdict needs enough timed steps, and a machine that was otherwise idle while its constants were measured and
    while steps were timed.
    """
    found = f"{100 * error:+.0f} %{where}"
    if why_not:
        return f"{found}; no verdict on its limit of {100 * limit:.0f} %: {why_not}"
    return f"{found}, {'within' if abs(error) <= limit else 'OUTSIDE'} its limit of {100 * limit:.0f} %"
