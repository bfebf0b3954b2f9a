"""Tensor-parallel decoder blocks for generation (Megatron-LM, 1909.08053, section 3).

    input projections (column-parallel)    a rank has some output features: its own heads, keys and values
    output projections (row-parallel)      a rank computes a partial sum: one all-reduce
    embedding                              a rank looks up its shard of the vocabulary: one all-reduce
    head                                   a rank has the logits of its shard of the vocabulary: one all-gather
    norm over all heads                    a rank sums the squares of its heads: one all-reduce
    everything else, including experts     replicated on all ranks

A forward pass has 2 L + 1 all-reduces of (B, S, H) for L layers, two of (B, S, 1) in every layer with norms over all
heads, and one all-gather of logits. All ranks of a replica must call the blocks with the same tokens in the same order;
all get bitwise equal logits. There is no backward; training uses terrace.runtime.tensor, which follows a program.

Shape legend: B batch, S sequence, H hidden, V vocabulary, R tensor ranks, v = V / R rounded up, n inner features of a
rank.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from terrace.base.errors import ModelError
from terrace.comm.exchange import all_gather
from terrace.comm.groups import TierGroup
from terrace.comm.process_group import OrderedGroup
from terrace.generation.cache_shape import cache_shape
from terrace.model.blocks import block_specs
from terrace.model.config import ModelConfig
from terrace.model.decoder import Embedding, Head, build_blocks, scaled
from terrace.model.layers import RMSNorm
from terrace.model.operations import Dim, Loss, Norm, Product
from terrace.model.spec import BlockSpec
from terrace.plan.dims import CUT_BY
from terrace.plan.mesh import Mesh
from terrace.plan.slices import rank_slices, slice_blocks, used_part

Slices = Mapping[str, Tensor]  # parameter -> a rank's slice of it


def sliced_blocks(config: ModelConfig, slices: Sequence[Slices], group: OrderedGroup | None = None) -> list[nn.Module]:
    """Frozen blocks of the model `config` on one rank of `group`, whose ranks are in the order of their slices.

    `slices` has the parameters of every block, as returned by `HandOver.run`; they are not copied. Without a group
    they must be whole, and the blocks are plain ones. Raises `PlanError` if the ranks of the group cannot share the
    heads, `ModelError` for slices of another model or of another number of ranks.
    """
    rows, row = (1, 0) if group is None else (group.size, group.position)
    specs = block_specs(config)
    cache_shape(specs, rows)  # which refuses rows that cannot share the heads
    blocks, mesh = build_blocks(config), Mesh.build(1, rows=(rows,))
    if len(slices) != len(specs):
        raise ModelError(f"the slices are of {len(slices)} blocks, the model has {len(specs)}: hand over this model")
    sliced = slice_blocks(specs, mesh)
    for spec, module, own in zip(sliced, blocks, slices, strict=True):
        places = {param.name: rank_slices(param, mesh, row) for param in spec.params}
        for param, value in zip(spec.params, _values(spec, places, own), strict=True):
            counts, units = param.dims[0]
            used = used_part(Dim(counts, units, (param.whole or param.shape)[0] // units), rows, row)
            _set_parameter(module, param.name, value if used is None else value[used])
    if specs[-1].tied_to:
        blocks[-1].weight = blocks[0].weight
    if group is None:
        return blocks
    return _joined(config, blocks, specs, rank_slices(sliced[0].params[0], mesh, row)[0], group)


def _values(spec: BlockSpec, places: Mapping[str, tuple[slice, ...]], own: Slices) -> list[Tensor]:
    if extra := own.keys() - places.keys():
        raise ModelError(f"{spec.name} has no parameter {min(extra)}, of which there is a slice: hand over this model")
    like, found = next(iter(own.values())), []
    for name, place in places.items():
        shape = tuple(part.stop - part.start for part in place)
        # With padding the last ranks may have empty slices.
        value = own[name] if name in own or 0 not in shape else like.new_empty(shape)
        if value.shape != shape:
            raise ModelError(
                f"the slice of {spec.name}.{name} is {tuple(value.shape)}, this row's is {shape}: hand over this "
                "model, to replicas of as many rows as the group has ranks"
            )
        found.append(value)
    return found


def _set_parameter(block: nn.Module, name: str, value: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    module = block.get_submodule(path)
    setattr(module, leaf, nn.Parameter(value, requires_grad=False))
    if isinstance(module, nn.Linear) and leaf == "weight":
        module.out_features, module.in_features = value.shape


def _joined(
    config: ModelConfig, blocks: list[nn.Module], specs: Sequence[BlockSpec], part: slice, group: OrderedGroup
) -> list[nn.Module]:
    """Add communication to blocks that have a rank's slices; `part` is its shard of the vocabulary."""
    ranks = TierGroup("rows", tuple(sorted(group.members)), dist.get_rank(group.handle), group.handle)
    for spec, block in zip(specs[1:-1], blocks[1:-1], strict=True):
        for operation in (*spec.operations, *spec.operations.mixture.shared):
            # All other operations are local to a rank's slice.
            match operation:
                case Product() if operation.leaves:
                    _replace(block, operation.weight, lambda module: _RowLinear(module, ranks))
                case Norm() if CUT_BY.get(operation.over.counts) == ("rows",):
                    _replace(block, operation.weight, lambda module: _HeadsNorm(module, ranks))
    first, last = blocks[0], blocks[-1]
    assert isinstance(first, Embedding), "a decoder begins with its embedding"
    assert isinstance(last, Head), "a decoder ends with its head"
    (loss,) = specs[-1].operations.of(Loss)
    head = _SlicedHead(config, last, ranks, loss.vocabulary, group.places)
    return [_SlicedEmbedding(config, first, part, ranks), *blocks[1:-1], head]


