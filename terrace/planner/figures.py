"""Utilisation and throughput of a predicted step."""

from collections.abc import Sequence

from terrace.model.config import DecoderBlock
from terrace.model.spec import BlockSpec
from terrace.plan.recompute import WHOLE, recomputed_parts
from terrace.planner.ranking import Cost, Estimate
from terrace.planner.task import Task
from terrace.simulate.masks import causal_pairs


def mfu(task: Task, estimate: Cost, *, full: bool = False) -> float:
    """Model FLOPs utilisation: three times the forward's FLOPs over the peak FLOPs of all devices in a step.

    Attention counts the pairs that a causal mask leaves, as in a run (terrace.train.utilisation); with `full` its full
    square, as published tables count it (Korthikanti et al. 2205.05198, section 6).
    """
    masked = 0 if full else _masked_flops(task)
    return 3 * (_forward_flops(task, task.blocks) - masked) / _possible_flops(task, estimate)


def hfu(task: Task, estimate: Estimate) -> float:
    """Hardware FLOPs utilisation: with the full square of attention, as in a kernel that skips nothing, and recomputed
    forwards, or their attention where that alone is.
    """
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


def _masked_flops(task: Task) -> int:
    """FLOPs of a forward's attention that the causal mask, or a window, makes needless."""
    return sum(
        4
        * task.batch
        * block.config.num_heads
        * block.config.head_dim
        * (task.sequence**2 - causal_pairs(task.sequence, block.config.sliding_window))
        for block in task.blocks
        if isinstance(block, DecoderBlock) and block.attends
    )


def _possible_flops(task: Task, estimate: Cost) -> float:
    return estimate.step_s * task.cluster.world_size * task.peak_flops_per_s
