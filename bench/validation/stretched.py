"""A step of another system from the estimates of its blocks: short steps of each stage, stretched over its orders.

No program of this project waits as these systems do, so their steps cannot be played. A plan without a pipeline is
simulated as its program. A stage of a pipeline is the program of its data ranks: for one tensor, context and pipeline
coordinate, a plan is a data-parallel plan on the links of its data ranks. Two short steps are simulated, of two and of
three units of micro-batches. Further units repeat the third, so the seconds of a step of M units are linear in M:

    T_r(M) = M u_r + tail_r      for stage r, with u_r its seconds per unit, exposed messages included.

Orders are played with the compute of the stages only, c_r per unit. Waits for messages are assumed to be spread
evenly, so the stage that waits most stretches the whole played span; work done once per step comes after it:

    step = max_r(u_r / c_r) span + max_r tail_r

A stage without layers waits while it would be idle, so its c_r is that of the busiest stage. Experts are on all ranks.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from terrace.model.spec import BlockSpec
from terrace.plan.plan import Plan
from terrace.plan.recompute import operations_in
from terrace.plan.wire import ROUTES, MessageClass
from terrace.planner.estimate import Estimator
from terrace.planner.evaluate import Evaluator
from terrace.planner.operations import operations_s
from terrace.planner.parts import Part, Work, kinds_of, parts_of, work_of_runs
from terrace.planner.price import Prices
from terrace.planner.ranking import Estimate
from terrace.planner.stage_specs import data_cluster
from terrace.planner.stages import SERIAL, has_halves, pipeline
from terrace.planner.task import Candidate, Placement, Task, Wire, num_micros
from terrace.program.lowering import build, lengthened
from terrace.program.program import Program
from terrace.program.schedules.orders import Orders
from terrace.program.schedules.registry import takes_unit
from terrace.program.schedules.seconds import TaskSeconds
from terrace.simulate.cost import Costs, update_seconds
from terrace.simulate.events import step_seconds
from terrace.simulate.layers import core_rounds
from terrace.simulate.masks import work_in
from terrace.simulate.timeline import play

BUBBLE = "wait pipeline"
TIE = f"wait {MessageClass.TIE.value}"


@dataclass(frozen=True)
class Pipeline:
    """Orders, blocks of each stage, `works[stage][chunk]` per micro-batch, and `edge_s` of a message between stages.

    A task that sends to another stage is longer by `send_s`, the slow-down of compute by the message.
    """

    orders: Orders
    parts: tuple[Part, ...]
    works: tuple[tuple[Work, ...], ...]
    edge_s: float
    send_s: float = 0.0

    def seconds(self, stretch: Sequence[float]) -> TaskSeconds:
        """Seconds of each task, with stage r slowed by the factor `stretch[r]`."""
        found: list[Work] = [(0.0, 0.0, 0.0)] * self.orders.num_virtual
        for row, works, factor in zip(self.orders.placement, self.works, stretch, strict=True):
            for virtual, (forward_s, backward_s, weight_s) in zip(row, works, strict=True):
                found[virtual] = (factor * forward_s, factor * backward_s, factor * weight_s)
        onward, back = self.sends_s
        return TaskSeconds(
            forward_s=tuple(work[0] + send_s for work, send_s in zip(found, onward, strict=True)),
            backward_s=tuple(work[1] + send_s for work, send_s in zip(found, back, strict=True)),
            input_s=tuple(work[1] - work[2] + send_s for work, send_s in zip(found, back, strict=True)),
            weight_s=tuple(work[2] for work in found),
            edge_s=(self.edge_s,) * (self.orders.num_virtual - 1),
        )

    @cached_property
    def sends_s(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Seconds by which sending delays a forward and a backward, per virtual stage."""
        holders, num_virtual = self.orders.holders(), self.orders.num_virtual
        # Neighbouring chunks on one stage, as at the bottom of a V, exchange no message.
        between = [self.send_s * (holders[k][0] != holders[k + 1][0]) for k in range(num_virtual - 1)]
        return (*between, 0.0), (0.0, *between)

    @cached_property
    def span_s(self) -> float:
        """Makespan of the compute: the orders played with compute seconds only."""
        return play(self.orders, self.seconds([1.0] * self.orders.num_stages)).makespan_s

    @cached_property
    def stages_s(self) -> tuple[float, ...]:
        """Compute seconds per stage and micro-batch."""
        return tuple(math.fsum(work[0] + work[1] for work in works) for works in self.works)