def _replace(block: nn.Module, path: str, by: Callable[[Any], nn.Module]) -> None:
    parent, _, leaf = path.rpartition(".")
    setattr(block.get_submodule(parent), leaf, by(block.get_submodule(path)))


class _RowLinear(nn.Module):
    """Row-parallel linear layer, (B, S, n) to (B, S, H): all-reduces the partial sums of the ranks."""

    def __init__(self, linear: nn.Linear, ranks: TierGroup) -> None:
        super().__init__()
        self.bias = linear.bias  # added once, not by every rank
        linear.register_parameter("bias", None)
        self.part = linear
        self._ranks = ranks

    def forward(self, x: Tensor) -> Tensor:
        y = _summed(self.part(x), self._ranks)
        return y if self.bias is None else y + self.bias


class _HeadsNorm(nn.Module):
    """RMS norm over the heads of all ranks; x (..., n) has the heads of this rank.

    Key-value heads that are replicated on several ranks count several times, all equally often, so the mean is correct.
    """

    def __init__(self, norm: RMSNorm, ranks: TierGroup) -> None:
        super().__init__()
        self.norm, self._ranks = norm, ranks

    def forward(self, x: Tensor) -> Tensor:
        norm, wide = self.norm, x.to(torch.promote_types(x.dtype, torch.float32))
        mean = _summed(wide.square().sum(-1, keepdim=True), self._ranks) / (x.shape[-1] * self._ranks.size)
        weight = norm.weight + norm.offset if norm.offset else norm.weight
        return (wide * torch.rsqrt(mean + norm.eps)).to(x.dtype) * weight


class _SlicedEmbedding(Embedding):
    def __init__(self, config: ModelConfig, whole: Embedding, part: slice, ranks: TierGroup) -> None:
        super().__init__(config, device="meta")
        self.weight, self.positions = whole.weight, whole.positions
        self._part, self._ranks = part, ranks

    def looked_up(self, tokens: Tensor) -> Tensor:
        own, elsewhere = tokens - self._part.start, (tokens < self._part.start) | (tokens >= self._part.stop)
        if self.weight.numel():
            # Embeddings of other shards are zero here; the all-reduce adds them.
            found = F.embedding(own.masked_fill(elsewhere, 0), self.weight).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        else:
            found = self.weight.new_zeros(*tokens.shape, self.weight.shape[1])
        return scaled(_summed(found, self._ranks), self.scale)


class _SlicedHead(Head):
    def __init__(
        self, config: ModelConfig, whole: Head, ranks: TierGroup, vocabulary: int, places: Sequence[int]
    ) -> None:
        super().__init__(config, whole.weight, device="meta")
        self.norm, self._ranks, self._vocab_size = whole.norm, ranks, vocabulary
        self._places = places  # rank index of each shard of the vocabulary

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        own = super().forward(x)  # (B, S, v), or fewer on the last ranks
        size = -(-self._vocab_size // self._ranks.size)
        own = F.pad(own, (0, size - own.shape[-1])).contiguous()
        parts = own.new_empty(self._ranks.size, *own.shape)  # (R, B, S, v)
        all_gather(parts.view(-1), own.view(-1), self._ranks, torch.empty_like(parts).view(-1))
        return torch.cat([parts[place] for place in self._places], -1)[..., : self._vocab_size]  # (B, S, V)


def _summed(part: Tensor, ranks: TierGroup) -> Tensor:
    total = part.contiguous()
    dist.all_reduce(total, group=ranks.handle)
    return total
