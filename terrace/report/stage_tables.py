"""Tables of a pipeline's stages for the terminal: blocks, memory, bytes, seconds, tasks in order."""

from collections.abc import Mapping, Sequence
from operator import attrgetter

from rich.text import Text

from terrace.base.words import quantity, seconds
from terrace.model.spec import BlockSpec
from terrace.plan.wire import MessageClass
from terrace.program.program import Program
from terrace.program.report import StepReport
from terrace.program.schedules.csv_form import to_csv
from terrace.program.schedules.orders import Orders
from terrace.report.loads import ROUTED_COLUMN
from terrace.report.table import Table
from terrace.report.tables import bytes_words, equal_bytes, with_media
from terrace.simulate.step import WAITS_ON_STAGES, bubble, idle_s

# Waits inside a stage that have their own column; all others are for its data ranks.
_INSIDE = {"tensor": (MessageClass.TENSOR,), "context": (MessageClass.CONTEXT,), **ROUTED_COLUMN}


def others_s(report: StepReport) -> float:
    return report.step_s - computing_s(report) - idle_s(report)


def computing_s(report: StepReport) -> float:
    return sum(spent for name, spent in report.time_s.items() if not name.startswith("wait "))


def block_words(blocks: Sequence[BlockSpec], indexes: Sequence[int]) -> str:
    """Names of consecutive blocks, with numbered ones joined: embedding, layers.0-3."""
    runs: list[list[str]] = []
    for index in indexes:
        name = blocks[index].name
        stem, dot, number = name.rpartition(".")
        # The run keeps its first name and the last number.
        if runs and dot and number.isdecimal() and runs[-1][0].rpartition(".")[0] == stem:
            runs[-1][1:] = [number]
        else:
            runs.append([name])
    return ", ".join("-".join(run) for run in runs)


def num_params(blocks: Sequence[BlockSpec], indexes: Sequence[int]) -> int:
    return sum(blocks[index].num_trainable + blocks[index].num_frozen for index in indexes)


def stages_table(programs: Sequence[Program], blocks: Sequence[BlockSpec]) -> Table:
    """Blocks of each stage; `blocks` is the whole model, not a tensor rank's slice of it."""
    stages = [program.stage for program in programs]
    num_chunks, counts = len(stages[0].chunks), [num_params(blocks, stage.own) for stage in stages]
    chunks = [f"chunk {chunk}" for chunk in range(num_chunks)] if num_chunks > 1 else ["blocks"]
    return Table(
        title="stages: what each runs",
        headings=["stage", *chunks, "parameters"],
        left=chunks,
        rows=[
            [str(stage.index), *(block_words(blocks, chunk) for chunk in stage.chunks), f"{count:,}"]
            for stage, count in zip(stages, counts, strict=True)
        ],
        total=["all", *[""] * num_chunks, f"{sum(counts):,}"],
    )


def parts_words(programs: Sequence[Program], blocks: Sequence[BlockSpec]) -> str:
    """A statement that the stages cover the model exactly once, and a line for each copy that a stage holds."""
    run = sorted(index for program in programs for index in program.stage.own)
    # Check the claim of the first line.
    assert run == list(range(len(blocks))), f"the stages run the blocks {run} of {len(blocks)}"
    whole = num_params(blocks, range(len(blocks)))
    lines = [f"together exactly the model's {whole:,} parameters"]
    for program in programs:
        stage = program.stage
        ties = dict(stage.ties)
        for index in stage.copies:
            lines.append(
                f"beside them stage {stage.index} holds a copy of {blocks[index].name} "
                f"({num_params(blocks, [index]):,} parameters), tied to that of stage {ties[index]}"
            )
    return "\n".join(lines) + "\n"


def stage_memory_table(held: Sequence[Mapping[str, int]], activations: Sequence[int], room: str) -> Table:
    """Model state by category (`held`) and peak activations of one rank of each stage.

    `room` is the memory available to a plan, in words.
    """
    names = [name for name in held[0] if any(each[name] for each in held)]
    table = Table(
        title=f"model state and activations of one rank of each stage, at most; a plan may take {room}",
        headings=["stage", *names, "model state", "activations", "together"],
    )
    for index, (each, kept) in enumerate(zip(held, activations, strict=True)):
        state = sum(each.values())
        sizes = (*(each[name] for name in names), state, kept, state + kept)
        table.add_row(str(index), *map(bytes_words, sizes))
    return table


