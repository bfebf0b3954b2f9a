"""From a Hugging Face `config.json` table to the fields of `ModelConfig`, and back.

Strict in the sense of `terrace.model.hf.families`: every key is implemented, harmless, or refused with the
value to give it. Both spellings of the rotary keys are read (a `rope_parameters` table, and `rope_theta`,
`rotary_emb_base`, `rotary_pct` at the top); when a file holds both they must agree.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from terrace.base.errors import ConfigError, ModelError, did_you_mean
from terrace.base.schema import load
from terrace.model.hf.families import FAMILIES, Family
from terrace.model.hf.keys import ACTIVATIONS, HARMLESS, ONLY, REFUSED, TRAINING
from terrace.model.hf.mixtures import OWN_KEYS, read_experts, write_experts
from terrace.model.rope import RopeScaling, scaling_keys

_ENDLESS = 1e30  # beyond, it is no number that anyone means


def read_fields(table: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `ModelConfig` that a `config.json` table describes; `experts` as a table of its own fields.

    Raises `ModelError` for a family, key or value that is unknown, missing, mistyped or not implemented. Sizes are not
    checked here; `ModelConfig` does that.
    """
    name = table.get("model_type")
    if not isinstance(name, str):
        raise ModelError(f"model_type is missing: set it to one of {', '.join(sorted(FAMILIES))}")
    if name not in FAMILIES:
        why = f": {REFUSED[name]}" if name in REFUSED else did_you_mean(name, FAMILIES)
        raise ModelError(f"model_type = {name!r} is not implemented{why}")
    family = FAMILIES[name]
    table = _without_aliases(table, family)
    _refuse_values(table, family)
    own_keys = {item.name for item in dataclasses.fields(family.table)}
    rope_keys = _rope_keys(family)
    for key in table:
        if key not in own_keys | rope_keys | HARMLESS | family.harmless | ONLY.keys() | family.only.keys():
            raise ModelError(f"unknown key {key!r} for {name}{did_you_mean(key, own_keys | rope_keys)}")
    try:
        loaded = load(family.table, {key: table[key] for key in table if key in own_keys}, name)
    except ConfigError as error:
        raise ModelError(str(error)) from error
    fields = {own: getattr(loaded, key) for own, key in family.names.items() if "." not in own}
    fields |= {own: value for own, value in family.constants.items() if "." not in own}
    if "sliding_window" in fields:
        fields["sliding_window"] = _read_window(loaded, family)
    if family.is_mixture:
        fields["experts"] = read_experts(loaded, family.names, family.constants)
    fields |= {"family": name, "scalar_head": _read_head(table, family)}
    return _complete(fields, table)


