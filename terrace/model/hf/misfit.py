"""Diagnoses from tensor names why the tensors of a folder do not fit a model. Needs no torch."""

import re
from collections.abc import Collection

_WRAPPERS = {
    "_orig_mod.": "torch.compile",
    "module.": "DistributedDataParallel",
    "base_model.model.": "peft",
    "_fsdp_wrapped_module.": "FullyShardedDataParallel",
    "_forward_module.": "Lightning Fabric",
    "pretrained_model.": "trl",
    "_checkpoint_wrapped_module.": "activation checkpointing",
}
# Names of tensors that accompany or replace a matrix.
_ADAPTER = re.compile(r"\.(lora_(A|B|embedding_A|embedding_B|magnitude_vector)|base_layer|modules_to_save)\.")
_QUANTISED = re.compile(
    r"\.(qweight|qzeros|scales|g_idx|absmax|quant_map|quant_state\..+|SCB|weight_(scale|scale_inv|scale_2|packed|shape|"
    r"format|zero_point)|(input|output|k|v)_scale|(weight|input)_global_scale|[^.]+_(blocks|scales))$"
)


def misfit_words(missing: Collection[str], unexpected: Collection[str]) -> str:
    """Error text with cause and remedy; "" if the names show no cause.

    Recognised are prefixes and infixes that module wrappers add, and unexpected tensors of an adapter, of quantised
    matrices, or of a single additional module (a value or reward head).
    """
    if any(map(_ADAPTER.search, unexpected)):
        return (
            "the folder has the matrices of an adapter inside the model: merge them in Python with merge_and_unload() "
            "of peft, save the model that it returns with save_pretrained, and give that folder"
        )
    if any(map(_QUANTISED.search, unexpected)):
        return (
            "the folder has quantised matrices with their scales, which are not read: give the folder of the model "
            "before it was quantised, in bf16, fp16 or fp32, or save it dequantised with transformers; lora.base then "
            "quantises it in the run"
        )
    if missing and (prefix := _shared_prefix(missing, unexpected)):
        known = [f"{name} of {who}" for name, who in _WRAPPERS.items() if name in prefix]
        puts = f", as {' and '.join(known)}" if known else ""
        return (
            f"every name has {prefix!r} in front{puts}: save the model inside the wrapper, or rename the tensors, as "
            f"{{name.removeprefix({prefix!r}): tensor for name, tensor in tensors.items()}}"
        )
    if missing and (inside := _inner_wrappers(missing, unexpected)):
        wrappers = " and ".join(f"{name} of {_WRAPPERS[name]}" for name in inside)
        renamed = "name" + "".join(f".replace('.{name}', '.')" for name in inside)
        return (
            f"names have {wrappers} inside: save the model without the wrappers, or rename the tensors, as "
            f"{{{renamed}: tensor for name, tensor in tensors.items()}}"
        )
    if not missing and (head := _spare_module(unexpected)):
        return (
            f"the folder has a module of its own beside the model, {head}.*, as a head for values or rewards is: leave "
            "these tensors out, saving the model inside alone"
        )
    return ""


def _shared_prefix(missing: Collection[str], unexpected: Collection[str]) -> str:
    """Longest prefix with which all missing names are present, or ""."""
    there, found = set(unexpected), ""
    first = min(missing, key=len)
    for name in there:
        if name.endswith(f".{first}") and all(name.removesuffix(first) + each in there for each in missing):
            found = max(found, name.removesuffix(first), key=len)
    return found


def _inner_wrappers(missing: Collection[str], unexpected: Collection[str]) -> list[str]:
    """Wrappers in the names; empty unless all missing tensors are present once their names are removed."""
    # Only complete components count, since "module." is also the end of other wrappers' names.
    found = [wrapper for wrapper in _WRAPPERS if any(f".{wrapper}" in name for name in unexpected)]
    there = set(unexpected)
    for wrapper in found:
        there = {name.replace(f".{wrapper}", ".") for name in there}
    return found if found and set(missing) <= there else []


def _spare_module(unexpected: Collection[str]) -> str:
    """The one top-level module, other than the decoder, that all names belong to, or ""."""
    begins = {name.partition(".")[0] for name in unexpected if "." in name}
    begin = begins.pop() if len(begins) == 1 and all("." in name for name in unexpected) else ""
    return begin if begin not in ("model", "transformer", "gpt_neox") else ""
