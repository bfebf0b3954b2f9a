"""Moments of a step at which a rank may hold the most activations, in closed form.

They are the forward and the backward of the last block of each kind and recomputation, beside what earlier blocks and
other micro-batches keep. Inputs that are kept below the device (terrace.plan.boundaries) are on it while their block
runs, and one is there while it is written or fetched ahead.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Literal

from terrace.plan.boundaries import MOST_AHEAD, MOST_LEAVING

if TYPE_CHECKING:
    from terrace.simulate.activations import BlockActivations

Phase = Literal["forward", "backward", "update"]


@dataclass(frozen=True)
class Moment:
    """Bytes by category while a block of a kind runs."""

    phase: Phase
    kind: int
    activations: int
    experts: int
    logits: int
    working: int
    is_last: bool  # of its kind


@dataclass(frozen=True)
class Run:
    """Blocks of one kind that recompute the same, up to the last of them."""

    kind: int
    block: "BlockActivations"
    bare: "BlockActivations"  # without the rows of experts
    count: int  # of these blocks
    activations: int  # of all blocks up to the last of these, without logits and rows of experts
    experts: int
    logits: int
    before: "Run | None"  # up to the block before the last of these
    left: int  # the input of a block, if it leaves the device; else 0


def moments(runs: Sequence[Run], in_flight: float, due: float | None, *, pipelined: bool) -> tuple[Moment, ...]:
    """The moments of a rank with these runs; `in_flight` and `due` as in `terrace.simulate.footprint.footprint`.

    `pipelined`: the rank is of a stage of a pipeline.
    """
    others = in_flight - 1
    # A micro-batch between the halves of its backward may hold more than one before the first half.
    more = math.ceil(
        (due or 0.0) * max(0, sum(run.count * (run.block.due_bytes - run.block.kept_bytes + run.left) for run in runs))
    )
    found, lasts = [], {run.kind: run for run in runs}
    one = max((run.left for run in runs), default=0)
    num_left = math.ceil(in_flight) * sum(run.count for run in runs if run.left)
    # The gradients of two layers are only alive once the last of them has freed its activations.
    for run in chain(runs, (run.before for run in runs if run.before is not None)):
        # In a pipeline the other micro-batches in flight have finished the whole stage. In a unit they have finished
        # this block, and each keeps the block's output, or its gradient, for the next block.
        block, bare, beside = run.block, run.bare, runs[-1] if pipelined else run
        activations = run.activations + math.ceil(others * beside.activations) + more + run.left
        experts = run.experts + math.ceil(others * beside.experts)
        logits = run.logits + math.ceil(others * beside.logits)
        # In a unit's backward, each other micro-batch holds the gradient of its input and has freed its kept tensors,
        # or still holds the gradient of its output.
        left = max(block.output_bytes, 2 * block.input_bytes - block.kept_bytes + run.left * (not block.is_recomputed))
        forward, backward = (0 if pipelined else math.ceil(others * each) for each in (block.output_bytes, left))
        halved = due is not None
        peaks: tuple[tuple[Phase, int, int, int], ...] = (
            ("forward", block.forward_peak_bytes, bare.forward_peak_bytes, forward),
            ("backward", _backward_peak(block, halved), _backward_peak(bare, halved), backward),
        )
        for phase, whole, without, waiting in peaks:
            own, rest = max(0, whole - block.kept_bytes), max(0, without - bare.kept_bytes)
            rows = max(0, own - rest)
            working, is_last = own - rows + waiting, lasts[run.kind] is run and not halved
            # Inputs on their way, besides that of this block. Without a pipeline the last one has left when layers run
            # backward, but not when the head does, of whose unit one is fetched meanwhile.
            leaves = pipelined or phase == "forward" or (others > 0 and not run.left)
            passing = MOST_LEAVING * leaves + pipelined + MOST_AHEAD * (phase == "backward")
            arriving = one * min(passing, num_left - (run.left > 0))
            found.append(Moment(phase, run.kind, activations + arriving, experts + rows, logits, working, is_last))
    return tuple(found)


def _backward_peak(block: "BlockActivations", halved: bool) -> int:
    return block.halved_peak_bytes if halved else block.backward_peak_bytes
