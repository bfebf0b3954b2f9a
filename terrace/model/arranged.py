"""Memory layout of a decoder's matrices for generation on a CPU.

Decoding is bound by reading the matrices, so their layout matters. Time of all products of a pass, for 34 M parameters
in fp32 on one core (torch 2.13):

    vectors     row-major (nn.Linear)    column-major    packed by oneDNN
          1                   12.0 ms          9.0 ms             10.8 ms
          8                   17.7 ms         17.1 ms             10.6 ms
        700                    534 ms          494 ms              429 ms

Matrices are therefore column-major for one sequence and packed for several. Those of experts are always column-major,
since each expert gets few vectors. Results differ by rounding from the original layout, because the order of summation
changes.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terrace.model.decoder import Head
from terrace.model.experts.gates import Choice
from terrace.model.experts.mixture import Mixture
from terrace.model.grouped import Order, add_biases, collect, products, spread
from terrace.model.layers import MLP, Attention

# Products of the same input, which are faster when joined.
_TOGETHER: dict[type[nn.Module], tuple[str, ...]] = {Attention: ("query", "key", "value"), MLP: ("gate", "up")}


class PackedLinear(nn.Module):
    """A Linear whose matrix (out, in) is packed by oneDNN for inputs of `num_rows` vectors."""

    def __init__(self, weight: Tensor, bias: Tensor | None, num_rows: int) -> None:
        super().__init__()
        # torch.compile uses the same two operators to pack frozen weights.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), num_rows)
        self._bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """Linear layer, x (..., in) to (..., out)."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return out


class ColumnsLinear(nn.Module):
    """A Linear whose matrix (out, in) is stored column-major."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.columns = weight.detach().t().contiguous().t()
        self._bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """Linear layer, x (..., in) to (..., out)."""
        return F.linear(x, self.columns, self._bias)


class ColumnsExperts(nn.Module):
    """The experts of a mixture with column-major matrices, gate and up joined."""

    def __init__(self, mixture: Mixture) -> None:
        super().__init__()
        joined = [mixture.gate.weight, mixture.up.weight]
        self.entering = torch.cat([each.detach().transpose(1, 2) for each in joined], 2)  # (E, H, 2 I)
        self.leaving = mixture.down.weight.detach().transpose(1, 2).contiguous()  # (E, I, H)
        self._biases = mixture.gate.bias, mixture.up.bias, mixture.down.bias
        self._gated = mixture.gated

    def forward(self, tokens: Tensor, choice: Choice) -> Tensor:
        """The weighted sum (T, H) of the chosen experts' outputs for tokens (T, H)."""
        if len(tokens) == 1:
            return self._of_one(tokens, choice)
        order = Order.of(choice.experts, len(self.entering), is_whole=choice.is_whole)
        gate, up = products(spread(tokens, order), self.entering, order.counts, transposed=True).chunk(2, -1)
        weights = choice.weights.flatten().index_select(0, order.choices).unsqueeze(-1)
        of_gate, of_up, of_down = self._biases
        gate, up = self._with_bias(gate, of_gate, order), self._with_bias(up, of_up, order)
        out = products(self._gated(gate, up) * weights, self.leaving, order.counts, transposed=True)
        return collect(self._with_bias(out, of_down, order, weights.squeeze(-1)), order)

    def _with_bias(self, y: Tensor, bias: Tensor | None, order: Order, weights: Tensor | None = None) -> Tensor:
        return y if bias is None else add_biases(y, bias, order.counts, weights)

    def _of_one(self, token: Tensor, choice: Choice) -> Tensor:
        # For one token, sorting by expert costs more than it saves.
        experts = choice.experts[0].tolist()
        both = token.new_empty(len(experts), self.entering.shape[2])
        for row, expert in enumerate(experts):
            torch.mm(token, self.entering[expert], out=both[row : row + 1])
        gate, up = both.chunk(2, -1)
        of_gate, of_up, of_down = self._biases
        if of_gate is not None and of_up is not None:
            gate, up = gate + of_gate[choice.experts[0]], up + of_up[choice.experts[0]]
        inner = self._gated(gate, up) * choice.weights.t()  # (k, I)
        out = torch.zeros_like(token) if of_down is None else choice.weights @ of_down[choice.experts[0]]
        for row, expert in enumerate(experts):
            out.addmm_(inner[row : row + 1], self.leaving[expert])
        return out


def arrange(blocks: Sequence[nn.Module], num_rows: int) -> None:
    """Change the layout of a decoder's matrices, in place, for batches of `num_rows` sequences.

    Applies only to frozen fp32 matrices on a CPU. Packed matrices are no longer parameters. Only the output matrix is
    kept twice, if it is packed or tied.
    """
    for module in [module for block in blocks for module in block.modules()]:
        if isinstance(module, Mixture):
            _join_experts(module)
        if isinstance(module, Head):
            _arrange_head(module, module.weight is getattr(blocks[0], "weight", None), num_rows)
        together = _TOGETHER.get(type(module), ())
        linears = [child for name in together if isinstance(child := getattr(module, name, None), nn.Linear)]
        # An MLP without a gate has nothing to join.
        if len(linears) < len(together):
            linears = []
        if linears:
            _join(module, together, linears, num_rows)
        for name, child in list(module.named_children()):
            if child not in linears and type(child) is nn.Linear and _suits(child.weight):
                product = _product(child.weight, child.bias, num_rows)
                if isinstance(product, ColumnsLinear):
                    child.weight.data = product.columns
                else:
                    setattr(module, name, product)


def _join(module: nn.Module, names: Sequence[str], linears: Sequence[nn.Linear], num_rows: int) -> None:
    is_done = isinstance(module.joined, ColumnsLinear) and not _packs(num_rows)
    if is_done or not all(type(each) is nn.Linear and _suits(each.weight) for each in linears):
        return
    bias = None if linears[0].bias is None else torch.cat([each.bias for each in linears])
    module.joined = product = _product(torch.cat([each.weight for each in linears]), bias, num_rows)
    if isinstance(product, ColumnsLinear):
        # The parameters become views of the joined matrix, so that nothing is kept twice.
        parts = torch.split(product.columns, [each.out_features for each in linears])
        for each, part in zip(linears, parts, strict=True):
            each.weight.data = part
    else:
        for name in names:
            delattr(module, name)


def _join_experts(mixture: Mixture) -> None:
    stacks = mixture.gate, mixture.up, mixture.down
    if mixture.joined is not None or not all(_suits(stack.weight) for stack in stacks):
        return
    mixture.joined = joined = ColumnsExperts(mixture)
    # As in `_join`, the parameters are views of the tensor that is kept.
    gate, up = joined.entering.chunk(2, 2)
    for stack, columns in zip(stacks, (gate, up, joined.leaving), strict=True):
        stack.weight.data = columns.transpose(1, 2)


def _arrange_head(head: Head, is_tied: bool, num_rows: int) -> None:
    is_done = head.product is not None and not (isinstance(head.product, ColumnsLinear) and _packs(num_rows))
    if _suits(head.weight) and not is_done:
        head.product = product = _product(head.weight, None, num_rows)
        # The embedding of a tied head looks up rows.
        if isinstance(product, ColumnsLinear) and not is_tied:
            head.weight.data = product.columns


def _product(weight: Tensor, bias: Tensor | None, num_rows: int) -> nn.Module:
    return PackedLinear(weight, bias, num_rows) if _packs(num_rows) else ColumnsLinear(weight, bias)


def _packs(num_rows: int) -> bool:
    return num_rows > 1 and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _suits(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and not weight.requires_grad
