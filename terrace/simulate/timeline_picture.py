"""A timeline, and memory over it, as text: stages down, time across."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from terrace.program.schedules import Kind, Task
from terrace.simulate.curve import MemoryCurve
from terrace.simulate.timeline import Timeline


def picture(timeline: Timeline, width: int = 100, *, stretch: float = 1.0, tails_s: Sequence[float] = ()) -> str:
    """Return one line a stage of at most `width` characters (but 8 columns of time), and a legend.

    A column shows what runs in its middle, `.` if nothing does. A task is its letter, then its micro-batch where
    there is room, then dashes: `F3--`; in chunk 1, `F1.3`. Where tasks are shorter than a column some are not seen.
    Every moment comes `stretch` times as late; `tails_s` is what each stage does after the last task of all, and then
    the bubble, which the tails change, is left to who knows the step.
    """
    orders = timeline.orders
    names = [f"stage {stage} " for stage in range(orders.num_stages)]
    indent = max(map(len, names))
    columns = max(8, width - indent)
    span_s = stretch * timeline.makespan_s
    column_s = (span_s + max(tails_s, default=0.0)) / columns
    lines = []
    for stage, name in enumerate(names):
        line = "".join(map(_label, *zip(*_runs(timeline, stage, columns, column_s / stretch), strict=True)))
        if tails_s:
            first, last = round(span_s / column_s), round((span_s + tails_s[stage]) / column_s)
            line = line[:first] + "U" * (last - first) + "." * (columns - last)
        lines.append(name.ljust(indent) + line)
    kinds = {task.kind for tasks in orders.tasks for task in tasks}
    words = ", ".join(f"{kind.letter} {kind.name.lower().replace('_', ' ')}" for kind in Kind if kind in kinds)
    if tails_s:
        return "\n".join([*lines, f"{words}, U sums of gradients and update, . idle; a column is {column_s:.3g} s"])
    return "\n".join([*lines, f"{words}, . idle", f"a column is {column_s:.3g} s, the bubble {timeline.bubble:.1%}"])


def memory_picture(curves: Sequence[MemoryCurve], step_s: float, width: int = 100) -> str:
    """Return one line a stage over a step: the tenths of the highest peak that it holds, at most in each column."""
    names = [f"stage {stage} " for stage in range(len(curves))]
    indent = max(map(len, names))
    columns, highest = max(8, width - indent), max(curve.peak[0] for curve in curves) or 1.0
    lines = []
    for name, curve in zip(names, curves, strict=True):
        totals, index, line = curve.total_bytes, 0, ""
        for column in range(columns):
            most = totals[index]
            while index + 1 < len(totals) and curve.times_s[index + 1] < (column + 1) / columns * step_s:
                index += 1
                most = max(most, totals[index])
            line += str(min(9, int(10 * most / highest)))
        lines.append(name.ljust(indent) + line)
    return "\n".join(lines)


def _runs(timeline: Timeline, stage: int, columns: int, column_s: float) -> Iterator[tuple[Task | None, int]]:
    """Yield what runs in the middle of the columns, and in how many of them."""
    tasks = timeline.orders.tasks[stage]
    starts_s, ends_s = timeline.starts_s[stage], timeline.ends_s[stage]
    position, shown = 0, []
    for column in range(columns):
        middle_s = (column + 0.5) * column_s
        while position < len(tasks) and ends_s[position] <= middle_s:
            position += 1
        runs = position < len(tasks) and starts_s[position] <= middle_s
        shown.append(tasks[position] if runs else None)
    for task, group in groupby(shown):
        yield task, len(list(group))


def _label(task: Task | None, columns: int) -> str:
    if task is None:
        return "." * columns
    label = task.kind.letter + (f"{task.chunk}." if task.chunk else "") + str(task.micro)
    return (label if len(label) <= columns else task.kind.letter).ljust(columns, "-")
