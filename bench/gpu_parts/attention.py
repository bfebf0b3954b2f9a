"""Causal attention by torch's kernels: FLOP/s by head size and length, forward and backward apart.

FLOPs are 4 B N S^2 D forward and 10 B N S^2 D backward, halved for the causal mask.
"""

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.gpu_parts.setting import Row, Setting

TOKENS = 16384  # of a call
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def rows(setting: Setting) -> Iterator[Row]:
    """A row for each kernel, head size and length; kernels that are not there are said."""
    tokens = setting.size(TOKENS, 64)
    for name, kernel in KERNELS.items():
        for head_dim in (64, 128):
            for sequence in (setting.size(1024, 32), setting.size(4096, 64)):
                subject = f"{name}, heads of {head_dim}, {sequence} tokens"
                try:
                    yield Row(subject, _rates(setting, kernel, tokens // sequence, head_dim, sequence))
                except RuntimeError as error:  # such a kernel is not built, or refuses the shape
                    yield Row(subject, f"refused: {' '.join(str(error).split())[:120]}")


def _rates(setting: Setting, kernel: SDPBackend, batch: int, head_dim: int, sequence: int) -> str:
    heads = setting.size(2048, 128) // head_dim
    sizes = (batch, heads, sequence, head_dim)
    query, key, value = (
        torch.randn(sizes, dtype=torch.bfloat16, device=setting.device, requires_grad=True) for _ in range(3)
    )

    def forward() -> Tensor:
        with sdpa_kernel(kernel):
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    output = forward()
    backward = partial(torch.autograd.grad, output, (query, key, value), torch.ones_like(output), retain_graph=True)
    flops = 4 * batch * heads * sequence**2 * head_dim / 2
    rates = (flops / setting.median_s(forward), 2.5 * flops / setting.median_s(backward))
    shares = (rate / setting.peak_tflops / 1e12 for rate in rates)
    return "forward {:.0f}, backward {:.0f} TFLOP/s".format(
        *(rate / 1e12 for rate in rates)
    ) + " ({:.0%}, {:.0%})".format(*shares)
