"""Loss on other text: against its definition, token by token, in fp64."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from terrace.base.errors import ConfigError, DataError
from terrace.cli.main import main
from terrace.data.tokenizer import ByteTokenizer
from terrace.model.hf.pretrained import write_pretrained
from terrace.train import evaluate as module
from terrace.train.evaluate import Evaluation, evaluate
from terrace.train.trained import Trained
from tests.support.generation import MODELS, make, named
from tests.support.toys import run_blocks

TEXTS = ["", "x", "a short one", "ünïcode €", "a document that is longer than one window of the model's context " * 3]


def trained(name: str, context: int = 32, **changes: Any) -> Trained:
    config = replace(MODELS[name], **changes)
    return Trained(config=config, blocks=make(config), tokenizer=ByteTokenizer(), context=context, stops=())


@torch.no_grad()
def by_definition(model: Trained, texts: list[str], context: int, end: list[int]) -> tuple[float, int]:
    """Sum of -ln p and number of tokens, each token by a pass of its own over what is before it in its window."""
    total, count = 0.0, 0
    for text in texts:
        ids = [*text.encode(), *end]
        for place in range(1, len(ids)):
            begin = (place - 1) // context * context
            logits = run_blocks(model.blocks, torch.tensor([ids[begin:place]]))[0, -1]
            total -= float(logits.log_softmax(0)[ids[place]])
            count += 1
    return total, count


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "window"])
@pytest.mark.parametrize("row_tokens", [1, 40, 2048])
def test_loss_is_what_its_definition_says(name: str, row_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows alone and together in a row, logits in one part and in several."""
    monkeypatch.setattr(module, "_ROW_TOKENS", row_tokens)
    monkeypatch.setattr(module, "_HEAD_TOKENS", 7 if row_tokens == 40 else 256)
    model = trained(name)
    steps: list[Evaluation] = []
    found = evaluate(model, TEXTS, context=13, progress=steps.append)
    nats, count = by_definition(model, TEXTS, 13, [256])
    assert found.num_tokens == count == sum(len(text.encode()) for text in TEXTS)
    assert found.nats == pytest.approx(nats, abs=1e-10 * count)
    assert (found.num_documents, found.num_bytes) == (5, count)
    assert found.loss == pytest.approx(nats / count, rel=1e-12)
    assert found.perplexity == pytest.approx(math.exp(nats / count), rel=1e-12)
    assert found.bits_per_byte == pytest.approx(nats / math.log(2) / count, rel=1e-12)
    assert steps[-1] == found
    assert len(steps) == {1: 17, 40: 6, 2048: 1}[row_tokens]


def test_a_longer_context_is_used() -> None:
    model = trained("llama")
    short, longer = (evaluate(model, TEXTS, context=context).nats for context in (2, 30))
    assert short != pytest.approx(longer, rel=1e-6)
    assert evaluate(model, TEXTS).nats == evaluate(model, TEXTS, context=32).nats


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ConfigError, match="context = 33 is longer than the 32 positions"):
        evaluate(trained("gpt2"), TEXTS, context=33)
    with pytest.raises(ConfigError, match="context = 0 must be at least 1"):
        evaluate(trained("gpt2"), TEXTS, context=0)
    with pytest.raises(DataError, match="has token 256, but the model has 200 only"):
        evaluate(trained("llama", vocab_size=200), TEXTS)
    with pytest.raises(DataError, match="no token to predict"):
        evaluate(trained("llama"), ["", ""])


def test_the_command_prints_what_was_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, data = trained("llama"), tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[1:]))
    held = named(model.blocks)
    write_pretrained(tmp_path / "model", model.config, lambda block, key: held[block, key].detach(), "fp64")
    words = ["eval", str(tmp_path / "model"), "--data", str(data), "--tokenizer", "bytes", "--dtype", "fp64"]
    assert main([*words, "--json"]) == 0
    wanted = evaluate(model, TEXTS[1:])
    found = json.loads(capsys.readouterr().out)
    assert found["loss"] == pytest.approx(wanted.loss, rel=1e-12)
    assert found["perplexity"] == pytest.approx(wanted.perplexity, rel=1e-12)
    assert found["bits_per_byte"] == pytest.approx(wanted.bits_per_byte, rel=1e-12)
    assert [found[f"num_{name}"] for name in ("tokens", "documents", "bytes")] == [
        wanted.num_tokens,
        4,
        wanted.num_bytes,
    ]
    assert main([*words, "--documents", "2", "--context", "5"]) == 0
    said = capsys.readouterr().out
    assert f"loss           {evaluate(model, TEXTS[1:3], context=5).loss:.4f} nats per token" in said
    assert "2 documents, 12 bytes" in said
    data.write_text("".join(json.dumps({"body": text}) + "\n" for text in TEXTS[1:]))
    assert main([*words, "--documents", "2", "--data.column", "body"]) == 0
    assert "2 documents, 12 bytes" in capsys.readouterr().out
    assert main([*words, "--context", "0"]) == 2
    assert "--context 0 must be at least 1" in capsys.readouterr().err
