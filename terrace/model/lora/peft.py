"""Writes adapters in the format of `peft`: adapter_config.json and adapter_model.safetensors.

The folder can be loaded with `PeftModel.from_pretrained(base, folder)`, and by servers that support adapters. Tensors
are named after the module of the base model, `base_model.model.MODULE.lora_A.weight` (rank, in) and
`...lora_B.weight` (out, rank), even if the base stores its matrix transposed (GPT-2).

If a family stores query, key and value in one fused matrix, their adapters become one adapter with the sum of their
ranks: A is the concatenation of their A, and B is block diagonal in the row layout of the fused matrix. Alpha grows
with the rank, so that alpha / rank is unchanged.

Shape legend: G groups, r rank.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from terrace.base.errors import ModelError
from terrace.base.files import folder_atomic, respect_umask, write_atomic
from terrace.model.blocks import block_specs
from terrace.model.config import ModelConfig
from terrace.model.hf.names import NAMES, StoredTensor, sources
from terrace.model.lora.config import LoraConfig, adapter_names, targets
from terrace.model.lora.modules import Value

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def write_adapter(folder: str | Path, config: ModelConfig, lora: LoraConfig, value: Value, base: str) -> list[str]:
    """Write a model's adapters to a folder in the format of `peft`. Returns the names of its files.

    `value` returns the whole parameter of (block, parameter) and is called only for adapters, which are stored in fp32.
    `base` is the folder or repository of the base model. Raises `ModelError` for a folder that is not empty or cannot
    be written.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ModelError(f"{folder} is there and not an empty folder: name a new one")
    fused = _by_module(config, lora)
    tensors: dict[str, Tensor] = {}
    for module, parts in fused.items():
        down, up = _joined(parts, value)
        tensors[f"base_model.model.{module}.lora_A.weight"] = down
        tensors[f"base_model.model.{module}.lora_B.weight"] = up
    table = _table(config, lora, {module: len(parts) for module, parts in fused.items()}, base)
    try:
        with folder_atomic(folder) as made:
            save_file(tensors, made / WEIGHTS, metadata={"format": "pt"})
            respect_umask(made / WEIGHTS)
            write_atomic(made / CONFIG, json.dumps(table, indent=2, sort_keys=True) + "\n")
    except OSError as error:
        raise ModelError(f"cannot write {folder}: {error.strerror}; name another folder") from error
    return [CONFIG, WEIGHTS]


_Part = tuple[str, str, StoredTensor]  # block, weight, location of the weight in files


def _by_module(config: ModelConfig, lora: LoraConfig) -> dict[str, list[_Part]]:
    places, chosen = sources(config), targets(block_specs(config), lora)
    found: dict[str, list[_Part]] = {}
    for (block, param), source in places.items():
        if (block, param) in chosen:
            found.setdefault(source.name.removesuffix(".weight"), []).append((block, param, source))
    return found


def _joined(parts: Sequence[_Part], value: Value) -> tuple[Tensor, Tensor]:
    adapters = [[value(block, name).float() for name in adapter_names(weight)] for block, weight, _ in parts]
    # Adapters of a fused matrix are joined: ranks add up, and B becomes block diagonal.
    down = torch.cat([down for down, _ in adapters])  # (r, in), r of all parts together
    if parts[0][2].num_parts == 1:
        return down.contiguous(), adapters[0][1].contiguous()
    source, rank = parts[0][2], len(adapters[0][0])
    if source.num_groups == 1:
        # Parts may have different numbers of rows. Columns of B are ordered by adapter, rows by part.
        whole = torch.zeros(sum(source.parts), len(down))
        for index, ((_, _, own), (_, up)) in enumerate(zip(parts, adapters, strict=True)):
            begin = sum(own.parts[: own.part])
            whole[begin : begin + len(up), index * rank : (index + 1) * rank] = up
        return down.contiguous(), whole
    whole = torch.zeros(source.num_groups, sum(source.parts) // source.num_groups, len(down))  # (G, rows, r)
    for index, ((_, _, own), (_, up)) in enumerate(zip(parts, adapters, strict=True)):
        first, rows = own.place_in_group
        part = whole[:, first : first + rows, index * rank : (index + 1) * rank]
        part.copy_(up.view(source.num_groups, rows, rank))
    return down.contiguous(), whole.view(-1, len(down))


def _table(config: ModelConfig, lora: LoraConfig, num_parts: Mapping[str, int], base: str) -> dict[str, Any]:
    names = NAMES[config.family]
    prefix = f"{names.base}{names.layers}."
    inside = {module: module.removeprefix(prefix).partition(".")[2] for module in num_parts}  # "self_attn.q_proj"
    kinds = {(inside[module], num) for module, num in num_parts.items()}
    # If every layer has the same targets, names without the layer are sufficient.
    everywhere = all(
        kinds == {(inside[m], num) for m, num in num_parts.items() if m.startswith(f"{prefix}{index}.")}
        for index in range(config.num_layers)
    )
    # The shortest names by which peft finds exactly these modules.
    short = {
        path: path if _is_shared(names.layer.values(), path) else path.rpartition(".")[2] for path in inside.values()
    }
    found = sorted({short[inside[module]] if everywhere else module for module in num_parts})
    ranks = {inside[m] if everywhere else m: num * lora.rank for m, num in num_parts.items() if num > 1}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": found,
        "rank_pattern": ranks,
        # alpha grows with the rank, so that alpha / r stays the same.
        "alpha_pattern": {name: rank * lora.scale for name, rank in ranks.items()},
        "bias": "none",
        "fan_in_fan_out": names.transposed,
        "inference_mode": True,
        "modules_to_save": None,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
    }


def _is_shared(modules: Iterable[str], path: str) -> bool:
    last = path.rpartition(".")[2]
    return sum(module.rpartition(".")[2] == last for module in set(modules)) > 1
