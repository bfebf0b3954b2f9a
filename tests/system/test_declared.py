"""Declared models of `transformers` under tensor and context axes: the numbers of one process."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import terrace
from terrace.base.errors import ModelError, TerraceError
from terrace.launch.start import LocalPool, World
from terrace.model.attention_plans import DeclaredAttention
from terrace.model.hf import declared as declarations
from tests.support.declared_models import (
    DIMS,
    MODELS,
    Declared,
    alone,
    declaration_of,
    model_of,
    train_on_ranks,
    trained,
)
from tests.support.families import TOKENS, transformers
from tests.support.nightly import nightly
from tests.support.toys import cluster_of

TOLERANCE = 1e-10


def plan(mapping: dict[str, Any], preset: str = "zero3", **changes: Any) -> dict[str, Any]:
    return {"preset": preset, "mapping": mapping, "compute": "fp64", "master": "fp64", "micro_batch": 4} | changes


TENSOR = {"package": {"tensor": 2}}
CASES: dict[tuple[int, ...], list[Declared]] = {
    (2,): [
        Declared("llama", (2,), plan(TENSOR)),
        Declared("qwen3, tied", (2,), plan(TENSOR, "ddp", sequence_parallel=False), packed=True),
        Declared("qwen2, 1 kv head", (2,), plan(TENSOR, tensor_chunks=2, recompute=["layers.1"])),
        Declared("mistral, window", (2,), plan(TENSOR)),
        Declared("llama", (2,), plan({"package": {"context": {"ring": 2}}}), packed=True),
        Declared("qwen3, tied", (2,), plan({"package": {"context": {"ulysses": 2}}}, "zero1")),
        Declared("mistral, window", (2,), plan({"package": {"context": {"ring": 2}}})),
        Declared("olmo2, norms of all heads", (2,), plan(TENSOR)),
    ],
    (2, 2): [
        Declared("llama", (2, 2), plan(TENSOR | {"node": {"context": {"ring": 2}}}), packed=True),
        Declared("qwen3, tied", (2, 2), plan(TENSOR | {"node": {"pipeline": 2}}, "zero1")),
    ],
}


# Four processes that import transformers take longer than the cases.
@pytest.mark.parametrize(
    ("sizes", "first"), [((2,), 1), *nightly(((2,), 0), ((2,), 2), ((2,), 3), ((2, 2), 0), ((2, 2), 1))], ids=str
)
def test_declared_models_equal_one_process(pool: LocalPool, sizes: tuple[int, ...], first: int) -> None:
    cases = CASES[sizes][first::4]
    world = cluster_of(*sizes).world_size
    found = pool.run(world, train_on_ranks, cases, timeout_s=300.0)
    for index, case in enumerate(cases):
        losses, norms, parameters = trained(alone(case))
        for rank in range(world):
            own = found[rank][index]
            assert max(abs(a - b) for a, b in zip(own[0], losses, strict=True)) < TOLERANCE, case
            assert max(abs(a - b) for a, b in zip(own[1], norms, strict=True)) < TOLERANCE, case
            assert own[2].keys() == parameters.keys()
            worst = max(float((own[2][name] - parameters[name]).abs().max()) for name in parameters)
            assert worst < TOLERANCE, (case, worst)


PAGE = Path(__file__).parents[2] / "docs" / "declaring.md"


def shown(world: World, plan: str) -> tuple[float, float]:
    """Loss and gradient norm of the page's example under a plan."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    assert 'plan="zero3"' in code
    found: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(code.replace('plan="zero3"', plan), found)
    found["trainer"].close()
    return found["result"].loss, found["result"].grad_norm


def test_the_example_of_the_page_gives_the_same_numbers_under_its_plans(pool: LocalPool) -> None:
    plans = re.findall(r"^plan=.*$", PAGE.read_text(encoding="utf-8"), re.M)
    assert len(plans) == 2
    wanted = pool.run(1, shown, 'plan="zero3"', timeout_s=120.0)[0]
    for each in plans:
        for found in pool.run(2, shown, each, timeout_s=120.0):
            assert found == pytest.approx(wanted, rel=1e-5)


