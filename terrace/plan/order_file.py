"""A pipeline's order from a file, as a value of a plan.

`schedule = "order.csv"` in a plan is read where the plan is (`with_order`): from then on `Plan.schedule` has `csv:` and
the rows of the file, and a run's `config.toml`, a search and a resume need the file no more. The rows can also be
written into a plan in this form. `terrace.program.schedules.csv_form` reads and checks them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from terrace.base.errors import PlanError
from terrace.base.files import read_bounded

CSV = "csv"  # name of such a schedule
_MOST_BYTES = 16 << 20


def _is_file(schedule: object) -> bool:
    return isinstance(schedule, str) and schedule.endswith(".csv") and not schedule.startswith(f"{CSV}:")


def order_beside(folder: Path, plan: Mapping[str, Any]) -> dict[str, Any]:
    """The table of a plan in a file of `folder`, to which the path of an order is relative."""
    schedule = plan.get("schedule")
    return {**plan, "schedule": str(folder / str(schedule))} if _is_file(schedule) else dict(plan)


def with_order(plan: Mapping[str, Any]) -> dict[str, Any]:
    """The table of a plan with the rows of an order in place of its file. Raises `PlanError` for an unreadable file."""
    schedule = plan.get("schedule")
    if not _is_file(schedule):
        return dict(plan)
    try:
        rows = read_bounded(Path(str(schedule)), _MOST_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise PlanError(f"schedule = {schedule!r}: cannot read it: {error.strerror}") from error
    except ValueError as error:
        raise PlanError(f"schedule = {schedule!r}: it is not a file of text: {error}") from error
    return {**plan, "schedule": f"{CSV}:{rows}"}


def schedule_words(schedule: str | None) -> str:
    """A plan's schedule in a message: the rows of an order are not spelled out."""
    return repr(CSV if (schedule or "").startswith(f"{CSV}:") else schedule)
