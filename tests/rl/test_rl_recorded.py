"""Records of a step beside its numbers: calls of roles, and samples."""

import json
from pathlib import Path

import pytest
import torch

from terrace.base.errors import TrainingError
from terrace.cluster.presets import load_cluster
from terrace.rl.call_lines import CallLines
from terrace.rl.calls.spans import Span
from terrace.rl.placement.pools import pool_cluster
from terrace.rl.placing import Place
from terrace.rl.samples import Samples, shortened
from terrace.rl.sort_task import SortTokenizer
from terrace.rl.values.ragged import Ragged
from terrace.rl.values.rows import Rows
from terrace.train.metrics import MetricsFile, read_metrics
from tests.support.records import step_record

LOCAL = load_cluster("local")  # 8 ranks
PLACES = [Place(0, 4, pool_cluster(LOCAL, 4)), Place(1, 0, pool_cluster(LOCAL, 4))]


def span(pool: int, role: str, method: str, begin_s: float, end_s: float) -> Span:
    return Span(pool, role, method, begin_s, end_s)


def test_calls_are_counted_from_the_begin_of_their_step() -> None:
    lines = CallLines(PLACES)
    first = lines.of_step(
        [
            span(0, "student", "update", 90.0, 95.0),  # before the run's first step
            span(0, "actor", "update", 101.0, 102.0),
            span(1, "rollout", "generate", 100.0, 101.5),
        ],
        100.0,
        102.0,
    )
    assert (first["begin_s"], first["step_s"], first["left_out"]) == (0.0, 2.0, 0)
    assert [list(call.values()) for call in first["calls"]] == [
        ["rollout", "ranks 0-3", "generate", 0.0, 1.5, 1],
        ["actor", "ranks 4-7", "update", 1.0, 2.0, 1],
    ]
    second = lines.of_step(
        [
            span(1, "rollout", "generate", 101.5, 103.0),  # reaches out of the first step, and ends before the next
            span(0, "reward_0", "rewards", 102.5, 103.5),  # an evaluation between both
            span(1, "rollout", "generate", 103.5, 104.5),
        ],
        104.0,
        105.0,
    )
    assert second["begin_s"] == 4.0
    assert [(call["begin_s"], call["end_s"]) for call in second["calls"]] == [(-2.5, -1.0), (-0.5, 0.5)]


@pytest.mark.parametrize("roles", [("actor",), ("actor", "critic")])
def test_a_line_is_bounded(roles: tuple[str, ...]) -> None:
    """Neighbours that are alike are joined; of others the first 64 are there, and the rest is counted."""
    spans = [span(0, roles[i % len(roles)], "update", 0.1 * i, 0.1 * i + 0.1) for i in range(200)]
    found = CallLines(PLACES).of_step(spans, -1.0, 20.0)
    assert sum(call["num"] for call in found["calls"]) + found["left_out"] == 200
    assert len(found["calls"]) == (1 if len(roles) == 1 else 64)
    assert found["calls"][0]["num"] == (200 if len(roles) == 1 else 1)
    assert found["calls"][0]["begin_s"] == 1.0


def rows_of(groups: list[int], **columns: torch.Tensor) -> Rows:
    responses = [torch.tensor([group % 10, 11]) for group in groups]
    return Rows(
        {
            "prompt_texts": tuple(f"prompt {group}" for group in groups),
            "responses": Ragged.of(responses),
            "finish": ("stop",) * len(groups),
            "groups": torch.tensor(groups),
            "reward": torch.arange(len(groups)).float(),
            **columns,
        }
    )


def test_samples_are_the_first_two_responses_to_three_prompts() -> None:
    samples = Samples(SortTokenizer(), ["a:b", "a:b", "c:d"], 10)
    groups = [group for group in range(4) for _ in range(3)]
    parts = {f"score/{number}": torch.full((12,), float(number)) for number in range(3)}
    rows = rows_of(groups, cost=torch.ones(12), **parts)
    advantages = Ragged.of([torch.tensor([row, row + 1.0]) for row in range(12)])
    samples.drawn(rows, advantages)
    samples.held_out(rows_of(list(range(9))))
    assert samples.taken(7, False) == []
    assert samples.taken(10, False) == [], "those of an earlier step have left"
    samples.drawn(rows, advantages)
    samples.held_out(rows_of(list(range(9))))
    found = samples.taken(10, False)
    assert [each["kind"] for each in found] == ["drawn"] * 6 + ["held out"] * 4
    assert [each["reward"] for each in found[:6]] == [0.0, 1.0, 3.0, 4.0, 6.0, 7.0]
    assert found[1] == {
        "kind": "drawn",
        "prompt": "prompt 0",
        "response": "0",
        "finish": "stop",
        "reward": 1.0,
        "parts": {"a:b (0)": 0.0, "a:b (1)": 1.0, "c:d": 2.0},
        "cost": 1.0,
        "advantage": 1.5,
        "turns": [],
    }
    assert (found[-1]["parts"], found[-1]["cost"], found[-1]["advantage"]) == ({}, None, None)


def test_samples_of_the_first_steps_and_of_the_last_are_kept() -> None:
    def kept(step: int, every: int, is_last: bool = False) -> bool:
        samples = Samples(SortTokenizer(), ["a:b"], every)
        samples.drawn(rows_of([0]), Ragged.of([torch.zeros(0)]))
        return bool(samples.taken(step, is_last))

    assert [step for step in range(12) if kept(step, 4)] == [0, 1, 4, 8]
    assert [step for step in range(12) if kept(step, 0)] == [0, 1, 10]
    assert kept(7, 4, is_last=True)


def test_long_texts_are_cut_in_the_middle() -> None:
    assert shortened("x" * 1000) == "x" * 1000
    text = shortened("a" * 5000 + "b" * 5000)
    assert text.startswith("a" * 700 + " [... 9000 characters ...] ")
    assert text.endswith("b" * 300)
    assert len(text) < 1040


def test_further_numbers_are_columns_and_lines_without_the_common_ones_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, first_step=0)
    file.write(step_record(1, values={"reward/mean": 0.5, "time/step": 2.0}))
    file.close()
    assert json.loads(path.read_text())["reward/mean"] == 0.5
    (record,) = read_metrics(path)
    assert record.values == {"reward/mean": 0.5, "time/step": 2.0}
    path.write_text('{"step": 1, "reward/mean": 0.5, "time/step": 2.0}\n')
    with pytest.raises(TrainingError, match="was written by an earlier version, and its lines lack columns of today"):
        read_metrics(path)
