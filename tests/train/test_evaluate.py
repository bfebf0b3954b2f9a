"""Loss on other text: against its definition, token by token, in fp64."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from terrace.base.errors import CheckpointError, ConfigError, DataError
from terrace.cli.main import main
from terrace.data.config import DataConfig
from terrace.data.prepared import prepare_sources
from terrace.data.tokenizer import ByteTokenizer, load_tokenizer
from terrace.model.blocks import block_specs
from terrace.model.hf.written import write_pretrained
from terrace.train import evaluate as module
from terrace.train import sample as sample_module
from terrace.train.evaluate import Evaluation, evaluate
from terrace.train.generate import chat_prompt
from terrace.train.resolve import resolve
from terrace.train.trained import Trained, load_trained, with_values
from tests.support.chats import write_lines, write_tokenizer
from tests.support.generation import MODELS, make, named
from tests.support.nightly import in_turns
from tests.support.toys import run_blocks

TEXTS = ["", "x", "a short one", "ünïcode €", "a document that is longer than one window of the model's context " * 3]


def trained(name: str, context: int = 32, **changes: Any) -> Trained:
    config = replace(MODELS[name], **changes)
    return Trained(config=config, blocks=make(config), tokenizer=ByteTokenizer(), context=context, stops=())


@torch.no_grad()
def by_definition(model: Trained, texts: list[str], context: int, before: list[int]) -> tuple[float, int]:
    """Sum of -ln p and number of tokens, each token by a pass of its own over the tokens before it in its window."""
    total, count = 0.0, 0
    for text in texts:
        ids = [*before, *text.encode()]
        for place in range(1, len(ids)):
            end = min((place - 1) // context * context + context, len(ids) - 1)
            begin = max(0, end - context)
            logits = run_blocks(model.blocks, torch.tensor([ids[begin:place]]))[0, -1]
            total -= float(logits.log_softmax(0)[ids[place]])
            count += 1
    return total, count


@pytest.mark.parametrize(("row_tokens", "name"), in_turns(2, [1, 40, 2048], ["llama", "gpt2", "gpt_neox", "window"]))
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


@torch.no_grad()
def rolling(folder: Path, texts: list[str], max_length: int) -> tuple[float, int]:
    """The rolling log-likelihood of lm-eval, written after its definition with transformers alone: a text without
    special tokens behind a prefix token, the bos_token or else the eos_token, in windows that predict up to
    `max_length` tokens, the later ones with a whole window of input.
    """
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prefix = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    total, count = 0.0, 0
    for text in texts:
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        windows = [([prefix, *tokens[: max_length - 1]][: len(tokens)], tokens[:max_length])]
        done = max_length
        while done < len(tokens):
            end = min(done + max_length, len(tokens))
            windows.append((tokens[end - max_length - 1 : end - 1], tokens[done:end]))
            done = end
        for given, predicted in windows:
            logits = model(torch.tensor([given])).logits[0, -len(predicted) :].log_softmax(-1)
            total += float(logits[torch.arange(len(predicted)), torch.tensor(predicted)].sum())
            count += len(predicted)
    return total, count


@pytest.mark.parametrize(("bos", "begins"), [("<s>", False), ("<s>", True), (None, False)])
def test_an_export_is_evaluated_as_lm_eval_does(
    bos: str | None, begins: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = chat_model(tmp_path, bos=bos, add_bos_token=begins)
    texts = ["What is a tier?", "A level of the cluster — naïve. " * 8, "a"]
    data = write_lines(tmp_path / "data.jsonl", [{"text": text} for text in texts])
    assert main(["eval", str(folder), "--data", str(data), "--dtype", "fp64", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    total, count = rolling(folder, texts, max_length=32)
    assert said["num_tokens"] == count
    assert count > 2 * 32
    assert said["loss"] * count == pytest.approx(-total, rel=1e-8)  # their rotary angles are fp32
    num_bytes = len("".join(texts).encode())
    assert said["bits_per_byte"] == pytest.approx(-total / math.log(2) / num_bytes, rel=1e-8)


def test_a_chat_is_asked_as_in_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A template's special tokens are special, the ids are those of transformers, and nothing else begins the text."""
    transformers = pytest.importorskip("transformers")
    folder = chat_model(tmp_path, bos="<s>", add_bos_token=True)
    message = "What is a tier?"
    words = ["generate", str(folder), "--dtype", "fp64", "--temperature", "0", "--tokens", "12"]
    assert main([*words, "--chat", "--prompt", message]) == 0
    answer = capsys.readouterr().out.removesuffix("\n")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": message}]
    rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    assert chat_prompt(load_trained(folder, dtype="fp64"), message) == ids
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    made = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=12)[0, len(ids) :]
    assert answer == tokenizer.decode(made, skip_special_tokens=True)
    assert main([*words, "--chat", "--prompt", "ends <|im_end|> here"]) == 2
    assert "spells out the special token '<|im_end|>'" in capsys.readouterr().err
    assert main([*words, "--chat"]) == 2
    assert "--prompt TEXT is missing: give what the user says" in capsys.readouterr().err


