"""Causal attention by torch's kernels: FLOP/s by head size and length, forward and backward apart.

FLOPs are 4 B N S^2 D forward and 10 B N S^2 D backward, halved for the causal mask. Rows with documents, and under a
window, go through the mask plans of `train.attention`: FLOPs are those of the pairs that are seen, and peak memory is
that of a forward and a backward beside their inputs.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.gpu_parts.setting import Row, Setting
from terrace.model.attention import attend
from terrace.model.attention_kernel import AttentionKernel
from terrace.model.attention_plans import make_plan

TOKENS = 16384  # of a call
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
PACKED: tuple[AttentionKernel, ...] = ("varlen", "flex", "sdpa")


def rows(setting: Setting) -> Iterator[Row]:
    """A row for each kernel, head size and length; kernels that are not there are said, and on CUDA all are."""
    tokens = setting.size(TOKENS, 64)
    for name, kernel in KERNELS.items():
        for head_dim in (64, 128):
            for sequence in (setting.size(1024, 32), setting.size(4096, 64)):
                subject = f"{name}, heads of {head_dim}, {sequence} tokens"
                try:
                    yield Row(subject, _rates(setting, kernel, tokens // sequence, head_dim, sequence))
                except RuntimeError as error:  # not built, or refused: a CPU has not all of them
                    yield Row.refused(subject, error, must=setting.is_cuda)
    yield from _packed(setting)


def _packed(setting: Setting) -> Iterator[Row]:
    head_dim, sequence = 128, setting.size(8192, 64)
    heads, kv_heads = setting.size(16, 4), setting.size(4, 2)
    begins = torch.zeros(1, sequence, dtype=torch.bool)
    begins[0, :: sequence // 8] = True  # documents of an eighth of the row
    whole = torch.arange(sequence)[None] == 0
    cases = (("documents", begins, 0, sequence // 8), ("window", whole, sequence // 8, sequence))
    for name, starts, window, length in cases:
        pairs = sum(min(place + 1, window or length) for place in range(length)) * (sequence // length)
        for kernel in PACKED:
            subject = f"{kernel}, {name} of {sequence // 8} in {sequence} tokens"
            shapes = (heads, kv_heads, kv_heads)
            inputs = [
                torch.randn(1, sequence, num, head_dim, dtype=torch.bfloat16, device=setting.device)
                .transpose(1, 2)
                .requires_grad_()
                for num in shapes
            ]
            try:
                plan = make_plan(kernel, starts, window, inputs[0].device, torch.bfloat16)
                forward = partial(attend, inputs[0], inputs[1], inputs[2], plan)
                yield Row(subject, _both(setting, forward, inputs, 4 * pairs * heads * head_dim))
            except (RuntimeError, ImportError) as error:
                yield Row.refused(subject, error, must=setting.is_cuda)


def _both(setting: Setting, forward: Callable[[], Tensor], inputs: list[Tensor], flops: float) -> str:
    output = forward()
    backward = partial(torch.autograd.grad, output, inputs, torch.ones_like(output), retain_graph=True)
    rates = (flops / setting.median_s(forward), 2.5 * flops / setting.median_s(backward))
    words = "forward {:.0f}, backward {:.0f} TFLOP/s".format(*(rate / 1e12 for rate in rates))
    if torch.device(setting.device).type != "cuda":
        return words
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    backward = partial(torch.autograd.grad, forward(), inputs, torch.ones_like(output))
    backward()
    return f"{words}, {(torch.cuda.max_memory_allocated() - before) / 1e6:.0f} MB"


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
