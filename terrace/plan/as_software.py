"""What a software does in every step, as keys of a plan: the dtype of its reductions, messages fused with products."""

from collections.abc import Mapping
from dataclasses import replace

from terrace.cluster.cluster import Cluster
from terrace.plan.chunk_rules import why_not_fused
from terrace.plan.mesh import Mesh
from terrace.plan.plan import FUSED, Plan
from terrace.plan.wire import GRADIENTS
from terrace.plan.wire_rules import crossing

Wire = Mapping[str, Mapping[str, str]]  # message class -> tier -> format, as in a plan


def reductions(cluster: Cluster, wire: Wire) -> Wire:
    """The formats of `wire` with those in which the cluster's software reduces gradients, where it names none."""
    dtype = cluster.device.software.messages.reduced
    if not dtype:
        return wire
    tiers = {tier.name: dtype for tier in cluster.tiers}
    return {message.value: tiers for message in GRADIENTS} | dict(wire)


def run_as(cluster: Cluster, plan: Plan) -> Plan:
    """The plan as the cluster's software runs it: keys that it leaves out are this software's."""
    form = cluster.device.software.messages
    if form.reduced:
        plan = crossing(cluster, replace(plan, wire=reductions(cluster, plan.wire)))
    mesh = Mesh.of(cluster, plan)
    parted = any(":" in entry for entry in plan.recompute)  # only whole layers are recomputed beside such messages
    if not form.fuses or plan.tensor_chunks != 1 or not plan.sequence_parallel or mesh.total("rows") == 1 or parted:
        return plan
    return plan if why_not_fused(cluster, mesh, plan) else replace(plan, tensor_chunks=FUSED)