def build_pipeline(prices: Prices, candidate: Candidate) -> Pipeline:
    """The pipeline of a candidate. Raises `PlanError` for numbers that the schedule cannot run."""
    mesh, unit = candidate.mesh, candidate.unit if takes_unit(candidate.schedule) else 1
    numbers = mesh.total("pipeline"), candidate.chunks, num_micros(prices.task, candidate), unit
    orders, _ = pipeline(candidate.schedule, *numbers)
    alone, contents = prices.works(candidate), prices.contents(candidate)
    return Pipeline(
        orders=orders,
        parts=parts_of(contents, orders.placement),
        works=tuple(tuple(work_of_runs(alone, contents[virtual]) for virtual in row) for row in orders.placement),
        edge_s=prices.estimator.boundary_s(mesh, candidate.micro_batch),
        send_s=prices.estimator.sending_s(mesh, candidate.micro_batch),
    )


@dataclass(frozen=True, eq=False)
class _Played:
    """A stage's step as a linear function: seconds of `num_units` units, and of each further unit."""

    time_s: Mapping[str, float]
    further_s: Mapping[str, float]
    num_units: int

    @property
    def unit_s(self) -> float:
        return math.fsum(self.further_s.values())

    def report(self, num_units: int) -> dict[str, float]:
        more = num_units - self.num_units
        time_s = {name: self.time_s.get(name, 0.0) + more * add for name, add in self.further_s.items()}
        return {name: value for name, value in time_s.items() if value > 0}


