"""Steps of a block under the tensor axis: one rule per type of operation (terrace.model.operations).

A region is attention or the MLP, from the operation that enters it to the matmul that writes the residual stream.

    region, sequence parallel      forward    gather the input; matmuls; reduce the output
                                   backward   gather the output's gradient; gather the input again, behind the
                                              gradients of inputs; reduce the input's gradient, behind the gradients
                                              of weights
    region, whole tokens           forward    all-reduce the output
                                   backward   all-reduce the input's gradient, behind the gradients of weights
    columns                        forward    all-reduce after each matmul into the region
                                   backward   all-reduce before the matmul out of it, behind gradients of weights
    experts, whole tokens          forward    gather the results of the tokens that each row routes
                                   backward   gather the gradients of tokens

With `tensor_chunks` a region's messages are sent in parts, each overlapped with the matmuls of other parts; the first
part of a gather and the last part of a reduction are exposed. With `tensor_chunks = "fused"` each of these messages is
one operation with the adjacent matmul. The reduction of an input gradient is still hidden by the weight gradients,
which need no message: fused with the input gradients, it would compete with the second gather for their time.

A recomputed block does not gather its input again.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from terrace.model import operations as ops
from terrace.model.params import ParamSpec
from terrace.model.spec import BlockSpec
from terrace.plan.dims import CUT_BY, hidden_size, is_table, rank_numel
from terrace.plan.in_block_messages import Leg, TensorMessage
from terrace.plan.mesh import no_sequence
from terrace.plan.slices import is_shared
from terrace.plan.tensor_traffic import TensorTraffic
from terrace.program.block_program.steps import Await, BlockStep, Compute, ComputeKind, Send, Steps

_OUTPUTS, _INPUTS, _WEIGHTS = map(
    Compute, (ComputeKind.OUTPUTS, ComputeKind.INPUT_GRADIENTS, ComputeKind.WEIGHT_GRADIENTS)
)
_ALL_REDUCE = Leg.REDUCE, Leg.GATHER


def tensor_steps(
    tensor: TensorTraffic,
    blocks: Sequence[BlockSpec],
    block: BlockSpec,
    attention: tuple[Steps, Steps],
    recomputed: bool,
) -> tuple[tuple[Steps, Steps], tuple[Steps, Steps]]:
    """(Forward, backward) steps of `block`, with the steps of its `attention` inside, then a mixture's (after, before).

    The second pair holds steps after the experts in a forward and before them in a backward. Raises `PlanError` if the
    sequence length is unknown.
    """
    if tensor.tokens < 1:
        raise no_sequence("tensor")
    regathers = tensor.splits_tokens and not recomputed
    tables = [param for owner in block.tied_to for param in blocks[owner].params]
    writer = _Writer(tensor, hidden_size(blocks), block, tables, attention, regathers=regathers)
    operations, mixture = block.cut_operations.each, block.cut_operations.mixture
    if not mixture.each:
        return (tuple(writer.forward(operations)), tuple(writer.backward(operations))), ((), ())
    place = operations.index(mixture)
    before, after = operations[:place], (*mixture.shared, *operations[place + 1 :])
    gathers = tuple(writer.gather_routed())
    forward, backward = tuple(writer.forward(before)), tuple(writer.backward(before))
    return (forward, (*gathers, *backward)), ((*gathers, *writer.forward(after)), tuple(writer.backward(after)))


class _Writer:
    def __init__(
        self,
        tensor: TensorTraffic,
        hidden: int,
        block: BlockSpec,
        tables: Sequence[ParamSpec],
        attention: tuple[Steps, Steps],
        *,
        regathers: bool,
    ) -> None:
        self.tensor, self.regathers, self.splits, self.hidden = tensor, regathers, tensor.splits_tokens, hidden
        self.block, self.attention, self.tables = block, attention, tables
        self.rows, self.columns, self.both = tensor.rows.axes, tensor.columns.axes, tensor.both.axes
        self.whole = (tensor.padded_tokens if self.splits else tensor.tokens) * hidden
        # Elements of the residual stream: `whole` over all rows and columns, `cut` over all rows of one column.
        self.cut = tensor.rows.padded(self.whole // tensor.columns.degree)
        # Parts are runs of tokens, so they need sequence parallelism.
        in_parts = self.splits and tensor.plan.num_tensor_parts > 1
        self.fused = self.splits and tensor.plan.fuses_tensor
        self.parts = [self.cut // tensor.padded_tokens * tokens for tokens in tensor.token_chunks] if in_parts else []
        self.awaited: list[BlockStep] = []  # in a backward: steps to run before the region's input is read again

    def forward(self, operations: Iterable[ops.Operation]) -> Iterator[BlockStep]:
        for operation in operations:
            yield from _RULES[type(operation)][0](self, operation)

    def backward(self, operations: Sequence[ops.Operation]) -> Iterator[BlockStep]:
        for operation in reversed(operations):
            yield from _RULES[type(operation)][1](self, operation)

    def gather_routed(self) -> Iterator[BlockStep]:
        """Gather the tokens that each row has routed, if the residual stream is not split."""
        if not self.splits:
            yield from self._wait(self.rows, self.tensor.padded_tokens * self.hidden, Leg.GATHER)

    def look_up(self, _: ops.LookUp) -> Iterator[BlockStep]:
        """Sum the looked-up embeddings over columns, then over rows."""
        return self._summed(None)

    def look_up_backward(self, operation: ops.LookUp) -> Iterator[BlockStep]:
        """A trained table needs the stream's whole gradient; a frozen one sends nothing."""
        params = self.block.params if operation.owns else self.tables
        trains = any(param.trainable for param in params if is_table(param))
        return self._gathered() if trains else iter(())

    def loss(self, loss: ops.Loss) -> Iterator[BlockStep]:
        """Gather the whole stream, then exchange a few numbers per token for the losses."""
        yield from self._gathered(loss.depths)
        if loss.numbers:
            yield from self._wait(self.both, loss.numbers * self.tensor.tokens, Leg.NUMBERS)

    def score(self, _: ops.Score) -> Iterator[BlockStep]:
        """Gather the whole stream; every rank then has all values."""
        return self._gathered()

    def head_backward(self, operation: ops.Operation) -> Iterator[BlockStep]:
        return self._summed(_WEIGHTS, operation.depths if isinstance(operation, ops.Loss) else 1)

    def norm(self, operation: ops.Norm) -> Iterator[BlockStep]:
        """Exchange one number per token over the axis that cuts the features (a layer norm: two)."""
        tensor = self.tensor
        is_apart = operation.source.tokens is ops.Tokens.STREAM and self.splits  # a rank normalises its own tokens
        tokens = tensor.padded_tokens // tensor.rows.degree if is_apart else tensor.tokens
        for axes in (self.rows, self.columns):
            if CUT_BY.get(operation.over.counts) == axes:
                for _ in range(2 if operation.kind == "layer" else 1):
                    yield from self._wait(axes, tokens, Leg.NUMBERS)

    def enter(self, _: ops.Enter) -> Iterator[BlockStep]:
        """Gather all tokens for the matmuls that read them."""
        return self._gather(_OUTPUTS) if self.splits else iter(())

    def enter_backward(self, _: ops.Enter) -> Iterator[BlockStep]:
        yield from self._await_input()
        yield from self._wait(self.rows, self.cut, *((Leg.REDUCE,) if self.splits else _ALL_REDUCE), behind=_WEIGHTS)

    def product(self, operation: ops.Product) -> Iterator[BlockStep]:
        """Sum the result over the axes that cut the input features."""
        if operation.leaves:
            yield from self._leave() if self.splits else self._wait(self.rows, self.cut, *_ALL_REDUCE)
        elif operation.source.tokens is ops.Tokens.ALL and CUT_BY.get(operation.inputs.counts) == self.columns:
            yield from self._wait(self.columns, self._inner(operation.outputs), *_ALL_REDUCE)

    def product_backward(self, operation: ops.Product) -> Iterator[BlockStep]:
        if operation.leaves:
            # The second gather is issued before the input gradients and awaited before the weight gradients that read
            # it.
            again = [Send(self._messages(self.rows, self.cut, Leg.GATHER), _INPUTS)] if self.regathers else []
            self.awaited = [step for send in again for step in (_INPUTS, Await(send))]
            if self.splits:
                # Queued after the gathers: the output's gradient is needed first.
                yield from self._gather(_INPUTS, *again)
            yield from self._wait(self.columns, self._inner(operation.inputs), *_ALL_REDUCE, behind=_WEIGHTS)
        elif is_shared(operation.outputs, self.tensor.degrees):
            # Shared key-value heads read the input in plain operations, values first, so the gather must be done by
            # now.
            yield from self._await_input()

    def core(self, _: ops.Core | ops.Delta) -> Iterator[BlockStep]:
        """The steps of the context axis."""
        yield from self.attention[0]

    def core_backward(self, _: ops.Core | ops.Delta) -> Iterator[BlockStep]:
        yield from self.attention[1]

    def nothing(self, _: ops.Operation) -> Iterator[BlockStep]:
        """No messages: each rank computes its part locally."""
        return iter(())

    def _gathered(self, width: int = 1) -> Iterator[BlockStep]:
        """Gather all tokens and features of the stream, with `width` representations of a token."""
        if self.splits:
            yield from self._wait(self.rows, width * self.cut, Leg.GATHER)
        yield from self._wait(self.columns, width * self.whole, Leg.GATHER)

    def _summed(self, behind: Compute | None, width: int = 1) -> Iterator[BlockStep]:
        """Reduce partial sums of all tensor ranks into the stream; `behind` hides an all-reduce over rows."""
        yield from self._wait(self.columns, width * self.whole, Leg.REDUCE)
        if self.splits:
            yield from self._wait(self.rows, width * self.cut, Leg.REDUCE)
        else:
            yield from self._wait(self.rows, width * self.cut, *_ALL_REDUCE, behind=behind)

    def _await_input(self) -> Iterator[BlockStep]:
        yield from self.awaited
        self.awaited = []

    def _inner(self, dim: ops.Dim) -> int:
        """Elements of a tensor inside a region on a rank, padded to a multiple of the columns."""
        return self.tensor.columns.padded(self.tensor.tokens * rank_numel(dim, self.tensor.degrees))

    def _leave(self) -> Iterator[BlockStep]:
        if self.fused:
            yield from self._with_product(Leg.REDUCE, _OUTPUTS)
            return
        if not self.parts:
            yield from self._wait(self.rows, self.cut, Leg.REDUCE)
            return
        # No matmul is left to hide the last reduction.
        reductions = self._in_parts(Leg.REDUCE, alone=len(self.parts) - 1, behind=_OUTPUTS)
        for reduction in reductions:
            yield from (_OUTPUTS, reduction)
        yield from map(Await, reductions)

    def _gather(self, product: Compute, *queued: Send) -> Iterator[BlockStep]:
        """Gather all tokens for `product`; `queued` is issued after the gathers."""
        if self.fused:
            yield from (*self._with_product(Leg.GATHER, product), *queued)
            return
        if not self.parts:
            yield from (*self._wait(self.rows, self.cut, Leg.GATHER), *queued)
            return
        # All parts are issued at once; the matmuls of part i hide part i + 1.
        gathers = self._in_parts(Leg.GATHER, alone=0, behind=product)
        yield from (*gathers, *queued)
        for gather in gathers:
            yield from (Await(gather), product)

    def _with_product(self, leg: Leg, product: Compute) -> Iterator[BlockStep]:
        send = Send(self._messages(self.rows, self.cut, leg), product, fused=True)
        yield from (send, product, Await(send))

    def _in_parts(self, leg: Leg, *, alone: int, behind: Compute) -> list[Send]:
        return [
            Send(self._messages(self.rows, numel, leg), None if index == alone else behind)
            for index, numel in enumerate(self.parts)
        ]

    def _wait(
        self, axes: tuple[str, ...], numel: int, *legs: Leg, behind: Compute | None = None
    ) -> Iterator[BlockStep]:
        # Nothing to send on an axis of degree 1, or for an empty activation.
        if self.tensor.line(axes).degree > 1 and numel:
            send = Send(self._messages(axes, numel, *legs), behind)
            yield from (send, Await(send)) if behind is None else (send, behind, Await(send))

    def _messages(self, axes: tuple[str, ...], numel: int, *legs: Leg) -> tuple[TensorMessage, ...]:
        return tuple(TensorMessage(leg, axes, numel) for leg in legs)


_Rule = Callable[[_Writer, Any], Iterator[BlockStep]]
# (Forward rule, backward rule); `tensor_steps` handles mixtures.
_RULES: Mapping[type[ops.Operation], tuple[_Rule, _Rule]] = {
    ops.LookUp: (_Writer.look_up, _Writer.look_up_backward),
    ops.Norm: (_Writer.norm, _Writer.norm),
    ops.Enter: (_Writer.enter, _Writer.enter_backward),
    ops.Product: (_Writer.product, _Writer.product_backward),
    **dict.fromkeys((ops.Core, ops.Delta), (_Writer.core, _Writer.core_backward)),
    ops.Loss: (_Writer.loss, _Writer.head_backward),
    ops.Score: (_Writer.score, _Writer.head_backward),
    **dict.fromkeys(
        (ops.Rotary, ops.Join, ops.Scale, ops.Convolution, ops.Gate, ops.Activation, ops.Sum),
        (_Writer.nothing, _Writer.nothing),
    ),
}
