"""Seconds of the messages of model states, by class, as straight lines in the elements of a block.

A collective's seconds are latency plus bytes over a rate, and a rate that grows with the bytes adds a constant
(terrace.simulate.links). So two sizes determine all others, but for the rounding of padding and for libraries that
change their algorithm with the size. Lines depend on the data ranks by tier and on the placement alone, so a search
needs few.
"""

from typing import NamedTuple

from terrace.model.params import ParamSpec
from terrace.model.spec import BlockSpec
from terrace.plan.layout import DEVICE
from terrace.plan.mesh import Mesh
from terrace.plan.stage import whole_stage
from terrace.planner.estimate import Estimator
from terrace.planner.stage_specs import data_cluster
from terrace.planner.task import Placement
from terrace.program.instruction import Instruction, Op
from terrace.program.program import Program
from terrace.program.sharded_model import ShardedModel
from terrace.simulate.cost import Costs

Numels = tuple[int, ...]  # elements of a block of each kind on a rank
_SIZES = (1 << 22, 1 << 24)  # elements of the two blocks that are priced


class Sent(NamedTuple):
    """A message of one block: its seconds, its lane, and the seconds by which it slows computing down."""

    seconds: float
    lane: int
    slowed_s: float


class Line(NamedTuple):
    """A message of n elements takes `base_s` + n `each_s`; none if `each_s` is 0."""

    lane: int
    base_s: float
    each_s: float
    penalty: float


_NOTHING = Sent(0.0, -1, 0.0)
_OPS = ("refresh", "gather", "reduce", "sync", "further", "backward")  # `further`: gathers of all units but the first


class Lines:
    """The messages of blocks with a placement: of their own states, and of stacks of experts that other ranks share."""

    def __init__(self, own: tuple[tuple[Line, ...], float], stacks: tuple[tuple[Line, ...], float] | None) -> None:
        self._own, self.control_s = own
        self._stacks = stacks[0] if stacks else ()
        self._sent: dict[tuple[int, int], tuple[Sent, ...]] = {}

    def of(self, numel: int, stacks: int) -> tuple[Sent, ...]:
        """REFRESH, the step's first GATHER, REDUCE, SYNC, further gathers of a forward, and those of a backward."""
        found = self._sent.get((numel, stacks))
        if found is None:
            each = [_sent(line, numel) for line in self._own]
            if stacks:
                each = [_joined(sent, _sent(line, stacks)) for sent, line in zip(each, self._stacks, strict=True)]
            found = self._sent[numel, stacks] = tuple(each)
        return found


def _sent(line: Line, numel: int) -> Sent:
    if not numel or not line.each_s:
        return _NOTHING
    seconds = line.base_s + numel * line.each_s
    return Sent(seconds, line.lane, line.penalty * seconds)


def _joined(one: Sent, other: Sent) -> Sent:
    # They follow each other on the outer lane of the two.
    return Sent(one.seconds + other.seconds, max(one.lane, other.lane), one.slowed_s + other.slowed_s)


class Elements(NamedTuple):
    """Trainable elements of a block of each kind on a rank: without stacks that ranks divide, and of these."""

    own: Numels
    stacks: Numels


class StateMessages:
    """The messages of one task's states, cached."""

    def __init__(self, estimator: Estimator) -> None:
        self.estimator = estimator
        self._of: dict[tuple[object, ...], Lines] = {}
        self._lines: dict[tuple[tuple[int, ...], Placement], tuple[tuple[Line, ...], float]] = {}
        self._numels: dict[tuple[object, ...], Elements] = {}

    def numels(self, mesh: Mesh) -> Elements:
        """Elements of the blocks of a mesh."""
        key = mesh.inside_degrees[:2], mesh.stack_degrees
        found = self._numels.get(key)
        if found is None:
            numels = self.estimator.numels
            found = self._numels[key] = Elements(numels.own(mesh), numels.stacks(mesh))
        return found

    def of(self, mesh: Mesh, placement: Placement) -> Lines:
        """Messages of the blocks of a mesh."""
        has_stacks = any(self.numels(mesh).stacks)
        key = mesh.state, mesh.stack_state if has_stacks else None, placement
        found = self._of.get(key)
        if found is None:
            stacks = self._priced(mesh.stack_state, placement) if has_stacks else None
            found = self._of[key] = Lines(self._priced(mesh.state, placement), stacks)
        return found

    def _priced(self, degrees: tuple[int, ...], placement: Placement) -> tuple[tuple[Line, ...], float]:
        """Lines of the messages of `_OPS`, and the seconds of the gradient norm."""
        key = degrees, placement
        found = self._lines.get(key)
        if found is None:
            second = placement.backward > DEVICE
            instructions = (
                Instruction(Op.REFRESH),
                Instruction(Op.GATHER),
                Instruction(Op.REDUCE),
                Instruction(Op.SYNC),
                Instruction(Op.GATHER, secondary=second),
                Instruction(Op.GATHER, backward=True, secondary=second),
            )
            costs = self._costs(degrees, placement)
            lines = tuple(_line(costs, instruction) for instruction in instructions)
            found = self._lines[key] = lines, costs.collective_s(Instruction(Op.CLIP))
        return found

    def _costs(self, degrees: tuple[int, ...], placement: Placement) -> Costs:
        # Of a program with a block of each size and no instructions.
        layout, plan = self.estimator.layout(degrees, placement)
        blocks = tuple(
            BlockSpec(name=f"size {number}", params=(ParamSpec(name="all", shape=(numel,)),))
            for number, numel in enumerate(_SIZES)
        )
        cluster = data_cluster(self.estimator.task.cluster, degrees)
        model = ShardedModel(cluster=cluster, plan=plan, layout=layout, blocks=blocks)
        program = Program(model=model, stage=whole_stage(len(blocks), 1, 1))
        return Costs(forward_s=(), backward_s=(), update_s=(), program=program)


def _line(costs: Costs, instruction: Instruction) -> Line:
    small, large = (costs.program.message(instruction._replace(block=block)) for block in range(2))
    small_s, large_s = costs.message_s(small), costs.message_s(large)
    each_s = (large_s - small_s) / (_SIZES[1] - _SIZES[0])
    return Line(small.lane, small_s - each_s * _SIZES[0], each_s, costs.penalty(large))
