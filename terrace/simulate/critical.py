"""The critical path: from the end of a step back through everything it waited for.

The walk starts at the end of the compute stream. Compute follows the stream's earlier work; a wait follows a message; a
message follows the latest of its issue, its lane becoming free, and its input becoming ready. The pieces are contiguous
and cover the step. The seconds of a message over several tiers are split among them in proportion to latency plus bytes
over bandwidth. Waits inside a block (terrace.simulate.inside) are on the path as messages of class `tensor` or
`context`; routed messages are on lanes, like messages between blocks. Parameters and gradients that are kept
below the device are on the path as reads and writes of their medium, optimizer states as waits for their pieces.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from terrace.plan.wire import ROUTED, MessageClass
from terrace.program.instruction import PASSES, Instruction
from terrace.program.program import Program
from terrace.program.recording import COMPUTE, Recording, Span, below_lane
from terrace.simulate.below import BELOW, WAITS
from terrace.simulate.inside import WAIT_CHOICES, WAIT_CONTEXT, WAIT_TENSOR, inside_seconds


@dataclass(frozen=True)
class Piece:
    """A span on the critical path, cut at the start of the step."""

    number: int  # of the span in the recording of its stage
    start_s: float
    end_s: float
    stage: int = 0


@dataclass(frozen=True, kw_only=True)
class CriticalPath:
    """Pieces of the critical path in order, and seconds by (tier or medium, category), with "" for compute."""

    pieces: tuple[Piece, ...]
    seconds: Mapping[tuple[str, str], float]
    waits_s: float  # of the compute stream, on this path or not
    slowed_s: float  # how much longer compute took because messages travelled meanwhile
    step_s: float


def critical_path(*recordings: Recording) -> CriticalPath:
    """The critical path of a recorded step, from the recordings of all its stages.

    It ends on the stage that ends last. Times of a piece are those of its stage's recording; waits and slow-down are
    those of the last stage.
    """
    # The path ends on the stage that ends last.
    stage = max(range(len(recordings)), key=lambda index: recordings[index].begin_s + recordings[index].report.step_s)
    last, pieces = recordings[stage], list[Piece]()
    number = max((n for n, span in enumerate(last.spans) if span.lane == COMPUTE), default=-1)
    until_s = inf  # where the piece found last starts
    while number >= 0 and recordings[stage].spans[number].end_s > 0.0:
        span = recordings[stage].spans[number]
        start_s, end_s = _begin_s(recordings[stage], span), min(span.end_s, until_s)
        is_wait = span.lane == COMPUTE and span.category.startswith("wait ") and span.category not in INSIDE
        is_wait = is_wait and not _is_for_pieces(recordings[stage], span)
        # A wait is represented by the span it waited for; waits inside a block have none and are pieces themselves, and
        # so are those for pieces of optimizer states.
        if not is_wait and end_s > start_s:
            pieces.append(Piece(number, max(0.0, start_s), end_s, stage))
            until_s = start_s
        if span.stage >= 0:
            stage, until_s = span.stage, inf  # with a clock of its own
        number = span.after
    # The walk went backward in time.
    pieces.reverse()
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    for piece in pieces:
        recording = recordings[piece.stage]
        span = recording.spans[piece.number]
        instruction = recording.program.instructions[span.position]
        if span.category in INSIDE:
            # Messages inside a block have no lane, so their seconds are split in proportion to the price of each hop.
            shares, category = (
                inside_shares(recording.program, instruction, span.category),
                span.category.removeprefix("wait "),
            )
        elif _is_below(recording.program, span) or span.category in WAITS:
            seconds[_medium(recording, span), span.category.removeprefix("wait ")] += piece.end_s - piece.start_s
            continue
        elif span.lane == COMPUTE:
            seconds["", span.category] += piece.end_s - piece.start_s
            continue
        else:
            shares, category = span_shares(recording.program, span), span.category
        for tier, share in shares.items():
            seconds[recording.program.layout.tiers[tier], category] += share * (piece.end_s - piece.start_s)
    waits_s = sum(spent for name, spent in last.report.time_s.items() if name.startswith("wait "))
    return CriticalPath(
        pieces=tuple(pieces), seconds=dict(seconds), waits_s=waits_s, slowed_s=last.slowed_s, step_s=last.report.step_s
    )


def exposed_by_tier(recordings: Sequence[Recording], stage: int = 0) -> dict[str, float]:
    """Seconds that a stage's compute stream waits for messages, by tier."""
    seconds: dict[str, float] = defaultdict(float)
    for (_, tier), spent in exposed_by_axis(recordings, stage).items():
        seconds[tier] += spent
    return dict(seconds)


