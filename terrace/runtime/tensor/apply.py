"""Applying the tensor axis to a model's blocks, by the dims that their specs declare.

A linear layer from the residual stream to an inner dim becomes a `ColumnLinear`, one back a `RowLinear`; a module that
holds a `RowLinear` is entered from the residual stream. Norms, embedding and head have their own stand-ins. The model's
code is not touched: its submodules are replaced under the same names.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from terrace.base.errors import ModelError
from terrace.comm.collectives import Collectives
from terrace.comm.ledger import Meter
from terrace.comm.symmetric import Operators
from terrace.model import decoder, layers
from terrace.model.experts.mixture import Mixture
from terrace.model.hf.blocks import EmbeddingBlock, HeadBlock, LayerBlock
from terrace.model.lora.config import adapter_names
from terrace.model.lora.modules import LoraLinear
from terrace.model.params import ParamSpec
from terrace.model.spec import BlockSpec
from terrace.plan.dims import is_inner, is_norm_of_heads
from terrace.plan.slices import rank_slices
from terrace.program.program import Program
from terrace.runtime.in_block_comm import InBlockComm
from terrace.runtime.objective import Objective, TokenObjective
from terrace.runtime.tensor.axis_comm import AxisComm
from terrace.runtime.tensor.declared import DeclaredCutter, Output, are_declared
from terrace.runtime.tensor.loss import vocabulary_losses
from terrace.runtime.tensor.modules import (
    Adapter,
    ColumnLinear,
    HeadNorm,
    HeadsNorm,
    Norm,
    RowLinear,
    TensorAxis,
    ValueParallelHead,
    VocabParallelEmbedding,
    VocabParallelHead,
    WholeLinear,
)
from terrace.runtime.tensor.routed import routed_in_parts
from terrace.runtime.token_numbers import TokenNumbers


def make_axis(
    program: Program,
    collectives: Collectives,
    rank: int,
    comm: InBlockComm,
    device: torch.device,
    meter: Meter,
    fused: Operators | None = None,
) -> TensorAxis:
    tensor, plan = program.tensor, program.plan
    rows, columns, both = (
        AxisComm(layout, rank, collectives, comm, device, meter, fused if layout is tensor.rows else None)
        for layout in tensor.lines
    )
    return TensorAxis(
        rows, columns, both, comm, tensor.splits_tokens, num_chunks=plan.num_tensor_parts, fuses=plan.fuses_tensor
    )


def parallelise(
    blocks: Sequence[nn.Module], program: Program, rank: int, axis: TensorAxis, objective: Objective
) -> tuple[list[nn.Module], Objective]:
    """This rank's stand-ins for `blocks` and for the loss: modules on meta, with sliced parameters.

    Raises `ModelError` for blocks and losses that have no form under the tensor axis.
    """
    first, last = blocks[0], blocks[-1]
    known = objective is decoder.token_loss or isinstance(objective, TokenObjective)
    # Every rank has all values, so any loss of them runs.
    if not known and not isinstance(last, decoder.ValueHead):
        raise ModelError(
            "a tensor axis cuts the vocabulary, and only terrace.model.decoder.token_loss and losses of token numbers "
            "have a form for that: use one as the objective, or give the tier to the data axis"
        )
    cut = _Cutter(program, rank, axis)
    if are_declared(blocks) and objective is decoder.token_loss:
        return list(blocks), _cut_loss(objective, *cut.declared(blocks), axis)
    if not isinstance(first, decoder.Embedding) or not isinstance(last, (decoder.Head, decoder.ValueHead)):
        raise ModelError(
            f"a tensor axis needs a decoder's embedding and head as first and last block, not {type(first).__name__} "
            f"and {type(last).__name__}: declare a model of transformers (docs/declaring.md), or give the tier to the "
            "data axis"
        )
    embedding = cut.embedding(first)
    middle = [cut.layer(index, block) for index, block in enumerate(blocks) if 0 < index < len(blocks) - 1]
    if isinstance(last, decoder.ValueHead):
        return [embedding, *middle, cut.value_head(last)], objective
    head = cut.head(last, embedding.weight if last.weight is first.weight else None)
    # A tied output matrix belongs to the embedding's block.
    part = cut.part(0 if last.weight is first.weight else len(blocks) - 1, "weight")[0]
    return [embedding, *middle, head], _cut_loss(objective, head, part, axis, last.cap)


def _cut_loss(
    objective: Objective, head: VocabParallelHead | Output, part: slice, axis: TensorAxis, cap: float = 0.0
) -> Objective:
    """`objective` of hidden states; `head` has this rank's `part` of the output matrix, whose values come later.

    `cap` bounds the logits; 0 is no cap.
    """

    def losses(hidden: Tensor, labels: Tensor) -> Tensor:
        return vocabulary_losses(hidden, head.weight, labels, part, axis.both, cap)

    def numbers(module: nn.Module, inputs: Tensor, labels: Tensor) -> TokenNumbers:
        return TokenNumbers(-losses(module(inputs), labels), None)

    def loss(hidden: Tensor, labels: Tensor) -> Tensor:
        return losses(hidden, labels).sum()

    return replace(objective, numbers=numbers) if isinstance(objective, TokenObjective) else loss


class _Cutter:
    def __init__(self, program: Program, rank: int, axis: TensorAxis) -> None:
        self._specs = [{param.name: param for param in block.params} for block in program.blocks]
        self._blocks: Sequence[BlockSpec] = program.blocks
        self._mesh, self._rank = program.mesh, rank
        self._axis = axis

    def part(self, block: int, name: str) -> tuple[slice, ...]:
        """This rank's part of a whole parameter."""
        return rank_slices(self._specs[block][name], self._mesh, self._rank)

    def declared(self, blocks: Sequence[nn.Module]) -> tuple[Output, slice]:
        """Cut declared blocks in place; returns the output matrix, and which part of it this rank has."""
        first, *middle, last = blocks
        assert isinstance(first, EmbeddingBlock), "blocks_of begins with it"
        assert isinstance(last, HeadBlock), "blocks_of ends with it"
        is_tied = last.output.weight is first.lookup.weight
        owner, name = (0, "lookup.weight") if is_tied else (len(blocks) - 1, "output.weight")
        cutter = DeclaredCutter(self._specs, self._axis, self._linear, self._parameter)
        table = cutter.embedding(first, self.part(0, "lookup.weight")[0])
        for index, block in enumerate(middle, start=1):
            assert isinstance(block, LayerBlock), "blocks_of has these between its ends"
            cutter.layer(index, block)
        return cutter.head(len(blocks) - 1, last, table if is_tied else None), self.part(owner, name)[0]

    def embedding(self, module: decoder.Embedding) -> VocabParallelEmbedding:
        positions = None if module.positions is None else self._parameter(0, "positions")
        part = self.part(0, "weight")[0]
        return VocabParallelEmbedding(self._parameter(0, "weight"), positions, part, self._axis, module.scale)

    def head(self, module: decoder.Head, tied: nn.Parameter | None) -> VocabParallelHead:
        block = len(self._blocks) - 1
        weight = self._parameter(block, "weight") if tied is None else tied
        return VocabParallelHead(weight, self._norm(block, "norm", module.norm), self._axis, module.divisor)

    def value_head(self, module: decoder.ValueHead) -> ValueParallelHead:
        block = len(self._blocks) - 1
        module.score.weight = self._parameter(block, "score.weight")
        return ValueParallelHead(module.score, self._norm(block, "norm", module.norm), self._axis)

    def layer(self, block: int, module: nn.Module) -> nn.Module:
        """Replace the linear layers and norms inside a layer, in place."""
        regions = set()
        # A list: replacing modules while walking them would skip some.
        for name, child in list(module.named_modules()):
            parent = module.get_submodule(name.rpartition(".")[0])
            if isinstance(child, (nn.Linear, LoraLinear)):
                stand_in = self._linear(block, name, child)
                # The parent of a RowLinear is a region: its input comes from the residual stream.
                if isinstance(stand_in, RowLinear):
                    regions.add(parent)
                setattr(parent, name.rpartition(".")[2], stand_in)
            elif isinstance(child, Mixture):
                self._experts(block, name, child)
            elif isinstance(child, (layers.RMSNorm, nn.LayerNorm)):
                of_heads = self._specs[block][f"{name}.weight"].dims[0][0] != "hidden"
                norm = self._head_norm(block, name, child) if of_heads else self._norm(block, name, child)
                setattr(parent, name.rpartition(".")[2], norm)
        for region in regions:
            # A hook gathers the input once for all products of the region.
            region.register_forward_pre_hook(self._enter)
        return module

    def _enter(self, region: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self._axis.enter(inputs[0], region), *inputs[1:]

    def _experts(self, block: int, name: str, mixture: Mixture) -> None:
        """Give a mixture this rank's part of its parameters, and of the tokens that it routes."""
        for child in (mixture.router, mixture.gate, mixture.up, mixture.down):
            (owner,) = (owner for owner, other in mixture.named_children() if other is child)
            for parameter, _ in list(child.named_parameters()):
                setattr(child, parameter, self._parameter(block, f"{name}.{owner}.{parameter}"))
        mixture.routed = routed_in_parts(mixture.routed, self._axis)  # type: ignore[assignment, method-assign]

    def _linear(self, block: int, name: str, module: nn.Linear | LoraLinear) -> ColumnLinear | RowLinear | WholeLinear:
        weight = self._parameter(block, f"{name}.weight")
        bias = None if module.bias is None else self._parameter(block, f"{name}.bias")
        spec, adapter = self._specs[block][f"{name}.weight"], None
        if isinstance(module, LoraLinear):
            down, up = (self._parameter(block, each) for each in adapter_names(f"{name}.weight"))
            adapter = Adapter(down, up, module.scale)
        # The output dim tells the direction: back into the residual stream, or out of it.
        if spec.dims[0][0] == "hidden":
            return RowLinear(weight, bias, self._axis, adapter)
        if not is_inner(spec):
            return WholeLinear(weight, bias, self._axis, adapter)
        return ColumnLinear(weight, bias, self._used(spec), self._axis, adapter)

    def _used(self, spec: ParamSpec) -> slice | None:
        """Output features read by this rank's queries: None for all of a slice, one head of whole key-value heads."""
        name, units = spec.dims[0]
        if name != "kv_heads" or not spec.is_replicated_over("rows"):
            return None
        size = spec.shape[0] // units
        # Consecutive rows share a key-value head, as their query heads do.
        head = self._mesh.part(self._rank, "rows") * units // self._mesh.total("rows")
        return slice(head * size, (head + 1) * size)

    def _norm(self, block: int, name: str, module: nn.Module) -> Norm:
        assert isinstance(module.eps, float), "every norm here has an epsilon"
        bias = self._parameter(block, f"{name}.bias") if f"{name}.bias" in self._specs[block] else None
        offset = module.offset if isinstance(module, layers.RMSNorm) else 0.0
        norm = Norm(self._parameter(block, f"{name}.weight"), bias, module.eps, self._axis, offset)
        if isinstance(module, layers.RMSNorm):
            norm.normal = module.normal
        return norm

    def _head_norm(self, block: int, name: str, module: nn.Module) -> HeadNorm:
        assert isinstance(module, layers.RMSNorm), "queries and keys have an rms norm"
        weight, spec = self._parameter(block, f"{name}.weight"), self._specs[block][f"{name}.weight"]
        if is_norm_of_heads(spec):
            norm: HeadNorm = HeadsNorm(weight, module.eps, self._axis, module.offset, self._used(spec))
        else:
            norm = HeadNorm(weight, module.eps, self._axis, module.offset)
        norm.normal = module.normal
        return norm

    def _parameter(self, block: int, name: str) -> nn.Parameter:
        spec = self._specs[block][name]
        return nn.Parameter(torch.empty(spec.shape, device="meta"), requires_grad=spec.trainable)
