"""Transition of a model from its training layout to generation replicas: which rank gets which slice, in which moves.

A pure value, equal on all ranks. Equal blocks share one result, stored for the first of them.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import zip_longest
from typing import Literal

from terrace.base.alike import first_equal
from terrace.base.boxes import Box, numel
from terrace.cluster.cluster import Cluster
from terrace.model.spec import BlockSpec
from terrace.plan.flats import FlatParamSpec
from terrace.plan.holdings import flat_boxes
from terrace.plan.mesh import Mesh
from terrace.plan.plan import Plan
from terrace.plan.products import refuse_codes
from terrace.plan.slices import rank_slices, slice_blocks
from terrace.plan.wire import FORMATS
from terrace.rl.hand_over.dealing import Replica, deal, kept_elements, needs_of
from terrace.rl.hand_over.moves import Cell, Move, Parts, Sends, cells_of, exchange_of, moves_of, sends_of

WRITER = 0  # rank that writes weights into a folder


def training_parts(
    flats: Sequence[FlatParamSpec],
    mesh: Mesh,
    stages: Collection[int],
    source: Literal["params", "optimizer"] = "params",
) -> list[Parts]:
    """Boxes of a block's parameters that each rank holds after a step; empty outside `stages`.

    `source` "params": the working copies. "optimizer": the masters, of which a rank has fewer, but which need no
    refresh first; frozen parameters have no masters, so their working copies count.
    """
    found = list[Parts]()
    for rank in range(math.prod(map(math.prod, mesh.degrees))):
        own: dict[str, list[Box]] = {}
        for flat in flats if mesh.stage(rank) in stages else ():
            layout = flat.layout
            tier = layout.optimizer if source == "optimizer" and flat.trainable else layout.params
            part = layout.slice(tier, layout.coordinates(rank), flat.padded)
            slices = partial(rank_slices, mesh=mesh, rank=rank)
            for box in flat_boxes(flat.params, part.start, part.stop, slices):
                own.setdefault(box.param.name, []).append(box.whole)
        found.append(own)
    return found


def generation_slices(block: BlockSpec, rows: int) -> list[Parts]:
    """Boxes of a whole block that each of a replica's `rows` tensor ranks needs.

    Raises `PlanError` if `rows` cannot cut the block (terrace.plan.slices).
    """
    mesh = Mesh.build(1, rows=(rows,))
    (sliced,) = slice_blocks([block], mesh)
    found = list[Parts]()
    for row in range(rows):
        boxes = {
            param.name: tuple((part.start, part.stop) for part in rank_slices(param, mesh, row))
            for param in sliced.params
        }
        found.append({name: [box] for name, box in boxes.items() if numel(box)})
    return found


@dataclass(frozen=True, kw_only=True)
class Apart:
    """Two pools of `cluster`: training ranks start at rank `source`; `target` generates and starts at rank `first`.

    Ranks in the transition are ranks of `cluster`.
    """

    cluster: Cluster
    source: int
    first: int
    target: Cluster


@dataclass(frozen=True, kw_only=True)
class Transition:
    """A hand-over: the ranks of every replica, by slice, and what ranks hold and slices contain of each block.

    A round of `rounds` hands over one block of every stage, so that all ranks send. `alike` is, for each block, the
    first equal one; `holds`, `slices` and `dtypes` are keyed by these.
    """

    tiers: tuple[int, ...]  # sizes of tiers, innermost first
    replicas: tuple[Replica, ...]
    rounds: tuple[tuple[int, ...], ...]
    alike: tuple[int, ...]
    holds: dict[int, list[Parts]]
    slices: dict[int, list[Parts]]
    dtypes: dict[int, dict[str, str]]  # parameter -> dtype of the working copy and of its messages

    @staticmethod
    def of(
        cluster: Cluster,
        plan: Plan,
        blocks: Sequence[BlockSpec],
        flats: Sequence[Sequence[FlatParamSpec]],
        held: Sequence[Collection[int]],
        rows: int,
        source: Literal["params", "optimizer"] = "params",
        apart: Apart | None = None,
    ) -> "Transition":
        """The hand-over to replicas of `rows` tensor ranks, on the same ranks or `apart`.

        `cluster` and `plan` are those of training; `blocks` are whole, `flats` their flat buffers in training, `held`
        the blocks of each stage, `source` the copies that are sent (terrace.plan.holdings). Raises `PlanError` if
        `rows` cannot cut the blocks or do not divide the ranks, and if matrices are held as codes.
        """
        refuse_codes(plan)
        mesh = Mesh.of(cluster, plan)
        around, target = (cluster, cluster) if apart is None else (apart.cluster, apart.target)
        before = 0 if apart is None else apart.source
        after = around.world_size - before - cluster.world_size
        stages = [{stage for stage, own in enumerate(held) if index in own} for index in range(len(blocks))]
        alike = first_equal([(*own, block.params, on) for own, block, on in zip(flats, blocks, stages, strict=True)])
        holds, slices = dict[int, list[Parts]](), dict[int, list[Parts]]()
        dtypes = dict[int, dict[str, str]]()
        kept = [[0] * rows for _ in range(target.world_size)]
        for first in dict.fromkeys(alike):
            own = training_parts(flats[first], mesh, stages[first], source)
            holds[first] = [*({} for _ in range(before)), *own, *({} for _ in range(after))]
            slices[first] = generation_slices(blocks[first], rows)
            dtypes[first] = {param.name: flat.dtype(plan) for flat in flats[first] for param in flat.params}
            times = alike.count(first)
            if apart is None:  # in a separate pool, ranks keep nothing
                for kept_here, more in zip(kept, kept_elements(own, slices[first]), strict=True):
                    kept_here[:] = [old + times * new for old, new in zip(kept_here, more, strict=True)]
        shift = 0 if apart is None else apart.first
        dealt = deal(kept, [tier.size for tier in target.tiers])
        return Transition(
            tiers=tuple(tier.size for tier in around.tiers),
            replicas=tuple(tuple(shift + rank for rank in replica) for replica in dealt),
            rounds=_rounds(stages),
            alike=tuple(alike),
            holds=holds,
            slices=slices,
            dtypes=dtypes,
        )

    @cached_property
    def cells(self) -> dict[int, list[Cell]]:
        """First equal block -> its cells."""
        return {first: cells_of(self.holds[first], self._needs(own)) for first, own in self.slices.items()}

    def moves(self, block: int, rank: int | None = None) -> list[Move]:
        return moves_of(self.cells[self.alike[block]], self.tiers, rank)

    def num_bytes(self, block: int, move: Move) -> int:
        return numel(move.box) * self._element_bytes[self.alike[block]][move.parameter]

    def sends(self, block: int) -> list[Sends]:
        """Tier -> (source, target) -> bytes of a block's moves, without making the moves."""
        first = self.alike[block]
        return sends_of(exchange_of(self.cells[first], self.tiers), self._element_bytes[first], len(self.tiers))

    @cached_property
    def _element_bytes(self) -> dict[int, dict[str, int]]:
        return {
            first: {name: FORMATS[dtype].element_bytes for name, dtype in dtypes.items()}
            for first, dtypes in self.dtypes.items()
        }

    def needs(self, block: int) -> list[Parts]:
        return self._needs(self.slices[self.alike[block]])

    def _needs(self, slices: Sequence[Parts]) -> list[Parts]:
        return needs_of(self.replicas, slices, math.prod(self.tiers))


def to_writer(transition: Transition) -> Transition:
    """The hand-over of whole blocks, one a round, to `WRITER` alone; `transition` is that to replicas of one rank."""
    blocks = range(len(transition.alike))
    return replace(transition, replicas=((WRITER,),), rounds=tuple((block,) for block in blocks))


def _rounds(stages: Sequence[Collection[int]]) -> tuple[tuple[int, ...], ...]:
    """Rounds with one block from each stage; `stages` are the stages that hold each block."""
    by_stage: dict[int, list[int]] = {}
    for block, own in enumerate(stages):
        by_stage.setdefault(min(own), []).append(block)
    turns = zip_longest(*by_stage.values())
    return tuple(tuple(block for block in turn if block is not None) for turn in turns)