def exposed_by_axis(recordings: Sequence[Recording], stage: int = 0) -> dict[tuple[str, str], float]:
    """Seconds that a stage's compute stream waits for messages, by (axis, tier).

    A wait is split over the messages in flight during it, the last of which ends it. Waits inside a block go to the
    tiers of the block's messages. A wait for another stage counts only its message, not the compute before it.
    """
    recording = recordings[stage]
    program, spans = recording.program, recording.spans
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    for wait in spans[recording.first :]:
        if wait.lane != COMPUTE or not wait.category.startswith("wait "):
            continue
        if wait.category in INSIDE:
            axis = wait.category.removeprefix("wait ")
            shares = inside_shares(program, program.instructions[wait.position], wait.category)
            for tier, share in shares.items():
                seconds[axis, program.layout.tiers[tier]] += share * (wait.end_s - wait.start_s)
            continue
        # States below the device are of no tier.
        if wait.category in WAITS:
            medium = _medium(recording, wait)
            seconds[medium, medium] += wait.end_s - wait.start_s
            continue
        # The cause is on another stage, so its recording has the message.
        if wait.stage >= 0:
            for name, spent in _sent_meanwhile(recording, wait, recordings[wait.stage]).items():
                seconds["pipeline", name] += spent
            continue
        number, end_s = wait.after, wait.end_s
        while number >= 0 and end_s > wait.start_s:
            span = spans[number]
            # Walk back through queued messages until the wait's start; each pays for its own part.
            start_s = max(wait.start_s, min(_begin_s(recording, span), end_s))
            if span.lane == COMPUTE:
                break
            if _is_below(program, span):
                name = recording.lane_name(span.lane)
                seconds[name, name] += end_s - start_s
                number, end_s = span.after, start_s
                continue
            axis = "data" if program.instructions[span.position].peer < 0 else "pipeline"
            if span.category in ROUTED:
                axis = span.category
            for tier, share in span_shares(program, span).items():
                seconds[axis, program.layout.tiers[tier]] += share * (end_s - start_s)
            number, end_s = span.after, start_s
    return dict(seconds)


def _begin_s(recording: Recording, span: Span) -> float:
    """When a span begins; below the device, when it is queued: pieces of the ring that delay it have no spans."""
    if span.category not in BELOW or span.after < 0:
        return span.start_s
    return min(span.start_s, recording.spans[span.after].end_s)


def _is_for_pieces(recording: Recording, wait: Span) -> bool:
    """Whether a wait for states below the device is for pieces of the ring, which have no spans of their own."""
    return wait.category in WAITS and (wait.after < 0 or recording.spans[wait.after].lane == COMPUTE)


def _is_below(program: Program, span: Span) -> bool:
    """Whether a span is on the lane of a medium below the device, or of the host's cores."""
    return span.lane >= below_lane(program)


def _medium(recording: Recording, span: Span) -> str:
    """The medium of a read or write of states below the device, or of a wait for one."""
    if _is_below(recording.program, span):
        return recording.lane_name(span.lane)
    if _is_for_pieces(recording, span):
        return recording.program.plan.keep.optimizer
    return recording.lane_name(recording.spans[span.after].lane)


def _sent_meanwhile(recording: Recording, wait: Span, sender: Recording) -> dict[str, float]:
    span = sender.spans[wait.after]
    # The sender was still computing: the wait is a bubble, not a message.
    if span.lane == COMPUTE:
        return {}
    # Times of a recording are relative to its stage's start.
    before_s = sender.begin_s - recording.begin_s
    spent_s = min(wait.end_s, span.end_s + before_s) - max(wait.start_s, span.start_s + before_s)
    shares = span_shares(sender.program, span)
    tiers = sender.program.layout.tiers
    return {tiers[tier]: share * spent_s for tier, share in shares.items()} if spent_s > 0 else {}


