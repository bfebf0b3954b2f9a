"""Sharding layout that follows from a cluster and a plan: spans, slices, padded sizes.

Every flat buffer is cut hierarchically, the innermost tier first. With data degrees n_0, n_1, ... and a rank at
coordinates c_0, c_1, ..., the slice of a state placed on tier t starts at

    sum over i <= t of  c_i * P / (n_0 ... n_i)        and has  P / (n_0 ... n_t)  elements,

where P is the padded size. The slice of an outer tier lies inside the slice of every inner one, and all are contiguous.
So a reduce-scatter from the innermost tier outward, or a gather from the outermost inward, needs no permuting copy, and
each outer link carries only what inner tiers cannot provide.

A tier of degree 1 cuts nothing: a state placed there has the slice of the next inner tier. `Layout.of` therefore
settles each state on the innermost tier with the same slice (with one rank: the device). Only `terrace.plan.validate`,
whose messages quote the plan, reads the placements as written.
"""

import sys
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING

from terrace.model.base_formats import BASE_FORMATS
from terrace.plan.mesh import HOLDERS, ORDER, TENSOR, Mesh
from terrace.plan.update import parse_update
from terrace.plan.wire import ROUTES, MessageClass

if TYPE_CHECKING:
    from terrace.cluster.cluster import Cluster
    from terrace.plan.plan import Plan

INSIDE = -1  # the lane of messages inside a block, which run as part of compute
DEVICE = -1  # the index of the implicit innermost tier


