"""Converts the `config.json` keys of mixtures of experts to fields of `ExpertsConfig`, and back.

Layers without experts are given by `mlp_only_layers`, by `decoder_sparse_step` (all but every n-th), or by
`first_k_dense_replace` (the first n). The second form is read but never written.
"""

from collections.abc import Mapping
from typing import Any

from terrace.base.errors import ModelError

OWN_KEYS: Mapping[str, object] = {
    "gate": "softmax",
    "router_size": 0,
    "route": "gate",
}  # and their defaults
_COUNTS = ("n_shared_experts", "num_shared_experts")  # keys that count shared experts
_PART = "experts."  # in front of the names of these fields
_MOST_LAYERS = 10**6


def read_experts(loaded: Any, names: Mapping[str, str], constants: Mapping[str, object]) -> dict[str, Any]:
    """Fields of `ExpertsConfig` from a loaded table, with the `names` and `constants` of its family.

    Raises `ModelError` for a value that is not implemented.
    """
    if getattr(loaded, "output_router_logits", False) and loaded.router_aux_loss_coef:
        raise ModelError(
            f"output_router_logits = True adds router_aux_loss_coef = {loaded.router_aux_loss_coef} of a balance loss, "
            "which is not implemented: set it to false in config.json, or give --model.output_router_logits false"
        )
    fields: dict[str, Any] = {
        own.removeprefix(_PART): getattr(loaded, key) for own, key in names.items() if _is_part(own)
    }
    fields |= {own.removeprefix(_PART): value for own, value in constants.items() if _is_part(own)}
    if (key := names.get("experts.shared_size", "")) in _COUNTS:
        # Several shared experts are one MLP of their total size.
        if fields["shared_size"] < 1:
            raise ModelError(f"{key} = {fields['shared_size']} must be at least 1 in this family")
        fields["shared_size"] *= loaded.moe_intermediate_size
    if fields.get("gate") == "cosine" and not fields["router_size"]:
        fields["router_size"] = max(1, fields["num_experts"] // 2)  # as X-MoE has it (2204.09179, section 4.1)
    if fields.get("gate") == "expert_choice" and "experts.normalized" not in names:
        fields["normalized"] = False
    return fields | {"dense_layers": _dense_layers(loaded)}


def write_experts(fields: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    table = {key: fields[own.removeprefix(_PART)] for own, key in names.items() if _is_part(own)}
    # Terrace's own keys are omitted if they have their default.
    table = {key: value for key, value in table.items() if OWN_KEYS.get(key) != value}
    if key := next((each for each in _COUNTS if each in table), ""):
        table[key] = fields["shared_size"] // fields["intermediate_size"]
    if "first_k_dense_replace" in table:
        table["first_k_dense_replace"] = len(fields["dense_layers"])
    if "mlp_only_layers" in table:
        table |= {"mlp_only_layers": list(fields["dense_layers"]), "decoder_sparse_step": 1}
    return table


def _is_part(own: str) -> bool:
    return own.startswith(_PART)


def _dense_layers(loaded: Any) -> tuple[int, ...]:
    # Bounds memory until `check_sizes` rejects absurd numbers of layers.
    layers = range(max(1, min(loaded.num_hidden_layers, _MOST_LAYERS)))
    if named := getattr(loaded, "mlp_layer_types", None):
        if len(named) != len(layers) or set(named) - {"dense", "sparse"}:
            raise ModelError(
                f"mlp_layer_types = {list(named)} must name 'dense' or 'sparse' for each of the {len(layers)} layers"
            )
        return tuple(layer for layer in layers if named[layer] == "dense")
    if hasattr(loaded, "first_k_dense_replace"):
        if loaded.first_k_dense_replace < 0:
            raise ModelError(f"first_k_dense_replace = {loaded.first_k_dense_replace} must be at least 0")
        return tuple(layers[: loaded.first_k_dense_replace])
    if not hasattr(loaded, "decoder_sparse_step"):
        return ()
    step, named = loaded.decoder_sparse_step, set(loaded.mlp_only_layers or ())
    if not 1 <= step <= len(layers):
        raise ModelError(
            f"decoder_sparse_step = {step} must be at least 1 and at most the {len(layers)} layers: every "
            "layer has experts with 1, every second with 2"
        )
    return tuple(sorted(named | {layer for layer in layers if (layer + 1) % step}))
