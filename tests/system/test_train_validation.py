"""Evaluations during a run: the numbers of one process and of `terrace eval` under every plan, and a run as without."""

import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from terrace.base.errors import DataError, TerraceError
from terrace.checkpoint.reading import Checkpoint
from terrace.cli.step_progress import eval_words
from terrace.data.batches import Batches
from terrace.data.corpus import read_documents
from terrace.data.documents import Documents
from terrace.data.prepared import prepare_sources
from terrace.data.text_rows import TextRows
from terrace.data.tokenizer import load_tokenizer
from terrace.launch.start import LocalPool, World
from terrace.report.plot import loss_svg
from terrace.report.run_view import run_view
from terrace.train import sample
from terrace.train.evaluate import evaluate
from terrace.train.job import RunJob
from terrace.train.layers import resolve_table
from terrace.train.loop import train
from terrace.train.metrics import Outcome, Silent, eval_lines, read_metrics
from terrace.train.prepare import prepare
from terrace.train.resolve import parse_run
from terrace.train.trackers import values_of as values_of_trackers
from terrace.train.trained import load_trained
from tests.support.chats import CHATML, TALK, write_lines
from tests.support.nightly import nightly
from tests.support.tiny_runs import MODEL, metrics, write_run

STEPS, EVERY, SEQUENCE = 4, 2, 16
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
    """One rank; returns the bytes that it sent in a mean step."""
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
    """The result of `terrace eval` on the other texts."""
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


@pytest.mark.parametrize("name", [list(PLANS)[1], *nightly(*(name for name in PLANS if name != list(PLANS)[1]))])
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
    assert mine[-2][2:] == pytest.approx((loss, num_tokens), rel=1e-10)


OTHERS: dict[str, dict[str, Any]] = {
    "experts on ranks": {
        "plan": {"experts": {"package": {"expert": 2}}},
        "model": HEADS | EXPERTS,
        "balance": {"step": 0.01, "z": 0.001},
    },
    "adapters": {"plan": {}, "lora": {"rank": 2, "alpha": 4.0}},
    "islands": {"plan": {"preset": "zero2", "outer": {"tier": "node", "every": 3, "delay": 1, "fragments": 1}}},
}


@pytest.mark.parametrize("name", nightly(*OTHERS))
def test_other_models_and_loops_find_what_terrace_eval_finds_and_go_on_as_without(
    pool: LocalPool, tmp_path: Path, name: str
) -> None:
    table = table_of(tmp_path, 2, 2, **OTHERS[name])
    lines = trained(pool, table, tmp_path / "run")
    assert figures(lines) == figures(trained(pool, without(table), tmp_path / "plain"))
    assert values_of(tmp_path / "run") == values_of(tmp_path / "plain")
    loss, num_tokens = of_export(tmp_path / "run", tmp_path)
    assert found(lines)[-2][2:] == pytest.approx((loss, num_tokens), rel=1e-10)


def plain_loss(run: Path, table: dict[str, Any]) -> tuple[float, int]:
    """Loss and tokens of the hold-out by plain blocks, row by row."""
    job = parse_run(table)
    tokenizer = load_tokenizer("bytes")
    batches = Batches(prepare_sources(job.data, tokenizer, SEQUENCE), SEQUENCE, 1, 0, holdout=job.data.holdout)
    model, total, num_tokens = load_trained(run, dtype="fp64"), 0.0, 0
    for row in range(batches.num_holdout_samples):
        inputs, labels, positions = map(torch.from_numpy, batches.holdout([row]))
        x = inputs
        for block in model.blocks:
            x = block(x, positions)
        total += float(F.cross_entropy(x[0], labels[0], ignore_index=-100, reduction="sum"))
        num_tokens += int((labels != -100).sum())
    return total / num_tokens, num_tokens


def test_the_best_checkpoint_stays_and_a_run_goes_on_with_the_same_evaluations(pool: LocalPool, tmp_path: Path) -> None:
    """A rate so high that the loss rises: the best checkpoint is an early one."""
    keys = {"keep_best": "holdout", "keep_checkpoints": 1, "eval_every": 1, "schedule": "constant"}
    alone = {"eval": {}, "chat_template": ""}
    table = table_of(tmp_path, 1, 2, plan={}, train=keys, optimizer={"lr": 0.5}, data=alone)
    run, again = tmp_path / "run", tmp_path / "again"
    first = {**table, "train": table["train"] | {"steps": 3}}
    lines = trained(pool, first, run)
    losses = [line["eval"]["holdout"]["loss"] for line in lines]
    best = 1 + losses.index(min(losses))
    assert best < 3, losses
    assert kept(run) == [best, 3]
    shutil.copytree(run, again)
    whole = trained(pool, table, tmp_path / "whole")
    assert found(trained(pool, table, again, going_on=True)) == found(whole)
    assert kept(again) == kept(tmp_path / "whole")
    loss, num_tokens = plain_loss(run, table)
    assert list(lines[-1]["eval"]["holdout"].values()) == [pytest.approx(loss, rel=1e-10), num_tokens]
    assert f"after step {best}, kept as step-{best:08d}" in (run / "events.jsonl").read_text()


def kept(run: Path) -> list[int]:
    """The steps of the checkpoints of a run."""
    return [int(path.name[5:]) for path in sorted((run / "checkpoints").iterdir())]


