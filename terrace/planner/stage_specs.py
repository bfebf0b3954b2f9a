"""The blocks of one stage, and the cluster as some of its ranks see it, for the programs that rank pipelines."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from terrace.cluster.cluster import Cluster
from terrace.model.spec import BlockSpec, ParamSpec
from terrace.planner.task import Task
from terrace.simulate.links import wired


def flat_params(numel: int, stack: int, experts: tuple[int, int]) -> tuple[ParamSpec, ...]:
    """The parameters of a block as one, and as another the experts, of which a rank has `stack` elements; `experts` are
    the degrees of expert and of rows.
    """
    whole = ParamSpec(name="all", shape=(numel,))
    if not stack:
        return (whole,)
    dims = (("experts", experts[0]), ("expert_intermediate", experts[1]), ("hidden", stack))
    return whole, ParamSpec(name="experts", shape=(*experts, stack), dims=dims)


def whole_blocks(task: Task, kinds: Sequence[int]) -> tuple[BlockSpec, ...]:
    """The blocks of a stage; one that borrows from another stage has its own copy of the matrix."""
    # The first block of a kind stands for all.
    places = {task.kinds.first[kind]: index for index, kind in enumerate(kinds)}
    found = []
    for index, kind in enumerate(kinds):
        spec = task.kinds.specs[kind]
        copied = [param for lender in spec.borrows if lender not in places for param in task.blocks[lender].params]
        here = tuple(places[lender] for lender in spec.borrows if lender in places)
        found.append(replace(spec, name=f"{index}.{spec.name}", params=(*spec.params, *copied), borrows=here))
    return tuple(found)


@lru_cache(maxsize=4096)
def data_cluster(cluster: Cluster, degrees: tuple[int, ...]) -> Cluster:
    """The cluster seen by some of its ranks, `degrees` of them per tier, on the same links.

    Of one tensor, context and pipeline coordinate these are its data ranks.
    """
    tiers = []
    for tier, here in zip(cluster.tiers, degrees, strict=True):
        # Fewer members reach less of a tier that is wired in pairs. Others know what degrees reach.
        reach = wired(tier, here) if tier.direct else 1.0
        tiers.append(replace(tier, size=here, bandwidth_bytes_per_s=reach * tier.bandwidth_bytes_per_s))
    return replace(cluster, tiers=tuple(tiers), around=max(cluster.around, cluster.world_size))
