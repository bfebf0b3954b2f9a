"""Parts of a layer by the Triton kernels of the package `liger-kernel`, and a trial of each.

Each function has the arguments, the result and the meaning of the one that it stands in for in `terrace.model`:

    rms_norm        F.rms_norm, computed in fp32 (liger's casting mode "gemma"); keeps its input and a number a row
    silu_gated, gelu_tanh_gated
                    MLP._gated; keeps gate and up, and its backward writes their gradients over them
    turn_both       Rotary.turn_both, for queries and keys at once; writes over both, its backward over both gradients
    to_gradient     decoder.to_gradient: a chunk of logits becomes its gradient in place, without a copy in fp32

Writing in place is safe where nobody else reads: gate, up, queries and keys are results of products, whose backwards
need only their inputs. Torch cannot see the writes of a Triton kernel, so `increment_version` records each: a backward
that kept such a tensor then raises autograd's error in place of giving a wrong number. The norm could write over its
gradient and does not: autograd may give one tensor to two readers.

The package's fused linear cross entropy is not used. It holds up to 2 T H logits at a time, where the chunks of
terrace.runtime.head have a fixed number; it makes a weight gradient of its own, the size of the output matrix; and it
waits for the device in every call. Nor is its cross entropy, which rounds losses to the dtype of the logits and waits
for the device in every chunk: `to_gradient` launches the kernel of both by itself.

Written against liger-kernel 0.8.5. A version whose functions differ fails the trial.

Shape legend: B batch, S sequence, N query heads, K key-value heads, D head_dim, R rotary_dim, H hidden, I intermediate,
V vocabulary, T rows.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from terrace.base.extras import install
from terrace.model.decoder import IGNORE_INDEX

PACKAGE = "liger-kernel"
_MODULE = "liger_kernel"
_LARGEST_BLOCK = 32768  # elements of a row of logits at a time, as in the package
_BLACKWELL = 10  # compute capability from which fewer warps are faster in half precision, as in the package


def why_missing() -> str:
    """The reason why the package cannot be used here; empty where it is installed with Triton."""
    for name, module in ((PACKAGE, _MODULE), ("triton", "triton")):
        if find_spec(module) is None:
            return f"{name} is not installed ({install(PACKAGE)})"
    return ""


def words() -> str:
    """Name and version of the package."""
    return f"{PACKAGE} {version(PACKAGE)}"


@cache
def _ops(name: str) -> Any:
    # Imported at its first use: the package brings all of its kernels, seconds in every process. By module, since
    # names of the package itself may be replaced by an environment variable.
    return import_module(f"{_MODULE}.ops.{name}")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise x (..., H) by its root mean square, times weight (H)."""
    normal: Tensor = _ops("rms_norm").LigerRMSNormFunction.apply(x, weight, eps, 0.0, "gemma", False)
    return normal


class _Gated(torch.autograd.Function):
    """act(gate) * up, by the functions of a module of the package."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, name: str) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        ctx.function = getattr(_ops(name), f"{name}_backward")
        product: Tensor = getattr(_ops(name), f"{name}_forward")(gate, up)[2]
        return product

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        # Recorded before the kernel: the results are views, and would count as older than their storage otherwise.
        increment_version((gate, up))
        of_gate, of_up = ctx.function(gate, up, grad.contiguous())
        return of_gate, of_up, None


def _gated(gate: Tensor, up: Tensor, name: str) -> Tensor:
    product: Tensor = _Gated.apply(gate, up, name)  # type: ignore[no-untyped-call]
    return product


def silu_gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, each (..., I)."""
    return _gated(gate, up, "swiglu")


def gelu_tanh_gated(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up by the tanh form, each (..., I)."""
    return _gated(gate, up, "geglu")


GATED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"silu": silu_gated, "gelu_tanh": gelu_tanh_gated}


class _Turned(torch.autograd.Function):
    """Queries and keys turned by tables, in place where their heads lie side by side."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int
    ) -> tuple[Tensor, Tensor]:
        ctx.rotary_dim = rotary_dim
        _record_writes(query, key)
        turned = _ops("rope").rope_forward(query, key, cos, sin, rotary_dim=rotary_dim)
        ctx.save_for_backward(*turned[2:])
        # Detached: a view of an input would be one for autograd, too.
        return turned[0].detach(), turned[1].detach()

    @staticmethod
    def backward(ctx: Any, of_query: Tensor, of_key: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        _record_writes(of_query, of_key)
        turned = _ops("rope").rope_backward(of_query, of_key, cos, sin, rotary_dim=ctx.rotary_dim)
        return turned[0], turned[1], None, None, None


def _record_writes(*heads: Tensor) -> None:
    # The kernel copies heads (B, N, S, D) that do not lie side by side, and leaves them as they are.
    increment_version([each for each in heads if each.transpose(1, 2).is_contiguous()])


def turn_both(rotary_dim: int, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Turn query (B, N, S, D) and key (B, K, S, D) by tables (S, R/2) or (B, S, R/2)."""
    turned: tuple[Tensor, Tensor] = _Turned.apply(query, key, cos, sin, rotary_dim)  # type: ignore[no-untyped-call]
    return turned


def to_gradient(logits: Tensor, labels: Tensor, scale: float = 1.0) -> Tensor:
    """The sum of the cross entropies of logits (T, V), in fp64; the logits become `scale` times its gradient."""
    losses = torch.zeros(len(logits), dtype=torch.float32, device=logits.device)
    num_words = logits.shape[1]
    # By its mean over 1 / scale tokens, so that a scaled gradient is scaled before it is rounded.
    count = 1.0 / scale
    _ops("cross_entropy").liger_cross_entropy_kernel[(len(logits),)](
        X_ptr=logits,
        X_stride=logits.stride(0),
        Y_ptr=labels,
        Y_stride=labels.stride(0),
        weight_ptr=None,
        loss_ptr=losses,
        z_loss_ptr=None,
        loss_stride=1,
        token_accuracy_ptr=None,
        token_accuracy_stride=0,
        predicted_tokens_ptr=None,
        predicted_tokens_stride=0,
        n_cols=num_words,
        n_non_ignore=count,
        sum_non_ignore_weight=count,
        weight_sum=0.0,
        ignore_index=IGNORE_INDEX,
        lse_square_scale=0.0,
        label_smoothing=0.0,
        reduction="sum" if scale == 1.0 else "mean",
        softcap=None,
        RETURN_Z_LOSS=False,
        RETURN_TOKEN_ACCURACY=False,
        RETURN_PREDICTED_TOKENS=False,
        HAS_WEIGHT=False,
        HAS_SOFTCAPPING=False,
        HAS_GRADIENTS=True,
        BLOCK_SIZE=min(_LARGEST_BLOCK, 1 << (num_words - 1).bit_length()),
        num_warps=_warps(logits.device, logits.dtype),
    )
    increment_version(logits)
    return losses.sum(dtype=torch.float64) * count


@cache
def _warps(device: torch.device, dtype: torch.dtype) -> int:
    is_new = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= _BLACKWELL
    return 8 if is_new and dtype.itemsize == 2 else 32
