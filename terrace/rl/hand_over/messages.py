"""Messages of a hand-over: what a rank holds and needs of each block, and the execution of its program on lanes.

    for one block of every stage, and then the next, from the outermost tier inward, each tier on its own lane:
        values for a peer -> one buffer -> all sent and received together -> into the slices

An `Exchange` carries tensors over a tier: over a process group of the world (`within`), or over one that joins two
pools, each a world of its own (`between`).
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from terrace.base.boxes import Box, numel, overlap, sizes
from terrace.base.boxes import within as inside
from terrace.comm.collectives import DTYPES
from terrace.comm.lane import DONE, Ticket, behind, make_lane
from terrace.comm.ledger import Ledger
from terrace.comm.pace import UNPACED, Pace
from terrace.plan.holdings import flat_boxes
from terrace.plan.slices import rank_slices
from terrace.plan.wire import MessageClass
from terrace.rl.hand_over.forward_values import forward_values, gather_of, in_dtypes
from terrace.rl.hand_over.moves import Move
from terrace.rl.hand_over.program import HandOverProgram
from terrace.rl.hand_over.transition import Transition

if TYPE_CHECKING:
    from terrace.runtime.engine import Engine
    from terrace.runtime.flat_param import FlatParam

Slices = dict[str, Tensor]  # parameter -> this rank's slice of it
Own = tuple[str, Box, Tensor]  # parameter, a box of it, its values in a flat buffer
Ends = Sequence[tuple[int, Tensor]]  # (peer, values)
Exchange = Callable[[Ends, Ends], None]  # sends, receives: all at once
_Key = tuple[int, torch.dtype]  # a peer, and the dtype of its message


@dataclass(frozen=True, kw_only=True)
class BlockParts:
    """What a rank holds of a block, as (parameter, box, values) from its flat buffers, and the slices that it needs."""

    dtypes: dict[str, torch.dtype]
    own: list[Own]
    boxes: dict[str, Box]
    slices: Slices

    @staticmethod
    def of(transition: Transition, block: int, rank: int, own: list[Own], device: torch.device) -> "BlockParts":
        """The parts of a rank that holds `own`, whose values are copied into the slices that they overlap."""
        dtypes = {name: DTYPES[dtype] for name, dtype in transition.dtypes[transition.alike[block]].items()}
        boxes = {name: parts[0] for name, parts in transition.needs(block)[rank].items()}
        slices = {name: torch.empty(sizes(box), dtype=dtypes[name], device=device) for name, box in boxes.items()}
        for name, box, values in own:
            common = overlap(box, boxes[name]) if name in boxes else None
            if common is not None:
                slices[name][inside(common, boxes[name])] = values[inside(common, box)]
        return BlockParts(dtypes=dtypes, own=own, boxes=boxes, slices=slices)

    def place(self, move: Move) -> Tensor:
        """View of the slice at the box of a move."""
        return self.slices[move.parameter][inside(move.box, self.boxes[move.parameter])]

    def read(self, move: Move) -> Tensor:
        # Values that this rank needs too are in its slice by now; others are in its flat buffers, in one or more boxes.
        need = self.boxes.get(move.parameter)
        if need is not None and overlap(move.box, need) == move.box:
            return self.place(move)
        dtype, device = self.dtypes[move.parameter], self.own[0][2].device
        values = torch.empty(sizes(move.box), dtype=dtype, device=device)
        for name, box, held in self.own:
            common = overlap(box, move.box) if name == move.parameter else None
            if common is not None:
                values[inside(common, move.box)] = held[inside(common, box)]
        return values


def held_boxes(engine: "Engine", block: int, source: Literal["params", "optimizer"] = "params") -> list[Own]:
    """Boxes of a block's parameters that this rank holds, with the values that forwards use."""
    found = list[Own]()
    for flat in engine.state.flats.get(block, ()):
        if source == "params" or not flat.spec.trainable:
            found += boxes_of(engine, flat, flat.part(flat.layout.params).start, forward_values(engine, block, flat))
        else:
            masters, transfer = flat.optimizer.master.to(flat.shard), gather_of(engine, block, flat)
            masters = masters if transfer is None else in_dtypes(masters, transfer)
            found += boxes_of(engine, flat, flat.part(flat.layout.optimizer).start, masters)
    return found


