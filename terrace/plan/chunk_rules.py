"""Rules of `plan.tensor_chunks`: the number of parts of each message, or "fused" with the adjacent matmul."""

from collections.abc import Sequence

from terrace.base.errors import PlanError
from terrace.cluster.cluster import Cluster
from terrace.model.spec import BlockSpec
from terrace.plan.mesh import Mesh
from terrace.plan.plan import FUSED, Plan
from terrace.plan.wire import MessageClass

_INSTEAD = "write a number of parts, tensor_chunks = 4"


def check_tensor_chunks(cluster: Cluster, plan: Plan, blocks: Sequence[BlockSpec]) -> None:
    """Raise `PlanError` for a value without effect, or for messages that cannot be fused with matmuls."""
    value = plan.tensor_chunks
    if plan.num_tensor_parts < 1:
        raise PlanError(f"tensor_chunks = {value}: a message travels in at least 1 part")
    mesh = Mesh.of(cluster, plan)
    # An option without effect is refused rather than ignored.
    if value != 1 and not (plan.sequence_parallel and mesh.total("rows") > 1):
        raise PlanError(
            f"tensor_chunks = {value!r} has no effect: it cuts the messages of sequence parallelism over "
            "tensor rows; leave it out, or set sequence_parallel = true and give the tensor axis rows"
        )
    if plan.fuses_tensor and (why := why_not_fused(cluster, mesh, plan)):
        raise PlanError(f"tensor_chunks = {FUSED!r}: {why}")
    dims = {name for block in blocks for param in block.params for name, _ in param.dims}
    if plan.fuses_tensor and "rank" in dims:
        raise PlanError(
            f"tensor_chunks = {FUSED!r} with adapters: an adapter's product is a part of the sum that is fused with "
            f"another; {_INSTEAD}"
        )


def why_not_fused(cluster: Cluster, mesh: Mesh, plan: Plan) -> str:
    """Why messages over tensor rows cannot be fused with matmuls, and the fix; "" if they can."""
    device, tiers = cluster.device, cluster.tiers
    if device.type != "cuda":
        return f"only CUDA devices have symmetric memory, and device.backend is {device.backend!r}; {_INSTEAD}"
    # Ranks read each other's memory, so they must be on one node or one NVLink fabric.
    innermost = next((index for index, tier in enumerate(tiers) if tier.size > 1), 0)
    if mesh.tiers("rows") != (innermost,):
        there = " and ".join(repr(tiers[tier].name) for tier in mesh.tiers("rows"))
        return (
            f"rows share memory on the innermost tier of several devices, {tiers[innermost].name!r}, and these are on "
            f"{there}; map all rows to it, or {_INSTEAD}"
        )
    wire = plan.wire_format(MessageClass.TENSOR, tiers[innermost].name)
    if wire.name != plan.compute:
        return (
            f"values are read in {plan.compute}, as they are computed, and wire.tensor.{tiers[innermost].name} = "
            f"{wire.name!r} rounds them; leave the format out, or {_INSTEAD}"
        )
    return ""
