"""Evaluations during a run: the numbers of one process and of `terrace eval` under every plan, and a run as without."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from terrace.checkpoint.reading import Checkpoint
from terrace.cli.prepare import prepare
from terrace.data.corpus import read_documents
from terrace.launch.start import LocalPool, World
from terrace.train import sample
from terrace.train.config import parse_run, resolve_table
from terrace.train.evaluate import evaluate
from terrace.train.job import RunJob
from terrace.train.loop import train
from terrace.train.metrics import Outcome, Silent
from terrace.train.trained import load_trained
from tests.support.chats import CHATML, TALK, write_lines
from tests.support.tiny_runs import MODEL, metrics, write_run

STEPS, EVERY, SEQUENCE, RANKS = 4, 2, 16, 4
LIMIT_S = 140.0
HEADS = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
EXPERTS = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16}
FP64 = {"compute": "fp64", "master": "fp64"}
STAGES = {"node": {"pipeline": 2}}

pytestmark = pytest.mark.timeout(300)
pytest.importorskip("jinja2")


def table_of(
    folder: Path, *sizes: int, plan: Mapping[str, Any], model: Mapping[str, Any] = HEADS, **more: Any
) -> dict[str, Any]:
    """The table of a run in fp64 on packed texts, of which 3 sequences are held out; texts and chats are evaluated."""
    folder.mkdir(exist_ok=True)
    keys = {"steps": STEPS, "warmup_steps": 0, "eval_every": EVERY, "eval_batches": 0} | more.pop("train", {})
    path = write_run(folder, *sizes, sequence=SEQUENCE, **keys)
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("abc "), rng.choice([1, 2, 5, 9, 14, 40]))) for _ in range(150)]
    write_lines(folder / "text.jsonl", [{"text": text} for text in texts])
    write_lines(folder / "other.jsonl", [{"text": text} for text in texts[::7]] + [{"text": "abc" * 17}])
    write_lines(folder / "chats.jsonl", [{"messages": TALK}])
    (folder / "chat.jinja").write_text(CHATML)
    (folder / "config.json").write_text(json.dumps(MODEL | dict(model)))
    data = {
        "path": str(folder / "text.jsonl"),
        "documents": "whole",
        "too_long": "split",
        "holdout": 3,
        "chat_template": str(folder / "chat.jinja"),
        "eval": {
            "other": str(folder / "other.jsonl"),
            "chats": {"path": str(folder / "chats.jsonl"), "format": "chat"},
        },
    }
    own = {
        "plan": {"preset": "zero3", **FP64} | dict(plan),
        "data": data | more.pop("data", {}),
        # Counts as probed, so that its start measures nothing.
        "cluster": {"device": {"marks": {"kernels.gemm": "fitted"}}},
        **more,
    }
    return resolve_table(str(path), {}, own)


def without(table: dict[str, Any]) -> dict[str, Any]:
    """The same run without evaluations."""
    keys = ("eval_every", "eval_batches", "keep_best")
    plain = {key: value for key, value in table["train"].items() if key not in keys}
    data = {key: value for key, value in table["data"].items() if key not in ("eval", "chat_template")}
    return table | {"train": plain, "data": data}


def rank_of(world: World, job: RunJob) -> dict[Any, int]:
    """One rank; what it sent in a mean step."""
    sample._SAMPLE_TOKENS = 1
    end = train(world, job, Silent())
    assert isinstance(end, Outcome)
    return {key: size for key, size in end.measured.sent_bytes.items() if size}


def trained(pool: LocalPool, table: dict[str, Any], run: Path, going_on: bool = False) -> list[dict[str, Any]]:
    """Run to the end and return the lines of its metrics."""
    job = prepare(parse_run(table), run, None, going_on)
    sent = pool.run(job.run.cluster.world_size, rank_of, job, timeout_s=LIMIT_S)
    lines = metrics(run)
    lines[-1]["of ranks"] = sent
    return lines


def found(lines: list[dict[str, Any]]) -> list[tuple[int, str, float, float]]:
    """Step, source, loss and tokens of all evaluations."""
    return [(line["step"], name, *row.values()) for line in lines for name, row in line["eval"].items()]


def figures(lines: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Figures of the steps themselves, and the bytes of all ranks."""
    keys = ("loss", "grad_norm", "num_tokens", "quantisation_error", "router_losses", "load", "outer", "of ranks")
    return [tuple(line.get(key) for key in keys) for line in lines]


