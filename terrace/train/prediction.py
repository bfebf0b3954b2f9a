"""The step of a run: its programs, built and verified, and their prediction, also on the cluster measured at the start.

Needs no torch. The first step of every command that trains or simulates.
"""

from collections.abc import Collection
from dataclasses import replace

from terrace.base.errors import ConfigError, PlanError
from terrace.base.words import quantity
from terrace.cluster.cluster import Cluster
from terrace.model.block_operations import layer_operations
from terrace.model.blocks import block_specs
from terrace.program.lowering import build_stages
from terrace.program.program import Program
from terrace.program.report import StepReport
from terrace.program.verify_ranks import verify_stages
from terrace.sequence.lengths import NO_LENGTHS, Lengths
from terrace.simulate.beside import forward_beside
from terrace.simulate.footprint import work_of
from terrace.simulate.fullest import Job
from terrace.simulate.held_activations import Held, activation_bytes, activations_by_block
from terrace.simulate.members import predict_member
from terrace.simulate.step import Prediction, Step, resolved
from terrace.simulate.with_lengths import with_lengths
from terrace.train.config import RunConfig
from terrace.train.rules import parts_of
from terrace.train.teacher import num_teacher_micros, teacher_blocks, teacher_plan
from terrace.train.teacher_keys import teacher_model
from terrace.train.utilisation import Utilisation, utilisation

# Micro-batches times blocks of a step that is listed pass by pass: some seconds of work, and gigabytes.
_MOST_PASSES = 2_000_000
_newest: list[tuple[Step, list[Program]]] = []


def given_step(run: RunConfig) -> Step:
    """The run's step, priced with the constants of its cluster file; a stage split that the plan leaves open is not
    resolved.
    """
    return Step(
        cluster=run.cluster,
        plan=run.plan,
        blocks=run.blocks(),
        num_micros=run.num_micros(),
        sequence=run.train.sequence,
        work=work_of(
            run.cluster,
            run.plan,
            layer_operations(run.model),
            run.train.sequence,
            documents=run.has_documents,
            attention=run.train.attention,
            served=parts_of(run),
        ),
        beside=_beside(run, None),
    )


def step_of(run: RunConfig, cluster: Cluster | None = None, lengths: Lengths = NO_LENGTHS) -> Step:
    """The run's step on its own cluster, or on `cluster`, measured at the start; on documents of `lengths`, if known.

    The own cluster, from a probe or a data sheet, prices compute kernel by kernel; a measured one holds the FLOP/s of a
    layer. Blocks are always divided among stages by the own cluster, which is the same on every rank.
    """
    # Stages are resolved on the run's own cluster: measured constants could divide the blocks differently than the
    # engine did.
    own = resolved(given_step(run))
    if cluster is None or cluster is run.cluster:
        return with_lengths(own, lengths)
    sizes = (run.plan.micro_batch, run.train.sequence)
    flops = [float(block.forward_flops(*sizes)) for block in block_specs(run.model)]
    if run.teacher.is_online:
        # The loss multiplies with the teacher's output matrix once, and with the student's three times.
        flops[-1] += block_specs(teacher_model(run.teacher.model))[-1].forward_flops(*sizes) / 3
    return with_lengths(replace(own, cluster=cluster, work=tuple(flops), beside=_beside(run, cluster)), lengths)


def _beside(run: RunConfig, cluster: Cluster | None) -> tuple[StepReport, ...]:
    """The teacher's forward by stage of the run, priced as the step is; nothing without one that runs beside it."""
    if not run.teacher.is_online:
        return ()
    plan, blocks, model = teacher_plan(run), teacher_blocks(run), teacher_model(run.teacher.model)
    step = Step(
        cluster=run.cluster,
        plan=plan,
        blocks=blocks,
        num_micros=num_teacher_micros(run, plan),
        sequence=run.train.sequence,
        work=work_of(run.cluster, plan, layer_operations(model), run.train.sequence, documents=run.has_documents),
    )
    if cluster is not None:
        flops = tuple(float(block.forward_flops(plan.micro_batch, run.train.sequence)) for block in blocks)
        step = replace(resolved(step), cluster=cluster, work=flops)
    return forward_beside(step, run.plan, run.mesh.total("pipeline"))


def job_of(run: RunConfig) -> Job:
    """The run's plan, with what runs beside its steps, as its memory is counted."""
    beside = _beside(run, None)
    return Job(cluster=run.cluster, plan=run.plan, num_micros=run.num_micros(), beside=beside)


