"""Kernels of attention and the one table that chooses among them, for the runtime and the simulator alike.

    sdpa     `torch.nn.functional.scaled_dot_product_attention`: causal where a row is one document, else under one mask
             over whole rows, (S, S)
    pieces   the same, over runs of tokens with exactly the keys that they need (terrace.model.attention)
    varlen   `torch.nn.attention.varlen`: flash attention 2 over documents end to end, with windows, without a mask
    flex     `torch.nn.attention.flex_attention`, compiled: blocks of keys that no query of a block sees are skipped

On a CPU rows that documents or windows cut go in pieces. On CUDA they take varlen in half precision, else flex, else a
mask. Rows that nothing cuts take the causal kernel, but in fp32 with grouped heads, for which it has no fused form
(torch's documentation of `scaled_dot_product_attention`), flex. Only flex caps scores; where it cannot serve, capped
attention under sdpa and pieces is two products and a softmax.
"""

from dataclasses import dataclass
from typing import Literal

AttentionKernel = Literal["sdpa", "pieces", "varlen", "flex"]
AttentionChoice = Literal["auto", "sdpa", "pieces", "varlen", "flex"]

_HALF = ("bf16", "fp16")
_LARGEST_HEAD = 256  # of flash attention 2
_SMALLEST_FLEX_HEAD = 16  # tl.dot of Triton takes no fewer


@dataclass(frozen=True)
class AttentionCase:
    """The inputs of attention, as far as kernels differ in them."""

    backend: str  # "cpu" or "cuda"
    dtype: str  # "bf16", ...
    head_dim: int
    is_grouped: bool = False  # several query heads share a key-value head
    is_cut: bool = False  # documents or a window cut rows
    is_capped: bool = False  # scores are capped before the softmax


def refusal(kernel: AttentionKernel, case: AttentionCase) -> str:
    """The reason why a kernel cannot serve, with the values in it; empty where it can."""
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
    """Kernels that can serve, the best one first; the last one, sdpa or pieces, is on every machine."""
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
    """The kernel that serves where torch has all of them; sdpa computes a piece of a whole row."""
    if choice == "auto":
        return candidates(case)[0]
    return "sdpa" if choice == "pieces" and not case.is_cut else choice
