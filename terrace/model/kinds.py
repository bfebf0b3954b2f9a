"""Kinds of layers (window, RoPE, the gated delta rule), and constants that scale or cap values. Needs no torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from terrace.base.errors import ModelError
from terrace.model.rope_scaling import RopeScaling
from terrace.model.sizes import LARGEST_SIZE
from terrace.model.windows import widest_window

MOST_TAPS = 128  # tokens of a short convolution; the place of a token in its document is then told by a byte


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """Window and RoPE of one layer, if layers differ in them; fields as in `ModelConfig`."""

    is_linear: bool = False
    sliding_window: int = 0
    rope_theta: float = 0.0  # 0: no RoPE
    rope_scaling: RopeScaling | None = None


@dataclass(frozen=True, kw_only=True)
class DeltaSizes:
    """Heads of the layers with the gated delta rule (Gated DeltaNet, 2412.06464); 0 key heads: no layer has it.

    A key head serves `value_heads` / `key_heads` consecutive value heads, as in grouped attention. Each value head has
    a state of `key_dim` x `value_dim` numbers, whatever the length of the sequence.
    """

    key_heads: int = 0
    value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    taps: int = 0  # tokens that the short convolution of queries, keys and values reads: itself and those before it
    rank: int = 0  # of Kimi Delta Attention (2510.26692), the features that decays and gate come through; 0: none

    @property
    def num_decays(self) -> int:
        """Decays of a token: of each head, or with a `rank` of each element of the key of each head."""
        return self.value_heads * (self.key_dim if self.rank else 1)

    def check(self, names: Mapping[str, str]) -> None:
        """Raise `ModelError` for invalid sizes. `names` maps fields to the keys of the file, for messages."""
        for field, size in asdict(self).items():
            least = int(field != "rank")
            if not least <= size <= LARGEST_SIZE:
                raise ModelError(
                    f"{names.get(field, field)} = {size} must be at least {least} and at most {LARGEST_SIZE}"
                )
        if self.taps > MOST_TAPS:
            raise ModelError(f"{names['taps']} = {self.taps} must be at most {MOST_TAPS}")
        if self.value_heads % self.key_heads:
            raise ModelError(
                f"{names['value_heads']} = {self.value_heads} is not a multiple of {names['key_heads']} = "
                f"{self.key_heads}: change one of them"
            )


@dataclass(frozen=True, kw_only=True)
class Scales:
    """Constants that scale or cap values of a model. Raises `ModelError` for a number out of range.

    A cap c replaces x by c tanh(x / c), for attention scores before the mask and logits before the loss.
    """

    embedding: float = 1.0  # multiplies embeddings; rounded to their dtype
    residual: float = 1.0  # multiplies outputs of attention and MLP before they are added to the residual stream
    attention: float = 0.0  # multiplies the product of query and key; 0: 1 / sqrt(head_dim)
    logit_divisor: float = 1.0
    attention_cap: float = 0.0  # 0: none
    logit_cap: float = 0.0

    def __post_init__(self) -> None:
        for name in ("embedding", "residual", "logit_divisor"):
            if not 0 < getattr(self, name) < math.inf:
                raise ModelError(f"scales.{name} = {getattr(self, name)} must be positive and finite")
        for name in ("attention", "attention_cap", "logit_cap"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ModelError(f"scales.{name} = {getattr(self, name)} must be at least 0 and finite")


def with_scaling(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Copy `fields` with the table `rope_scaling` converted to a `RopeScaling`."""
    scaling = fields.get("rope_scaling")
    return {**fields, "rope_scaling": None if scaling is None else RopeScaling(**scaling)}


def check_kinds(config: Any) -> None:
    """Raise `ModelError` if windows, RoPE or kinds of a `ModelConfig` are out of range or inconsistent."""
    kinds: Sequence[LayerKind] = config.kinds
    model = LayerKind(
        sliding_window=config.sliding_window, rope_theta=config.rope_theta, rope_scaling=config.rope_scaling
    )
    for kind in (model, *kinds):
        if not 0 <= kind.sliding_window <= LARGEST_SIZE:
            raise ModelError(
                f"sliding_window = {kind.sliding_window} must be at least 1 and at most {LARGEST_SIZE}: "
                "set it to null for no window"
            )
        if not 0 <= kind.rope_theta < math.inf:
            raise ModelError(f"rope_theta = {kind.rope_theta} must be positive and finite")
        if kind.rope_scaling is not None:
            kind.rope_scaling.check(config.rotary_dim, kind.rope_theta)
    if not kinds:
        return
    if len(kinds) != config.num_layers:
        raise ModelError(
            f"kinds has {len(kinds)} entries, and the model {config.num_layers} layers: give one for each layer"
        )
    # Redundant settings are rejected, since equal models must compare equal.
    if len(set(kinds)) == 1:
        raise ModelError("kinds are all alike: leave them out, and give their window and RoPE to the model")
    if config.is_linear:
        raise ModelError(
            "is_linear with kinds of which some are not: set it to false, as the layers with attention say"
        )
    widest = widest_window([kind.sliding_window for kind in kinds])
    if config.sliding_window != widest:
        raise ModelError(
            f"sliding_window = {config.sliding_window} must be the widest of the layers' windows, {widest}"
        )
