"""The configuration of a run: its layers, its files, its refusals, and that it survives being written."""

import json
import math
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from terrace.base.errors import ClusterError, ConfigError, ModelError, PlanError, TerraceError
from terrace.cli.overrides import parse_overrides
from terrace.plan.presets import PRESETS
from terrace.runtime.settings import OptimizerConfig
from terrace.train.config import RunConfig, run_toml
from terrace.train.keys import TrainConfig
from terrace.train.resolve import parse_run, resolve
from terrace.train.schedule import learning_rate
from tests.support.nightly import nightly
from tests.support.tiny_runs import MODEL, write_run

GPT2 = {"model_type": "gpt2", "vocab_size": 300, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 32}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
NEOX = {"model_type": "gpt_neox", "vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 1}
NEOX |= {"num_attention_heads": 2, "intermediate_size": 24, "rotary_pct": 0.5}
QWEN = {**MODEL, "model_type": "qwen2_moe", "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2}
QWEN |= {"moe_intermediate_size": 12, "shared_expert_intermediate_size": 8, "decoder_sparse_step": 2}
QWEN |= {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["sliding_attention"] * 2}
GLM = {**MODEL, "model_type": "glm4_moe", "num_key_value_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2}
GLM |= {"moe_intermediate_size": 12}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": MODEL,
    "gpt2": GPT2,
    "gpt_neox": NEOX,
    "qwen2_moe": QWEN,
    "glm4_moe": GLM,
}


def given(*words: str, config: Path | None = None, **flags: str) -> RunConfig:
    return resolve(None if config is None else str(config), flags, parse_overrides(words))


def refused(kind: type[TerraceError], *words: str, config: Path | None = None, **flags: str) -> str:
    with pytest.raises(kind) as caught:
        given(*words, config=config, **flags)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_layers_lie_over_one_another(tmp_path: Path) -> None:
    default = given()
    assert (default.cluster.name, default.plan.name, default.data.path) == ("local", "three-level", "stdlib")
    path = write_run(tmp_path, 2, 3, batch=24)
    filed = given(config=path)
    assert (filed.cluster.world_size, filed.train.batch, filed.optimizer.lr) == (6, 24, 1e-2)
    assert filed.train.checkpoint_every == default.train.checkpoint_every  # from the default
    flagged = given(config=path, plan="ddp", cluster="local", data="stdlib")
    assert (flagged.plan.name, flagged.cluster.world_size, flagged.data.path) == ("ddp", 8, "stdlib")
    words = ("--train.batch", "16", "--cluster.tiers.system.size=4", "--plan.preset", "zero3")
    over = given(*words, config=path, plan="ddp", cluster="local")
    assert (over.train.batch, over.cluster.world_size, over.plan.params) == (16, 16, "system")
    assert over.train.sequence == filed.train.sequence
    assert given("--train.steps", "3", "--train.steps", "4").train.steps == 4


def test_files_lie_beside_the_file_that_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    path = write_run(home, 2, 2)
    (home / "mine.toml").write_text('preset = "hsdp"\nmicro_batch = 2\n')
    path.write_text(tomli_w.dumps(tomllib.loads(path.read_text()) | {"plan": "mine.toml"}))
    (home / "local").mkdir()  # a preset's name wins over a folder that happens to be called so
    run = given(config=path)
    assert (run.cluster.world_size, run.plan.micro_batch, run.model.hidden_size) == (4, 2, 16)
    assert run.data.path == str(home / "text.txt")
    assert run.data.cache == str(home / "cache")
    assert run.data.tokenizer == "bytes"
    assert given("--data.path", "here.txt", config=path).data.path == "here.txt"
    assert given("--data.path", "here.txt", config=path).data.absolute().path == str(elsewhere / "here.txt")
    assert run.data.absolute() == run.data
    path.write_text(path.read_text().replace("cluster.toml", "gone.toml"))
    assert refused(ConfigError, config=path) == f"cannot read {home / 'gone.toml'}: No such file or directory"
    path.write_text(path.read_text().replace("gone.toml", "locale"))
    assert refused(ClusterError, config=path) == "no cluster preset or file 'locale'; did you mean 'local'?"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cluster", ["local", "frontier", *nightly("dgx-h100")])
def test_a_written_run_reads_back_equal(family: str, cluster: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES[family]))
    words: tuple[str, ...] = ("--train.batch", "64", "--plan.recompute", '["layers.*"]', "--train.freeze", '["head.*"]')
    words += ("--train.prompt", '"two\\nlines \\"quoted\\""', "--train.sequence", "16", "--plan.micro_batch", "2")
    for plan in PRESETS:
        run = given(*words, model=str(tmp_path), cluster=cluster, plan=plan)
        assert parse_run(tomllib.loads(run_toml(run))) == run
        assert run.train.prompt == 'two\nlines "quoted"'


BAD = [
    (ConfigError, ("--trian.steps", "5"), "unknown section 'trian'; did you mean 'train'?"),
    (ConfigError, ("--train.stepz", "5"), "unknown key train.stepz; did you mean 'train.steps'?"),
    (ConfigError, ("--train.steps", "x"), "train.steps = 'x' must be of type int"),
    (ConfigError, ("--train.steps", "2.5"), "train.steps = 2.5 must be of type int"),
    (ConfigError, ("--train.steps", "true"), "train.steps = True must be of type int"),
    (ConfigError, ("--train.compile", "True"), "train.compile = 'True' must be of type bool: write true"),
    (ConfigError, ("--data.bos", "True"), "data.bos = 'True' must be of type bool: write true"),
    (ConfigError, ("--data.path", ""), "data.path is empty: give it a value, or leave it out"),
    (ConfigError, ("--data.tokenizer", ""), "data.tokenizer is empty"),
    (ConfigError, ("--data.cache", ""), "data.cache is empty"),
    (ConfigError, ("--plan.schedule", ""), "plan.schedule is empty"),
    (ConfigError, ("--cluster.name", ""), "cluster.name is empty"),
    (ConfigError, ("--train.steps", "0"), "train.steps = 0 must be at least 1"),
    (ConfigError, ("--train.seed", "-1"), "train.seed = -1 must be at least 0"),
    (ConfigError, ("--train.keep_checkpoints", "0"), "train.keep_checkpoints = 0 must be at least 1"),
    (ConfigError, ("--train.final_lr_fraction", "nan"), "must lie between 0 and 1"),
    (ConfigError, ("--train.mtp_loss_weight", "-0.1"), "train.mtp_loss_weight = -0.1 must be positive and finite"),
    (ConfigError, ("--train.mtp_loss_weight", "nan"), "train.mtp_loss_weight = nan must be positive and finite"),
    (ConfigError, ("--train.mtp_loss_weight", "0.1"), "mtp_loss_weight = 0.1 has no effect: the model predicts no"),
    (ConfigError, ("--train.timeout_s", "inf"), "train.timeout_s = inf must be positive and at most"),
    (ConfigError, ("--train.timeout_s", "-1"), "train.timeout_s = -1.0 must be positive"),
    (ConfigError, ("--train.target_loss", "nan"), "train.target_loss = nan must be a number"),
    (ConfigError, ("--train.steps.more", "5"), "train.steps = {'more': 5} must be of type int"),
    (ConfigError, ("--optimizer.lr", "-1"), "optimizer.lr = -1.0 must be zero or a positive number"),
    (ConfigError, ("--optimizer.beta1", "1"), "optimizer.beta1 = 1.0 must be at least 0 and below 1"),
    (ConfigError, ("--train.steps",), "--train.steps needs a value"),
    (ConfigError, ("--train.steps", "--train.batch", "8"), "--train.steps needs a value"),
    (ConfigError, ("--train..steps", "5"), "has an empty key"),
    (ConfigError, ("--steps", "5"), "unknown argument '--steps'; did you mean --train.steps?"),
    (ConfigError, ("--what", "5"), "unknown argument '--what': keys are set as --section.key VALUE"),
    (ConfigError, ("--train.lr", "5"), "unknown key train.lr; did you mean 'optimizer.lr'?"),
    (ConfigError, ("--train.seq", "5"), "unknown key train.seq; did you mean 'train.sequence'?"),
    (ConfigError, ("5",), "unknown argument '5'"),
    (ConfigError, ("--plan.preset", "5"), "plan.preset = 5 must be the name of a preset"),
    (PlanError, ("--plan.preset", "zero4"), "no plan preset 'zero4'; did you mean 'zero"),
    (ConfigError, ("--plan.parms", "node"), "unknown key plan.parms; did you mean 'plan.params'?"),
    (ConfigError, ("--plan.compute", "fp8"), "plan.compute = 'fp8' is not one of its values"),
    (PlanError, ("--plan.params", "nod"), "did you mean 'node'?"),
    (PlanError, ("--plan.params", "system"), "'system' lies outside grads = 'node'"),
    (PlanError, ("--plan.mapping.node.data", "3"), "multiply to 3, but tier 'node' joins 2"),
    (PlanError, ("--plan.mapping.node.context", "3"), "multiply to 3, but tier 'node' joins 2"),
    (PlanError, ("--plan.mapping.node.context.ulysses", "2"), "cannot split the 5 heads and 5 key-value heads"),
    (PlanError, ("--plan.mapping.node.context.rings", "2"), "names 'rings'; did you mean 'ring'"),
    (PlanError, ("--plan.mapping.node.ring", "2"), "which is a part of context: write mapping.node.context.ring"),
    (ConfigError, ("--train.keep_folder", "/tmp"), "train.keep_folder = '/tmp' has no effect"),
    (ConfigError, ("--train.attention", "varlan"), "did you mean 'varlen'?"),
    (ConfigError, ("--train.attention", "varlen"), "'varlen' cannot serve: torch has kernels for CUDA alone there"),
    (
        ConfigError,
        ("--train.attention=varlen", "--cluster.device.backend=cuda", "--plan.compute=fp32"),
        "it takes bf16 and fp16",
    ),
    (ConfigError, ("--train.attention=flex",), "'flex' cannot serve: torch has no backward on a CPU there"),
    (
        ConfigError,
        ("--train.attention=sdpa", "--plan.mapping.node.context.ring=2"),
        "train.attention = 'sdpa' has no effect where ranks attend together",
    ),
    (ConfigError, ("--plan.balance", "costs"), "plan.balance = 'costs' is not one of its values"),
    (
        PlanError,
        ("--plan.balance", "cost", *(f"--cluster.tiers.{tier}.size=1" for tier in ("package", "node", "system"))),
        'balance = "cost" has no effect',
    ),
    (PlanError, ("--plan.wire.gather.node", "int3"), "is not a wire format"),
    (PlanError, ("--train.batch", "20"), "batch = 20 is not a multiple of micro_batch x data ranks"),
    (ConfigError, ("--cluster.tiers.sytem.size", "4"), "did you mean 'system'?"),
    (ClusterError, ("--cluster.tiers.system.size", "0"), "size 0"),
    (ConfigError, ("--cluster.tiers.system.size", "two"), "must be of type int"),
    (ConfigError, ("--cluster.tiers.system", "4"), "must be a table"),
    (ConfigError, ("--plan.mapping.node.tensor", "2.5"), "tensor = 2.5 must be of type int, or a table"),
    (ModelError, ("--train.freeze", '["layers.9.*"]'), "freeze pattern 'layers.9.*' matches no parameter"),
    (ModelError, ("--train.freeze", '["*"]'), "freezes every parameter: leave something to train"),
    (ConfigError, ("--train.freeze", "3"), "train.freeze = 3 must be a list"),
    (ConfigError, ("--plan.order", "2,1,0"), "plan.order = '2,1,0' must be a list, such as [2,1,0]"),
    (ModelError, ("--model.num_attention_heads", "3"), "num_attention_heads = 3"),
    (ModelError, ("--model.hiden_size", "3"), "hiden_size"),
    (ModelError, ("--model.model_type", "lama"), "did you mean 'llama'?"),
    (ConfigError, ("--model", "5"), "unknown argument '--model'"),  # a flag, which argparse takes before
]


@pytest.mark.parametrize(
    ("kind", "words", "said"), BAD, ids=lambda value: " ".join(value) if type(value) is tuple else ""
)
def test_what_cannot_be_is_refused_in_one_line(kind: type[TerraceError], words: tuple[str, ...], said: str) -> None:
    assert said in refused(kind, *words)


def test_unknown_names_and_bad_files_are_refused(tmp_path: Path) -> None:
    assert "no plan preset or file 'zero9'; did you mean 'zero" in refused(PlanError, plan="zero9")
    assert "did you mean 'dgx-h100'?" in refused(ClusterError, cluster="dgx-h10")
    for name in ("plan", "cluster", "model"):
        for impossible in ("x" * 5000, "nul\0byte"):
            with pytest.raises(TerraceError):
                resolve(None, {name: impossible}, {})
        (tmp_path / "bad.toml").write_text("a = [1,")
        with pytest.raises(ConfigError, match="is not valid TOML"):
            resolve(None, {name: str(tmp_path / "bad.toml")}, {})
    assert "cannot read" in refused(ConfigError, model=str(tmp_path))
    assert "or a model of the hub as ORG/NAME" in refused(ConfigError, model="gpt2")
    assert "cannot read" in refused(ConfigError, config=tmp_path / "absent.toml")
    (tmp_path / "latin.toml").write_bytes(b'prompt = "\xe9"')
    assert "is not UTF-8 text" in refused(ConfigError, config=tmp_path / "latin.toml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("train = 5", "train = 5 must be a table of keys"),
        ('model = ""', "model is empty: name a file, or leave it out"),
        ("data.bos = True", "is not valid TOML: Invalid value (at line 1, column 12): write true, not True"),
        ('data = "text.txt"', "data = 'text.txt' must be a table of keys"),
        ("cluster = 5", "cluster = 5 must be a table of keys"),
        ("[cluster]\nname = 'x'", "cluster.tiers must be a list of tiers"),
        ("[plan]\nmicro_batch = 4", "plan.params is missing"),
        ("[moddel]\na = 1", "unknown section 'moddel'; did you mean 'model'?"),
        ("[train]\nfreeze = [1]", "train.freeze[0] = 1 must be of type str"),
    ],
)
def test_bad_sections_of_a_file_are_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(text)
    assert said in refused(ConfigError, config=tmp_path / "run.toml")
    if text.startswith("data = "):
        assert given(config=tmp_path / "run.toml", data="other.txt").data.path == "other.txt"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--train.freeze", '["layers.*"]'), "moves layers.1.mlp.router.bias, and train.freeze pattern 'layers.*'"),
        (("--lora.rank", "2", "--lora.targets", '["layers.*.attention.*"]'), "[lora] leaves the base as it is"),
    ],
)
def test_what_is_frozen_is_not_moved_by_loads(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GLM))
    model = str(tmp_path)
    assert said in refused(ConfigError, "--balance.bias", "0.01", *words, model=model)
    for fine in (words, ("--balance.bias", "0.01")):
        assert given(*fine, model=model).model.experts is not None


