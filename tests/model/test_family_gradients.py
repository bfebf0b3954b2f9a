"""Loss and gradients of one step in families with parts of their own: those of `transformers`, in fp64."""

import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from terrace.model.blocks import block_specs
from terrace.model.decoder import build_blocks, token_loss
from terrace.model.hf.pretrained import Pretrained
from terrace.runtime.head import chunked_head
from tests.support.families import TABLES, TOKENS, in_fp64, loaded, their_model
from tests.support.nightly import nightly

ROWS = ("smollm3", "granite", "olmo2", "phi3, longrope, short", "gemma2", "gemma3_text", "gpt_oss, 20b")
LINEAR = (
    "qwen3_next",
    "qwen3_next, odd sizes",
    "qwen3_5_text, grouped by three",
    "qwen3_5_moe_text, odd sizes",
    "kimi_linear",
    "kimi_linear, odd sizes",
)


def of_each_expert(key: str, grad: Tensor) -> dict[str, Tensor]:
    """The gradient of a stack of `transformers` (E, out, in) by the names of files, gate and up apart."""
    base, _, own = key.rpartition(".")
    names = ("gate_proj", "up_proj") if own == "gate_up_proj" else (own,)
    parts = zip(names, grad.chunk(len(names), 1), strict=True)
    return {f"{base}.{index}.{name}.weight": each.clone() for name, part in parts for index, each in enumerate(part)}


def of_files(key: str, grad: Tensor) -> dict[str, Tensor]:
    """A gradient of `transformers` by the names of Kimi Linear's files, which it loads under others."""
    key = key.replace(".mlp.", ".block_sparse_moe.").replace(".forget_gate.", ".")
    if ".conv1d." in key:
        parts = zip("qkv", grad.chunk(3), strict=True)
        return {key.replace("conv1d", f"{each}_conv1d"): part.clone() for each, part in parts}
    if ".experts." not in key:
        return {key: grad}
    theirs = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    each = of_each_expert(key, grad)
    for own, name in theirs.items():
        each = {key.replace(own, name): value for key, value in each.items()}
    return each


@pytest.mark.parametrize("name", [*ROWS, "gpt_oss, odd sizes", *LINEAR, *nightly("gpt_oss, 120b")])
def test_loss_and_gradients_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Ours by the head that has its logits in chunks, theirs by autograd over whole logits."""
    their_model(tmp_path / "weights", TABLES[name])
    labels = TOKENS.roll(-1, 1)
    with in_fp64():
        theirs = loaded(tmp_path / "weights", torch.float64)
        logits = theirs.train()(TOKENS).logits
        their_loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        torch.autograd.backward(their_loss)
    # A folder of gradients is read as one of weights is.
    (tmp_path / "gradients").mkdir()
    shutil.copy(tmp_path / "weights" / "config.json", tmp_path / "gradients")
    stored = safetensors.torch.load_file(tmp_path / "weights" / "model.safetensors")
    found = {key: value.grad for key, value in theirs.named_parameters() if key in stored}
    kept = {key: value for key, value in found.items() if value is not None}
    for key, value in theirs.named_parameters():
        if key not in stored and value.grad is not None and ".experts." in key:
            kept |= of_each_expert(key, value.grad)
    if name.startswith("kimi"):
        kept = {}
        for key, value in theirs.named_parameters():
            if value.grad is not None:
                kept |= of_files(key, value.grad)
    safetensors.torch.save_file(kept, tmp_path / "gradients" / "model.safetensors")

    weights, gradients = Pretrained(tmp_path / "weights"), Pretrained(tmp_path / "gradients")
    blocks = build_blocks(weights.config, "cpu", torch.float64)
    for spec, block in zip(block_specs(weights.config), blocks, strict=True):
        for param in spec.params:
            with torch.no_grad():
                block.get_parameter(param.name).copy_(weights.value(spec.name, param.name))
    x = TOKENS
    for block in blocks[:-1]:
        x = block(x)
    inputs = x.detach().requires_grad_()
    run = chunked_head(blocks[-1], token_loss)
    assert run is not None
    loss = run(inputs, labels)
    torch.autograd.backward(x, inputs.grad)
    assert loss.item() == pytest.approx(their_loss.item(), rel=1e-11)
    for spec, block in zip(block_specs(weights.config), blocks, strict=True):
        for param in (each for each in spec.params if each.trainable):
            own, wanted = block.get_parameter(param.name).grad, gradients.value(spec.name, param.name)
            assert own is not None
            assert wanted.abs().max() > 0
            within = 1e-10 * float(wanted.abs().max())
            torch.testing.assert_close(own, wanted, atol=within, rtol=1e-9, msg=f"{spec.name} {param.name}")
