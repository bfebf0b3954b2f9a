"""Folders of `torch.distributed.checkpoint`: from FSDP2 and torchtitan, to both, and nothing that is unpickled."""

import io
import json
import os
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from terrace.base.errors import ModelError, TerraceError
from terrace.checkpoint.layout import complete, decode, encode
from terrace.checkpoint.reading import Checkpoint
from terrace.cli.main import main
from terrace.cli.overrides import parse_overrides
from terrace.data.batches import Batches
from terrace.launch.start import LocalPool
from terrace.model.config import load_model, parse_model
from terrace.model.dcp.metadata import read_metadata
from terrace.model.hf.folder import METADATA
from terrace.model.hf.names import sources
from terrace.model.hf.pretrained import Pretrained
from terrace.train.prepare import prepare
from terrace.train.resolve import resolve
from terrace.train.trained import load_blocks, load_trained
from tests.support.dcp_folders import Runs, a_folder, read_as
from tests.support.dcp_ranks import loads, saves
from tests.support.families import TABLES, TOKENS, our_logits, randomise, their_logits, their_model, transformers
from tests.support.tiny_runs import MODEL, one_line, terrace, write_run
from tests.support.titan import Titan
from tests.support.toys import run_blocks

dcp = pytest.importorskip("torch.distributed.checkpoint")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
WITHIN = 1e-10
STEPS = 4


def logits(pretrained: Pretrained) -> Tensor:
    pretrained.check()
    return our_logits(pretrained.config, pretrained.value, torch.float64)


def test_two_ranks_of_fsdp2_save_what_has_the_same_logits_here(pool: LocalPool, tmp_path: Path) -> None:
    table = TABLES["qwen2, tied"]
    there, _ = pool.run(2, saves, str(tmp_path / "dcp"), table, timeout_s=300.0)
    here = logits(read_as(table, tmp_path / "dcp"))
    assert (here - there).abs().max() <= WITHIN * there.abs().max()
    assert len(read_metadata(tmp_path / "dcp")["model.model.norm.weight"].chunks) == 2


