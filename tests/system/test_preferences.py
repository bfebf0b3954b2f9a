"""Reward models and DPO by `terrace train`: plans take the steps of a loop over single responses in plain PyTorch.

The reference knows a pair as two texts, runs each alone, and writes the losses as their papers do.
"""

import json
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import tomli_w
import torch
from torch import Tensor, nn

from terrace.base.errors import DataError, TerraceError
from terrace.data.batches import Batches, Source
from terrace.data.pair_tokens import prepare_pairs
from terrace.data.tokenizer import ByteTokenizer
from terrace.launch.start import World, launch_local
from terrace.launch.watchdog import Watchdog
from terrace.model.config import load_model, parse_model
from terrace.model.decoder import build_blocks
from terrace.model.hf.pretrained import Pretrained
from terrace.model.init import initialise
from terrace.runtime.comm import Comm
from terrace.train.job import RunJob
from terrace.train.loop import train
from terrace.train.metrics import Silent
from terrace.train.pairs import REFERENCE
from terrace.train.prepare import prepare
from terrace.train.resolve import resolve
from tests.support.chats import CHATML
from tests.support.nightly import nightly
from tests.support.parity import ADAMW, make_adamw, trainable
from tests.support.tiny_runs import MODEL, metrics, one_line, terrace, write_run
from tests.support.toys import run_blocks

pytestmark = pytest.mark.timeout(360)

BETA, NUM_STEPS, SEQUENCE = 0.3, 3, 24
PAIRS = [
    {"prompt": f"{number}{'?' * (number % 3)}", "chosen": "ab" * (1 + number % 2), "rejected": "c" * (1 + number % 4)}
    for number in range(8)
]


def write_pairs(folder: Path, records: list[dict[str, Any]]) -> Path:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def ids(pair: dict[str, str], member: str) -> tuple[Tensor, int]:
    """The tokens of a prompt with a response and its end, and the number of the prompt's."""
    prompt, response = pair["prompt"].encode(), pair[member].encode()
    return torch.tensor([*prompt, *response, 256]), len(prompt)


def log_probability(blocks: list[nn.Module], pair: dict[str, str], member: str) -> Tensor:
    text, start = ids(pair, member)
    logs = run_blocks(blocks, text[None, :-1])[0].log_softmax(-1)
    return torch.stack([logs[at - 1, text[at]] for at in range(start, len(text))]).sum()


def reward(blocks: list[nn.Module], pair: dict[str, str], member: str) -> Tensor:
    text, _ = ids(pair, member)
    return run_blocks(blocks, text[None])[0, -1]


@cache
def directly(objective: str) -> list[tuple[float, float, float, float]]:
    """Loss, gradient norm, accuracy and margin of each step over all pairs."""
    config = parse_model(MODEL | ({"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
                                  if objective == "reward" else {}))  # fmt: skip
    blocks = build_blocks(config, dtype=torch.float64)
    initialise(blocks, config, seed=0, dtype=torch.float64)
    parameters, found = trainable(blocks), []
    optimizer = make_adamw(parameters)
    with torch.no_grad():
        begun = [[log_probability(blocks, pair, member) for member in ("chosen", "rejected")] for pair in PAIRS] if (
            objective == "dpo"
        ) else []  # fmt: skip
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        margins = []
        for number, pair in enumerate(PAIRS):
            if objective == "reward":
                margins.append(reward(blocks, pair, "chosen") - reward(blocks, pair, "rejected"))
            else:
                one, two = (log_probability(blocks, pair, member) for member in ("chosen", "rejected"))
                margins.append(BETA * ((one - begun[number][0]) - (two - begun[number][1])))
        loss = sum((torch.log1p((-each).exp()) for each in margins), torch.zeros(())) / len(PAIRS)
        torch.autograd.backward(loss)
        norm = float(nn.utils.clip_grad_norm_(parameters, ADAMW.clip))
        optimizer.step()
        accuracy = sum(float(each.detach()) > 0 for each in margins) / len(PAIRS)
        found.append((float(loss.detach()), norm, accuracy, float(sum(margins).detach()) / len(PAIRS)))  # type: ignore[union-attr]
    return found


PLANS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "one": ((1,), {"preset": "ddp"}),
    "zero3": ((2,), {"preset": "zero3", "micro_batch": 2}),
    "pipeline": ((2,), {"preset": "zero1", "mapping": {"package": {"pipeline": 2}}, "micro_batch": 4}),
    "tensor": ((2, 2), {"preset": "zero3", "mapping": {"package": {"tensor": 2}}, "micro_batch": 2}),
}
EVERYDAY = [("zero3", "reward"), ("pipeline", "dpo")]
REST = [(plan, objective) for plan in PLANS for objective in ("reward", "dpo") if (plan, objective) not in EVERYDAY]


