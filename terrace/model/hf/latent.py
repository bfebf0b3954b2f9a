"""Converts the `config.json` keys of latent attention to fields of `ModelConfig`, and back."""

from collections.abc import Mapping
from typing import Any

from terrace.base.errors import ModelError

# Field of Latent -> key; null means rank 0.
KEYS = {
    "key_value_rank": "kv_lora_rank",
    "query_rank": "q_lora_rank",
    "value_dim": "v_head_dim",
    "interleaved": "rope_interleave",
}
_SHARED, _UNSHARED, _MSCALE = "qk_rope_head_dim", "qk_nope_head_dim", "mscale_all_dim"


def read_latent(loaded: Any, table: Mapping[str, Any], *, rotates: bool) -> dict[str, Any]:
    """Fields `latent`, `head_dim` and `rotary_dim` of a loaded table; empty for families without latent attention.

    `table` is the whole config.json; `rotates` says whether the family has RoPE. Raises `ModelError` if there are fewer
    key-value heads than heads, or the rank of keys and values is below 1.
    """
    if not hasattr(loaded, KEYS["key_value_rank"]):
        return {}
    heads, keys = loaded.num_attention_heads, loaded.num_key_value_heads
    if keys not in (None, heads):
        raise ModelError(
            f"num_key_value_heads = {keys} is not implemented with latent attention, whose {heads} heads have keys of "
            f"their own: set it to {heads}"
        )
    if loaded.kv_lora_rank < 1:
        raise ModelError(f"kv_lora_rank = {loaded.kv_lora_rank} must be at least 1 in this family")
    fields = {own: getattr(loaded, key) or 0 for own, key in KEYS.items() if own != "interleaved"}
    scaling = table.get("rope_parameters") or table.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    mscale = scaling.get(_MSCALE) or 0.0 if rotates and kind != "default" else 0.0
    fields |= {"interleaved": bool(getattr(loaded, KEYS["interleaved"], True)), "mscale": float(mscale)}
    shared = fields["shared_dim"] = getattr(loaded, _SHARED)
    return {
        "latent": fields,
        "head_dim": shared + getattr(loaded, _UNSHARED),
        "rotary_dim": shared if rotates else 0,
    }


def write_latent(fields: Mapping[str, Any], table: type[Any]) -> dict[str, Any]:
    """Inverse of `read_latent`, for a family's `table`, except for the RoPE key of `written_mscale`."""
    latent = fields["latent"]
    if KEYS["key_value_rank"] not in table.__dataclass_fields__:
        return {}
    found = {key: latent[own] for own, key in KEYS.items() if key in table.__dataclass_fields__}
    return found | {
        KEYS["query_rank"]: latent["query_rank"] or None,
        _SHARED: latent["shared_dim"],
        _UNSHARED: fields["head_dim"] - latent["shared_dim"],
    }


def written_mscale(fields: Mapping[str, Any]) -> dict[str, float]:
    """The key of `rope_parameters` for yarn's factor of attention scores, if it is set."""
    mscale = fields["latent"]["mscale"]
    return {_MSCALE: mscale} if mscale else {}
