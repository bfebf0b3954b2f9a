"""How the operands of a rank's products become 8-bit floats (terrace.runtime.scaled_products)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from terrace.base.errors import PlanError
from terrace.plan.plan import Plan
from terrace.plan.products import ProductFormat, parse_products
from terrace.runtime.scaled_operands import Entered, LastEntered, Operand, operands_of

_ADA, _HOPPER = (8, 9), (9, 0)  # first with 8-bit floats; first whose kernels scale rows


@dataclass(frozen=True)
class Scaling:
    """Scales of rows or of the whole, and the dtypes of values and of gradients; one object for all matrices of a rank.

    It has the input that was quantised last, so that layers with the same input share its codes.
    """

    by_row: bool
    values: torch.dtype = torch.float8_e4m3fn
    gradients: torch.dtype = torch.float8_e5m2
    last: LastEntered = field(default_factory=LastEntered, compare=False, repr=False)

    @staticmethod
    def of(plan: Plan, device: torch.device) -> "Scaling | None":
        """The scaling of a plan's products, None without; raises `PlanError` where the device has none."""
        if plan.products is None:
            return None
        wanted = parse_products(plan.products)
        values, gradients = torch.float8_e4m3fn, torch.float8_e5m2
        if device.type == "cuda" and _check_gpu(wanted, plan.compute, device):
            values, gradients = torch.float8_e4m3fnuz, torch.float8_e5m2fnuz
        return Scaling(wanted.by_row, values, values if wanted.gradients == "e4m3" else gradients)

    def forget_after(self, block: nn.Module) -> None:
        """Let go of the last input whenever `block` has run: autograd may keep the tensor to the backward."""
        block.register_forward_hook(lambda *_: self.last.forget())

    def entered(self, x: Tensor, counts: tuple[int, ...] | None = None) -> Entered:
        """x (..., I) as the input of a layer, whose rows are split by `counts` if it is a stack."""
        return self.last.of(x, counts, lambda: Entered(x, counts, self.values, self.by_row))

    def of_weight(self, matrix: Tensor, scale: Tensor | None) -> Operand:
        """A matrix (O, I); with a `scale` (1, 1) it is codes already."""
        return Operand(matrix, self.values, self.by_row, scale)

    def of_gradient(self, output_gradient: Tensor, counts: Sequence[int] | None) -> list[Operand]:
        """The gradient (N, O) of a layer's result, rows of each matrix by `counts` if it is a stack."""
        return operands_of(output_gradient, counts, self.gradients, self.by_row)


def _check_gpu(wanted: ProductFormat, compute: str, device: torch.device) -> bool:
    """Whether the device takes the "fnuz" forms (AMD's MI300); raises `PlanError` where it has no such products."""
    asked, found = f"products = {wanted.name!r}", torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        architecture = str(found.gcnArchName).split(":")[0]
        if not architecture.startswith(("gfx94", "gfx95")):
            raise PlanError(f"{asked}: {found.name} ({architecture}) has no 8-bit floats, an MI300 is the first with")
        return architecture.startswith("gfx94")
    capability, least = (found.major, found.minor), _HOPPER if wanted.by_row else _ADA
    if capability < least:
        of_rows = ", with scales of rows" if wanted.by_row else ""
        raise PlanError(
            f"{asked}: {found.name} has compute capability {capability[0]}.{capability[1]}, and products of 8-bit "
            f"floats{of_rows} need {least[0]}.{least[1]}: leave products out"
        )
    if wanted.by_row and compute != "bf16":
        raise PlanError(f"{asked} with compute = {compute!r}: products with scales of rows give bf16; use that")
    return False
