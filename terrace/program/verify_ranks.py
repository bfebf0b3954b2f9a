"""Checks between ranks.

 1. The members of every group issue the same collectives in the same order.
 2. Every message that one rank sends, the other receives, in the same order.
 3. Ranks do not wait in a circle. A rank sends its collectives in order, tier after tier, and a pass waits for its
    input from another stage, so orders that agree inside every group can still block each other: across tiers, and
    where groups of data ranks and of stages interleave. The step is played: a collective happens when it is next on
    every member's lane, a pass that reads a message once that message was sent. Each rank is played with a single lane,
    passes included: stricter than the runtime, so an order that passes here cannot block there.

Ranks that share one Program object agree by construction; a world of one class costs one verification.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from terrace.base.alike import first_equal, once_each
from terrace.base.errors import ProgramError
from terrace.plan.layout import Layout
from terrace.program.instruction import COLLECTIVES, PASSES, Instruction, Op
from terrace.program.program import Program
from terrace.program.verify import verify


@dataclass(frozen=True, slots=True)
class _Item:
    """One collective on a tier, or one message sent or read."""

    instruction: Instruction
    tier: int = -1  # of a collective
    message: Instruction | None = None  # sent or read, as the sender's SEND with the other stage as peer


def verify_ranks(programs: Mapping[int, Program]) -> None:
    """Check the program of every rank, and the ranks against each other; raises `ProgramError`."""
    # Each distinct program once, for the first rank that has it.
    firsts = set(first_equal(list(programs.values())))
    for index, (rank, program) in enumerate(programs.items()):
        if index in firsts:
            verify(program, rank)
    if len(firsts) > 1:
        _check_collectives(programs)
        _check_messages(programs)
        _play(programs)


def _check_collectives(programs: Mapping[int, Program]) -> None:
    orders: dict[tuple[object, ...], tuple[int, list[Instruction]]] = {}
    of_ranks = once_each(_collectives_by_tier, list(programs.values()))
    for rank, program, by_tier in zip(programs, programs.values(), of_ranks, strict=True):
        for (tier, among), sequence in by_tier.items():
            # The peers alone do not name a group: two axes may join the same ranks.
            group = (tier, among.axes, among.peers(rank, tier))
            first_rank, expected = orders.setdefault(group, (rank, sequence))
            # Identity first: most ranks of a group share one list.
            if sequence is not expected and sequence != expected:
                _fail_order(program.layout.tiers[tier], first_rank, expected, rank, sequence)


def _collectives_by_tier(program: Program) -> dict[tuple[int, Layout], list[Instruction]]:
    by_tier: dict[tuple[int, Layout], list[Instruction]] = defaultdict(list)
    for instruction in program.instructions:
        if instruction.op in COLLECTIVES:
            message = program.message(instruction)
            assert message.ranks is not None, f"{instruction} is among ranks"
            for tier in sorted(message.tiers):
                by_tier[tier, message.ranks].append(instruction)
    return by_tier


def _fail_order(tier: str, rank_a: int, order_a: list[Instruction], rank_b: int, order_b: list[Instruction]) -> None:
    at = next(
        (i for i, (a, b) in enumerate(zip(order_a, order_b, strict=False)) if a != b),
        min(len(order_a), len(order_b)),
    )
    what_a = f"`{order_a[at]}`" if at < len(order_a) else "nothing"
    what_b = f"`{order_b[at]}`" if at < len(order_b) else "nothing"
    raise ProgramError(
        f"ranks {rank_a} and {rank_b} share a group on tier {tier!r} but disagree on its collective number {at}: "
        f"rank {rank_a} issues {what_a}, rank {rank_b} issues {what_b}; every member must issue the same order"
    )


def _items(program: Program) -> list[_Item]:
    # In the order of a single lane.
    items: list[_Item] = []
    received: dict[tuple[bool, int, int], Instruction] = {}
    for instruction in program.instructions:
        if instruction.op in COLLECTIVES:
            # A collective over several tiers meets its peers on each tier in turn.
            items += [_Item(instruction, tier) for tier in program.message(instruction).tiers]
        elif instruction.op is Op.SEND:
            items.append(_Item(instruction, message=instruction))
        elif instruction.op is Op.TIE:
            items.append(_Item(instruction))
        elif instruction.op is Op.RECV:
            # A RECV does not block; the pass that reads its message does.
            received[instruction.backward, instruction.block, instruction.micro] = instruction
        elif instruction.op in PASSES:
            backward = instruction.op is not Op.FORWARD
            # A forward reads the block before it; a backward, the gradient of the block after it.
            key = (backward, instruction.block + (1 if backward else -1), instruction.micro)
            if instruction.op is not Op.BACKWARD_WEIGHT and key in received:
                items.append(_Item(instruction, message=received.pop(key)))
    return items


class _Play:
    def __init__(self, programs: Mapping[int, Program]) -> None:
        self.programs = programs
        self.items = dict(zip(programs, once_each(_items, list(programs.values())), strict=True))
        self.heads = dict.fromkeys(self.items, 0)
        self.sent: set[tuple[int, int, bool, int, int]] = set()
        self.readers: dict[tuple[int, int, bool, int, int], int] = {}
        # (members, op, block) of a collective or a TIE -> the members that have come to it
        self.there: dict[tuple[tuple[int, ...], Op, int], set[int]] = defaultdict(set)

    def run(self) -> None:
        """Go on until nobody can."""
        moved = deque(self.items)
        while moved:
            moved.extend(self._step(moved.popleft()))

    def _step(self, rank: int) -> Iterator[int]:
        """Advance one rank as far as possible; yields the ranks that this unblocks."""
        while self.heads[rank] < len(self.items[rank]):
            item = self.items[rank][self.heads[rank]]
            if item.message is None:
                group = self.group(rank, item)
                meeting = group, item.instruction.op, item.instruction.block
                self.there[meeting].add(rank)
                # Some members may have no program here (a subset of ranks is verified); only the given ones are waited
                # for.
                if self.there[meeting] < set(group) & self.programs.keys():
                    return
                self.there.pop(meeting)
                # The last to arrive moves everyone on.
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
                # The sender wakes this rank when it gets there.
                self.readers[key] = rank
                return
            self.heads[rank] += 1

    def group(self, rank: int, item: _Item) -> tuple[int, ...]:
        """The ranks that take part in a collective or a TIE."""
        program = self.programs[rank]
        if item.instruction.op is Op.TIE:
            return tuple(sorted((rank, program.peer(rank, item.instruction))))
        ranks = program.message(item.instruction).ranks
        assert ranks is not None, f"{item.instruction} is among ranks"
        return ranks.peers(rank, item.tier)

    def key(self, rank: int, message: Instruction) -> tuple[int, int, bool, int, int]:
        """(Sender, receiver, whether a gradient, block, micro-batch) of a message."""
        other = self.programs[rank].peer(rank, message)
        ends = (rank, other) if message.op is Op.SEND else (other, rank)
        return (*ends, message.backward, message.block, message.micro)

    def waits_for(self, rank: int) -> tuple[Instruction, int]:
        """The instruction in which a rank waits, and the rank it waits for."""
        item = self.items[rank][self.heads[rank]]
        if item.message is not None:
            return item.instruction, self.key(rank, item.message)[0]
        # Any absent member explains the wait; the first is named.
        absent = [peer for peer in self.group(rank, item) if peer in self.heads and not self._is_at(peer, item)]
        return item.instruction, absent[0]

    def _is_at(self, rank: int, item: _Item) -> bool:
        return self.heads[rank] < len(self.items[rank]) and self.items[rank][self.heads[rank]] == item


def _play(programs: Mapping[int, Program]) -> None:
    play = _Play(programs)
    play.run()
    # A rank short of its end is stuck.
    for rank, head in play.heads.items():
        if head < len(play.items[rank]):
            _fail_circle(play, rank)


def _fail_circle(play: _Play, rank: int) -> None:
    # Following who waits for whom must end in a circle or at a rank that has ended.
    words: list[str] = []
    seen: set[int] = set()
    while rank not in seen and play.heads[rank] < len(play.items[rank]):
        seen.add(rank)
        instruction, other = play.waits_for(rank)
        item = play.items[rank][play.heads[rank]]
        where = f" on tier {play.programs[rank].layout.tiers[item.tier]!r}" if item.tier >= 0 else ""
        words.append(f"rank {rank} waits in `{instruction}`{where} for rank {other}")
        rank = other
    if rank not in seen:
        raise ProgramError(f"{'; '.join(words)}, which has ended without it: give every member the same collectives")
    raise ProgramError(
        f"the ranks wait in a circle: {'; '.join(words)}: issue collectives of all tiers and stages in one order"
    )


def _check_messages(programs: Mapping[int, Program]) -> None:
    # One channel per ordered pair of ranks: backends match point-to-point messages by order, not by tag.
    channels: dict[tuple[int, int], deque[Instruction]] = defaultdict(deque)
    for rank, program in programs.items():
        for instruction in program.instructions:
            if instruction.op is Op.SEND:
                channels[rank, program.peer(rank, instruction)].append(instruction)
    for rank, program in programs.items():
        for position, instruction in enumerate(program.instructions):
            if instruction.op is not Op.RECV:
                continue
            peer = program.peer(rank, instruction)
            queue = channels[peer, rank]
            sent = queue.popleft() if queue else None
            wanted = (instruction.block, instruction.micro, instruction.backward)
            if sent is None or (sent.block, sent.micro, sent.backward) != wanted:
                found = f"sends `{sent}`" if sent else "sends nothing more"
                raise ProgramError(f"rank {rank}, instruction {position} `{instruction}`: rank {peer} {found} instead")
    # Left over after all receives: nobody asked for them.
    for (sender, receiver), queue in channels.items():
        if queue:
            raise ProgramError(f"rank {sender}: `{queue[0]}` is never received by rank {receiver}")


def verify_stages(programs: Sequence[Program]) -> None:
    """Check the programs of all stages, in order, and the stages against each other; raises `ProgramError`.

    One rank of each stands for all: the ranks of a stage run the same program.
    """
    verify_ranks({program.mesh.at_stage(0, stage): program for stage, program in enumerate(programs)})
