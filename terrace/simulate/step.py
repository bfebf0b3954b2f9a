"""The predicted step of a plan: the programs of its stages, built, priced and played.

Every command that shows a step shows `predict_step`'s: plan, simulate, train, scale, doctor and the pages. A step is
described by one frozen `Step`; equal steps have equal predictions.

Folding. After a few micro-batches a schedule is periodic, and each further micro-batch adds the same seconds. A step
with more passes than `WHOLE_PASSES` (micro-batches times blocks) is therefore played with three equally spaced small
numbers of micro-batches and extrapolated linearly; if the two slopes differ by more than `SETTLED`, the schedule is
not periodic yet, and twice as many are played. Time and memory do not grow with the number of micro-batches. Shorter
steps are played whole, so their prediction is exact. Extrapolation is within 0.5 % of the whole play under every
schedule (tests/simulate/test_step.py).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from terrace.cluster.cluster import Cluster
from terrace.model.spec import BlockSpec
from terrace.plan.members import longest_cases, stage_clusters
from terrace.plan.mesh import Mesh
from terrace.plan.plan import Plan
from terrace.plan.stage import whole_stage
from terrace.plan.state_bytes import blocks_bytes
from terrace.plan.wire import MessageClass
from terrace.program.instruction import Instruction, Op
from terrace.program.lowering import lowered, sharded
from terrace.program.program import Program
from terrace.program.report import StepReport, declared_ahead, times_beside, with_beside
from terrace.program.sharded_model import ShardedModel
from terrace.program.shares import share, share_apart
from terrace.program.stages import check_blocks, check_virtual, num_virtual, period, stages_of
from terrace.simulate.carried import Links, Priced, stage_costs, with_dealt
from terrace.simulate.chunks import plan_with_chunks
from terrace.simulate.cost import Costs, step_costs
from terrace.simulate.cycle import Cycle, play_cycle
from terrace.simulate.events import step_seconds
from terrace.simulate.gap_shares import Shares, any_shares, shares_to_try
from terrace.simulate.routed import alone_s
from terrace.simulate.stages import Passed, simulate_stages, stages_seconds
from terrace.simulate.work import Work

# Micro-batches times blocks of the longest steps that are played whole: a tenth of a second for several stages, up to a
# few seconds for a single program.
WHOLE_PASSES, WHOLE_PASSES_ALONE = 2_000, 20_000
SETTLED = 1e-3  # part of a step by which two lines may differ; beyond it, longer steps are played
_WORTH_IT = 1e-4  # part of a step by which gradients in more gaps must shorten it
_UNIT_S = 1e-12  # in which blocks are shared: whole numbers make the shares independent of the order of sums

Times = Mapping[str, float]  # seconds of a stage's step by category

# Waits for other stages: their messages, a tied block's gradient, and the gradient norm, where all stages meet.
WAITS_ON_STAGES = tuple(
    f"wait {message.value}" for message in (MessageClass.PIPELINE, MessageClass.TIE, MessageClass.CONTROL)
)


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step to predict.

    `blocks` is the whole model. `work` prices its blocks kernel by kernel; a tuple holds the forward FLOPs of each on
    one micro-batch instead. A plan without `stages` gets the best split, and one without numbers of chunks the best
    ones (`resolved`).
    """

    cluster: Cluster
    plan: Plan
    blocks: tuple[BlockSpec, ...]
    num_micros: int
    sequence: int
    work: Work | tuple[float, ...]
    beside: tuple[StepReport, ...] = ()  # by stage, what runs before the step (terrace.simulate.beside); empty: nothing
    links: Links = ()  # of each boundary of a pipeline of members, as measured; empty: those of the members

    @property
    def num_stages(self) -> int:
        return Mesh.of(self.cluster, self.plan).total("pipeline")

    @cached_property
    def model(self) -> ShardedModel:
        """The model that all its programs share. Raises `PlanError` for a plan that cannot run."""
        return sharded(self.cluster, self.plan, self.blocks, self.num_micros, self.sequence)

    @cached_property
    def program(self) -> Program:
        """A program without instructions, from which its blocks are priced. Raises as `model` does."""
        # Two micro-batches are enough to account for gradient accumulation; more do not change a block's cost.
        return Program(model=self.model, stage=whole_stage(len(self.blocks), min(2, self.num_micros), 1))

    @cached_property
    def costs(self) -> Costs:
        """Prices of blocks, equal in all its programs. Raises `PlanError` when the plan and the work disagree."""
        return step_costs(self.program, self.work)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A steady step, by stage. `programs`, `costs` and `passes` are those of the longest step that was played."""

    step: Step  # its plan leaves nothing out (`resolved`)
    times_s: tuple[Times, ...]
    expected_bytes: tuple[Mapping[tuple[MessageClass, str], int], ...]  # with means of those that depend on the batch
    programs: tuple[Program, ...]
    costs: tuple[Costs, ...]
    cycle: Cycle | None = None  # of islands: times and bytes are of its mean step, programs of one without exchanges

    @cached_property
    def sent_bytes(self) -> tuple[Mapping[tuple[MessageClass, str], int], ...]:
        """Sent bytes that do not depend on the batch."""
        by_batch = {MessageClass.CONTEXT} if self.step.plan.balance == "cost" else set()
        ahead = map(declared_ahead, self.expected_bytes)
        return tuple({key: size for key, size in sent.items() if key[0] not in by_batch} for sent in ahead)

    @cached_property
    def reports(self) -> tuple[StepReport, ...]:
        """Report of every stage; lazy, since a search reads only the times of most predictions."""
        found = with_beside(map(Program.report, self.programs, self.times_s, self.sent_bytes), self.step.beside)
        if self.cycle is None:
            return tuple(found)
        held = self.cycle.period.state_bytes  # the peak over its steps
        return tuple(replace(report, memory_bytes=held(stage)) for stage, report in enumerate(found))

    @cached_property
    def passes(self) -> tuple[Sequence[Passed], ...]:
        """Passes of every stage with their times, from another play; empty without a pipeline."""
        return tuple(simulate_stages(self.programs, self.costs).passes) if len(self.programs) > 1 else ()

    @property
    def step_s(self) -> float:
        """Seconds of the step on the first stage; equal on all, since stages meet in the gradient norm."""
        return sum(self.times_s[0].values())

    @property
    def played_micros(self) -> int:
        """Micro-batches of the longest step that was played."""
        return self.programs[0].num_micros

    @property
    def is_whole(self) -> bool:
        return self.played_micros == self.step.num_micros

    @property
    def bubble(self) -> float:
        """Share of the stages' time spent waiting for other stages."""
        return bubble(self.reports)

    @cached_property
    def busiest(self) -> int:
        return min(range(len(self.times_s)), key=lambda stage: _idle_s(self.times_s[stage]))


