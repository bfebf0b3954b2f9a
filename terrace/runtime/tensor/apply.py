"""Applies the tensor axis to a model's blocks: replaces each operation's module, by the operation's type and dims.

    product of a region's gathered input  `ColumnLinear`
    product back into the stream          `RowLinear`; the module that holds it is entered from the stream
    any other product                     `WholeLinear`
    norm                                  `Norm`, over the ranks that share its features
    look-up                               `VocabParallelEmbedding`
    loss, score                           `VocabParallelHead`, `ValueParallelHead`
    mixture                               stays, and routes this rank's part of the tokens

Model code is unchanged: submodules are replaced under the same names. This includes declared blocks of a `transformers`
model (terrace.model.hf.declared): rows split heads and inner features, and a layer's own code sees fewer of them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from terrace.base.errors import ModelError
from terrace.comm.collectives import Collectives
from terrace.comm.ledger import Meter
from terrace.comm.symmetric import Operators
from terrace.model import decoder
from terrace.model import operations as ops
from terrace.model.hf.blocks import EmbeddingBlock, HeadBlock, LayerBlock
from terrace.model.layers import RMSNorm
from terrace.model.lora.config import adapter_names
from terrace.model.lora.modules import LoraLinear
from terrace.model.operations import Tensor as Operand
from terrace.plan.dims import CUT_BY
from terrace.plan.slices import rank_slices, used_part
from terrace.program.program import Program
from terrace.runtime.in_block import InBlockComm
from terrace.runtime.objective import Objective, TokenObjective
from terrace.runtime.tensor import modules
from terrace.runtime.tensor.axis_comm import AxisComm
from terrace.runtime.tensor.loss import vocabulary_losses
from terrace.runtime.tensor.modules import TensorAxis
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
    tensor, plan = program.model.tensor, program.plan
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
    """This rank's replacements for `blocks` and the loss: modules with split parameters on the meta device.

    Raises `ModelError` for blocks and losses that the tensor axis does not support.
    """
    first, last = blocks[0], blocks[-1]
    has_values = isinstance(last, decoder.ValueHead)
    # Every rank has all values, so any loss of them runs.
    if not (objective is decoder.token_loss or isinstance(objective, TokenObjective) or has_values):
        raise ModelError(
            "a tensor axis cuts the vocabulary, and only terrace.model.decoder.token_loss and losses of token numbers "
            "have a form for that: use one as the objective, or give the tier to the data axis"
        )
    is_declared = all(hasattr(block, "declared") for block in blocks) and objective is decoder.token_loss
    is_decoder = isinstance(first, decoder.Embedding) and isinstance(last, (decoder.Head, decoder.ValueHead))
    if not is_declared and not is_decoder:
        raise ModelError(
            f"a tensor axis needs a decoder's embedding and head as first and last block, not {type(first).__name__} "
            f"and {type(last).__name__}: declare a model of transformers (docs/declaring.md), or give the tier to the "
            "data axis"
        )
    if is_declared and axis.columns.degree > 1:
        raise ModelError(
            f"columns = {axis.columns.degree} would cut the residual stream of declared blocks, whose own code "
            "adds to it: declared blocks are cut by rows alone"
        )
    cutter = _Cutter(program, rank, axis)
    stand_ins = [cutter.block(index, block) for index, block in enumerate(blocks)]
    return stand_ins, objective if has_values else _cut_loss(objective, cutter, axis)


def _cut_loss(objective: Objective, cutter: "_Cutter", axis: TensorAxis) -> Objective:
    """`objective` in terms of hidden states and the head's part of the output matrix, which is filled in later."""
    head, part, cap = cutter.head, cutter.part, cutter.cap

    def losses(hidden: Tensor, labels: Tensor) -> Tensor:
        return vocabulary_losses(hidden, head.weight, labels, part, axis.both, cap)

    def numbers(module: nn.Module, inputs: Tensor, labels: Tensor) -> TokenNumbers:
        return TokenNumbers(-losses(module(inputs), labels), None)

    def loss(hidden: Tensor, labels: Tensor) -> Tensor:
        return losses(hidden, labels).sum()

    return replace(objective, numbers=numbers) if isinstance(objective, TokenObjective) else loss