def test_a_declared_model_keeps_its_own_forward() -> None:
    model = model_of("mistral, window")
    with torch.no_grad():
        before = model(TOKENS).logits
        blocks = terrace.blocks_of(model, declaration_of("mistral, window"))
        x = TOKENS
        for block in blocks:
            x = block(x)
        assert torch.equal(model(TOKENS).logits, before)
    assert (x - before).abs().max() < 1e-6 * before.abs().max()
    assert model.config._attn_implementation == "sdpa"


def declared(model: Any = None, **changes: Any) -> str:
    """Why a declaration is refused."""
    options = {"heads": 4, "kv_heads": 2, "dims": DIMS, **changes}
    with pytest.raises(ModelError) as caught:
        terrace.blocks_of(model or model_of("llama"), terrace.Declaration(**options))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def without(name: str) -> dict[str, Any]:
    return {pattern: dims for pattern, dims in DIMS.items() if pattern != name}


def test_declarations_that_do_not_fit_are_refused() -> None:
    assert "model.norm.weight [24] fits no pattern of the declaration" in declared(dims=without("model.norm.weight"))
    assert "fits '*.q_proj.weight' and 'model.*q_proj*'" in declared(
        dims=DIMS | {"model.*q_proj*": ("heads", "hidden")}
    )
    assert "counts 'head', which no axis knows" in declared(dims=DIMS | {"*.q_proj.weight": ("head", "hidden")})
    assert "names 1 dims" in declared(dims=DIMS | {"*.q_proj.weight": ("heads",)})
    assert "heads = 0 of a declaration" in declared(heads=0)
    assert "a dim of 24 declared as heads, and heads = 5 does not divide it" in declared(heads=5)
    assert "gives a head the size 6, and layers.0.layer.self_attn.q_proj.weight 3" in declared(heads=8)
    swapped = DIMS | {"*.up_proj.weight": ("hidden", "intermediate")}
    assert "layers.0.layer.mlp.up_proj.weight [36, 24] gives hidden the size 36" in declared(dims=swapped)
    no_output = DIMS | {"*.o_proj.weight": ("hidden", "hidden")}
    assert "has 0 parameters with the dims (hidden, heads)" in declared(dims=no_output)
    eager = model_of("llama")
    eager.set_attn_implementation("eager")
    assert "does not attend by attn_implementation = 'sdpa'" in declared(eager)
    odd = model_of("llama")
    odd.model.norm = Plus(odd.model.norm)
    assert "computes neither torch's rms_norm nor its layer_norm" in declared(odd)
    table = {"model_type": "gpt2", "vocab_size": 61, "n_embd": 24, "n_layer": 1, "n_head": 4, "n_positions": 40}
    gpt2 = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**table)).eval()
    dims = {"*.wte.weight": ("vocab", "hidden"), "*.wpe.weight": ("positions", "hidden"), "*ln_*": ("hidden",)}
    dims |= {"*.c_attn.weight": ("hidden", "heads"), "*.c_attn.bias": ("heads",), "*.c_proj.bias": ("hidden",)}
    dims |= {"*.attn.c_proj.weight": ("hidden", "hidden"), "*.mlp.c_proj.weight": ("intermediate", "hidden")}
    dims |= {"*.c_fc.weight": ("hidden", "intermediate"), "*.c_fc.bias": ("intermediate",)}
    assert "is a Conv1D: a declared matrix belongs to an nn.Linear" in declared(gpt2, kv_heads=None, dims=dims)


