"""Candidates for the shares of gradients in the gaps of a backward (`Plan.expert_gaps`), from a backward played alone.

Let s_g be the idle seconds of the gradients' link in gap g of a layer's backward, s those of the last gap, and G the
link seconds of a layer's gradient. Candidates:

    all behind      everything in the last gap: beside attention no message of experts waits
    behind first    s seconds in the last gap, the rest in the others, in proportion to s_g and at most s_g
    everywhere      G s_g / (sum over g) in every gap, at most s_g; the remainder in the last gap

Where the link never idles long enough, some message waits in any order. terrace.simulate.step plays the whole step,
in which other messages share the link, to pick a candidate.
"""

from collections.abc import Iterator, Sequence

from terrace.plan.plan import num_gaps
from terrace.program.gaps import has_gaps, may_be_in_gaps
from terrace.program.instruction import Instruction, Op
from terrace.simulate.cost import Costs
from terrace.simulate.priced_instruction import Doing, PassStep
from terrace.simulate.routed import Timed, played_s

Shares = tuple[float, ...]
_LEAST = 0.02  # a smaller part costs more latency than it hides: a guess
_UNITS = 1000  # of a share: they are read by people, too


def shares_to_try(costs: Costs) -> list[Shares]:
    """Distinct candidate shares; `costs` are of a program whose layers have gaps.

    Empty if no gradient message may be sent in gaps.
    """
    program = costs.program
    layers = (block for block in range(len(program.blocks)) if has_gaps(program.model, Instruction(Op.BACKWARD, block)))
    for block in layers:
        messages = [Instruction(op, block) for op in (Op.REDUCE, Op.SYNC) if may_be_in_gaps(program.model, op, block)]
        if not messages:
            continue
        taken_s: dict[int, float] = {}
        for message in messages:
            seconds, lane, *_ = costs.collective(message)
            taken_s[lane] = taken_s.get(lane, 0.0) + seconds
        lane = max(taken_s, key=lambda each: taken_s[each])
        steps = costs.steps(Instruction(Op.BACKWARD, block, 0), costs.backward_s[block] + costs.recompute_s(block), "")
        idle = idle_s(steps, lane)
        return list(dict.fromkeys(map(_rounded, _filled(idle, taken_s[lane])))) if taken_s[lane] else []
    return []


def idle_s(steps: Sequence[PassStep], lane: int) -> list[float]:
    """Idle seconds of a lane in a backward after each gap, up to the lane's next message; gap 0 is the beginning.

    No other messages are on any lane.
    """
    now_s, free_s = 0.0, 0.0
    found, since_s = [0.0], 0.0
    waits = True  # for the first message behind the gap
    noted: list[Timed] = []
    played_s(((does, event.seconds, event.lane, number) for does, event, number in steps), noted)
    for does, own, ready_s, done_s in noted:
        if does is Doing.SEND:
            if own != lane:
                continue
            if waits:
                found[-1], waits = ready_s - since_s, False
            free_s = done_s
            continue
        now_s = done_s
        if does is Doing.GAP:
            found[-1] = max(0.0, now_s - since_s) if waits else found[-1]
            found.append(0.0)
            since_s, waits = max(now_s, free_s), True
    if waits:
        found[-1] = max(0.0, now_s - since_s)
    return found


def _filled(idle: Sequence[float], taken_s: float) -> Iterator[Shares]:
    *inner, last = idle
    yield (*(0.0 for _ in inner), 1.0)
    left, room = max(0.0, taken_s - last), sum(inner)
    for here in (left, taken_s * room / (room + last) if room + last else 0.0):
        part = min(1.0, here / room) if room else 0.0
        shares = [part * each / taken_s for each in inner]
        yield (*shares, 1.0 - sum(shares))


def _rounded(shares: Shares) -> Shares:
    # Rounded down, so that the last share is never below 0.
    inner = [int(share * _UNITS) / _UNITS if share >= _LEAST else 0.0 for share in shares[:-1]]
    return (*inner, round(_UNITS * (1.0 - sum(inner))) / _UNITS)


def any_shares(chunks: int) -> Shares:
    """Placeholder shares that use every gap of a backward of `chunks`, to build a program and read its gaps."""
    number = num_gaps(chunks) - 1
    return (0.0, *(1.0 / number for _ in range(number)))
