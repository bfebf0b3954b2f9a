"""Attention kernels and the table that chooses among them, shared by the runtime and the simulator.

    sdpa     `torch.nn.functional.scaled_dot_product_attention`: causal if a row is one document, else masked, (S, S)
    pieces   the same, over runs of tokens with exactly the keys that they need (terrace.model.attention)
    varlen   `torch.nn.attention.varlen`: flash attention 2 over packed documents, with windows, without a mask
    flex     `torch.nn.attention.flex_attention`, compiled: skips blocks of keys that no query of a block sees

Rows with several documents or a window use pieces on a CPU; on CUDA they use varlen in half precision, else flex, else
a mask. All other rows use the causal kernel, except on CUDA in fp32 with grouped heads, where it has no fused form
(torch's documentation of `scaled_dot_product_attention`) and flex is used. Only flex caps scores; with sdpa and pieces,
capped attention is two products and a softmax.
"""

from dataclasses import dataclass
from typing import Literal

AttentionKernel = Literal["sdpa", "pieces", "varlen", "flex"]
AttentionChoice = Literal["auto", "sdpa", "pieces", "varlen", "flex"]

_HALF = ("bf16", "fp16")
_LARGEST_HEAD = 256  # of flash attention 2
_SMALLEST_FLEX_HEAD = 16  # the smallest that Triton's tl.dot supports


@dataclass(frozen=True)
class AttentionCase:
    backend: str  # "cpu" or "cuda"
    dtype: str  # "bf16", ...
    head_dim: int
    is_grouped: bool = False  # several query heads share a key-value head
    is_cut: bool = False  # rows have several documents or a window
    is_capped: bool = False  # scores are capped before the softmax


def refusal(kernel: AttentionKernel, case: AttentionCase) -> str:
    """Why a kernel does not support a case, with the values; empty if it does."""
    if kernel == "pieces" and case.backend != "cpu":
        return f"pieces are cut on the host, for a CPU, and this is a device of type {case.backend!r}"
    if kernel in ("varlen", "flex") and case.backend != "cuda":
        missing = "kernels for CUDA alone" if kernel == "varlen" else "no backward on a CPU"
        return f"torch has {missing} there, and this is a device of type {case.backend!r}"
    if kernel == "varlen" and case.is_capped:
        return "torch's varlen attention cannot cap scores, as this model does"
    if kernel == "varlen" and case.dtype not in _HALF:
        return f"it takes bf16 and fp16, and queries are {case.dtype}"
    if kernel == "varlen" and (case.head_dim % 8 or case.head_dim > _LARGEST_HEAD):
        return f"it takes heads of a multiple of 8 up to {_LARGEST_HEAD}, and heads are of {case.head_dim}"
    if kernel == "flex" and case.dtype == "fp64":
        return "it is compiled for bf16, fp16 and fp32, and queries are fp64"
    if kernel == "flex" and case.head_dim < _SMALLEST_FLEX_HEAD:
        return f"it takes heads of at least {_SMALLEST_FLEX_HEAD}, and heads are of {case.head_dim}"
    return ""


def candidates(case: AttentionCase) -> tuple[AttentionKernel, ...]:
    """Kernels that support a case, fastest first. The last one, sdpa or pieces, is always available."""
    order: tuple[AttentionKernel, ...] = ("sdpa",)
    if case.backend == "cpu":
        order = ("pieces",) if case.is_cut else ("sdpa",)
    elif case.is_capped:
        order = ("flex", "sdpa")
    elif case.is_cut:
        order = ("varlen", "flex", "sdpa")
    elif case.dtype == "fp32" and case.is_grouped:
        order = ("flex", "sdpa")
    return tuple([kernel for kernel in order if not refusal(kernel, case)])


def expected(case: AttentionCase, choice: AttentionChoice = "auto") -> AttentionKernel:
    """The kernel used, assuming that torch has all of them. For uncut rows, "pieces" means sdpa."""
    if choice == "auto":
        return candidates(case)[0]
    return "sdpa" if choice == "pieces" and not case.is_cut else choice
