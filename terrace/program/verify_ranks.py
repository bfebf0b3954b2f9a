"""Checks between ranks.

 1. The members of every group issue the same collectives in the same order, routed messages inside passes too.
 2. Every message that one rank sends, the other receives, in the same order.
 3. Ranks do not deadlock. A rank sends its collectives in order, tier after tier, and a pass waits for its
    input from another stage, so orders that agree inside every group can still block each other: across tiers, and
    where groups of data ranks and of stages interleave. The step is played: a collective happens when it is next on
    every member's lane, a pass that reads a message once that message was sent. Each rank is played with a single lane,
    passes included: stricter than the runtime, so an order that passes here cannot block there.

Ranks that share one Program object agree by construction; a world of one class costs one verification.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

from terrace.base.alike import first_equal, once_each
from terrace.base.errors import ProgramError
from terrace.plan.layout import Layout
from terrace.program.gaps import Issued
from terrace.program.instruction import Instruction, Op
from terrace.program.program import Program
from terrace.program.rank_play import RankPlay
from terrace.program.verify import verify
from terrace.program.verify_repeating import Marks, marks_alike, recurs


def verify_ranks(programs: Mapping[int, Program]) -> None:
    """Check the program of every rank, then the ranks against each other. Raises `ProgramError`."""
    # Each distinct program once, for the first rank that has it.
    firsts = set(first_equal(list(programs.values())))
    for index, (rank, program) in enumerate(programs.items()):
        if index in firsts:
            verify(program, rank)
    if len(firsts) == 1:
        return
    places = marks_alike(programs)
    if places is None or not _agree_repeating(programs, places):
        _check_together(programs)


def _agree_repeating(programs: Mapping[int, Program], places: Mapping[int, Marks]) -> bool:
    shorts = {rank: program.short for rank, program in programs.items()}
    try:
        _check_orders(shorts)
        play = RankPlay(shorts)
        found = recurs(programs, play, places)
        _finish(play)
    except ProgramError:
        return False
    return found


def _check_together(programs: Mapping[int, Program]) -> None:
    wholes = dict(zip(programs, once_each(Program.whole, list(programs.values())), strict=True))
    _check_orders(wholes)
    _finish(RankPlay(wholes))


def _check_orders(programs: Mapping[int, Program]) -> None:
    _check_collectives(programs)
    _check_messages(programs)


def _check_collectives(programs: Mapping[int, Program]) -> None:
    orders: dict[tuple[object, ...], tuple[int, list[Instruction]]] = {}
    of_ranks = once_each(_collectives_by_tier, list(programs.values()))
    for rank, program, by_tier in zip(programs, programs.values(), of_ranks, strict=True):
        for (tier, among), sequence in by_tier.items():
            # The peers alone do not name a group: two axes may join the same ranks.
            group = (tier, among.joined, among.peers(rank, tier))
            first_rank, expected = orders.setdefault(group, (rank, sequence))
            # Identity first: most ranks of a group share one list.
            if sequence is not expected and sequence != expected:
                _fail_order(program.layout.tiers[tier], first_rank, expected, rank, sequence)


def _collectives_by_tier(program: Program) -> dict[tuple[int, Layout], list[Instruction]]:
    by_tier: dict[tuple[int, Layout], list[Instruction]] = defaultdict(list)
    issued = Issued(program)
    for instruction in program.instructions:
        for of, tier, ranks in sorted(issued.at(instruction), key=lambda meeting: meeting[1]):
            by_tier[tier, ranks].append(of)
    return by_tier


def _fail_order(tier: str, rank_a: int, order_a: list[Instruction], rank_b: int, order_b: list[Instruction]) -> None:
    at = next(
        (i for i, (a, b) in enumerate(zip(order_a, order_b, strict=False)) if a != b), min(len(order_a), len(order_b))
    )
    what_a = f"`{order_a[at]}`" if at < len(order_a) else "nothing"
    what_b = f"`{order_b[at]}`" if at < len(order_b) else "nothing"
    raise ProgramError(
        f"ranks {rank_a} and {rank_b} share a group on tier {tier!r} but disagree on its collective number {at}: "
        f"rank {rank_a} issues {what_a}, rank {rank_b} issues {what_b}; every member must issue the same order"
    )


def _finish(play: RankPlay) -> None:
    play.run()
    # A rank short of its end is stuck.
    for rank, head in play.heads.items():
        if head < len(play.items[rank]):
            _fail_circle(play, rank)


def _fail_circle(play: RankPlay, rank: int) -> None:
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
    """Check the programs of all stages, then the stages against each other. Raises `ProgramError`.

    One rank per stage is checked, since all ranks of a stage run the same program.
    """
    verify_ranks({program.mesh.at_stage(0, stage): program for stage, program in enumerate(programs)})
