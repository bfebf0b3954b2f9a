"""Converts the `config.json` keys for per-layer windows, RoPE and linear layers to `ModelConfig.kinds`, and back.

`sliding_window` is the window size, and `layer_types` says which layers have a window; if it is missing, each family
has its own rule. `no_rope_layers` has a 1 for every layer with RoPE.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from terrace.base.errors import ModelError
from terrace.model.windows import FULL, SLIDING, widest_window

if TYPE_CHECKING:
    from terrace.model.hf.families import Family
    from terrace.model.hf.rope import Rope

_MOST_LAYERS = 10**5  # bounds memory until `check_sizes` rejects absurd values
# Field of DeltaSizes -> key
DELTA_KEYS = {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "taps": "linear_conv_kernel_dim",
}
# The same for Kimi Delta Attention, whose heads are all alike
_CHANNEL_KEYS = {
    **dict.fromkeys(("key_heads", "value_heads"), "linear_num_heads"),
    **dict.fromkeys(("key_dim", "value_dim", "rank"), "linear_head_dim"),
    "taps": "linear_conv_kernel_dim",
}
# Its table in released files: key there -> key here; and the numbers of layers, from 1
_NESTED, _INNER = (
    "linear_attn_config",
    {
        "num_heads": "linear_num_heads",
        "head_dim": "linear_head_dim",
        "short_conv_kernel_size": "linear_conv_kernel_dim",
    },
)
_FULL_LAYERS, _LINEAR_LAYERS = "full_attn_layers", "kda_layers"
LINEAR = "linear_attention"  # in layer_types


def read_kinds(loaded: Any, family: "Family", ropes: Mapping[str, "Rope"]) -> dict[str, Any]:
    """Fields of `ModelConfig` for windows and RoPE, with `kinds` if layers differ.

    `ropes` has the RoPE base and scaling for each type of layer. Raises `ModelError` for values that are not
    implemented.
    """
    num_layers = max(0, min(loaded.num_hidden_layers, _MOST_LAYERS)) if hasattr(loaded, "num_hidden_layers") else 0
    rotated, linear = _rotated(loaded, num_layers), linear_layers(loaded, num_layers)
    window, kinds = _window(loaded, family), None
    if not has_linear(family.table):
        kinds = _named(loaded, family, rotated)
    if kinds is None:
        kinds = [SLIDING if window else FULL] * num_layers
    found: list[dict[str, Any]] = [
        {
            "is_linear": is_linear,
            "sliding_window": window if kind == SLIDING else 0,
            "rope_theta": ropes[kind][0] if is_rotated else 0.0,
            "rope_scaling": ropes[kind][1] if is_rotated else None,
        }
        for kind, is_rotated, is_linear in zip(kinds, rotated, linear, strict=True)
    ]
    if not found:  # a family without kinds, or no layers
        return {"rope_theta": ropes[FULL][0], "rope_scaling": ropes[FULL][1], "sliding_window": window}
    widest = widest_window([window if kind == SLIDING else 0 for kind in kinds])
    # The model's own fields are those of the widest layer with RoPE, and of one with attention if any has it.
    main = max(
        found, key=lambda kind: (not kind["is_linear"], kind["rope_theta"] > 0, kind["sliding_window"] == widest)
    )
    alike = all(kind == found[0] for kind in found)
    return main | {"sliding_window": widest} | ({} if alike else {"kinds": tuple(found)})


def kinds_of(fields: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Fields of `LayerKind` for every layer."""
    alike = {key: fields[key] for key in ("is_linear", "sliding_window", "rope_theta", "rope_scaling")}
    return fields["kinds"] or [alike] * fields["num_layers"]