@pytest.mark.parametrize("name", ["llama 3.1, 1 kv head", "gpt2", "gpt_neox"])
@pytest.mark.parametrize("keys", [(), ("app", "model")])
def test_models_of_one_process_are_read(name: str, keys: tuple[str, ...], tmp_path: Path) -> None:
    table = TABLES[name]
    their_model(tmp_path / "hf", table)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float64)
    state = model.state_dict()
    for key in reversed(keys):
        state = {key: state, "optimizer": {"state": {"lr": torch.ones(1)}}}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    here, there = logits(read_as(table, tmp_path / "dcp")), their_logits(tmp_path / "hf", torch.float64)
    assert (here - there).abs().max() <= WITHIN * there.abs().max()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run in fp64 on two ranks, with checkpoints of the last two steps."""
    folder = tmp_path_factory.mktemp("run")
    config = write_run(folder, 2, plan="zero3", steps=STEPS, checkpoint_every=1)
    words = ("--plan.compute", "fp64", "--plan.master", "fp64", "--optimizer.clip", "0")
    done = terrace("train", "--config", config, "--folder", folder / "run", *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def exported(run: Path, folder: Path, *words: str) -> Path:
    assert main(["export", str(run), str(folder), "--format", "dcp", *words]) == 0
    return folder


def batch_of(run: Path, step: int, folder: Path) -> list[Tensor]:
    given = resolve(str(run / "config.toml"), {}, {})
    train = given.train
    sources = prepare(given, folder, None).sources
    batches = Batches(sources, train.sequence, train.batch, train.seed, given.data.holdout, given.model.vocab_size)
    return [torch.from_numpy(each) for each in batches.micro_batches(step, 0, 1, train.batch)[0][:2]]


def test_fsdp2_goes_on_from_an_export_as_terrace_does(pool: LocalPool, run: Path, tmp_path: Path) -> None:
    folder = exported(run, tmp_path / "dcp", "--step", str(STEPS - 1), "--shard-bytes", "20000")
    assert len(list(folder.glob("*.distcp"))) > 2
    before, after = (Checkpoint(path) for path in complete(run / "checkpoints")[-2:])
    assert (before.step, after.step) == (STEPS - 1, STEPS)
    inputs, labels = batch_of(run, STEPS - 1, tmp_path / "prepared")
    found = pool.run(2, loads, str(folder), MODEL, inputs, labels, timeout_s=300.0)
    there, states, stepped, groups = found[0]

    here = logits_on(before, inputs)
    assert (here - there).abs().max() <= WITHIN * there.abs().max()
    given = resolve(str(run / "config.toml"), {}, {}).optimizer
    assert [each["weight_decay"] for each in groups] == [given.weight_decay, 0.0]
    for group in groups:
        assert group["betas"] == (given.beta1, given.beta2)
        assert (group["eps"], group["initial_lr"]) == (given.eps, given.lr)
        assert 0 < group["lr"] < given.lr
    for block in before.layout:
        wanted, later = before.read(block), after.read(block)
        for name, kinds in wanted.items():
            theirs = sources(parse_model(MODEL))[block, name].name
            for kind in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(states[f"state.{theirs}.{kind}"], kinds[kind])
                assert kinds[kind].any(), "a state of zeros tells nothing"
            assert states[f"state.{theirs}.step"] == STEPS - 1
            assert (stepped[theirs] - later[name]["master"]).abs().max() <= 1e-9
            assert (kinds["master"] - later[name]["master"]).abs().max() > 1e-6
    assert torch.equal(stepped["lm_head.weight"], stepped["model.embed_tokens.weight"])


def logits_on(checkpoint: Checkpoint, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return run_blocks(load_blocks(checkpoint, dtype=torch.float64)[1], tokens)


def test_an_export_is_read_again_bit_for_bit(run: Path, tmp_path: Path) -> None:
    folder, newest = exported(run, tmp_path / "dcp"), Checkpoint(complete(run / "checkpoints")[-1])
    pretrained = Pretrained(folder)  # with its own config.json
    pretrained.check(load_model(str(folder)))
    assert pretrained.dtype == "fp64"
    for block, name, value in newest.parameters():
        assert torch.equal(pretrained.value(block, name), value)
    words = ["--weights-only", "--dtype", "bf16"]
    small = exported(run, tmp_path / "small", *words)
    assert not any("optimizer" in name for name in read_metadata(small))
    assert torch.equal(
        Pretrained(small).value("head", "norm.weight"), pretrained.value("head", "norm.weight").bfloat16()
    )
    # Whole, for programs that are not distributed.
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(folder, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert whole.keys() == {"model", "optimizer"}
    assert torch.equal(whole["model"]["model.norm.weight"], pretrained.value("head", "norm.weight"))


def test_torchtitan_comes_and_goes(run: Path, tmp_path: Path) -> None:
    folder, config = exported(run, tmp_path / "dcp", "--names", "torchtitan"), parse_model(MODEL)
    model = Titan(config).double()
    randomise(model.parameters())
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    tokens = TOKENS + 100
    with torch.no_grad():
        there = model(tokens)
    here = logits_on(Checkpoint(complete(run / "checkpoints")[-1]), tokens)
    assert (here - there).abs().max() <= WITHIN * there.abs().max()
    # States of query are in the order of its rows.
    states = {
        f"optimizer.state.layers.1.attention.wq.weight.{kind}": torch.empty(16, 16).double() for kind in ("exp_avg",)
    }
    dcp.load(states, checkpoint_id=folder, no_dist=True)
    mine = Checkpoint(complete(run / "checkpoints")[-1]).read("layers.1")["attention.query.weight"]["exp_avg"]
    (theirs,) = states.values()
    assert torch.equal(theirs[1::2][:4], mine[4:8])  # the second of each pair of the first head
    newer = {
        name.replace(".attention.w", ".attention.qkv_linear.w").replace("output.", "lm_head."): value
        for name, value in model.state_dict().items()
        if ".wo." not in name
    } | {name: value for name, value in model.state_dict().items() if ".wo." in name}
    for number, saved in enumerate((model.state_dict(), newer)):
        dcp.save(saved, checkpoint_id=tmp_path / str(number), no_dist=True)
        again = our_logits(config, read_as(MODEL, tmp_path / str(number)).value, torch.float64)
        first = our_logits(config, Pretrained(folder).value, torch.float64)
        assert torch.equal(again, first)


@pytest.mark.parametrize("place", ["whole", "planner", "name", "size", "state"])
def test_a_pickle_that_would_run_something_is_refused(place: str, tmp_path: Path) -> None:
    folder, marker = a_folder(tmp_path / "dcp"), tmp_path / "marker"
    evil: Any = Runs(os.mkdir, str(marker))
    found: Any = dcp.FileSystemReader(folder).read_metadata()
    if place == "planner":
        found.planner_data = {"x": evil}
    elif place == "name":
        found.state_dict_metadata = {evil: 1}
    elif place == "size":
        found.state_dict_metadata["model.norm.weight"].size = evil
    elif place == "state":
        found.storage_meta = Runs(eval, "1 + 1")
    (folder / METADATA).write_bytes(pickle.dumps(evil if place == "whole" else found))
    with pytest.raises(ModelError, match="which DCP does not write") as caught:
        Pretrained(folder, parse_model(MODEL))
    assert str(folder / METADATA) in str(caught.value)
    assert not marker.exists()


def test_a_chunk_that_would_run_something_is_refused(tmp_path: Path) -> None:
    folder, marker = a_folder(tmp_path / "dcp"), tmp_path / "marker"
    content = io.BytesIO()
    torch.save(Runs(os.mkdir, str(marker)), content)
    (path,) = folder.glob("*.distcp")
    found: Any = dcp.FileSystemReader(folder).read_metadata()
    for info in found.storage_data.values():
        info.offset, info.length = 0, len(content.getvalue())
    (folder / METADATA).write_bytes(pickle.dumps(found))
    path.write_bytes(content.getvalue())
    with pytest.raises(ModelError, match=r"which torch\.save does not write"):
        read_as(MODEL, folder).value("head", "norm.weight")
    assert not marker.exists()


def test_damage_is_named_in_one_line(tmp_path: Path) -> None:
    folder = a_folder(tmp_path / "dcp")
    (path,) = folder.glob("*.distcp")
    content, metadata = path.read_bytes(), (folder / METADATA).read_bytes()
    path.write_bytes(content[:-100])
    with pytest.raises(ModelError, match=f"__0_0.distcp has {len(content) - 100} bytes, and .metadata needs") as caught:
        read_as(MODEL, folder)
    assert "\n" not in str(caught.value)
    path.unlink()
    with pytest.raises(ModelError, match=r"cannot read .*__0_0.distcp: No such file"):
        read_as(MODEL, folder)
    path.write_bytes(content)
    draw, num_refused = random.Random(0), 0
    for _ in range(400):
        raw = bytearray(metadata)
        if draw.random() < 0.3:
            raw = raw[: draw.randrange(len(raw))]
        else:
            raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
        (folder / METADATA).write_bytes(raw)
        said = ""
        try:
            Pretrained(folder, parse_model(MODEL)).value("head", "norm.weight")
        except TerraceError as error:  # any other fails the test; some bits are of no use
            said = str(error)
            num_refused += 1
        assert "\n" not in said
    assert num_refused > 100
    found: Any = dcp.FileSystemReader(a_folder(tmp_path / "other")).read_metadata()
    for key, value, said in (
        ("relative_path", "../__0_0.distcp", "which is no file of the folder"),
        ("transform_descriptors", ["zstd"], "through a transform of DCP"),
        ("offset", -1, "has no place in"),
        ("relative_path", "__0\n.distcp", "is no name"),
    ):
        before = {id(info): getattr(info, key) for info in found.storage_data.values()}
        for info in found.storage_data.values():
            setattr(info, key, value)
        (folder / METADATA).write_bytes(pickle.dumps(found))
        with pytest.raises(ModelError, match=said):
            read_metadata(folder)
        for info in found.storage_data.values():
            setattr(info, key, before[id(info)])


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"weight": torch.ones(2)}, "has no embedding under a name of Hugging Face or torchtitan, but weight"),
        (
            {f"{key}.model.embed_tokens.weight": torch.ones(2) for key in ("model", "ema")},
            "has more than one model, under ema., model.",
        ),
        ({"model.embed_tokens.weight": torch.ones(257, 16)}, "does not fit the model: it lacks model.layers.0"),
        ({"tok_embeddings.weight": torch.ones(257, 16).int()}, "it lacks model.layers.0"),
    ],
)
def test_what_is_no_model_is_refused(state: dict[str, Tensor], said: str, tmp_path: Path) -> None:
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(ModelError, match=said):
        read_as(MODEL, tmp_path).check()


def test_options_and_models_without_a_dcp_folder_are_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, said in (
        (("--names", "torchtitan"), "--names has no effect without --format dcp"),
        (("--weights-only",), "--weights-only has no effect without --format dcp"),
        (("--format", "dcp", "--adapter"), "which --format dcp is not"),
        (("--format", "dcp", "--shard-bytes", "0"), "--shard-bytes 0 must be at least 1"),
    ):
        assert main(["export", str(run), str(tmp_path / "out"), *words]) == 2
        assert said in one_line(capsys.readouterr().err)
    for name in ("mixtral", "gpt2"):
        dcp.save({"tok_embeddings.weight": torch.ones(2)}, checkpoint_id=tmp_path / name, no_dist=True)
        with pytest.raises(ModelError, match="dense models alone" if name == "mixtral" else "torchtitan's names"):
            read_as(TABLES[name], tmp_path / name).check()
    other = shutil.copytree(run, tmp_path / "run")
    path = other / "checkpoints" / f"step-{STEPS:08d}" / "manifest.json"
    manifest = decode(path.read_text())
    adapted = manifest | {"facts": manifest["facts"] | {"lora": {"rank": 2}}}
    lion = json.loads(json.dumps(manifest).replace('"adamw"', '"lion"'))
    for changed, said in (
        (adapted, "adapters, which an export folds into the weights"),
        (lion, "has optimizer states of lion"),
    ):
        path.write_text(encode(changed))
        assert main(["export", str(other), str(tmp_path / "out"), "--format", "dcp"]) == 2
        line = one_line(capsys.readouterr().err)
        assert said in line
        assert line.endswith("give --weights-only")
    assert not (tmp_path / "out").exists()


def test_runs_and_commands_take_a_dcp_folder(run: Path, tmp_path: Path) -> None:
    folder = exported(run, tmp_path / "dcp", "--weights-only", "--dtype", "fp32")
    words = parse_overrides(["--data.tokenizer", "bytes"])
    given = resolve(str(run.parent / "run.toml"), {"model": str(folder)}, words)
    assert given.train.weights == str(folder)
    trained = load_trained(folder, dtype="fp64", tokenizer="bytes")
    with torch.no_grad():
        here = run_blocks(trained.blocks, TOKENS)
    there = logits_on(Checkpoint(complete(run / "checkpoints")[-1]), TOKENS)
    assert (here - there).abs().max() <= 1e-5 * there.abs().max()


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "qwen3, biases"])
def test_models_with_fused_and_transposed_matrices_go_out(name: str, tmp_path: Path) -> None:
    config = write_run(tmp_path, 1, plan="ddp", steps=2)
    (tmp_path / "config.json").write_text(json.dumps(TABLES[name] | {"vocab_size": 257}))
    done = terrace("train", "--config", config, "--folder", tmp_path / "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = exported(tmp_path / "run", tmp_path / "dcp")
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    state: Any = {"model": model.state_dict(), "optimizer": {"state": {}}}
    for parameter, value in model.named_parameters():
        state["optimizer"]["state"][parameter] = {"exp_avg": torch.empty_like(value), "step": torch.zeros(())}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    there, checkpoint = model.eval()(TOKENS).logits.double(), Checkpoint(complete(tmp_path / "run" / "checkpoints")[-1])
    here = logits_on(checkpoint, TOKENS)
    assert (here - there).abs().max() <= 1e-4 * there.abs().max()
    # States lie as the weights do: read as weights, they are the checkpoint's.
    for parameter, kinds in state["optimizer"]["state"].items():
        assert kinds["step"] == 2
        state["model"][parameter] = kinds["exp_avg"]
    dcp.save(state["model"], checkpoint_id=tmp_path / "states", no_dist=True)
    read = read_as(TABLES[name] | {"vocab_size": 257}, tmp_path / "states")
    for block in checkpoint.layout:
        for parameter, kinds in checkpoint.read(block).items():
            assert torch.equal(read.value(block, parameter), kinds["exp_avg"])
