"""Shape of a model's key-value cache, and limits on positions, derived from the operations of its layers."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from terrace.base.errors import ModelError, PlanError
from terrace.model.operations import LookUp, Operations, Rotary
from terrace.model.spec import BlockSpec
from terrace.model.windows import widest_window
from terrace.plan.dims import rank_numel


class CacheShape(NamedTuple):
    """Cached elements per token: in each of `layers` with attention, `tensors` tensors of (heads, size).

    There are two tensors, keys and values, or one where a layer caches a single vector for both (latent attention).
    """

    layers: int
    heads: int
    size: int
    tensors: int = 2

    def num_bytes(self, tokens: int, dtype: torch.dtype) -> int:
        """Cache bytes of `tokens` tokens in all layers."""
        return self.tensors * self.layers * tokens * self.heads * self.size * dtype.itemsize


def layers_of(blocks: Sequence[BlockSpec]) -> list[Operations]:
    """Operations of every layer, with attention or linear."""
    return [block.operations for block in blocks if block.attends]


def cache_shape(blocks: Sequence[BlockSpec], rows: int = 1) -> CacheShape:
    """Cache shape on one of `rows` tensor ranks.

    Raises `ModelError` for a model without attention, `PlanError` unless `rows` divides the number of heads, and either
    divides the number of key-value heads or is a multiple of it.
    """
    layers = [layer for layer in layers_of(blocks) if layer.core.heads]
    if not layers:
        raise ModelError("all layers are linear: the engine counts pages of keys, and needs a layer with attention")
    core = layers[0].core

    def cut(rows: int) -> bool:
        return core.heads % rows == 0 and (core.kv_heads % rows == 0 or rows % core.kv_heads == 0)

    if rows < 1 or not cut(rows):
        most = max((degree for degree in range(1, min(rows, core.heads + 1)) if cut(degree)), default=1)
        raise PlanError(
            f"rows = {rows} of a replica cannot share the model's {core.heads} heads and {core.kv_heads} key-value "
            f"heads: use {most}"
        )
    kept = core.cached[0].features
    return CacheShape(len(layers), rank_numel(kept, {"rows": rows}) // kept.size, kept.size, len(core.cached))


def window_of(blocks: Sequence[BlockSpec]) -> int:
    """Widest sliding window of all layers; 0 if a layer has none."""
    return widest_window([layer.core.window for layer in layers_of(blocks)])


def most_positions(blocks: Sequence[BlockSpec]) -> int:
    """Largest number of positions of a sequence that is still being generated; 0: no limit.

    Learned positions have a last one, and some kinds of RoPE change their frequencies with the sequence length.
    """
    operations = [operation for block in blocks for operation in block.operations]
    limits = [each.positions for each in operations if isinstance(each, LookUp)]
    limits += [each.limit for each in operations if isinstance(each, Rotary)]
    return min(filter(None, limits), default=0)
