"""The teacher of a run: its plan, its blocks, and the rules that it must keep. Needs no torch."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from terrace.base.errors import ConfigError, ModelError, PlanError, did_you_mean
from terrace.base.schema import read_table
from terrace.model.blocks import block_specs, reading_hidden
from terrace.model.config import ModelConfig
from terrace.model.facts import longest_row, num_further_tokens, rope_limit, vocabulary_size
from terrace.model.spec import BlockSpec, freeze
from terrace.plan.context import is_context_parallel
from terrace.plan.handed_rows import Held
from terrace.plan.layout import Layout
from terrace.plan.mesh import Mesh
from terrace.plan.plan import Plan
from terrace.plan.presets import PRESETS, command_plan
from terrace.plan.validate import num_micro_batches, validate
from terrace.runtime.settings import OptimizerConfig
from terrace.train.config import RunConfig
from terrace.train.teacher_keys import DISTILL, NO_TEACHER, check_same_tokens, teacher_model


def teacher_plan(run: RunConfig) -> Plan:
    """The plan of the teacher's forward, with the run's dtypes unless it names others.

    A micro-batch that it leaves out is the largest up to the run's that divides the batch. Raises `PlanError` for a
    plan that does not exist or does not divide the batch.
    """
    given = _table(run.teacher.plan)
    table = {"compute": run.plan.compute, "master": run.plan.master, **given}
    # Nothing is updated, so the plan must not depend on an optimizer.
    plan = replace(command_plan(table, run.cluster), update=OptimizerConfig().update)
    degree = Layout.of(run.cluster, plan).data_degree
    if "micro_batch" not in given and run.rows % degree == 0:
        share = run.rows // degree
        pair = 2 if run.teacher.mix and share % 2 == 0 else 1
        sizes = range(pair, run.plan.micro_batch + 1, pair)
        plan = replace(plan, micro_batch=max((size for size in sizes if share % size == 0), default=1))
    return plan


def _table(name: str) -> dict[str, Any]:
    if name in PRESETS:
        return {"preset": name}
    if not Path(name).is_file():
        raise PlanError(f"teacher.plan = {name!r} is no preset and no file of a plan{did_you_mean(name, PRESETS)}")
    return dict(read_table(Path(name)))


def teacher_blocks(run: RunConfig) -> tuple[BlockSpec, ...]:
    """The teacher's blocks: nothing trains, and its hidden states are read before its output matrix."""
    return freeze(reading_hidden(block_specs(teacher_model(run.teacher.model))), ("*",))


def num_teacher_micros(run: RunConfig, plan: Plan) -> int:
    """Micro-batches of a rank in the teacher's forward. Raises `PlanError` if its plan does not divide the batch."""
    try:
        return num_micro_batches(plan, Layout.of(run.cluster, plan), run.rows)
    except PlanError as error:
        raise PlanError(f"teacher.plan = {run.teacher.plan!r}: {error}") from error


def check_teacher(run: RunConfig) -> None:
    """Raises a `TerraceError` for a teacher without its objective, the reverse, or one that the run cannot have."""
    teacher = run.teacher
    if run.train.objective != DISTILL:
        if teacher != NO_TEACHER:
            raise ConfigError(
                f'[teacher] has no effect: train.objective = "{run.train.objective}"; set it to "distill", or leave '
                "the section out"
            )
        return
    check_beside_model(run)
    _check_mixed(run, teacher_plan(run))
    _check_places(run, teacher_plan(run))


def check_beside_model(run: RunConfig) -> None:
    """Raises a `TerraceError` for a teacher that the run cannot have under any plan of its own."""
    teacher = run.teacher
    if not teacher.model:
        raise ConfigError(
            'train.objective = "distill" needs a teacher: give its folder, as --teacher.model FOLDER, or leave the '
            "objective out"
        )
    teacher.check()
    model = teacher_model(teacher.model)
    check_same_tokens(run.model, model, f"teacher.model = {teacher.model!r}")
    if num_further_tokens(model):
        raise ModelError(
            f"teacher.model = {teacher.model!r} has layers that predict further tokens, in a run folder: give what "
            "terrace export writes of it, in which they are left out"
        )
    _check_positions(run, model)
    if teacher.top_k >= (own := vocabulary_size(run.model)):
        raise ConfigError(f"teacher.top_k = {teacher.top_k} must be below the {own:,} tokens of the vocabulary, or 0")


def _check_positions(run: RunConfig, model: ModelConfig) -> None:
    named, sequence = f"teacher.model = {run.teacher.model!r}", run.train.sequence
    if 0 < (most := longest_row(model)) < sequence:
        raise ModelError(
            f"train.sequence = {sequence} is longer than the {most} positions of {named}: use at most {most}, or name "
            "another teacher"
        )
    if run.has_documents and 0 < (limit := rope_limit(model)) < sequence:
        raise ModelError(
            f"train.sequence = {sequence}: beyond {limit} positions the RoPE of {named} depends on the longest row, "
            f"and rows hold several documents: use at most {limit}, whole rows of one document, or another teacher"
        )


def _check_mixed(run: RunConfig, plan: Plan) -> None:
    if not run.teacher.mix:
        return
    if run.has_documents:
        raise ConfigError(
            f"teacher.mix = {run.teacher.mix} mixes two rows token by token, and here rows hold several documents that "
            "begin at different places: leave it out, or join documents (data.documents)"
        )
    for each, words in ((run.plan, "plan.micro_batch"), (plan, "micro_batch of teacher.plan")):
        if each.micro_batch % 2:
            raise PlanError(
                f"teacher.mix = {run.teacher.mix} mixes rows in pairs, and {words} is {each.micro_batch}: make it even"
            )


def _check_places(run: RunConfig, plan: Plan) -> None:
    cluster, named = run.cluster, f"teacher.plan = {run.teacher.plan!r}"
    validate(cluster, plan, teacher_blocks(run))
    for each, words in ((run.plan, "the plan"), (plan, named)):
        if is_context_parallel(Mesh.of(cluster, each), each):
            raise PlanError(f"{words} divides rows over a context axis, and a teacher's rows are whole: leave it out")
        if each.outer.has_islands:
            raise PlanError(f"{words} has islands (plan.outer), which a teacher is not implemented for: leave them out")
        if each.shares:
            raise PlanError(f"{words} has plan.shares, which a teacher is not implemented for: leave them out")
    num_teacher_micros(run, plan)
    tensor, its = (Mesh.of(cluster, each).group("columns", "rows") for each in (run.plan, plan))
    if max(its) > 1 and its != tensor:
        raise PlanError(
            f"{named} cuts the vocabulary over other tensor ranks than the plan: give both the same tensor axis, or "
            "the teacher none"
        )
    if run.teacher.top_k and max(*tensor, *its) > 1:
        raise PlanError(
            f"teacher.top_k = {run.teacher.top_k} is not implemented on tensor ranks, which hold parts of the "
            "vocabulary: set it to 0, or leave out the tensor axis of both plans"
        )
    held, read = Held(cluster, plan, run.rows), Held(cluster, run.plan, run.rows)
    readers = filter(read.is_last, range(cluster.world_size))
    if run.teacher.is_online and not all(map(held.is_last, readers)):
        raise PlanError(
            f"{named} ends on other ranks than the plan: the ranks of the last stage read the teacher's output matrix, "
            "so give both the same pipeline, or the teacher none"
        )
