"""Orders as CSV, in the format of torch.distributed.pipelining schedules.

One row per stage (rank), one cell per task: virtual stage, letter, micro-batch, as in `2F0` or `5W3`. The letters are
F, B (whole backward), I (input) and W (weight). Empty cells, which mean idle slots in torch, are ignored.
"""

import csv
import io
import re

from terrace.base.errors import ProgramError
from terrace.plan.stage import Pass
from terrace.program.schedules.orders import Orders, StageTask, verify_orders

_CELL = re.compile(r"(\d+)([FBIW])(\d+)")
_PASSES = {pass_.letter: pass_ for pass_ in Pass}


def to_csv(orders: Orders) -> str:
    """The orders as CSV, one row per stage."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row, tasks in zip(orders.placement, orders.tasks, strict=True):
        writer.writerow(f"{row[task.chunk]}{task.pass_.letter}{task.micro}" for task in tasks)
    return text.getvalue()


def from_csv(text: str, schedule: str = "csv") -> Orders:
    """The orders in `text`; the chunks of a stage are its virtual stages in ascending order.

    Raises `ProgramError` for a cell that is no task and for orders that break a rule of `verify_orders`.
    """
    rows: list[list[tuple[int, Pass, int]]] = []
    for line in csv.reader(io.StringIO(text)):
        cells = [cell.strip() for cell in line]
        rows.append([_parse(len(rows), cell) for cell in cells if cell])
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


def _parse(row: int, cell: str) -> tuple[int, Pass, int]:
    match = _CELL.fullmatch(cell)
    if match is None:
        raise ProgramError(
            f"row {row}: cell {cell!r}: write virtual stage, letter and micro-batch, as in 2F0; the letters are F, B, "
            "I and W (messages, gathers and reductions are not part of an order)"
        )
    return int(match[1]), _PASSES[match[2]], int(match[3])
