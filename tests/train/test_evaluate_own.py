"""`terrace eval` of a run's own data and of conversations: the figures of the run, and those of the definition."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from terrace.cli.main import main
from terrace.data.tokenizer import load_tokenizer
from terrace.train.trained import load_trained
from tests.support.chats import TALK, write_lines, write_tokenizer
from tests.support.tiny_runs import metrics, terrace, write_run
from tests.support.toys import run_blocks


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run on conversations, on two ranks, that has evaluated a hold-out and a text."""
    folder = tmp_path_factory.mktemp("own")
    write_run(folder, 2, 1, plan="zero3")
    write_tokenizer(folder / "tokenizer")
    write_lines(folder / "talks.jsonl", [{"messages": TALK[first : first + 2]} for first in (1, 3)] * 20)
    words = "--data talks.jsonl --data.format chat --data.tokenizer tokenizer --data.holdout 0.3 --train.sequence 48"
    words += " --train.eval_every 3 --train.steps 3 --train.batch 4"
    words += " --model.vocab_size 404 --model.max_position_embeddings 99"
    eval_words = ["--data.eval.text", '{path = "text.txt", format = "text"}']
    done = terrace("train", "--config", "run.toml", *words.split(), *eval_words, "--folder", "run", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def figures(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["eval", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["eval", *words]) == 2
    return capsys.readouterr().err


def test_its_own_data_have_the_figures_of_the_run(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    told = metrics(place / "run")[-1]["eval"]
    found = figures(capsys, "run")
    assert found.keys() == told.keys() == {"holdout", "text"}
    for name, each in found.items():
        assert each["loss"] == pytest.approx(told[name]["loss"], rel=1e-6)
        assert each["num_tokens"] == told[name]["tokens"]
    assert main(["eval", "run"]) == 0
    assert f"holdout: loss {found['holdout']['loss']:.4f} nats per token" in capsys.readouterr().out


def test_a_run_is_pruned_by_its_own_data(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both losses are those of evaluations: of the run on its own data, and of what was written on a text."""
    monkeypatch.chdir(place)
    own = figures(capsys, "run").values()
    num_tokens = sum(each["num_tokens"] for each in own)
    loss = sum(each["loss"] * each["num_tokens"] for each in own) / num_tokens
    assert main(["prune", "run", "half", "--layers", "0.5", "--intermediate", "0.5"]) == 0
    said = capsys.readouterr().out
    assert f"measured on {num_tokens:,} tokens: loss {loss:.4f} of the whole model, " in said
    assert "a llama model in fp32: 1 layer, 2 heads on 1 key-value head, 16 inner features; " in said
    assert (place / "half" / "tokenizer.json").read_bytes() == (place / "tokenizer" / "tokenizer.json").read_bytes()
    assert main(["prune", "run", "less", "--layers", "0.5", "--data", "text.txt"]) == 0
    loss_of_less = capsys.readouterr().out.partition(" of the whole model, ")[2].split()[0]
    assert f"{figures(capsys, 'less', '--context', '48', '--data', 'text.txt')['loss']:.4f}" == loss_of_less


@torch.no_grad()
def test_of_conversations_the_trained_tokens_count(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    found = figures(capsys, "run", "--data", "talks.jsonl", "--data.format", "chat", "--documents", "2")
    model, tokenizer = load_trained(place / "run"), load_tokenizer("tokenizer")
    total, count = 0.0, 0
    for question, answer in (TALK[1:3], TALK[3:5]):
        # ChatML, written out: the text that an assistant's message adds is trained on.
        before = f"<|im_start|>user\n{question['content']}<|im_end|>\n<|im_start|>assistant\n"
        first = len(tokenizer.encode_prompt(before, begins_text=False))
        ids = tokenizer.encode_prompt(f"{before}{answer['content']}<|im_end|>\n", begins_text=False)
        logprobs = run_blocks(model.blocks, torch.tensor([ids[:-1].tolist()]))[0].log_softmax(-1)
        total -= sum(float(logprobs[at - 1, ids[at]]) for at in range(first, len(ids)))
        count += len(ids) - first
    assert found["num_tokens"] == count
    assert found["num_documents"] == 2
    assert found["loss"] == pytest.approx(total / count, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4)
    assert "bits_per_byte" not in found


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("run --context 8", "--context has no effect on a run's own evaluation data"),
        ("run --data.format chat", "--data.format has no effect on a run's own evaluation data"),
        ("tokenizer", "tokenizer is not a run folder, so it has no data of its own: give --data PATH"),
        ("run --data text.txt --data.chat_template x.jinja", "has no effect on text: leave it out, or give"),
        ("run --data talks.jsonl --data.format chat --data.column text", "has no effect on conversations"),
        (
            "run --data talks.jsonl --data.format chat --context 9",
            "tokens, and 10 at most are evaluated: raise --context",
        ),
    ],
)
def test_options_without_effect_and_long_conversations_are_refused(
    words: str, said: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    assert said in refusal(capsys, *words.split())


def test_changed_data_are_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another part of them would be held out, which the run may have been trained on."""
    monkeypatch.chdir(place)
    before = (place / "talks.jsonl").read_text()
    try:
        (place / "talks.jsonl").write_text(before + json.dumps({"messages": TALK[1:3]}) + "\n")
        assert "so other rows would be held out: restore it, or give --data PATH" in refusal(capsys, "run")
    finally:
        (place / "talks.jsonl").write_text(before)