@dataclass(frozen=True)
class Layout:
    """Degrees per tier over which states are sharded, and the tier index of each state (`DEVICE`: replicated).

    The degrees count ranks that hold the same slice of a block, that is, ranks that differ only on `axes` (axes of
    degree 1 are left out).
    """

    tiers: tuple[str, ...]
    degrees: tuple[int, ...]
    axes: tuple[str, ...]
    params: int
    params_backward: int  # equals `params` when there is no secondary copy
    grads: int
    optimizer: int
    mesh: Mesh | None = None  # None if the layout is used for sizes only
    orthogonalises: bool = False  # whether the optimizer needs whole matrices
    island: int = sys.maxsize  # the outermost tier that is synchronised every step
    params_below: bool = False  # whether a rank's parameters are kept below its device (terrace.plan.keep)
    grads_below: bool = False  # whether its accumulated gradients are
    code: str = ""  # format of frozen matrices, which every gather decodes (terrace.model.base_formats); "": none

    @staticmethod
    def of(cluster: "Cluster", plan: "Plan", axes: Collection[str] = HOLDERS, mesh: Mesh | None = None) -> "Layout":
        """The settled layout of states that the ranks of `axes` shard; `mesh` defaults to the plan's.

        Raises `ClusterError` for an unknown tier.
        """
        return Layout.written(cluster, plan, axes, mesh).settled()

    @staticmethod
    def written(
        cluster: "Cluster", plan: "Plan", axes: Collection[str] = HOLDERS, mesh: Mesh | None = None
    ) -> "Layout":
        """Like `of`, but with every state on the tier that the plan names."""
        params = cluster.index(plan.params)
        mesh = mesh or Mesh.of(cluster, plan)
        # Axes of degree 1 are dropped, so that equal layouts compare equal.
        axes = tuple(axis for axis in ORDER if axis in axes and mesh.total(axis) > 1)
        return Layout(
            tiers=tuple(tier.name for tier in cluster.tiers),
            degrees=mesh.group(*axes),
            axes=axes,
            mesh=mesh,
            orthogonalises=parse_update(plan.update).takes_whole,
            params=params,
            params_backward=params if plan.params_backward is None else cluster.index(plan.params_backward),
            grads=cluster.index(plan.grads),
            optimizer=cluster.index(plan.optimizer),
            island=plan.outer.tier_between(cluster) - 1,
            params_below=plan.keep.params_below,
            grads_below=plan.keep.grads_below,
        )

    def settled(self) -> "Layout":
        """The layout with every state moved to the innermost tier that gives each rank the same slice."""
        return replace(
            self,
            params=self._settled(self.params),
            params_backward=self._settled(self.params_backward),
            grads=self._settled(self.grads),
            optimizer=self._settled(self.optimizer),
        )

    def whole(self) -> "Layout":
        """The layout of the same ranks with every state replicated, and on the device."""
        return replace(
            self,
            params=DEVICE,
            params_backward=DEVICE,
            grads=DEVICE,
            optimizer=DEVICE,
            params_below=False,
            grads_below=False,
        )

    def _settled(self, tier: int) -> int:
        while tier > DEVICE and self.degrees[tier] == 1:
            tier -= 1
        return tier

    @property
    def joined(self) -> tuple[Mesh | None, tuple[str, ...]]:
        """Key of the joined ranks: layouts with an equal mesh and equal axes join the same ranks."""
        return self.mesh, self.axes

    @property
    def gathers(self) -> bool:
        """Whether parameters are gathered before use: from other ranks, from below the device, or from codes."""
        return self.params != DEVICE or self.params_below or self.code != ""

    @property
    def frees(self) -> bool:
        """Whether gathered parameters are freed after use; a whole secondary copy is gathered once a step and stays."""
        return self.params_backward != DEVICE or self.params_below or self.code != ""

    @cached_property
    def has_secondary(self) -> bool:
        """Whether a secondary copy of the parameters exists (ZeRO++'s hierarchical partition)."""
        return self.span(self.params_backward) != self.span(self.params)

    @property
    def outermost(self) -> int:
        """Index of the last tier."""
        return len(self.tiers) - 1

    @property
    def inside(self) -> range:
        """Tiers that are synchronised every step: all of them, unless there are several islands."""
        return range(self.tier_of("island") + 1)

    @property
    def outside(self) -> range:
        """Tiers that only exchanges between islands cross."""
        return range(self.inside.stop, len(self.tiers))

    @cached_property
    def num_islands(self) -> int:
        """Number of islands: groups of ranks that synchronise every step, and with other groups less often."""
        return self.degree // self.span(self.tier_of("island"))

    @cached_property
    def across(self) -> "Layout":
        """The layout of the ranks that hold the other parts of matrices that the tensor axis cuts.

        Each has one part of them, so that a gather from its optimizer tier makes them whole. Joins one rank alone if
        nothing is cut.
        """
        axes = tuple(axis for axis in TENSOR if axis not in self.axes and self.ranks.total(axis) > 1)
        cut = replace(self.whole(), degrees=self.ranks.group(*axes), axes=axes, optimizer=self.outermost)
        return cut.settled()

    def island_of(self, coordinates: tuple[int, ...]) -> int:
        """Index of the island of the rank at `coordinates`; the innermost tier outside islands varies fastest."""
        number = 0
        for degree, place in reversed(list(zip(self.degrees, coordinates, strict=True))[self.inside.stop :]):
            number = number * degree + place
        return number

    @cached_property
    def degree(self) -> int:
        """Number of ranks that the layout joins, which hold the same slice of a block."""
        return self.span(self.outermost)

    @property
    def ranks(self) -> Mesh:
        assert self.mesh is not None, "only a layout of a plan knows its ranks"
        return self.mesh

    @property
    def data_degree(self) -> int:
        """Number of ranks with different samples; context ranks share a sample."""
        return self.ranks.total("data")

    def data_rank(self, rank: int) -> int:
        """Index of `rank`'s share among the `data_degree` shares of a batch; the innermost tier varies fastest."""
        return self.ranks.group_rank(rank, ("data",))

    @cached_property
    def _spans(self) -> tuple[int, ...]:
        return (*accumulate(self.degrees, mul), 1)  # `DEVICE` reads the last one

    def span(self, index: int) -> int:
        """Number of ranks over which a state placed on tier `index` is sharded."""
        return self._spans[index]

    def tier_of(self, state: str) -> int:
        """Index of the tier that holds a state named in `terrace.plan.wire.Route`."""
        return DEVICE if state == "device" else min(int(getattr(self, state)), self.outermost)

    def route(self, message: MessageClass) -> range:
        """Indexes of the tiers that a message class crosses, including tiers without peers."""
        # Control messages join all ranks of an island.
        if message is MessageClass.CONTROL:
            return self.inside
        # Messages inside blocks and between stages do not move between tiers of states.
        route = ROUTES.get(message)
        if route is None or (route.carries == "orthogonal" and not self.orthogonalises):
            return range(0)
        if route.carries == "change" and self.num_islands == 1:
            return range(0)
        # A gather is written (outer, inner); reversed, it reads like a reduction.
        ends = [*map(self.tier_of, (*(route.reduction or ()), *(route.gathering or ())))]
        if route.carries == "orthogonal" and self.mesh is not None:  # and then over the ranks that cut matrices
            meshes = self.mesh, self.mesh.stacks
            ends += [tier for mesh in meshes for axis in TENSOR for tier in mesh.tiers(axis)]
        return range(min(ends) + 1, max(ends) + 1)

    def padded(self, numel: int) -> int:
        """`numel` rounded up so that every tier divides it, into whole blocks of codes; the padding is stored too."""
        unit = self.degree * (BASE_FORMATS[self.code].block if self.code else 1)
        return -(-numel // unit) * unit

    def coordinates(self, rank: int) -> tuple[int, ...]:
        return self.ranks.coordinates(rank, self.axes)

    def peers(self, rank: int, tier: int) -> tuple[int, ...]:
        """Joined ranks that differ from `rank` only on `tier`, itself included, in tier order."""
        return self.ranks.peers(rank, tier, self.axes)

    def slice(self, index: int, coordinates: tuple[int, ...], padded_numel: int) -> slice:
        """A rank's slice of a flat buffer for a state placed on tier `index`."""
        start, length = 0, padded_numel
        # Each tier cuts the slice of the tier inside it, so slices nest.
        for degree, here in zip(self.degrees[: index + 1], coordinates, strict=False):
            length //= degree
            start += here * length
        return slice(start, start + length)


def state_layout(cluster: "Cluster", plan: "Plan", shared: Collection[str] = (), stacked: bool = False) -> Layout:
    """The layout of states: data and context ranks hold the same slice of a block, so they shard its states.

    `shared` names tensor axes that do not cut the parameters and so shard the states too. If `stacked`, the ranks are
    those with the same experts.
    """
    mesh = Mesh.of(cluster, plan).of_stacks(stacked)
    layout = Layout.of(cluster, plan, (*HOLDERS, *shared), mesh)
    return replace(layout, mesh=None)  # so that equal layouts compare equal under any mesh


def island_ranks(world: Layout, rank: int) -> list[int]:
    """Sorted ranks of `rank`'s island; `world` is a layout that joins all ranks."""
    found = [rank]
    for tier in world.inside:
        found = [peer for each in found for peer in world.peers(each, tier)]
    return sorted(found)


def message_tiers(
    layout: Layout, message: MessageClass, source: int | None = None, *, coded: bool = False
) -> tuple[int, ...]:
    """Tiers on which a block's message has peers, innermost first.

    `layout` joins all ranks that hold some part of a block. `source` overrides the tier that a gather of parameters
    starts from. `coded`: the block has matrices held as codes.
    """
    # A gather from the secondary copy crosses only the tiers up to the copy's own.
    route = layout.route(message) if source is None else range(source + 1)
    if coded and message is MessageClass.REFRESH:
        route = range(layout.optimizer + 1)  # the matrices' largest magnitudes are reduced first
    return tuple(tier for tier in route if layout.degrees[tier] > 1)


def message_lane(layout: Layout, message: MessageClass, source: int | None = None, *, coded: bool = False) -> int:
    """Lane of a message: the outermost tier it crosses, 0 if it is local.

    So messages on fast inner tiers never queue behind a message on a slow outer one.
    """
    return max(message_tiers(layout, message, source, coded=coded), default=0)