def write_table(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The `config.json` table of the fields of a `ModelConfig`, with the newer form of RoPE keys."""
    family = FAMILIES[fields["family"]]
    table: dict[str, Any] = {"model_type": fields["family"], "architectures": [family.architecture]}
    if fields["scalar_head"]:
        table |= {"architectures": [family.scored_architecture], "num_labels": 1}
    table |= {key: fields[own] for own, key in family.names.items() if "." not in own}
    activation_key = family.names["activation"]
    # Several spellings mean one activation; the first is written.
    spellings = [theirs for theirs, ours in ACTIVATIONS.items() if ours == fields["activation"]]
    table[activation_key] = spellings[0]
    table |= family.written
    if family.is_mixture:
        table |= write_experts(fields["experts"], family.names)
    if family.switched_window:
        has_window = fields["sliding_window"] > 0
        table |= {"use_sliding_window": has_window, "max_window_layers": 0 if has_window else fields["num_layers"]}
        if family.alternating_window and has_window:
            table["layer_types"] = ["sliding_attention"] * fields["num_layers"]
    if family.theta_key:
        scaling = fields["rope_scaling"] or {"rope_type": "default"}
        kept = ("rope_type", *scaling_keys(scaling["rope_type"]))
        rope = {key: scaling[key] for key in kept} | {"rope_theta": fields["rope_theta"]}
        if family.factor_is_free:
            rope["partial_rotary_factor"] = _factor(fields["rotary_dim"], fields["head_dim"])
        table["rope_parameters"] = rope
    return table


def published_table(table: Mapping[str, Any], dtype: str, tokens: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json to publish with weights of `dtype`, made from a table of `write_table`.

    RoPE appears under its newer and its older keys: releases of `transformers` that know only the older ones would
    otherwise take their defaults silently. `tokens` are the ids that begin, end and pad a text.
    """
    own = next((key for key in table if key in OWN_KEYS), None)
    if own is not None:
        raise ModelError(
            f"{own} = {table[own]!r}: transformers has none, so a {table['model_type']} folder cannot say it: "
            "use the run's checkpoints"
        )
    family = FAMILIES[table["model_type"]]
    if "num_labels" in table and not family.is_scored:
        raise ModelError(f"transformers has no {family.scored_architecture}: use the run's checkpoints")
    published = {**table, **tokens, "torch_dtype": dtype}
    if published.pop("num_labels", None):  # as transformers writes it
        published |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    if "sliding_window" in table:
        published["sliding_window"] = table["sliding_window"] or None
    if family.theta_key:
        rope = table["rope_parameters"]
        published[family.theta_key] = rope["rope_theta"]
        if family.factor_key:
            published[family.factor_key] = rope["partial_rotary_factor"]
        scaled = {key: rope[key] for key in ("rope_type", *scaling_keys(rope["rope_type"]))}
        published["rope_scaling"] = None if rope["rope_type"] == "default" else scaled
    return published


def without_training(table: Mapping[str, Any]) -> dict[str, Any]:
    """The table without dropout, noise and losses of routers, for a model that is not being trained."""
    family = FAMILIES.get(table.get("model_type", ""))
    given = {**(family.implied if family else {}), **table}
    return {**table, **{key: TRAINING[key] for key in given if key in TRAINING}}


def _without_aliases(table: Mapping[str, Any], family: Family) -> Mapping[str, Any]:
    # Releases of transformers differ in what they call a key.
    result = dict(table)
    for alias, key in family.aliases.items():
        if alias in result and result.setdefault(key, result[alias]) != result.pop(alias):
            raise ModelError(f"{key} = {table[key]!r} and {alias} = {table[alias]!r} disagree: keep one of them")
    return result


def _refuse_values(table: Mapping[str, Any], family: Family) -> None:
    # Absent keys count with the default of transformers.
    given, only = {**family.implied, **table}, {**ONLY, **family.only}
    refused = [key for key, value in given.items() if key in only and value not in only[key]]
    if not refused:
        return
    implemented = {key: json.dumps(only[key][0]) for key in refused}
    key = refused[0]
    absent = "" if key in table else " (what its absence means)"
    fix = f"set it to {implemented[key]} in config.json"
    if "null" not in implemented.values():  # which no flag can say
        fix += ", or give " + " ".join(f"--model.{name} {value}" for name, value in implemented.items())
    raise ModelError(f"{key} = {given[key]!r}{absent} is not implemented: {fix}")


def _read_head(table: Mapping[str, Any], family: Family) -> bool:
    # Whether `architectures` says that a score stands in place of the output matrix.
    named = table.get("architectures")
    named = named[0] if isinstance(named, list | tuple) and named else None
    if named == family.scored_architecture.replace("Sequence", "Token"):
        raise ModelError(
            f"architectures = [{named!r}] is not implemented, as its score has a bias: save the model as "
            f"{family.scored_architecture}"
        )
    if named != family.scored_architecture:
        return False
    labels, number = table.get("id2label"), table.get("num_labels")
    # The default of transformers.
    number = number if number is not None else len(labels) if isinstance(labels, Mapping) else 2
    if number != 1:
        raise ModelError(
            f"architectures = [{named!r}] with num_labels = {number!r} is not implemented: a reward model has one; "
            f"set num_labels to 1, or architectures to [{family.architecture!r}]"
        )
    return True


def _rope_keys(family: Family) -> set[str]:
    if not family.theta_key:
        return set()
    keys = {"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"}
    return keys | {family.theta_key, family.factor_key} - {""}


def _complete(fields: dict[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    family = FAMILIES[fields["family"]]
    hidden, heads = fields["hidden_size"], fields["num_heads"]
    # Defaults of transformers for absent keys.
    if fields["intermediate_size"] is None:
        fields["intermediate_size"] = 4 * hidden
    if fields.get("num_kv_heads") is None:
        fields["num_kv_heads"] = heads
    if fields.get("head_dim") is None:
        if heads > 0 and hidden % heads:
            raise ModelError(
                f"{family.names['hidden_size']} = {hidden} does not divide into "
                f"{family.names['num_heads']} = {heads}: make it a multiple"
            )
        fields["head_dim"] = hidden // heads if heads > 0 else 0
    activation = fields["activation"]
    if activation not in ACTIVATIONS:
        key = family.names["activation"]
        raise ModelError(f"{key} = {activation!r} is not implemented{did_you_mean(activation, ACTIVATIONS)}")
    fields["activation"] = ACTIVATIONS[activation]
    theta, factor = _read_rope(table, family) if family.theta_key else (0.0, 0.0)
    if abs(fields["head_dim"]) > _ENDLESS:
        sizes = [family.names[name] for name in ("hidden_size", "head_dim") if name in family.names]
        raise ModelError(f"a head would have more than {_ENDLESS:g} elements: give a smaller {' or '.join(sizes)}")
    # Rounded down as the reference does: 0.25 of a head of 90 rotates 22 elements.
    fields |= {"rope_theta": theta, "rotary_dim": int(fields["head_dim"] * factor)}
    scaling = _read_scaling(table) if family.theta_key else None
    return fields | ({} if scaling is None else {"rope_scaling": scaling})


def _read_rope(table: Mapping[str, Any], family: Family) -> tuple[float, float]:
    found: dict[str, dict[str, Any]] = {"theta": {}, "factor": {}}
    # Newer files keep RoPE in a table, older ones at the top level; both may be present.
    for where, inner in _rope_tables(table).items():
        found["theta"][f"{where}.rope_theta"] = inner.get("rope_theta")
        found["factor"][f"{where}.partial_rotary_factor"] = inner.get("partial_rotary_factor")
    for key in ("rope_theta", family.theta_key):
        found["theta"][key] = table.get(key)
    for key in ("partial_rotary_factor", family.factor_key):
        found["factor"][key] = table.get(key)
    # The same number may appear under several keys; disagreeing values are refused.
    theta = _agreed(found["theta"], family.default_theta)
    factor = _agreed(found["factor"], family.default_factor)
    if not family.factor_is_free and factor != family.default_factor:
        raise ModelError(f"partial_rotary_factor = {factor} is not part of this family: set it to 1.0")
    return theta, factor


def _read_scaling(table: Mapping[str, Any]) -> RopeScaling | None:
    found: dict[str, RopeScaling | None] = {}
    for where, inner in _rope_tables(table).items():
        kind = inner.get("rope_type", inner.get("type", "default"))
        if kind not in ("default", "linear", "llama3"):
            raise ModelError(f"{where}.rope_type = {kind!r} is not implemented: use default, linear or llama3")
        # Older files say `type`, newer ones `rope_type`.
        if inner.get("type", kind) != kind:
            raise ModelError(f"{where}.rope_type = {kind!r} and {where}.type = {inner['type']!r} disagree: keep one")
        known = scaling_keys(kind)
        for key in inner:
            others = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
            if key not in others | set(known):
                raise ModelError(
                    f"unknown key {where}.{key} for rope_type {kind}{did_you_mean(key, {*known, *others})}"
                )
        for key in known:
            if inner.get(key) is None:
                raise ModelError(f"{where}.{key} is missing: rope_type {kind} needs it")
        try:
            fields = {"rope_type": kind} | {key: inner[key] for key in known}
            found[where] = None if kind == "default" else load(RopeScaling, fields, where)
        except ConfigError as error:
            raise ModelError(str(error)) from error
    if len(set(found.values())) > 1:
        raise ModelError("rope_parameters and rope_scaling disagree: keep one of them")
    return next(iter(found.values()), None)


def _rope_tables(table: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    found = {}
    for where in ("rope_parameters", "rope_scaling"):
        inner = table.get(where)
        if not isinstance(inner, Mapping | None):
            raise ModelError(f"{where} = {inner!r} must be a table or null")
        if inner is not None:
            found[where] = inner
    return found


def _read_window(loaded: Any, family: Family) -> int:
    window = 0 if loaded.sliding_window is None else int(loaded.sliding_window)
    num_layers, kinds = loaded.num_hidden_layers, getattr(loaded, "layer_types", None)
    fix = "leave it out"
    # Some families have a switch and a number of layers without a window.
    if family.switched_window:
        if not loaded.use_sliding_window:
            window = 0
        elif family.alternating_window:
            fix = "set use_sliding_window to false"
            if window and kinds is None:
                sliding = [layer % 2 == 0 and layer < loaded.max_window_layers for layer in range(num_layers)]
                kinds = ["sliding_attention" if each else "full_attention" for each in sliding]
        elif kinds is None:
            without = getattr(loaded, "max_window_layers", 0)
            if without >= num_layers:
                window = 0
            elif window and without > 0:
                raise ModelError(
                    f"max_window_layers = {without} of {num_layers} layers without a window is not implemented: "
                    f"set it to 0 or {num_layers}, or use_sliding_window to false"
                )
    wanted = "sliding_attention" if window else "full_attention"
    # All layers share one mask plan, so mixed kinds are refused.
    if kinds is not None and (len(kinds) != num_layers or set(kinds) != {wanted}):
        absent = "" if getattr(loaded, "layer_types", None) else " (what its absence means)"
        raise ModelError(
            f"layer_types = {list(kinds)}{absent} is not implemented: make all {num_layers} {wanted!r}, or {fix}"
        )
    return window


def _agreed(found: Mapping[str, Any], default: float) -> float:
    given = {key: value for key, value in found.items() if value is not None}
    for key, value in given.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ModelError(f"{key} = {value!r} must be a number")
        if not abs(value) < _ENDLESS:
            raise ModelError(f"{key} = {str(value)[:12]} must be a number below {_ENDLESS:g}")
    if len(set(given.values())) > 1:
        listed = " and ".join(f"{key} = {value!r}" for key, value in given.items())
        raise ModelError(f"{listed} disagree: keep one of them")
    return float(next(iter(given.values()), default))


def _factor(rotary_dim: int, head_dim: int) -> float:
    """A fraction of `head_dim` that rounds down to `rotary_dim` again."""
    # Rounding of the quotient may lose one element.
    factor = rotary_dim / head_dim
    return factor if int(head_dim * factor) == rotary_dim else math.nextafter(factor, math.inf)
