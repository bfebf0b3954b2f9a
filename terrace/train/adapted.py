"""Blocks of a run with its kernels, and the adapters of checkpoints."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from terrace.base.schema import dump, load
from terrace.checkpoint.reading import Checkpoint
from terrace.comm.collectives import DTYPES
from terrace.model import pair_kernels
from terrace.model.attention_plans import choose_kernel, describe
from terrace.model.blocks import block_specs
from terrace.model.config import ModelConfig, parse_model
from terrace.model.decoder import build_blocks
from terrace.model.liger import serve
from terrace.model.lora.config import LoraConfig
from terrace.model.lora.modules import add_adapters, merged_parameters
from terrace.model.spec import freeze
from terrace.plan.context import is_context_parallel
from terrace.plan.pruning import BlockPruning, mask_dtype, pruned_params
from terrace.runtime.pruned_blocks import smallest_blocks, zero_
from terrace.train.config import RunConfig
from terrace.train.rules import attention_case, parts_of

FACT = "lora"  # of a checkpoint: the table of its run's [lora], or null
PRUNED = "prune"  # of a checkpoint whose run has [prune]: `pruned_fact`


def run_blocks_of(run: RunConfig, device: torch.device) -> list[nn.Module]:
    """The blocks of a run, without values: with the run's kernels for `device`, and with adapters if it has any.

    Raises `ConfigError` if kernels that the run names are not installed.
    """
    blocks = build_blocks(run.model)
    choose_kernel(blocks, run.train.attention)
    serve(blocks, run.train.kernels, device, parts_of(run))
    if run.lora is not None:
        add_adapters(blocks, run.model, run.lora)
    return blocks


def fact_of(lora: LoraConfig | None) -> dict[str, object] | None:
    return None if lora is None else {key: list(v) if isinstance(v, tuple) else v for key, v in dump(lora).items()}


def lora_of(checkpoint: Checkpoint) -> LoraConfig | None:
    table = checkpoint.facts.get(FACT)
    return None if table is None else load(LoraConfig, table, FACT)


def decoded_words(checkpoint: Checkpoint) -> str:
    """A line on frozen matrices that a checkpoint holds in codes and `merged_values` decodes; empty if it has none."""
    lora = lora_of(checkpoint)
    if lora is None or lora.base is None:
        return ""
    return f"the frozen matrices were held in {lora.base}: they are decoded, and the adapters are merged into them"


def pruned_fact(run: RunConfig) -> dict[str, object]:
    """The table of a run's [prune] with what else its masks depend on."""
    table = dump(run.prune)
    return {
        **table,
        "blocks": list(run.prune.blocks),
        "of": mask_dtype(run.cluster, run.plan),
        "freeze": list(run.train.freeze),
    }


def merged_values(checkpoint: Checkpoint) -> Iterator[tuple[str, str, Tensor]]:
    """Yields (block, parameter, value) of a checkpoint's whole model, as its run computes with it.

    Adapters are merged into the base weights, and pruned blocks are zero.
    """
    config = parse_model(checkpoint.facts["model"])
    values = merged_parameters(checkpoint.parameters(), config, lora_of(checkpoint))
    fact = dict(checkpoint.facts.get(PRUNED) or {})
    # Without adapters and masks the values pass through unchanged.
    yield from values if not fact else _zeroed(values, fact, config, checkpoint.step)


def _zeroed(
    values: Iterable[tuple[str, str, Tensor]], fact: dict[str, Any], config: ModelConfig, step: int
) -> Iterator[tuple[str, str, Tensor]]:
    dtype, frozen = DTYPES[fact.pop("of")], fact.pop("freeze")
    settings = load(BlockPruning, fact, PRUNED)
    named = {(block.name, param.name) for block, param in pruned_params(freeze(block_specs(config), frozen))}
    for block, name, value in values:
        if step >= settings.after and (block, name) in named:
            # Masks are made of the values that blocks run on; the checkpoint has the masters.
            which = smallest_blocks(value.to(dtype), settings)
            value = value.clone()
            zero_(value, which, settings)
        yield block, name, value


def attention_words(run: RunConfig, device: torch.device) -> str:
    """One line on the attention kernel used on `device`. Raises `ConfigError` if it does not support the run."""
    dtype = DTYPES[run.plan.compute]
    if is_context_parallel(run.mesh, run.plan):
        return f"attention pairs: {pair_kernels.describe(device, dtype)}"
    case = attention_case(run, device.type)
    options = {"is_grouped": case.is_grouped, "is_cut": case.is_cut, "is_capped": case.is_capped}
    return f"attention: {describe(device, dtype, case.head_dim, **options, choice=run.train.attention)}"
