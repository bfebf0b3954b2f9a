"""Model state of one rank without a program, for the search: from the flat buffers of one block of each kind.

What a rank keeps for the whole step is counted by terrace.plan.state_bytes, as in a program's buffers
(terrace.program.buffers). Temporary buffers follow from the order of the blocks, without their visits. A window of
blocks is whole at a time: the parameters of a visit and of the next `prefetch` ones, the gradients of two neighbours,
and with either the matrix that a tied head uses. Updates of whole matrices hold those of two layers.

A tied head on another stage than the embedding has its own copy, and both stages keep the other's gradient.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise, product

from terrace.cluster.cluster import Cluster
from terrace.model.spec import BlockSpec
from terrace.plan.dims import is_layer
from terrace.plan.flats import FlatParamSpec, block_flats, gathered_bytes, stage_layout
from terrace.plan.gaps import largest_part_bytes
from terrace.plan.hops import arena_bytes, gather_buffers, reduce_buffers
from terrace.plan.kept import gradient_bytes, is_final_at_once, ring_bytes, updating_bytes
from terrace.plan.kinds import Kinds
from terrace.plan.layout import Layout, message_lane
from terrace.plan.mesh import Mesh
from terrace.plan.plan import Plan
from terrace.plan.routes import block_hops
from terrace.plan.slices import cut_tables
from terrace.plan.state_bytes import accumulates_in_place, slice_bytes, tie_bytes
from terrace.plan.tables import NO_LOOK_UPS, TableTraffic
from terrace.plan.tensor_traffic import TensorTraffic
from terrace.plan.wire import FORMATS, OF_PARAMETERS, ROUTES, MessageClass

_OF_TRAINABLE = tuple(message for message, route in ROUTES.items() if route.carries != "all")


@dataclass(frozen=True, kw_only=True)
class StageBlocks:
    """The blocks that one rank holds.

    `ties` has (user, owner) pairs of blocks on this stage. `copied` has, by kind, the kinds of blocks of other stages
    that it reads and copies. `tied` are the kinds of blocks that two stages hold.
    """

    order: tuple[int, ...]  # kind of each block, in the order of the model
    ties: tuple[tuple[int, int], ...]
    copied: tuple[tuple[int, ...], ...]
    tied: tuple[int, ...]


@lru_cache(maxsize=4096)
def stage_blocks(kinds: Kinds, held: Sequence[int]) -> StageBlocks:
    place = {block: index for index, block in enumerate(held)}
    order = tuple(kinds.order[block] for block in held)
    pairs = ((index, owner) for index, kind in enumerate(order) for owner in kinds.specs[kind].tied_to)
    away = [
        [owner for owner in spec.tied_to if owner not in place] if kind in order else []
        for kind, spec in enumerate(kinds.specs)
    ]
    # Either of two stages that hold one block sends the other its gradient.
    elsewhere = (spec.tied_to for index, spec in enumerate(kinds.blocks) if spec.tied_to and index not in place)
    passed_on = {owner for ties in elsewhere for owner in ties if owner in place}.union(*away)
    return StageBlocks(
        order=order,
        ties=tuple((index, place[owner]) for index, owner in pairs if owner in place),
        copied=tuple(tuple(kinds.order[owner] for owner in owners) for owners in away),
        tied=tuple({kinds.order[owner] for owner in passed_on}),
    )


@lru_cache(maxsize=16384)
def gathered_whole(
    order: Sequence[int], ties: Sequence[tuple[int, int]], sizes: Sequence[int], prefetch: int
) -> tuple[int, ...]:
    """Most full parameters alive at once while a block of each kind runs; `sizes` is by kind.

    These are the parameters of `prefetch + 1` neighbours and of the blocks that they are tied to. At the last block
    the order of visits reverses, so no further block is gathered.
    """
    blocks, most = [sizes[kind] for kind in order], [0] * len(sizes)
    reach = min(prefetch + 1, len(blocks))
    now = sum(blocks[:reach])
    for start in range(len(blocks) - reach + 1):
        window = range(start, start + reach)
        owners = {owner for user, owner in ties if user in window and owner not in window}
        whole = now + sum(blocks[owner] for owner in owners)
        for kind in set(order[start : start + reach]):
            most[kind] = max(most[kind], whole)
        now += (blocks[start + reach] if start + reach < len(blocks) else 0) - blocks[start]
    return tuple(most)


@lru_cache(maxsize=16384)
def gradients_whole(
    order: Sequence[int], ties: Sequence[tuple[int, int]], sizes: Sequence[int], more_units: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Most full gradients alive at once in the backward of a block of each kind, and of the last block of each kind.

    These are its own, the gradient of the previous block in the backward that has any, which is still being reduced,
    and the gradients of blocks that it, or a later block, is tied to. With `more_units`, an earlier micro-batch's last
    gradient may still be in flight at the first backward.
    """
    blocks, most, last = [sizes[kind] for kind in order], [0] * len(sizes), [0] * len(sizes)
    # The previous micro-batch's last reduced gradient is that of the first block with one.
    befores, before = [0] * len(blocks), next(filter(None, blocks), 0) if more_units else 0
    for block in reversed(range(len(blocks))):
        befores[block] = before
        before = blocks[block] or before
    for block, kind in enumerate(order):
        owners = {owner for user, owner in ties if owner < block <= user}
        last[kind] = blocks[block] + befores[block] + sum(blocks[owner] for owner in owners)
        most[kind] = max(most[kind], last[kind])
    return tuple(most), tuple(last)


