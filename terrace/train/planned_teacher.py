"""A teacher beside the plans that `terrace plan` searches, priced and refused as that of a run."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from terrace.base.errors import ConfigError, PlanError
from terrace.base.schema import load, read_table
from terrace.base.words import quantity, seconds
from terrace.cluster.cluster import Cluster
from terrace.model.blocks import block_specs, with_loss_beside
from terrace.model.config import ModelConfig
from terrace.model.spec import BlockSpec
from terrace.plan.plan import Plan
from terrace.planner.task import Task
from terrace.simulate.step import predict_step
from terrace.train.config import RunConfig
from terrace.train.keys import TrainConfig
from terrace.train.layers import teacher_beside
from terrace.train.prediction import job_of, step_of
from terrace.train.teacher import check_teacher
from terrace.train.teacher_keys import DISTILL, TeacherConfig, teacher_model


def planned_teacher(name: str | None, keys: Mapping[str, Any]) -> TeacherConfig:
    """The teacher in a folder, or in [teacher] of a run's file, with `keys` over it. Raises `ConfigError`."""
    table: Mapping[str, Any] = {} if name is None else {"model": name}
    if name is not None and Path(name).suffix == ".toml":
        own = read_table(Path(name)).get("teacher")
        if not isinstance(own, Mapping):
            raise ConfigError(f"--teacher {name}: the file has no section [teacher]: name a folder, or another file")
        table = teacher_beside(Path(name).parent, own)
    return load(TeacherConfig, {**table, **keys}, "teacher")


def blocks_beside(model: ModelConfig, teacher: TeacherConfig) -> tuple[BlockSpec, ...]:
    """The student's blocks, whose loss also has the teacher's logits if it runs beside the steps."""
    specs = block_specs(model)
    return with_loss_beside(specs, teacher_model(teacher.model), teacher.num_labels) if teacher.is_online else specs


def taught_run(task: Task, plan: Plan, teacher: TeacherConfig) -> RunConfig:
    """The run of a task under `plan` with its teacher. Raises a `TerraceError` for a teacher that it cannot have."""
    train = TrainConfig(objective=DISTILL, steps=1, batch=task.batch, sequence=task.sequence)
    run = RunConfig(model=task.model, cluster=task.cluster, plan=plan, train=train, teacher=teacher)
    check_teacher(run)
    return run


def held_bytes(run: RunConfig) -> int:
    """Memory that the teacher takes on a rank of the stage where it takes most; 0 if it is freed before the steps."""
    return max((sum(each.memory_bytes.values()) for each in job_of(run).beside), default=0)


def with_room(cluster: Cluster, num_bytes: int) -> Cluster:
    """`cluster` whose plans also leave `num_bytes` free. Raises `PlanError` if that leaves nothing."""
    device = cluster.device
    if num_bytes >= device.usable_bytes:
        raise PlanError(
            f"the teacher takes {quantity(num_bytes, 'B')} a rank, and a plan may take {device.room_words} of the "
            "device: shard the teacher further (teacher.plan), or name a smaller one"
        )
    kept = device.memory_bytes - device.usable_bytes + num_bytes
    return replace(cluster, device=replace(device, headroom=f"{math.ceil(kept / 1e3) / 1e6:.6f}GB"))


def teacher_words(run: RunConfig) -> str:
    """What the teacher adds to a step of the run, in words."""
    option = f"train it with --train.objective {DISTILL} --teacher.model {run.teacher.model}"
    if not run.teacher.is_online:
        return f"the teacher runs once, before the first step, and is freed: steps are those of the student; {option}"
    predicted = predict_step(step_of(run))
    forward_s = max(each["teacher"] for each in predicted.times_s)
    return (
        f"with the teacher, whose forward under plan {run.teacher.plan} takes {seconds(forward_s)} before a step and "
        f"{quantity(held_bytes(run), 'B')} a rank, a step takes {seconds(predicted.step_s)}; the other figures are "
        f"of the student alone, and plans leave the teacher's memory free; {option}"
    )
