"""The keys of `config.json` that say how each layer attends, to `ModelConfig.kinds` and back.

Windows are named by `sliding_window` and, layer by layer, by `layer_types`; where these are absent each family has a
rule of its own. `no_rope_layers` has a 1 for every layer whose queries and keys are turned.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from terrace.base.errors import ModelError
from terrace.model.hf.families import Family
from terrace.model.hf.rope import ORIGINAL, read_rope, read_scaling, write_rope
from terrace.model.kinds import LayerKind, widest_window
from terrace.model.rope import RopeScaling

SLIDING, FULL = "sliding_attention", "full_attention"
_MOST_LAYERS = 10**5  # absurd numbers are refused where all sizes are; until then they must not fill memory

_Turn = tuple[float, RopeScaling | None]


def read_kinds(loaded: Any, table: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The fields of `ModelConfig` that say how layers attend: RoPE, windows, and kinds where layers differ.

    `table` is the whole config.json, `loaded` its keys that the family names. Raises `ModelError` for layers that are
    not implemented.
    """
    turns = _turns(loaded, table, family)
    num_layers = max(0, min(loaded.num_hidden_layers, _MOST_LAYERS)) if hasattr(loaded, "num_hidden_layers") else 0
    turned = _turned(loaded, num_layers)
    window, kinds = _window(loaded, family), _named(loaded, family, turned)
    if kinds is None:
        kinds = [SLIDING if window else FULL] * num_layers
    found = [
        LayerKind(
            sliding_window=window if kind == SLIDING else 0,
            rope_theta=turns[kind][0] if is_turned else 0.0,
            rope_scaling=turns[kind][1] if is_turned else None,
        )
        for kind, is_turned in zip(kinds, turned, strict=True)
    ]
    if not found:  # a family without kinds, or no layers
        return {"rope_theta": turns[FULL][0], "rope_scaling": turns[FULL][1], "sliding_window": window}
    widest = widest_window([kind.sliding_window for kind in found])
    # The widest layer that is turned speaks for all.
    main = max(found, key=lambda kind: (kind.rope_theta > 0, kind.sliding_window == widest))
    fields = {"rope_theta": main.rope_theta, "rope_scaling": main.rope_scaling, "sliding_window": widest}
    return fields | ({"kinds": tuple(found)} if len(set(found)) > 1 else {})


def write_kinds(fields: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The keys that `read_kinds` reads as these fields of a `ModelConfig`."""
    num_layers, table = fields["num_layers"], dict[str, Any]()
    alike = {key: fields[key] for key in ("sliding_window", "rope_theta", "rope_scaling")}
    kinds: Sequence[Mapping[str, Any]] = fields["kinds"] or [alike] * num_layers
    windows = [kind["sliding_window"] for kind in kinds]
    if family.windows:
        has_window = max(windows) > 0
        table["sliding_window"] = max(windows)
        if family.windows in ("after", "unturned", "alternating"):
            table["use_sliding_window"] = has_window
        if family.windows in ("after", "alternating"):
            table["max_window_layers"] = 0 if has_window else num_layers
        if family.mixes and (len(set(windows)) > 1 or (has_window and family.windows != "after") or family.names_kinds):
            table["layer_types"] = [SLIDING if window else FULL for window in windows]
    if family.no_rope_key:
        table[family.no_rope_key] = [int(kind["rope_theta"] > 0) for kind in kinds]
    if family.theta_key:
        table["rope_parameters"] = _written_rope(kinds, fields, family)
        # Where a family has the key at the top, transformers reads it there.
        if fields["rope_scaling"] and ORIGINAL in family.table.__dataclass_fields__:
            table[ORIGINAL] = fields["rope_scaling"][ORIGINAL]
    return table


def _written_rope(kinds: Sequence[Mapping[str, Any]], fields: Mapping[str, Any], family: Family) -> dict[str, Any]:
    if not family.local_theta_key:
        return write_rope(fields["rope_scaling"], fields["rope_theta"] or family.default_theta)
    found = {FULL: write_rope(None, family.default_theta), SLIDING: write_rope(None, family.default_local_theta)}
    for kind in kinds:
        name = SLIDING if kind["sliding_window"] else FULL
        found[name] = write_rope(kind["rope_scaling"], kind["rope_theta"])
    return found


def _turns(loaded: Any, table: Mapping[str, Any], family: Family) -> dict[str, _Turn]:
    def turn(keys: Mapping[str, Any], default_theta: float) -> _Turn:
        scaling = read_scaling(keys, family, loaded.max_position_embeddings)
        return read_rope(keys, family, default_theta)[0], scaling

    if not family.theta_key:
        return dict.fromkeys((SLIDING, FULL), (0.0, None))
    if not family.local_theta_key:
        return dict.fromkeys((SLIDING, FULL), turn(table, family.default_theta))
    # A table for each kind of layer, or older keys at the top.
    nested = table.get("rope_parameters")
    if not isinstance(nested, Mapping | None) or set(nested or ()) - {SLIDING, FULL}:
        raise ModelError(f"rope_parameters = {nested!r} must have a table {FULL!r} and a table {SLIDING!r}, or neither")
    inner = {kind: (nested or {}).get(kind) for kind in (FULL, SLIDING)}
    whole = {key: value for key, value in table.items() if key != "rope_parameters"} | {"rope_parameters": inner[FULL]}
    local = {"rope_parameters": inner[SLIDING], "rope_theta": table.get(family.local_theta_key)}
    return {FULL: turn(whole, family.default_theta), SLIDING: turn(local, family.default_local_theta)}


def _turned(loaded: Any, num_layers: int) -> list[bool]:
    if not hasattr(loaded, "no_rope_layers"):
        return [True] * num_layers
    named, every = loaded.no_rope_layers, loaded.no_rope_layer_interval
    if named is None:
        if every < 1:
            raise ModelError(f"no_rope_layer_interval = {every} must be at least 1: a layer in so many is not turned")
        return [bool((layer + 1) % every) for layer in range(num_layers)]
    if len(named) < num_layers or set(named) - {0, 1}:
        raise ModelError(
            f"no_rope_layers = {list(named)} must have a 1 (turned) or a 0 for each of the {num_layers} layers"
        )
    return [bool(each) for each in named[:num_layers]]


def _window(loaded: Any, family: Family) -> int:
    window = getattr(loaded, "sliding_window", None)
    switched = getattr(loaded, "use_sliding_window", True)
    if window is None or not family.windows or not switched:
        return 0
    return int(window)


def _named(loaded: Any, family: Family, turned: Sequence[bool]) -> list[str] | None:
    # The kind of each layer; None: all have the window, if there is one.
    kinds, window, num_layers = getattr(loaded, "layer_types", None), _window(loaded, family), len(turned)
    if kinds is None:
        sliding = _sliding(loaded, family, turned)
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


def _sliding(loaded: Any, family: Family, turned: Sequence[bool]) -> list[bool] | None:
    layers = range(len(turned))
    match family.windows:
        case "after":  # the first layers have none
            without = getattr(loaded, "max_window_layers", 0)
            return [layer >= without for layer in layers]
        case "alternating":
            return [layer % 2 == 0 and layer < loaded.max_window_layers for layer in layers]
        case "unturned":
            return [not each for each in turned]
        case "pattern":
            every = getattr(loaded, "sliding_window_pattern", 2)
            if every < 1:
                raise ModelError(f"sliding_window_pattern = {every} must be at least 1: a layer in so many sees all")
            return [bool((layer + 1) % every) for layer in layers]
    return None
