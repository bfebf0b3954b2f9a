"""Utilisation and throughput of a predicted step."""

from collections.abc import Sequence

from terrace.model.spec import BlockSpec
from terrace.plan.recompute import WHOLE, recomputed_parts
from terrace.planner.ranking import Cost, Estimate
from terrace.planner.task import Task
from terrace.simulate.masks import causal_pairs


def mfu(task: Task, estimate: Cost, *, full: bool = False) -> float:
    """Model FLOPs utilisation: three times the forward FLOPs over the peak FLOPs of all devices in a step.

    Attention counts the pairs under the causal mask, as in a run (terrace.train.utilisation); with `full` its full
    square, as published tables count it (Korthikanti et al. 2205.05198, section 6).
    """
    return 3 * _forward_flops(task, task.blocks, full=full) / _possible_flops(task, estimate)


def hfu(task: Task, estimate: Estimate, *, full: bool = False) -> float:
    """Hardware FLOPs utilisation: `mfu` plus recomputed forwards (or only their attention, if only that is
    recomputed).
    """
    entries = task.recomputed(estimate.candidate.recompute, estimate.candidate.first)
    parts = list(zip(task.blocks, recomputed_parts(entries, task.blocks), strict=True))
    rerun = _forward_flops(task, [block for block, again in parts if again == WHOLE], full=full)
    rerun += sum(_attention_flops(task, block, full=full) for block, again in parts if "attention" in again)
    return mfu(task, estimate, full=full) + rerun / _possible_flops(task, estimate)


def tokens_per_s(task: Task, estimate: Cost) -> float:
    return task.batch * task.sequence / estimate.step_s


def _forward_flops(task: Task, blocks: Sequence[BlockSpec], *, full: bool) -> int:
    square = sum(block.forward_flops(task.batch, task.sequence) for block in blocks)
    if full:
        return square
    masked = (_attention_flops(task, each, full=True) - _attention_flops(task, each, full=False) for each in blocks)
    return square - sum(masked)


def _attention_flops(task: Task, block: BlockSpec, *, full: bool) -> int:
    """Forward FLOPs of a block's attention, over the pairs under the causal mask or window, or over all."""
    core = block.operations.core
    pairs = task.sequence**2 if full else causal_pairs(task.sequence, core.window)
    return 2 * task.batch * core.heads * (core.head_dim + core.value_dim) * pairs


def _possible_flops(task: Task, estimate: Cost) -> float:
    return estimate.step_s * task.cluster.world_size * task.peak_flops_per_s