def span_shares(program: Program, span: Span) -> dict[int, float]:
    """Share of a lane message's seconds by tier index; they sum to 1. States below the device cross no tier."""
    instruction = program.instructions[span.position]
    if _is_below(program, span):
        return {}
    if instruction.op not in PASSES:
        return tier_shares(program, instruction)
    # Routed rows cross only the tier of their lane; tables cross all tiers up to it.
    if span.category == MessageClass.ROUTE:
        return _shares(inside_seconds(program, instruction, MessageClass.ROUTE))
    return {span.lane: 1.0}


def tier_shares(program: Program, instruction: Instruction) -> dict[int, float]:
    """Share of a message's seconds by tier index; they sum to 1."""
    if instruction.peer >= 0:
        return {program.message(instruction).tiers[0]: 1.0}
    tiers = program.cluster.tiers
    weights: dict[int, float] = defaultdict(float)
    for hop in program.message(instruction).hops:
        tier = tiers[hop.tier]
        weights[hop.tier] += (hop.degree - 1) * tier.latency_s + hop.sent_bytes / tier.bandwidth_bytes_per_s
    return _shares(weights)


def inside_shares(program: Program, instruction: Instruction, category: str) -> dict[int, float]:
    """Share by tier index of the seconds of messages inside a block, hidden ones included."""
    return _shares(inside_seconds(program, instruction, INSIDE[category]))


# Waits inside a block -> the class of the messages.
INSIDE = {WAIT_TENSOR: MessageClass.TENSOR, WAIT_CONTEXT: MessageClass.CONTEXT, WAIT_CHOICES: MessageClass.CHOICES}


def _shares(weights: Mapping[int, float]) -> dict[int, float]:
    total = sum(weights.values())
    return {tier: weight / total for tier, weight in weights.items()}


_BELOW = (*BELOW, "update")  # on a lane: on the host's cores


def critical_words(path: CriticalPath) -> str:
    """The critical path in one or two sentences, largest share first."""
    if not path.step_s:
        return "The step takes no time: nothing to wait for."
    waits, slowed = _percent(path.waits_s, path.step_s), _percent(path.slowed_s, path.step_s)
    words = f"{path_words(path.seconds, path.step_s)}. The compute stream waits for {waits} % of the step"
    return f"{words}; messages meanwhile slow its compute by {slowed} % of it." if slowed else f"{words}."


def path_words(seconds: Mapping[tuple[str, str], float], step_s: float) -> str:
    """The shares of a critical path in words, from `CriticalPath.seconds`."""
    parts = []
    for place, spent in by_place(seconds).items():
        # Parts below half a percent are left out.
        if _percent(spent, step_s) == 0:
            continue
        inside = sorted(
            ((part, category) for (where, category), part in seconds.items() if where == place),
            key=lambda item: (-item[0], item[1]),
        )
        named = ", ".join(
            f"{category} {_percent(part, step_s)} %" for part, category in inside if _percent(part, step_s)
        )
        is_below = place and all(category in _BELOW for (where, category) in seconds if where == place)
        where = f"the {place}" if is_below else f"messages on tier {place}" if place else "compute"
        parts.append(f"{_percent(spent, step_s)} % {where}" + (f" ({named})" if named else ""))
    return f"On the critical path of the step: {'; '.join(parts)}"


def by_place(seconds: Mapping[tuple[str, str], float]) -> dict[str, float]:
    """Seconds by tier or medium, with "" for compute; largest first, then by name."""
    total: dict[str, float] = defaultdict(float)
    for (place, _), spent in seconds.items():
        total[place] += spent
    return dict(sorted(total.items(), key=lambda item: (-item[1], item[0])))


def _percent(part_s: float, whole_s: float) -> int:
    return round(100 * part_s / whole_s)
