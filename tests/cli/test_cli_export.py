"""From a Hugging Face folder through `terrace train` and back: weights, tokenizer, refusals."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from terrace.base.errors import DataError, ModelError, TerraceError
from terrace.base.schema import read_table
from terrace.checkpoint.layout import latest
from terrace.checkpoint.reading import Checkpoint
from terrace.cli.main import main
from terrace.cli.overrides import parse_overrides
from terrace.data.batches import Batches
from terrace.data.tokenizer import load_tokenizer
from terrace.model.blocks import block_specs
from terrace.model.config import ModelConfig, parse_model
from terrace.model.decoder import build_blocks, token_loss
from terrace.model.hf.pretrained import Pretrained
from terrace.train.config import RunConfig
from terrace.train.prepare import prepare
from terrace.train.resolve import parse_run, resolve
from tests.support.hf_folder import TABLE, TEXT, write_folder, write_tokenizer
from tests.support.nightly import nightly
from tests.support.tiny_runs import losses, one_line, terrace, write_run
from tests.support.toys import run_blocks

os.environ["HF_HUB_OFFLINE"] = "1"

SOURCE_FILES = ["chat_template.jinja", "checksums.json", "config.json", "generation_config.json", "tokenizer.json"]


def given(*words: str, config: Path | None = None, **flags: str) -> RunConfig:
    return resolve(None if config is None else str(config), flags, parse_overrides(words))


def refused(kind: type[TerraceError], config: RunConfig, tmp_path: Path) -> str:
    """Return why a run cannot be prepared; nothing is left of it."""
    with pytest.raises(kind) as caught:
        prepare(config, tmp_path / "refused", None)
    assert not (tmp_path / "refused").exists()
    return str(caught.value)


def test_a_folder_gives_weights_and_tokenizer_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_folder(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    run = given(model="model")
    assert (run.train.weights, run.data.tokenizer) == (str(folder), str(folder / "tokenizer.json"))
    scratch = given("--train.weights", "", model="model")
    assert (scratch.train.weights, scratch.data.tokenizer) == ("", str(folder / "tokenizer.json"))
    assert given("--data.tokenizer", "bytes", model="model").data.tokenizer == "bytes"
    shape_alone = given(model="model/config.json")
    assert (shape_alone.train.weights, shape_alone.data.tokenizer) == ("", "bytes")
    others = given("--train.weights", "model", "--model.rope_theta", "900", model="model/config.json")
    assert (others.train.weights, others.data.tokenizer) == (str(folder), str(folder / "tokenizer.json"))
    assert given().train.weights == ""
    config = tmp_path / "files" / "run.toml"
    config.parent.mkdir()
    config.write_text('[train]\nweights = "../model"\n[data]\ntokenizer = "bytes"\n')
    monkeypatch.chdir("/")
    assert given(config=config).train.weights == str(folder)
    assert given(config=config).data.tokenizer == "bytes"
    config.write_text('model = "../model"')
    assert Path(given(config=config).train.weights).resolve() == folder
    for name in ("tokenizer.json", "model.safetensors.index.json", *(f.name for f in folder.glob("*.safetensors"))):
        (folder / name).unlink()
    assert (given(config=config).train.weights, given(config=config).data.tokenizer) == ("", "bytes")


def test_what_cannot_start_is_refused_before_a_folder_is_made(tmp_path: Path) -> None:
    folder, config = write_folder(tmp_path / "model"), write_run(tmp_path, 1)
    run = given("--model.num_hidden_layers", "2", config=config, model=str(folder))
    assert "it has beside the model's model.layers.2" in refused(ModelError, run, tmp_path)
    run = given("--train.weights", str(folder), config=config)
    assert "does not fit the model" in refused(ModelError, run, tmp_path)
    write_tokenizer(folder, 60)
    size = load_tokenizer(folder).vocab_size
    message = refused(DataError, given(config=config, model=str(folder)), tmp_path)
    assert f"tokenizer.json is {size - 1}, but the model's vocab_size is 96" in message
    (folder / "tokenizer.json").unlink()
    message = refused(DataError, given(config=config, model=str(folder)), tmp_path)
    assert message.startswith(f"cannot read tokenizer {folder / 'tokenizer.json'}")
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    (folder / "pytorch_model.bin").touch()
    run = given("--data.tokenizer", "bytes", "--model.vocab_size", "300", config=config, model=str(folder))
    assert "give --train.weights '' to start from scratch" in refused(ModelError, run, tmp_path)
    scratch = given("--train.weights", "", *("--data.tokenizer", "bytes"), "--model.vocab_size", "300",
                    config=config, model=str(folder))  # fmt: skip
    assert prepare(scratch, tmp_path / "scratch", None).run.train.weights == ""


def test_a_stock_gpt2_runs_with_the_flags_that_its_error_names(tmp_path: Path) -> None:
    table = {"model_type": "gpt2", "vocab_size": 96, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 32}
    folder = write_folder(tmp_path / "model", table | {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0})
    published = json.loads((folder / "config.json").read_text())
    stock = {key: value for key, value in published.items() if not key.endswith("_pdrop")} | {"attn_pdrop": 0.1}
    (folder / "config.json").write_text(json.dumps(stock))
    config = write_run(tmp_path, 1)
    with pytest.raises(ModelError) as caught:
        given(config=config, model=str(folder))
    flags = str(caught.value).partition("or give ")[2].split()
    assert len(flags) == 6
    job = prepare(given(*flags, config=config, model=str(folder)), tmp_path / "run", None)
    assert job.run.train.weights == str(folder)


def expected_loss(config: ModelConfig, folder: Path, job_of: RunConfig, tmp_path: Path) -> float:
    """The loss of the first step: the folder's weights, in one process, on the whole batch."""
    job = prepare(job_of, tmp_path / "prepared", None)
    blocks = build_blocks(config, "cpu", torch.float64)
    pretrained = Pretrained(folder)
    with torch.no_grad():
        for spec, block in zip(block_specs(config), blocks, strict=True):
            for param in spec.params:
                block.get_parameter(param.name).copy_(pretrained.value(spec.name, param.name))
        train = job_of.train
        batches = Batches(job.sources, train.sequence, train.batch, train.seed)
        inputs, labels = (torch.from_numpy(each) for each in batches.micro_batches(0, 0, 1, train.batch)[0][:2])
        return float(token_loss(run_blocks(blocks, inputs), labels)) / labels.numel()


