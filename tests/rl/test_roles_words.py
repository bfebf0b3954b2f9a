"""Words and tables of a placement: which pool a stage waits for, missing memory, another placement beside the best."""

from dataclasses import replace

import pytest
from rich.console import Console

from terrace.rl.commands.placement_words import (
    against_words,
    flow_words,
    iteration_words,
    measured_words,
    pools_table,
    roles_table,
)
from terrace.rl.placement.costs import Costs
from terrace.rl.placement.placement import IterationReport, price
from tests.support.dataflows import apart, llama, nodes, plan, ppo_flow, small, together

FLOW, TWO = ppo_flow(small()), nodes(2)


@pytest.fixture(scope="module")
def reports() -> tuple[IterationReport, IterationReport]:
    costs = Costs(FLOW)
    return tuple(price(FLOW, each, TWO, costs) for each in (apart(8, 8, plan()), together(16, plan(tensor=2), rows=2)))  # type: ignore[return-value]


def test_a_stage_is_told_with_the_pool_that_ends_last(reports: tuple[IterationReport, IterationReport]) -> None:
    found = iteration_words(reports[0])
    assert "generate ends with ranks 0-7" in found
    assert "8-15 idle" in found
    assert "a replica of 1 rank has all 8 responses at a time" in found
    assert "ends with" not in iteration_words(reports[1])


def test_the_other_placement_is_told_by_its_stages(reports: tuple[IterationReport, IterationReport]) -> None:
    best, other = reports
    words = against_words(best, other)
    assert words.startswith("16: actor, reference, critic, reward: ")
    assert f"{100 * (other.seconds / best.seconds - 1):+.1f} %" in words
    slower = other.stages["train"] > best.stages["train"]
    assert f"train {'+' if slower else '-'}" in words


def test_missing_memory_is_told() -> None:
    large = ppo_flow(llama())
    found = price(large, together(8, plan()), nodes(1))
    assert "ranks 0-7 lack" in iteration_words(found)
    assert "it has no room" in iteration_words(found)


def test_tables_have_a_row_for_each_role_and_pool(reports: tuple[IterationReport, IterationReport]) -> None:
    console = Console(width=200, record=True)
    with console.capture() as taken:
        console.print(roles_table(reports[0], TWO, "roles"))
        console.print(pools_table(reports[0]))
    lines = taken.get().splitlines()
    for name, ranks in (("actor", "0-7"), ("reference", "0-7"), ("critic", "8-15"), ("reward", "8-15")):
        assert any(line.split()[:2] == [name, ranks] for line in lines)
    assert any("actor, reference" in line and "80.8 GB" in line for line in lines)


def test_a_dataflow_is_told_with_its_updates() -> None:
    words = flow_words(replace(FLOW, samples=2, epochs=2))
    assert "64 prompts of 256 tokens x 2 responses of 256 tokens an iteration" in words
    assert "learned in 8 updates of 32" in words
    assert "actor generates, trains; reference scores" in words


@pytest.mark.parametrize(("share", "verdict"), [(1.1, "-9 %, within"), (2.0, "-50 %, OUTSIDE")])
def test_what_was_measured_stands_beside_it(
    reports: tuple[IterationReport, IterationReport], share: float, verdict: str
) -> None:
    measured = {stage: share * seconds for stage, seconds in reports[0].stages.items()}
    measured["step"] = share * reports[0].seconds
    words = measured_words(reports[0], measured)
    assert f"predicted step time {verdict} its limit of 20 %" in words
    rows = [line.split() for line in words.splitlines()[1:6]]
    assert [row[0] for row in rows] == ["reshard", "generate", "prepare", "train", "step"]
    assert all(row[1:3] != row[3:5] for row in rows[1:])  # whole parameters need no hand-over
