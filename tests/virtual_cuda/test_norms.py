"""The fused RMS norm of the virtual device: the bits of the chain, and a tensor fewer is kept."""

import pytest
import torch
import torch.nn.functional as F

from tests.virtual_cuda.norms import rms_norm
from tests.virtual_cuda.rehearsal import rehearsed


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_fused_norm_has_the_bits_of_the_chain(dtype: torch.dtype) -> None:
    values = [torch.randn(size, dtype=dtype) for size in ((2, 5, 64), (64,), (2, 5, 64))]
    wanted = outcome(*values)
    with rehearsed() as rehearsal:
        assert F.rms_norm is rms_norm
        found = outcome(*(each.to("cuda") for each in values))
    assert not rehearsal.faults
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


def outcome(x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    """Result and gradients, on the CPU."""
    x, weight = x.requires_grad_(), weight.requires_grad_()
    result = F.rms_norm(x, weight.shape, weight, 1e-5)
    return [each.detach().cpu() for each in (result, *torch.autograd.grad(result, (x, weight), grad))]


def test_it_keeps_a_number_for_each_token() -> None:
    with rehearsed():
        x = torch.zeros(256, 1024, device="cuda", requires_grad=True)
        weight = torch.zeros(1024, device="cuda", requires_grad=True)
        before = torch.cuda.memory_allocated()
        result = F.rms_norm(x, weight.shape, weight, 1e-5)
        assert torch.cuda.memory_allocated() - before == 4 * (result.numel() + 256)
