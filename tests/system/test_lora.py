"""Adapters: their specs, the numbers of plain PyTorch under every plan, their cost, saving and merging."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from terrace.base.errors import ConfigError, ModelError, TerraceError
from terrace.checkpoint.layout import latest
from terrace.checkpoint.reading import Checkpoint
from terrace.cli.main import main
from terrace.cli.overrides import parse_overrides
from terrace.cluster.cluster import Cluster
from terrace.launch.start import LocalPool, World
from terrace.model.blocks import block_specs
from terrace.model.config import parse_model
from terrace.model.decoder import build_blocks, token_loss
from terrace.model.experts.config import ExpertsConfig
from terrace.model.hf.written import write_pretrained
from terrace.model.init import initial_value
from terrace.model.lora.config import LoraConfig, is_adapter, with_adapters
from terrace.model.lora.modules import add_adapters, merged
from terrace.model.lora.peft import write_adapter
from terrace.plan.mesh import Mesh
from terrace.plan.plan import Plan
from terrace.plan.presets import preset
from terrace.plan.slices import slice_blocks
from terrace.runtime.describe import describe
from terrace.train.adapted import merged_values
from terrace.train.config import run_toml
from terrace.train.resolve import parse_run, resolve
from terrace.train.trained import load_blocks
from tests.support.adapted_blocks import blocks_with, values_of
from tests.support.nightly import nightly
from tests.support.parity import Case, Outcome, check, exact, train
from tests.support.state_formula import model_state_bytes
from tests.support.tiny_runs import losses, one_line, terrace, write_run
from tests.support.toy_tables import LINEAR
from tests.support.toys import MODELS, Model, cluster_of, make_batch, run_blocks

_SIZES = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _SIZES | {"model_type": "llama", "intermediate_size": 10, "num_key_value_heads": 2},
    "qwen2": _SIZES
    | {"model_type": "qwen2", "intermediate_size": 10, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "gpt_neox": _SIZES | {"model_type": "gpt_neox", "intermediate_size": 12, "rotary_pct": 1.0},
    "gpt2": {"model_type": "gpt2", "vocab_size": 11, "n_embd": 8, "n_layer": 2, "n_head": 4, "n_positions": 16}
    | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "qwen3_5_text": LINEAR,
}
SOME = LoraConfig(rank=3, alpha=6.0, targets=("layers.0.attention.*", "*.attention.value.*", "layers.1.mlp.down.*"))
EXPERTS = ExpertsConfig(num_experts=4, per_token=2, intermediate_size=5, shared_size=6, dense_layers=(0,))
OF_MIXTURE = LoraConfig(rank=2, alpha=5.0, targets=("*.attention.*", "*.shared.*", "layers.0.mlp.*"))
EVERY = LoraConfig(rank=2, alpha=3.0)


def _model(family: str, lora: LoraConfig, experts: ExpertsConfig | None = None, **table: Any) -> Model:
    config = replace(parse_model(FAMILIES[family] | table), experts=experts)
    values = values_of(config, lora)

    def build() -> list[nn.Module]:
        return blocks_with(config, lora, lambda block, param: values[block, param])

    return Model(build, token_loss, with_adapters(block_specs(config), lora))


MODELS |= {  # also in the processes that run `train_adapted`, which import this module
    "llama, adapters": _model("llama", EVERY, tie_word_embeddings=True),
    "gpt2, some adapters": _model("gpt2", SOME),
    "deep llama, adapters": _model("llama", EVERY, num_hidden_layers=4),
    "qwen2, adapters": _model("qwen2", EVERY),
    "linear, adapters": _model("qwen3_5_text", EVERY),
    "mixture, adapters": _model("llama", OF_MIXTURE, EXPERTS, tie_word_embeddings=True),
}


def train_adapted(world: World, cluster: Cluster, cases: Sequence[Case]) -> list[Outcome]:
    """Run the cases on this rank."""
    return train(world, cluster, cases)


def staged(sizes: tuple[int, ...], name: str, **changes: Any) -> Plan:
    """A preset in fp64 with two pipeline stages on the node tier."""
    return exact(name, cluster_of(*sizes), mapping={"node": {"pipeline": 2}}, **changes)


OPERATIONS = ("block.*: attention, mlp, norms",)
GRID: dict[tuple[int, ...], list[Case]] = {
    (1,): [Case(exact("zero3", cluster_of(1)), model="gpt2, some adapters", num_micros=2)],
    (2,): [
        Case(exact(name, cluster_of(2), **changes), model=model, num_micros=2)
        for model in ("llama, adapters", "gpt2, some adapters")
        for name, changes in (
            ("ddp", {}),
            ("zero3", {"recompute": ("*",)}),
            ("zero3", {"unit": 2, "recompute": OPERATIONS}),
        )
    ]
    + [
        Case(exact("zero3", cluster_of(2), recompute=("block.1",)), model=f"{kind}, adapters", num_micros=2)
        for kind in ("mixture", "linear")
    ],
    (2, 2): [
        Case(exact("three-level", cluster_of(2, 2)), model="llama, adapters"),
        Case(exact("zero++", cluster_of(2, 2)), model="gpt2, some adapters", num_micros=2),
        Case(staged((2, 2), "zero3"), model="deep llama, adapters", num_micros=4),
        Case(staged((2, 2), "zero1", schedule="zb-h1"), model="llama, adapters", num_micros=4),
    ],
}


@pytest.mark.parametrize(
    ("sizes", "first"), [((2, 2), 0), *nightly(((1,), 0), ((2,), 0), ((2,), 1), ((2, 2), 1))], ids=str
)
def test_adapters_equal_plain_pytorch_under_every_plan(pool: LocalPool, sizes: tuple[int, ...], first: int) -> None:
    check(pool, cluster_of(*sizes), GRID[sizes][first::2], train_adapted)


def cut(sizes: tuple[int, ...], model: str, rows: dict[str, Any], name: str = "zero3", **changes: Any) -> Case:
    """Adapters beside a tensor axis in the innermost tier."""
    plan = exact(name, cluster_of(*sizes), mapping={"package": {"tensor": rows}}, **changes)
    return Case(plan, num_micros=2, model=model)


OF_TENSOR: dict[tuple[int, ...], list[Case]] = {
    (2,): [
        cut((2,), "llama, adapters", {"rows": 2}),
        cut((2,), "gpt2, some adapters", {"rows": 2}, sequence_parallel=False, recompute=("block.1",)),
        cut((2,), "llama, adapters", {"rows": 2}, tensor_chunks=2),
        cut((2,), "gpt2, some adapters", {"columns": 2}),
        cut((2,), "mixture, adapters", {"rows": 2}),
        cut((2,), "linear, adapters", {"rows": 2}),
    ],
    (4,): [
        cut((4,), "llama, adapters", {"rows": 4}, tensor_chunks=2, recompute=("block.2",)),  # 2 key-value heads
        cut((4,), "gpt2, some adapters", {"rows": 2, "columns": 2}, sequence_parallel=False),
        cut((4,), "qwen2, adapters", {"rows": 2, "columns": 2}, name="ddp"),
    ],
    (2, 2): [
        Case(
            exact(
                "zero1",
                cluster_of(2, 2),
                mapping={"package": {"tensor": 2}, "node": {"pipeline": 2}},
                schedule="zb-h1",
                tensor_chunks=3,
            ),
            num_micros=2,
            model="deep llama, adapters",
        )
    ],
}


@pytest.mark.parametrize("sizes", [(2,), *nightly(((4,),)), (2, 2)], ids=str)
def test_adapters_beside_a_tensor_axis_equal_plain_pytorch(pool: LocalPool, sizes: tuple[int, ...]) -> None:
    """Losses, gradient norms, parameters; bytes and memory are those of the program, as for any plan."""
    check(pool, cluster_of(*sizes), OF_TENSOR[sizes], train_adapted)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lora", [SOME, EVERY], ids=["some", "every"])
def test_specs_say_what_the_modules_have(family: str, lora: LoraConfig) -> None:
    config = parse_model(FAMILIES[family])
    specs = with_adapters(block_specs(config), lora)
    blocks = build_blocks(config)
    add_adapters(blocks, config, lora)
    for spec, found in zip(specs, describe(blocks, [spec.name for spec in specs]), strict=True):
        assert [(p.name, p.shape, p.trainable) for p in spec.params] == [
            (p.name, p.shape, p.trainable) for p in found.params
        ]
        assert all(param.trainable == is_adapter(param.name) for param in spec.params)
        assert all(math.prod(size for _, size in p.dims) <= p.numel for p in spec.params)
        assert spec.tied_to == found.tied_to
    num = sum(is_adapter(param.name) for spec in specs for param in spec.params)
    # The first layer of qwen3_5_text is linear: query, key, value, gate, beta, decay and output; the second has a gate.
    first, second = (7, 5) if family == "qwen3_5_text" else (4, 4)
    mlp = 2 if family in ("gpt2", "gpt_neox") else 3
    assert num == 2 * (first + 1 + 1 if lora is SOME else first + second + 2 * mlp)


@pytest.mark.parametrize("pattern", ["layers.*", "*.mlp.*", "layers.1.mlp.router.weight", "layers.1.mlp.down.weight"])
def test_routers_and_experts_take_no_adapter(pattern: str) -> None:
    config = replace(parse_model(FAMILIES["llama"]), experts=EXPERTS)
    with pytest.raises(ModelError, match=r"matches layers\.1\.mlp\.(router|gate|down)\.weight, .*: name other weights"):
        with_adapters(block_specs(config), LoraConfig(rank=1, targets=("*.attention.*", pattern)))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_merged_model_computes_the_same(family: str) -> None:
    config = parse_model(FAMILIES[family])
    values = values_of(config, SOME)

    def value(block: str, param: str) -> Tensor:
        return values[block, param]

    tokens, _ = make_batch(0, 3)
    adapted = run_blocks(blocks_with(config, SOME, value), tokens)
    plain = run_blocks(blocks_with(config, None, merged(config, SOME, value)), tokens)
    without = run_blocks(blocks_with(config, None, value), tokens)
    assert torch.allclose(adapted, plain, atol=1e-12)
    assert not torch.allclose(adapted, without, atol=1e-3)


def test_adapters_begin_as_nothing_and_by_seed_alone() -> None:
    config = parse_model(FAMILIES["llama"])

    def value(block: str, param: str, shape: tuple[int, ...] = (3, 8), seed: int = 0) -> Tensor:
        return initial_value(config, block, param, shape, seed)

    down = value("layers.0", "attention.query.lora_a")
    assert torch.equal(down, value("layers.0", "attention.query.lora_a"))
    assert not torch.equal(down, value("layers.1", "attention.query.lora_a"))
    assert not torch.equal(down, value("layers.0", "attention.query.lora_a", seed=1))
    assert 0.2 < float(down.abs().max()) < 8**-0.5
    assert not value("layers.0", "attention.query.lora_b", (8, 3)).any()


def test_only_adapters_have_gradients_and_optimizer_state() -> None:
    config, cluster = parse_model(FAMILIES["llama"]), cluster_of(2)
    specs = with_adapters(block_specs(config), EVERY)
    num_adapters = sum(spec.num_trainable for spec in specs)
    assert num_adapters == 2 * sum(
        EVERY.rank * sum(param.shape) for param in block_specs(config)[1].params if len(param.shape) == 2
    )
    for name in ("zero3", "ddp"):
        plan = replace(preset(name, cluster), compute="bf16")
        full, adapted = (model_state_bytes(cluster, plan, blocks, 1) for blocks in (block_specs(config), specs))
        share = 2 if name == "zero3" else 1
        assert adapted["optimizer"] == 3 * 4 * num_adapters // share  # master and both moments in fp32
        assert adapted["grads"] == 4 * num_adapters // share
        assert adapted["params"] > full["params"]  # the frozen model in bf16, and the adapters
        assert adapted["optimizer"] < full["optimizer"]


REFUSED: list[tuple[list[str], type[TerraceError], str]] = [
    (["--lora.rank", "0"], ConfigError, "lora.rank = 0 must be at least 1"),
    (["--lora.alpha", "8.0"], ConfigError, "lora.rank"),
    (["--lora.rank", "2", "--lora.alpha", "-1.0"], ConfigError, "lora.alpha = -1.0"),
    (["--lora.rank", "2", "--lora.targets", "[]"], ConfigError, "lora.targets is empty"),
    (["--lora.rank", "2", "--lora.targets", '["embedding.*"]'], ModelError, "matches no weight of a linear layer"),
    (["--lora.rank", "2", "--lora.dropout", "0.1"], ConfigError, "dropout"),
]


@pytest.mark.parametrize(("words", "kind", "message"), REFUSED, ids=lambda value: str(value)[-24:])
def test_what_no_adapter_can_be_is_refused(words: list[str], kind: type[TerraceError], message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        resolve(None, {"plan": "ddp"}, parse_overrides(words))
    assert "\n" not in str(caught.value)


def test_a_run_with_adapters_survives_being_written(tmp_path: Path) -> None:
    import tomllib

    words = ["--lora.rank", "4", "--lora.alpha", "8.0", "--lora.targets", '["*.mlp.*"]']
    run = resolve(str(write_run(tmp_path, 2)), {}, parse_overrides(words))
    assert run.lora == LoraConfig(rank=4, alpha=8.0, targets=("*.mlp.*",))
    assert parse_run(tomllib.loads(run_toml(run))) == run
    assert "lora" not in tomllib.loads(run_toml(replace(run, lora=None)))


def test_memory_of_adapters_beside_a_tensor_axis() -> None:
    config, cluster = parse_model(FAMILIES["llama"]), cluster_of(2)
    specs = with_adapters(block_specs(config), EVERY)
    num_adapters = sum(spec.num_trainable for spec in specs)
    for name in ("zero3", "ddp"):
        plan = replace(preset(name, cluster), compute="bf16", mapping={"package": {"tensor": 2}})
        sliced = slice_blocks(specs, Mesh.of(cluster, plan))
        found = model_state_bytes(cluster, plan, sliced, 1, sequence=8)
        # Of a pair one matrix is cut. The other is held by both ranks: sharded, as over data ranks, or whole.
        shared = sum(
            param.numel
            for block in sliced
            for param in block.params
            if is_adapter(param.name) and param.replicated_over
        )
        assert 0 < shared < num_adapters
        expected = num_adapters // 2 if name == "zero3" else (num_adapters + shared) // 2
        assert found["optimizer"] == 3 * 4 * expected
        assert found["grads"] == 4 * expected


def test_a_run_trains_adapters_goes_on_and_writes_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path, 2, plan="zero3", steps=4)
    words = ["--config", str(path), "--lora.rank", "4", "--optimizer.lr", "0.05"]
    rows = ("--plan.mapping.package.tensor", "2")
    done = terrace("train", *words, *rows, "--folder", "run", "--train.steps", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first = Checkpoint(latest(tmp_path / "run"))  # type: ignore[arg-type]
    again = terrace("train", "--resume", "run", "--plan", "ddp", "--train.steps", "8", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    last = Checkpoint(latest(tmp_path / "run"))  # type: ignore[arg-type]
    before, after = ({(b, n): v for b, n, v in each.parameters()} for each in (first, last))
    assert {key for key in before if not torch.equal(before[key], after[key])} == {
        key for key in before if is_adapter(key[1])
    }
    assert losses(tmp_path / "run")[-1] < losses(tmp_path / "run")[0] - 0.05
    config, blocks = load_blocks(last)
    assert [p.name for p in block_specs(config)[1].params] == [name for name, _ in blocks[1].named_parameters()]
    folded = {(block, name): value for block, name, value in merged_values(last)}
    moved = folded["layers.0", "mlp.up.weight"] - after["layers.0", "mlp.up.weight"]
    assert 0 < torch.linalg.matrix_rank(moved, rtol=1e-4) <= 4
    monkeypatch.chdir(tmp_path)
    assert main(["generate", "run", "--prompt", "a", "--tokens", "3"]) == 0
    assert main(["train", "--resume", "run", "--train.steps", "9", "--lora.alpha", "2.0"]) == 2
    assert "lora" in one_line(capsys.readouterr().err)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lora", [SOME, EVERY], ids=["some", "every"])
def test_peft_finds_its_names_and_the_same_model(family: str, lora: LoraConfig, tmp_path: Path) -> None:
    """The adapter is applied as the format says: W += lora_alpha / r B A for every module, with patterns over them."""
    transformers = pytest.importorskip("transformers")
    config = parse_model(FAMILIES[family])
    values = values_of(config, lora)

    def value(block: str, param: str) -> Tensor:
        return values[block, param]

    write_pretrained(tmp_path / "base", config, value, "fp64")
    assert write_adapter(tmp_path / "adapter", config, lora, value, "base") == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    table = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float64)
    modules = dict(model.named_modules())
    targeted = [
        name for name in modules if any(name == each or name.endswith(f".{each}") for each in table["target_modules"])
    ]
    named = {f"base_model.model.{name}.lora_{part}.weight" for name in targeted for part in "AB"}
    assert named == tensors.keys()
    for name in targeted:
        down, up = (tensors[f"base_model.model.{name}.lora_{part}.weight"].double() for part in "AB")
        rank = next((n for key, n in table["rank_pattern"].items() if name.endswith(key)), table["r"])
        alpha = next((n for key, n in table["alpha_pattern"].items() if name.endswith(key)), table["lora_alpha"])
        assert down.shape[0] == up.shape[1] == rank
        change = alpha / rank * up @ down
        with torch.no_grad():
            modules[name].weight.add_(change.t() if table["fan_in_fan_out"] else change)
    tokens, _ = make_batch(0, 3)
    wanted = run_blocks(blocks_with(config, lora, value), tokens)
    # Adapters are stored in fp32, and norms computed in it.
    assert torch.allclose(model(tokens).logits, wanted, atol=1e-5)
    with pytest.raises(ModelError, match="not an empty folder"):
        write_adapter(tmp_path / "adapter", config, lora, value, "base")
