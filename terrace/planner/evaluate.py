"""Cost of a candidate: for ranking in a search (`evaluate`), and from the programs of its stages (`played`).

For ranking, a plan without a pipeline is built and simulated as its program. A stage of a pipeline is the program of
its data ranks: for one tensor, context and pipeline coordinate, a plan is a data-parallel plan on the links of its data
ranks. Two short steps are simulated, of two and of three units of micro-batches. Further units repeat the third, so the
seconds of a step of M units are linear in M:

    T_r(M) = M u_r + tail_r      for stage r, with u_r its seconds per unit, exposed messages included.

Orders are played with the compute of the stages only, c_r per unit. Waits for messages are assumed to be spread
evenly, so the stage that waits most stretches the whole played span; work done once per step comes after it:

    step = max_r(u_r / c_r) span + max_r tail_r

A stage without layers waits while it would be idle, so its c_r is that of the busiest stage.

Where the schedule passes chunks in units of micro-batches (ZeroPP, 2402.03791), the program of a stage has chunks as
blocks: a chunk is gathered for a whole unit, the next one during the unit's pass, and gradients are reduced once per
unit. Delayed weight gradients are played at the backward of their chunk.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

from terrace.model.spec import BlockSpec
from terrace.plan.layout import Layout
from terrace.plan.mesh import STAGE
from terrace.plan.plan import Plan
from terrace.plan.products import check_products
from terrace.plan.recompute import operations_in
from terrace.plan.validate import num_micro_batches
from terrace.plan.wire import ROUTES, MessageClass
from terrace.plan.wire_rules import crossing
from terrace.planner.bound import Bounds
from terrace.planner.candidate import SLACK
from terrace.planner.operations import operations_s
from terrace.planner.parts import Needs, Part, kinds_of, parts_of
from terrace.planner.pipelines import Pipeline, block_work, neediest
from terrace.planner.ranking import Estimate
from terrace.planner.stage_specs import data_cluster, whole_blocks
from terrace.planner.stages import SERIAL, has_halves, pipeline
from terrace.planner.task import Candidate, Task, Wire, num_micros
from terrace.program.lowering import build, lengthened
from terrace.program.program import Program
from terrace.program.schedules.counts import most_due
from terrace.program.schedules.registry import takes_unit
from terrace.simulate.cost import Costs, step_costs, update_seconds
from terrace.simulate.events import step_seconds
from terrace.simulate.footprint import work_of
from terrace.simulate.layers import core_rounds
from terrace.simulate.masks import work_in
from terrace.simulate.step import Prediction, Step, predict_step

BUBBLE = "wait pipeline"
TIE = f"wait {MessageClass.TIE.value}"


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


def step_of(task: Task, plan: Plan) -> Step:
    """The step of a plan, ready for prediction. Raises `PlanError` for a batch that does not divide."""
    cluster = task.cluster
    return Step(
        cluster=cluster,
        plan=plan,
        blocks=task.blocks,
        num_micros=num_micro_batches(plan, Layout.of(cluster, plan), task.batch),
        sequence=task.sequence,
        work=work_of(cluster, plan, task.layer, task.sequence),
    )


class Evaluator:
    """Evaluates candidates of one task; stages are cached across candidates."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds, self.estimator, self.task = bounds, bounds.estimator, bounds.task
        self._played: dict[tuple[object, ...], _Played] = {}

    def plan(self, candidate: Candidate) -> Plan:
        """The plan of a candidate, including the chunks of its routed messages."""
        return self.estimator.plan(candidate)

    def evaluate(self, candidate: Candidate) -> Estimate:
        """Cost of a candidate, for ranking. Raises `PlanError` if it breaks a rule of plans or of its schedule."""
        micros = num_micros(self.task, candidate)
        if self.task.products is not None:  # programs of stages do not see the whole model
            check_products(self.task.cluster.device, candidate.mesh, self.plan(candidate), self.task.blocks)
        if candidate.schedule != SERIAL:
            return self._pipelined(candidate, micros)
        time_s = self._stage(self._whole(), candidate, micros).report(micros // candidate.unit)
        return self._estimate(candidate, time_s, self._evaluated_memory(candidate))

    def needed_bytes(self, candidate: Candidate) -> int:
        """Memory as in `evaluate`, without playing anything. Raises as `evaluate`."""
        return sum(self._evaluated_memory(candidate).values())

    def _evaluated_memory(self, candidate: Candidate) -> Mapping[str, int]:
        if candidate.schedule == SERIAL:
            return self._fullest(candidate, [Needs(self._whole(), (candidate.unit,))])
        # Among similar stages only the fullest is priced: the others cannot need more.
        return self._fullest(candidate, self._pipeline(candidate).neediest)

    def _fullest(self, candidate: Candidate, neediest: Iterable[Needs]) -> Mapping[str, int]:
        micros = num_micros(self.task, candidate)
        memories = (self.estimator.memory_bytes(candidate, needs, micros) for needs in neediest)
        return max(memories, key=lambda memory: sum(memory.values()))

    def played(self, candidate: Candidate) -> Estimate:
        """Cost of a candidate from the programs of its stages, for display. Raises as `evaluate`.

        Seconds are of the busiest stage, bytes of the stage that sends most, memory of the stage that needs most.
        """
        task = self.task
        predicted = predict_step(step_of(task, self.plan(candidate)))
        sent = max(predicted.expected_bytes, key=lambda each: sum(each.values()))
        return replace(
            self._estimate(candidate, predicted.times_s[predicted.busiest], self._memory(candidate, predicted)),
            step_s=predicted.step_s,
            sent_bytes={(message.value, tier): size for (message, tier), size in sent.items()},
            stages=predicted.step.plan.stages,
            chosen=predicted.step.plan.chosen,
        )

    def _memory(self, candidate: Candidate, predicted: Prediction) -> Mapping[str, int]:
        if candidate.schedule == SERIAL:
            return self._evaluated_memory(candidate)
        orders, waiting = pipeline(
            candidate.schedule,
            candidate.mesh.total("pipeline"),
            candidate.chunks,
            num_micros(self.task, candidate),
            candidate.unit if takes_unit(candidate.schedule) else 1,
        )
        parts = parts_of(self.estimator.split.cut(predicted.step.plan.stages), orders.placement)
        return self._fullest(candidate, neediest(parts, waiting, most_due(orders)))

    def _whole(self) -> Part:
        return self.estimator.split.whole()

    def stages(self, candidate: Candidate) -> tuple[Pipeline, list[_Played]]:
        """The pipeline of a candidate, and the step of each stage by itself."""
        pipeline = self._pipeline(candidate)
        return pipeline, [self._stage(part, candidate, num_micros(self.task, candidate)) for part in pipeline.parts]

    def _pipeline(self, candidate: Candidate) -> Pipeline:
        recompute, unit, schedule, chunks, micro_batch, _, mesh, _ = candidate
        return self.bounds.pipeline(mesh, micro_batch, recompute, schedule, chunks, unit)

    def is_slower(self, candidate: Candidate, than_s: float) -> bool:
        """Whether a pipeline is known to exceed `than_s`, decided from its most telling stages. Raises as `evaluate`.

        Much cheaper than `evaluate`, which plays all stages and needs their memory.
        """
        if candidate.schedule == SERIAL or math.isinf(than_s):
            return False
        micros, pipeline = num_micros(self.task, candidate), self._pipeline(candidate)
        stretch, tail_s, delay_s = 0.0, 0.0, self._delay_s(candidate, pipeline)
        alone_s = dict(zip(pipeline.parts, pipeline.stages_s, strict=True))
        stretched_s = dict(zip(pipeline.parts, self._stretched_s(pipeline), strict=True))
        for part in sorted(alone_s, key=alone_s.__getitem__, reverse=True):
            played = self._stage(part, candidate, micros)
            stretch = max(stretch, played.unit_s / (candidate.unit * stretched_s[part]))
            total_s = math.fsum(played.report(micros // candidate.unit).values())
            tail_s = max(tail_s, total_s - micros // candidate.unit * played.unit_s)
            if (stretch * pipeline.span_s + tail_s + delay_s) * SLACK > than_s:
                return True
        return False

    def _pipelined(self, candidate: Candidate, micros: int) -> Estimate:
        pipeline, played = self.stages(candidate)
        stretched_s, lines, units = self._stretched_s(pipeline), self.lines(candidate), micros // candidate.unit
        totals = [math.fsum(line.values()) for line in lines]
        stretch = max(stage.unit_s / (candidate.unit * own_s) for stage, own_s in zip(played, stretched_s, strict=True))
        tail_s = max(total - units * stage.unit_s for total, stage in zip(totals, played, strict=True))
        slowest = max(range(len(lines)), key=totals.__getitem__)
        time_s = dict(lines[slowest])
        step_s = stretch * pipeline.span_s + tail_s + self._delay_s(candidate, pipeline)
        # The bubble is the rest of the step, so that the categories of the busiest stage sum to it.
        time_s[BUBBLE] = max(0.0, step_s - totals[slowest])
        return self._estimate(candidate, time_s, self._evaluated_memory(candidate))

    def _stretched_s(self, pipeline: Pipeline) -> list[float]:
        """Compute per micro-batch relative to which each stage's waits are measured."""
        num_inner, busiest_s = self.estimator.split.num_inner, max(pipeline.stages_s)
        stages = zip(pipeline.parts, pipeline.stages_s, strict=True)
        return [own_s if num_inner(part.runs) else busiest_s for part, own_s in stages]

    def _delay_s(self, candidate: Candidate, pipeline: Pipeline) -> float:
        mesh, micros = candidate.mesh, num_micros(self.task, candidate)
        if not mesh.divides_stacks:
            return 0.0
        delays = self.bounds.chains.delays
        prices = delays.prices(mesh, candidate.placement)
        return delays.of(mesh, candidate.schedule, prices, pipeline.parts).added_s(0.0, micros)

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
        how = whole_chunks, has_halves(candidate.schedule, candidate.mesh)
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
        mixes = any(estimator.specs[kind].has_stacks for kind in part.kinds)
        inside = mesh.total("tensor") * mesh.total("context") > 1 or mixes
        if candidate.schedule == SERIAL and inside:
            return self._whole_program(part, candidate, micros)
        if mixes and mesh.total("tensor") > 1 and not takes_unit(candidate.schedule):
            return self._stage_program(part, candidate, micros)
        plan = self.plan(candidate)
        # Its blocks declare no matrices; their products are part of the blocks' seconds.
        plan = replace(plan, mapping={}, tensor_chunks=1, wire=_data_wire(plan), schedule=None, products=None)
        if not mixes:
            plan = plan.with_whole_stacks()
        if takes_unit(candidate.schedule):
            return self._chunks_program(part, candidate, replace(plan, recompute=()), micros)
        blocks = estimator.stage_blocks(part.kinds, mesh)
        # Operations are counted in the seconds of the backwards.
        recompute_s = self._operations_s(part, candidate)
        plan = replace(plan, recompute=tuple(entry for entry in plan.recompute if ":" not in entry))
        program = build(data_cluster(task.cluster, mesh.state), plan, blocks, micros)
        numbers, halves = (candidate.mesh, candidate.micro_batch), has_halves(candidate.schedule, candidate.mesh)
        seconds = [estimator.block(kind, *numbers, halves=halves) for kind in part.kinds]
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
        accumulate, again = self.estimator.accumulates(mesh, candidate.micro_batch), candidate.recompute
        forms = (mesh.inside,)
        kinds = range(len(self.estimator.specs))
        alone = [block_work(self.estimator, kind, forms, candidate.micro_batch, again, accumulate) for kind in kinds]
        costs = Costs(
            forward_s=tuple(math.fsum(alone[kind][0] for kind in kinds_of(runs)) for runs in part.chunks),
            backward_s=tuple(math.fsum(alone[kind][1] for kind in kinds_of(runs)) for runs in part.chunks),
            update_s=update_seconds(program),
            program=program,
        )
        return program, costs

    def _stage_program(self, part: Part, candidate: Candidate, micros: int) -> tuple[Program, Costs]:
        task, mesh = self.task, candidate.mesh
        cluster = data_cluster(task.cluster, mesh.group(*STAGE))
        rows = mesh.only("tensor", "context", "data").mapping([tier.name for tier in cluster.tiers])
        blocks = whole_blocks(task, part.kinds)
        plan = replace(
            self.plan(candidate),
            mapping={tier: row for tier, row in rows.items() if row.keys() - {"data"}},
            schedule=None,
            recompute=task.recomputed(candidate.recompute, 0, [each.name for each in blocks if not each.at_an_end]),
        )
        # The program of a single stage sends no messages between stages.
        program = build(cluster, crossing(cluster, plan), blocks, micros, task.sequence)
        return program, step_costs(program, self.estimator.work(mesh, candidate.micro_batch))

    def _whole_program(self, part: Part, candidate: Candidate, micros: int) -> tuple[Program, Costs]:
        task = self.task
        program = build(task.cluster, self.plan(candidate), task.blocks, micros, task.sequence)
        if candidate.mesh.divides_stacks:
            return program, step_costs(program, self.estimator.work(candidate.mesh, candidate.micro_batch))
        known = [self.estimator.compute(kind, candidate) for kind in range(len(self.estimator.specs))]
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
