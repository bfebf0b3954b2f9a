"""The blocks of one stage, and the cluster restricted to some of its ranks, for the programs that rank pipelines."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from terrace.cluster.cluster import Cluster
from terrace.model.params import ParamSpec
from terrace.model.spec import BlockSpec
from terrace.plan.dims import STACK_DIMS
from terrace.plan.mesh import Mesh
from terrace.planner.numels import Numels
from terrace.planner.task import Task
from terrace.simulate.links import wired


def flat_blocks(task: Task, numels: Numels, mesh: Mesh, blocks: Sequence[int]) -> tuple[BlockSpec, ...]:
    """Blocks as one rank holds them: one parameter each for trainable, frozen, coded and expert parameters.

    A block tied to one of another stage has its own copy of the matrix.
    """
    places, order = {block: index for index, block in enumerate(blocks)}, task.kinds.order
    params: dict[int, tuple[ParamSpec, ...]] = {}
    found = []
    for block in blocks:
        kind = order[block]
        spec = task.kinds.specs[kind]
        if kind not in params:
            copied = (order[owner] for owner in spec.tied_to if owner not in places)
            sizes = numels.by_holders(mesh, (kind, *copied))
            each = [_flat_param(size, *which, mesh.stack_degrees) for which, size in sizes.items() if size]
            params[kind] = tuple(each) or (ParamSpec(name="all", shape=(0,)),)
        here = tuple(places[owner] for owner in spec.tied_to if owner in places)
        found.append(BlockSpec(name=spec.name, params=params[kind], tied_to=here))
    return tuple(found)


def _flat_param(size: int, stacked: bool, trainable: bool, code: str, stacks: tuple[int, int]) -> ParamSpec:
    name = ("stacks" if stacked else "all") if trainable else ("frozen stacks" if stacked else f"frozen{code}")
    if not stacked:
        return ParamSpec(name=name, shape=(size,), trainable=trainable, code=code)
    dims = (*zip(STACK_DIMS, stacks, strict=True), ("hidden", size))
    return ParamSpec(name=name, shape=(*stacks, size), trainable=trainable, dims=dims)


def joined_params(blocks: Sequence[BlockSpec]) -> tuple[ParamSpec, ...]:
    """The parameters of several blocks of `flat_blocks`, merged; none may be a stack."""
    params = [param for block in blocks for param in block.params]
    sizes = {each: sum(param.numel for param in params if param.trainable is each) for each in (True, False)}
    return tuple(_flat_param(size, False, each, "", (1, 1)) for each, size in sizes.items() if size or each)


def whole_blocks(task: Task, kinds: Sequence[int]) -> tuple[BlockSpec, ...]:
    """The blocks of a stage; one tied to a block of another stage has its own copy of the matrix."""
    # The first block of a kind represents all.
    places = {task.kinds.first[kind]: index for index, kind in enumerate(kinds)}
    found = []
    for index, kind in enumerate(kinds):
        spec = task.kinds.specs[kind]
        copied = [param for owner in spec.tied_to if owner not in places for param in task.blocks[owner].params]
        here = tuple(places[owner] for owner in spec.tied_to if owner in places)
        found.append(replace(spec, name=f"{index}.{spec.name}", params=(*spec.params, *copied), tied_to=here))
    return tuple(found)


@lru_cache(maxsize=4096)
def data_cluster(cluster: Cluster, degrees: tuple[int, ...]) -> Cluster:
    """The cluster restricted to `degrees` ranks per tier, on the same links.

    For one tensor, context and pipeline coordinate these are its data ranks.
    """
    tiers = []
    for tier, here in zip(cluster.tiers, degrees, strict=True):
        # With direct links, fewer members use a smaller share of the tier. Other tiers list rates by degree.
        reach = wired(tier, here) if tier.direct else 1.0
        rate = reach * tier.bandwidth_bytes_per_s
        tiers.append(replace(tier, size=here, members=(), bandwidth_bytes_per_s=rate))
    return replace(cluster, tiers=tuple(tiers), around=max(cluster.around, cluster.world_size))