def boxes_of(engine: "Engine", flat: "FlatParam", start: int, held: Tensor) -> list[Own]:
    """The boxes of parameters in `held`, the elements of a flat buffer from `start` on."""
    slices_of, found = partial(rank_slices, mesh=engine.program.mesh, rank=engine.rank), list[Own]()
    for part in flat_boxes(flat.spec.params, start, start + held.numel(), slices_of):
        first = part.start - start
        values = held[first : first + numel(part.padded)].view(sizes(part.padded))
        found.append((part.param.name, part.whole, values[inside(part.real, part.padded)]))
    return found


_PartMove = tuple[BlockParts, Move]


def play(
    program: HandOverProgram,
    parts: Sequence[BlockParts] | Mapping[int, BlockParts],
    exchanges: Mapping[int, Exchange],
    device: torch.device,
    ledger: Ledger,
    pacer: Pace = UNPACED,
    *,
    by_host: bool = False,
) -> None:
    """Run a rank's program over the exchange of each tier, filling the slices of `parts` (by block).

    `by_host` exchanges block the host, so each tier then needs a thread as its lane, or tiers would wait for each
    other.
    """
    lanes = {tier: make_lane(device, by_host=by_host) for tier in exchanges}
    tickets = dict[tuple[int, ...], Ticket]()  # of the newest instruction of blocks
    try:
        for position, (blocks, tier) in enumerate(program.instructions):
            moves = [(parts[block], move) for block, move in program.moves[position]]
            work = partial(_exchange, program, tier, moves, exchanges[tier], device, ledger, pacer)
            tickets[blocks] = lanes[tier].submit(behind(tickets.get(blocks, DONE), work))
        for ticket in tickets.values():
            ticket.wait()
    finally:
        # After a failure a lane may be waiting for a rank that has exited.
        failed = any(lane.failed for lane in lanes.values())
        for lane in lanes.values():
            lane.close(wait=not failed)


def _exchange(
    program: HandOverProgram,
    tier: int,
    moves: Sequence[_PartMove],
    exchange: Exchange,
    device: torch.device,
    ledger: Ledger,
    pacer: Pace,
) -> None:
    """Send and receive `moves` over one tier, as one message per peer and dtype."""
    sends, receives = defaultdict[_Key, list[_PartMove]](list), defaultdict[_Key, list[_PartMove]](list)
    for parts, move in moves:
        dtype = parts.dtypes[move.parameter]
        if move.source == program.rank:
            sends[move.target, dtype].append((parts, move))
        else:
            receives[move.source, dtype].append((parts, move))
    leaving = {key: torch.cat([parts.read(move).reshape(-1) for parts, move in own]) for key, own in sends.items()}
    coming = {
        (peer, dtype): torch.empty(sum(numel(move.box) for _, move in own), dtype=dtype, device=device)
        for (peer, dtype), own in receives.items()
    }
    begin_s = pacer.begin()
    exchange(
        [(peer, values) for (peer, _), values in leaving.items()],
        [(peer, values) for (peer, _), values in coming.items()],
    )
    if leaving:
        sent_bytes = sum(values.nbytes for values in leaving.values())
        ledger.add(MessageClass.RESHARD, program.names[tier], sent_bytes)
        pacer.sent(program.names[tier], sent_bytes, 1, begin_s)
    for key, values in coming.items():
        pieces = torch.split(values, [numel(move.box) for _, move in receives[key]])
        for (parts, move), piece in zip(receives[key], pieces, strict=True):
            parts.place(move)[...] = piece.view(sizes(move.box))


def within(group: dist.ProcessGroup) -> Exchange:
    """Exchange over a group whose ranks are the program's."""

    def exchange(sends: Ends, receives: Ends) -> None:
        # All at once: one after the other, two ranks could each wait for the other's receive.
        operations = [dist.P2POp(dist.irecv, values, peer, group) for peer, values in receives]
        operations += [dist.P2POp(dist.isend, values, peer, group) for peer, values in sends]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()

    return exchange


def between(group: Any, places: Mapping[int, int]) -> Exchange:
    """Exchange through the host over a gloo group of two pools; `places` maps program ranks to group ranks."""

    def exchange(sends: Ends, receives: Ends) -> None:
        leaving = [(peer, values.cpu()) for peer, values in sends]
        coming = [(peer, _on_host(values)) for peer, values in receives]
        works = [group.recv([values], places[peer], 0) for peer, values in coming]
        works += [group.send([values], places[peer], 0) for peer, values in leaving]
        for work in works:
            work.wait()
        for (_, values), (_, arrived) in zip(receives, coming, strict=True):
            if arrived is not values:
                values.copy_(arrived)

    return exchange


def _on_host(values: Tensor) -> Tensor:
    return values if values.is_cpu else torch.empty_like(values, device="cpu")