def write_kinds(fields: Mapping[str, Any], family: "Family") -> dict[str, Any]:
    """Inverse of `read_kinds`, without the RoPE parameters."""
    num_layers, table, kinds = fields["num_layers"], dict[str, Any](), kinds_of(fields)
    windows = [kind["sliding_window"] for kind in kinds]
    if family.windows:
        has_window = max(windows) > 0
        table["sliding_window"] = max(windows)
        if family.windows in ("after", "unrotated", "alternating"):
            table["use_sliding_window"] = has_window
        if family.windows in ("after", "alternating"):
            table["max_window_layers"] = 0 if has_window else num_layers
        if family.mixes and (len(set(windows)) > 1 or (has_window and family.windows != "after") or family.names_kinds):
            table["layer_types"] = [SLIDING if window else FULL for window in windows]
    if has_linear(family.table):
        table["layer_types"] = [LINEAR if kind["is_linear"] else FULL for kind in kinds]
    if family.no_rope_key:
        table[family.no_rope_key] = [int(kind["rope_theta"] > 0) for kind in kinds]
    return table


def _rotated(loaded: Any, num_layers: int) -> list[bool]:
    if not hasattr(loaded, "no_rope_layers"):
        return [True] * num_layers
    named, every = loaded.no_rope_layers, loaded.no_rope_layer_interval
    if named is None:
        if every < 1:
            raise ModelError(
                f"no_rope_layer_interval = {every} must be at least 1: the distance of layers without RoPE"
            )
        return [bool((layer + 1) % every) for layer in range(num_layers)]
    if len(named) < num_layers or set(named) - {0, 1}:
        raise ModelError(
            f"no_rope_layers = {list(named)} must have a 1 (rotated) or a 0 for each of the {num_layers} layers"
        )
    return [bool(each) for each in named[:num_layers]]


def _window(loaded: Any, family: "Family") -> int:
    window = getattr(loaded, "sliding_window", None)
    switched = getattr(loaded, "use_sliding_window", True)
    if window is None or not family.windows or not switched:
        return 0
    return int(window)


def _named(loaded: Any, family: "Family", rotated: Sequence[bool]) -> list[str] | None:
    # Type of each layer; None: all layers have the window, if there is one.
    kinds, window, num_layers = getattr(loaded, "layer_types", None), _window(loaded, family), len(rotated)
    if kinds is None and family.windows == "pattern" and not window:
        # Without a window there would still be two types of layers, each with its own RoPE.
        raise ModelError(f"sliding_window = None needs layer_types, all of them {FULL!r}: give these, or a window")
    if kinds is None:
        sliding = _sliding(loaded, family, rotated)
        return None if sliding is None or not window else [SLIDING if each else FULL for each in sliding]
    if len(kinds) != num_layers or set(kinds) - {SLIDING, FULL}:
        raise ModelError(
            f"layer_types = {list(kinds)} is not implemented: name {SLIDING!r} or {FULL!r} for each of the "
            f"{num_layers} layers, or leave it out"
        )
    if SLIDING in kinds and not window:
        raise ModelError(
            f"layer_types = {list(kinds)} is not implemented without a window: make all {num_layers} {FULL!r}, or "
            "give sliding_window"
        )
    if window and not family.mixes and set(kinds) != {SLIDING}:
        raise ModelError(
            f"layer_types = {list(kinds)} is not implemented: make all {num_layers} {SLIDING!r}, or leave it out"
        )
    return list(kinds)


def _sliding(loaded: Any, family: "Family", rotated: Sequence[bool]) -> list[bool] | None:
    layers = range(len(rotated))
    match family.windows:
        case "after":  # the first layers have none
            without = getattr(loaded, "max_window_layers", 0)
            return [layer >= without for layer in layers]
        case "alternating":
            return [layer % 2 == 0 and layer < loaded.max_window_layers for layer in layers]
        case "unrotated":
            return [not each for each in rotated]
        case "pattern":
            every = getattr(loaded, "sliding_window_pattern", 2)
            if every < 1:
                raise ModelError(
                    f"sliding_window_pattern = {every} must be at least 1: the distance of layers without a window"
                )
            return [bool((layer + 1) % every) for layer in layers]
    return None


