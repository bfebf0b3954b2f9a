"""Converts a Hugging Face `config.json` table to the fields of `ModelConfig`, and back.

Every key must be implemented or harmless, or have the only supported value (`terrace.model.hf.families`); others raise
an error. RoPE and kinds of layers have modules of their own.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from terrace.base.errors import ConfigError, ModelError, did_you_mean
from terrace.base.schema import load
from terrace.model.hf.families import FAMILIES, Family
from terrace.model.hf.key_tables import ROOT_OF_HIDDEN
from terrace.model.hf.keys import ACTIVATIONS, HARMLESS, ONLY, REFUSED, TRAINING
from terrace.model.hf.kinds import flattened, kinds_of, nested, read_delta, read_kinds, write_delta, write_kinds
from terrace.model.hf.latent import read_latent, write_latent, written_mscale
from terrace.model.hf.mixtures import OWN_KEYS, read_experts, write_experts
from terrace.model.hf.rope import (
    ENDLESS,
    ORIGINAL,
    fraction_of,
    published_scaling,
    read_rope,
    read_ropes,
    rope_keys,
    written_rope,
)
from terrace.model.windows import FULL, SLIDING


def read_fields(table: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `ModelConfig` for a `config.json` table; nested configurations such as `experts` are tables.

    Raises `ModelError` for a family, key or value that is unknown, missing, of the wrong type or not implemented. Sizes
    are checked by `ModelConfig`, not here.
    """
    name = table.get("model_type")
    if not isinstance(name, str):
        raise ModelError(f"model_type is missing: set it to one of {', '.join(sorted(FAMILIES))}")
    if name not in FAMILIES:
        why = f": {REFUSED[name]}" if name in REFUSED else did_you_mean(name, FAMILIES)
        raise ModelError(f"model_type = {name!r} is not implemented{why}")
    family = FAMILIES[name]
    table = flattened(_completed(_without_aliases(table, family), family), family)
    _refuse_values(table, family)
    own_keys = {item.name for item in dataclasses.fields(family.table)}
    rotary_keys = rope_keys(family)
    for key in table:
        if key not in own_keys | rotary_keys | HARMLESS | family.harmless | ONLY.keys() | family.only.keys():
            raise ModelError(
                f"unknown key {key!r} for {name}{did_you_mean(key, own_keys | rotary_keys)}; where it changes nothing "
                "that the model computes, delete it from config.json"
            )
    try:
        loaded = load(family.table, {key: table[key] for key in table if key in own_keys}, name)
    except ConfigError as error:
        raise ModelError(str(error)) from error
    fields = {own: getattr(loaded, key) for own, key in family.names.items() if "." not in own}
    fields |= {own: value for own, value in family.constants.items() if "." not in own}
    ropes = read_ropes(loaded, table, family)
    fields |= {"scales": read_scales(loaded, family.constants), **read_kinds(loaded, family, ropes)}
    if family.is_mixture:
        fields["experts"] = read_experts(loaded, family.names, family.constants)
    fields |= read_latent(loaded, table, rotates=bool(family.theta_key)) | read_delta(loaded)
    fields |= {"family": name, "scalar_head": _read_head(table, family)}
    if fields["scalar_head"]:  # which predicts no tokens
        fields["num_mtp_layers"] = 0
    return _complete(fields, table)


def write_table(fields: Mapping[str, Any]) -> dict[str, Any]:
    """`config.json` table for the fields of a `ModelConfig`, with the newer form of RoPE keys."""
    family = FAMILIES[fields["family"]]
    table: dict[str, Any] = {"model_type": fields["family"], "architectures": [family.architecture]}
    if fields["scalar_head"]:
        table |= {"architectures": [family.scored_architecture], "num_labels": 1}
    table |= {key: fields[own] for own, key in family.names.items() if "." not in own}
    if "activation" in family.names:
        # An activation may have several names; the first is written.
        spellings = [theirs for theirs, ours in ACTIVATIONS.items() if ours == fields["activation"]]
        table[family.names["activation"]] = spellings[0]
    table |= family.written
    if family.is_mixture:
        table |= write_experts(fields["experts"], family.names)
    table |= write_kinds(fields, family) | write_latent(fields, family.table) | write_delta(fields, family.table)
    if family.theta_key:
        theta, scaling = fields["rope_theta"], fields["rope_scaling"]
        table["rope_parameters"] = written_rope(kinds_of(fields), scaling, theta, family) | written_mscale(fields)
        # transformers reads this key at the top level in families that have it there.
        if scaling and ORIGINAL in family.table.__dataclass_fields__:
            table[ORIGINAL] = scaling[ORIGINAL]
    table |= write_scales(fields["scales"], fields["head_dim"], family.table)
    if family.factor_is_free:
        table["rope_parameters"]["partial_rotary_factor"] = fraction_of(fields["rotary_dim"], fields["head_dim"])
    return table


