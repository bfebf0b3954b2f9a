"""Matrices of a decoder arranged for generation on a CPU.

A pass of one token reads every matrix once and does little with it, so its layout in memory decides how long it takes.
All matrices of a pass, 34 M parameters in fp32 on one core (torch 2.13): with one vector 12.0 ms stored by rows, as a
Linear has them, 9.0 ms stored by columns, 10.8 ms packed by oneDNN; with eight vectors 17.7, 17.1 and 10.6 ms; with 700
vectors 534, 494 and 429 ms. So the matrices lie by columns for one text and packed for several. Sums are added up in
another order than before, so results differ by rounding.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terrace.model.decoder import Head


class PackedLinear(nn.Module):
    """A Linear whose matrix (out, in) is kept in oneDNN's blocks, for products with `num_rows` vectors."""

    def __init__(self, weight: Tensor, bias: Tensor | None, num_rows: int) -> None:
        super().__init__()
        # Torch's compiler packs the matrices of frozen models by the same two operators.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), num_rows)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """The product of x (..., in) and the transposed matrix, (..., out)."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return out


def arrange(blocks: Sequence[nn.Module], num_rows: int) -> None:
    """Arrange the matrices of a decoder's blocks, in place, for tokens of `num_rows` texts at a time.

    The blocks compute the same as before. Only frozen fp32 matrices on a CPU are arranged; packed ones are no
    parameters any more. A second copy is made of the output matrix alone, where it is packed or tied.
    """
    for block in blocks:
        for module in list(block.modules()):
            if isinstance(module, Head) and module.product is None and _suits(module.weight):
                _arrange_head(module, module.weight is getattr(blocks[0], "weight", None), num_rows)
            for name, child in list(module.named_children()):
                if type(child) is nn.Linear and _suits(child.weight):
                    if _packs(num_rows):
                        setattr(module, name, PackedLinear(child.weight, child.bias, num_rows))
                    else:
                        child.weight.data = by_columns(child.weight)


def by_columns(matrix: Tensor) -> Tensor:
    """The same matrix with its columns one after the other in memory."""
    return matrix.detach().t().contiguous().t()


def _arrange_head(head: Head, is_tied: bool, num_rows: int) -> None:
    if _packs(num_rows):
        head.product = PackedLinear(head.weight, None, num_rows)
    elif is_tied:
        # The embedding looks up rows.
        columns = by_columns(head.weight)
        head.product = lambda x: F.linear(x, columns)
    else:
        head.weight.data = by_columns(head.weight)


def _packs(num_rows: int) -> bool:
    return num_rows > 1 and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _suits(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and not weight.requires_grad