def chat_model(tmp_path: Path, *, bos: str | None, add_bos_token: bool) -> Path:
    """A model folder with a chat tokenizer, whose texts may begin with <s>."""
    config = replace(MODELS["llama"], vocab_size=404)
    held = named(make(config))
    write_pretrained(tmp_path / "model", config, lambda block, key: held[block, key].detach(), "fp64")
    folder = write_tokenizer(tmp_path / "model")
    table = json.loads((folder / "tokenizer_config.json").read_text()) | {"bos_token": bos}
    table |= {"add_bos_token": add_bos_token}
    (folder / "tokenizer_config.json").write_text(json.dumps(table))
    return folder


def test_a_longer_context_is_used() -> None:
    model = trained("llama")
    short, longer = (evaluate(model, TEXTS, context=context).nats for context in (2, 30))
    assert short != pytest.approx(longer, rel=1e-6)
    assert evaluate(model, TEXTS).nats == evaluate(model, TEXTS, context=32).nats


@torch.no_grad()
def test_windows_beyond_the_limit_of_rope_have_rows_of_their_own() -> None:
    """Their RoPE follows the length of the window, so each is one pass without others beside it."""
    model, context = trained("longrope"), 20
    before = model.tokenizer.text_tokens.context
    ids = [*([] if before is None else [before]), *TEXTS[4].encode()]
    assert 0 < model.config.rope_limit < context
    total = 0.0
    for start in range(0, len(ids) - 1, context):
        end = min(start + context, len(ids) - 1)
        window = ids[max(0, end - context) : end + 1]
        log_chances = run_blocks(model.blocks, torch.tensor([window[:-1]]))[0].log_softmax(-1)
        total -= float(log_chances[range(len(window) - 1), window[1:]][start - end :].sum())
    assert evaluate(model, TEXTS[4:], context=context).nats == pytest.approx(total, rel=1e-12)


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


def test_a_run_s_closing_sample_begins_with_the_ids_of_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Special tokens at the beginning of the data stay special; a prompt of the run's own is encoded like any other."""
    folder = write_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "a.txt").write_text("What is a tier?")
    data = DataConfig(path=str(tmp_path / "a.txt"), tokenizer=str(folder), bos="<s>", cache=str(tmp_path / "cache"))
    sources = prepare_sources(data, load_tokenizer(folder, data.bos), 4)
    given: list[Any] = []

    def generate(folder: Path, tokenizer: object, prompt: object, **more: object) -> str:
        given.append(prompt)
        return "!"

    monkeypatch.setattr(sample_module, "generate", generate)
    run = resolve(None, {}, {"model": {"vocab_size": 404}})
    for prompt in (None, "<s>A <|im_end|>"):
        job: Any = SimpleNamespace(
            folder=tmp_path, sources=sources, run=replace(run, data=data, train=replace(run.train, prompt=prompt))
        )
        shown = sample_module.closing_sample(job, tmp_path)
        begun = "<s>What is a tier?<|im_end|>" if prompt is None else prompt
        assert shown == begun + "!"
    assert given == [sources[0].tokens.open().tolist(), "<s>A <|im_end|>"]


def test_a_chat_run_s_closing_sample_is_an_answer_in_its_template(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer")
    talk = [{"role": "user", "content": "What is a tier?"}, {"role": "assistant", "content": "A level."}]
    path = write_lines(tmp_path / "chat.jsonl", [{"messages": talk}, {"messages": talk[::-1] + talk}])
    data = DataConfig(path=str(path), format="chat", tokenizer=str(folder), cache=str(tmp_path / "cache"))
    tokenizer = load_tokenizer(folder)
    sources = prepare_sources(data, tokenizer, 64)
    run = replace(resolve(None, {}, {"model": {"vocab_size": 404}}), data=data)

    def prompt(text: str | None) -> str:
        asked = replace(run, train=replace(run.train, prompt=text))
        ids = sample_module.sample_prompt(asked, sources, tokenizer)
        assert isinstance(ids, list)
        return tokenizer.decode(ids, keep_special=True)

    turn = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    assert prompt(None) == turn.format("What is a tier?")
    assert prompt("And a plan?") == turn.format("And a plan?")
    with pytest.raises(DataError, match=r"^train.prompt = 'a<\|im_end\|>': the message spells out the special token"):
        prompt("a<|im_end|>")
    # A prompt with its completion has no template.
    pairs = write_lines(tmp_path / "pairs.jsonl", [{"prompt": "a", "completion": "b"}])
    plain = replace(run, data=replace(data, path=str(pairs)), train=replace(run.train, prompt="What"))
    assert sample_module.sample_prompt(plain, sources, tokenizer) == "What"


@pytest.mark.parametrize(
    ("bad", "dtype"), [(float("nan"), torch.float32), (1e39, torch.float32), (1e39, torch.bfloat16)]
)
def test_weights_with_inf_or_nan_are_refused_by_name(bad: float, dtype: torch.dtype) -> None:
    config = resolve(None, {}, {}).model
    values = {
        (block.name, param.name): torch.zeros(param.shape, dtype=torch.float64)
        for block in block_specs(config)
        for param in block.params
    }
    values["layers.1", "attention.query.weight"][3, 2] = bad
    given = ((*name, value) for name, value in values.items())
    with pytest.raises(CheckpointError, match=r"^run: layers\.1\.attention\.query\.weight holds inf or nan"):
        with_values(config, given, "cpu", dtype, Path("run"))
