"""Message seconds on a tier that compute hides, and the step time if none were hidden.

A message on a lane is hidden while the compute stream computes. Messages inside a block are hidden as far as passes do
not wait for them. Hidden messages slow compute (`Tier.overlap_penalty`); without overlap this slow-down vanishes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from terrace.plan.wire import MessageClass
from terrace.program.instruction import PASSES
from terrace.program.recording import COMPUTE, Recording, Span
from terrace.simulate.critical import INSIDE, span_shares
from terrace.simulate.inside import inside_seconds
from terrace.simulate.links import is_exposed, tier_penalty
from terrace.simulate.stages import record_stage
from terrace.simulate.step import WHOLE_PASSES_ALONE, Prediction, play_whole


@dataclass(frozen=True, kw_only=True)
class HiddenMessages:
    """Message seconds on a tier hidden on the busiest stage, and the step time without hiding (`exposed_s`)."""

    tier: str
    hidden_s: float
    step_s: float
    exposed_s: float


def hidden_between_nodes(predicted: Prediction, recordings: Sequence[Recording] = ()) -> HiddenMessages | None:
    """Messages that a predicted step hides on the outermost tier with several members.

    None if that is the innermost tier, and for islands, which report their exchanges separately. `recordings`, by
    stage, are of the whole step; for a very long step only the messages of the played beginning count.
    """
    cluster = predicted.step.cluster
    wide = [index for index, tier in enumerate(cluster.tiers) if tier.size > 1]
    if not wide or wide[-1] == 0 or predicted.cycle is not None:
        return None
    recording = recordings[predicted.busiest] if recordings else _recording(predicted)
    hidden_s = _on_lanes(recording, wide[-1]) + _inside(recording, wide[-1])
    return HiddenMessages(
        tier=cluster.tiers[wide[-1]].name,
        hidden_s=hidden_s,
        step_s=predicted.step_s,
        exposed_s=predicted.step_s + (1.0 - tier_penalty(cluster, wide[-1])) * hidden_s,
    )


def _recording(predicted: Prediction) -> Recording:
    step, stage = predicted.step, predicted.busiest
    # An extrapolated prediction lacks most messages, so the whole step is played if that takes a few seconds at most.
    if not predicted.is_whole and step.num_micros * len(step.blocks) <= WHOLE_PASSES_ALONE:
        predicted = play_whole(step)
    return record_stage(predicted.programs, predicted.costs, stage)


def _on_lanes(recording: Recording, tier: int) -> float:
    computing = [each for each in _visible(recording) if each.lane == COMPUTE and not each.category.startswith("wait ")]
    lanes: dict[int, list[Span]] = {}
    cluster, gathers = recording.program.cluster, recording.program.layout.gathers
    for span in _visible(recording):
        # Computing beside a message that the software waits for has taken all of its time already.
        if span.lane != COMPUTE and not is_exposed(cluster, MessageClass(span.category), gathers):
            lanes.setdefault(span.lane, []).append(span)
    return sum(
        span_shares(recording.program, span).get(tier, 0.0) * seconds
        for spans in lanes.values()
        for span, seconds in _shared(spans, computing, recording.report.step_s)
    )


def _visible(recording: Recording) -> Iterator[Span]:
    for _, span in recording.visible():
        yield span


def _shared(spans: Sequence[Span], computing: Sequence[Span], step_s: float) -> Iterator[tuple[Span, float]]:
    """Messages of a lane with their seconds of overlap with compute; both inputs are in order of time."""
    first = 0
    for span in spans:
        start_s, end_s, seconds = max(0.0, span.start_s), min(step_s, span.end_s), 0.0
        while first < len(computing) and computing[first].end_s <= start_s:
            first += 1
        for each in computing[first:]:
            if each.start_s >= end_s:
                break
            seconds += min(end_s, each.end_s) - max(start_s, each.start_s)
        yield span, seconds


def _inside(recording: Recording, tier: int) -> float:
    program, waits = recording.program, dict[tuple[int, str], float]()
    for span in recording.spans[recording.first :]:
        if span.lane == COMPUTE and span.category in INSIDE:
            key = span.position, span.category
            waits[key] = waits.get(key, 0.0) + span.end_s - span.start_s
    known, found = dict[tuple[object, ...], dict[int, float]](), 0.0
    for position, instruction in enumerate(program.instructions):
        if instruction.op not in PASSES:
            continue
        for category, message_class in INSIDE.items():
            alike = (instruction.op, category, program.model.alike_inside(instruction.block))
            if alike not in known:
                known[alike] = inside_seconds(program, instruction, message_class)
            total_s = sum(known[alike].values())
            if total_s > 0.0:
                hidden_s = max(0.0, total_s - waits.get((position, category), 0.0))
                found += hidden_s * known[alike].get(tier, 0.0) / total_s
    return found
