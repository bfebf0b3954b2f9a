"""Pipeline schedules: pure functions from numbers to the order of tasks of every stage."""

from terrace.plan.stage import Kind
from terrace.program.schedules.counts import Waiting, most_waiting, peak_activation_bytes
from terrace.program.schedules.csv_form import from_csv, to_csv
from terrace.program.schedules.orders import Orders, Placement, Task, looped, v_shaped, verify_orders
from terrace.program.schedules.registry import orders_for, schedule_names, takes, takes_unit
from terrace.program.schedules.seconds import TaskSeconds, check_seconds, even_seconds

__all__ = [
    "Kind",
    "Orders",
    "Placement",
    "Task",
    "TaskSeconds",
    "Waiting",
    "check_seconds",
    "even_seconds",
    "from_csv",
    "looped",
    "most_waiting",
    "orders_for",
    "peak_activation_bytes",
    "schedule_names",
    "takes",
    "takes_unit",
    "to_csv",
    "v_shaped",
    "verify_orders",
]
