"""A pipelined step, stage by stage: the evaluation of a choice drawn out in time.

Nothing here is a second model: the orders are played with the seconds of the evaluation (terrace.planner.evaluate), and
what it adds to them is shown where it adds it,

    step = stretch * span + tail

with `span` the orders played with the stages' own seconds, `stretch` what the waits of data ranks make of
it, the same for every task, and `tail` what follows: sums of gradients, update and refresh. So the last bar ends
where `terrace plan` says the step does.

Memory of a stage: what the evaluation says is there at the worst moment stays throughout, but for the activations,
which come with a forward and go with its backward.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from terrace.plan import AXES, MessageClass
from terrace.planner.estimate import Part
from terrace.planner.evaluate import TIE, Estimate, Evaluator
from terrace.planner.pipelines import Pipeline
from terrace.planner.space import shape_of
from terrace.planner.task import CONTEXT, EMBEDDING, HEAD, KINDS, LAYER, TENSOR, Choice, Task, num_micros
from terrace.program.schedules import Kind
from terrace.simulate.critical import path_words
from terrace.simulate.curve import MemoryCurve
from terrace.simulate.timeline import Timeline, play

IDLE = "idle"
INNER = {TENSOR: "tensor", CONTEXT: "context"}


@dataclass(frozen=True, kw_only=True)
class StageStep:
    """One stage: what it holds, its seconds by category (they sum to the step), its tail in order, its memory.

    Messages of tensor and context ranks are no part of `forward` and `backward` here; `idle` is waiting for other
    stages. `memory_bytes` is the evaluation's, by category.
    """

    part: Part
    time_s: Mapping[str, float]
    tail: tuple[tuple[str, float], ...]
    memory_bytes: Mapping[str, int]
    curve: MemoryCurve


@dataclass(frozen=True, kw_only=True)
class StagedStep:
    """A step of a pipeline. `timeline` has the stages' own seconds: a moment of it comes `stretch` times as late."""

    task: Task
    choice: Choice
    estimate: Estimate
    pipeline: Pipeline
    timeline: Timeline
    stretch: float
    tail_s: float
    stages: tuple[StageStep, ...]
    exposed_s: Mapping[tuple[str, str], float]  # of the slowest stage, by (axis, tier)
    path_s: Mapping[tuple[str, str], float]  # on the critical path, by (tier, category); "" is compute

    @property
    def step_s(self) -> float:
        """Seconds of the step, as `terrace plan` says them."""
        return self.estimate.step_s

    @cached_property
    def slowest(self) -> int:
        """The stage that idles least."""
        return min(range(len(self.stages)), key=lambda index: self.stages[index].time_s[IDLE])

    @cached_property
    def fullest(self) -> int:
        """The stage that needs most memory."""
        return max(range(len(self.stages)), key=lambda index: sum(self.stages[index].memory_bytes.values()))

    @property
    def bubble(self) -> float:
        """The share of all stages' time in which they wait for other stages."""
        return math.fsum(stage.time_s[IDLE] for stage in self.stages) / (len(self.stages) * self.step_s)


def stage_steps(evaluator: Evaluator, choice: Choice) -> StagedStep:
    """Return the step of a choice with a pipeline; raises `PlanError` as its evaluation does."""
    task, micros = evaluator.task, num_micros(evaluator.task, choice)
    estimate = evaluator.evaluate(choice)
    pipeline, played = evaluator.stages(choice)
    lines = evaluator.lines(choice)
    units = micros // choice.unit
    further = [{name: units * add for name, add in stage.further_s.items()} for stage in played]
    tails = [_tail(line, repeated) for line, repeated in zip(lines, further, strict=True)]
    tail_s = max(
        math.fsum(line.values()) - math.fsum(repeated.values()) for line, repeated in zip(lines, further, strict=True)
    )
    stretch = (estimate.step_s - tail_s) / pipeline.span_s
    timeline = play(pipeline.orders, pipeline.seconds([1.0] * pipeline.orders.num_stages))
    stages = []
    for index, (part, waiting) in enumerate(zip(pipeline.parts, pipeline.waiting, strict=True)):
        memory = evaluator.estimator.memory_bytes(choice, part, waiting, micros)
        stages.append(
            StageStep(
                part=part,
                time_s=_stage_seconds(evaluator, choice, part, lines[index], estimate.step_s),
                tail=tails[index],
                memory_bytes=memory,
                curve=_curve(evaluator, choice, pipeline, timeline, stretch, index, memory),
            )
        )
    step = StagedStep(
        task=task,
        choice=choice,
        estimate=estimate,
        pipeline=pipeline,
        timeline=timeline,
        stretch=stretch,
        tail_s=tail_s,
        stages=tuple(stages),
        exposed_s={},
        path_s={},
    )
    places = message_places(evaluator, choice)
    return replace(step, exposed_s=_exposed(step, places), path_s=_path(step, evaluator, places))


