"""Mixtures under the tensor axis: each row rank routes a part of the tokens."""

from torch import Tensor

from terrace.plan.tensor_traffic import row_tokens
from terrace.runtime.tensor.axis_comm import Map, mapped
from terrace.runtime.tensor.modules import TensorAxis, padded


def routed_in_parts(routed: Map, axis: TensorAxis) -> Map:
    """Wrap a mixture's `routed`, (T, H) to (T, H), so that each row rank routes its own tokens, without padding.

    With sequence parallelism the tokens are already a part, padded at the end. Otherwise all rows have the same
    tokens: results, and gradients of the tokens, are gathered.
    """
    rows = axis.rows

    def of_part(tokens: Tensor) -> Tensor:
        total = axis.shape[0] * axis.shape[1]
        own, size = row_tokens(total, rows.degree, rows.index), -(-total // rows.degree)

        def whole(part: Tensor) -> Tensor:
            return rows.all_gather(padded(part, size))[:total]

        if axis.splits_tokens:
            return padded(routed(tokens[: own.stop - own.start]), size)
        part = mapped(tokens, lambda x: x[own], whole)
        return mapped(routed(part), whole, lambda gradient: gradient[own])

    return of_part
