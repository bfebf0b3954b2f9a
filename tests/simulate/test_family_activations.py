"""Activations of families with norms of outputs, multipliers and caps, as torch saves and allocates them."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from terrace.model.block_operations import layer_operations
from terrace.model.blocks import block_specs
from terrace.model.config import ModelConfig
from terrace.model.decoder import build_blocks
from terrace.model.init import initialise
from terrace.simulate.activations import BlockActivations, activations_of
from terrace.simulate.masks import has_flash_attention
from terrace.simulate.work import Work
from tests.support.activations import BATCH, DTYPES, FAMILIES, HIDDEN, rotary_tables
from tests.support.adopted import as_in_a_run
from tests.support.allocations import addresses, allocated, saved_bytes, seeded

SEQUENCE = 64


def layer_of(config: ModelConfig, index: int, dtype: torch.dtype) -> nn.Module:
    blocks = build_blocks(config, device="cpu", dtype=dtype)
    initialise(blocks, config, seed=0, dtype=dtype)
    return blocks[index]


def predicted(config: ModelConfig, index: int, compute: str, sequence: int = SEQUENCE) -> BlockActivations:
    flash = has_flash_attention(layer_operations(config).core, sequence, compute, "cpu")
    work = Work(layer=layer_operations(config), sequence=sequence, micro_batch=BATCH, flash=flash, compute=compute)  # type: ignore[arg-type]
    return activations_of(work, block_specs(config)[index], "cpu")


@pytest.mark.parametrize(("sequence", "window"), [(256, 64), (256, 100), (512, 64)])
def test_capped_pieces_under_a_window_keep_no_more_than_is_predicted(sequence: int, window: int) -> None:
    config = replace(FAMILIES["gemma2"], sliding_window=window)
    layer, _ = as_in_a_run(layer_of(config, 1, torch.float32))
    inputs = torch.randn(BATCH, sequence, HIDDEN, generator=seeded(0)).requires_grad_()
    layer(inputs)  # fills RoPE's tables
    _, left, output = allocated(lambda: layer(inputs))
    found = sum(predicted(config, 1, "fp32", sequence).saved.values())
    assert left - output.nbytes < found < 1.2 * (left - output.nbytes)


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_layer_keeps_what_is_predicted(name: str, compute: str) -> None:
    """Kept bytes exactly, peaks but for a few numbers a token."""
    config, dtype = FAMILIES[name], DTYPES[compute]
    layer, recorded = as_in_a_run(layer_of(config, 1, dtype))
    inputs = torch.randn(BATCH, SEQUENCE, HIDDEN, dtype=dtype, generator=seeded(0)).requires_grad_()
    layer(inputs)  # fills RoPE's tables
    own = addresses([*layer.parameters(), inputs, *rotary_tables(layer)])
    saved = saved_bytes(lambda: layer(inputs), own)
    forward, left, output = allocated(lambda: layer(inputs))
    gradient = torch.randn_like(output)
    with recorded:
        backward, _, _ = allocated(lambda: torch.autograd.backward(output, gradient))
    found = predicted(config, 1, compute)
    assert sum(found.saved.values()) == saved
    # In bf16 oneDNN has scratch memory of its own.
    within = 0.1 if compute == "bf16" else 0.002
    assert found.forward_peak_bytes == pytest.approx(forward + inputs.nbytes, rel=within)
    before = left + inputs.nbytes + gradient.nbytes
    assert found.backward_peak_bytes == pytest.approx(backward + before, rel=within)
