"""Choice of kernels for the parts of a layer between its matrix products.

    torch   operations of torch, which `torch.compile` may fuse (terrace.runtime.compiled)
    liger   Triton kernels of the package `liger-kernel` (terrace.model.liger) with one pass over memory: rms norms,
            gated activations, rotary positions, and the gradient of a chunk of logits

Parts that liger does not support use torch. Needs no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from terrace.model.config import ModelConfig

PartChoice = Literal["torch", "liger"]
Part = Literal["norms", "gated activations", "rotary positions", "loss"]
PARTS: tuple[Part, ...] = get_args(Part)

GATED = ("silu", "gelu_tanh")  # activations with a kernel
LARGEST_ROW = 65536  # elements; norms and activations process a row in one block
_DTYPES = ("bf16", "fp16", "fp32")


@dataclass(frozen=True)
class PartsCase:
    """Properties of a model and a device on which the choice of kernels depends."""

    model: "ModelConfig"
    backend: str  # "cpu" or "cuda"
    dtype: str  # "bf16", ...
    rows: int = 1  # tensor ranks that shard heads and inner features
    columns: int = 1  # tensor ranks that shard hidden features
    objective: str = "next-token"


def refusal(case: PartsCase) -> str:
    """Why liger supports no part at all, with the values; empty if it supports some."""
    if case.backend != "cuda":
        return f"its kernels are for CUDA, and devices are of type {case.backend!r}"
    if case.dtype not in _DTYPES:
        return f"its kernels take {', '.join(_DTYPES)}, and plan.compute = {case.dtype!r}"
    left = left_to_torch(case)
    if len(left) == len(PARTS):
        return "; ".join(f"{part}: {reason}" for part, reason in left.items())
    return ""


def left_to_torch(case: PartsCase) -> Mapping[Part, str]:
    """Parts that liger does not support, each with the reason."""
    model = case.model
    reasons: dict[Part, str] = {
        "norms": _norms(case),
        "gated activations": _gated(model, case.rows),
        "rotary positions": "" if model.rotary_dim else "the model has none",
        "loss": _loss(case),
    }
    return {part: reason for part, reason in reasons.items() if reason}


def _norms(case: PartsCase) -> str:
    if case.model.norm != "rms":
        return "the model has layer norms"
    if case.columns > 1:
        return "the columns of the tensor axis share each row"
    if case.model.whole_qk_norm and case.rows > 1:
        return "the rows of the tensor axis share the norm of all heads together"
    heads = case.model.num_heads * case.model.head_dim if case.model.whole_qk_norm else 0
    return _too_long(max(case.model.hidden_size, heads))


def _gated(model: "ModelConfig", rows: int) -> str:
    if not model.gated_mlp:
        return "the model's MLP has no gate"
    if model.activation not in GATED:
        return f"it has kernels for {' and '.join(GATED)}, and the model's activation is {model.activation}"
    is_dense = model.experts is None or model.experts.dense_layers
    size = max(model.mlp_size, model.intermediate_size if is_dense else 0)
    if not size:
        return "the products of experts are the runtime's own"
    return _too_long(-(-size // rows))


def _loss(case: PartsCase) -> str:
    if case.objective != "next-token":
        return f"train.objective = {case.objective!r} has a loss of its own"
    if case.rows * case.columns > 1:
        return "the tensor axis cuts the vocabulary"
    return ""


def _too_long(size: int) -> str:
    return f"its rows have at most {LARGEST_ROW} elements, and the model's {size}" if size > LARGEST_ROW else ""