def message_places(evaluator: Evaluator, choice: Choice) -> dict[str, tuple[str, str]]:
    """Return (axis, tier) of every kind of message that a step may wait for: the outermost tier that it crosses."""
    shape, tiers = shape_of(choice.rows), evaluator.task.cluster.tiers
    numels = evaluator.estimator.own_numels(shape)
    messages = evaluator.bounds.mail.messages(shape.state, numels, choice.placement)
    lanes = {
        MessageClass.GATHER: messages.gather.lane,
        MessageClass.GATHER_BACKWARD: messages.backward.lane,
        MessageClass.REDUCE: messages.reduce.lane,
        MessageClass.SYNC: messages.sync.lane,
        MessageClass.REFRESH: messages.refresh.lane,
        MessageClass.CONTROL: max((tier for tier, degree in enumerate(shape.state) if degree > 1), default=0),
    }
    found = {f"wait {message.value}": ("data", tiers[max(lane, 0)].name) for message, lane in lanes.items()}
    for axis, name in enumerate(AXES):
        crossed = [tier.name for row, tier in zip(choice.rows, tiers, strict=True) if row[axis] > 1]
        if name != "data" and crossed:
            found[name] = (name, crossed[-1])
        if name == "pipeline" and crossed:
            found[TIE] = (name, crossed[-1])
    return found


def inner_seconds(evaluator: Evaluator, choice: Choice, part: Part) -> dict[str, tuple[float, float]]:
    """Return (forward, backward) seconds that a stage waits for tensor and context messages in a step.

    Recomputation is included, and what running beside a message adds to computing.
    """
    micros = num_micros(evaluator.task, choice)
    found = {name: (0.0, 0.0) for axis, name in INNER.items() if choice.degree(axis) > 1}
    for kind, count in zip(KINDS, part.counts, strict=True):
        messages = evaluator.estimator.inner_seconds(kind, choice)
        for name, (forward_s, backward_s, again_s) in zip(INNER.values(), messages, strict=True):
            if name in found:
                before, repeats = found[name], count * micros
                in_backward_s = backward_s + (again_s if kind == LAYER and choice.recompute else 0.0)
                found[name] = (before[0] + repeats * forward_s, before[1] + repeats * in_backward_s)
    return found


def _stage_seconds(
    evaluator: Evaluator, choice: Choice, part: Part, line: Mapping[str, float], step_s: float
) -> dict[str, float]:
    inner = inner_seconds(evaluator, choice, part)
    found = dict(line)
    for index, name in enumerate(("forward", "backward")):
        found[name] -= math.fsum(each[index] for each in inner.values())
    found |= {name: math.fsum(each) for name, each in inner.items()}
    found[IDLE] = max(0.0, step_s - math.fsum(line.values()))
    return found


