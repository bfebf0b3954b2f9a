"""Utilisation and throughput of a predicted step."""

from terrace.planner.evaluate import Cost, Estimate
from terrace.planner.task import Task
from terrace.simulate.layers import hardware_flops, model_flops
from terrace.simulate.work import Work


def mfu(task: Task, estimate: Cost) -> float:
    """The model FLOPs utilisation: three times the forward's FLOPs over what the devices could have done.

    Attention counts its full square (Korthikanti et al. 2205.05198, section 6).
    """
    return model_flops(task.model, task.sequence, task.batch) / _possible_flops(task, estimate)


def hfu(task: Task, estimate: Estimate) -> float:
    """The hardware FLOPs utilisation: as `mfu`, with the forwards that are run again."""
    recompute = "full" if estimate.choice.recompute else "none"
    work = Work(model=task.model, sequence=task.sequence, recompute=recompute)  # type: ignore[arg-type]
    return hardware_flops(work, task.batch) / _possible_flops(task, estimate)


def tokens_per_s(task: Task, estimate: Cost) -> float:
    """The tokens a second of all devices."""
    return task.batch * task.sequence / estimate.step_s


def _possible_flops(task: Task, estimate: Cost) -> float:
    return estimate.step_s * task.cluster.world_size * task.peak_flops_per_s
