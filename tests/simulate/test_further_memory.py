"""What layers that predict further tokens keep, and their head, as torch saves and allocates it."""

from dataclasses import replace

import pytest
import torch

from terrace.model.block_operations import layer_operations
from terrace.model.blocks import block_specs
from terrace.model.config import ModelConfig
from terrace.model.decoder import build_blocks
from terrace.model.init import initialise
from terrace.runtime.batch import Batch
from terrace.runtime.further_tokens import LABELS, next_and_further_tokens
from terrace.simulate.activations import BlockActivations, activations_of
from terrace.simulate.work import Work
from tests.support.activations import BATCH, DTYPES, HIDDEN, MODELS, VOCAB, rotary_tables
from tests.support.adopted import Adopted, as_in_a_run
from tests.support.allocations import addresses, allocated, saved_bytes, seeded
from tests.support.nightly import nightly


def _predict(config: ModelConfig, compute: str, index: int) -> BlockActivations:
    layer, specs = layer_operations(config), block_specs(config)
    work = Work(layer=layer, sequence=256, micro_batch=BATCH, compute=compute)  # type: ignore[arg-type]
    return activations_of(work, specs[index], "cpu")


@pytest.mark.parametrize("compute", ["fp32", *nightly("bf16", "fp64")])
@pytest.mark.parametrize("depth", [1, 2])
def test_what_a_layer_that_predicts_further_tokens_keeps(compute: str, depth: int) -> None:
    """To the byte; peaks within 5 and 10 %. In bf16 the forward peak is counted up to 8 % too low: it is not known
    which tensor of both norms' size in fp32 is alive then, too."""
    dtype, config = DTYPES[compute], replace(MODELS["latent"], num_mtp_layers=2)
    blocks = build_blocks(config, device="cpu", dtype=dtype)
    initialise(blocks, config, seed=0, dtype=dtype)
    block, recorded = as_in_a_run(blocks[1 + depth])
    inputs = torch.randn(BATCH, 256, depth * HIDDEN, dtype=dtype, generator=seeded(0)).requires_grad_()
    ahead = torch.randint(0, VOCAB, (BATCH, 256), generator=seeded(1))
    predicted = _predict(config, compute, 1 + depth)
    with recorded:
        block(inputs, None, ahead)  # fills RoPE's tables
        ignored = addresses([inputs, ahead, *block.parameters(), *rotary_tables(block)])
        saved = saved_bytes(lambda: block(inputs, None, ahead), ignored)
        forward, left, output = allocated(lambda: block(inputs, None, ahead))
        gradient = torch.randn_like(output)
        backward, _, _ = allocated(lambda: torch.autograd.backward(output, gradient))
    assert sum(predicted.saved.values()) == saved
    assert predicted.forward_peak_bytes == pytest.approx(
        forward + inputs.nbytes, rel=0.09 if compute == "bf16" else 0.05
    )
    peak = backward + left + inputs.nbytes + gradient.nbytes
    assert predicted.backward_peak_bytes == pytest.approx(peak, rel=0.1)


def test_a_head_of_further_tokens_takes_one_depth_at_a_time() -> None:
    config = replace(MODELS["latent"], num_mtp_layers=2)
    blocks = build_blocks(config, device="cpu", dtype=torch.float32)
    initialise(blocks, config, seed=0, dtype=torch.float32)
    inputs = torch.randn(BATCH, 256, 3 * HIDDEN, generator=seeded(0)).requires_grad_()
    labels = torch.randint(0, VOCAB, (BATCH, 256, 3), generator=seeded(1))
    adopted = Adopted.of(blocks[-1])
    run = next_and_further_tokens(0.3).in_chunks(adopted.module)
    assert run is not None
    adopted.flats[0].gradient.views.open(torch.empty_like(adopted.flats[0].full))
    batch = Batch(labels[..., 0], labels[..., 0], columns={LABELS: labels[..., 1:]})
    with adopted.weights.recorded_in(adopted.weights.queue(hold=True)):
        backward, _, _ = allocated(lambda: run(inputs, batch, 1.0))
    predicted = _predict(config, "fp32", 4)
    assert predicted.forward_peak_bytes == predicted.input_bytes == inputs.nbytes
    assert predicted.backward_peak_bytes == pytest.approx(backward + inputs.nbytes, rel=0.1)