def values_of(run: Path) -> dict[str, list[float]]:
    """Parameters and optimizer state at the end of a run."""
    checkpoint = Checkpoint(run / "checkpoints" / f"step-{STEPS:08d}")
    return {
        f"{block}.{name}/{kind}": value.flatten().tolist()
        for block in checkpoint.layout
        for name, kinds in checkpoint.read(block).items()
        for kind, value in kinds.items()
    }


def of_export(run: Path, folder: Path) -> tuple[float, int]:
    """What `terrace eval` finds on the other texts."""
    result = evaluate(load_trained(run, dtype="fp64"), read_documents(folder / "other.jsonl"))
    return result.loss, result.num_tokens


PLANS: dict[str, dict[str, Any]] = {
    "zero3": {"micro_batch": 2},
    "three-level": {"preset": "three-level", "unit": 2},
    "1f1b": {"mapping": STAGES, "schedule": "1f1b"},
    "interleaved beside rows": {
        "mapping": {"package": {"tensor": 2}, **STAGES},
        "schedule": "zb-h1",
        "preset": "ddp",
        "sequence_parallel": True,
    },
    "usp": {"mapping": {"package": {"context": {"ulysses": 2}}, "node": {"context": {"ring": 2}}}, "micro_batch": 2},
    "documents dealt out": {"balance": "cost", "mapping": {"node": {"context": {"ring": 2}}}},
    "rounded": {"preset": "zero++", "compute": "fp32", "master": "fp32"},
    "coded stages": {
        "mapping": STAGES,
        "schedule": "1f1b",
        "compute": "fp32",
        "master": "fp32",
        "wire": {"pipeline": {"node": "int8"}, "pipeline_backward": {"node": "int8+feedback"}},
    },
}


@pytest.fixture(scope="module")
def alone(pool: LocalPool, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str, float, float]]:
    """The evaluations of one rank."""
    folder = tmp_path_factory.mktemp("alone")
    return found(trained(pool, table_of(folder, 1, plan={}), folder / "run"))


@pytest.mark.parametrize("name", PLANS)
def test_a_run_finds_what_one_rank_and_terrace_eval_find_and_goes_on_as_without(
    pool: LocalPool, alone: list[tuple[int, str, float, float]], tmp_path: Path, name: str
) -> None:
    table = table_of(tmp_path, 2, 2, plan=PLANS[name])
    lines = trained(pool, table, tmp_path / "run")
    plain = trained(pool, without(table), tmp_path / "plain")
    assert figures(lines) == figures(plain)
    assert values_of(tmp_path / "run") == values_of(tmp_path / "plain")
    mine = found(lines)
    assert [each[:2] for each in mine] == [(step, of) for step in (2, 4) for of in ("holdout", "other", "chats")]
    assert all(tokens > 0 for *_, tokens in mine)
    if PLANS[name].get("compute") == "fp32":
        return  # messages that round train another model
    for one, other in zip(mine, alone, strict=True):
        assert one[:2] == other[:2]
        assert one[2:] == pytest.approx(other[2:], rel=1e-10)
    loss, num_tokens = of_export(tmp_path / "run", tmp_path)
    assert mine[-2][2:] == (pytest.approx(loss, rel=1e-10), num_tokens)


OTHERS: dict[str, dict[str, Any]] = {
    "experts on ranks": {
        "plan": {"experts": {"package": {"expert": 2}}},
        "model": HEADS | EXPERTS,
        "balance": {"step": 0.01, "z": 0.001},
    },
    "adapters": {"plan": {}, "lora": {"rank": 2, "alpha": 4.0}},
    "islands": {"plan": {"preset": "zero2", "outer": {"tier": "node", "every": 3, "delay": 1, "fragments": 1}}},
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_and_loops_find_what_terrace_eval_finds_and_go_on_as_without(
    pool: LocalPool, tmp_path: Path, name: str
) -> None:
    table = table_of(tmp_path, 2, 2, **OTHERS[name])
    lines = trained(pool, table, tmp_path / "run")
    assert figures(lines) == figures(trained(pool, without(table), tmp_path / "plain"))
    assert values_of(tmp_path / "run") == values_of(tmp_path / "plain")
    loss, num_tokens = of_export(tmp_path / "run", tmp_path)
    assert found(lines)[-2][2:] == (pytest.approx(loss, rel=1e-10), num_tokens)
