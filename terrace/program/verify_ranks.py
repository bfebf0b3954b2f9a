"""What must agree between ranks.

 1. The members of every group issue the same collectives in the same order.
 2. Lanes do not wait in a circle: a rank sends its collectives in order, tier after tier, so orders that
    agree inside every group can still block each other across tiers. The lanes are played: a collective
    happens when it is next on every member's lane. One lane a rank is played, which is stricter than a lane
    for each tier, as the runtime has them: an order that passes here cannot block there.
 3. Every SEND has its RECV, in order. (They are not played: no builder emits them yet.)

Ranks that share one Program object agree by construction; a world of one class costs one verification.
"""

from collections import defaultdict, deque
from collections.abc import Mapping

from terrace.base.errors import ProgramError
from terrace.program.instruction import COLLECTIVES, Instruction, Op
from terrace.program.program import Program
from terrace.program.verify import verify

Item = tuple[int, Instruction]  # a tier and the instruction whose message crosses it


def verify_ranks(programs: Mapping[int, Program]) -> None:
    """Check the program of every rank and what must agree between them; raises `ProgramError`."""
    classes = {id(program): (rank, program) for rank, program in reversed(list(programs.items()))}
    for rank, program in classes.values():
        verify(program, rank)
    if len(classes) > 1:
        _check_collectives(programs)
        _play_lanes(programs)
    _check_point_to_point(programs)


def _check_collectives(programs: Mapping[int, Program]) -> None:
    """Within every group of every tier, members issue the same collectives in the same order."""
    orders: dict[tuple[int, tuple[int, ...]], tuple[int, list[Instruction]]] = {}
    cache: dict[int, dict[int, list[Instruction]]] = {}
    for rank, program in programs.items():
        by_tier = cache.get(id(program))
        if by_tier is None:
            by_tier = cache[id(program)] = _collectives_by_tier(program)
        for tier, sequence in by_tier.items():
            group = (tier, program.everyone.peers(rank, tier))
            first_rank, expected = orders.setdefault(group, (rank, sequence))
            if sequence is not expected and sequence != expected:
                _fail_order(program.layout.tiers[tier], first_rank, expected, rank, sequence)


def _collectives_by_tier(program: Program) -> dict[int, list[Instruction]]:
    by_tier: dict[int, list[Instruction]] = defaultdict(list)
    for instruction in program.instructions:
        if instruction.op in COLLECTIVES:
            for tier in program.crossed(instruction):
                by_tier[tier].append(instruction)
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


def _lane(program: Program) -> list[Item]:
    """Return the collectives of one rank in the order in which its lane runs them."""
    items: list[Item] = []
    for instruction in program.instructions:
        if instruction.op in COLLECTIVES:
            tiers = program.crossed(instruction)
            inward = instruction.op in (Op.GATHER, Op.REFRESH)
            items += [(tier, instruction) for tier in (reversed(tiers) if inward else tiers)]
    return items


def _play_lanes(programs: Mapping[int, Program]) -> None:
    cache = {id(program): _lane(program) for program in programs.values()}
    lanes = {rank: cache[id(program)] for rank, program in programs.items()}
    heads = dict.fromkeys(lanes, 0)
    waiting: dict[tuple[int, ...], set[int]] = defaultdict(set)  # members of a group -> those that are there
    moved = deque(lanes)
    while moved:
        rank = moved.popleft()
        if heads[rank] < len(lanes[rank]):
            group = programs[rank].everyone.peers(rank, lanes[rank][heads[rank]][0])
            waiting[group].add(rank)
            if waiting[group] >= set(group) & programs.keys():
                waiting[group].clear()
                for member in group:
                    if member in heads:
                        heads[member] += 1
                        moved.append(member)
    for rank, head in heads.items():
        if head < len(lanes[rank]):
            _fail_circle(programs, lanes, heads, rank)


def _fail_circle(
    programs: Mapping[int, Program], lanes: Mapping[int, list[Item]], heads: Mapping[int, int], rank: int
) -> None:
    tier, instruction = lanes[rank][heads[rank]]
    peers = programs[rank].everyone.peers(rank, tier)
    other = next(peer for peer in peers if peer in heads and lanes[peer][heads[peer]][0] != tier)
    their_tier, theirs = lanes[other][heads[other]]
    names = programs[rank].layout.tiers
    raise ProgramError(
        f"the ranks wait in a circle: rank {rank} waits in `{instruction}` on tier {names[tier]!r} for rank {other}, "
        f"which waits in `{theirs}` on tier {names[their_tier]!r}; issue collectives of all tiers in one order"
    )


def _check_point_to_point(programs: Mapping[int, Program]) -> None:
    channels: dict[tuple[int, int], deque[Instruction]] = defaultdict(deque)
    for rank, program in programs.items():
        for instruction in program.instructions:
            if instruction.op is Op.SEND:
                channels[rank, instruction.peer].append(instruction)
    for rank, program in programs.items():
        for position, instruction in enumerate(program.instructions):
            if instruction.op is not Op.RECV:
                continue
            queue = channels[instruction.peer, rank]
            sent = queue.popleft() if queue else None
            same = sent is not None and (sent.block, sent.micro, sent.backward) == (
                instruction.block,
                instruction.micro,
                instruction.backward,
            )
            if not same:
                found = f"sends `{sent}`" if sent else "sends nothing more"
                raise ProgramError(
                    f"rank {rank}, instruction {position} `{instruction}`: rank {instruction.peer} {found} instead"
                )
    for (sender, receiver), queue in channels.items():
        if queue:
            raise ProgramError(f"rank {sender}: `{queue[0]}` is never received by rank {receiver}")