def published_table(table: Mapping[str, Any], dtype: str, tokens: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json to publish with weights of `dtype`, from a table of `write_table`.

    RoPE is written with newer and older keys, since releases of `transformers` that know only the older ones would
    silently use defaults. `tokens` has the BOS, EOS and padding ids. Raises `ModelError` for a model that
    `transformers` does not have.
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
    published = {**table, **nested(table), **tokens, "torch_dtype": dtype}
    if published.pop("num_labels", None):  # as transformers writes it
        published |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    if "sliding_window" in table:
        published["sliding_window"] = table["sliding_window"] or None
    if family.theta_key:
        rope = table["rope_parameters"]
        if family.local_theta_key:
            published[family.local_theta_key] = rope[SLIDING]["rope_theta"]
            rope = rope[FULL]
        published[family.theta_key] = rope["rope_theta"]
        if family.factor_key:
            published[family.factor_key] = rope["partial_rotary_factor"]
        published["rope_scaling"] = published_scaling(rope)
    return published


def without_training(table: Mapping[str, Any]) -> dict[str, Any]:
    """Copy of the table without dropout, router noise and router losses, for a model that is not trained."""
    name = table.get("model_type")  # of a file that nobody has checked yet
    family = FAMILIES.get(name) if isinstance(name, str) else None
    given = {**(family.implied if family else {}), **table}
    return {**table, **{key: TRAINING[key] for key in given if key in TRAINING}}


def _without_aliases(table: Mapping[str, Any], family: Family) -> Mapping[str, Any]:
    # Releases of transformers have different names for some keys.
    result = dict(table)
    for alias, key in family.aliases.items():
        if alias in result and result.setdefault(key, result[alias]) != result.pop(alias):
            raise ModelError(f"{key} = {table[key]!r} and {alias} = {table[alias]!r} disagree: keep one of them")
    return result


def _completed(table: Mapping[str, Any], family: Family) -> Mapping[str, Any]:
    # The RoPE that transformers gives a family without one, and weights in a form that is read as plain floats.
    result = dict(table)
    if family.absent and not (table.get("rope_parameters") or table.get("rope_scaling")):
        result["rope_parameters"] = family.absent
    stored = table.get("quantization_config")
    if isinstance(stored, Mapping) and family.packed and stored.get("quant_method") == family.packed:
        del result["quantization_config"]
    return result


def _refuse_values(table: Mapping[str, Any], family: Family) -> None:
    # Missing keys have the defaults of transformers.
    given, only = {**family.implied, **table}, {**ONLY, **family.only}
    refused = [key for key, value in given.items() if key in only and value not in only[key]]
    if not refused:
        return
    implemented = {key: json.dumps(only[key][0]) for key in refused}
    key = refused[0]
    absent = "" if key in table else " (the default of an absent key)"
    fix = f"set it to {implemented[key]} in config.json"
    if "null" not in implemented.values():  # which no flag can say
        fix += ", or give " + " ".join(f"--model.{name} {value}" for name, value in implemented.items())
    raise ModelError(f"{key} = {given[key]!r}{absent} is not implemented: {fix}")


def _read_head(table: Mapping[str, Any], family: Family) -> bool:
    # Whether `architectures` names a model with a scalar head instead of an output matrix.
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
    if "activation" in family.names:
        activation, key = fields["activation"], family.names["activation"]
        if activation not in ACTIVATIONS:
            raise ModelError(f"{key} = {activation!r} is not implemented{did_you_mean(activation, ACTIVATIONS)}")
        fields["activation"] = ACTIVATIONS[activation]
    if abs(fields["head_dim"]) > ENDLESS:
        sizes = [family.names[name] for name in ("hidden_size", "head_dim") if name in family.names]
        raise ModelError(f"a head would have more than {ENDLESS:g} elements: give a smaller {' or '.join(sizes)}")
    if fields["head_dim"] > 0 and fields["scales"].get("attention") == fields["head_dim"] ** -0.5:
        del fields["scales"]["attention"]  # the default is stored as 0, so that equal models compare equal
    # Rounded down as in transformers: 0.25 of a head of 90 rotates 22 elements.
    if "latent" in fields:  # latent attention has a key for it
        return fields
    rotated = fields["rope_theta"] > 0
    return fields | {"rotary_dim": int(fields["head_dim"] * read_rope(table, family, 1.0)[1]) if rotated else 0}


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
