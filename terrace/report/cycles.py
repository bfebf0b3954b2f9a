"""The cycle of a plan with islands: steps by exchange, its timeline, and how far exchanges are hidden."""

import math
from collections.abc import Mapping, Sequence

from terrace.base.words import counted, longer, seconds
from terrace.plan.outer import NO_EXCHANGE, Exchange
from terrace.plan.wire import MessageClass
from terrace.planner.advice import Change, is_hidden, steps_of_exchange
from terrace.program.timeline import TimedSpan, Timeline, TimelineRow, Words
from terrace.report.learned import loop_learned
from terrace.report.sections import Section, timeline_chart
from terrace.report.table import Table
from terrace.report.tables import bytes_words, time_categories
from terrace.simulate.cycle import Cycle, Sent
from terrace.simulate.cycle_timeline import Crossing, CycleTimeline, Stretch, in_cycle
from terrace.simulate.noting import WAIT_OUTER

Measured = Sequence[Mapping[str, float]]  # mean seconds by category of each step of the cycle

_CAPTION = (
    "The first row has the steps of the cycle, the others the exchange of a fragment from its start to its arrival, "
    "grey where it is waited for. What reaches into the next cycle goes on at the left."
)


def cycle_table(cycle: Cycle) -> Table:
    """One row per turn: its steps, their exchange, seconds of a step, waits for exchanges, bytes between islands.

    Seconds are those of the stage that waits most for exchanges, bytes those of the stage that sends most.
    """
    rows, first = [], 1
    stage = cycle.waiting_stage
    for turn, times in zip(cycle.period.turns, cycle.turns_s, strict=True):
        last, own = first + turn.times - 1, times[stage]
        sent = max(_between(cycle, program.sent_bytes) for program in turn.programs)
        rows.append(
            [
                str(first) if last == first else f"{first} to {last}",
                _words(turn.programs[0].exchange),
                seconds(math.fsum(own.values()) / turn.times),
                seconds(own.get(WAIT_OUTER, 0.0) / turn.times),
                bytes_words(sent),
            ]
        )
        first = last + 1
    outer = cycle.outer
    return Table(
        title=f"the cycle of {counted(outer.every, 'step')}: islands exchange over tier {outer.tier}",
        headings=("steps", "at the end", "a step", "of it wait outer", "sent to islands"),
        left=("steps", "at the end"),
        rows=rows,
    )


def cycle_words(cycle: Cycle, hidden: Change | None) -> str:
    """Duration of an exchange, how far it is hidden, and `hidden`, the nearest cycle that hides it, if given."""
    outer, steps = cycle.outer, steps_of_exchange(cycle)
    behind = f"may hide behind {counted(outer.delay, 'step')}" if outer.delay else "is waited for at once"
    waited = f"waited for: {seconds(cycle.waited_s)} of the cycle's {seconds(cycle.cycle_s)}"
    lines = [
        f"an exchange takes {seconds(cycle.exchange_s)}, {steps:.3g} steps of {seconds(cycle.plain_s)}, and {behind}; "
        f"{'nothing is waited for' if is_hidden(cycle) else waited}",
        "local steps change what is learned: more of them, or a longer delay, is not the same training",
        loop_learned(outer, _formats(cycle)),
    ]
    if hidden is not None:
        gain = longer(hidden.step_s, cycle.cycle_s / outer.every)
        lines.insert(1, f"{hidden.words} hides it: step {seconds(hidden.step_s)}, {gain}")
    return "\n".join(lines)


def cycle_section(drawn: CycleTimeline, words: str, measured: Measured = ()) -> Section:
    """The timeline and `words` on it, and a comparison table if `measured` is given."""
    chart = timeline_chart(cycle_timeline_rows(drawn, measured), caption=_CAPTION, zooms=False)
    table = _compared(drawn, measured) if measured else None
    return Section(title="The cycle of islands", charts=[chart], table=table, words=words.split("\n"))


def cycle_timeline_rows(drawn: CycleTimeline, measured: Measured = ()) -> Timeline:
    """A row of steps and one of each fragment; below them the measured steps, if any, on the same time axis."""
    rows = [TimelineRow("steps", _steps(drawn.steps), "predicted" if measured else "")]
    for fragment in sorted({crossing.fragment for crossing in drawn.crossings}):
        spans = _crossings(drawn, fragment)
        rows.append(TimelineRow(f"fragment {fragment}", spans, rows[0].group, is_main=False))
    if measured:
        rows.append(TimelineRow("steps", _steps(measured), "measured in the mean"))
    end_s = max(span.end_s for row in rows for span in row.spans)
    return Timeline(title="The cycle of islands: steps, and exchanges on their link", rows=rows, end_s=end_s)