def with_numbers(run: RunConfig, free: Collection[str]) -> RunConfig:
    """The run with the numbers `free` of its plan (micro-batch, unit) that have the shortest predicted step and fit."""
    # Imported here: most runs have their numbers, so that nothing is searched.
    from terrace.planner.micro_and_unit import with_best_numbers

    return replace(run, plan=with_best_numbers(given_step(run), free, multiple_of=2 if run.on_pairs else 1).plan)


def resolved_run(run: RunConfig) -> RunConfig:
    """The run with a fully resolved plan. Raises `PlanError` for a plan that cannot run."""
    return replace(run, plan=step_of(run).plan)


def predict(run: RunConfig, cluster: Cluster) -> Prediction:
    """The step as rank 0's member of the outermost tier sees it."""
    return predict_member(step_of(run, cluster))


def utilisation_of(run: RunConfig, cluster: Cluster, backend: str) -> Utilisation:
    """FLOPs and peaks behind the run's MFU and HFU; `cluster` has the constants measured at the start."""
    return utilisation(
        run.blocks(), run.plan, run.rows, run.train.sequence, cluster=run.cluster, measured=cluster, backend=backend
    )


def checked_programs(config: RunConfig) -> list[Program]:
    """The program of each stage of a run.

    Raises `ProgramError` for a program that breaks a rule or does not fit, and `PlanError` for a pipeline schedule
    whose activations do not fit on a device. The latest programs are cached, because a run is first checked and then
    shown.
    """
    step = step_of(config)
    if _newest and _newest[0][0] == step:
        return _newest[0][1]
    programs = build_stages(step.cluster, step.plan, step.blocks, step.num_micros, step.sequence)
    verify_stages(programs)
    for share in set(step.plan.shares) - {step.num_micros}:  # of members with fewer micro-batches
        verify_stages(build_stages(step.cluster, step.plan, step.blocks, share, step.sequence))
    beside = [sum(each.memory_bytes.values()) for each in step.beside] or [0] * len(programs)
    for program, of_teacher in zip(programs, beside, strict=True):
        _check_beside(program, of_teacher)
    # A pipeline keeps several micro-batches in flight, and the schedule decides how many.
    if len(programs) > 1:
        for program, of_teacher in zip(programs, beside, strict=True):
            _check_activations(config, program, of_teacher)
    _newest[:] = [(step, programs)]
    return programs


def check_passes(config: RunConfig, is_what: str) -> None:
    """Raises `ConfigError` for a step with too many passes to list; a step that is only predicted may have
    any number.
    """
    num_micros, num_blocks = config.num_micros(), len(config.blocks())
    if num_micros * num_blocks > _MOST_PASSES:
        raise ConfigError(
            f"{num_micros:,} micro-batches of {num_blocks} blocks are more than the {_MOST_PASSES:,} passes of a "
            f"step that is {is_what}: give a smaller batch or a larger plan.micro_batch"
        )


def forget_programs() -> None:
    """Frees the cached programs, which the process that waits for a run would otherwise keep."""
    _newest.clear()


def kept_activations(config: RunConfig, program: Program) -> int:
    return activation_bytes(program, held_by_block(config, program))


def held_by_block(config: RunConfig, program: Program) -> list[Held]:
    """Activations of every block of a stage's rank for one micro-batch."""
    work = work_of(
        config.cluster,
        config.plan,
        layer_operations(config.model),
        config.train.sequence,
        documents=config.has_documents,
    )
    return activations_by_block(work, config.plan, program.blocks, config.cluster.device.type)


def _check_beside(program: Program, of_teacher: int) -> None:
    device, states = program.cluster.device, sum(program.state_bytes.values())
    if of_teacher and states + of_teacher > device.usable_bytes:
        raise PlanError(
            f"the teacher takes {quantity(of_teacher, 'B')} a rank beside {quantity(states, 'B')} of the student's "
            f"model state, and a plan may take {device.room_words} of the device: shard the teacher further "
            "(teacher.plan), name a smaller one, or keep its most probable tokens instead (teacher.top_k)"
        )


def _check_activations(config: RunConfig, program: Program, of_teacher: int) -> None:
    device, kept = config.cluster.device, kept_activations(config, program)
    states = sum(program.state_bytes.values()) + of_teacher
    if kept + states > device.usable_bytes:
        raise PlanError(
            f"stage {program.stage.index} keeps {quantity(kept, 'B')} of activations beside {quantity(states, 'B')} of "
            f"model state, and a plan may take {device.room_words} of the device: take a schedule that keeps fewer "
            "micro-batches ('1f1b' keeps one a stage ahead), recompute layers (recompute = ['layers.*']), or lower "
            "micro_batch; terrace doctor with the same options names a plan that fits"
        )
