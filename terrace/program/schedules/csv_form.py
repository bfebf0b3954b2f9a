"""Orders as CSV, in the form in which torch.distributed.pipelining keeps its schedules.

One row a stage (a rank), one cell a task: virtual stage, letter, micro-batch, as in `2F0` or `5W3`. The letters are F,
B (whole backward), I (input) and W (weight). An empty cell, which stands for an idle slot there, means nothing here.
"""

import csv
import io

from terrace.program.schedules.orders import Orders


def to_csv(orders: Orders) -> str:
    """The orders as CSV, one row a stage."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row, tasks in zip(orders.placement, orders.tasks, strict=True):
        writer.writerow(f"{row[task.chunk]}{task.kind.letter}{task.micro}" for task in tasks)
    return text.getvalue()
