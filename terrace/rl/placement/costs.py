"""Seconds and bytes of one role on a pool: training, scoring, generating, and the hand-over between two of them.

Training is the predicted step, scoring the predicted program of its forwards (`terrace.program.lowering`), the
hand-over its predicted moves. Roles with equal blocks share results. Memory has two parts: `held` by a role all the
time (parameters, gradients, optimizer states and message buffers), and `working` while it runs; of the roles of a pool
only the largest `working` counts.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from terrace.cluster.cluster import Cluster
from terrace.model.block_operations import layer_operations
from terrace.model.hf.names import stored_bytes
from terrace.plan.kinds import Kinds
from terrace.plan.mesh import Mesh
from terrace.plan.plan import Plan
from terrace.plan.wire import FORMATS
from terrace.planner.evaluate import step_of
from terrace.planner.task import Task
from terrace.program.lowering import build_stages, forward_programs
from terrace.rl.hand_over.seconds import HandOverCost, predict_hand_over
from terrace.rl.hand_over.transition import Transition, to_writer
from terrace.rl.placement.dataflow import Dataflow, Role
from terrace.rl.placement.generation import Generation, Replica
from terrace.simulate.activations import activations_of
from terrace.simulate.footprint import CPU_CONTEXT_BYTES, CUDA_ALLOCATOR_FACTOR, CUDA_CONTEXT_BYTES, work_of
from terrace.simulate.fullest import Job, stage_footprints
from terrace.simulate.step import Step, play_stages, predict_step

HELD = ("params", "secondary", "grads", "optimizer", "outer", "feedback", "buffers")
_BESIDE = ("context", "allocator")  # no tensors
_PLAYED = 8  # micro-batches of scores, for each stage, that are played; more are carried on in proportion


@dataclass(frozen=True, kw_only=True, eq=False)
class Cost:
    """A role under a plan on a pool: seconds per iteration, and bytes of a rank.

    A rank holds at most `held_bytes`, and at most `working_bytes` more while the role runs, possibly on another stage.
    So roles that share ranks need at most the sum of `held_bytes` and the largest `working_bytes`.
    """

    plan: Plan
    train_s: float = 0.0
    score_s: float = 0.0
    held_bytes: int
    working_bytes: int

    @cached_property
    def ways(self) -> tuple[float, float, int, int]:
        """Criteria by which costs are compared: seconds of training and scoring, bytes held and working."""
        return self.train_s, self.score_s, self.held_bytes, self.working_bytes


class Costs:
    """Costs of the roles of a dataflow, cached per role, pool and plan."""

    def __init__(self, dataflow: Dataflow) -> None:
        self.dataflow = dataflow
        self._of_plan: dict[tuple[object, ...], Cost] = {}
        self._generations: dict[tuple[Cluster, int, int], Generation] = {}
        self._hand_overs: dict[tuple[object, ...], HandOverCost] = {}

    def of(self, role: Role, cluster: Cluster, plan: Plan) -> Cost:
        """Cost of a role that trains or scores. Raises `PlanError` for a plan that cannot run there."""
        key = (*self.key(role), cluster, _texts(plan))
        if key not in self._of_plan:
            self._of_plan[key] = (
                self._trained(role, cluster, plan) if role.trains else self._scored(role, cluster, plan)
            )
        return self._of_plan[key]

    def generation(self, cluster: Cluster, rows: int, room_bytes: float) -> Generation:
        flow = self.dataflow
        replica = Replica.of(cluster, flow.generator.model, rows, flow.compute)
        # The room only affects how many sequences run at a time.
        key = cluster, rows, replica.running(flow, room_bytes)
        if key not in self._generations:
            self._generations[key] = replica.generation(flow, key[-1])
        return self._generations[key]

    def hand_over(self, cluster: Cluster, plan: Plan, rows: int) -> HandOverCost:
        key = cluster, _texts(plan), rows
        if key not in self._hand_overs:
            self._hand_overs[key] = predict_hand_over(cluster, self._transition(cluster, plan, rows))
        return self._hand_overs[key]

    def written(self, cluster: Cluster, plan: Plan) -> HandOverCost:
        """Cost of writing the weights into the folder that servers load (terrace.rl.hand_over.folder).

        With a disk below the device (`device.below.disk`) its seconds count, too: written once, read by every server
        at the same time.
        """
        num_bytes = stored_bytes(self.dataflow.source.model, FORMATS[self.dataflow.compute].element_bytes)
        cost = predict_hand_over(cluster, to_writer(self._transition(cluster, plan, 1)))
        disk = cluster.device.below.get("disk")
        disk_s = num_bytes / disk.write_bytes_per_s + num_bytes / disk.read_bytes_per_s if disk is not None else 0.0
        return replace(cost, seconds=cost.seconds + disk_s, sent_bytes={**cost.sent_bytes, "folder": num_bytes})

    def _transition(self, cluster: Cluster, plan: Plan, rows: int) -> Transition:
        blocks = self.dataflow.source.blocks
        programs = build_stages(cluster, plan, blocks, self._micros(cluster, plan), self.dataflow.sequence)
        held = [program.stage.held for program in programs]
        return Transition.of(cluster, plan, blocks, programs[0].model.flats, held, rows)

    def task(self, role: Role, cluster: Cluster) -> Task:
        """A role's optimizer step as a planner task."""
        flow = self.dataflow
        return Task(
            model=role.model,
            cluster=cluster,
            batch=flow.update_batch,
            sequence=flow.sequence,
            compute=flow.compute,
            master=flow.masters,
            messages=flow.messages,
            declared=role.blocks,
            operations=(),  # one of many searches, so whole layers alone
        )

    def key(self, role: Role) -> tuple[object, ...]:
        """Cache key: equal for roles with equal costs."""
        return role.model, role.trains, role.scores

    def _micros(self, cluster: Cluster, plan: Plan) -> int:
        return step_of(self.task(self.dataflow.source, cluster), plan).num_micros

    def _trained(self, role: Role, cluster: Cluster, plan: Plan) -> Cost:
        flow, task = self.dataflow, self.task(role, cluster)
        predicted = predict_step(step_of(task, plan))
        step = predicted.step
        job = Job(cluster=cluster, plan=step.plan, num_micros=step.num_micros)
        stages = stage_footprints(job, task.blocks, flow.sequence)
        held = [sum(memory.get(name, 0) for name in HELD) for memory in stages]
        tensors = [sum(size for name, size in memory.items() if name not in _BESIDE) for memory in stages]
        score_s = 0.0
        if role.scores:
            _, times = play_stages(forward_programs(predicted.programs), step.work)
            # A folded step has fewer micro-batches in its programs.
            score_s = flow.updates * _longest(times) * step.num_micros / predicted.played_micros
        return Cost(
            plan=plan,
            train_s=flow.updates * flow.epochs * predicted.step_s,
            score_s=score_s,
            held_bytes=max(held),
            working_bytes=max(tensors) - max(held),
        )

    def _scored(self, role: Role, cluster: Cluster, plan: Plan) -> Cost:
        flow = self.dataflow
        data = Mesh.of(cluster, plan).total("data")
        work = work_of(cluster, plan, layer_operations(role.model), flow.sequence)
        micros = -(-flow.sequences // (data * plan.micro_batch))
        step = Step(
            cluster=cluster, plan=plan, blocks=role.blocks, num_micros=micros, sequence=flow.sequence, work=work
        )
        short = min(micros, _PLAYED * step.num_stages)
        # Rows are padded to a whole number of units.
        short += -short % plan.unit
        programs = forward_programs(build_stages(cluster, plan, role.blocks, short, flow.sequence))
        _, times = play_stages(programs, work)
        states = [program.report(time).memory_bytes for program, time in zip(programs, times, strict=True)]
        held = [sum(size for name, size in each.items() if name != "gathered") for each in states]
        peak = max(
            activations_of(work, spec, cluster.device.type).forward_peak_bytes for spec in Kinds.of(role.blocks).specs
        )
        most = max(sum(each.values()) for each in states)
        return Cost(
            plan=plan,
            score_s=_longest(times) * max(1.0, micros / short),
            held_bytes=max(held),
            working_bytes=most - max(held) + peak,
        )


def tensors_bytes(cluster: Cluster) -> float:
    """Bytes of a device for tensors, without process memory and allocator losses."""
    context, factor = _beside_tensors(cluster)
    return (cluster.device.usable_bytes - context) / factor


def lost_bytes(cluster: Cluster, tensors: int) -> int:
    """Bytes of process memory and allocator losses besides `tensors` bytes."""
    context, factor = _beside_tensors(cluster)
    return context + int((factor - 1) * tensors)


def _beside_tensors(cluster: Cluster) -> tuple[int, float]:
    if cluster.device.type == "cpu":
        return CPU_CONTEXT_BYTES, 1.0
    return CUDA_CONTEXT_BYTES, CUDA_ALLOCATOR_FACTOR


def _longest(times: Collection[Mapping[str, float]]) -> float:
    return max(sum(each.values()) for each in times)


def _texts(plan: Plan) -> str:
    # A plan contains tables, so it is not hashable.
    return repr(replace(plan, name=""))