MIXTURE = TABLE | {"model_type": "glm4_moe", "head_dim": 8, "use_qk_norm": True, "n_routed_experts": 4}
MIXTURE |= {"num_experts_per_tok": 2, "moe_intermediate_size": 12}


@pytest.mark.parametrize("model", [*nightly(TABLE), MIXTURE], ids=["dense", "mixture"])
def test_from_a_folder_and_back(model: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two ranks, parameters sharded over both, begin where one process would, and export the values that they saved."""
    folder, config = write_folder(tmp_path / "model", model), write_run(tmp_path, 2, plan="zero3", steps=2, batch=4)
    words = ["--plan.compute", "fp64", "--plan.master", "fp64", "--train.checkpoint_every", "1"]
    command: tuple[str | Path, ...] = (
        "train",
        "--config",
        config,
        "--model",
        folder,
        "--folder",
        tmp_path / "run",
        *words,
    )
    refused_rate = terrace(*command, cwd=tmp_path)  # 0.01, as the file has it
    assert "would destroy the loaded weights" in one_line(refused_rate.stderr)
    words += ["--train.high_lr", "true"]
    expected = expected_loss(parse_model(model), folder, given(*words, config=config, model=str(folder)), tmp_path)
    run = tmp_path / "run"
    done = terrace("train", "--config", config, "--model", folder, "--folder", run, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    # Long lines are folded before the first step.
    said = " ".join(done.stdout.split())
    assert f" starts from the weights in {folder}; tokenizer {folder / 'tokenizer.json'} " in said
    assert " peak learning rate 0.01: 500 times the usual 2e-05 for loaded weights under adamw, which" in said
    assert losses(run)[0] == pytest.approx(expected, rel=1e-10)
    assert "; they end with '<|endoftext|>' (0), from config.json\n" in done.stdout
    named = parse_run(read_table(run / "config.toml")).data
    assert (named.bos, named.eos) == (False, "<|endoftext|>")
    assert sorted(path.name for path in (run / "source").iterdir()) == SOURCE_FILES
    shutil.move(folder, tmp_path / "elsewhere")  # the run has all it needs

    capsys.readouterr()
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert said.startswith(
        f"wrote {tmp_path / 'out'}, the model after step 2 in fp64: chat_template.jinja, config.json"
    )
    for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "elsewhere" / name).read_bytes()
    table = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (table["bos_token_id"], table["eos_token_id"], table["pad_token_id"]) == (1, [0, 2], None)
    newest = latest(run)
    assert newest is not None
    exported, count = Pretrained(tmp_path / "out"), 0
    exported.check(parse_model(model))
    for block, param, value in Checkpoint(newest).parameters():
        assert torch.equal(exported.value(block, param), value)
        count += 1
    assert count == sum(len(block.params) for block in block_specs(parse_model(model)))

    assert main(["export", str(run), str(tmp_path / "first"), "--step", "1", "--dtype", "bf16"]) == 0
    first = safetensors.torch.load_file(tmp_path / "first" / "model.safetensors")
    last = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert first.keys() == last.keys()
    assert {tensor.dtype for name, tensor in first.items() if "bias" not in name} == {torch.bfloat16}
    assert not torch.equal(first["model.norm.weight"].double(), last["model.norm.weight"])
    refuse_exports(run, tmp_path, capsys)
    # A resume needs neither the weights nor to be told about them again.
    assert main(["train", "--resume", str(run), "--train.weights", ""]) == 2
    assert "leave out --train.weights" in one_line(capsys.readouterr().err)
    transformers_agrees(tmp_path / "out", exported)
    tokenizer = tmp_path / "elsewhere" / "tokenizer.json"
    again = ("--resume", run, "--train.steps", "3", "--data.tokenizer", tokenizer)
    done = terrace("train", *again, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "starts from" not in done.stdout
    assert len(losses(run)) == 3


def refuse_exports(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each of these exports is refused in a line."""
    for words, message in (
        (["run", "out"], "out is there and not an empty folder: name a new one"),
        (["run", "new", "--step", "7"], "has no checkpoint after step 7, but after 1, 2"),
        (["run", "new", "--shard-bytes", "0"], "--shard-bytes 0 must be at least 1"),
        (["run", "new", "--dtype", "int8"], "--dtype: invalid choice: 'int8'"),
        (["run", "new", "--train.steps", "3"], "unknown argument '--train.steps'"),
        (["model", "new"], "is not a run folder"),
    ):
        given = [str(tmp_path / words[0]), str(tmp_path / words[1]), *words[2:]]
        assert main(["export", *given]) == 2
        assert message in one_line(capsys.readouterr().err)
    assert not (tmp_path / "new").exists()


def transformers_agrees(folder: Path, exported: Pretrained) -> None:
    """`transformers` loads the folder, with the same logits and the same tokens."""
    transformers = pytest.importorskip("transformers")
    encoded = transformers.AutoTokenizer.from_pretrained(folder)(TEXT, add_special_tokens=False)["input_ids"]
    assert encoded == load_tokenizer(folder).encode(TEXT).tolist()
    assert transformers.AutoTokenizer.from_pretrained(folder).eos_token == "<|endoftext|>"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    blocks = build_blocks(exported.config, "cpu", torch.float32)
    with torch.no_grad():
        for spec, block in zip(block_specs(exported.config), blocks, strict=True):
            for param in spec.params:
                block.get_parameter(param.name).copy_(exported.value(spec.name, param.name))
        tokens = torch.tensor([encoded])
        assert torch.allclose(model(tokens).logits, run_blocks(blocks, tokens), rtol=0, atol=1e-5)
