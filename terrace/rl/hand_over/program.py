"""The hand-over as a program: the instructions with which a rank sends and receives parameters between two steps.

    RESHARD b0 b4 over system     elements of these blocks that cross the outermost tier
    RESHARD b0 b4 over node       inside it: a rank may forward elements received by the previous one
    RESHARD b1 b5 over system     on another lane, so it overlaps with the previous one

All ranks have the same instructions in the same order: the blocks of a round (`Transition.rounds`) together, tiers from
the outermost inward. An instruction is issued on the lane of its tier and starts after that of the same blocks on the
next outer tier. Messages on a lane are sequential on every rank and wait only for earlier instructions, so they cannot
deadlock.

Programs of other phases (terrace.program.program) are shared by the ranks of a stage. This one is per rank: receivers
and sizes differ on every rank.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from terrace.base.words import counted
from terrace.cluster.cluster import Cluster
from terrace.plan.wire import MessageClass
from terrace.program.message import Message
from terrace.rl.hand_over.moves import Move, crossing
from terrace.rl.hand_over.transition import Transition


class Reshard(NamedTuple):
    """An instruction: ranks exchange elements of `blocks` over one tier."""

    blocks: tuple[int, ...]
    tier: int

    def __str__(self) -> str:
        return " ".join(("RESHARD", *(f"b{block}" for block in self.blocks)))


@dataclass(frozen=True, kw_only=True)
class HandOverProgram:
    """The instructions of one rank, with the (block, move) pairs that it sends or receives in each.

    `names` are the cluster's tier names, innermost first.
    """

    transition: Transition
    rank: int
    names: tuple[str, ...]
    instructions: tuple[Reshard, ...]
    moves: tuple[tuple[tuple[int, Move], ...], ...]

    def ends(self, position: int) -> tuple[dict[int, int], dict[int, int]]:
        """(Bytes sent by target rank, bytes received by source rank) of an instruction."""
        leaving, coming = dict[int, int](), dict[int, int]()
        for block, move in self.moves[position]:
            of, peer = (leaving, move.target) if move.source == self.rank else (coming, move.source)
            of[peer] = of.get(peer, 0) + self.transition.num_bytes(block, move)
        return leaving, coming

    def message(self, position: int) -> Message:
        """The message that this rank sends for an instruction."""
        tier = self.instructions[position].tier
        sent = sum(self.ends(position)[0].values())
        sends = ((tier, sent),) if sent else ()
        return Message(message_class=MessageClass.RESHARD, lane=tier, tiers=(tier,), sends=sends)

    @cached_property
    def sent_bytes(self) -> dict[tuple[MessageClass, str], int]:
        total = Counter[tuple[MessageClass, str]]()
        for position in range(len(self.instructions)):
            message = self.message(position)
            for tier, num_bytes in message.sends:
                total[message.message_class, self.names[tier]] += num_bytes
        return dict(total)


def hand_over_program(cluster: Cluster, transition: Transition, rank: int) -> HandOverProgram:
    """The program of one rank, without computing moves between other ranks."""
    return _programs(cluster, transition, rank, range(rank, rank + 1))[0]


def hand_over_programs(cluster: Cluster, transition: Transition) -> list[HandOverProgram]:
    return _programs(cluster, transition, None, range(cluster.world_size))


def instructions_of(transition: Transition) -> tuple[Reshard, ...]:
    tiers, alike = transition.tiers, transition.alike
    crosses = {first: crossing(cells, tiers) for first, cells in transition.cells.items()}
    return tuple(
        Reshard(blocks, tier)
        for blocks in transition.rounds
        for tier in reversed(range(len(tiers)))
        if any(crosses[alike[block]][tier] for block in blocks)
    )


def _programs(cluster: Cluster, transition: Transition, only: int | None, ranks: range) -> list[HandOverProgram]:
    alike, instructions = transition.alike, instructions_of(transition)
    # First equal block -> (rank, tier) -> moves.
    own = {first: defaultdict[tuple[int, int], list[Move]](list) for first in transition.cells}
    for first, found in own.items():
        for move in transition.moves(first, only):
            for rank in {move.source, move.target}:
                found[rank, move.tier].append(move)
    return [
        HandOverProgram(
            transition=transition,
            rank=rank,
            names=tuple(tier.name for tier in cluster.tiers),
            instructions=instructions,
            moves=tuple(
                tuple((block, move) for block in each.blocks for move in own[alike[block]].get((rank, each.tier), ()))
                for each in instructions
            ),
        )
        for rank in ranks
    ]


def hand_over_text(program: HandOverProgram, blocks: Sequence[str]) -> str:
    """One line per instruction: position, block names, tier, bytes sent and received."""
    lines, width = list[str](), len(str(len(program.instructions)))
    for position, instruction in enumerate(program.instructions):
        names = ", ".join(blocks[block] for block in instruction.blocks)
        leaving, coming = (
            f"{sum(of.values()):,} bytes {word} {counted(len(of), 'rank')}" if of else ""
            for of, word in zip(program.ends(position), ("to", "from"), strict=True)
        )
        said = ", ".join(each for each in (leaving, coming) if each) or "nothing"
        lines.append(f"{position:>{width}}  {instruction!s:<16} {names:<24} {program.names[instruction.tier]}: {said}")
    return "\n".join(lines)
