"""Converts the `config.json` keys of layers with the gated delta rule to fields of `ModelConfig`, and back."""

from collections.abc import Mapping, Sequence
from typing import Any

from terrace.base.errors import ModelError
from terrace.model.windows import FULL

# Field of DeltaSizes -> key
KEYS = {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "taps": "linear_conv_kernel_dim",
}
LINEAR = "linear_attention"  # in layer_types


def has_linear(table: type[Any]) -> bool:
    """Whether a family's table has the keys of linear layers."""
    return KEYS["key_heads"] in table.__dataclass_fields__


def read_delta(loaded: Any) -> dict[str, Any]:
    """The field `delta` of a loaded table; empty for families without linear layers."""
    if not has_linear(type(loaded)):
        return {}
    return {"delta": {own: getattr(loaded, key) for own, key in KEYS.items()}}


def write_delta(fields: Mapping[str, Any], table: type[Any]) -> dict[str, Any]:
    """Inverse of `read_delta`, for a family's `table`."""
    return {key: fields["delta"][own] for own, key in KEYS.items()} if has_linear(table) else {}


def linear_layers(loaded: Any, num_layers: int) -> Sequence[bool]:
    """Which layers are linear. Raises `ModelError` for other types of layers."""
    if not has_linear(type(loaded)):
        return [False] * num_layers
    kinds, every = loaded.layer_types, loaded.full_attention_interval
    if kinds is None:
        if every < 1:
            raise ModelError(
                f"full_attention_interval = {every} must be at least 1: the distance of layers with full attention"
            )
        return [bool((layer + 1) % every) for layer in range(num_layers)]
    if len(kinds) != num_layers or set(kinds) - {LINEAR, FULL}:
        raise ModelError(
            f"layer_types = {list(kinds)} is not implemented: name {LINEAR!r} or {FULL!r} for each of the "
            f"{num_layers} layers, or leave it out"
        )
    return [kind == LINEAR for kind in kinds]