def _tail(line: Mapping[str, float], units: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    """Return what a stage does once a step, waits before the update, so that it sums to what it adds to the step."""
    once = {name: line.get(name, 0.0) - units.get(name, 0.0) for name in {**line, **units}}
    positive = {name: value for name, value in once.items() if value > 1e-12}
    total, wanted = math.fsum(positive.values()), math.fsum(once.values())
    scale = wanted / total if total else 0.0
    waits = sorted((name, scale * value) for name, value in positive.items() if name != "update")
    return (*waits, *(("update", scale * value) for name, value in positive.items() if name == "update"))


def _curve(
    evaluator: Evaluator,
    choice: Choice,
    pipeline: Pipeline,
    timeline: Timeline,
    stretch: float,
    stage: int,
    memory: Mapping[str, int],
) -> MemoryCurve:
    estimator, orders, part = evaluator.estimator, pipeline.orders, pipeline.parts[stage]
    embedding, layer, head = (
        estimator.kept_bytes(kind, choice.rows, choice.micro_batch, choice.recompute)
        for kind in (EMBEDDING, LAYER, HEAD)
    )
    last, row = orders.num_virtual - 1, orders.placement[stage]
    kept = [
        count * layer + (embedding if virtual == 0 else 0) + (head if virtual == last else 0)
        for virtual, count in zip(row, part.layers, strict=True)
    ]
    now, times_s, held = 0, [0.0], [0]
    tasks, starts_s, ends_s = orders.tasks[stage], timeline.starts_s[stage], timeline.ends_s[stage]
    for (kind, chunk, _), start_s, end_s in zip(tasks, starts_s, ends_s, strict=True):
        if kind is Kind.FORWARD:
            now += kept[chunk]
        elif kind is not Kind.BACKWARD_INPUT:
            now -= kept[chunk]
        else:
            continue
        times_s.append(stretch * (start_s if kind is Kind.FORWARD else end_s))
        held.append(now)
    constant = {name: size for name, size in memory.items() if name not in ("activations", "logits")}
    # Where activations are highest the running block may take less than at the worst moment of all.
    beyond = max(0, sum(constant.values()) + max(held) - sum(memory.values()))
    constant["working"] = max(0, constant.get("working", 0) - beyond)
    return MemoryCurve(
        constant_bytes=constant, times_s=tuple(times_s), varying_bytes={"activations": tuple(map(float, held))}
    )


def _exposed(step: StagedStep, places: Mapping[str, tuple[str, str]]) -> dict[tuple[str, str], float]:
    """Return what the slowest stage spends on messages that nothing hides, by (axis, tier)."""
    found: dict[tuple[str, str], float] = defaultdict(float)
    for name, seconds in step.stages[step.slowest].time_s.items():
        if name in places:
            found[places[name]] += seconds
    sends_s = step.pipeline.span_s - replace(step.pipeline, edge_s=0.0).span_s
    found[places["pipeline"]] += step.stretch * sends_s
    return {place: spent for place, spent in found.items() if spent > 0}


def _path(
    step: StagedStep, evaluator: Evaluator, places: Mapping[str, tuple[str, str]]
) -> dict[tuple[str, str], float]:
    """Return what the critical path is made of: tasks, the messages between them, what stretches them, the tail."""
    found: dict[tuple[str, str], float] = defaultdict(float)
    inner = [inner_seconds(evaluator, step.choice, stage.part) for stage in step.stages]
    own = [
        {name: stage.time_s[name] + math.fsum(each[index] for each in inner[number].values())}
        for index, name in enumerate(("forward", "backward"))
        for number, stage in enumerate(step.stages)
    ]
    num = len(step.stages)
    for passed in step.timeline.critical_path():
        is_forward = passed.task.kind is Kind.FORWARD
        name, offset = ("forward", 0) if is_forward else ("backward", num)
        seconds, whole = passed.end_s - passed.start_s, own[offset + passed.stage][name] or 1.0
        sent = {key: each[0 if is_forward else 1] / whole for key, each in inner[passed.stage].items()}
        for key, share in sent.items():
            found[places[key][1], key] += share * seconds
        found["", name] += (1.0 - math.fsum(sent.values())) * seconds
        found[places["pipeline"][1], "pipeline"] += passed.edge_s
    if step.stretch > 1.0:
        _, played = evaluator.stages(step.choice)
        longest = max(
            zip(played, step.pipeline.stages_s, strict=True), key=lambda pair: pair[0].unit_s / (pair[1] or 1.0)
        )[0]
        waits = {name: add for name, add in longest.further_s.items() if name in places and add > 0}
        total = math.fsum(waits.values())
        for name, add in waits.items():
            found[places[name][1], name.removeprefix("wait ")] += (
                (step.stretch - 1) * step.pipeline.span_s * add / total
            )
    tails = [math.fsum(seconds for _, seconds in stage.tail) for stage in step.stages]
    for name, seconds in step.stages[max(range(num), key=tails.__getitem__)].tail:
        place = places[name][1] if name in places else ""
        found[place, name.removeprefix("wait ")] += seconds
    return {key: spent for key, spent in found.items() if spent > 0}


def path_sentence(step: StagedStep) -> str:
    """Return the critical path in words, and how much stages wait for one another."""
    idle = [stage.time_s[IDLE] / step.step_s for stage in step.stages]
    most = max(range(len(idle)), key=idle.__getitem__)
    return (
        f"{path_words(step.path_s, step.step_s)}. Stages wait for one another for {100 * step.bubble:.1f} % of the "
        f"step in the mean, stage {most} most ({100 * idle[most]:.1f} %), stage {step.slowest} least "
        f"({100 * idle[step.slowest]:.1f} %)."
    )


def inner_words(choice: Choice) -> list[str]:
    """Return what hides the messages inside blocks."""
    lines = []
    if choice.degree(TENSOR) > 1:
        lines.append("Messages of tensor ranks hide behind the products beside which the runtime sends them.")
    if choice.degree(CONTEXT) > 1:
        lines.append(
            "Messages of Ulysses ranks are waited for; those of a ring hide behind the round computed meanwhile."
        )
    return lines


def played_words(step: StagedStep) -> Sequence[str]:
    """Return what of the step is played, and how."""
    lines = [
        f"Played are the orders of schedule {step.choice.schedule}, which the runtime executes, with the seconds of "
        "its stages; a message between stages costs the stages no time of their own. The programs themselves, with "
        "every gather and reduction in its place, are what terrace explain prices."
    ]
    if step.stretch > 1.0005:
        lines.append(
            "What stages wait for their data ranks comes from playing the program of those, and makes every task "
            f"{step.stretch:.3f} times as long."
        )
    lines += inner_words(step.choice)
    lines.append("Sums of gradients, update and refresh follow the orders of all stages.")
    return lines
