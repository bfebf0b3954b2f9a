"""Text plots of the passes of played programs, and of memory over a step: one line per stage, time across."""

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from terrace.plan.stage import Pass, Stage
from terrace.program.instruction import Op
from terrace.program.schedules.orders import StageTask
from terrace.simulate.curve import MemoryCurve
from terrace.simulate.stages import Passed

_PASSES = {Op[pass_.name]: pass_ for pass_ in Pass}


class TaskSpan(NamedTuple):
    """A task of a stage with its start and end."""

    task: StageTask
    start_s: float
    end_s: float


def task_spans(stage: Stage, passes: Sequence[Passed]) -> list[TaskSpan]:
    """Tasks of a stage's played program; in a task a micro-batch passes all blocks of a chunk.

    A task includes its waits between blocks and its wait for the first block's parameters.
    """
    chunk_of = {block: chunk for chunk, blocks in enumerate(stage.chunks) for block in blocks}

    def task(passed: Passed) -> StageTask:
        instruction = passed.instruction
        return StageTask(_PASSES[instruction.op], chunk_of[instruction.block], instruction.micro)

    spans = []
    for each, group in groupby(passes, task):
        together = list(group)
        spans.append(TaskSpan(each, together[0].start_s, together[-1].end_s))
    return spans


def passes_picture(stages: Sequence[Stage], passes: Sequence[Sequence[Passed]], step_s: float, width: int = 100) -> str:
    """One line per stage of at most `width` characters (but at least 8 columns of time), and a legend.

    Time runs from the first pass of any stage to the last of all. A column shows the task in its middle, `.` for none:
    a letter, then the micro-batch if it fits, then dashes: `F3--`; in chunk 1, `F1.3`. Tasks shorter than a column may
    not show.
    """
    names, columns = _names(len(stages), width)
    spans = [task_spans(stage, passed) for stage, passed in zip(stages, passes, strict=True)]
    # Time outside the passes (updates, refreshes) is not drawn.
    first_s = min(row[0].start_s for row in spans)
    last_s = max(row[-1].end_s for row in spans)
    column_s = (last_s - first_s) / columns
    lines = []
    for name, row in zip(names, spans, strict=True):
        moved = [(task, start_s - first_s, end_s - first_s) for task, start_s, end_s in row]
        lines.append(name + "".join(_label(task, number) for task, number in _runs(moved, columns, column_s)))
    words = _legend(span.task for row in spans for span in row)
    share = (last_s - first_s) / step_s
    legend = f"{words}, . idle; a column is {column_s:.3g} s, the picture {share:.0%} of the step"
    return "\n".join([*lines, textwrap.fill(legend, width)])


def memory_picture(curves: Sequence[MemoryCurve], step_s: float, width: int = 100) -> str:
    """One line per stage over a step: the maximum in each column, in tenths of the highest peak."""
    names, columns = _names(len(curves), width)
    highest = max(curve.peak[0] for curve in curves) or 1.0
    lines = []
    for name, curve in zip(names, curves, strict=True):
        totals, index, line = curve.total_bytes, 0, ""
        for column in range(columns):
            most = totals[index]
            while index + 1 < len(totals) and curve.times_s[index + 1] < (column + 1) / columns * step_s:
                index += 1
                most = max(most, totals[index])
            line += str(min(9, int(10 * most / highest)))
        lines.append(name + line)
    return "\n".join(lines)


def _names(num_stages: int, width: int) -> tuple[list[str], int]:
    names = [f"stage {stage} " for stage in range(num_stages)]
    indent = max(map(len, names))
    return [name.ljust(indent) for name in names], max(8, width - indent)


def _legend(tasks: Iterable[StageTask]) -> str:
    passes = {task.pass_ for task in tasks}
    return ", ".join(f"{pass_.letter} {pass_.name.lower().replace('_', ' ')}" for pass_ in Pass if pass_ in passes)


def _runs(
    spans: Sequence[tuple[StageTask, float, float]], columns: int, column_s: float
) -> Iterator[tuple[StageTask | None, int]]:
    position, shown = 0, []
    for column in range(columns):
        # The middle of a column decides which task it shows.
        middle_s = (column + 0.5) * column_s
        while position < len(spans) and spans[position][2] <= middle_s:
            position += 1
        runs = position < len(spans) and spans[position][1] <= middle_s
        shown.append(spans[position][0] if runs else None)
    for task, group in groupby(shown):
        yield task, len(list(group))


def _label(task: StageTask | None, columns: int) -> str:
    if task is None:
        return "." * columns
    label = task.pass_.letter + (f"{task.chunk}." if task.chunk else "") + str(task.micro)
    return (label if len(label) <= columns else task.pass_.letter).ljust(columns, "-")
