"""Orders as CSV, in the format of torch.distributed.pipelining schedules.

One row per stage (rank), one cell per task: virtual stage, letter, micro-batch, as in `2F0` or `5W3`. The letters are
F, B (whole backward), I (input) and W (weight). Both of the forms that torch writes are read. Cells that an order does
without are left out: empty ones, which are idle slots, and those of messages, gathers and reductions
(`_PipelineScheduleRuntime._dump_csv` with `compute_comms`), whose places here follow from the plan. The tasks of
`(0F1;1B0)OVERLAP_F_B` stand one after the other.
"""

import csv
import io
import re
from functools import lru_cache

from terrace.base.errors import ProgramError
from terrace.plan.order_file import CSV
from terrace.plan.stage import Pass
from terrace.program.schedules.orders import Orders, StageTask, verify_orders

_CELL = re.compile(r"(\d{1,6})([FBIW])(\d{1,6})")
_LEFT_OUT = re.compile(r"\d+((SEND|RECV)_[FB]\d+|UNSHARD|RESHARD|REDUCE_GRAD)\d*")
_TOGETHER = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_PASSES = {pass_.letter: pass_ for pass_ in Pass}


def to_csv(orders: Orders) -> str:
    """The orders as CSV, one row per stage."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row, tasks in zip(orders.placement, orders.tasks, strict=True):
        writer.writerow(f"{row[task.chunk]}{task.pass_.letter}{task.micro}" for task in tasks)
    return text.getvalue()


def as_schedule(orders: Orders) -> str:
    """The orders as a plan's `schedule`."""
    return f"{CSV}:{to_csv(orders)}"


@lru_cache(maxsize=8)
def from_csv(text: str, schedule: str = CSV) -> Orders:
    """The orders in `text`; the chunks of a stage are its virtual stages in ascending order.

    Raises `ProgramError` for a cell that is no task and for orders that break a rule of `verify_orders`.
    """
    rows: list[list[tuple[int, Pass, int]]] = []
    for line in csv.reader(io.StringIO(text)):
        if line or rows:  # the rows of a plan may begin on a line of their own
            rows.append([_parse(len(rows), cell) for cell in _tasks(line)])
    while rows and not rows[-1]:
        rows.pop()
    # The file names virtual stages only; chunk numbers follow from their order.
    placement = tuple(tuple(sorted({virtual for virtual, _, _ in row})) for row in rows)
    if not placement or not placement[0]:
        raise ProgramError("a schedule without tasks: write one row a stage, with cells such as 0F0")
    chunks = [{virtual: chunk for chunk, virtual in enumerate(held)} for held in placement]
    orders = Orders(
        schedule=schedule,
        num_stages=len(rows),
        num_chunks=len(placement[0]),
        num_micros=1 + max(micro for row in rows for _, _, micro in row),
        placement=placement,
        tasks=tuple(
            tuple(StageTask(pass_, chunks[stage][virtual], micro) for virtual, pass_, micro in row)
            for stage, row in enumerate(rows)
        ),
    )
    # A file may hold anything.
    verify_orders(orders)
    return orders


def _tasks(line: list[str]) -> list[str]:
    cells = [cell.strip() for cell in line]
    apart = [part.strip() for cell in cells for part in _TOGETHER.sub(r"\1", cell).split(";")]
    return [cell for cell in apart if cell and not _LEFT_OUT.fullmatch(cell)]


def _parse(row: int, cell: str) -> tuple[int, Pass, int]:
    match = _CELL.fullmatch(cell)
    if match is None:
        raise ProgramError(
            f"row {row}: cell {cell[:40]!r}: write virtual stage, letter and micro-batch, as in 2F0; the letters are "
            "F, B, I and W"
        )
    return int(match[1]), _PASSES[match[2]], int(match[3])