def idle_s(report: StepReport) -> float:
    return _idle_s(report.time_s)


def _idle_s(time_s: Times) -> float:
    return sum(time_s.get(name, 0.0) for name in WAITS_ON_STAGES)


def bubble(reports: Sequence[StepReport]) -> float:
    """Share of the stages' time spent waiting for other stages; 0 without a pipeline."""
    if len(reports) == 1:
        return 0.0
    return sum(map(idle_s, reports)) / (sum(report.step_s for report in reports) or 1.0)


def predict_step(step: Step, programs: Sequence[Program] = ()) -> Prediction:
    """Predict a step; under a plan with islands, the mean step of the cycle. Where members differ, the slowest decides.

    `programs` are the step's, if already built. Raises `PlanError` for a plan that cannot run.
    """
    known, *others = longest_cases(step.cluster, step.plan, step.num_micros)
    if stage_clusters(step.cluster, step.plan):  # each stage has a member of its own
        return predict_alike(step, programs)
    if not others and known == (step.cluster, step.num_micros):
        return predict_alike(step, programs)
    alike = (replace(step, cluster=cluster, num_micros=micros) for cluster, micros in (known, *others))
    return max(map(predict_alike, alike), key=lambda each: each.step_s)


def predict_alike(step: Step, programs: Sequence[Program] = ()) -> Prediction:
    """As `predict_step`, with `step.num_micros` micro-batches on every rank."""
    return _with_cycle(_steady(resolved(step), programs))