def regathers(stage: StageBlocks, prefetch: int, more_units: bool) -> tuple[bool, bool]:
    """Whether some block is gathered a second time for a forward, and whether one is for a backward.

    A block stays gathered between visits that are at most `max(1, prefetch)` apart (terrace.plan.residency). It is
    visited with each block tied to it, in the forward and in the backward. With `more_units` another unit follows.
    """
    last, reach = len(stage.order) - 1, max(1, prefetch)
    readers: dict[int, list[int]] = {block: [block] for block in range(len(stage.order))}
    for user, owner in sorted(stage.ties):
        readers[owner].append(user)
    apart = any(later - before > reach for each in readers.values() for before, later in pairwise(each))
    turns = any(2 * (last - each[-1]) + 1 > reach for each in readers.values())
    return apart or (more_units and 2 * last + 1 > reach), apart or turns


@dataclass(frozen=True, kw_only=True)
class States:
    """Bytes of model state: `steady` by category for the whole step, full parameters and gradients by kind.

    `last_gradients` are those in the backward of the last block of each kind, when the most activations are kept: the
    next block in the order of the model may be of another kind. `updating` is what updates take on top of `steady`, by
    category; their buffers replace those of a tie. `accumulated` are the gradients kept below the device that are on it
    in a backward, by kind.
    """

    steady: dict[str, int]
    gathered: tuple[int, ...]
    gradients: tuple[int, ...]
    last_gradients: tuple[int, ...]
    updating: Mapping[str, int]
    accumulated: tuple[int, ...]


def model_states(cluster: Cluster, plan: Plan, kinds: Kinds, stage: StageBlocks, num_micros: int) -> States:
    """Model state of a rank that holds the blocks of `stage`.

    Raises `PlanError` where the tensor axis or the ranks of experts do not divide the model.
    """
    mesh, item = Mesh.of(cluster, plan), FORMATS[plan.compute].element_bytes
    specs = kinds.sliced({"columns": mesh.total("columns"), "rows": mesh.total("rows")}, mesh.stack_degrees)
    if mesh.tables is not None:
        specs = cut_tables(specs, mesh.tables.total("expert"))
    layers = [is_layer(kinds.blocks, first) for first in kinds.first]
    flats = block_flats(cluster, plan, specs, layers=layers)
    # A block with the copies that it reads.
    parts = [[*own, *chain(*(flats[of] for of in copied))] for own, copied in zip(flats, stage.copied, strict=True)]
    steady = dict.fromkeys(("params", "secondary", "grads", "optimizer", "outer", "feedback", "buffers"), 0)
    for kind in set(stage.order):
        count = stage.order.count(kind)
        for category, size in slice_bytes(plan, parts[kind]).items():
            steady[category] += count * size
    more_units = num_micros > plan.unit
    held = [flat for kind in set(stage.order) for flat in parts[kind]]
    tie = max((tie_bytes([flat], plan.sums) for kind in stage.tied for flat in flats[kind]), default=0)
    lanes = _lanes(stage_layout(cluster, plan), plan, held, *regathers(stage, plan.prefetch, more_units))
    held_parts = [parts[kind] for kind in stage.order]
    steady["buffers"] = sum(lanes.values()) + tie + ring_bytes(plan, held_parts)
    accumulated = accumulated_whole(plan, stage, parts)
    # Only gradients that are reduced need a whole buffer.
    buffered = tuple(
        sum(flat.padded for flat in each if flat.trainable and not accumulates_in_place(flat.layout)) * item
        for each in parts
    )
    matrices = [sum(flat.gathered_numel for flat in each) for each in parts]
    directions = (matrices[kind] for kind in stage.order if matrices[kind])
    gradients, last_gradients = gradients_whole(stage.order, stage.ties, buffered, more_units)
    return States(
        steady=steady,
        gathered=gathered_whole(
            stage.order, stage.ties, tuple(gathered_bytes(plan, each) for each in parts), plan.prefetch
        ),
        gradients=gradients,
        last_gradients=last_gradients,
        # A layer is gathered while the one before it is updated.
        updating={
            "buffers": max(0, max(map(sum, pairwise((*directions, 0))), default=0) * item - tie),
            "params": updating_bytes(plan, held_parts),
            "grads": read_ahead_bytes(plan, held_parts),
        },
        accumulated=accumulated,
    )


