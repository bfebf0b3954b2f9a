"""Parts of a layer computed by the Triton kernels of the package `liger-kernel`, installed by `serve`.

Each function is a drop-in replacement for one in `terrace.model`:

    rms_norm        F.rms_norm, computed in fp32 (liger's casting mode "gemma"); saves its input and one number per row
    silu_gated, gelu_tanh_gated
                    MLP._gated; saves gate and up, and the backward overwrites them with their gradients
    rotate_both     Rotary.rotate_both, for queries and keys at once; overwrites both, and the backward both gradients
    to_gradient     decoder.to_gradient: replaces a chunk of logits by its gradient, without a copy in fp32

In-place writes are safe here, since gate, up, queries and keys are outputs of products, whose backwards need only their
inputs. Torch does not notice the writes of a Triton kernel, so each is recorded with `increment_version`: if a backward
saved such a tensor, autograd raises an error instead of computing wrong gradients. The norm does not overwrite its
incoming gradient, because autograd may pass the same tensor to two functions.

The package's fused linear cross entropy is not used: it holds up to 2 T H logits at a time, whereas the chunks of
terrace.runtime.head have a fixed size; it allocates a weight gradient of the size of the output matrix; and it
synchronises with the device in every call. Its cross entropy is not used either: it rounds losses to the dtype of the
logits and synchronises for every chunk. `to_gradient` launches the kernel that underlies both.

Written for liger-kernel 0.8.5, the oldest version that `why_missing` accepts. A kernel that cannot run leaves its part
to torch (`Served`); tests hold every kernel to fp64.

Shape legend: B batch, S sequence, N query heads, K key-value heads, D head_dim, R rotary_dim, H hidden, I intermediate,
V vocabulary, T rows.
"""

import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from terrace.accelerator import TYPE, compute_capability, is_rocm
from terrace.base.errors import ConfigError, first_line
from terrace.base.extras import install
from terrace.model import layers
from terrace.model.decoder import IGNORE_INDEX, Head
from terrace.model.layers import MLP, Attention, RMSNorm
from terrace.model.part_kernel import PARTS, Part, PartChoice
from terrace.model.rotary import Rotary

DEVICES = (TYPE,)  # supported devices; a test adds the CPU, for Triton's interpreter
PACKAGE = "liger-kernel"
_OLDEST = (0, 8, 5)
_MODULE = "liger_kernel"
_LARGEST_BLOCK = 32768  # elements of a row of logits at a time, as in the package
_BLACKWELL = (10, 0)  # compute capability from which fewer warps are faster in half precision, as in the package


def why_missing() -> str:
    """Why the package cannot be used; empty if it is installed together with Triton."""
    for name, module in ((PACKAGE, _MODULE), ("triton", "triton")):
        if find_spec(module) is None:
            return f"{name} is not installed ({install(PACKAGE)})"
    if tuple(int(number) for number in re.findall(r"\d+", version(PACKAGE))[:3]) < _OLDEST:
        return f"{words()} is older than {'.'.join(map(str, _OLDEST))} ({install(PACKAGE)})"
    return ""


def words() -> str:
    """Name and version of the package."""
    return f"{PACKAGE} {version(PACKAGE)}"


@cache
def _ops(name: str) -> Any:
    # Imported on first use: the package loads all of its kernels, which takes seconds. Imported from submodules, since
    # an environment variable may replace the names at the top level of the package.
    return import_module(f"{_MODULE}.ops.{name}")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x (..., H) divided by its root mean square, times weight (H)."""
    normal: Tensor = _ops("rms_norm").LigerRMSNormFunction.apply(x, weight, eps, 0.0, "gemma", False)
    return normal


class _Gated(torch.autograd.Function):
    """act(gate) * up, with the forward and backward of the package's module `name`."""

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
        # Recorded before the kernel runs: the results are views, and must not be older than their storage.
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
    """gelu(gate) * up with the tanh approximation, each (..., I)."""
    return _gated(gate, up, "geglu")


GATED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"silu": silu_gated, "gelu_tanh": gelu_tanh_gated}


