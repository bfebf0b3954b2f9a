"""A teacher beside the plans that `terrace plan` searches, priced and refused as that of a run (`--teacher`)."""

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from terrace.base.errors import ConfigError, PlanError
from terrace.base.schema import load, read_table
from terrace.base.words import quantity, seconds
from terrace.cluster.software import OWN
from terrace.model.blocks import block_specs, with_loss_beside
from terrace.plan.plan import Plan
from terrace.plan.presets import command_plan
from terrace.planner.task import Task
from terrace.simulate.step import predict_step
from terrace.train.config import RunConfig
from terrace.train.keys import TrainConfig
from terrace.train.layers import teacher_beside
from terrace.train.prediction import job_of, step_of
from terrace.train.teacher import check_beside_model, check_teacher, teacher_plan
from terrace.train.teacher_keys import DISTILL, TeacherConfig, teacher_model


@dataclass(frozen=True)
class Taught:
    """A task whose model is the student of `teacher`."""

    task: Task
    teacher: TeacherConfig

    def student(self, kept_bytes: int) -> Task:
        """The task of plans that leave `kept_bytes` of a device to the teacher, with the student's larger loss.

        Raises `PlanError` if that leaves nothing.
        """
        device, teacher, specs = self.task.cluster.device, self.teacher, block_specs(self.task.model)
        if kept_bytes >= device.usable_bytes:
            raise PlanError(
                f"the teacher takes {quantity(kept_bytes, 'B')} a rank, and a plan may take {device.room_words} of the "
                "device: shard the teacher further (teacher.plan), or name a smaller one"
            )
        if teacher.is_online:
            specs = with_loss_beside(specs, teacher_model(teacher.model), teacher.num_labels)
        kept = device.memory_bytes - device.usable_bytes + kept_bytes
        device = replace(device, headroom=f"{math.ceil(kept / 1e3) / 1e6:.6f}GB")
        return replace(self.task, cluster=replace(self.task.cluster, device=device), declared=specs)

    def unchecked(self, plan: Plan) -> RunConfig:
        task = self.task
        train = TrainConfig(objective=DISTILL, steps=1, batch=task.batch, sequence=task.sequence)
        return RunConfig(model=task.model, cluster=task.cluster, plan=plan, train=train, teacher=self.teacher)

    def run(self, plan: Plan) -> RunConfig:
        """The run under a plan. Raises a `TerraceError` for a teacher that it cannot have."""
        if self.teacher.mix and plan.micro_batch % 2:
            raise PlanError(
                f"teacher.mix = {self.teacher.mix} mixes rows in pairs, and the best plan has micro_batch = "
                f"{plan.micro_batch}: add --pin micro_batch=2, or another even number"
            )
        run = self.unchecked(plan)
        check_teacher(run)
        return run

    def held_bytes(self, plan: Plan) -> int:
        """The teacher's memory on a rank of the stage where it is largest; 0 if it is freed before the steps."""
        return max((sum(each.memory_bytes.values()) for each in job_of(self.run(plan)).beside), default=0)

    def words(self, plan: Plan) -> str:
        teacher = self.teacher
        option = f"train it with --train.objective {DISTILL} --teacher.model {teacher.model}"
        if not teacher.is_online:
            return f"the teacher runs once, before the first step, and is freed: steps are the student's; {option}"
        predicted = predict_step(step_of(self.run(plan)))
        forward_s = max(each["teacher"] for each in predicted.times_s)
        return (
            f"with the teacher, whose forward under plan {teacher.plan} takes {seconds(forward_s)} before a step and "
            f"{quantity(self.held_bytes(plan), 'B')} a rank, a step takes {seconds(predicted.step_s)}; the other "
            f"figures are of the student alone, and plans leave the teacher's memory free; {option}"
        )


def taught_of(options: argparse.Namespace, keys: Any, task: Task) -> Taught:
    """The task with the teacher of `--teacher`, a folder or a run's file with [teacher], and `keys` over it.

    Raises a `TerraceError` for a wrong key, beside what has no teacher, and for a teacher that no plan can have.
    """
    if not isinstance(keys or {}, Mapping):
        raise ConfigError(f"--teacher.{keys!r}: set a key of the teacher, as --teacher.key VALUE")
    for wrong, words in (
        (options.outer is not None, "islands (--outer)"),
        (options.axes != "all" and "context" in options.axes.split(","), "a context axis (--axes)"),
        (len(task.cluster.alike) > 1, "unequal members"),
        (task.cluster.device.software != OWN, "another software (--as)"),
    ):
        if wrong:
            raise ConfigError(f"--teacher is not implemented for {words}: leave one of them out")
    name, table = options.teacher, dict[str, Any]()
    if name is not None and Path(name).suffix == ".toml":
        own = read_table(Path(name)).get("teacher")
        if not isinstance(own, Mapping):
            raise ConfigError(f"--teacher {name}: the file has no section [teacher]: name a folder, or another file")
        table = teacher_beside(Path(name).parent, own)
    elif name is not None:
        table = {"model": name}
    found = Taught(task, load(TeacherConfig, {**table, **(keys or {})}, "teacher"))
    anyhow = found.unchecked(command_plan({"preset": "ddp"}, task.cluster))
    check_beside_model(anyhow)
    teacher_plan(anyhow)  # which exists
    return found
