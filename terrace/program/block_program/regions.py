"""Steps of a block under the tensor axis, from the dims that its parameters declare (bytes: plan.tensor_traffic).

A region is attention or the MLP: products from the residual stream to an inner dim, then one product back.

    region, sequence parallel      forward    gather the input; products; reduce the output
                                   backward   gather the output's gradient; gather the input again, behind the
                                              gradients of inputs; reduce the input's gradient, behind the gradients
                                              of weights
    region, whole tokens           forward    all-reduce the output
                                   backward   all-reduce the input's gradient, behind the gradients of weights
    columns                        forward    all-reduce after each product into the region
                                   backward   all-reduce before the product out of it, behind gradients of weights
    experts, whole tokens          forward    gather the results of the tokens that each row routes
                                   backward   gather the gradients of tokens

With `tensor_chunks` the messages of a region travel in parts, each during the products of its neighbours: of a gather
the first part is waited for, of a reduction the last. With `tensor_chunks = "fused"` each of the same messages is one
operation with the products beside it. The reduction of an input's gradient stays behind the gradients of weights, which
need no message: fused with the gradients of inputs it would share their time with the second gather.

A recomputed block does not gather its input again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from terrace.model.params import ParamSpec
from terrace.model.spec import BlockSpec, Computes
from terrace.plan.dims import hidden_size, is_inner, is_norm, is_norm_of_heads
from terrace.plan.in_block_messages import Leg, TensorMessage
from terrace.plan.mesh import no_sequence
from terrace.plan.tensor_traffic import TensorTraffic, inner_numel
from terrace.program.block_program.steps import Await, BlockStep, Compute, ComputeKind, Send, Steps

_OUTPUTS, _INPUTS, _WEIGHTS = map(
    Compute, (ComputeKind.OUTPUTS, ComputeKind.INPUT_GRADIENTS, ComputeKind.WEIGHT_GRADIENTS)
)
_ALL_REDUCE = Leg.REDUCE, Leg.GATHER


@dataclass(frozen=True)
class _Region:
    """Elements of the activations summed over columns: one entry per product into the region, then one out of it."""

    products: tuple[int, ...]
    output: int
    attends: bool
    shares: bool = False  # whether rows share key-value heads
    normed: int = 0  # of the products, the first ones whose results are normalised over all rows


_NORM = None  # a parameter of a norm, in a list of regions and norms
_Part = _Region | None


def tensor_steps(
    tensor: TensorTraffic,
    blocks: Sequence[BlockSpec],
    block: BlockSpec,
    attention: tuple[Steps, Steps],
    recomputed: bool,
) -> tuple[tuple[Steps, Steps], tuple[Steps, Steps]]:
    """Steps of a forward and of a backward of `block`, one of `blocks`, with the steps of its `attention` inside.

    Then the steps of a mixture that come after its experts in a forward, and before them in a backward.

    Raises `PlanError` where sequences have no length.
    """
    if tensor.tokens < 1:
        raise no_sequence("tensor")
    writer = _Writer(tensor, hidden_size(blocks), regathers=tensor.splits_tokens and not recomputed)
    first = next((index for index, param in enumerate(block.params) if param.is_stack), len(block.params))
    parts = _parts(tensor, block.params[:first])
    if any(part is not _NORM for part in parts):
        forward, backward = writer.layer(parts, attention)
    elif parts:
        forward, backward = writer.head(len(parts), exchanges=block.computes is not Computes.VALUES)
    else:
        looks_up = any(param.trainable for param in block.params if param.dims[0][0] == "vocab")
        # A frozen table has no gradient, so its backward sends nothing.
        forward, backward = writer.embedding(), writer.embedding_backward() if looks_up else iter(())
    after, before = writer.layer(_parts(tensor, block.params[first:]), ((), ()))
    gathers = tuple(writer.gather_routed() if first < len(block.params) else ())
    return (tuple(forward), (*gathers, *backward)), ((*gathers, *after), tuple(before))


def _parts(tensor: TensorTraffic, params: Sequence[ParamSpec]) -> list[_Part]:
    found: list[_Part] = []
    products: list[int] = []
    shares = False
    for param in params:
        if is_norm(param):
            found.append(_NORM)
        elif is_norm_of_heads(param):
            region = found[-1]
            assert region is not None, "a norm of heads is declared after the matrices of its region"
            found[-1] = replace(region, normed=region.normed + 1)
        elif is_inner(param) and param.dims[0][0] != "hidden":
            # With more rows than key-value heads, every rank holds all of them but projects one.
            one_of = param.dims[0][1] if param.is_replicated_over("rows") else 1
            products.append(inner_numel(tensor, param.shape[0] // one_of))
            shares = shares or param.is_replicated_over("rows")
        elif is_inner(param):
            attends = param.dims[1][0] == "heads"
            found.append(_Region(tuple(products), inner_numel(tensor, param.shape[1]), attends, shares))
            products, shares = [], False
    return found


class _Writer:
    def __init__(self, tensor: TensorTraffic, hidden: int, *, regathers: bool) -> None:
        self.tensor, self.regathers, self.splits, self.hidden = tensor, regathers, tensor.splits_tokens, hidden
        self.rows, self.columns, self.both = tensor.rows.axes, tensor.columns.axes, tensor.both.axes
        self.whole = (tensor.padded_tokens if self.splits else tensor.tokens) * hidden
        # Elements of a rank's own part of the residual stream; `whole` counts all rows and columns.
        self.cut = tensor.rows.padded(self.whole // tensor.columns.degree)
        # Parts are runs of tokens, which only sequence parallelism communicates.
        in_parts = self.splits and tensor.plan.num_tensor_parts > 1
        self.fused = self.splits and tensor.plan.fuses_tensor
        self.parts = [self.cut // tensor.padded_tokens * tokens for tokens in tensor.token_chunks] if in_parts else []

    def layer(
        self, parts: Sequence[_Part], attention: tuple[Steps, Steps]
    ) -> tuple[Iterator[BlockStep], Iterator[BlockStep]]:
        """Regions with the norms before them."""
        return self._layer(parts, attention[0]), self._layer_backward(parts, attention[1])

    def gather_routed(self) -> Iterator[BlockStep]:
        """Gather the tokens that each row has routed, where the residual stream is whole."""
        if not self.splits:
            yield from self._wait(self.rows, self.tensor.padded_tokens * self.hidden, Leg.GATHER)

    def embedding(self) -> Iterator[BlockStep]:
        """Rows of the look-up are summed over columns, then over rows."""
        yield from self._wait(self.columns, self.whole, Leg.REDUCE)
        yield from self._wait(self.rows, self.cut, *((Leg.REDUCE,) if self.splits else _ALL_REDUCE))

    def embedding_backward(self) -> Iterator[BlockStep]:
        """The gradient of a matrix that is trained needs all of the stream's."""
        if self.splits:
            yield from self._wait(self.rows, self.cut, Leg.GATHER)
        yield from self._wait(self.columns, self.whole, Leg.GATHER)

    def head(self, num_norms: int, *, exchanges: bool) -> tuple[Iterator[BlockStep], Iterator[BlockStep]]:
        """A norm, the stream gathered whole, and three numbers a token for the loss if it `exchanges` these."""
        return self._head(num_norms, exchanges), self._head_backward(num_norms)

    def _head(self, num_norms: int, exchanges: bool) -> Iterator[BlockStep]:
        yield from self._norms(num_norms)
        if self.splits:
            yield from self._wait(self.rows, self.cut, Leg.GATHER)
        yield from self._wait(self.columns, self.whole, Leg.GATHER)
        if exchanges:
            yield from self._wait(self.both, 3 * self.tensor.tokens, Leg.NUMBERS)

    def _head_backward(self, num_norms: int) -> Iterator[BlockStep]:
        yield from self._wait(self.columns, self.whole, Leg.REDUCE)
        if self.splits:
            yield from self._wait(self.rows, self.cut, Leg.REDUCE)
        else:
            yield from self._wait(self.rows, self.cut, *_ALL_REDUCE, behind=_WEIGHTS)
        yield from self._norms(num_norms)

    def _layer(self, parts: Sequence[_Part], attention: Steps) -> Iterator[BlockStep]:
        for part in parts:
            if part is _NORM:
                yield from self._norms(1)
                continue
            if self.splits:
                yield from self._enter()
            for index, numel in enumerate(part.products):
                yield from self._wait(self.columns, numel, *_ALL_REDUCE)
                yield from self._norms_of_heads(1 if index < part.normed else 0)
            yield from attention if part.attends else ()
            yield from self._leave() if self.splits else self._wait(self.rows, self.cut, *_ALL_REDUCE)

    def _enter(self) -> Iterator[BlockStep]:
        if self.fused:
            yield from self._with_product(Leg.GATHER, _OUTPUTS)
            return
        if not self.parts:
            yield from self._wait(self.rows, self.cut, Leg.GATHER)
            return
        # All parts are issued at once; products of part i hide the arrival of part i + 1.
        gathers = self._in_parts(Leg.GATHER, alone=0, behind=_OUTPUTS)
        yield from gathers
        for gather in gathers:
            yield from (Await(gather), _OUTPUTS)

    def _leave(self) -> Iterator[BlockStep]:
        if self.fused:
            yield from self._with_product(Leg.REDUCE, _OUTPUTS)
            return
        if not self.parts:
            yield from self._wait(self.rows, self.cut, Leg.REDUCE)
            return
        # The last reduction has no product left to hide behind.
        reductions = self._in_parts(Leg.REDUCE, alone=len(self.parts) - 1, behind=_OUTPUTS)
        for reduction in reductions:
            yield from (_OUTPUTS, reduction)
        yield from map(Await, reductions)

    def _layer_backward(self, parts: Sequence[_Part], attention: Steps) -> Iterator[BlockStep]:
        # The backward meets parts in the opposite order.
        for part in reversed(parts):
            if part is _NORM:
                yield from self._norms(1)
                continue
            # Regathering is issued before the input gradients and awaited before the weight gradients that read it.
            again = Send(self._messages(self.rows, self.cut, Leg.GATHER), _INPUTS) if self.regathers else None
            if self.splits:
                yield from self._leave_backward(again)
            yield from self._wait(self.columns, part.output, *_ALL_REDUCE, behind=_WEIGHTS)
            yield from attention if part.attends else ()
            awaits = () if again is None else (_INPUTS, Await(again))
            # Shared heads read the input by plain operations, values first, which wait for it.
            yield from awaits if part.shares else ()
            yield from self._norms_of_heads(part.normed)
            yield from () if part.shares else awaits
            legs = (Leg.REDUCE,) if self.splits else _ALL_REDUCE
            yield from self._wait(self.rows, self.cut, *legs, behind=_WEIGHTS)

    def _leave_backward(self, again: Send | None) -> Iterator[BlockStep]:
        # Queued after the gathers: the output's gradient is needed first.
        regather = () if again is None else (again,)
        if self.fused:
            yield from (*self._with_product(Leg.GATHER, _INPUTS), *regather)
            return
        if not self.parts:
            yield from (*self._wait(self.rows, self.cut, Leg.GATHER), *regather)
            return
        gathers = self._in_parts(Leg.GATHER, alone=0, behind=_INPUTS)
        yield from (*gathers, *regather)
        for gather in gathers:
            yield from (Await(gather), _INPUTS)

    def _with_product(self, leg: Leg, product: Compute) -> Iterator[BlockStep]:
        send = Send(self._messages(self.rows, self.cut, leg), product, fused=True)
        yield from (send, product, Await(send))

    def _in_parts(self, leg: Leg, *, alone: int, behind: Compute) -> list[Send]:
        return [
            Send(self._messages(self.rows, numel, leg), None if index == alone else behind)
            for index, numel in enumerate(self.parts)
        ]

    def _norms(self, number: int) -> Iterator[BlockStep]:
        tensor = self.tensor
        # With sequence parallelism a rank normalises only its own tokens.
        tokens = tensor.padded_tokens // tensor.rows.degree if self.splits else tensor.tokens
        for _ in range(number):
            yield from self._wait(self.columns, tokens, Leg.NUMBERS)

    def _norms_of_heads(self, number: int) -> Iterator[BlockStep]:
        for _ in range(number):
            yield from self._wait(self.rows, self.tensor.tokens, Leg.NUMBERS)

    def _wait(
        self, axes: tuple[str, ...], numel: int, *legs: Leg, behind: Compute | None = None
    ) -> Iterator[BlockStep]:
        # An axis of one rank, or an empty activation, sends nothing.
        if self.tensor.line(axes).degree > 1 and numel:
            send = Send(self._messages(axes, numel, *legs), behind)
            yield from (send, Await(send)) if behind is None else (send, behind, Await(send))

    def _messages(self, axes: tuple[str, ...], numel: int, *legs: Leg) -> tuple[TensorMessage, ...]:
        return tuple(TensorMessage(leg, axes, numel) for leg in legs)
