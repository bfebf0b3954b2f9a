"""Seconds and activations of a block from its spec.

A block that declares what it computes has the kernels of that computation, at its own sizes. A block that declares its
parameters alone is priced as a chain of matrix products: all its matrices, in order, from the residual stream back to
it. Tensor ranks share each product evenly.
"""

from collections.abc import Sequence
from dataclasses import replace

from terrace.cluster.cluster import Device
from terrace.model.config import DecoderBlock
from terrace.model.spec import BlockSpec
from terrace.plan.plan import Plan
from terrace.plan.residency import recomputed
from terrace.simulate.activations import BlockActivations, block_activation_bytes, chain_activation_bytes
from terrace.simulate.block_tape import Backend
from terrace.simulate.layers import BlockSeconds, block_seconds, chain_seconds
from terrace.simulate.masks import has_flash_attention
from terrace.simulate.work import Work

Matrices = tuple[tuple[int, int], ...]  # (inputs, outputs) of products, one after the other


def work_in(work: Work, block: BlockSpec, backend: Backend) -> Work:
    """The work of a micro-batch in a block that has its own sizes."""
    if not isinstance(block, DecoderBlock) or block.config is work.model or block.config == work.model:
        return work
    flash = has_flash_attention(block.config, work.sequence, work.compute, backend, work.documents)
    return replace(work, model=block.config, flash=work.flash and flash)


def seconds_of(device: Device, work: Work, block: BlockSpec, *, accumulate: bool = False) -> BlockSeconds:
    """Seconds of a block on a micro-batch; `accumulate` as in `block_seconds`."""
    if block.computes is None:
        return chain_seconds(device, work, matrices_of(block), accumulate)
    return block_seconds(device, work_in(work, block, device.backend), block.computes, accumulate=accumulate)


def activations_of(work: Work, block: BlockSpec, backend: Backend) -> BlockActivations:
    """Bytes that a block holds for one micro-batch."""
    if block.computes is None:
        return chain_activation_bytes(work, matrices_of(block), backend)
    return block_activation_bytes(work_in(work, block, backend), block.computes, backend)


def activations_by_block(
    work: Work, plan: Plan, blocks: Sequence[BlockSpec], backend: Backend
) -> list[tuple[int, int]]:
    """For every block: bytes one micro-batch keeps from forward to backward, and extra bytes while its backward runs.

    The plan's patterns say which blocks are recomputed.
    """
    # The plan's patterns decide per block, so `work` itself recomputes nothing.
    again, whole = recomputed(plan, blocks), replace(work, recompute="full")
    held = [activations_of(whole if index in again else work, block, backend) for index, block in enumerate(blocks)]
    return [(block.kept_bytes, max(0, block.backward_peak_bytes - block.kept_bytes)) for block in held]


def matrices_of(block: BlockSpec) -> Matrices:
    """(Inputs, outputs) of a block's matrices, before slicing."""
    shapes = (param.whole or param.shape for param in block.params)
    return tuple((shape[1], shape[0]) for shape in shapes if len(shape) == 2)
