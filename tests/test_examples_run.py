"""The examples that a newcomer runs: each does as it says, and its table names them all."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny_runs import losses, metrics, terrace

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_table_names_every_example_and_how_to_run_it() -> None:
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[([\w.]+)\]\(\1\) \| `([^`]+)` \|", text, re.M)
    files = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".toml")}
    assert {name for name, _ in rows} == files - {"__init__.py", "tiny_model.py"}
    for name, command in rows:
        assert f"-m examples.{name.removesuffix('.py')}" in command or f"examples/{name}" in command
        # The file says it in the same words.
        assert command in (EXAMPLES / name).read_text(encoding="utf-8")


def test_a_small_gpt_is_pretrained_from_a_text_file(tmp_path: Path) -> None:
    short: list[str | Path] = [
        "--train.steps",
        "6",
        "--train.eval_every",
        "6",
        "--train.batch",
        "8",
        "--data.cache",
        tmp_path / "cache",
    ]
    done = terrace(
        "train",
        "--config",
        EXAMPLES / "pretrain.toml",
        "--ranks",
        "2",
        "--folder",
        tmp_path / "run",
        *short,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "run")[-1] < losses(tmp_path / "run")[0] - 0.5


def test_a_folder_is_tuned_on_chats_and_answers_in_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the example writes and loads a model with it")
    from examples.fine_tune import ANSWER, answer, commands, write_chats
    from examples.tiny_model import write_tiny_model

    write_tiny_model(tmp_path / "base")
    write_chats(tmp_path / "chats.jsonl")
    for words in commands(tmp_path):
        done = terrace(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert ANSWER in done.stdout
    assert answer(tmp_path / "tuned") == ANSWER


@pytest.mark.parametrize("how", ["explained", pytest.param("run", marks=pytest.mark.nightly)])
def test_a_reward_function_teaches(how: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the example writes a model with it")
    from examples.grpo_reward import command, letters, write_run
    from terrace.rl.values.prompts import Sample

    write_run(tmp_path)
    assert list(
        letters([Sample(prompt="", response=text, finish="stop", data={}) for text in ("A b", "abcdefghijkl")])
    ) == [1 / 12, 1]
    words = command(tmp_path)
    if how == "explained":
        place = words.index("--folder")
        done = terrace(*words[:place], *words[place + 2 :], "--explain", cwd=EXAMPLES.parent)
        assert done.returncode == 0, done.stderr
        assert "8 prompts of 16 tokens x 8 responses of 12 tokens" in done.stdout
        return
    done = terrace(*words, "--run.steps", "7", cwd=EXAMPLES.parent)
    assert done.returncode == 0, done.stderr
    rewards = [line["reward/mean"] for line in metrics(tmp_path / "run")]
    assert rewards[-1] > 2 * rewards[0], rewards


@pytest.mark.parametrize("kind", ["own", "transformers"])
def test_modules_are_trained_in_a_loop_of_ones_own(kind: str) -> None:
    if kind == "transformers":
        pytest.importorskip("transformers", reason="its model is trained")
    from examples.own_loop import own_blocks, train, transformers_blocks

    said: list[str] = []
    held_out = train({"own": own_blocks, "transformers": transformers_blocks}[kind], 25, said.append)
    assert held_out < 0.5, said


def test_a_table_ranks_clicks_better_than_one_number_a_row() -> None:
    from examples.click_through import Clicks, logistic_regression, train

    clicks, said = Clicks(1000), list[str]()
    _, table = train(clicks, 16, 100, 1, said.append)
    assert table > logistic_regression(clicks, 100) + 0.02 > 0.62, said


@pytest.mark.nightly  # three processes that import torch; on ranks, tables are tested in system/test_tables.py
def test_a_table_on_two_ranks_ranks_clicks_as_well() -> None:
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "examples.click_through", "--ranks", "2"]
    done = subprocess.run(
        [sys.executable, *words, "--rows", "1000", "--steps", "150"],
        cwd=EXAMPLES.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    table, logistic = (float(each) for each in re.findall(r"(?:network|regression) (0\.\d+)", done.stdout)[:2])
    assert table > logistic + 0.02 > 0.62, done.stdout


def test_a_cluster_is_described_and_its_plans_are_read_in_python() -> None:
    from examples.plan_cluster import CLUSTER, best_plans
    from terrace.model.config import load_model
    from terrace.planner.evaluate import step_of
    from terrace.planner.task import Task
    from terrace.simulate.step import predict_step

    task = Task(
        model=load_model(str(EXAMPLES.parent / "docs" / "gpt-350m.json")), cluster=CLUSTER, batch=64, sequence=1024
    )
    rows = best_plans(task)
    assert len(rows) == 3
    for row in rows:
        assert 0 < row.memory_bytes < CLUSTER.device.usable_bytes
        # A step of the plan, simulated on its own, takes as long and sends as much.
        predicted = predict_step(step_of(task, row.plan))
        assert predicted.step_s == pytest.approx(row.step_s)
        assert sum(row.sent_bytes.values()) > 0
