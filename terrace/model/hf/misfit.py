"""Why tensors of a folder do not fit a model, where their names tell it, and what to do. Pure: only names."""

from collections.abc import Collection

_WRAPPERS = {
    "_orig_mod.": "torch.compile",
    "module.": "DistributedDataParallel",
    "base_model.model.": "peft",
    "_fsdp_wrapped_module.": "FullyShardedDataParallel",
    "_forward_module.": "Lightning Fabric",
    "pretrained_model.": "trl",
}


def misfit_words(missing: Collection[str], unexpected: Collection[str]) -> str:
    """The cause that the names show, with the remedy; "" where they show none.

    Either all names have something in front, as a wrapper of the module puts there, or the tensors that are too many
    are one module: a head of its own.
    """
    if missing and (prefix := _shared_prefix(missing, unexpected)):
        known = [f"{name} of {who}" for name, who in _WRAPPERS.items() if name in prefix]
        puts = f", as {' and '.join(known)}" if known else ""
        return (
            f"every name has {prefix!r} in front{puts}: save the model inside the wrapper, or rename the tensors, as "
            f"{{name.removeprefix({prefix!r}): tensor for name, tensor in tensors.items()}}"
        )
    if not missing and (head := _spare_module(unexpected)):
        return (
            f"the folder has a module of its own beside the model, {head}.*, as a head for values or rewards is: leave "
            "these tensors out, saving the model inside alone"
        )
    return ""


def _shared_prefix(missing: Collection[str], unexpected: Collection[str]) -> str:
    """The beginning that all missing names lack, "" if there is none or another for some."""
    there, found = set(unexpected), ""
    first = min(missing, key=len)
    for name in there:
        if name.endswith(f".{first}") and all(name.removesuffix(first) + each in there for each in missing):
            found = max(found, name.removesuffix(first), key=len)
    return found


def _spare_module(unexpected: Collection[str]) -> str:
    """The module, outside of all layers, that all names are of."""
    begins = {name.partition(".")[0] for name in unexpected if "." in name}
    begin = begins.pop() if len(begins) == 1 and all("." in name for name in unexpected) else ""
    return begin if begin not in ("model", "transformer", "gpt_neox") else ""
