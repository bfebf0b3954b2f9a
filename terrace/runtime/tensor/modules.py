"""Replacements for a block's modules under the tensor axis, with the same names and a part of the parameters each.

Shape legend: B batch, S sequence, T = B S tokens, R rows, C columns, H hidden, D elements of a head, n inner features
of a rank.

Between blocks and in the residual stream an activation is (T'/R, H/C) with sequence parallelism (T' is T padded to a
multiple of R), and (B, S, H/C) without. Inside attention and MLP it is (B, S, ...), with n features.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terrace.model.decoder import check_positions, mixed, scaled
from terrace.model.layers import Normal, rms_norm
from terrace.runtime.batch import Batch
from terrace.runtime.in_block import InBlockAxis, InBlockComm
from terrace.runtime.tensor.axis_comm import AxisComm, share
from terrace.runtime.tensor.fused import gather_products, scatter_product
from terrace.runtime.tensor.overlap import arriving_linear, product_scatter
from terrace.runtime.tensor.regathered import RegatheredInput, await_input, gather_input, reduce_output


@dataclass
class TensorAxis(InBlockAxis):
    """The tensor axis of one rank: collectives over its rows and columns, and the (B, S) of the current micro-batch."""

    rows: AxisComm
    columns: AxisComm
    both: AxisComm
    in_block: InBlockComm
    splits_tokens: bool  # sequence parallelism
    num_chunks: int = 1  # parts in which the messages of a region travel
    fuses: bool = False  # whether they are one operation with the products beside them
    drops_inputs: bool = False  # whether the gathered input of a region is dropped after its forward
    shape: Sequence[int] = field(default=(0, 0))

    @property
    def edge(self) -> AxisComm:
        return self.rows

    def begin(self, micro: int, batch: Batch, recomputed: bool) -> None:
        """Set the (B, S) of the next pass. A recomputed block keeps gathered inputs: its backward follows at once."""
        self.shape, self.drops_inputs = tuple(batch.labels.shape), not recomputed

    @property
    def num_same(self) -> int:
        """Number of row ranks that compute the same on the residual stream."""
        return 1 if self.splits_tokens else self.rows.degree

    def enter(self, x: Tensor, region: nn.Module) -> Tensor:
        """Go from the residual stream into attention or MLP, the `region`: (B, S, H/C)."""
        if not self.splits_tokens:
            return self.rows.copy(x)
        self._input = RegatheredInput(self.drops_inputs, self.num_chunks)
        if self.fuses:
            # Read in every pass: states replace the modules' weights by views of their buffers.
            weights = [each.weight for each in region.children() if isinstance(each, ColumnLinear) and each.is_whole]
            whole, products = gather_products(x, weights, self.rows, self._input)
            self._products = {id(weight): product for weight, product in zip(weights, products, strict=True)}
            return self.unpad(whole)
        return self.unpad(gather_input(x, self.rows, self._input))

    def product(self, x: Tensor, weight: nn.Parameter) -> Tensor:
        """Multiply the input of a region, in parts while it arrives. A fused product comes from `enter`."""
        if self.fuses and id(weight) in self._products:
            return self.unpad(self._products.pop(id(weight)))
        arriving = self.splits_tokens and self._input.is_arriving
        return arriving_linear(x, weight, self._input, self.shape) if arriving else F.linear(x, weight)

    def reads_input(self, y: Tensor) -> Tensor:
        """Make the backward of y, computed from a region's input by autograd ops, wait for the regathered input."""
        if not self.splits_tokens:
            return y
        assert not self._input.is_arriving, "the first product of a region is of a weight that is cut, so it awaits all"
        return await_input(y, self.rows, self._input)

    def leave(self, x: Tensor, weight: nn.Parameter, more: Tensor | None = None) -> Tensor:
        """Multiply x (B, S, n) and sum the result over the rows, back into the residual stream.

        `more` (B, S, H/C) is added to this rank's term of the sum.
        """
        if self.fuses:
            assert more is None, "plans with fused products have no adapters"
            held = self._input
            del self._input
            self._products.clear()
            return scatter_product(self.pad(x), weight, self.rows, held)
        in_parts = self.splits_tokens and self.num_chunks > 1
        y = x if in_parts else F.linear(x, weight)
        if more is not None and not in_parts:
            y = y + more
        if not self.splits_tokens:
            return self.rows.total(y)
        held = self._input
        del self._input  # it lives as long as the graph of its region
        if in_parts:
            return product_scatter(self.pad(x), weight, None if more is None else self.pad(more), self.rows, held)
        return reduce_output(self.pad(y), self.rows, held)

    def pad(self, x: Tensor) -> Tensor:
        """Flatten and pad x (B, S, ...) to (T', ...)."""
        x = x.flatten(0, 1)
        return padded(x, x.shape[0] + -x.shape[0] % self.rows.degree)

    def unpad(self, x: Tensor) -> Tensor:
        """Restore x (T', ...) to (B, S, ...)."""
        return x[: self.shape[0] * self.shape[1]].view(*self.shape, *x.shape[1:])

    def spread(self, x: Tensor) -> Tensor:
        """Sum x (m, H) over the columns and keep this rank's features: (m, H/C)."""
        num = self.columns.degree
        if num == 1:
            return x
        # Features go to the first dim, along which collectives cut.
        return self.columns.scatter(x.view(x.shape[0], num, -1).transpose(0, 1).flatten(0, 1))

    def collect(self, x: Tensor) -> Tensor:
        """Gather the features of x (m, H/C) over the columns: (m, H)."""
        num = self.columns.degree
        if num == 1:
            return x
        return self.columns.gather(x).view(num, x.shape[0], -1).transpose(0, 1).flatten(1)

    def whole(self, x: Tensor) -> Tensor:
        """Gather the tokens and features of the residual stream: (B, S, H)."""
        if self.splits_tokens:
            return self.unpad(self.collect(self.rows.gather(x)))
        return self.collect(self.rows.copy(x).flatten(0, 1)).view(*self.shape, -1)


