"""The choices of recomputation in a search: none, operations of layers, or whole layers, in all layers or the first
ones.

Values of `Candidate.recompute` are indexes of `Recomputations.values`. Each operation, and the whole layer, saves bytes
and costs seconds. Since layers are equal, a number of bytes is saved in the fewest seconds by taking operations in
ascending order of seconds per byte, the last of them only in as many layers as needed. These are the corners of the
convex hull over (bytes, seconds), and between two corners, the later one in the first layers and the earlier one in the
others. A pipeline uses only corners, since its stages lack different amounts of memory.

Corners are computed for one sequence on a single rank; seconds per byte hardly depend on how ranks share them.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from terrace.base.errors import PlanError
from terrace.cluster.cluster import Device
from terrace.model.spec import BlockSpec
from terrace.plan.recompute import OPERATIONS, WHOLE
from terrace.planner.recomputation import Again, Recomputations
from terrace.simulate.activations import activations_of, recomputing
from terrace.simulate.layers import operation_seconds, seconds_of
from terrace.simulate.masks import work_in
from terrace.simulate.work import Work

# Operations that an axis of the search excludes (terrace.plan.validate).
_REFUSED = {"attention": "context", "norms": "tensor"}
_Parts = tuple[str, ...]


def recomputations_of(
    device: Device, work: Work, blocks: Sequence[BlockSpec], *, operations: _Parts | None, cuts: bool, partly: bool
) -> Recomputations:
    """The choices of a task with these layers: its `operations`, or those that are worth a search on the device.

    `cuts`: tensor messages are sent in parts. `partly`: the first layers of a stage may differ from the others.
    """
    # With tensor messages in parts, or fused ones, only whole layers are recomputed (terrace.plan.validate).
    nothing = Again(())
    if operations is not None:
        with_tensor = (0,) if operations and cuts else (0, 1)
        return Recomputations((nothing, Again(operations or WHOLE)), ((0, 1), with_tensor))
    costs, possible = _Costs(device, work, blocks), _possible(blocks)
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
    """Seconds to recompute parts of all layers, and bytes that this saves."""

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
        backend = self.device.type
        kept = (activations_of(recomputing(self.work, each), block, backend).kept_bytes for each in ((), parts))
        return next(kept) - next(kept)

    def corners(self, operations: _Parts) -> list[_Parts]:
        """Nothing, the sets of operations that save their bytes in the fewest seconds, and whole layers."""
        if not self.blocks:
            return [()]
        saved = {name: self.saved_bytes((name,)) for name in operations}
        useful = [name for name in operations if saved[name] > 0]
        useful.sort(key=lambda name: self.seconds((name,)) / saved[name])
        sets = [tuple(name for name in OPERATIONS if name in useful[:end]) for end in range(1, len(useful) + 1)]
        found: list[tuple[_Parts, int, float]] = [((), 0, 0.0)]
        for parts in (*sets, WHOLE):
            point = parts, self.saved_bytes(parts), self.seconds(parts)
            # Drop the previous point if it lies above the line from its predecessor to this one.
            while len(found) > 1 and _slope(found[-2], point) <= _slope(found[-2], found[-1]):
                found.pop()
            found.append(point)
        return [parts for parts, _, _ in found]


def _slope(one: tuple[_Parts, int, float], other: tuple[_Parts, int, float]) -> float:
    return (other[2] - one[2]) / max(1, other[1] - one[1])


def operations_s(device: Device, block: BlockSpec, work: Work, parts: _Parts) -> float:
    """Seconds of a block's recomputed operations; they send no messages."""
    return operation_seconds(device, work_in(work, block, device.type), parts) if parts and block.attends else 0.0


def parse_operations(text: str | None, blocks: Sequence[BlockSpec], axes: Sequence[str]) -> _Parts | None:
    """Parse comma-separated operations to recompute instead of whole layers; `layers` means only whole layers.

    None leaves the choice to the search. Raises `PlanError` for an operation that some plan of the search could not
    recompute by itself.
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
    if not all(block.attends for block in blocks if not block.at_an_end):
        raise PlanError(f"--recompute {text!r}: only decoder layers have operations; leave it out")
    mixture = next((block.name for block in blocks if block.has_stacks), None)
    if mixture is not None and set(named) - {"attention"}:
        raise PlanError(
            f"--recompute {text!r}: {mixture} is a mixture of experts, of which attention alone can be named"
        )
    return tuple(name for name in OPERATIONS if name in named)
