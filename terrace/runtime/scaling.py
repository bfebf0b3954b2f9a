"""How a rank converts operands of products to 8-bit floats (terrace.runtime.scaled_products)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from terrace.accelerator import architecture, compute_capability, has_streams, is_rocm, name_of
from terrace.base.errors import PlanError
from terrace.plan.plan import Plan
from terrace.plan.products import ProductFormat, parse_products
from terrace.runtime.scaled_operands import Entered, LastEntered, Operand, operands_of

_ADA, _HOPPER = (8, 9), (9, 0)  # first with 8-bit floats; first whose kernels scale rows


@dataclass(frozen=True)
class Scaling:
    """Scales per row or per matrix, and the 8-bit dtypes of values and gradients, for all matrices of a rank.

    It caches the last quantised input, so that layers with the same input share its codes.
    """

    by_row: bool
    values: torch.dtype = torch.float8_e4m3fn
    gradients: torch.dtype = torch.float8_e5m2
    last: LastEntered = field(default_factory=LastEntered, compare=False, repr=False)

    @staticmethod
    def of(plan: Plan, device: torch.device) -> "Scaling | None":
        """The scaling of a plan's products, or None. Raises `PlanError` if the device does not support it."""
        if plan.products is None:
            return None
        wanted = parse_products(plan.products)
        values, gradients = torch.float8_e4m3fn, torch.float8_e5m2
        if has_streams(device) and _check_gpu(wanted, plan.compute, device):
            values, gradients = torch.float8_e4m3fnuz, torch.float8_e5m2fnuz
        return Scaling(wanted.by_row, values, values if wanted.gradients == "e4m3" else gradients)

    def forget_after(self, block: nn.Module) -> None:
        """Clear the cached input whenever `block` has run: autograd may keep the tensor alive until the backward."""
        block.register_forward_hook(lambda *_: self.last.forget())

    def entered(self, x: Tensor, counts: tuple[int, ...] = ()) -> Entered:
        """x (..., I) as the input of a layer; for a stack, `counts` are the rows of each matrix."""
        return self.last.of(x, counts, lambda: Entered(x, counts, self.values, self.by_row))

    def of_weight(self, matrix: Tensor, scale: Tensor | None) -> Operand:
        """A weight (O, I) as an operand; with a `scale` (1, 1) it is already codes."""
        return Operand(matrix, self.values, self.by_row, scale)

    def of_gradient(self, output_gradient: Tensor, counts: Sequence[int]) -> list[Operand]:
        """Output gradient (N, O) as operands; for a stack, `counts` are the rows of each matrix."""
        return operands_of(output_gradient, counts, self.gradients, self.by_row)


def _check_gpu(wanted: ProductFormat, compute: str, device: torch.device) -> bool:
    """Whether the device uses the "fnuz" formats (AMD's MI300). Raises `PlanError` if it has no such products."""
    asked, name = f"products = {wanted.name!r}", name_of(device)
    if is_rocm():
        instructions = architecture(device)
        if not instructions.startswith(("gfx94", "gfx95")):
            raise PlanError(f"{asked}: {name} ({instructions}) has no 8-bit floats, an MI300 is the first with")
        return instructions.startswith("gfx94")
    capability, least = compute_capability(device), _HOPPER if wanted.by_row else _ADA
    if capability < least:
        of_rows = ", with scales of rows" if wanted.by_row else ""
        raise PlanError(
            f"{asked}: {name} has compute capability {capability[0]}.{capability[1]}, and products of 8-bit "
            f"floats{of_rows} need {least[0]}.{least[1]}: leave products out"
        )
    if wanted.by_row and compute != "bf16":
        raise PlanError(f"{asked} with compute = {compute!r}: products with scales of rows give bf16; use that")
    return False
