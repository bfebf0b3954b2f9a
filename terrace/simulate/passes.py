"""Passes over memory of a block's operations: how often a forward and a backward read or write each tensor.

With N elements of e bytes on a rank, of the operation's result or of each operand:

    Norm          2eN forward, 5eN backward
    Sum           3eN each way: two operands and the result
    Activation    2eN forward, 3eN backward; gated 3eN and 5eN
    Convolution   2eN forward, 5eN backward
    Gate          3eN forward, 5eN backward
    Rotary        2eN each way, of queries and keys
    Join          2eN each way
    Scale         2eN each way, of queries; what multiplies the residual stream is not counted
    Product       eN backward, where it has a bias, whose gradient is the sum of that of the result
    Core          2eN each way, of queries, keys and values, where plain products need them laid out; of the result,
                  where it has sinks

For a layer of GPT with T tokens, hidden size H and t tensor rows this is (20 + 28/t)TH forward and (36 + 50/t)TH
backward in bf16, layouts included. Tensor columns, and rows under sequence parallelism, cut the residual stream.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

from terrace.cluster.cluster import Device
from terrace.model import operations as ops
from terrace.plan.wire import FORMATS
from terrace.simulate.kernels import memory_s
from terrace.simulate.work import Work


class Passes(NamedTuple):
    """Reads and writes of each tensor by a forward and a backward, and the kernels of each."""

    over: tuple[tuple[ops.Tensor, int, int], ...] = ()
    kernels: tuple[int, int] = (0, 0)

    def bytes_of(self, work: Work) -> tuple[float, float]:
        """(Forward, backward) bytes read and written on a rank."""
        item, forward, backward = FORMATS[work.compute].element_bytes, 0.0, 0.0
        for tensor, reads, reads_back in self.over:
            numel = work.numel(tensor)
            forward, backward = forward + reads * numel, backward + reads_back * numel
        return item * forward, item * backward


_NONE = Passes()


def _norm(norm: ops.Norm) -> Passes:
    return Passes(((norm.source, 2, 5),), (1, 1))


def _result(forward: int, backward: int, kernels: tuple[int, int] = (1, 1)) -> Callable[[ops.Operation], Passes]:
    """The rule of operations that read and write so many tensors of the size of their result."""
    return lambda operation: Passes(((operation.target, forward, backward),), kernels)


_SINKS = _result(2, 2)  # of a core that has some


def _activation(activation: ops.Activation) -> Passes:
    operands = len(activation.reads)
    return Passes(((activation.target, operands + 1, 2 * operands + 1),), (1, 1))


def _operands(operation: ops.Operation) -> Passes:
    return Passes(tuple((operand, 2, 2) for operand in operation.reads), (1, 1))


def _scale(scale: ops.Scale) -> Passes:
    return _NONE if scale.source.tokens is ops.Tokens.STREAM else Passes(((scale.source, 2, 2),), (1, 1))


# For products see `_bias_gradients`, for cores `_passes_of`; the rest is priced in terrace.simulate.layers.
_PASSES: Mapping[type[ops.Operation], Callable[[Any], Passes]] = {
    **dict.fromkeys(
        (ops.Enter, ops.Product, ops.Core, ops.Delta, ops.Mixture, ops.LookUp, ops.Loss, ops.Score, ops.PlainProduct),
        lambda operation: _NONE,
    ),
    ops.Norm: _norm,
    # One more kernel backward, for a layer norm's gradients of weight and bias: a layer has as many norms as sums.
    ops.Sum: _result(3, 3, kernels=(1, 2)),
    ops.Convolution: _result(2, 5),
    ops.Gate: _result(3, 5),
    ops.Activation: _activation,
    ops.Rotary: _operands,
    ops.Join: _result(2, 2),
    ops.Scale: _scale,
}


def pass_seconds(device: Device, work: Work) -> tuple[float, float]:
    """(forward, backward) seconds of the passes over memory of `work.layer`."""
    passes = _passes_of(work.layer, work.flash)
    num_bytes = passes.bytes_of(work)
    return memory_s(device, num_bytes[0], passes.kernels[0]), memory_s(device, num_bytes[1], passes.kernels[1])


def recompute_s(device: Device, work: Work, operations: Sequence[ops.Operation]) -> float:
    """Seconds of the passes over memory of `operations` when recomputed."""
    found = [_PASSES[type(operation)](operation) for operation in operations]
    num_bytes = sum(passes.bytes_of(work)[0] for passes in found)
    return memory_s(device, num_bytes, sum(passes.kernels[0] for passes in found))


@lru_cache(maxsize=1024)
def _passes_of(layer: ops.Operations, flash: bool) -> Passes:
    """All passes of a layer, summed per tensor size."""
    found = [_PASSES[type(operation)](operation) for operation in layer.passed]
    found += [_bias_gradients(group, layer) for group in joined(layer)]
    found += [] if flash else [_operands(core) for core in layer.of(ops.Core)]
    found += [_SINKS(core) for core in layer.of(ops.Core) if core.sinks]
    found += _counted_twice(layer)
    reads, reads_back = Counter[ops.Tensor](), Counter[ops.Tensor]()
    for passes in found:
        for tensor, forward, backward in passes.over:
            # Tensors of equal size are merged.
            sized = tensor._replace(name="")
            reads[sized] += forward
            reads_back[sized] += backward
    kernels = sum(passes.kernels[0] for passes in found), sum(passes.kernels[1] for passes in found)
    return Passes(tuple((tensor, reads[tensor], reads_back[tensor]) for tensor in reads), kernels)


def _bias_gradients(group: Sequence[ops.Product], layer: ops.Operations) -> Passes:
    """One kernel for the bias gradients of a group; gate and up of a gated MLP count once."""
    gates = {
        activation.source.name
        for activation in layer.passed
        if isinstance(activation, ops.Activation) and activation.is_gated
    }
    biased = [product.target for product in group if product.has_bias and product.target.name not in gates]
    return Passes(tuple((target, 0, 1) for target in biased), (0, 1)) if biased else _NONE


def _counted_twice(layer: ops.Operations) -> list[Passes]:
    """Norms of queries and keys count twice where a layer also normalises the results of attention and MLP."""
    of_heads = [norm for norm in layer.of(ops.Norm) if norm.source.tokens is not ops.Tokens.STREAM]
    normalises_results = len(layer.of(ops.Norm)) - len(of_heads) > 2
    return [_norm(norm)._replace(kernels=(0, 0)) for norm in of_heads] if normalises_results else []


@lru_cache(maxsize=1024)
def joined(layer: ops.Operations) -> tuple[tuple[ops.Product, ...], ...]:
    """The groups of products in a layer that run as one product on the same operand."""
    products = (operation for operation in layer.passed if isinstance(operation, ops.Product))
    return tuple(tuple(group) for _, group in groupby(products, key=lambda each: each.group or each.name))
