"""`terrace train` where ranks attend together: the numbers of one rank, the bytes that are declared, and going on."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from terrace.launch.start import LocalPool, World
from terrace.model.pair_kernels import describe
from terrace.train import sample
from terrace.train.job import RunJob
from terrace.train.layers import resolve_table
from terrace.train.loop import train
from terrace.train.metrics import Outcome, Silent
from terrace.train.prepare import prepare
from terrace.train.recorder import EVENTS
from terrace.train.resolve import parse_run
from tests.support.nightly import nightly
from tests.support.tiny_runs import MODEL, metrics, write_run

STEPS, MIDDLE = 4, 2
LIMIT_S = 140.0
HEADS = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
USP = {"package": {"context": {"ulysses": 2}}, "node": {"context": {"ring": 2}}}

pytestmark = pytest.mark.timeout(300)


def table_of(folder: Path, *sizes: int, plan: dict[str, Any], **train: Any) -> dict[str, Any]:
    """The table of a run in fp64 on whole documents of very different lengths, packed in rows; some are longer."""
    folder.mkdir(exist_ok=True)
    path = write_run(folder, *sizes, **({"steps": STEPS, "checkpoint_every": MIDDLE, "warmup_steps": 0} | train))
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("abc "), rng.choice([1, 2, 5, 9, 14, 40]))) for _ in range(150)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "config.json").write_text(json.dumps(MODEL | HEADS))
    own = {
        "plan": {"preset": "zero3", "compute": "fp64", "master": "fp64"} | plan,
        "data": {"path": str(folder / "text.jsonl"), "documents": "whole", "too_long": "split"},
    }
    return resolve_table(str(path), {}, own)


def rank_of(world: World, job: RunJob) -> float:
    """One rank; returns the last loss."""
    sample._SAMPLE_TOKENS = 1
    end = train(world, job, Silent())
    assert isinstance(end, Outcome)
    assert end.predicted.sent_bytes == end.measured.sent_bytes or job.run.plan.balance == "cost"
    return end.final_loss


def trained(pool: LocalPool, table: dict[str, Any], run: Path, going_on: bool = False) -> list[dict[str, Any]]:
    """Run to the end and return the lines of its metrics."""
    job = prepare(parse_run(table), run, None, going_on)
    num_ranks = job.run.cluster.world_size
    assert len(set(pool.run(num_ranks, rank_of, job, timeout_s=LIMIT_S))) == 1
    return metrics(run)


def figures(lines: list[dict[str, Any]]) -> list[tuple[float, float, int]]:
    return [(line["loss"], line["grad_norm"], line["num_tokens"]) for line in lines]


def measured(table: dict[str, Any]) -> dict[str, Any]:
    """The same run on a cluster that counts as probed, so that its start measures nothing."""
    device = table["cluster"]["device"] | {"marks": {"kernels.gemm": "fitted"}}
    return table | {"cluster": table["cluster"] | {"device": device}}


@pytest.fixture(scope="module")
def alone(pool: LocalPool, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The same on one rank."""
    folder = tmp_path_factory.mktemp("alone")
    return trained(pool, measured(table_of(folder, 1, plan={})), folder / "run")


@pytest.mark.parametrize(
    "plan",
    [
        *nightly({"mapping": USP}),
        *nightly({"mapping": USP, "micro_batch": 2, "recompute": ["layers.*"]}),
        *nightly({"balance": "cost"}),
        *nightly({"balance": "cost", "mapping": {"package": {"context": {"ulysses": 2}}}, "micro_batch": 2}),
        {"balance": "cost", "mapping": {"node": {"pipeline": 2}}, "schedule": "1f1b"},
    ],
    ids=["usp", "usp, rows of two", "cost", "cost on parts", "cost in a pipeline"],
)
def test_the_numbers_are_those_of_one_rank(
    pool: LocalPool, alone: list[dict[str, Any]], tmp_path: Path, plan: dict[str, Any]
) -> None:
    lines = trained(pool, measured(table_of(tmp_path, 2, 2, plan=plan)), tmp_path / "run")
    for mine, other in zip(figures(lines), figures(alone), strict=True):
        assert mine == pytest.approx(other, abs=1e-10, rel=0)
    assert all(1 <= line["balance"] < 2 for line in lines)
    assert all(line["balance"] is None for line in alone)
    pairs = f"attention pairs: {describe(torch.device('cpu'), torch.float64)}"
    assert [pairs in line for line in (tmp_path / "run" / EVENTS).read_text().splitlines()].count(True) == 1


def test_a_run_goes_on_with_the_same_bits_and_without_the_axis(pool: LocalPool, tmp_path: Path) -> None:
    """Every start of this run would measure the cost of attention; the first measurement is kept."""
    table = table_of(tmp_path, 2, 2, plan={"balance": "cost", "mapping": {"node": {"context": {"ring": 2}}}})
    run, again, elsewhere = tmp_path / "run", tmp_path / "again", tmp_path / "elsewhere"
    whole = trained(pool, table, run)
    for copy in (again, elsewhere):
        shutil.copytree(run, copy)
        shutil.rmtree(copy / "checkpoints" / f"step-{STEPS:08d}")
    assert figures(trained(pool, table, again, going_on=True)) == figures(whole)
    plain = trained(pool, measured(table_of(tmp_path, 2, 1, plan={"preset": "ddp"})), elsewhere, going_on=True)
    assert [line["balance"] is None for line in plain] == [False] * MIDDLE + [True] * MIDDLE
    for mine, other in zip(figures(plain), figures(whole), strict=True):
        assert mine == pytest.approx(other, abs=1e-10, rel=0)
