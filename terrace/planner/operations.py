"""The choices of recomputation in a search: none, operations of layers, or whole layers, in all layers or the first.

Values of `Candidate.recompute` are indexes of `Recomputations.values`. Each operation, and the whole layer, saves bytes
and costs seconds. Layers are alike, so a number of bytes is saved in the least seconds by operations in ascending order
of seconds per byte, the last of them in as many layers as are needed: by the corners of the convex hull over (bytes,
seconds), and between two corners by the later one in the first layers and the earlier one in the others. A pipeline has
corners alone, since its stages lack different amounts of memory.

The corners are those of one sequence on a rank alone; seconds per byte hardly depend on how ranks share them.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from terrace.base.errors import PlanError
from terrace.cluster.cluster import Device
from terrace.model.spec import BlockSpec
from terrace.plan.recompute import OPERATIONS, WHOLE
from terrace.plan.residency import residual_patterns
from terrace.planner.recomputation import Again, Recomputations
from terrace.simulate.activations import activations_of, recomputing
from terrace.simulate.layers import operation_seconds, seconds_of
from terrace.simulate.masks import has_flash_attention, work_in
from terrace.simulate.work import Work

if TYPE_CHECKING:
    from terrace.planner.task import Task

# What an axis that a search may use refuses (terrace.plan.recompute_rules).
_REFUSED = {"attention": "context", "norms": "tensor"}
_Parts = tuple[str, ...]


def recomputations_of(task: "Task") -> Recomputations:
    """The choices of a task: those that it asks for, or those that its model and device make worth a search."""
    # Beside tensor messages in parts, or fused ones, only whole layers are (terrace.plan.recompute_rules).
    nothing, cuts = Again(()), task.tensor_chunks != 1
    if task.operations is not None:
        with_tensor = (0,) if task.operations and cuts else (0, 1)
        return Recomputations((nothing, Again(task.operations or WHOLE)), ((0, 1), with_tensor))
    flash = has_flash_attention(task.layer.core, task.sequence, task.compute, task.backend)
    work = Work(layer=task.layer, sequence=task.sequence, flash=flash, compute=task.compute, products=task.products)
    blocks = [task.blocks[index] for index in task.inner]
    # The first of blocks that are named one by one cannot be told by a number.
    partly = len(residual_patterns(task.blocks)) == 1
    costs, possible = _Costs(task.cluster.device, work, blocks), _possible(blocks)
    chains = []
    for free in (possible, () if cuts else tuple(name for name in possible if name != "norms")):
        chain = [nothing]
        for before, corner in pairwise(costs.corners(free)):
            chain += [Again(corner, before)] * partly + [Again(corner)]
        chains.append(chain)
    every = {*chains[0], *chains[1]}
    values = tuple(sorted(every, key=lambda each: (costs.seconds(each.parts), not each.is_partial, each)))
    first, second = (tuple(values.index(each) for each in chain) for chain in chains)
    return Recomputations(values, (first, second))


def _possible(blocks: Sequence[BlockSpec]) -> _Parts:
    if not all(block.attends for block in blocks):
        return ()
    return ("attention",) if any(block.has_stacks for block in blocks) else OPERATIONS


class _Costs:
    """Seconds of parts of all layers, and the bytes that are saved by them."""

    def __init__(self, device: Device, work: Work, blocks: Sequence[BlockSpec]) -> None:
        self.device, self.work, self.blocks = device, work, Counter(blocks)

    def seconds(self, parts: _Parts) -> float:
        return sum(count * self._block_s(block, parts) for block, count in self.blocks.items())

    def _block_s(self, block: BlockSpec, parts: _Parts) -> float:
        if parts == WHOLE:
            return seconds_of(self.device, self.work, block).forward_s
        return operations_s(self.device, block, self.work, parts)

    def saved_bytes(self, parts: _Parts) -> int:
        return sum(count * self._block_bytes(block, parts) for block, count in self.blocks.items())

    def _block_bytes(self, block: BlockSpec, parts: _Parts) -> int:
        backend = self.device.backend
        kept = (activations_of(recomputing(self.work, each), block, backend).kept_bytes for each in ((), parts))
        return next(kept) - next(kept)

    def corners(self, operations: _Parts) -> list[_Parts]:
        """Nothing, the sets of operations with the least seconds for the bytes that they save, and whole layers."""
        if not self.blocks:
            return [()]
        saved = {name: self.saved_bytes((name,)) for name in operations}
        useful = [name for name in operations if saved[name] > 0]
        useful.sort(key=lambda name: self.seconds((name,)) / saved[name])
        sets = [tuple(name for name in OPERATIONS if name in useful[:end]) for end in range(1, len(useful) + 1)]
        found: list[tuple[_Parts, int, float]] = [((), 0, 0.0)]
        for parts in (*sets, WHOLE):
            point = parts, self.saved_bytes(parts), self.seconds(parts)
            # The one before lies above the line from its own predecessor to this.
            while len(found) > 1 and _slope(found[-2], point) <= _slope(found[-2], found[-1]):
                found.pop()
            found.append(point)
        return [parts for parts, _, _ in found]


def _slope(one: tuple[_Parts, int, float], other: tuple[_Parts, int, float]) -> float:
    return (other[2] - one[2]) / max(1, other[1] - one[1])


def operations_s(device: Device, block: BlockSpec, work: Work, parts: _Parts) -> float:
    """Seconds of operations of a block that are computed again; they send no messages."""
    return operation_seconds(device, work_in(work, block, device.backend), parts) if parts and block.attends else 0.0


def parse_operations(text: str | None, task: "Task", axes: Sequence[str]) -> _Parts | None:
    """Operations joined by commas in place of whole layers; `layers` for these alone, which is no operation.

    None leaves it to the search. Raises `PlanError` for an operation that some plan of the search could not recompute
    by itself.
    """
    if text is None:
        return None
    if text == "layers":
        return ()
    named = [word.strip() for word in text.split(",")]
    for name in named:
        if name not in OPERATIONS:
            known = f"give {', '.join(OPERATIONS)} joined by commas, or layers alone"
            raise PlanError(f"--recompute {text!r} names {name!r}, which is no operation of a layer: {known}")
        if _REFUSED.get(name) in axes:
            raise PlanError(
                f"--recompute {text!r}: {name} cannot be recomputed alone with ranks on the {_REFUSED[name]} axis, and "
                f"--axes lets plans have them; leave the axis or {name} out"
            )
    if not all(block.attends for block in task.blocks if not block.at_an_end):
        raise PlanError(f"--recompute {text!r}: only decoder layers have operations; leave it out")
    mixture = next((block.name for block in task.blocks if block.has_stacks), None)
    if mixture is not None and set(named) - {"attention"}:
        raise PlanError(
            f"--recompute {text!r}: {mixture} is a mixture of experts, of which attention alone can be named"
        )
    return tuple(name for name in OPERATIONS if name in named)