class _Rotated(torch.autograd.Function):
    """RoPE on queries and keys, in place where the heads of a token are contiguous."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int
    ) -> tuple[Tensor, Tensor]:
        ctx.rotary_dim = rotary_dim
        _record_writes(query, key)
        rotated = _ops("rope").rope_forward(query, key, cos, sin, rotary_dim=rotary_dim)
        ctx.save_for_backward(*rotated[2:])
        # Detached, since autograd must not treat the outputs as views of the inputs.
        return rotated[0].detach(), rotated[1].detach()

    @staticmethod
    def backward(ctx: Any, of_query: Tensor, of_key: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        _record_writes(of_query, of_key)
        rotated = _ops("rope").rope_backward(of_query, of_key, cos, sin, rotary_dim=ctx.rotary_dim)
        return rotated[0], rotated[1], None, None, None


def _record_writes(*heads: Tensor) -> None:
    # The kernel copies inputs (B, N, S, D) whose heads are not contiguous, and does not change these.
    increment_version([each for each in heads if each.transpose(1, 2).is_contiguous()])


def rotate_both(rotary_dim: int, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Apply RoPE to query (B, N, S, D) and key (B, K, S, D) with tables (S, R/2) or (B, S, R/2)."""
    rotated: tuple[Tensor, Tensor] = _Rotated.apply(query, key, cos, sin, rotary_dim)  # type: ignore[no-untyped-call]
    return rotated


def to_gradient(logits: Tensor, labels: Tensor, scale: float = 1.0) -> Tensor:
    """Replace logits (T, V) by `scale` times the gradient of their summed cross entropy; returns the sum in fp64."""
    losses = torch.zeros(len(logits), dtype=torch.float32, device=logits.device)
    num_words = logits.shape[1]
    # Uses the kernel's mean over 1 / scale tokens, so that the gradient is scaled before it is rounded.
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
    """Warps of a kernel for the loss, as in the package: AMD's are twice as wide, so half as many are a block."""
    if is_rocm():
        return 16
    is_new = compute_capability(device) >= _BLACKWELL
    return 8 if is_new and dtype.itemsize == 2 else 32


@dataclass
class Served:
    """A kernel in the place of a function of torch, which takes over, with a warning, if the kernel cannot run."""

    part: Part
    run: Callable[..., Any]
    torchs: Callable[..., Any]

    def __call__(self, *given: Any) -> Any:
        """As the function of torch. Kernels fail before they write, so it finds its arguments as they were."""
        try:
            return self.run(*given)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # anything that a loader, a compiler or a kernel raises
            warnings.warn(f"{self.part} by torch, not by {words()}: {first_line(error)}", stacklevel=2)
            self.run = self.torchs
            return self.run(*given)


def serve(
    blocks: Iterable[nn.Module], choice: PartChoice, device: torch.device, parts: Collection[Part] = PARTS
) -> dict[Part, int]:
    """Install the kernels of `choice` for `parts` of `blocks`. Returns the number of modules changed, by part.

    Kernels are set on instances, not on classes. When a tensor axis replaces a norm, it moves the kernel to the new
    module (terrace.runtime.tensor.apply). Raises `ConfigError` if the kernels of "liger" cannot run.
    """
    number = dict[Part, int]()
    if choice == "torch":
        return number
    reason = why_missing() if device.type in DEVICES else f"its kernels are for CUDA, and this is {device}"
    if reason:
        raise ConfigError(f"train.kernels = {choice!r} cannot serve: {reason}; leave train.kernels out")
    for part, owner, name, kernel in _places(blocks):
        if part in parts:
            if not is_served(owner, name):
                object.__setattr__(owner, name, Served(part, kernel, getattr(owner, name)))
            number[part] = number.get(part, 0) + 1
    return number


def is_served(owner: object, name: str) -> bool:
    """Whether an attribute of a module is a liger kernel, which needs no compilation."""
    return isinstance(vars(owner).get(name), Served)


def any_served(blocks: Iterable[nn.Module]) -> bool:
    """Whether any part of `blocks` is computed by a liger kernel."""
    return any(is_served(owner, name) for _, owner, name, _ in _places(blocks))


def _places(blocks: Iterable[nn.Module]) -> Iterator[tuple[Part, object, str, Callable[..., Any]]]:
    """The attributes that compute parts, each as (part, owner, name, kernel)."""
    for each in (each for block in blocks for each in block.modules()):
        if isinstance(each, RMSNorm):
            yield "norms", each, "normal", rms_norm
        elif isinstance(each, MLP) and each.gate is not None and _activation(each) in GATED:
            yield "gated activations", each, "_gated", GATED[_activation(each)]
        elif isinstance(each, Head):
            yield "loss", each, "to_gradient", to_gradient
        elif isinstance(each, Attention) and isinstance(each.rotary, Rotary):
            # One object serves all layers.
            yield "rotary positions", each.rotary, "rotate_both", partial(rotate_both, each.rotary.dim)


def _activation(module: MLP) -> str:
    return next(name for name, function in layers.ACTIVATIONS.items() if function is module.activation)
