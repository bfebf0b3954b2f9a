"""Tables of a pipeline's stages for the terminal: blocks, memory, bytes, seconds, tasks in order."""

from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from terrace.model.spec import BlockSpec
from terrace.plan.wire import MessageClass
from terrace.program.program import Program
from terrace.program.report import StepReport
from terrace.program.schedules.csv_form import to_csv
from terrace.program.schedules.orders import Orders
from terrace.report.tables import equal_bytes, new_table, quantity, seconds
from terrace.simulate.step import WAITS_ON_STAGES, bubble, idle_s


def others_s(report: StepReport) -> float:
    """Seconds of a step in which a stage waits for its data and tensor ranks."""
    return report.step_s - computing_s(report) - idle_s(report)


def computing_s(report: StepReport) -> float:
    """Seconds of a step spent computing."""
    return sum(spent for name, spent in report.time_s.items() if not name.startswith("wait "))


def block_words(blocks: Sequence[BlockSpec], indexes: Sequence[int]) -> str:
    """Names of neighbouring blocks, numbered ones joined: embedding, layers.0-3."""
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
    """Number of parameters owned by these blocks."""
    return sum(blocks[index].num_trainable + blocks[index].num_frozen for index in indexes)


def stages_table(programs: Sequence[Program], blocks: Sequence[BlockSpec]) -> Table:
    """Blocks of each stage; `blocks` is the whole model, not a tensor rank's slice of it."""
    table = new_table("stages: what each runs")
    num_chunks = len(programs[0].stage.chunks)
    table.add_column("stage", justify="right")
    for chunk in range(num_chunks):
        table.add_column(f"chunk {chunk}" if num_chunks > 1 else "blocks")
    table.add_column("parameters", justify="right")
    for program in programs:
        stage = program.stage
        cells = (block_words(blocks, chunk) for chunk in stage.chunks)
        table.add_row(str(stage.index), *cells, f"{num_params(blocks, stage.own):,}")
    table.add_section()
    total = sum(num_params(blocks, program.stage.own) for program in programs)
    table.add_row("all", *[""] * num_chunks, f"{total:,}")
    return table


def parts_words(programs: Sequence[Program], blocks: Sequence[BlockSpec]) -> str:
    """Statement that the stages cover the model exactly once, and the stages that hold copies."""
    run = sorted(index for program in programs for index in program.stage.own)
    # The sentence below is a claim about the programs, so it is checked.
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


def stage_memory_table(programs: Sequence[Program], activations: Sequence[int], capacity_bytes: float) -> Table:
    """Model state by category and peak activations, of one rank of each stage."""
    capacity = quantity(capacity_bytes, "B")
    table = new_table(f"model state and activations of one rank of each stage, at most (the device has {capacity})")
    names = [name for name in programs[0].state_bytes if any(program.state_bytes[name] for program in programs)]
    for heading in ("stage", *names, "model state", "activations", "together"):
        table.add_column(heading, justify="right")
    for index, (program, kept) in enumerate(zip(programs, activations, strict=True)):
        state = sum(program.state_bytes.values())
        sizes = (*(program.state_bytes[name] for name in names), state, kept, state + kept)
        table.add_row(str(index), *(quantity(size, "B") if size else "-" for size in sizes))
    return table


def stage_bytes_tables(sent: Sequence[Mapping[tuple[MessageClass, str], int]], tiers: Sequence[str]) -> list[Table]:
    """Bytes one rank of each stage sends per step: message classes and tiers down, eight stages per table."""
    # One set of rows for all tables, so that stages can be compared across them.
    keys = [key for message in MessageClass for tier in tiers if any((key := (message, tier)) in row for row in sent)]
    tables = []
    # More columns would not fit a terminal.
    for first in range(0, len(sent), 8):
        table = new_table("bytes one rank of each stage sends in a step")
        table.add_column("message")
        table.add_column("tier")
        for stage in range(first, min(first + 8, len(sent))):
            table.add_column(f"stage {stage}", justify="right")
        shown = sent[first : first + 8]
        for key in keys:
            table.add_row(key[0].value, key[1], *(quantity(row[key], "B") if row.get(key) else "-" for row in shown))
        table.add_section()
        table.add_row("total", "", *(quantity(sum(row.values()), "B") for row in shown))
        tables.append(table)
    return tables


def stage_time_table(reports: Sequence[StepReport]) -> Table:
    """Predicted seconds per step of each stage, by category."""
    table = new_table("seconds of a step, predicted from the cluster's own figures (bubble: waiting for other stages)")
    # A category that no stage has gets no column.
    names = [name for name in ("forward", "backward") if any(report.time_s.get(name) for report in reports)]
    headings = ["stage", *names, "update, norm", "wait pipeline", "wait tie, norm", "wait others", "step", "bubble"]
    for heading in headings:
        table.add_column(heading, justify="right")
    for index, report in enumerate(reports):
        time_s, idle = report.time_s, idle_s(report)
        # `idle` also counts waits for the tie and the norm, which have a column of their own.
        pipeline = time_s.get(WAITS_ON_STAGES[0], 0.0)
        shown = [time_s.get(name, 0.0) for name in names]
        rest = computing_s(report) - sum(shown)
        spent = [*shown, rest, pipeline, idle - pipeline, others_s(report), report.step_s]
        cells = (seconds(value) if value > 0 else "-" for value in spent)
        table.add_row(str(index), *cells, f"{idle / report.step_s:.1%}")
    table.add_section()
    table.add_row("all", *[""] * (len(headings) - 2), f"{bubble(reports):.1%}")
    return table


def stage_comparison_table(stages: Sequence[tuple[StepReport, StepReport]]) -> Table:
    """(predicted, measured) of one rank of each stage side by side."""
    table = new_table("every stage, predicted / measured (mean)")
    for heading in ("stage", "step", "error", "computing", "wait stages", "wait others", "model state", "bytes\nequal"):
        table.add_column(heading, justify="right")
    for index, (predicted, measured) in enumerate(stages):
        sides = (predicted, measured)
        step, *spent = (
            _pair(*(seconds(of(report)) for report in sides)) for of in (_step_s, computing_s, idle_s, others_s)
        )
        error = f"{100 * (predicted.step_s - measured.step_s) / measured.step_s:+.0f} %" if measured.step_s else ""
        state = _pair(*(quantity(sum(report.memory_bytes.values()), "B") for report in sides))
        same = Text("yes") if equal_bytes(predicted, measured) else Text("NO", style="bold red")
        table.add_row(str(index), step, error, *spent, state, same)
    return table


def _step_s(report: StepReport) -> float:
    return report.step_s


def _pair(predicted: str, measured: str) -> str:
    (first, one), (_, other) = predicted.split(" "), measured.split(" ")
    return f"{first if one == other else predicted} / {measured}"


def order_text(orders: Orders, width: int = 100) -> str:
    """Tasks of each stage in order, one line per stage, in the CSV notation; tasks that do not fit are counted."""
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