def accumulated_whole(plan: Plan, stage: StageBlocks, parts: Sequence[Sequence[FlatParamSpec]]) -> tuple[int, ...]:
    """Most bytes of gradients kept below the device that are on it in the backward of a block, for each kind.

    They are the gradients of the block, of blocks before it that are being reduced or written, and of blocks that it or
    a later block is tied to. `parts` are the flat buffers of each kind.
    """
    most, before = [0] * len(parts), list[int]()
    sizes = [gradient_bytes(plan, flats) for flats in parts]
    for block, kind in reversed(list(enumerate(stage.order)) if any(sizes) else []):
        owners = {owner for user, owner in stage.ties if owner < block <= user}
        here = sizes[kind] + sum(before) + sum(sizes[stage.order[owner]] for owner in owners)
        most[kind] = max(most[kind], here)
        before = [*before, sizes[kind]][-1 if is_final_at_once(parts[kind]) else -2 :]
    return tuple(most)


def read_ahead_bytes(plan: Plan, blocks: Sequence[Sequence[FlatParamSpec]]) -> int:
    """Most bytes of gradients kept below the device that are on it in updates.

    They are the gradients of a block and of the next one; of three blocks where ORTHOGONALISE reads one update ahead.
    """
    sizes = [gradient_bytes(plan, flats) for flats in blocks]
    order = [block for block, size in enumerate(sizes) if size]
    whole = [block for block in order if any(flat.num_orthogonal for flat in blocks[block])]
    ahead = [sizes[block] for block in (*whole[:1], *(each for each in order if each not in whole[:1]))]
    reach = 3 if whole else 2
    return max(sum(ahead[start : start + reach]) for start in range(max(1, len(ahead))))


def _lanes(
    together: Layout, plan: Plan, flats: Sequence[FlatParamSpec], more_units: bool, for_backward: bool
) -> dict[int, int]:
    """Bytes of message buffers on each lane: those of its largest message over `flats`."""
    sources: list[tuple[MessageClass, int | None]] = [(message, None) for message in _OF_TRAINABLE]
    sources.append((MessageClass.GATHER, together.params))
    sources += [(MessageClass.GATHER_BACKWARD, together.params_backward)] if for_backward else []
    sources += [(MessageClass.GATHER, together.params_backward)] if more_units else []
    # Bytes grow with the size within one layout.
    largest: dict[tuple[Layout, bool, bool, bool], FlatParamSpec] = {}
    for flat in flats:
        key = (flat.layout, flat.trainable, flat.num_orthogonal > 0, flat.is_coded)
        largest[key] = max(largest.get(key, flat), flat, key=lambda each: each.padded)
    lanes: dict[int, int] = defaultdict(int)
    for (message, source), flat in product(sources, largest.values()):
        # Codes are sent in place, and the preceding scales are negligible.
        if flat.travels_in(message) and not (flat.is_coded and message in OF_PARAMETERS):
            reduction, gathering = block_hops(flat.layout, plan, message, flat.padded, source)
            sizes = [reduce_buffers(plan, message, reduction), gather_buffers(plan, message, gathering)]
            if message is MessageClass.ORTHOGONALISE:
                _, gathering = block_hops(flat.layout.across, plan, message, flat.gathered_numel)
                sizes.append(gather_buffers(plan, message, gathering))
            part = largest_part_bytes(plan, flat.layout, message, flat.padded)
            lane = message_lane(together, message, source)
            lanes[lane] = max(lanes[lane], part, *map(arena_bytes, sizes))
    return lanes


def look_ups_of(cluster: Cluster, plan: Plan, blocks: Sequence[BlockSpec], sequence: int) -> TableTraffic:
    """The look-ups of whole or sliced `blocks` under a plan; `NO_LOOK_UPS` if none has a spread table."""
    tiers, mesh = [tier.name for tier in cluster.tiers], Mesh.of(cluster, plan)
    if mesh.tables is None:
        return NO_LOOK_UPS
    tensor = TensorTraffic.of(mesh, tiers, plan, sequence)
    found = (TableTraffic.of(tensor, block) for block in blocks)
    return next((each for each in found if each is not NO_LOOK_UPS), NO_LOOK_UPS)