def padded(x: Tensor, size: int) -> Tensor:
    """x padded with zero rows to `size` rows."""
    return F.pad(x, (0, 0, 0, size - x.shape[0])) if x.shape[0] < size else x


@dataclass(frozen=True)
class Adapter:
    """This rank's part of an adapter: `down` (rank, inputs) and `up` (outputs, rank), split like the weight.

    The weight's product is a sum over the axis that splits its inputs, and so is the adapter's: a rank adds its term
    x_l A_l^T B^T to that of the weight, and one message carries both. Each rank has a part of the gradient of the
    matrix that is not split.
    """

    down: nn.Parameter
    up: nn.Parameter
    scale: float


class _Linear(nn.Module):
    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, axis: TensorAxis, adapter: Adapter | None = None
    ) -> None:
        super().__init__()
        self.weight, self.bias, self._axis = weight, bias, axis
        # Under the names that they have beside the weight.
        self.lora_a: nn.Parameter | None = None if adapter is None else adapter.down
        self.lora_b: nn.Parameter | None = None if adapter is None else adapter.up
        self._scale = 0.0 if adapter is None else adapter.scale

    def adapted(self, x: Tensor, used: slice | None = None, num_same: int = 1) -> Tensor | None:
        """The adapter's product for x (..., inputs), limited to outputs `used`; None without an adapter."""
        down, up = self.lora_a, self.lora_b
        if down is None or up is None:
            return None
        inner = F.linear(x, share(down, num_same)) * self._scale
        return F.linear(inner, share(up if used is None else up[used], num_same))


