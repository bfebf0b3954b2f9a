"""The keys of `config.json` that describe rotary positions, read as numbers of `ModelConfig` and written again.

Both spellings are read: a `rope_parameters` table, and `rope_theta`, `rotary_emb_base`, `rotary_pct` or `rope_scaling`
at the top. When a file holds both they must agree. What `transformers` derives from absent keys is resolved here, and
written as a number.
"""

import math
from collections.abc import Mapping
from typing import Any

from terrace.base.errors import ConfigError, ModelError, did_you_mean
from terrace.base.schema import load
from terrace.model.hf.families import Family
from terrace.model.rope import RopeScaling, free_keys, needed_keys

ENDLESS = 1e30  # beyond, it is no number that anyone means
ORIGINAL = "original_max_position_embeddings"
_OTHERS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_READ = {"yarn": ("mscale", "mscale_all_dim"), "longrope": ("factor",)}  # keys that others follow from
_ALIASES = {"su": "longrope"}  # older names


def rope_keys(family: Family) -> set[str]:
    """Keys of a config.json that describe rotary positions."""
    if not family.theta_key:
        return set()
    keys = {"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"}
    return keys | {family.theta_key, family.factor_key, family.local_theta_key} - {""}


def read_rope(table: Mapping[str, Any], family: Family, default_theta: float) -> tuple[float, float]:
    """The base and the rotated fraction of a head."""
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
    if theta <= 0:  # which would read as layers that are not turned
        raise ModelError(f"rope_theta = {theta} must be positive and finite")
    factor = _agreed(found["factor"], family.default_factor)
    if not family.factor_is_free and factor != family.default_factor:
        raise ModelError(f"partial_rotary_factor = {factor} is not part of this family: set it to 1.0")
    return theta, factor


def read_scaling(table: Mapping[str, Any], family: Family, max_positions: int) -> RopeScaling | None:
    """The scaling of a model with `max_positions`; None for the default."""
    found: dict[str, RopeScaling | None] = {}
    for where, inner in _tables(table).items():
        kind = _kind(inner, where, family)
        known = (*needed_keys(kind), *free_keys(kind))
        for key in inner:
            if key not in _OTHERS | {*known, *_READ.get(kind, ())}:
                raise ModelError(
                    f"unknown key {where}.{key} for rope_type {kind}{did_you_mean(key, {*known, *_OTHERS})}"
                )
        found[where] = None if kind == "default" else _scaling(kind, inner, where, table, max_positions)
    if len(set(found.values())) > 1:
        raise ModelError("rope_parameters and rope_scaling disagree: keep one of them")
    return next(iter(found.values()), None)


def write_rope(scaling: Mapping[str, Any] | None, theta: float) -> dict[str, Any]:
    """The table of `rope_parameters` of the fields of a scaling."""
    made = {"rope_type": "default"} if scaling is None else RopeScaling(**scaling).table()
    return {**made, "rope_theta": theta}


def published_scaling(rope: Mapping[str, Any]) -> dict[str, Any] | None:
    """A table of `rope_parameters` as older releases have it, `rope_scaling`."""
    others = {"rope_theta", "partial_rotary_factor"}
    scaled = {key: value for key, value in rope.items() if key not in others}
    return None if rope["rope_type"] == "default" else scaled


def fraction_of(rotary_dim: int, head_dim: int) -> float:
    """A fraction of `head_dim` that rounds down to `rotary_dim` again."""
    # Rounding of the quotient may lose one element.
    factor = rotary_dim / head_dim
    return factor if int(head_dim * factor) == rotary_dim else math.nextafter(factor, math.inf)


def _kind(inner: Mapping[str, Any], where: str, family: Family) -> str:
    kind = inner.get("rope_type", inner.get("type", "default"))
    # Older files say `type`, newer ones `rope_type`.
    if inner.get("type", kind) != kind:
        raise ModelError(f"{where}.rope_type = {kind!r} and {where}.type = {inner['type']!r} disagree: keep one")
    kind = _ALIASES.get(kind, kind) if isinstance(kind, str) else kind
    if kind not in family.rope_types:
        *first, last = family.rope_types
        raise ModelError(f"{where}.rope_type = {kind!r} is not implemented: use {', '.join(first)} or {last}")
    return str(kind)


def _scaling(
    kind: str, inner: Mapping[str, Any], where: str, table: Mapping[str, Any], max_positions: int
) -> RopeScaling:
    fields = {key: inner[key] for key in (*needed_keys(kind), *free_keys(kind)) if inner.get(key) is not None}
    if ORIGINAL in needed_keys(kind) and kind != "llama3":
        fields[ORIGINAL] = int(
            _agreed({f"{where}.{ORIGINAL}": inner.get(ORIGINAL), ORIGINAL: table.get(ORIGINAL)}, max_positions)
        )
    for key in needed_keys(kind):
        if key not in fields:
            raise ModelError(f"{where}.{key} is missing: rope_type {kind} needs it")
    for key in ("beta_fast", "beta_slow"):  # 0 means the default
        if key in fields and not fields[key]:
            del fields[key]
    if kind in ("yarn", "longrope") and "attention_factor" not in fields:
        fields["attention_factor"] = _attention_factor(kind, inner, where, fields, max_positions)
    try:
        return load(RopeScaling, {"rope_type": kind} | fields, where)
    except ConfigError as error:
        raise ModelError(str(error)) from error


def _attention_factor(
    kind: str, inner: Mapping[str, Any], where: str, fields: Mapping[str, Any], max_positions: int
) -> float:
    # What cosines and sines are multiplied by, where a file does not say it.
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