def _steps(steps: Measured) -> list[TimedSpan]:
    found, now_s = list[TimedSpan](), 0.0
    for number, times in enumerate(steps, 1):
        # Waits for exchanges are at the end of a step.
        names = [name for name in time_categories(times) if name != WAIT_OUTER]
        for name in (*names, WAIT_OUTER):
            spent_s = times.get(name, 0.0)
            if spent_s > 0.0:
                what = Words(f"step {number}: {name} {seconds(spent_s)}")
                found.append(TimedSpan(now_s, now_s + spent_s, name, what))
                now_s += spent_s
    return found


def _crossings(drawn: CycleTimeline, fragment: int) -> list[TimedSpan]:
    """The exchange of a fragment on its link, as waits where it is waited for."""
    found = list[TimedSpan]()
    for crossing in drawn.crossings:
        if crossing.fragment != fragment:
            continue
        what = Words(_crossing_words(crossing))
        for start_s, end_s in in_cycle(crossing.start_s, crossing.end_s, drawn.cycle_s):
            now_s = start_s
            for begin_s, stop_s in _waited(drawn, start_s, end_s):
                found.append(TimedSpan(now_s, begin_s, MessageClass.OUTER.value, what))
                found.append(TimedSpan(begin_s, stop_s, WAIT_OUTER, what))
                now_s = stop_s
            found.append(TimedSpan(now_s, end_s, MessageClass.OUTER.value, what))
    shown = [span for span in found if span.end_s > span.start_s]
    return sorted(shown, key=lambda span: span.start_s)


def _crossing_words(crossing: Crossing) -> str:
    sent = ", ".join(f"{bytes_words(size)} over {tier}" for tier, size in crossing.sent_bytes.items())
    return (
        f"fragment {crossing.fragment}: sent after step {crossing.sent}, {seconds(crossing.end_s - crossing.start_s)} "
        f"on its link, applied after step {crossing.applied}; a rank sends {sent}"
    )


def _waited(drawn: CycleTimeline, start_s: float, end_s: float) -> list[Stretch]:
    """The parts of a stretch of the cycle during which ranks wait for exchanges."""
    waits = [part for each in drawn.waits for part in in_cycle(*each, drawn.cycle_s)]
    both = ((max(start_s, begin_s), min(end_s, stop_s)) for begin_s, stop_s in sorted(waits))
    return [(begin_s, stop_s) for begin_s, stop_s in both if stop_s > begin_s]


def _compared(drawn: CycleTimeline, measured: Measured) -> Table:
    def row(name: str, expected: float, found: float) -> list[str]:
        error = f"{100 * (expected / found - 1):+.0f} %" if found > 0.0 else ""
        return [name, seconds(expected), seconds(found), error]

    waited = [sum(times.get(WAIT_OUTER, 0.0) for times in steps) for steps in (drawn.steps, measured)]
    rows = [
        row("the cycle", drawn.cycle_s, sum(sum(times.values()) for times in measured)),
        row("of it, exchanges waited for", waited[0], waited[1]),
    ]
    return Table(headings=["", "predicted", "measured", "error"], rows=rows, left=[""])


def _formats(cycle: Cycle) -> tuple[str, ...]:
    plan = cycle.period.turns[0].programs[0].plan
    return tuple(plan.wire.get(MessageClass.OUTER.value, {}).values())


def _between(cycle: Cycle, sent: Sent) -> int:
    program = cycle.period.turns[0].programs[0]
    outside = [program.layout.tiers[tier] for tier in program.model.world_layout.outside]
    return sum(size for (_, tier), size in sent.items() if tier in outside)


def _words(exchange: Exchange) -> str:
    if exchange == NO_EXCHANGE:
        return "nothing"
    parts = [("applied", exchange.arrives), ("sent and waited for" if exchange.waits else "sent", exchange.starts)]
    return ", ".join(f"fragment {' and '.join(map(str, fragments))} {what}" for what, fragments in parts if fragments)
