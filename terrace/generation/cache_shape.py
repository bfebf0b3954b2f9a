"""What a token leaves behind in the layers of a model, and how far others see it, from the layers' operations."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from terrace.base.errors import PlanError
from terrace.model.operations import LookUp, Operations, Rotary
from terrace.model.spec import BlockSpec
from terrace.model.windows import widest_window
from terrace.plan.slices import rank_numel


class CacheShape(NamedTuple):
    """Numbers that a token leaves behind in each of `layers`: `tensors` of (heads, size), keys and values.

    One tensor serves as both where each layer stores keys and values as one vector.
    """

    layers: int
    heads: int
    size: int
    tensors: int = 2

    def num_bytes(self, tokens: int, dtype: torch.dtype) -> int:
        """Bytes of `tokens` in all layers."""
        return self.tensors * self.layers * tokens * self.heads * self.size * dtype.itemsize


def layers_of(blocks: Sequence[BlockSpec]) -> list[Operations]:
    """The operations of a model's layers."""
    return [block.operations for block in blocks if block.attends]


def cache_shape(blocks: Sequence[BlockSpec], rows: int = 1) -> CacheShape:
    """Keys and values of the heads that one of `rows` tensor ranks has.

    Raises `PlanError` for rows that do not divide the heads, or neither divide the key-value heads nor are a multiple
    of them.
    """
    layers = layers_of(blocks)
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
    """The widest window of the layers; 0: none."""
    return widest_window([layer.core.window for layer in layers_of(blocks)])


def most_positions(blocks: Sequence[BlockSpec]) -> int:
    """The most positions of a text whose length is not known yet; 0: no limit.

    Learned positions end, and some kinds of RoPE change their frequencies with the length.
    """
    operations = [operation for block in blocks for operation in block.operations]
    limits = [each.positions for each in operations if isinstance(each, LookUp)]
    limits += [each.limit for each in operations if isinstance(each, Rotary)]
    return min(filter(None, limits), default=0)