def test_curve_page_and_trackers_have_the_evaluations(pool: LocalPool, tmp_path: Path) -> None:
    table = table_of(tmp_path, 1, plan={}, train={"eval_batches": 1})
    trained(pool, table, tmp_path / "run")
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    values = values_of_trackers(records[-1])
    loss = records[-1].eval["holdout"]["loss"]
    assert values["eval/holdout/loss"] == loss
    assert values["eval/holdout/perplexity"] == pytest.approx(math.exp(loss))
    assert {"eval/other/loss", "eval/chats/tokens"} < values.keys()
    assert not any(name.startswith("eval/") for name in values_of_trackers(records[0]))
    assert any(f"holdout: loss {loss:.4f}" in words for words in eval_words(records[-1]))
    lines = eval_lines(records)
    assert [step for step, _ in lines["holdout"]] == [EVERY, STEPS]
    (curve,) = (curve for curve in run_view(tmp_path / "run").curves if curve.title == "Loss")
    assert dict(curve.lines) == {"loss": [(each.step, each.loss) for each in records]} | lines
    picture = loss_svg([1, 2], [3.0, 2.0], title="t", evaluated=lines)
    assert picture.count("<polyline") == 2 + len(lines)
    assert ">holdout</text>" in picture


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({"data": {"holdout": 0.0, "eval": {}, "chat_template": ""}}, "there is nothing to evaluate: hold out"),
    "no steps": ({"train": {"eval_every": 0, "eval_batches": 100}}, "data.eval has no effect: train.eval_every = 0"),
    "unknown": ({"train": {"keep_best": "holdut"}}, "'holdut' names nothing that is evaluated; did you mean 'holdout'"),
    "its name": ({"data": {"eval": {"holdout": "x"}}}, "a source named 'holdout'"),
    "a key": ({"data": {"eval": {"x": {"path": "y", "weight": 2}}}}, "unknown key data.eval.x.weight"),
    "no effect": ({"data": {"eval": {"x": {"path": "y", "too_long": "cut"}}}}, "data.eval.x.too_long has no effect"),
    "pairs": ({"data": {"eval": {"x": {"path": "y", "format": "pairs"}}}}, "data.eval.x holds pairs"),
    "no path": ({"data": {"eval": {"x": 3}}}, "data.eval.x must be a table"),
    "not there": ({"data": {"eval": {"x": "missing.txt"}, "chat_template": ""}}, "missing.txt"),
    "negative": ({"train": {"eval_every": -1}}, "train.eval_every = -1 must be at least 0"),
    "too much": ({"data": {"holdout": 100000}}, "leaves nothing to train on"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_evaluated_is_refused_before_the_start(tmp_path: Path, name: str) -> None:
    keys, words = WRONG[name]
    with pytest.raises(TerraceError, match=re.escape(words)) as error:
        prepare(parse_run(table_of(tmp_path, 1, plan={}, **keys)), tmp_path / "run", None)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_texts_with_nothing_to_predict_are_refused(tmp_path: Path) -> None:
    table = table_of(tmp_path, 1, plan={}, data={"eval": {"x": str(tmp_path / "one.jsonl")}, "chat_template": ""})
    write_lines(tmp_path / "one.jsonl", [{"text": ""}, {"text": "a"}])
    job = prepare(parse_run(table), tmp_path / "run", None)  # behind the end of a text, one token is predicted
    (source,) = job.eval_sources
    with pytest.raises(DataError, match="x of data\\.eval has no token to predict"):
        replace(source, context=None).samples(SEQUENCE)


@pytest.mark.parametrize("context", [None, 256])
@pytest.mark.parametrize("sequence", [4, 7, 64])
def test_every_token_of_a_text_is_predicted_once_in_its_window(context: int | None, sequence: int) -> None:
    """Against a loop over texts: each window reaches as far back as there is room."""
    rng = np.random.default_rng(sequence)
    texts = [rng.integers(0, 200, size).tolist() for size in (1, 2, 3, 4, 5, 8, 9, 30, 63, 64, 65)]
    whole = [[250, 251, *text, 256] for text in texts]
    starts = np.cumsum([0, *map(len, whole[:-1])])
    documents = Documents("x", np.concatenate(whole), starts)
    rows = TextRows(documents, sequence, (250, 251), 256, context)
    wanted, seen = Counter[tuple[Any, ...]](), Counter[tuple[Any, ...]]()
    for text in texts:
        w = [*([] if context is None else [context]), *text]
        for start in range(0, len(w) - 1, sequence):
            end = min(start + sequence, len(w) - 1)
            low = max(0, end - sequence)
            labels = [w[each + 1] if each >= start else -100 for each in range(low, end)]
            wanted[tuple(w[low:end]), tuple(labels)] += 1
    for row, parts in enumerate(rows.parts(np.arange(rows.num_samples))):
        inputs, given, positions = (np.full(sequence, 7) for _ in range(3))
        rows.fill(row, inputs, given, positions)
        for low, high in parts:
            assert positions[low:high].tolist() == list(range(high - low))
            seen[tuple(inputs[low:high].tolist()), tuple(given[low:high].tolist())] += 1
        assert (given[parts[-1][1] :] == -100).all()
    assert seen == wanted
