"""The keys of `config.json` that describe mixtures of experts, to the fields of `ExpertsConfig` and back.

Layers without experts are named in three ways: `mlp_only_layers`, every layer but each `decoder_sparse_step`-th, or the
first `first_k_dense_replace`. Written are the first of them or the last.
"""

from collections.abc import Mapping
from typing import Any

from terrace.base.errors import ModelError

OWN_KEYS: Mapping[str, object] = {
    "gate": "softmax",
    "router_size": 0,
    "route": "gate",
}  # and their defaults
_PART = "experts."  # in front of the names of these fields
_MOST_LAYERS = 10**6


def read_experts(loaded: Any, names: Mapping[str, str], constants: Mapping[str, object]) -> dict[str, Any]:
    """The fields of `ExpertsConfig` of a loaded table, by the `names` and `constants` of its family.

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
    if hasattr(loaded, "n_shared_experts"):
        # The shared experts are one MLP of their joint size.
        if loaded.n_shared_experts < 1:
            raise ModelError(f"n_shared_experts = {loaded.n_shared_experts} must be at least 1 in this family")
        fields["shared_size"] = loaded.n_shared_experts * loaded.moe_intermediate_size
    if fields.get("gate") == "cosine" and not fields["router_size"]:
        fields["router_size"] = max(1, fields["num_experts"] // 2)  # as X-MoE has it (2204.09179, section 4.1)
    if fields.get("gate") == "expert_choice" and "experts.normalized" not in names:
        fields["normalized"] = False
    return fields | {"dense_layers": _dense_layers(loaded)}


def write_experts(fields: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The keys that `read_experts` reads as these fields of an `ExpertsConfig`, as far as the family has them."""
    table = {key: fields[own.removeprefix(_PART)] for own, key in names.items() if _is_part(own)}
    # Keys that only Terrace reads are left out where they say nothing.
    table = {key: value for key, value in table.items() if OWN_KEYS.get(key) != value}
    if "n_shared_experts" in table:
        table["n_shared_experts"] = fields["shared_size"] // fields["intermediate_size"]
    if "first_k_dense_replace" in table:
        table["first_k_dense_replace"] = len(fields["dense_layers"])
    if "mlp_only_layers" in table:
        table |= {"mlp_only_layers": list(fields["dense_layers"]), "decoder_sparse_step": 1}
    return table


def _is_part(own: str) -> bool:
    return own.startswith(_PART)


def _dense_layers(loaded: Any) -> tuple[int, ...]:
    # Absurd numbers of layers are refused where all sizes are; until then they must not fill memory.
    layers = range(max(1, min(loaded.num_hidden_layers, _MOST_LAYERS)))
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
