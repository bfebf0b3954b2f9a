"""The fused RMS norm of CUDA, which keeps a number per token where a CPU's chain of operators keeps a tensor more.

Torch chooses `_fused_rms_norm` by the device in C++, which sees a CPU here. The values are those of the chain, in its
order of operations, so they have its bits. Beside a residual the chain's two gradients of `x` are added one by one, and
those of the kernel as one: a run on the CPU that is to have the same bits takes the fused norm, too. What lives only
inside an operator is not counted.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import Library

_chain = F.rms_norm


@contextmanager
def fused() -> Iterator[None]:
    """Until its end, norms are fused, on the CPU as well."""
    library = Library("virtual_cuda", "FRAGMENT")  # type: ignore[no-untyped-call]
    try:
        for schema, function in (
            ("rms_norm(Tensor x, Tensor weight, float? eps) -> (Tensor, Tensor)", _forward),
            ("rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor root) -> (Tensor, Tensor)", _backward),
        ):
            library.define(schema)  # type: ignore[no-untyped-call]
            library.impl(schema.partition("(")[0], function, "CPU")  # type: ignore[no-untyped-call]
        F.rms_norm = rms_norm  # type: ignore[assignment]
        yield
    finally:
        F.rms_norm = _chain
        library._destroy()  # type: ignore[no-untyped-call]


def rms_norm(x: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """`F.rms_norm`. Torch fuses the norm on CUDA where its weight has the dtype of `x`."""
    if weight is None or weight.dim() != 1 or weight.dtype != x.dtype:
        return _chain(x, normalized_shape, weight, eps)
    normal: Callable[..., Tensor] = _Fused.apply
    return normal(x, weight, eps)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float | None) -> Tensor:
        found, root = torch.ops.virtual_cuda.rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, root)
        return found  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = torch.ops.virtual_cuda.rms_norm_backward(grad, *ctx.saved_tensors)
        return *(each if needed else None for each, needed in zip(grads, ctx.needs_input_grad, strict=False)), None


def _forward(x: Tensor, weight: Tensor, eps: float | None) -> tuple[Tensor, Tensor]:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    eps = torch.finfo(wide.dtype).eps if eps is None else eps
    root = wide.pow(2).mean(-1, keepdim=True).add(eps).rsqrt()
    return _chain(x, weight.shape, weight, eps), root


def _backward(grad: Tensor, x: Tensor, weight: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
    wide = x.to(root.dtype)
    of_weight = (grad.to(root.dtype) * (wide * root)).flatten(0, -2).sum(0)
    inner = grad.to(root.dtype) * weight
    of_root = (inner * wide).sum(-1, keepdim=True)
    of_mean = -0.5 * of_root * root.pow(3)
    found = inner * root + of_mean.expand_as(wide) / x.shape[-1] * (2 * wide)
    return found.to(x.dtype), of_weight.to(weight.dtype)