def _steady(step: Step, programs: Sequence[Program]) -> Prediction:
    num_stages = step.num_stages
    most = WHOLE_PASSES_ALONE if num_stages == 1 else WHOLE_PASSES
    if step.num_micros * len(step.blocks) > most:
        # Start after the first micro-batches, which fill the pipeline or the lanes of a single rank.
        every = period(step.plan, num_stages)
        least, further = max(num_stages + 2, 2 * every, 8), every * -(-num_stages // (4 * every))
        # The short play has the same remainder of the period as the whole step.
        while (short := least + (step.num_micros - least) % every) + 2 * further < step.num_micros // 2:
            played = [_play(step, short + times * further) for times in range(3)]
            # Two lines through three points: if they agree, the schedule has settled.
            before, line = (_line(one, two) for one, two in pairwise(played))
            if _agree(before, line):
                return line
            least, further = 2 * least, 2 * further
    return _played(step, programs) if programs else _play(step, step.num_micros)


def predict_on(prediction: Prediction, step: Step) -> Prediction:
    """Predict `step`, which is the step of `prediction` on a cluster with other rates.

    Programs do not depend on rates, so a step that was played whole is not lowered again. Raises `PlanError` for a plan
    that cannot run.
    """
    step = resolved(step)
    if not prediction.is_whole or step.plan != prediction.step.plan:
        return predict_step(step)
    programs = [replace(program, model=step.model) for program in prediction.programs]
    return _with_cycle(_played(step, programs))


def play_whole(step: Step) -> Prediction:
    """Predict a step by playing every micro-batch, for timelines and traces."""
    step = resolved(step)
    return _play(step, step.num_micros)


def resolved(step: Step) -> Step:
    """The step with a complete plan: blocks of every virtual stage, numbers of chunks, shares of gradients in gaps.

    Raises `PlanError` for a plan that cannot run.
    """
    if step.plan.finds_gaps:
        return _with_gaps(step)
    step = with_chunks(step)
    if step.num_stages == 1:
        return step
    # Stages named by the plan are kept.
    if step.plan.stages:
        check_stages(step)
        return step
    return _split(step, best_stages(step))


def _split(step: Step, stages: tuple[int, ...]) -> Step:
    """The step with this split of its blocks; both share what has been derived and priced already."""
    found = replace(step, plan=replace(step.plan, stages=stages))
    model = step.model.split(found.plan)
    program = replace(step.program, model=model)
    vars(found).update(model=model, program=program, costs=step.costs.of_stage(program, step.costs.update_s))
    return found


def check_stages(step: Step) -> None:
    """Raise `PlanError` unless the plan's `stages` assign each block to one virtual stage.

    A program checks this too, but memory and passes are counted before it is built.
    """
    if step.plan.stages and step.num_stages > 1:
        check_blocks(step.plan, num_virtual(step.plan, step.num_stages), len(step.blocks))


def _with_gaps(step: Step) -> Step:
    """The step with the `expert_gaps` that make it fastest; none if none helps."""

    def sharing(shares: Shares) -> Step:
        return replace(known, plan=known.plan.with_gaps(shares))

    known = resolved(replace(step, plan=step.plan.with_gaps(())))
    best, plan = known, known.plan
    tried = sharing(any_shares(plan.num_chunks[1]))
    # A few micro-batches already contain every kind of message.
    every = period(plan, step.num_stages)
    least = max(step.num_stages + 2, 2 * every)
    num_micros = min(step.num_micros, least + (step.num_micros - least) % every)
    best_s = _play(best, num_micros).step_s
    for shares in shares_to_try(tried.costs):
        found = sharing(shares)
        found_s = _play(found, num_micros).step_s
        if found_s < (1 - _WORTH_IT) * best_s:
            best, best_s = found, found_s
    return best


def with_chunks(step: Step) -> Step:
    """The step with missing numbers of chunks chosen (terrace.simulate.chunks).

    A step priced from FLOPs is returned unchanged: they do not give the seconds of small products. Raises `PlanError`
    for a plan that cannot run.
    """
    if not step.plan.leaves_out_chunks or not isinstance(step.work, Work):
        return step
    return replace(step, plan=plan_with_chunks(step.program, step.work))


def best_stages(step: Step) -> tuple[int, ...]:
    """Number of blocks of every virtual stage, in model order, that minimises the slowest one.

    A block costs the seconds of its passes on one micro-batch, including waits for tensor and context ranks. Where
    possible, the model state of a virtual stage fits its share of a device's memory. All chunks take as long.
    """
    cluster, plan, num_stages = step.cluster, step.plan, step.num_stages
    virtual = num_virtual(plan, num_stages)
    check_virtual(virtual, len(step.blocks))
    costs = step.costs
    seconds = [round(each / _UNIT_S) for each in _blocks_s(costs)]
    # Model state bounds a virtual stage's share of the blocks.
    sizes = [sum(each.values()) for each in blocks_bytes(plan, step.model.flats)]
    room = cluster.device.usable_bytes * num_stages / virtual
    if clusters := stage_clusters(cluster, plan):
        own = {each: [round(s / _UNIT_S) for s in _blocks_s(replace(step, cluster=each).costs)] for each in {*clusters}}
        apart = [own[clusters[stage]] for stage in stages_of(plan, step.blocks, num_stages, step.sequence)]
        return tuple(map(len, share_apart(apart, sizes, room)))
    return tuple(map(len, share(seconds, virtual, sizes, room)))


def _blocks_s(costs: Costs) -> list[float]:
    # With FLOPs for prices, equal blocks may differ.
    known: dict[object, float] = {}
    found = []
    for block, passes in enumerate(zip(costs.forward_s, costs.backward_s, strict=True)):
        key = costs.program.model.alike_inside(block), passes
        if key not in known:
            known[key] = _block_s(costs, block)
        found.append(known[key])
    return found


def _block_s(costs: Costs, block: int) -> float:
    # Costs hold the backward without recomputation.
    recompute_s = costs.recompute_s(block)
    passes = (Instruction(Op.FORWARD, block, 0), Instruction(Op.BACKWARD, block, 0))
    waits_s = math.fsum(seconds for each in passes for seconds in costs.waits_inside(each).values())
    if any(costs.program.model.block_program(block).routed):
        computed = zip(passes, (costs.forward_s[block], costs.backward_s[block] + recompute_s), ("", ""), strict=True)
        return waits_s + math.fsum(alone_s(costs.steps(*each)) for each in computed)
    return costs.forward_s[block] + costs.backward_s[block] + recompute_s + waits_s


def _play(step: Step, num_micros: int) -> Prediction:
    return _played(step, lowered(step.model, step.blocks, num_micros), step.costs)


def _with_cycle(steady: Prediction) -> Prediction:
    """The prediction of a steady step with what runs before it, or of its cycle if there are islands."""
    beside = steady.step.beside
    if not steady.step.plan.outer.has_islands:
        return replace(steady, times_s=times_beside(steady.times_s, beside)) if beside else steady
    whole = None if steady.is_whole else steady.times_s
    found = play_cycle(steady.programs, steady.step.work, steady.costs, whole)
    sent = found.mean_bytes(steady.programs, steady.expected_bytes)
    return replace(steady, times_s=found.mean_times_s, expected_bytes=sent, cycle=found)


def _played(step: Step, programs: Sequence[Program], known: Costs | None = None) -> Prediction:
    costs, times_s = play_stages(programs, step.work, known, drains=bool(step.beside), links=step.links)
    return Prediction(
        step=step,
        times_s=tuple(times_s),
        expected_bytes=tuple(with_dealt(program, step.work) for program in programs),
        programs=tuple(programs),
        costs=tuple(costs),
    )


def play_stages(
    programs: Sequence[Program], work: Priced, known: Costs | None = None, *, drains: bool = False, links: Links = ()
) -> tuple[list[Costs], list[dict[str, float]]]:
    """Costs of the programs of all stages, and seconds by category, played together; `work` and `links` as in `Step`.

    `known` are prices of blocks that the programs share; with `drains`, refreshes end before the next step begins.
    """
    costs = [replace(each, drains=drains) if drains else each for each in stage_costs(programs, work, known, links)]
    return costs, [step_seconds(programs[0], costs[0])] if len(programs) == 1 else stages_seconds(programs, costs)


def _agree(one: Prediction, other: Prediction) -> bool:
    pairs = zip(one.times_s, other.times_s, strict=True)
    return all(
        abs(seconds_of(first) - seconds_of(second)) <= SETTLED * _step_s(second)
        for first, second in pairs
        for seconds_of in (_step_s, _idle_s)
    )


def _step_s(time_s: Times) -> float:
    return sum(time_s.values())


def _line(short: Prediction, long: Prediction) -> Prediction:
    further = (long.step.num_micros - long.played_micros) / (long.played_micros - short.played_micros)
    times_s = []
    for one, two in zip(short.times_s, long.times_s, strict=True):
        names = dict.fromkeys((*one, *two))  # a category may first occur in the longer play; dict keeps the order
        slopes_s = {name: two.get(name, 0.0) - one.get(name, 0.0) for name in names}
        times_s.append({name: two.get(name, 0.0) + further * slope_s for name, slope_s in slopes_s.items()})
    sent = (
        {key: size + round(further * (size - before.get(key, 0))) for key, size in after.items()}
        for before, after in zip(short.expected_bytes, long.expected_bytes, strict=True)
    )
    return replace(long, times_s=tuple(times_s), expected_bytes=tuple(sent))