class _Cutter:
    """Replaces modules of blocks in place, block by block; the first and the last block may be replaced themselves."""

    head: modules.VocabParallelHead  # the loss computes its product, with logits bounded by `cap`
    cap: float

    def __init__(self, program: Program, rank: int, axis: TensorAxis) -> None:
        self._program, self._rank, self._axis = program, rank, axis
        self.part = slice(0)  # of the vocabulary: this rank's rows of the table, a tied one or the last

    def block(self, index: int, block: nn.Module) -> nn.Module:
        """The block with replaced modules, or its replacement. Raises `ModelError` for a parameter of no operation."""
        spec = self._program.blocks[index]
        self._params, self._block = {param.name: param for param in spec.params}, block
        self._gathered: Operand | None = None  # the input of the region that is under way
        self._entered: set[str] = set()
        self._entering: list[str] = []
        if isinstance(block, LayerBlock):
            block.whole_shape = lambda: self._axis.shape
        self._replace_all(spec.cut_operations)
        for name in self._entering:
            # Else it would read a part of the tokens, or pass on a part of their gradient.
            if name.rpartition(".")[0] not in self._entered:
                raise ModelError(
                    f"{name} leads out of the residual stream, and no projection of the same module leads back: a "
                    "tensor axis enters and leaves by one module; give the tier to the data or the context axis"
                )
        if self._params:
            raise ModelError(
                f"{spec.name}.{next(iter(self._params))} belongs to no operation that a tensor axis cuts: give the "
                "tier to the data or the context axis"
            )
        return self._block

    def _replace_all(self, each: Iterable[ops.Operation]) -> None:
        for operation in each:
            _RULES[type(operation)](self, operation)

    def look_up(self, operation: ops.LookUp) -> None:
        if isinstance(self._block, EmbeddingBlock) and getattr(self._block.lookup, "padding_idx", None) is not None:
            raise ModelError("an embedding under a tensor axis has no padding token: set padding_idx to None")
        # The table of further tokens belongs to the first block.
        if operation.owns:
            self._table = self._take_table(operation.weight)
        positions = self._take("positions") if operation.positions else None
        self._put(
            operation.weight,
            modules.VocabParallelEmbedding(self._table, positions, self.part, self._axis, operation.factor),
        )

    def loss(self, operation: ops.Loss) -> None:
        block: Any = self._block
        # A tied output matrix belongs to the embedding's block.
        weight = self._take_table(operation.weight) if operation.owns else self._table
        if isinstance(block, HeadBlock):
            block.output = self.head = modules.VocabParallelHead(weight, nn.Identity(), self._axis)
        else:
            self._block = self.head = modules.VocabParallelHead(weight, block.norm, self._axis, block.divisor)
        self.cap = self.head.cap = operation.cap
        self.head.part = self.part

    def score(self, operation: ops.Score) -> None:
        block: Any = self._block
        block.score.weight = self._take(f"{operation.weight}.weight")
        self._block = modules.ValueParallelHead(block.score, block.norm, self._axis)

    def norm(self, operation: ops.Norm) -> None:
        """The epsilon of a `transformers` norm has several names; the block's declaration knows it."""
        name, axis = operation.weight, self._axis
        module: Any = self._block.get_submodule(name)
        epsilons: Mapping[str, float] | None = getattr(self._block, "epsilons", None)
        eps = module.eps if epsilons is None else epsilons[name]
        offset = float(operation.has_offset)
        weight = self._take(f"{name}.weight")
        bias = self._take(f"{name}.bias") if operation.kind == "layer" else None
        # The stream's features, or heads; elements of a head are whole on every rank.
        lines: dict[tuple[str, ...], AxisComm] = {("columns",): axis.columns, ("rows",): axis.rows}
        parts = lines.get(CUT_BY.get(operation.over.counts, ()))
        used = self._used(operation.over)
        stand_in = modules.Norm(weight, bias, eps, offset, parts, self._num_same(operation), used)
        if isinstance(module, RMSNorm):
            stand_in.normal = module.normal
        self._put(f"{name}.weight", stand_in)

    def product(self, operation: ops.Product) -> None:
        name, axis = f"{operation.weight}.weight", self._axis
        module: Any = self._block.get_submodule(operation.weight)
        weight, adapter = self._take(name), None
        bias = None if module.bias is None else self._take(f"{operation.weight}.bias")
        if isinstance(module, LoraLinear):
            down, up = map(self._take, adapter_names(name))
            adapter = modules.Adapter(down, up, module.scale)
        if operation.leaves:
            self._put(name, modules.RowLinear(weight, bias, axis, adapter))
            # A hook gathers the input once for all products of the region.
            region = operation.weight.rpartition(".")[0]
            self._entered.add(region)
            self._block.get_submodule(region).register_forward_pre_hook(self._enter, with_kwargs=True)
        elif operation.source != self._gathered:
            self._put(name, modules.WholeLinear(weight, bias, self._num_same(operation), axis, adapter))
        else:
            self._put(name, modules.ColumnLinear(weight, bias, self._used(operation.outputs), axis, adapter))
            self._entering.append(operation.weight)

    def mixture(self, operation: ops.Mixture) -> None:
        """Replace a mixture's parameters by this rank's part, and make it route this rank's part of the tokens."""
        mixture: Any = self._block.get_submodule(operation.weight)
        for owner in ("router", "gate", "up", "down"):
            child = getattr(mixture, owner)
            for parameter, _ in list(child.named_parameters()):
                setattr(child, parameter, self._take(f"{operation.weight}.{owner}.{parameter}"))
        mixture.routed = routed_in_parts(mixture.routed, self._axis)
        self._replace_all((*operation.shared, *operation.shared_gate))

    def enter(self, operation: ops.Enter) -> None:
        """Record the operand that is gathered on entry; other products use this rank's shard."""
        self._gathered = operation.target

    def core(self, operation: ops.Core) -> None:
        """Keep the module, with the sinks of this rank's heads. Raises `ModelError` for sinks under columns."""
        if not operation.sinks:
            return
        if self._axis.columns.degree > 1:
            raise ModelError(
                f"columns = {self._axis.columns.degree} have the same heads, whose sinks would count several times: "
                "layers with attention sinks are cut by rows alone"
            )
        self._put_own(operation.sinks)

    def convolution(self, operation: ops.Convolution) -> None:
        """Keep the module, with the features that this rank holds, and those that it works on."""
        module: Any = self._block.get_submodule(operation.weight)
        module.weight, module.used = self._take(f"{operation.weight}.weight"), self._used(operation.source.features)

    def delta(self, operation: ops.Delta) -> None:
        """Keep the module, with the decays of this rank's heads. Raises `ModelError` under columns."""
        if self._axis.columns.degree > 1:
            raise ModelError(
                f"columns = {self._axis.columns.degree} have the same heads, whose decays and convolutions would count "
                "several times: layers with the gated delta rule are cut by rows alone"
            )
        self._put_own(operation.log_decay)
        self._put_own(operation.decay_bias)

    def _put_own(self, name: str) -> None:
        path, _, own = name.rpartition(".")
        setattr(self._block.get_submodule(path), own, self._take(name))

    def nothing(self, operation: ops.Operation) -> None:
        """Keep the module: it has no parameters, and runs on a part of its operands as on the whole."""

    def _enter(self, region: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        # transformers gives its attention hidden states by name, and its MLP by place.
        if inputs:
            return (self._axis.enter(inputs[0], region), *inputs[1:]), options
        return inputs, options | {"hidden_states": self._axis.enter(options["hidden_states"], region)}

    def _num_same(self, operation: ops.Operation) -> int:
        # Inside a region columns have the same heads, and rows others.
        in_stream = operation.source.tokens is ops.Tokens.STREAM
        return self._axis.num_same if in_stream else self._axis.columns.degree

    def _used(self, dim: ops.Dim) -> slice | None:
        mesh = self._program.mesh
        return used_part(dim, mesh.total("rows"), mesh.part(self._rank, "rows"))

    def _put(self, weight: str, stand_in: nn.Module) -> None:
        """Replace the module that holds this weight, which may be the block itself."""
        path = weight.rpartition(".")[0]
        if path:
            parent, _, own = path.rpartition(".")
            setattr(self._block.get_submodule(parent), own, stand_in)
        else:
            self._block = stand_in

    def _take_table(self, name: str) -> nn.Parameter:
        self.part = rank_slices(self._params[name], self._program.mesh, self._rank)[0]
        return self._take(name)

    def _take(self, name: str) -> nn.Parameter:
        """This rank's part of a parameter. Each parameter is taken by one operation."""
        spec = self._params.pop(name)
        return nn.Parameter(torch.empty(spec.shape, device="meta"), requires_grad=spec.trainable)


_RULES: Mapping[type[ops.Operation], Callable[[_Cutter, Any], None]] = {
    ops.LookUp: _Cutter.look_up,
    ops.Enter: _Cutter.enter,
    ops.Norm: _Cutter.norm,
    ops.Product: _Cutter.product,
    ops.Mixture: _Cutter.mixture,
    ops.Loss: _Cutter.loss,
    ops.Score: _Cutter.score,
    ops.Core: _Cutter.core,
    ops.Convolution: _Cutter.convolution,
    ops.Delta: _Cutter.delta,
    **dict.fromkeys((ops.Rotary, ops.Join, ops.Scale, ops.Gate, ops.Activation, ops.Sum), _Cutter.nothing),
}