class ColumnLinear(_Linear):
    """(B, S, H/C) to (B, S, n): a rank has some rows of the weight, and computes some columns of the result.

    `used` is the part of the output that this rank needs if it holds a whole weight (key-value heads), otherwise None.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        used: slice | None,
        axis: TensorAxis,
        adapter: Adapter | None = None,
    ) -> None:
        super().__init__(weight, bias, axis, adapter)
        self._used = used

    @property
    def is_whole(self) -> bool:
        """Whether a rank uses all of the weight that it holds."""
        return self._used is None

    def forward(self, x: Tensor) -> Tensor:
        """Multiply, sum over the columns, add the bias."""
        axis, used = self._axis, self._used
        bias: Tensor | None
        if used is None:
            y, bias = axis.product(x, self.weight), self.bias
        else:
            y, bias = axis.reads_input(F.linear(x, self.weight[used])), None if self.bias is None else self.bias[used]
        more = self.adapted(x, used)  # after the weight's product, which waits for all of the input
        # Columns hold parts of the input features, so their products are summed before the bias.
        y = axis.columns.total(y if more is None else y + more)
        return y if bias is None else y + share(bias, axis.columns.degree)


class WholeLinear(_Linear):
    """A product over features that a rank holds whole, for its tokens. `num_same` ranks compute the same gradient."""

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        num_same: int,
        axis: TensorAxis,
        adapter: Adapter | None = None,
    ) -> None:
        super().__init__(weight, bias, axis, adapter)
        self._num_same = num_same

    def forward(self, x: Tensor) -> Tensor:
        num = self._num_same
        y = F.linear(x, share(self.weight, num), None if self.bias is None else share(self.bias, num))
        more = self.adapted(x, num_same=num)
        return y if more is None else y + more


class RowLinear(_Linear):
    """(B, S, n) to the residual stream: a rank has some columns of the weight, and computes one term of a sum."""

    def forward(self, x: Tensor) -> Tensor:
        """Multiply, sum over the rows, add the bias once."""
        x = self._axis.columns.copy(x)
        y = self._axis.leave(x, self.weight, self.adapted(x))
        return y if self.bias is None else y + share(self.bias, self._axis.num_same)


class Norm(nn.Module):
    """A norm over features (..., n) that are split over the ranks of `parts`; None if each rank has all of them.

    `num_same` ranks compute the same gradient of the weight, and each contributes its share; other ranks compute
    parts of it. `used` is the part of the weight for this rank's features, if it holds more. A key-value head that
    several rows share counts once for each of them, as often as any other.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        eps: float,
        offset: float,
        parts: AxisComm | None,
        num_same: int,
        used: slice | None,
    ) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.eps, self.offset = eps, offset
        self.normal: Normal = rms_norm  # or another kernel of it, where a rank has all features
        self._parts, self._num_same, self._used = parts, num_same, used

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x: by its mean square if there is no bias, otherwise by mean and variance."""
        weight = share(self.weight, self._num_same)
        weight = weight + self.offset if self.offset else weight
        weight = weight if self._used is None else weight[self._used]
        bias = None if self.bias is None else share(self.bias, self._num_same)
        # A rank has all features: torch's fused norm does.
        if self._parts is None or self._parts.degree == 1:
            if bias is None:
                return self.normal(x, weight, self.eps)
            return F.layer_norm(x, weight.shape, weight, bias, self.eps)
        # Statistics in fp32 at least.
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if bias is not None:
            wide = wide - _mean(wide, self._parts)
        scale = torch.rsqrt(_mean(wide.square(), self._parts) + self.eps)
        y = (wide * scale).to(x.dtype) * weight
        return y if bias is None else y + bias


def _mean(x: Tensor, parts: AxisComm) -> Tensor:
    return parts.sum_numbers(x.sum(-1, keepdim=True)) / (x.shape[-1] * parts.degree)


class VocabParallelEmbedding(nn.Module):
    """Tokens (B, S) to the residual stream. A rank looks up its part of the vocabulary."""

    def __init__(
        self, weight: nn.Parameter, positions: nn.Parameter | None, part: slice, axis: TensorAxis, scale: float = 1.0
    ) -> None:
        super().__init__()
        self.weight, self.positions, self.scale = weight, positions, scale
        self._part = part
        self._axis = axis

    def forward(self, tokens: Tensor, positions: Tensor | None = None, mix: Tensor | None = None) -> Tensor:
        """Look up tokens (B, S) at `positions` (B, S), by default 0 .. S-1; with `mix` (B), pairs of rows mixed.

        Raises `ModelError` for a position beyond the learned ones.
        """
        axis = self._axis
        elsewhere = (tokens < self._part.start) | (tokens >= self._part.stop)
        # Other ranks' rows are zero here and are added by the sum.
        found = F.embedding((tokens - self._part.start).masked_fill(elsewhere, 0), self.weight)
        found = scaled(found.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.scale)  # (B, S, H)
        if mix is not None:  # here, since ranks may hold parts of rows afterwards
            found = mixed(found, mix)
        if axis.splits_tokens:
            x = axis.rows.scatter(axis.spread(axis.pad(found)))
        else:
            x = axis.rows.total(axis.spread(found.flatten(0, 1))).view(*tokens.shape, -1)
        if self.positions is None:
            return x
        check_positions(tokens, positions, self.positions.shape[0])
        return x + self._learned(self.positions, tokens.shape[1], positions, x)

    def _learned(self, learned: Tensor, sequence: int, positions: Tensor | None, x: Tensor) -> Tensor:
        if not self._axis.splits_tokens:
            found = learned[:sequence] if positions is None else F.embedding(positions, learned)
            # All rows add the same positions and find the same gradient: each contributes its share.
            return share(found, self._axis.rows.degree)
        # With sequence parallelism a rank holds a run of the flattened tokens.
        first = self._axis.rows.index * x.shape[0]
        places = torch.arange(first, first + x.shape[0], device=x.device)
        if positions is None:
            return F.embedding(places % sequence, learned)
        return F.embedding(positions.flatten()[places % positions.numel()], learned)


class VocabParallelHead(nn.Module):
    """Residual stream to the input of the loss: normalised hidden states (B, S, H) on every rank.

    The loss multiplies with the output matrix (terrace.runtime.tensor.loss), so whole logits are never allocated.
    `weight` holds the rows `part` of that matrix, then padding; `cap` bounds the logits, 0 is no cap.
    """

    part, cap = slice(0), 0.0

    def __init__(self, weight: nn.Parameter, norm: nn.Module, axis: TensorAxis, divisor: float = 1.0) -> None:
        super().__init__()
        self.weight = weight
        self.norm = norm
        self.divisor = divisor  # of logits
        self._axis = axis

    @property
    def ranks(self) -> AxisComm:
        """The ranks among which the vocabulary is cut."""
        return self._axis.both

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Normalise x, and gather its tokens and features."""
        return self.entering(x)

    def entering(self, x: Tensor) -> Tensor:
        """Input (B, S, H) of the output matrix: x normalised and divided by the logit divisor, whole on every rank."""
        x = self.norm(x)
        return self._axis.whole(x if self.divisor == 1.0 else x / self.divisor)


class ValueParallelHead(nn.Module):
    """Residual stream to values (B, S), equal on every rank. Each rank holds the whole score matrix."""

    def __init__(self, score: nn.Linear, norm: Norm, axis: TensorAxis) -> None:
        super().__init__()
        self.score = score
        self.norm = norm
        self._axis = axis

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Normalise x, gather it, multiply. Every rank gets the values' whole gradient, and passes on its share."""
        values: Tensor = self.score(self._axis.whole(self.norm(x))).squeeze(-1)
        return share(values.to(torch.promote_types(values.dtype, torch.float32)), self._axis.both.degree)
