"""Untimed simulation of the ranks of a step, to find deadlocks.

A collective runs when it is next on every member's lane; a pass that reads a message runs once that message was sent.
Each rank has a single lane, passes included. This is stricter than the runtime, so an order that completes here cannot
deadlock there.
"""

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from terrace.base.alike import once_each
from terrace.plan.layout import Layout
from terrace.program.gaps import Issued
from terrace.program.instruction import PASSES, Instruction, Op
from terrace.program.program import Program


@dataclass(frozen=True, slots=True)
class Item:
    """One collective on a tier, or one message sent or read."""

    instruction: Instruction
    position: int  # of the issuing instruction in the program; for a part in a gap, of the pass
    tier: int = -1  # of a collective
    ranks: Layout | None = None  # of a collective; None for a TIE or a message
    number: int = 0  # index among the collectives of its instruction
    message: Instruction | None = None  # the message sent or read: a SEND, or the RECV of a message that a pass reads


def _items(program: Program) -> list[Item]:
    # In the order of a single lane.
    items: list[Item] = []
    issued = Issued(program)
    received: dict[tuple[bool, int, int], Instruction] = {}
    for position, instruction in enumerate(program.instructions):
        if instruction.op is Op.SEND:
            items.append(Item(instruction, position, message=instruction))
        elif instruction.op is Op.TIE:
            items.append(Item(instruction, position))
        elif instruction.op is Op.RECV:
            # A RECV does not block; the pass that reads its message does.
            received[instruction.backward, instruction.block, instruction.micro] = instruction
        elif instruction.op in PASSES:
            backward = instruction.op is not Op.FORWARD
            # A forward reads the output of the previous block, a backward the gradient of the next one.
            key = (backward, instruction.block + (1 if backward else -1), instruction.micro)
            if instruction.op is not Op.BACKWARD_WEIGHT and key in received:
                items.append(Item(instruction, position, message=received.pop(key)))
        # A collective over several tiers synchronises with its peers on each tier in turn, a pass in each message.
        for number, (of, tier, ranks) in enumerate(issued.at(instruction)):
            items.append(Item(of, position, tier, ranks, number))
    return items


class RankPlay:
    def __init__(self, programs: Mapping[int, Program]) -> None:
        self.programs = programs
        self.items = dict(zip(programs, once_each(_items, list(programs.values())), strict=True))
        self.heads = dict.fromkeys(self.items, 0)
        self.limits = {rank: len(items) for rank, items in self.items.items()}
        self.sent: set[tuple[int, int, bool, int, int]] = set()
        self.readers: dict[tuple[int, int, bool, int, int], int] = {}
        # (members, op, block, micro-batch and number inside a pass) of a collective or TIE -> members that have arrived
        self.there: dict[tuple[tuple[int, ...], Op, int, int, int], set[int]] = defaultdict(set)

    def run(self, cuts: Mapping[int, int] | None = None) -> None:
        """Advance all ranks until none can continue, no rank beyond its position in `cuts`."""
        for rank, items in self.items.items():
            before = len(items) if cuts is None else bisect_left(items, cuts[rank], key=lambda item: item.position)
            self.limits[rank] = before
        moved = deque(self.items)
        while moved:
            moved.extend(self._step(moved.popleft()))

    def _step(self, rank: int) -> Iterator[int]:
        """Advance one rank as far as possible; yields ranks that this unblocks."""
        while self.heads[rank] < self.limits[rank]:
            item = self.items[rank][self.heads[rank]]
            if item.message is None:
                group, now = self.group(rank, item), item.instruction
                inside = (now.micro, item.number) if now.op in PASSES else (-1, 0)
                meeting = (group, now.op, now.block, *inside)
                self.there[meeting].add(rank)
                # Members without a program here (if only some ranks are verified) are not waited for.
                if self.there[meeting] < set(group) & self.programs.keys():
                    return
                self.there.pop(meeting)
                # The last member to arrive advances all of them.
                for member in group:
                    if member in self.heads:
                        self.heads[member] += 1
                        if member != rank:
                            yield member
                continue
            key = self.key(rank, item.message)
            if item.message.op is Op.SEND:
                self.sent.add(key)
                if key in self.readers:
                    yield self.readers.pop(key)
            elif key not in self.sent:
                # The sender unblocks this rank later.
                self.readers[key] = rank
                return
            self.heads[rank] += 1

    def position(self, rank: int) -> int:
        """Position of a rank's next item; the number of instructions if there is none."""
        head, items = self.heads[rank], self.items[rank]
        return items[head].position if head < len(items) else len(self.programs[rank].instructions)

    def group(self, rank: int, item: Item) -> tuple[int, ...]:
        if item.ranks is None:  # a TIE is between two
            return tuple(sorted((rank, self.programs[rank].peer(rank, item.instruction))))
        return item.ranks.peers(rank, item.tier)

    def key(self, rank: int, message: Instruction) -> tuple[int, int, bool, int, int]:
        """(Sender, receiver, whether it is a gradient, block, micro-batch) of a message."""
        other = self.programs[rank].peer(rank, message)
        ends = (rank, other) if message.op is Op.SEND else (other, rank)
        return (*ends, message.backward, message.block, message.micro)

    def waits_for(self, rank: int) -> tuple[Instruction, int]:
        """(Instruction in which a rank waits, rank that it waits for)."""
        item = self.items[rank][self.heads[rank]]
        if item.message is not None:
            return item.instruction, self.key(rank, item.message)[0]
        # Any absent member explains the wait; report the first.
        absent = [peer for peer in self.group(rank, item) if peer in self.heads and not self._is_at(peer, item)]
        return item.instruction, absent[0]

    def _is_at(self, rank: int, item: Item) -> bool:
        return self.heads[rank] < len(self.items[rank]) and self.items[rank][self.heads[rank]] == item