def delta_keys(table: type[Any]) -> Mapping[str, str]:
    """Field of `DeltaSizes` -> key of a family's table; empty for families without linear layers."""
    keys = table.__dataclass_fields__
    return next((each for each in (DELTA_KEYS, _CHANNEL_KEYS) if each["key_heads"] in keys), {})


def has_linear(table: type[Any]) -> bool:
    """Whether a family's table has the keys of linear layers."""
    return bool(delta_keys(table))


def flattened(table: Mapping[str, Any], family: "Family") -> dict[str, Any]:
    """Copy of a config.json with the keys of Kimi Linear's inner table at the top level, and layer_types.

    Raises `ModelError` for an unknown inner key, layers that are not each named once, and keys that disagree.
    """
    found = dict(table)
    inner = found.pop(_NESTED, None) if delta_keys(family.table) is _CHANNEL_KEYS else None
    if inner is None:
        return found
    if not isinstance(inner, Mapping) or inner.keys() - {*_INNER, _FULL_LAYERS, _LINEAR_LAYERS}:
        raise ModelError(
            f"{_NESTED} = {inner!r} is not implemented: give a table of {', '.join((*_INNER, _FULL_LAYERS))} and "
            f"{_LINEAR_LAYERS}"
        )
    said = {key: inner[theirs] for theirs, key in _INNER.items() if theirs in inner}
    full, linear = (inner.get(key) or [] for key in (_FULL_LAYERS, _LINEAR_LAYERS))
    if full or linear:
        both = [*full, *linear] if isinstance(full, list) and isinstance(linear, list) else []
        if not both or sorted(both, key=str) != sorted(range(1, 1 + len(both)), key=str):
            raise ModelError(
                f"{_NESTED}: {_FULL_LAYERS} = {full} and {_LINEAR_LAYERS} = {linear} must name each layer, from 1, once"
            )
        said["layer_types"] = [LINEAR if layer in linear else FULL for layer in range(1, 1 + len(both))]
    for key, value in said.items():
        given = found.get(key)
        if given is not None and (list(given) if isinstance(given, tuple) else given) != value:
            raise ModelError(f"{key} = {given!r} and {_NESTED} disagree, which says {value!r}: keep one of them")
        found[key] = value
    return found


def nested(table: Mapping[str, Any]) -> dict[str, Any]:
    """The inner table of Kimi Linear, beside its keys in a `table` of `write_table`; empty for other families."""
    if _CHANNEL_KEYS["key_dim"] not in table:
        return {}
    kinds = table["layer_types"]
    layers = {_FULL_LAYERS: FULL, _LINEAR_LAYERS: LINEAR}
    named = {key: [1 + index for index, each in enumerate(kinds) if each == kind] for key, kind in layers.items()}
    return {_NESTED: {theirs: table[key] for theirs, key in _INNER.items()} | named}


def read_delta(loaded: Any) -> dict[str, Any]:
    """The field `delta` of a loaded table; empty for families without linear layers."""
    keys = delta_keys(type(loaded))
    return {"delta": {own: getattr(loaded, key) for own, key in keys.items()}} if keys else {}


def write_delta(fields: Mapping[str, Any], table: type[Any]) -> dict[str, Any]:
    return {key: fields["delta"][own] for own, key in delta_keys(table).items()}


def linear_layers(loaded: Any, num_layers: int) -> Sequence[bool]:
    """Which layers are linear. Raises `ModelError` for other types of layers."""
    if not has_linear(type(loaded)):
        return [False] * num_layers
    kinds, every = loaded.layer_types, getattr(loaded, "full_attention_interval", 0)
    if kinds is None and delta_keys(type(loaded)) is _CHANNEL_KEYS:
        return [not layer or layer % 4 > 0 for layer in range(num_layers)]
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
