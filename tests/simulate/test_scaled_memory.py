"""What layers with products in 8 bits keep: as torch saves and allocates it, to the byte."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from terrace.model.block_operations import layer_operations
from terrace.model.config import ModelConfig
from terrace.model.decoder import DecoderLayer, build_blocks
from terrace.model.init import initialise
from terrace.plan.products import parse_products
from terrace.plan.recompute import OPERATIONS
from terrace.runtime.linear import Matrix
from terrace.runtime.replay import Replays
from terrace.runtime.scaled_linear import ScaledMatrix
from terrace.runtime.scaling import Scaling
from terrace.simulate.activations import BlockActivations
from terrace.simulate.work import Work
from tests.support.activations import BATCH, DTYPES, HIDDEN, MODELS, layer_activations, rotary_tables
from tests.support.adopted import as_in_a_run
from tests.support.allocations import addresses, allocated, saved_bytes, seeded
from tests.support.mixtures import EXPERTS, mixture
from tests.support.nightly import in_turns

SEQUENCE = 256
CONFIGS = MODELS | {name: mixture(config, layers=1) for name, config in EXPERTS.items()}
NOT_SCALED = ("router", "shared_gate")


def scaled_layer(config: ModelConfig, compute: str, operations: tuple[str, ...] = ()) -> DecoderLayer:
    blocks = build_blocks(config, device="cpu", dtype=DTYPES[compute])
    initialise(blocks, config, seed=0, dtype=DTYPES[compute])
    assert isinstance(blocks[1], DecoderLayer)
    for name, parameter in blocks[1].named_parameters():
        if name.endswith("router.bias"):
            parameter.requires_grad_(False)
    if operations:
        Replays().join(blocks[1], operations)
    return blocks[1]


def scale(layer: nn.Module, products: str) -> None:
    scaling = Scaling(parse_products(products).by_row)
    scaling.forget_after(layer)
    for name, parameter in layer.named_parameters():
        if isinstance(parameter, Matrix) and not any(part in name for part in NOT_SCALED):
            gradients, parameter.__class__ = parameter.gradients, ScaledMatrix
            assert isinstance(parameter, ScaledMatrix)
            parameter.scaling, parameter.gradients = scaling, gradients


def predicted(config: ModelConfig, compute: Any, products: str | None, operations: tuple[str, ...] = ()) -> Any:
    work = Work(
        layer=layer_operations(config),
        sequence=SEQUENCE,
        micro_batch=BATCH,
        operations=operations,
        compute=compute,
        products=products,
    )
    found: BlockActivations = layer_activations(work, "cpu")
    return found


@pytest.mark.parametrize(
    ("name", "products", "compute"), in_turns(2, CONFIGS, ("fp8", "fp8:row"), ("bf16", "fp32")), ids=str
)
def test_what_a_layer_keeps(name: str, products: str, compute: str) -> None:
    """The codes of its inputs; of a mixture also places, which autograd's hooks do not see."""
    layer, recorded = as_in_a_run(scaled_layer(CONFIGS[name], compute))
    scale(layer, products)
    inputs = torch.randn(BATCH, SEQUENCE, HIDDEN, dtype=DTYPES[compute], generator=seeded(0)).requires_grad_()

    def forward() -> Tensor:
        output: Tensor = layer(inputs)
        return output

    with recorded:
        forward()  # fills RoPE's tables
        ignored = addresses([inputs, *layer.parameters(), *rotary_tables(layer)])
        saved = saved_bytes(forward, ignored)
    experts = CONFIGS[name].experts
    places = 0 if experts is None else 8 * BATCH * SEQUENCE * experts.num_choices
    found, without = predicted(CONFIGS[name], compute, products), predicted(CONFIGS[name], compute, None)
    assert sum(found.saved.values()) == saved + places
    # A relu keeps its result itself.
    assert found.kept_bytes < without.kept_bytes or "relu" in name


@pytest.mark.parametrize(
    ("name", "products", "operations"),
    in_turns(2, ("llama", "gpt2, relu", "qwen3"), ("fp8", "fp8:row"), [("mlp",), ("norms",), OPERATIONS]),
    ids=str,
)
def test_what_comes_again_is_not_kept_as_codes(name: str, products: str, operations: tuple[str, ...]) -> None:
    """Bytes left after a forward of a layer whose operations are recomputed, and after its backward."""
    layer, recorded = as_in_a_run(scaled_layer(MODELS[name], "fp32", operations))
    scale(layer, products)
    inputs = torch.randn(BATCH, SEQUENCE, HIDDEN, generator=seeded(0)).requires_grad_()
    layer(inputs)  # fills RoPE's tables
    _, left, output = allocated(lambda: layer(inputs))
    gradient = torch.randn_like(output)
    with recorded:
        _, after, _ = allocated(lambda: torch.autograd.backward(output, gradient))
    found = predicted(MODELS[name], "fp32", products, operations)
    assert sum(found.saved.values()) == left - output.nbytes
    assert after == inputs.nbytes - (left - output.nbytes), "of a backward the gradient of the input is left"


@pytest.mark.parametrize(("name", "products"), list(product(("llama", "gpt2", "llama, relu"), ("fp8", "fp8:row"))))
@pytest.mark.parametrize("operations", [(), ("mlp", "norms")])
def test_what_waits_for_the_second_half_of_a_backward(name: str, products: str, operations: tuple[str, ...]) -> None:
    """Codes of inputs, of which the recomputed come back as they are, and codes of the gradients of results."""
    layer, recorded = as_in_a_run(scaled_layer(MODELS[name], "fp32", operations), hold=True)
    scale(layer, products)
    inputs = torch.randn(BATCH, SEQUENCE, HIDDEN, generator=seeded(0)).requires_grad_()
    layer(inputs)
    _, left, output = allocated(lambda: layer(inputs))
    gradient = torch.randn_like(output)
    with recorded:
        _, after, _ = allocated(lambda: torch.autograd.backward(output, gradient))
    found = predicted(MODELS[name], "fp32", products, operations)
    # The caller has the output, and the gradient of the input is left.
    assert found.due_bytes == left + after - output.nbytes - inputs.nbytes
    assert found.due_bytes < predicted(MODELS[name], "fp32", None, operations).due_bytes


def test_tensor_ranks_gather_inputs_again() -> None:
    """With sequence parallelism a rank keeps its part of an input; what is whole anyway it keeps as codes."""
    cut = Work(layer=layer_operations(MODELS["llama"]), sequence=SEQUENCE, tensor=2, products="fp8")
    for work, wanted in ((cut, False), (replace(cut, sequence_parallel=False), True)):
        saved = layer_activations(work, "cuda").saved
        tokens = SEQUENCE * HIDDEN
        assert saved["query"] == (tokens + 4 if wanted else tokens // 2 * 2), saved
