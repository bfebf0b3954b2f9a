"""Seconds of the messages of model states, by class, as straight lines in the elements of a block.

A collective's seconds are latency plus bytes over a rate, and a rate that grows with the bytes adds a constant
(terrace.simulate.links). So two sizes determine all others, but for the rounding of padding and for libraries that
change their algorithm with the size. Lines depend on the data ranks by tier and on the placement alone, so a search
needs few.
"""

from collections.abc import Sequence
from typing import NamedTuple

from terrace.model.params import ParamSpec
from terrace.model.spec import BlockSpec
from terrace.plan.layout import DEVICE
from terrace.plan.mesh import Mesh
from terrace.plan.stage import whole_stage
from terrace.planner.estimate import Estimator
from terrace.planner.numels import groups_of
from terrace.planner.stage_specs import data_cluster
from terrace.planner.task import Placement
from terrace.program.instruction import Instruction, Op
from terrace.program.program import Program
from terrace.program.sharded_model import ShardedModel
from terrace.simulate.cost import Costs

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


_OPS = ("refresh", "gather", "reduce", "sync", "further", "backward")  # `further`: gathers of all units but the first
_GATHERS = tuple(index for index, op in enumerate(_OPS) if op in ("gather", "further", "backward"))
NO_MESSAGES = (Sent(0.0, -1, 0.0),) * len(_OPS)


def _and(sent: tuple[Sent, ...], lines: Sequence[Line], numel: int, beside: int) -> tuple[Sent, ...]:
    # With the messages of `numel` trained elements, and the gathers of others `beside`.
    found = list(sent)
    for index, line in enumerate(lines):
        for size in (numel, beside if index in _GATHERS else 0):
            if size and line.each_s:
                found[index] = _joined(found[index], line, size)
    return tuple(found)


def _joined(sent: Sent, line: Line, numel: int) -> Sent:
    # They follow each other on the outer lane of the two.
    seconds = line.base_s + numel * line.each_s
    return Sent(sent.seconds + seconds, max(sent.lane, line.lane), sent.slowed_s + line.penalty * seconds)


class Messages(NamedTuple):
    """Messages of a block of each kind, and the seconds of the gradient norm.

    Those of a block are REFRESH, the step's first GATHER, REDUCE, SYNC, further gathers of a forward, and those of a
    backward.
    """

    sent: tuple[tuple[Sent, ...], ...]
    control_s: float


class StateMessages:
    """The messages of one task's states, cached."""

    def __init__(self, estimator: Estimator) -> None:
        self.estimator = estimator
        self._of: dict[tuple[object, ...], Messages] = {}
        self._lines: dict[tuple[tuple[int, ...], Placement], tuple[tuple[Line, ...], float]] = {}

    def of(self, mesh: Mesh, placement: Placement) -> Messages:
        """Messages of the blocks of a mesh."""
        degrees = groups_of(mesh)
        key = mesh.inside_degrees[:2], mesh.stack_degrees, degrees, placement
        found = self._of.get(key)
        if found is None:
            each = [NO_MESSAGES] * len(self.estimator.specs)
            trained, _, beside = self.estimator.numels.elements(mesh)
            for group, of, more in zip(degrees, trained, beside, strict=True):
                if any(of) or any(more):
                    lines, _ = self._priced(group, placement)
                    each = [_and(sent, lines, *numels) for sent, *numels in zip(each, of, more, strict=True)]
            found = self._of[key] = Messages(tuple(each), self._priced(mesh.state, placement)[1])
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
