"""Builds and validates the programs of a run, the first step of every command that trains or simulates."""

from terrace.base.errors import ConfigError, PlanError
from terrace.base.words import quantity
from terrace.model.block_operations import layer_operations
from terrace.program.lowering import build_stages
from terrace.program.program import Program
from terrace.program.verify_ranks import verify_stages
from terrace.simulate.footprint import work_of
from terrace.simulate.held_activations import activation_bytes, activations_by_block
from terrace.simulate.step import Step
from terrace.train.config import RunConfig
from terrace.train.prediction import step_of

# Micro-batches times blocks of a step that is listed pass by pass: some seconds of work, and gigabytes.
_MOST_PASSES = 2_000_000
_newest: list[tuple[Step, list[Program]]] = []


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
    # A pipeline keeps several micro-batches in flight, and the schedule decides how many.
    if len(programs) > 1:
        for program in programs:
            _check_activations(config, program)
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
    """Peak bytes of activations on a rank of a stage."""
    work = work_of(
        config.cluster,
        config.plan,
        layer_operations(config.model),
        config.train.sequence,
        documents=config.has_documents,
    )
    return activation_bytes(
        program, activations_by_block(work, config.plan, program.blocks, config.cluster.device.backend)
    )


def _check_activations(config: RunConfig, program: Program) -> None:
    device, kept, states = config.cluster.device, kept_activations(config, program), sum(program.state_bytes.values())
    if kept + states > device.usable_bytes:
        raise PlanError(
            f"stage {program.stage.index} keeps {quantity(kept, 'B')} of activations beside {quantity(states, 'B')} of "
            f"model state, and a plan may take {device.room_words} of the device: take a schedule that keeps fewer "
            "micro-batches ('1f1b' keeps one a stage ahead), recompute layers (recompute = ['layers.*']), or lower "
            "micro_batch; terrace doctor with the same options names a plan that fits"
        )
