"""Converts the `config.json` keys of multipliers and caps to fields of `Scales`, and back."""

import math
from collections.abc import Mapping
from typing import Any

from terrace.base.errors import ModelError
from terrace.model.hf.key_tables import ROOT_OF_HIDDEN

# Field of Scales -> key with the same value; null means no cap.
_PLAIN = {
    "embedding": "embedding_multiplier",
    "residual": "residual_multiplier",
    "attention": "attention_multiplier",
    "logit_divisor": "logits_scaling",
    "attention_cap": "attn_logit_softcapping",
    "logit_cap": "final_logit_softcapping",
}
_INVERSE_SQUARE = "query_pre_attn_scalar"  # the attention scale is 1 / its root


def read_scales(loaded: Any, constants: Mapping[str, object]) -> dict[str, float]:
    """Fields of `Scales` from a loaded table. Raises `ModelError` for a number out of range."""
    found = {own: float(getattr(loaded, key) or 0.0) for own, key in _PLAIN.items() if hasattr(loaded, key)}
    if hasattr(loaded, _INVERSE_SQUARE):
        if not 0 < (scalar := getattr(loaded, _INVERSE_SQUARE)) < math.inf:
            raise ModelError(f"{_INVERSE_SQUARE} = {scalar} must be positive and finite")
        found["attention"] = scalar**-0.5
    if constants.get("scales.embedding") == ROOT_OF_HIDDEN:
        found["embedding"] = math.sqrt(max(loaded.hidden_size, 1))
    for own in ("embedding", "residual", "attention", "logit_divisor"):
        if own in found and not 0 < found[own] < math.inf:
            raise ModelError(f"{_PLAIN[own]} = {found[own]} must be positive and finite")
    return found


def write_scales(fields: Mapping[str, Any], head_dim: int, table: type[Any]) -> dict[str, Any]:
    """Inverse of `read_scales`, for the keys of a family's `table`."""
    keys = table.__dataclass_fields__
    values = dict(fields) | {"attention": fields["attention"] or head_dim**-0.5}
    found: dict[str, Any] = {key: values[own] for own, key in _PLAIN.items() if key in keys}
    for key in (_PLAIN["attention_cap"], _PLAIN["logit_cap"]):
        if key in found:
            found[key] = found[key] or None
    if _INVERSE_SQUARE in keys:
        scalar = values["attention"] ** -2
        whole = round(scalar)
        found[_INVERSE_SQUARE] = whole if whole and whole**-0.5 == values["attention"] else scalar
    return found
