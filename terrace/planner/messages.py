"""Seconds of the messages of model states, by class, as straight lines in the elements of a block.

A collective's seconds are latency plus bytes over a rate, and a rate that grows with the bytes adds a constant
(terrace.simulate.links). So two sizes determine all others, but for the rounding of padding and for libraries that
change their algorithm with the size. Lines depend on the data ranks by tier and on the placement alone, so a search
needs few.
"""

from collections.abc import Sequence
from typing import NamedTuple

from terrace.plan.flats import FlatParamSpec
from terrace.plan.hops import decoding_bytes, hops_coding_bytes
from terrace.plan.kept import grad_format
from terrace.plan.layout import DEVICE, Layout, message_lane
from terrace.plan.mesh import Mesh
from terrace.plan.plan import Plan
from terrace.plan.routes import block_hops
from terrace.plan.wire import FORMATS, MessageClass
from terrace.planner.estimate import Estimator
from terrace.planner.numels import groups_of
from terrace.planner.stage_specs import data_cluster
from terrace.planner.task import Placement
from terrace.program.instruction import Instruction, Op
from terrace.program.resolve import carries, control_message
from terrace.simulate.links import coding_s, copied_s, hops_s

_PARTS = (32, 4)  # of the largest block, whose elements the two blocks have that are priced
_LEAST = (1 << 20, 1 << 22)  # elements of these blocks


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


def _decoded(sent: tuple[Sent, ...], seconds: float, penalty: float) -> tuple[Sent, ...]:
    # The device decodes after each gather. Where no codes come from other ranks, it computes nothing meanwhile.
    found = list(sent)
    for index in _GATHERS:
        own = sent[index]
        slowed_s = own.slowed_s + (penalty if own.seconds else 1.0) * seconds
        found[index] = Sent(own.seconds + seconds, own.lane, slowed_s)
    return tuple(found)


class Messages(NamedTuple):
    """Messages of a block of each kind, and the seconds of the gradient norm.

    Those of a block are REFRESH, the step's first GATHER, REDUCE, SYNC, further gathers of a forward, and those of a
    backward.
    """

    sent: tuple[tuple[Sent, ...], ...]
    control_s: float


class Lines(NamedTuple):
    """A line for each of the messages of `Messages`, and the seconds of the gradient norm."""

    each: tuple[Line, ...]
    control_s: float


