"""Schedules by name, their refusals, and orders as CSV."""

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from terrace.base.errors import PlanError, ProgramError
from terrace.plan.stage import Pass
from terrace.program import schedules
from terrace.program.schedules import registry
from terrace.program.schedules.csv_form import from_csv
from terrace.program.schedules.orders import Orders, StageTask, verify_orders
from terrace.program.schedules.registry import orders_for, schedule_names
from tests.support.schedules import NAMES, even_seconds

EVEN = even_seconds(2, forward_s=1.0, input_s=1.0, weight_s=1.0)


def test_the_names_are_those_of_the_folder() -> None:
    assert schedule_names() == sorted(NAMES)


@pytest.mark.parametrize(
    ("name", "numbers", "words"),
    [
        ("interleaved", {"num_stages": 4, "num_chunks": 2, "num_micros": 10}, "write num_micros = 12"),
        ("interleaved", {"num_stages": 4, "num_chunks": 2, "num_micros": 9}, "write num_micros = 8"),
        ("interleaved", {"num_stages": 4, "num_chunks": 2, "num_micros": 1}, "write num_micros = 4"),
        ("zbv", {"num_stages": 4, "num_chunks": 3, "num_micros": 8}, "write num_chunks = 2"),
        ("1f1b", {"num_stages": 4, "num_chunks": 2, "num_micros": 8}, "leave num_chunks out"),
        ("1f1b", {"num_stages": 4, "num_micros": 0}, "write num_micros = 1 or more"),
        ("zeropp", {"num_stages": 4, "num_chunks": 2, "num_micros": 8}, "needs unit"),
        ("zeropp", {"num_stages": 4, "num_chunks": 2, "num_micros": 8, "unit": 0}, "write unit = 1 or more"),
        ("zb-h3", {"num_stages": 4, "num_micros": 8}, "did you mean 'zb-h"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_the_fix(name: str, numbers: dict[str, int], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        orders_for(name, **numbers)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"memory_limit": 0.5}, "memory_limit = 0.5: .* write 1 or more"),
        ({"weight_share": 1.5}, "weight_share = 1.5: .* write 0 to 1"),
        ({"seconds": even_seconds(3, forward_s=1.0, input_s=1.0, weight_s=1.0)}, "forward tasks: 3 of them; give 2"),
        ({"seconds": replace(EVEN, edge_s=())}, "edges: 0 of them; give 1"),
        ({"seconds": replace(EVEN, input_s=(1.0, -1.0))}, "backward_input tasks: -1.0 among them"),
    ],
)
def test_the_automatic_schedule_refuses_what_it_cannot_use(given: dict[str, Any], words: str) -> None:
    usable: dict[str, Any] = {"seconds": EVEN, "weight_share": 0.4, "memory_limit": 2}
    with pytest.raises(PlanError, match=words):
        orders_for("zb-auto", num_stages=2, num_micros=4, **{**usable, **given})


def test_one_chunk_needs_no_mention() -> None:
    assert orders_for("1f1b", num_stages=2, num_chunks=1, num_micros=3) == orders_for(
        "1f1b", num_stages=2, num_micros=3
    )


def test_adding_a_schedule_is_adding_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "added.py").write_text(
        "from terrace.program.schedules.one_f_one_b import one_f_one_b\n"
        "from terrace.program.schedules.orders import Orders\n"
        "from terrace.program.schedules.registry import schedule\n\n\n"
        '@schedule("added")\n'
        "def added(num_stages: int, num_micros: int) -> Orders:\n"
        "    return one_f_one_b(num_stages, num_micros)\n"
    )
    monkeypatch.setattr(schedules, "__path__", [*schedules.__path__, str(tmp_path)])
    monkeypatch.setattr(registry, "_found", dict(registry._found))
    registry._schedules.cache_clear()
    importlib.invalidate_caches()
    try:
        assert "added" in schedule_names()
        assert (
            orders_for("added", num_stages=2, num_micros=3).tasks
            == orders_for("1f1b", num_stages=2, num_micros=3).tasks
        )
    finally:
        registry._schedules.cache_clear()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0F0,0B0\n1F0,1X0\n", "row 1: cell '1X0'"),
        ("0F0,0B0\n1F0,1SEND_C0,1B0\n", "the letters are F, B, I and W"),
        ("0F0,0B0\n2F0,2B0\n", "every virtual stage"),
        ("0F0,0B0\n1B0,1F0\n", "stage 1: BACKWARD of micro-batch 0, chunk 0 stands before its FORWARD"),
        ("0F0,0B0\n1F0,1W0,1I0\n", "stands before its BACKWARD_INPUT"),
        ("0F0,0B0,0I0\n1F0,1B0\n", "stands there twice"),
        ("0F0,0F1,0B0,0B1\n1F0,1F1,1B1\n", "stage 1: micro-batch 0 of chunk 0 has no complete backward"),
        ("0F0,0I0\n1F0,1B0\n", "no complete backward"),
        ("", "without tasks"),
    ],
)
def test_csv_that_breaks_a_rule_is_refused(text: str, words: str) -> None:
    with pytest.raises(ProgramError, match=words):
        from_csv(text)


def test_a_task_outside_the_numbers_is_refused() -> None:
    orders = from_csv("0F0,0B0\n1F0,1B0\n")
    for wrong in (StageTask(Pass.FORWARD, 1, 0), StageTask(Pass.FORWARD, 0, 7)):
        broken = Orders(**{**vars(orders), "tasks": ((wrong, *orders.tasks[0]), orders.tasks[1])})
        with pytest.raises(ProgramError, match="there are 1 chunks and 1 micro-batches"):
            verify_orders(broken)