def test_a_layer_that_does_not_pass_its_window_is_refused() -> None:
    """Attention functions of `transformers` get the window by name, and some layers leave it out."""
    layer, parts = torch.nn.Module(), torch.ones(1, 2, 6, 4)
    attention = layer.__dict__[declarations._SITE] = DeclaredAttention(4, is_grouped=False)
    with attention.on(None):
        with pytest.raises(ModelError, match="attends within all tokens, and its configuration says 4"):
            declarations._attention(layer, parts, parts, parts, None)
        out, _ = declarations._attention(layer, parts, parts, parts, None, sliding_window=4)
    assert out.shape == (1, 6, 2, 4)


class Plus(torch.nn.Module):
    """A norm whose weight is added to 1."""

    def __init__(self, other: Any) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(other.weight.detach() - 1), other.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, self.weight.shape, 1 + self.weight, self.eps)


def columns(world: World) -> str:
    """Why a plan with columns, and one with another micro-batch, are refused."""
    said = []
    for mapping, size in (({"columns": 2}, 4), ({"rows": 2}, 1)):
        try:
            trained(Declared("llama", (2,), plan({"package": {"tensor": mapping}}, micro_batch=size)))
        except TerraceError as error:
            said.append(str(error))
    return " | ".join(said)


def test_plans_that_declared_blocks_cannot_have_are_refused(pool: LocalPool) -> None:
    for said in pool.run(2, columns, timeout_s=120.0):
        assert "columns = 2 would cut the residual stream of declared blocks" in said
        assert "labels of shape (4, 12), but the tensor axis has messages for (1, 12): set plan.micro_batch" in said


_DROPOUT = ("resid_pdrop", "embd_pdrop", "attn_pdrop")


@pytest.mark.parametrize("name", MODELS)
def test_a_known_family_declares_itself(name: str) -> None:
    """The dims of each parameter are those of a declaration by hand."""
    model, by_hand = model_of(name), declaration_of(name)
    found = terrace.Declaration.of(model)
    assert (found.heads, found.kv_heads) == (by_hand.heads, by_hand.kv_heads)
    for parameter, value in model.named_parameters():
        shape = tuple(value.shape)
        assert found.dims_of(parameter, shape) == by_hand.dims_of(parameter, shape), parameter
    assert all(block.declared is not None for block in terrace.blocks_of(model, found))


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (
            {"model_type": "gpt2", "n_embd": 24, "n_head": 4, "n_layer": 2, "vocab_size": 61}
            | dict.fromkeys(_DROPOUT, 0.0),
            "is transposed",
        ),
        ({**MODELS["llama"], "model_type": "phi3", "pad_token_id": None}, "holds several projections or experts"),
        ({"model_type": "opt", "vocab_size": 61, "hidden_size": 24, "num_attention_heads": 4}, "'opt'"),
    ],
)
def test_a_family_whose_tensors_have_no_dims_of_their_own_is_refused(table: dict[str, Any], said: str) -> None:
    config = transformers.AutoConfig.for_model(**table)
    with pytest.raises(ModelError, match=said):
        terrace.Declaration.of(transformers.AutoModelForCausalLM.from_config(config))


class _Adapter(torch.nn.Module):
    """A linear layer inside another, as adapters put it."""

    def __init__(self, base_layer: torch.nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer


def test_what_is_not_the_model_of_its_config_declares_nothing() -> None:
    """Wrappers, parts and adapters, whose parameters have other names than the family's."""
    model = model_of("llama")
    adapted = model_of("llama")
    adapted.model.layers[1].self_attn.q_proj = _Adapter(adapted.model.layers[1].self_attn.q_proj)
    for given, said in (
        (torch.nn.Sequential(model), "Sequential is no transformers model, which has a config: give the model itself"),
        (None, "NoneType is no transformers model"),
        (model.model, r"LlamaModel is not llama as its config says: embed_tokens.weight \[61, 24\] has no dims there"),
        (adapted, "layers.1.self_attn.q_proj.base_layer.weight .* without adapters or wrappers"),
    ):
        with pytest.raises(ModelError, match=said):
            terrace.Declaration.of(given)  # type: ignore[arg-type]
