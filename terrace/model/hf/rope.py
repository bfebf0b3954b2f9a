"""Converts the `config.json` keys of RoPE to fields of `ModelConfig`, and back.

Both forms are read: a `rope_parameters` table, and `rope_theta`, `rotary_emb_base`, `rotary_pct` or `rope_scaling` at
the top level. If a file has both, they must agree. Values that `transformers` derives if keys are missing are computed
here and written explicitly.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from terrace.base.errors import ModelError, did_you_mean
from terrace.model.windows import FULL, SLIDING

if TYPE_CHECKING:
    from terrace.model.hf.families import Family

# Required and optional keys of each rope_type.
_NEEDED: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
}
_FREE: dict[str, tuple[str, ...]] = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "truncate"),
    "longrope": ("attention_factor",),
}
Rope = tuple[float, Mapping[str, Any] | None]  # RoPE base, fields of the scaling

ENDLESS = 1e30  # larger numbers are rejected as errors
ORIGINAL = "original_max_position_embeddings"
_OTHERS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
# How the weights came about; which of three positions an image turns each part of a head by, where text has one.
_REMARKS = {"finetuned", "mrope_section", "mrope_interleaved"}
_READ = {"yarn": ("mscale", "mscale_all_dim"), "longrope": ("factor",)}  # attention_factor is computed from these
_ALIASES = {"su": "longrope"}  # older names


def rope_keys(family: "Family") -> set[str]:
    """Keys of config.json that describe RoPE."""
    if not family.theta_key:
        return set()
    keys = {"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"}
    return keys | {family.theta_key, family.factor_key, family.local_theta_key} - {""}


def read_rope(table: Mapping[str, Any], family: "Family", default_theta: float) -> tuple[float, float]:
    """RoPE base and rotated fraction of a head."""
    found: dict[str, dict[str, Any]] = {"theta": {}, "factor": {}}
    # Newer files keep RoPE in a table, older ones at the top level; both may be present.
    for where, inner in _tables(table).items():
        found["theta"][f"{where}.rope_theta"] = inner.get("rope_theta")
        found["factor"][f"{where}.partial_rotary_factor"] = inner.get("partial_rotary_factor")
    for key in ("rope_theta", family.theta_key):
        found["theta"][key] = table.get(key)
    for key in ("partial_rotary_factor", family.factor_key):
        found["factor"][key] = table.get(key)
    # The same number may appear under several keys; disagreeing values are refused.
    theta = _agreed(found["theta"], default_theta)
    if theta <= 0:  # 0 would mean layers without RoPE
        raise ModelError(f"rope_theta = {theta} must be positive and finite")
    factor = _agreed(found["factor"], family.default_factor)
    if not family.factor_is_free and factor != family.default_factor:
        raise ModelError(f"partial_rotary_factor = {factor} is not part of this family: set it to 1.0")
    return theta, factor


def read_ropes(loaded: Any, table: Mapping[str, Any], family: "Family") -> dict[str, Rope]:
    """RoPE base and scaling for each type of layer; (0, None) for a family without RoPE.

    `table` is the whole config.json, `loaded` the keys that the family implements.
    """

    def rope(keys: Mapping[str, Any], default_theta: float) -> Rope:
        scaling = read_scaling(keys, family, loaded.max_position_embeddings)
        return read_rope(keys, family, default_theta)[0], scaling

    if not family.theta_key:
        return dict.fromkeys((SLIDING, FULL), (0.0, None))
    if not family.local_theta_key:
        return dict.fromkeys((SLIDING, FULL), rope(table, family.default_theta))
    # One table per type of layer, or older keys at the top level.
    nested = table.get("rope_parameters")
    if not isinstance(nested, Mapping | None) or set(nested or ()) - {SLIDING, FULL}:
        raise ModelError(f"rope_parameters = {nested!r} must have a table {FULL!r} and a table {SLIDING!r}, or neither")
    inner = {kind: (nested or {}).get(kind) for kind in (FULL, SLIDING)}
    whole = {**table, "rope_parameters": inner[FULL]}
    local = {"rope_parameters": inner[SLIDING], "rope_theta": table.get(family.local_theta_key)}
    return {FULL: rope(whole, family.default_theta), SLIDING: rope(local, family.default_local_theta)}


def read_scaling(table: Mapping[str, Any], family: "Family", max_positions: int) -> Mapping[str, Any] | None:
    """Fields of the `RopeScaling` of a model with `max_positions`; None for the default."""
    found: list[dict[str, Any] | None] = []
    for where, inner in _tables(table).items():
        kind = _kind(inner, where, family)
        known = (*_NEEDED.get(kind, ()), *_FREE.get(kind, ()))
        for key in inner:
            if key not in _OTHERS | _REMARKS | {*known, *_READ.get(kind, ())}:
                raise ModelError(
                    f"unknown key {where}.{key} for rope_type {kind}{did_you_mean(key, {*known, *_OTHERS})}"
                    "; where it changes nothing that the model computes, delete it from config.json"
                )
        found.append(None if kind == "default" else _scaling(kind, inner, where, table, max_positions))
    if any(each != found[0] for each in found):
        raise ModelError("rope_parameters and rope_scaling disagree: keep one of them")
    return found[0] if found else None


def written_rope(
    kinds: Sequence[Mapping[str, Any]], scaling: Mapping[str, Any] | None, theta: float, family: "Family"
) -> dict[str, Any]:
    """Table `rope_parameters` for the model's `scaling` and base `theta`.

    In a family with a separate RoPE for windowed layers (`local_theta_key`), it has one inner table per type of layer,
    built from `kinds`.
    """
    if not family.local_theta_key:
        return _written(scaling, theta or family.default_theta)
    found = {FULL: _written(None, family.default_theta), SLIDING: _written(None, family.default_local_theta)}
    for kind in kinds:
        found[SLIDING if kind["sliding_window"] else FULL] = _written(kind["rope_scaling"], kind["rope_theta"])
    return found


def _written(scaling: Mapping[str, Any] | None, theta: float) -> dict[str, Any]:
    if scaling is None:
        return {"rope_type": "default", "rope_theta": theta}
    kind = scaling["rope_type"]
    values = {key: scaling[key] for key in (*_NEEDED[kind], *_FREE.get(kind, ()))}
    made = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
    return {"rope_type": kind, **made, "rope_theta": theta}


def published_scaling(rope: Mapping[str, Any]) -> dict[str, Any] | None:
    """Equivalent `rope_scaling` for older releases; None for the default."""
    others = {"rope_theta", "partial_rotary_factor"}
    scaled = {key: value for key, value in rope.items() if key not in others}
    return None if rope["rope_type"] == "default" else scaled


def fraction_of(rotary_dim: int, head_dim: int) -> float:
    """Fraction such that int(head_dim * fraction) is `rotary_dim`."""
    # The quotient may be rounded down and lose one element.
    factor = rotary_dim / head_dim
    return factor if int(head_dim * factor) == rotary_dim else math.nextafter(factor, math.inf)


def _kind(inner: Mapping[str, Any], where: str, family: "Family") -> str:
    kind = inner.get("rope_type", inner.get("type", "default"))
    # Older files say `type`, newer ones `rope_type`.
    if "type" in inner and inner["type"] != kind:
        raise ModelError(f"{where}.rope_type = {kind!r} and {where}.type = {inner['type']!r} disagree: keep one")
    kind = _ALIASES.get(kind, kind) if isinstance(kind, str) else kind
    if kind not in family.rope_types:
        *first, last = family.rope_types
        raise ModelError(f"{where}.rope_type = {kind!r} is not implemented: use {', '.join(first)} or {last}")
    return str(kind)


def _scaling(
    kind: str, inner: Mapping[str, Any], where: str, table: Mapping[str, Any], max_positions: int
) -> dict[str, Any]:
    found = {key: inner[key] for key in (*_NEEDED[kind], *_FREE.get(kind, ())) if inner.get(key) is not None}
    if ORIGINAL in _NEEDED[kind] and kind != "llama3":
        stated = {f"{where}.{ORIGINAL}": inner.get(ORIGINAL), ORIGINAL: table.get(ORIGINAL)}
        found[ORIGINAL] = _agreed(stated, max_positions)
    for key in _NEEDED[kind]:
        if key not in found:
            raise ModelError(f"{where}.{key} is missing: rope_type {kind} needs it")
    fields: dict[str, Any] = {"rope_type": kind}
    for key, value in found.items():
        fields[key] = _checked(f"{where}.{key}", key, value)
    for key in ("beta_fast", "beta_slow"):  # 0 means the default
        if key in fields and not fields[key]:
            del fields[key]
    if kind in ("yarn", "longrope") and "attention_factor" not in fields:
        fields["attention_factor"] = _attention_factor(kind, inner, where, fields, max_positions)
    return fields


def _checked(name: str, key: str, value: object) -> object:
    if key == "truncate":
        if not isinstance(value, bool):
            raise ModelError(f"{name} = {value!r} must be true or false")
        return value
    if key in ("short_factor", "long_factor"):
        if not isinstance(value, list | tuple):
            raise ModelError(f"{name} = {value!r} must be a list of numbers")
        return tuple(_agreed({f"{name}[{index}]": each}, 0.0) for index, each in enumerate(value))
    number = _agreed({name: value}, 0.0)
    if key != ORIGINAL:
        return number
    if number != int(number):
        raise ModelError(f"{name} = {number} must be an integer")
    return int(number)


def _attention_factor(
    kind: str, inner: Mapping[str, Any], where: str, fields: Mapping[str, Any], max_positions: int
) -> float:
    # Default of attention_factor, as in transformers.
    original = max(1, fields[ORIGINAL])
    factor = _agreed({f"{where}.factor": inner.get("factor")}, max_positions / original)
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(max(2, original))) if factor > 1 else 1.0
    scales = [_agreed({f"{where}.{key}": inner.get(key)}, 0.0) for key in _READ["yarn"]]

    def grown(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    return grown(scales[0]) / grown(scales[1]) if all(scales) else grown(1.0)


def _tables(table: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    found = {}
    for where in ("rope_parameters", "rope_scaling"):
        inner = table.get(where)
        if not isinstance(inner, Mapping | None):
            raise ModelError(f"{where} = {inner!r} must be a table or null")
        if inner is not None:
            found[where] = inner
    return found


def _agreed(found: Mapping[str, Any], default: float) -> float:
    given = {key: value for key, value in found.items() if value is not None}
    for key, value in given.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ModelError(f"{key} = {value!r} must be a number")
        if not abs(value) < ENDLESS:
            raise ModelError(f"{key} = {str(value)[:12]} must be a number below {ENDLESS:g}")
    if len(set(given.values())) > 1:
        listed = " and ".join(f"{key} = {value!r}" for key, value in given.items())
        raise ModelError(f"{listed} disagree: keep one of them")
    return float(next(iter(given.values()), default))