class StateMessages:
    def __init__(self, estimator: Estimator) -> None:
        self.estimator = estimator
        most = max([sum(param.numel for param in spec.params) for spec in estimator.specs], default=0)
        self._sizes = max(_LEAST[0], most // _PARTS[0]), max(_LEAST[1], most // _PARTS[1])
        self._of: dict[tuple[object, ...], Messages] = {}
        self._priced: dict[tuple[tuple[int, ...], Placement], Lines] = {}
        self._lines: dict[tuple[Instruction, tuple[int, ...], tuple[int, ...]], Line] = {}
        self._controls: dict[tuple[int, ...], float] = {}

    def of(self, mesh: Mesh, placement: Placement) -> Messages:
        degrees = groups_of(mesh)
        key = mesh.inside_degrees[:2], mesh.stack_degrees, degrees, placement
        found = self._of.get(key)
        if found is None:
            each = [NO_MESSAGES] * len(self.estimator.specs)
            trained, _, beside = self.estimator.numels.elements(mesh)
            for group, of, more in zip(degrees, trained, beside, strict=True):
                if any(of) or any(more):
                    lines, _ = self.lines(group, placement)
                    each = [_and(sent, lines, *numels) for sent, *numels in zip(each, of, more, strict=True)]
            coded = self.estimator.numels.coded(mesh)
            if any(coded):
                task, (_, plan) = self.estimator.task, self.estimator.layout(mesh.state, placement)
                penalty = task.cluster.device.overlap_penalty
                decodings = [coding_s(task.cluster, decoding_bytes(plan, numel)) for numel in coded]
                each = [_decoded(sent, decoding_s, penalty) for sent, decoding_s in zip(each, decodings, strict=True)]
            found = self._of[key] = Messages(tuple(each), self.lines(mesh.state, placement).control_s)
        return found

    def lines(self, degrees: tuple[int, ...], placement: Placement) -> Lines:
        """Lines of the messages of states that these data ranks share."""
        key = degrees, placement
        found = self._priced.get(key)
        if found is None:
            params, grads, optimizer, backward = placement
            second = backward > DEVICE
            # With the places that a message depends on: most messages are those of another placement, too.
            among = (
                (Instruction(Op.REFRESH), (params, optimizer, backward)),
                (Instruction(Op.GATHER), (params,)),
                (Instruction(Op.REDUCE), (params, grads)),
                (Instruction(Op.SYNC), (grads, optimizer)),
                (Instruction(Op.GATHER, secondary=second), (params, backward)),
                (Instruction(Op.GATHER, backward=True, secondary=second), (params, backward)),
            )
            # Only the price of an all-reduce depends on tiers outside these placements.
            keys = [
                (instruction, degrees if instruction.op is Op.SYNC else degrees[: max(places) + 1], places)
                for instruction, places in among
            ]
            for each in keys:
                if each not in self._lines:
                    self._lines[each] = self._line(each[0], *self.estimator.layout(degrees, placement))
            lines = tuple([self._lines[each] for each in keys])
            found = self._priced[key] = Lines(lines, self._control_s(degrees, placement))
        return found

    def _control_s(self, degrees: tuple[int, ...], placement: Placement) -> float:
        """Seconds of the gradient norm, which depend on the data ranks alone."""
        if degrees not in self._controls:
            layout, plan = self.estimator.layout(degrees, placement)
            hops = control_message(layout, layout, plan, ()).hops
            self._controls[degrees] = hops_s(data_cluster(self.estimator.task.cluster, degrees), hops, 0.0)[0]
        return self._controls[degrees]

    def _line(self, instruction: Instruction, layout: Layout, plan: Plan) -> Line:
        """The line through the prices of two messages, of blocks with one trainable parameter each."""
        message_class, cluster = instruction.message_class, data_cluster(self.estimator.task.cluster, layout.degrees)
        assert message_class is not None, f"{instruction} sends nothing"
        source = layout.params_backward if instruction.secondary else None
        sends = carries(message_class, FlatParamSpec(layout, (), trainable=True), source)
        found = []
        for size in self._sizes:
            hops = block_hops(layout, plan, message_class, size, source) if sends else ([], [])
            is_coded = any(hop.wire.block for part in hops for hop in part)
            coding_bytes = hops_coding_bytes(plan, message_class, *hops) if is_coded else 0.0
            found.append(hops_s(cluster, [*hops[0], *hops[1]], coding_bytes, message_class, layout.gathers))
        (small_s, _), (large_s, penalty) = found
        small_s, large_s = (
            seconds + self._below_s(instruction.op, layout, plan, size)
            for seconds, size in zip((small_s, large_s), self._sizes, strict=True)
        )
        each_s = (large_s - small_s) / (self._sizes[1] - self._sizes[0])
        base_s = small_s - each_s * self._sizes[0]
        span = layout.span(layout.grads if message_class is MessageClass.REDUCE else layout.params)
        if each_s and (copied := copied_s(cluster.device, message_class, span)):
            # Copies are computing, which the message takes up as if it slowed computing down.
            each_s, penalty = each_s + copied, (penalty * each_s + copied) / (each_s + copied)
        return Line(message_lane(layout, message_class, source), base_s, each_s, penalty)

    def _below_s(self, op: Op, layout: Layout, plan: Plan, numel: int) -> float:
        """Seconds of reading the `numel` elements of a message from below the device, or of writing them there."""
        keep, below = plan.keep, self.estimator.task.cluster.device.below
        if op is Op.SYNC and layout.grads_below:
            item = FORMATS[grad_format(plan)].element_bytes
            return below[keep.grads].write_s(numel / layout.span(layout.optimizer) * item)
        if op not in (Op.GATHER, Op.REFRESH) or not layout.params_below:
            return 0.0
        num_bytes = numel / layout.span(layout.params) * self.estimator.item
        return below[keep.params].read_s(num_bytes) if op is Op.GATHER else below[keep.params].write_s(num_bytes)