@pytest.mark.parametrize("objective", ["distill", "dpo"])
def test_further_tokens_are_trained_by_the_loss_of_tokens_alone(objective: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GLM | {"num_nextn_predict_layers": 2}))
    words = ("--train.objective", objective, *(("--teacher.mix", "0.4") if objective == "distill" else ()))
    said = refused(ConfigError, *words, model=str(tmp_path))
    assert said == (
        f'the model predicts 2 further tokens, which train.objective = "{objective}" does not train: give '
        "--model.num_nextn_predict_layers 0"
    )
    assert given("--train.mtp_loss_weight", "0.1", model=str(tmp_path)).train.mtp_loss_weight == 0.1


def test_sequences_longer_than_learned_positions_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    said = refused(ModelError, "--train.sequence", "33", model=str(tmp_path))
    assert said == "train.sequence = 33 is longer than the 32 positions the model has: use at most 32"
    assert given("--train.sequence", "32", model=str(tmp_path)).model.learned_positions


def test_the_learning_rate_warms_up_and_falls_to_its_last_part() -> None:
    train = TrainConfig(steps=10, batch=1, sequence=1, warmup_steps=4, final_lr_fraction=0.1)
    rates = [learning_rate(step, train, OptimizerConfig(lr=1.0)) for step in range(11)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[7] == pytest.approx(0.55)
    assert rates[10] == pytest.approx(0.1)
    flat = replace(train, warmup_steps=0, final_lr_fraction=1.0)
    assert {learning_rate(step, flat, OptimizerConfig(lr=1.0)) for step in range(10)} == {1.0}


def rates(**changes: Any) -> list[float]:
    train = TrainConfig(
        **{"steps": 10, "batch": 1, "sequence": 1, "warmup_steps": 2, "final_lr_fraction": 0.2} | changes
    )
    return [learning_rate(step, train, OptimizerConfig(lr=2.0)) for step in range(11)]


def test_the_forms_of_the_learning_rate() -> None:
    assert rates(schedule="constant") == [1.0] + 10 * [2.0]
    assert rates(schedule="linear")[:3] == [1.0, 2.0, 2.0]
    assert rates(schedule="linear")[6] == pytest.approx(1.2)
    assert rates(schedule="linear")[10] == pytest.approx(0.4)
    for decay_steps in (4, 0.4):
        wsd = rates(schedule="wsd", decay_steps=decay_steps)
        assert wsd[:7] == [1.0] + 6 * [2.0]
        assert wsd[7:] == pytest.approx([0.4 + 1.6 * (1 - math.sqrt(part / 4)) for part in (1, 2, 3, 4)])
    assert rates(schedule="wsd", decay_steps=4, decay="linear")[7:] == pytest.approx([1.6, 1.2, 0.8, 0.4])
    assert rates(schedule="wsd", decay_steps=8)[2:4] == [2.0, pytest.approx(0.4 + 1.6 * (1 - math.sqrt(1 / 8)))]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"schedule": "wsd", "decay_steps": 9}, "longer than the 8 steps after the warm-up"),
        ({"schedule": "wsd", "decay_steps": 0.9}, "longer than the 8 steps after the warm-up"),
        ({"schedule": "wsd", "decay_steps": 0}, "at least 1, or a part of the run"),
        ({"schedule": "wsd", "decay_steps": 1.5}, "at least 1, or a part of the run"),
        ({"decay_steps": 3}, "train.decay_steps has no effect: train.schedule = 'cosine'"),
        ({"schedule": "linear", "decay": "linear"}, "train.decay has no effect: train.schedule = 'linear'"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        rates(**changes)


def test_a_schedule_is_read_from_a_table() -> None:
    assert given("--train.schedule", "wsd", "--train.decay_steps", "5").train.decay_steps == 5
    assert given("--train.schedule", "wsd", "--train.decay_steps", "0.5").train.decay_steps == 0.5
    assert "train.schedule = 'cosin' is not one of its values" in refused(ConfigError, "--train.schedule", "cosin")
    assert "decay_steps" in refused(ConfigError, "--train.schedule", "wsd", "--train.decay_steps", "true")
