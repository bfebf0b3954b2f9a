"""8-bit float matmuls in layers: the formats of `plan.products` and their rules.

    fp8             one scale per operand; gradients in e5m2
    fp8:row         one scale per row of the left operand and per column of the right one
    fp8+e4m3        gradients in e4m3 (also fp8:row+e4m3)

The three matmuls of a linear layer, y = x W^T, dx = dy W and dW = dy^T x, take operands rounded to 8 bits
(terrace.runtime.scaled_products). This covers attention, MLPs and experts; embedding, head, routers and norms keep the
compute dtype.

**8-bit gathers.** With one scale per operand and `wire.gather.<tier> = "fp8"` (or `wire.refresh`, if parameters are
never gathered), these matrices have separate flat buffers whose working copies are the 8-bit codes that the matmuls
read. A REFRESH computes them:

    a_m  = max over the ranks that hold a part of matrix m of |compute(master)|  one fp32 number per matrix
    code = e4m3(compute(master) largest / a_m)

so codes and results equal those of a gather in the compute dtype that is quantised afterwards. Refreshes, gathers and
secondary copies carry the codes over all tiers, one byte per element. The numbers a_m are gathered first, on each tier
from the device out to the optimizer's. All other parameters of the block, stacks included, travel in the compute dtype.
With per-row scales, the forward and the input gradient need different codes of a matrix, so there `fp8` is the block
format, as `fp8:128` is for any `products`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from terrace.base.errors import PlanError, did_you_mean
from terrace.cluster.cluster import Device
from terrace.model.params import ParamSpec
from terrace.model.spec import BlockSpec
from terrace.plan.dims import is_layer, is_product_matrix
from terrace.plan.mesh import Mesh
from terrace.plan.plan import Plan, scales_rows
from terrace.plan.slices import slice_blocks

FP8 = "fp8"
NAMES = (FP8, f"{FP8}:row", f"{FP8}+e4m3", f"{FP8}:row+e4m3")
MULTIPLE = 16  # required of every dim of a matrix: matrix units read rows of 16 bytes (torch.nn.functional.scaled_mm)


@dataclass(frozen=True)
class ProductFormat:
    """Format of 8-bit matmuls: `by_row` scales rows, else whole operands; `gradients` is e5m2 or e4m3."""

    name: str
    by_row: bool
    gradients: str


@lru_cache(maxsize=16)
def parse_products(text: str) -> ProductFormat:
    """The format named `text`. Raises `PlanError` for an unknown one."""
    found = re.fullmatch(r"fp8(?::row)?(?:\+(e4m3))?", text)
    if found is None:
        raise PlanError(f"products = {text!r} is no format of products{did_you_mean(text, NAMES)}")
    return ProductFormat(text, scales_rows(text), found[1] or "e5m2")


def is_scaled(blocks: Sequence[BlockSpec], index: int, param: ParamSpec) -> bool:
    """Whether matmuls with a parameter of block `index` use 8 bits: matrices of layers, including expert stacks."""
    return is_layer(blocks, index) and (is_product_matrix(param) or (param.is_stack and param.is_matrix))


def products_words(plan: Plan) -> str:
    """The plan's matmul format, worded as the end of a sentence; "" for the compute dtype."""
    codes = ", whose matrices travel as the codes that these take" if plan.shares_scales else ""
    return f"{'' if plan.products is None else f'; products of layers in {plan.products}'}{codes}"


def why_apart(plan: Plan) -> str:
    """Why matmuls of layers are compiled separately from the rest of a block; "" if they are not."""
    if plan.products is None:
        return ""
    return f"products = {plan.products!r} are the runtime's own, with its own backward"


def refuse_codes(plan: Plan) -> None:
    """Raise `PlanError` if matrices are held as codes, which cannot be handed over to generation."""
    if plan.shares_scales:
        raise PlanError(
            f"products = {plan.products!r} with wire.gather or wire.refresh in 'fp8': matrices are held as codes, "
            "and generation takes parameters in the compute dtype; leave the format out, or write 'fp8:128'"
        )


def check_products(device: Device, mesh: Mesh, plan: Plan, blocks: Sequence[BlockSpec]) -> None:
    """Raise `PlanError` if plan, device or model do not support `plan.products`; `blocks` are whole."""
    if plan.products is None:
        return
    asked = f"products = {plan.products!r}"
    parse_products(plan.products)
    if plan.compute == "fp64":
        raise PlanError(f"{asked} with compute = 'fp64': products of 8 bits are added up in fp32; use 'bf16' or 'fp32'")
    if plan.compute == "fp16":
        raise PlanError(f"{asked} with compute = 'fp16': devices with 8-bit floats have bf16; use that")
    if device.type == "cuda" and FP8 not in device.peak_flops_per_s:
        raise PlanError(
            f"{asked}: device {device.name!r} has no peak_flops_per_s.fp8, so no matrix units for 8-bit floats: leave "
            "products out, or give the peak"
        )
    if plan.tensor_chunks != 1 and not (plan.fuses_tensor and device.software.messages.fuses):
        raise PlanError(
            f"{asked} with tensor_chunks = {plan.tensor_chunks!r}: each part of a product would have another scale; "
            "leave one of them out"
        )
    _check_matrices(asked, mesh, blocks)


def _check_matrices(asked: str, mesh: Mesh, blocks: Sequence[BlockSpec]) -> None:
    chosen, layers = 0, False
    for index, block in enumerate(slice_blocks(blocks, mesh)):
        layers |= is_layer(blocks, index)
        for param in block.params:
            if not is_scaled(blocks, index, param):
                continue
            chosen, name = chosen + 1, f"{block.name}.{param.name}"
            if not param.trainable:
                raise PlanError(
                    f"{asked}: {name} is frozen, as under adapters, and only products with matrices that train take 8 "
                    "bits; leave products out"
                )
            if any(size % MULTIPLE for size in param.part_shape):
                here = f"{' x '.join(map(str, param.part_shape))}{' on a rank' if param.cuts else ''}"
                raise PlanError(
                    f"{asked}: {name} is {here}, and dims must be multiples of {MULTIPLE}: leave products out, or "
                    "change the model's sizes or the tensor axis"
                )
            if param.dims and param.dims[0][0] == "kv_heads" and param.is_replicated_over("rows"):
                raise PlanError(
                    f"{asked}: {mesh.total('rows')} tensor rows are more than the {param.dims[0][1]} key-value heads "
                    f"of {name}, and a rank multiplies with a part of a matrix; use fewer rows"
                )
    if layers and not chosen:
        raise PlanError(f"{asked} has no effect: no layer has a matrix; leave it out")
