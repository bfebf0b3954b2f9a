"""Parts of parameters as sets of elements: a second way to count the elements that a hand-over moves."""

from collections.abc import Iterable, Sequence
from itertools import product
from math import prod

from terrace.base.boxes import Box, numel
from terrace.cluster.cluster import Cluster
from terrace.model.params import ParamSpec
from terrace.model.spec import BlockSpec
from terrace.plan.flats import block_flats
from terrace.plan.mesh import Mesh
from terrace.plan.plan import Plan
from terrace.plan.slices import slice_blocks
from terrace.rl.hand_over.moves import Move, Parts
from terrace.rl.hand_over.transition import Transition

Elements = set[tuple[str, tuple[int, ...]]]  # parameter, index


def elements(parts: Parts, prefix: str = "") -> Elements:
    return {(prefix + name, index) for name, boxes in parts.items() for box in boxes for index in indices(box)}


def indices(box: Box) -> Iterable[tuple[int, ...]]:
    return product(*(range(start, stop) for start, stop in box))


def moved(move: Move, prefix: str = "") -> Elements:
    return elements({move.parameter: [move.box]}, prefix)


def units(tiers: Sequence[int], tier: int) -> list[range]:
    """The ranks of each unit inside `tier`."""
    size = prod(tiers[:tier])
    return [range(first, first + size) for first in range(0, prod(tiers), size)]


def mlp(inner: int, hidden: int = 3, *, norm: bool = False) -> BlockSpec:
    """Two matrices that tensor rows cut, one by rows and one by columns, and a norm that they do not."""
    up = ParamSpec(name="mlp.up", shape=(inner, hidden), dims=(("intermediate", inner), ("hidden", hidden)))
    down = ParamSpec(name="mlp.down", shape=(hidden, inner), dims=(("hidden", hidden), ("intermediate", inner)))
    scale = ParamSpec(name="norm.weight", shape=(hidden,), dims=(("hidden", hidden),))
    return BlockSpec(name="layer", params=(up, down, scale) if norm else (up, down))


def transition_of(cluster: Cluster, plan: Plan, blocks: Sequence[BlockSpec], rows: int) -> Transition:
    """The hand-over of a plan that has block i on stage i modulo their number."""
    mesh = Mesh.of(cluster, plan)
    num_stages = mesh.total("pipeline")
    held = [range(stage, len(blocks), num_stages) for stage in range(num_stages)]
    return Transition.of(cluster, plan, blocks, block_flats(cluster, plan, slice_blocks(blocks, mesh)), held, rows)


class Counted:
    """A transition as elements of the whole model, by rank or by slice."""

    def __init__(self, value: Transition) -> None:
        blocks = range(len(value.alike))
        self.owned = _joined([value.holds[first] for first in value.alike])
        self.in_slices = _joined([value.slices[first] for first in value.alike])
        self.needed = _joined([value.needs(block) for block in blocks])
        self.received: list[Elements] = [set() for _ in self.owned]
        self.num_received = [0] * len(self.owned)
        for block in blocks:
            for move in value.moves(block):
                self.received[move.target] |= moved(move, f"{block}.")
                self.num_received[move.target] += numel(move.box)


def _joined(by_block: Sequence[Sequence[Parts]]) -> list[Elements]:
    found: list[Elements] = [set() for _ in by_block[0]]
    for block, parts in enumerate(by_block):
        for own, part in zip(found, parts, strict=True):
            own |= elements(part, f"{block}.")
    return found