def write_preferences(folder: Path, plan: str, objective: str) -> list[str]:
    """Files of a run on pairs; returns the words of its command."""
    sizes, table = PLANS[plan]
    write_run(folder, *sizes, sequence=SEQUENCE)
    write_pairs(folder, PAIRS)
    train = {"steps": NUM_STEPS, "batch": len(PAIRS), "sequence": SEQUENCE, "log_every": 1, "schedule": "constant"}
    train |= {"objective": objective, "timeout_s": 60.0} | ({"beta": BETA} if objective == "dpo" else {})
    run = {
        "cluster": "cluster.toml",
        "model": "config.json",
        "plan": {"compute": "fp64", "master": "fp64", **table},
        "data": {"path": "pairs.jsonl", "format": "pairs", "cache": "cache"},
        "train": {**train, "warmup_steps": 0},
        "optimizer": {"lr": ADAMW.lr},
    }
    (folder / "run.toml").write_text(tomli_w.dumps(run))
    return ["train", "--config", "run.toml"]


@pytest.mark.parametrize(("plan", "objective"), [*EVERYDAY, *nightly(*REST)])
def test_steps_equal_a_loop_over_single_responses(tmp_path: Path, plan: str, objective: str) -> None:
    words = write_preferences(tmp_path, plan, objective)
    done = terrace(*words, "--folder", "run", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert f"{len(PAIRS)} pairs x {SEQUENCE} tokens" in done.stdout
    num_tokens = sum(len(ids(pair, member)[0]) for pair in PAIRS for member in ("chosen", "rejected"))
    for line, (loss, norm, accuracy, margin) in zip(metrics(tmp_path / "run"), directly(objective), strict=True):
        assert line["loss"] == pytest.approx(loss, abs=1e-10, rel=0)
        assert line["grad_norm"] == pytest.approx(norm, abs=1e-10, rel=0)
        assert line["pairs"] == {"accuracy": accuracy, "margin": pytest.approx(margin, abs=1e-10, rel=0)}
        assert line["num_tokens"] == num_tokens
        assert line["tokens_per_s"] * line["step_s"] == pytest.approx(num_tokens)
        assert line["tokens_per_s_per_device"] == pytest.approx(line["tokens_per_s"] / math.prod(PLANS[plan][0]))
    scored = f"scoring {2 * len(PAIRS)} responses with the starting weights"
    assert (scored in done.stdout) == (objective == "dpo")
    if plan == "one":
        check_replay(tmp_path)
    elif objective == "reward":
        check_export(tmp_path)
    else:
        check_resume(tmp_path)


def check_export(folder: Path) -> None:
    """The trained model is a folder that another run begins from; a causal model's folder has a new score."""
    assert terrace("export", "run", "out", cwd=folder).returncode == 0
    assert load_model(str(folder / "out")).scalar_head
    weights = Pretrained(folder / "out")
    weights.check()
    assert not weights.lacks_score
    refused = terrace("generate", "run", "--prompt", "a", cwd=folder)
    assert "one output a token, a score, and predicts no token" in one_line(refused.stderr)


def check_replay(folder: Path) -> None:
    """The examination of a step sees the loss that the run saw."""
    again = terrace("replay", "run", "--step", str(NUM_STEPS), cwd=folder)
    assert f"loss {metrics(folder / 'run')[-1]['loss']:.6g}, " in again.stdout, again.stderr


def check_resume(folder: Path) -> None:
    """A run that goes on has the bits of one that did not stop, and needs the reference's numbers."""
    first = terrace("train", "--config", "run.toml", "--train.steps", "1", "--folder", "apart", cwd=folder)
    assert first.returncode == 0, first.stderr
    kept = (folder / "apart" / REFERENCE).read_bytes()
    (folder / "apart" / REFERENCE).unlink()
    again = ["train", "--resume", "apart", "--train.steps", str(NUM_STEPS)]
    assert "restore it, or start a new run" in terrace(*again, cwd=folder).stderr
    (folder / "apart" / REFERENCE).write_bytes(kept)
    assert terrace(*again, cwd=folder).returncode == 0
    both = [[(line["loss"], line["grad_norm"]) for line in metrics(folder / run)] for run in ("run", "apart")]
    assert both[0] == both[1]


def scoring(world: World, job: RunJob, folder: Path) -> None:
    """A rank of a run that records the number of values in its messages and its reports to the watchdog."""
    sent, told, send, idle = list[int](), list[str](), Comm.exchange_tensors, Watchdog.idle

    def counting(comm: Comm, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        sent.append(sum(each.numel() for each in tensors))
        return send(comm, tensors)

    def telling(dog: Watchdog, what: str = "") -> None:
        told.append(what)
        idle(dog, what)

    with patch.object(Comm, "exchange_tensors", counting), patch.object(Watchdog, "idle", telling):
        train(world, job, Silent())
    (folder / f"{world.rank}.json").write_text(json.dumps([sent, told]))


def test_ranks_exchange_the_scores_of_one_pass_and_tell_how_far_they_are(tmp_path: Path) -> None:
    write_preferences(tmp_path, "zero3", "dpo")
    run = resolve(str(tmp_path / "run.toml"), {}, {"train": {"batch": 2, "steps": 1}, "data": {"cache": str(tmp_path)}})
    launch_local(2, scoring, (prepare(run, tmp_path / "run", None), tmp_path))
    for rank in range(2):
        sent, told = json.loads((tmp_path / f"{rank}.json").read_text())
        assert sent[:4] == [2] * 4
        assert [each.split(", ")[1] for each in told if each.startswith("scoring")] == [
            f"{done} of 16" for done in (4, 8, 12, 16)
        ]


def prepared(folder: Path, records: list[dict[str, Any]], template: str = "") -> Source:
    (folder / "chat.jinja").write_text(template)
    path = folder / "chat.jinja" if template else ""
    tokens = prepare_pairs(write_pairs(folder, records), ByteTokenizer(), "bytes", path, folder / "cache")
    return Source(tokens=tokens, documents="pairs", name="pairs")


def test_conversations_and_texts_make_the_same_rows(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    said = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "one"}, {"role": "user", "content": "2"}]
    good, bad = ([{"role": "assistant", "content": text}] for text in ("two", "three"))
    apart = {"prompt": said, "chosen": good, "rejected": bad}
    whole = {"chosen": said + good, "rejected": said + bad}
    rows = [
        Batches([prepared(tmp_path, [each], CHATML)], 160, 2, seed=0).rows(0, np.arange(2)) for each in (apart, whole)
    ]
    for inputs, labels in rows:
        for row, text in enumerate(("two", "three")):
            # What the assistant said before is of the prompt.
            assert bytes(labels[row][labels[row] != -100].tolist()).decode() == f"{text}<|im_end|>\n"
            assert bytes(inputs[row][inputs[row] > 0].tolist()).decode().endswith(f"assistant\n{text}<|im_end|>\n")
    assert all((one == two).all() for one, two in zip(*rows, strict=True))


def test_a_table_has_the_rows_of_its_lines(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    parquet.write_table(arrow.Table.from_pylist(PAIRS), tmp_path / "pairs.parquet")
    lines = prepared(tmp_path, PAIRS)
    table = prepare_pairs(tmp_path / "pairs.parquet", ByteTokenizer(), "bytes", "", tmp_path / "cache")
    assert table.digest == lines.tokens.digest


def test_both_members_of_a_pair_follow_one_another(tmp_path: Path) -> None:
    batches = Batches([prepared(tmp_path, PAIRS)], SEQUENCE, 6, seed=1)
    seen = [sample for step in range(8) for sample in batches.samples_of(step, 0, 1, 6).tolist()]
    assert all((one % 2, two) == (0, one + 1) for one, two in zip(seen[::2], seen[1::2], strict=True))
    # An epoch has every pair once.
    assert sorted(seen[: 2 * len(PAIRS)]) == list(range(2 * len(PAIRS)))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a member": ({"prompt": "a", "chosen": "b"}, "has no key 'rejected'"),
    "no prompt": ({"chosen": "b", "rejected": "c"}, "'chosen' is a string without a 'prompt'"),
    "mixed": ({"prompt": "a", "chosen": "b", "rejected": []}, "'rejected' does not end with a message"),
    "equal": ({"prompt": "a", "chosen": "b", "rejected": "b"}, "are equal, so nothing is preferred"),
    "empty": ({"prompt": "a", "chosen": "b", "rejected": ""}, "'rejected' is empty"),
    "empty prompt": ({"prompt": "", "chosen": "b", "rejected": "c"}, "the response begins the text"),
    "last words": (
        {"chosen": [{"role": "user", "content": "a"}], "rejected": []},
        "does not end with a message",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_record_is_named(tmp_path: Path, name: str) -> None:
    record, said = WRONG[name]
    template = CHATML if name == "last words" else ""
    with pytest.raises(DataError, match=said) as error:
        prepared(tmp_path, [PAIRS[0], record], template)
    assert "pairs.jsonl:2" in str(error.value)
    assert list((tmp_path / "cache").glob("*.tokens")) == []


def test_a_file_without_a_pair_is_named(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text("\n")
    with pytest.raises(DataError, match="holds no conversation and no pair"):
        prepare_pairs(tmp_path / "pairs.jsonl", ByteTokenizer(), "bytes", "", tmp_path / "cache")
    assert list((tmp_path / "cache").glob("*.tokens")) == []


def test_a_pair_longer_than_a_sequence_is_named(tmp_path: Path) -> None:
    source = prepared(tmp_path, [*PAIRS, {"prompt": "p", "chosen": "a", "rejected": "b" * 40}])
    with pytest.raises(DataError, match=r"rejected response of pair 9 of pairs has 42 tokens .* raise train"):
        Batches([source], SEQUENCE, 2, seed=0)


RULES: dict[str, tuple[dict[str, Any], str]] = {
    "text": ({"data": {"format": "text"}}, 'train.objective = "reward" needs pairs'),
    "tokens": ({"train": {"objective": "next-token"}}, 'data.format = "pairs" needs train.objective'),
    "holdout": ({"data": {"holdout": 2}}, "data.holdout = 2.0 is not implemented"),
    "documents": ({"data": {"documents": "whole"}}, "data.documents = 'whole' has no effect"),
    "odd": ({"plan": {"micro_batch": 1}}, "plan.micro_batch = 1 is odd"),
    "share": ({"train": {"batch": 3}}, "3 pairs in a step do not divide among 2 data ranks"),
    "beta": ({"train": {"beta": 0.5}}, "train.beta = 0.5 has no effect"),
    "no beta": ({"train": {"objective": "dpo", "beta": 0.0}}, "train.beta = 0.0 must be positive"),
    "context": ({"plan": {"mapping": {"package": {"context": 2}}}}, "pairs need whole rows"),
    "lora": ({"lora": {"rank": 2}}, r"\[lora\] would leave the score"),
}


@pytest.mark.parametrize("name", RULES)
def test_a_run_that_cannot_learn_from_pairs_is_refused(tmp_path: Path, name: str) -> None:
    overrides, said = RULES[name]
    write_preferences(tmp_path, "zero3", "reward")
    with pytest.raises(TerraceError, match=said):
        resolve(str(tmp_path / "run.toml"), {}, overrides)


def test_the_micro_batch_that_is_left_out_has_whole_pairs(tmp_path: Path) -> None:
    write_preferences(tmp_path, "one", "reward")
    run = resolve(str(tmp_path / "run.toml"), {}, {"cluster": {}})
    assert run.plan.micro_batch % 2 == 0
    assert run.model.scalar_head
    assert run.num_micros() * run.plan.micro_batch == 2 * len(PAIRS)