def stage_bytes_tables(sent: Sequence[Mapping[tuple[MessageClass, str], int]], tiers: Sequence[str]) -> list[Table]:
    """Bytes that one rank of each stage sends per step, by message class and tier, with eight stages per table."""
    # The same rows in all tables, so that stages can be compared across them.
    tiers = with_media({key: 0 for row in sent for key in row}, tiers)
    keys = [key for message in MessageClass for tier in tiers if any((key := (message, tier)) in row for row in sent)]
    tables = []
    # More columns would not fit a terminal.
    for first in range(0, len(sent), 8):
        shown = sent[first : first + 8]
        tables.append(
            Table(
                title="bytes one rank of each stage sends in a step",
                headings=["message", "tier", *(f"stage {first + number}" for number in range(len(shown)))],
                left=("message", "tier"),
                rows=[[*key, *(bytes_words(row.get(key)) for row in shown)] for key in keys],
                total=["total", "", *(quantity(sum(row.values()), "B") for row in shown)],
            )
        )
    return tables


def stage_time_table(reports: Sequence[StepReport]) -> Table:
    # A category that no stage has gets no column.
    names = [name for name in ("forward", "backward") if any(report.time_s.get(name) for report in reports)]
    inside = [_waits_inside(report) for report in reports]
    axes = [axis for axis in (*_INSIDE, "data") if any(row[axis] > 0 for row in inside)]
    waits = [f"wait\n{axis}" for axis in ("pipeline", "tie, norm", *axes)]
    headings = ["stage", *names, "update,\nnorm", *waits, "step", "bubble"]
    rows = []
    for index, report in enumerate(reports):
        time_s, idle = report.time_s, idle_s(report)
        # `idle` also includes waits for the tie and the norm, which have their own column.
        pipeline = time_s.get(WAITS_ON_STAGES[0], 0.0)
        shown = [time_s.get(name, 0.0) for name in names]
        rest = computing_s(report) - sum(shown)
        spent = [*shown, rest, pipeline, idle - pipeline, *(inside[index][axis] for axis in axes), report.step_s]
        cells = (seconds(value) if value > 0 else "-" for value in spent)
        rows.append([str(index), *cells, f"{idle / report.step_s:.1%}"])
    title = "seconds of a step, by the cluster's figures; bubble: waiting for other stages"
    total = ["all", *[""] * (len(headings) - 2), f"{bubble(reports):.1%}"]
    return Table(title=title, headings=headings, rows=rows, total=total)


def _waits_inside(report: StepReport) -> dict[str, float]:
    found = {
        axis: sum(report.time_s.get(f"wait {message.value}", 0.0) for message in messages)
        for axis, messages in _INSIDE.items()
    }
    own = {*WAITS_ON_STAGES, *(f"wait {message.value}" for messages in _INSIDE.values() for message in messages)}
    waits = {name: spent for name, spent in report.time_s.items() if name.startswith("wait ")}
    return found | {"data": sum(spent for name, spent in waits.items() if name not in own)}


def stage_comparison_table(stages: Sequence[tuple[StepReport, StepReport]]) -> Table:
    """Compare (predicted, measured) of one rank of each stage."""
    headings = ("stage", "step", "error", "computing", "wait stages", "wait others", "model state", "bytes\nequal")
    table = Table(title="every stage, predicted / measured (mean)", headings=headings)
    for index, (predicted, measured) in enumerate(stages):
        sides = (predicted, measured)
        step, *spent = (
            _pair(*(seconds(of(report)) for report in sides))
            for of in (attrgetter("step_s"), computing_s, idle_s, others_s)
        )
        error = f"{100 * (predicted.step_s - measured.step_s) / measured.step_s:+.0f} %" if measured.step_s else ""
        state = _pair(*(quantity(sum(report.memory_bytes.values()), "B") for report in sides))
        same = Text("yes") if equal_bytes(predicted, measured) else Text("NO", style="bold red")
        table.add_row(str(index), step, error, *spent, state, same)
    return table


def _pair(predicted: str, measured: str) -> str:
    (first, one), (_, other) = predicted.split(" "), measured.split(" ")
    return f"{first if one == other else predicted} / {measured}"


def order_text(orders: Orders, width: int = 100) -> str:
    """Tasks of each stage in order, one line per stage, in CSV notation; tasks that do not fit are only counted."""
    rows = [line.split(",") for line in to_csv(orders).splitlines()]
    names = [f"stage {stage}" for stage in range(len(rows))]
    indent, cell = max(map(len, names)), max(len(task) for row in rows for task in row)
    longest = max(map(len, rows))
    room = width - indent - len(f" ... {longest} more")
    shown = longest if indent + longest * (cell + 1) <= width else max(1, room // (cell + 1))
    lines = []
    for name, row in zip(names, rows, strict=True):
        line = name.ljust(indent) + "".join(f" {task:<{cell}}" for task in row[:shown])
        lines.append((line + (f" ... {len(row) - shown} more" if len(row) > shown else "")).rstrip())
    return "\n".join(lines)
