"""A candidate as it is shown: its step played as programs, and the memory of its fullest stage."""

from collections import deque
from collections.abc import Mapping, Sequence

from terrace.plan.layout import Layout
from terrace.plan.plan import Plan
from terrace.plan.products import check_products
from terrace.plan.search_limits import FINALISTS
from terrace.plan.validate import num_micro_batches
from terrace.planner.estimate import Estimator
from terrace.planner.floors import Floors
from terrace.planner.parts import Needs, Runs, neediest, parts_of
from terrace.planner.price import Prices
from terrace.planner.ranking import Estimate
from terrace.planner.stages import SERIAL, held
from terrace.planner.task import Candidate, Task, num_micros
from terrace.program.schedules.registry import takes_unit
from terrace.simulate.footprint import work_of
from terrace.simulate.step import Prediction, Step, predict_step
from terrace.simulate.with_lengths import with_lengths


def step_of(task: Task, plan: Plan) -> Step:
    """The step of a plan, ready for prediction. Raises `PlanError` for a batch that does not divide."""
    cluster = task.cluster
    step = Step(
        cluster=cluster,
        plan=plan,
        blocks=task.blocks,
        num_micros=num_micro_batches(plan, Layout.of(cluster, plan), task.batch),
        sequence=task.sequence,
        work=work_of(cluster, plan, task.layer, task.sequence),
    )
    return with_lengths(step, task.lengths)


class Evaluator:
    """Plays candidates of one task, and counts their memory; keeps what its searches share."""

    def __init__(self, task: Task, estimator: Estimator | None = None) -> None:
        self.task, self.prices = task, Prices(task, estimator or Estimator(task))
        self.estimator = self.prices.estimator
        self.floors = Floors(self.estimator, self.prices.messages, self.prices.whole[0][0])
        self._memories: dict[tuple[Candidate, tuple[Runs, ...]], Mapping[str, int]] = {}
        self._predictions = deque[Prediction](maxlen=FINALISTS)

    def plan(self, candidate: Candidate) -> Plan:
        return self.estimator.plan(candidate)

    def needed_bytes(self, candidate: Candidate) -> int:
        """Memory of the fullest stage. Raises `PlanError` for a broken rule of plans or of the schedule."""
        if self.task.products is not None:
            check_products(self.task.cluster.device, candidate.mesh, self.plan(candidate), self.task.blocks)
        return sum(self.memory_bytes(candidate).values())

    def memory_bytes(self, candidate: Candidate) -> Mapping[str, int]:
        """Memory of the fullest stage by category, before its blocks are split as in a program."""
        return self._memory(candidate, self.prices.contents(candidate))

    def played(self, candidate: Candidate) -> Estimate:
        """Cost of a candidate from the programs of its stages. Raises as `needed_bytes`.

        Seconds are of the busiest stage, bytes of the stage that sends most, memory of the stage that needs most.
        """
        if self.task.products is not None:
            check_products(self.task.cluster.device, candidate.mesh, self.plan(candidate), self.task.blocks)
        predicted = predict_step(step_of(self.task, self.plan(candidate)))
        plan = predicted.step.plan
        self._predictions.append(predicted)
        sent = max(predicted.expected_bytes, key=lambda each: sum(each.values()))
        return Estimate(
            candidate=candidate,
            num_micros=num_micros(self.task, candidate),
            step_s=predicted.step_s,
            time_s=predicted.times_s[predicted.busiest],
            memory_bytes=self._memory(candidate, self.estimator.split.cut(plan.stages)),
            sent_bytes={(message.value, tier): size for (message, tier), size in sent.items()},
            stages=plan.stages,
            chosen=plan.chosen,
        )

    def predicted(self, step: Step) -> Prediction:
        """The prediction of a step; a known one if the step is among the last `FINALISTS` that were played."""
        for known in self._predictions:
            if known.step.plan == step.plan and known.step.num_micros == step.num_micros:
                return known
        return predict_step(step)

    def _memory(self, candidate: Candidate, contents: tuple[Runs, ...]) -> Mapping[str, int]:
        key = candidate, contents
        if key not in self._memories:
            self._memories[key] = self._counted(candidate, contents)
        return self._memories[key]

    def _counted(self, candidate: Candidate, contents: tuple[Runs, ...]) -> Mapping[str, int]:
        micros = num_micros(self.task, candidate)
        if candidate.schedule == SERIAL:
            needs: Sequence[Needs] = [Needs(self.estimator.split.whole(), (candidate.unit,))]
        else:
            unit = candidate.unit if takes_unit(candidate.schedule) else 1
            numbers = candidate.mesh.total("pipeline"), candidate.chunks, micros, unit
            placement, waiting, due = held(candidate.schedule, *numbers)
            needs = neediest(parts_of(contents, placement), waiting, due)
        found = [self.estimator.memory_bytes(candidate, each, micros) for each in needs]
        return max(found, key=lambda memory: sum(memory.values()))
