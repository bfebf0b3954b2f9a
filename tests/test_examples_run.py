"""The examples that a newcomer runs: each does as it says, and its table names them all."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn

from terrace.launch.start import LocalPool, World
from tests.support.nightly import nightly
from tests.support.tiny_runs import losses, metrics, terrace

if TYPE_CHECKING:
    from examples.graph import Graph
    from terrace.train.trainer_report import TrainerReport

EXAMPLES = Path(__file__).parents[1] / "examples"


def on_two_ranks(module: str, *words: str) -> str:
    """What an example prints under torchrun."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m"]
    done = subprocess.run(
        [*torchrun, module, *words],
        cwd=EXAMPLES.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


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


@pytest.mark.parametrize("kind", ["transformers", *nightly("own")])
def test_modules_are_trained_in_a_loop_of_ones_own(kind: str) -> None:
    if kind == "transformers":
        pytest.importorskip("transformers", reason="its model is trained")
    from examples.own_loop import own_blocks, train, transformers_blocks

    said: list[str] = []
    held_out = train({"own": own_blocks, "transformers": transformers_blocks}[kind], 25, said.append)
    assert held_out < 0.5, said


@pytest.mark.parametrize("place", ["device", *nightly("disk")])
def test_a_table_ranks_clicks_better_than_one_number_a_row(place: str) -> None:
    from examples.click_through import Clicks, logistic_regression, train

    clicks, said = Clicks(1000), list[str]()
    _, table = train(clicks, 16, 100, 1, said.append)
    if place != "device":
        below = list[str]()
        assert train(clicks, 16, 100, 1, below.append, place)[1] == table
    assert table > logistic_regression(clicks, 100) + 0.02 > 0.62, said


@pytest.mark.nightly  # three processes that import torch; on ranks, tables are tested in system/test_tables.py
def test_a_table_on_two_ranks_ranks_clicks_as_well() -> None:
    said = on_two_ranks("examples.click_through", "--ranks", "2", "--rows", "1000", "--steps", "150")
    table, logistic = (float(each) for each in re.findall(r"(?:network|regression) (0\.\d+)", said)[:2])
    assert table > logistic + 0.02 > 0.62, said


def test_a_graph_is_cut_evenly_and_copies_weigh_as_much_as_their_node() -> None:
    from examples.graph import loss_weights, planted_partition, vertex_cut

    graph = planted_partition(400, 0)
    # Vectors that number the nodes show which nodes a part copies.
    parts = vertex_cut(replace(graph, vectors=torch.arange(400)), 4)
    edges = torch.cat([part.vectors[part.edges] for part in parts], 1)
    assert torch.equal(torch.unique(edges, dim=1), graph.edges)
    assert edges.shape == graph.edges.shape
    assert max(part.edges.shape[1] for part in parts) <= 1.05 * graph.edges.shape[1] / 4
    weights = torch.zeros(400, dtype=torch.double)
    for number, part in enumerate(parts):
        weights.index_add_(0, part.vectors, loss_weights(parts, number).double())
    labels = sum(int(part.trained.sum()) for part in parts)
    # In all, each node has the same weight, and nodes with labels have as much as there are labels.
    assert weights == pytest.approx(weights[0].item())
    assert float(weights[graph.trained].sum()) == pytest.approx(labels)


@contextmanager
def in_doubles() -> Iterator[None]:
    torch.set_default_dtype(torch.double)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float)


def train_a_part(world: World, graph: "Graph", steps: int) -> "tuple[dict[str, Tensor], TrainerReport]":
    from examples.graph import train

    with in_doubles():
        _, layers, report = train(graph, steps, 0, lambda words: None)
    return nn.ModuleList(layers).state_dict(), report


def test_parts_of_a_graph_are_trained_as_by_the_weighted_mean_and_send_gradients_alone(pool: LocalPool) -> None:
    from examples.graph import LR, make_layers, planted_partition, vertex_cut

    graph = planted_partition(300, 0)
    graph = replace(graph, vectors=graph.vectors.double())
    with in_doubles():
        layers = make_layers(0)
    wanted = nn.ModuleList(layers)
    optimizer = torch.optim.AdamW(wanted.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(3):
        losses = []
        for part in vertex_cut(graph, 2):
            matrix = torch.zeros(len(part.classes), len(part.classes), dtype=torch.double)
            matrix[part.edges[0], part.edges[1]] = matrix[part.edges[1], part.edges[0]] = 1
            nodes, degrees = part.vectors, matrix.sum(1, keepdim=True)
            for layer in layers:
                nodes = layer.activation(layer.own(nodes) + layer.near(matrix @ nodes / degrees))
            each = nn.functional.cross_entropy(nodes, part.classes, reduction="none")
            losses.append((each * degrees[:, 0] / part.degrees)[part.trained].sum())
        optimizer.zero_grad()
        (torch.stack(losses).sum() / graph.trained.sum()).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(wanted.parameters(), 1.0)
        optimizer.step()
    num = sum(each.numel() for each in wanted.parameters())
    for found, report in pool.run(2, train_a_part, graph, 3):
        for name, value in wanted.state_dict().items():
            assert float((found[name] - value).abs().max()) < 1e-10, name
        # A ring's sum: each of two ranks sends half of the fp64 gradient twice. Control is a few numbers.
        sent = {message.value: count for (message, _), count in report.measured.sent_bytes.items() if count}
        assert sent.pop("sync") == 2 * num * 8 // 2
        assert sent.keys() == {"control"}
        assert report.predicted is not None
        assert report.measured.sent_bytes == report.predicted.sent_bytes


@pytest.mark.nightly  # three processes that import torch, three times
@pytest.mark.parametrize("seed", range(3))
def test_two_parts_of_a_graph_classify_as_well_as_the_whole(seed: int) -> None:
    said = on_two_ranks("examples.graph", "--seed", str(seed))
    parts, whole = (float(each) for each in re.findall(r"of the (?:parts|whole graph) (0\.\d+)", said))
    assert parts > whole - 0.01 > 0.9, said


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
