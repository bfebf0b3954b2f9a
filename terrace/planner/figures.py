"""Utilisation and throughput of a predicted step."""

from terrace.planner.ranking import Cost, Estimate
from terrace.planner.task import Task
from terrace.simulate.layers import hardware_flops, model_flops
from terrace.simulate.work import Work


def mfu(task: Task, estimate: Cost) -> float:
    """Model FLOPs utilisation: three times the forward's FLOPs over the peak FLOPs of all devices in a step.

    Attention counts its full square (Korthikanti et al. 2205.05198, section 6).
    """
    return model_flops(task.model, task.sequence, task.batch) / _possible_flops(task, estimate)


def hfu(task: Task, estimate: Estimate) -> float:
    """Hardware FLOPs utilisation: as `mfu`, with recomputed forwards."""
    # Hardware FLOPs count the recomputed forward; `mfu` does not, so recomputation lowers it.
    recompute = "full" if estimate.choice.recompute else "none"
    work = Work(model=task.model, sequence=task.sequence, recompute=recompute)  # type: ignore[arg-type]
    return hardware_flops(work, task.batch) / _possible_flops(task, estimate)


def tokens_per_s(task: Task, estimate: Cost) -> float:
    """Tokens per second of all devices."""
    return task.batch * task.sequence / estimate.step_s


def _possible_flops(task: Task, estimate: Cost) -> float:
    return estimate.step_s * task.cluster.world_size * task.peak_flops_per_s
