"""Seconds that stages wait for messages inside them: each axis has its column, and all columns sum to the step."""

from dataclasses import replace

import pytest

from terrace.base.words import seconds
from terrace.model.config import ModelConfig
from terrace.plan.presets import preset
from terrace.planner.evaluate import step_of
from terrace.planner.task import Task
from terrace.report.stage_tables import stage_time_table
from terrace.simulate.step import predict_step
from tests.support.planner_cases import MIXED, SMALL, sized

CLUSTER = sized("dgx-a100", 4, 2)


@pytest.mark.parametrize(
    ("model", "row", "experts", "columns"),
    [
        (SMALL, {"tensor": 2, "data": 2}, {}, {"tensor", "data"}),
        (SMALL, {"context": 2, "data": 2}, {}, {"context", "data"}),
        (MIXED, {"data": 4}, {"node": {"expert": 4}}, {"experts", "data"}),
        (SMALL, {"data": 4}, {}, {"data"}),
    ],
)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zbv"])
def test_waits_for_messages_inside_a_stage_are_shown_by_axis(
    model: ModelConfig, row: dict[str, int], experts: dict[str, dict[str, int]], columns: set[str], schedule: str
) -> None:
    mapping = {"system": {"pipeline": 2}, "node": row}
    plan = replace(preset("zero1", CLUSTER), compute="bf16", mapping=mapping, schedule=schedule, experts=experts)
    task = Task(model=model, cluster=CLUSTER, batch=32, sequence=256)
    reports = predict_step(step_of(task, plan)).reports
    table = stage_time_table(reports)
    cells = {
        heading.replace("\n", " "): [row[place] for row in table.rows] for place, heading in enumerate(table.headings)
    }
    inside = {name.removeprefix("wait ") for name in cells if name.startswith("wait ")} - {"pipeline", "tie, norm"}
    assert inside == columns
    for stage, report in enumerate(reports):
        for axis in ("tensor", "context"):
            waited = report.time_s.get(f"wait {axis}", 0.0)
            assert (axis in inside) == (waited > 0)
            assert axis not in inside or cells[f"wait {axis}"][stage] == seconds(waited)
        spent = [_seconds(cells[name][stage]) for name in cells if name not in ("stage", "step", "bubble")]
        assert sum(spent) == pytest.approx(_seconds(cells["step"][stage]), rel=5e-3)


def _seconds(cell: object) -> float:
    if cell == "-":
        return 0.0
    number, unit = str(cell).split()
    return float(number) * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[unit]