class StretchedEvaluator(Evaluator):
    """Evaluates candidates of one task; stages are cached across candidates."""

    def __init__(self, task: Task, estimator: Estimator) -> None:
        super().__init__(task, estimator)
        self._played: dict[tuple[object, ...], _Played] = {}
        self._pipelines: dict[Candidate, Pipeline] = {}

    def played(self, candidate: Candidate) -> Estimate:
        """As `evaluate`: no program runs this way."""
        return self.evaluate(candidate)

    def evaluate(self, candidate: Candidate) -> Estimate:
        """Cost of a candidate. Raises `PlanError` if it breaks a rule of plans or of its schedule."""
        micros = num_micros(self.task, candidate)
        if candidate.schedule != SERIAL:
            return self._pipelined(candidate, micros)
        time_s = self._stage(self.estimator.split.whole(), candidate, micros).report(micros // candidate.unit)
        return self._estimate(candidate, time_s, self.memory_bytes(candidate))

    def stages(self, candidate: Candidate) -> tuple[Pipeline, list[_Played]]:
        """The pipeline of a candidate, and the step of each stage by itself."""
        pipeline = self._pipeline(candidate)
        return pipeline, [self._stage(part, candidate, num_micros(self.task, candidate)) for part in pipeline.parts]

    def _pipeline(self, candidate: Candidate) -> Pipeline:
        key = candidate._replace(placement=Placement(-1, -1, -1))
        if key not in self._pipelines:
            self._pipelines[key] = build_pipeline(self.prices, candidate)
        return self._pipelines[key]

    def _pipelined(self, candidate: Candidate, micros: int) -> Estimate:
        pipeline, played = self.stages(candidate)
        stretched_s, lines, units = self._stretched_s(pipeline), self.lines(candidate), micros // candidate.unit
        totals = [math.fsum(line.values()) for line in lines]
        stretch = max(stage.unit_s / (candidate.unit * own_s) for stage, own_s in zip(played, stretched_s, strict=True))
        tail_s = max(total - units * stage.unit_s for total, stage in zip(totals, played, strict=True))
        slowest = max(range(len(lines)), key=totals.__getitem__)
        time_s = dict(lines[slowest])
        step_s = stretch * pipeline.span_s + tail_s
        # The bubble is the rest of the step, so that the categories of the busiest stage sum to it.
        time_s[BUBBLE] = max(0.0, step_s - totals[slowest])
        return self._estimate(candidate, time_s, self.memory_bytes(candidate))

    def _stretched_s(self, pipeline: Pipeline) -> list[float]:
        """Compute per micro-batch relative to which each stage's waits are measured."""
        num_inner, busiest_s = self.estimator.split.num_inner, max(pipeline.stages_s)
        stages = zip(pipeline.parts, pipeline.stages_s, strict=True)
        return [own_s if num_inner(part.runs) else busiest_s for part, own_s in stages]

    def lines(self, candidate: Candidate) -> list[dict[str, float]]:
        """Seconds by category of each stage's step by itself."""
        pipeline, played = self.stages(candidate)
        units = num_micros(self.task, candidate) // candidate.unit
        # Inner stages are mostly equal; each distinct one is computed once.
        known = {part: stage.report(units) for part, stage in zip(pipeline.parts, played, strict=True)}
        found = [known[part] for part in pipeline.parts]
        for owner, stages in _ties(self.task, pipeline):
            tie_s = self.estimator.tie_s(candidate, owner)
            for stage in stages if tie_s > 0 else ():
                found[stage] = found[stage] | {TIE: found[stage].get(TIE, 0.0) + tie_s}
        return found

    def _estimate(self, candidate: Candidate, time_s: Mapping[str, float], memory: Mapping[str, int]) -> Estimate:
        return Estimate(
            candidate=candidate,
            num_micros=num_micros(self.task, candidate),
            step_s=math.fsum(time_s.values()),
            time_s=time_s,
            memory_bytes=memory,
        )

    def _stage(self, part: Part, candidate: Candidate, micros: int) -> _Played:
        units = micros // candidate.unit
        # Up to three units are simulated directly. Otherwise two lengths give the line; the first unit differs from
        # the rest.
        lengths = (units,) if candidate.schedule == SERIAL and units <= 3 else (min(2, units), min(2, units) + 1)
        whole_chunks = takes_unit(candidate.schedule)
        # The data-parallel program depends on the schedule only through its chunks and its halves of backwards.
        how = whole_chunks, has_halves(candidate.schedule)
        key = (part if whole_chunks else part.runs, *how, candidate._replace(schedule="", chunks=1), lengths)
        if key not in self._played:
            self._played[key] = self._play(part, candidate, lengths)
        return self._played[key]

    def _play(self, part: Part, candidate: Candidate, lengths: tuple[int, ...]) -> _Played:
        program, costs = self.program(part, candidate, lengths[0] * candidate.unit)
        steps = [step_seconds(program, costs)]
        for units in lengths[1:]:
            longer = lengthened(program, units * candidate.unit)
            steps.append(step_seconds(longer, costs.of_stage(longer, costs.update_s)))
        names = dict.fromkeys(name for step in steps for name in step)
        # The difference of the two lengths is one more unit, category by category.
        further = {name: steps[-1].get(name, 0.0) - steps[0].get(name, 0.0) for name in names}
        return _Played(steps[0], further, lengths[0])

    def program(self, part: Part, candidate: Candidate, micros: int) -> tuple[Program, Costs]:
        """The program of a stage for `micros` micro-batches, and its costs.

        Without a pipeline it is the program of the plan. With one it is the program of the data ranks only, and tensor
        and context messages count as compute.
        """
        estimator, task, mesh = self.estimator, self.task, candidate.mesh
        # Without a pipeline the plan's own program is small enough to simulate, messages inside blocks included.
        if candidate.schedule == SERIAL and mesh.total("tensor") * mesh.total("context") > 1:
            return self._whole_program(part, candidate, micros)
        plan = self.plan(candidate)
        # Its blocks declare no matrices; their products are part of the blocks' seconds.
        plan = replace(plan, mapping={}, tensor_chunks=1, wire=_data_wire(plan), schedule=None, products=None)
        plan = plan.with_whole_stacks()
        if takes_unit(candidate.schedule):
            return self._chunks_program(part, candidate, replace(plan, recompute=()), micros)
        blocks = estimator.stage_blocks(part.kinds, mesh)
        # Operations are counted in the seconds of the backwards.
        recompute_s = self._operations_s(part, candidate)
        plan = replace(plan, recompute=tuple(entry for entry in plan.recompute if ":" not in entry))
        program = build(data_cluster(task.cluster, mesh.state), plan, blocks, micros)
        seconds = [estimator.block(kind, mesh, candidate.micro_batch) for kind in part.kinds]
        costs = Costs(
            forward_s=tuple(block.forward_s for block in seconds),
            backward_s=tuple(block.backward_s + own_s for block, own_s in zip(seconds, recompute_s, strict=True)),
            update_s=update_seconds(program),
            program=program,
        )
        return program, costs

    def _chunks_program(self, part: Part, candidate: Candidate, plan: Plan, micros: int) -> tuple[Program, Costs]:
        mesh = candidate.mesh
        chunks = self.estimator.chunk_params(part, mesh)
        blocks = [BlockSpec(name=f"chunk {index}", params=params) for index, params in enumerate(chunks)]
        program = build(data_cluster(self.task.cluster, mesh.state), plan, blocks, micros)
        # Recomputation is counted in the seconds of the backwards; the program's own plan has none.
        alone = self.prices.works(candidate)
        works = [work_of_runs(alone, runs) for runs in part.chunks]
        costs = Costs(
            forward_s=tuple(work[0] for work in works),
            backward_s=tuple(work[1] for work in works),
            update_s=update_seconds(program),
            program=program,
        )
        return program, costs

    def _whole_program(self, part: Part, candidate: Candidate, micros: int) -> tuple[Program, Costs]:
        task = self.task
        program = build(task.cluster, self.plan(candidate), task.blocks, micros, task.sequence)
        numbers = candidate.mesh, candidate.micro_batch
        accumulate = self.estimator.accumulates(*numbers)
        known = [self.estimator.compute(kind, *numbers, accumulate) for kind in range(len(self.estimator.specs))]
        seconds = [known[kind] for kind in part.kinds]
        work, device = self.estimator.work(candidate.mesh, candidate.micro_batch), task.cluster.device
        rounds = [core_rounds(device, work_in(work, spec, device.backend)) for spec in self.estimator.specs]
        costs = Costs(
            forward_s=tuple(block.forward_s for block in seconds),
            backward_s=tuple(block.input_s + block.weight_s for block in seconds),
            update_s=update_seconds(program),
            program=program,
            weight_s=tuple(block.weight_s for block in seconds),
            rounds=tuple(rounds[kind] for kind in part.kinds),
            operations_s=self._operations_s(part, candidate),
        )
        return program, costs

    def _operations_s(self, part: Part, candidate: Candidate) -> tuple[float, ...]:
        """Seconds of recomputed operations of each block of a stage, where less than the whole block is recomputed."""
        estimator, device = self.estimator, self.task.cluster.device
        work = estimator.work(candidate.mesh, candidate.micro_batch)
        again = self.task.recomputations.values[candidate.recompute]
        layers, found = 0, list[float]()
        for kind in part.kinds:
            is_layer = not estimator.specs[kind].at_an_end
            parts = again.parts if not candidate.first or layers < candidate.first else again.least
            layers += is_layer
            parts = operations_in(parts) if is_layer else ()
            found.append(operations_s(device, estimator.specs[kind], work, parts))
        return tuple(found)


def _ties(task: Task, pipeline: Pipeline) -> list[tuple[int, tuple[int, int]]]:
    """(Owner, stages of owner and user) of blocks tied across stages."""
    orders, sizes = pipeline.orders, [0] * pipeline.orders.num_virtual
    for row, part in zip(orders.placement, pipeline.parts, strict=True):
        for virtual, runs in zip(row, part.chunks, strict=True):
            sizes[virtual] = len(kinds_of(runs))
    stops, holders = list(accumulate(sizes)), orders.holders()
    ties = ((owner, block) for block, spec in enumerate(task.blocks) for owner in spec.tied_to)
    # Only a gradient is sent.
    pairs = (pair for pair in ties if task.blocks[pair[0]].num_trainable)
    found = [(pair[0], tuple(holders[bisect_right(stops, block)][0] for block in pair)) for pair in pairs]
    # In a V-shaped schedule both ends are on one stage, and a tied matrix needs no message.
    return [(owner, (first, second)) for owner, (first, second) in found if first != second]


def _data_wire(plan: Plan) -> Wire:
    return {message: row for message, row in plan.wire.items() if message in ROUTES}
