"""Utilisation and throughput of a predicted step."""

from collections.abc import Sequence

from terrace.model.spec import BlockSpec
from terrace.plan.recompute import WHOLE, recomputed_parts
from terrace.planner.ranking import Cost, Estimate
from terrace.planner.task import Task


def mfu(task: Task, estimate: Cost) -> float:
    """Model FLOPs utilisation: three times the forward's FLOPs over the peak FLOPs of all devices in a step.

    Attention counts its full square (Korthikanti et al. 2205.05198, section 6).
    """
    return 3 * _forward_flops(task, task.blocks) / _possible_flops(task, estimate)


def hfu(task: Task, estimate: Estimate) -> float:
    """Hardware FLOPs utilisation: as `mfu`, with recomputed forwards, or their attention where that alone is."""
    # Hardware FLOPs count the recomputed forward; `mfu` does not, so recomputation lowers it.
    entries = task.recomputed(estimate.candidate.recompute, estimate.candidate.first)
    parts = recomputed_parts(entries, task.blocks)
    width = task.model.num_heads * task.model.head_dim
    num_cores = sum("attention" in each for each in parts)
    rerun = 4 * task.batch * task.sequence**2 * width * num_cores
    rerun += _forward_flops(task, [block for block, each in zip(task.blocks, parts, strict=True) if each == WHOLE])
    return (3 * _forward_flops(task, task.blocks) + rerun) / _possible_flops(task, estimate)


def tokens_per_s(task: Task, estimate: Cost) -> float:
    """Tokens per second of all devices."""
    return task.batch * task.sequence / estimate.step_s


def _forward_flops(task: Task, blocks: Sequence[BlockSpec]) -> int:
    return sum(block.forward_flops(task.batch, task.sequence) for block in blocks)


def _possible_flops(task: Task, estimate: Cost) -> float:
    return estimate.step_s * task.cluster.world_size * task.peak_flops_per_s
