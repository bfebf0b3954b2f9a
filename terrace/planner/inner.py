"""Seconds that blocks wait for tensor and context ranks, from the blocks' own programs.

The steps of a block do not depend on the tiers of the ranks; the seconds of a message do. So
steps are cached by degrees and tokens, prices by mapping.
"""

import math
from collections.abc import Sequence
from itertools import groupby

from terrace.plan.context_traffic import same_bytes
from terrace.plan.in_block_messages import ContextMessage, TensorMessage
from terrace.plan.mesh import TENSOR, Mesh
from terrace.plan.plan import FUSED, Plan
from terrace.plan.tensor_traffic import TensorTraffic
from terrace.plan.wire import MessageClass, parse_format
from terrace.planner.task import Task, with_tensor_chunks
from terrace.program.block_program.attention import attention_moments, steps_of
from terrace.program.block_program.regions import tensor_steps
from terrace.program.block_program.steps import Compute, InBlockMessage, Moment, messages_of, moments_of
from terrace.simulate.inside import (
    NO_ROUNDS,
    InBlockPrices,
    PricedMoment,
    Rooms,
    Rounds,
    added_s,
    attention_bytes,
    outermost_first,
    rooms_of,
)
from terrace.simulate.layers import BlockSeconds, core_rounds
from terrace.simulate.masks import work_in
from terrace.simulate.work import Work

# (times, piece of compute, messages hidden behind it): by overlap penalty, the count of each message and its index in a
# list of all.
_Counted = tuple[int, Compute | None, list[tuple[float, list[tuple[int, int]]]]]
PassSeconds = tuple[float, float, float]  # seconds of a forward, of a backward, and of the recomputation before it
Passes = tuple[tuple[PricedMoment, ...], ...]  # of a forward, a backward, and a backward that recomputes

NOTHING: PassSeconds = (0.0, 0.0, 0.0)


class Inner:
    """Messages inside the blocks of one task, cached."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._lines: dict[tuple[int, Mesh], tuple[Passes, Passes]] = {}
        self._moments: dict[tuple[int, ...], list[tuple[Moment, ...]]] = {}
        self._priced: dict[tuple[int, Mesh, int], Passes] = {}
        self._prices: dict[Mesh, InBlockPrices] = {}
        self._contexts: dict[tuple[object, ...], PassSeconds] = {}
        self._counts: dict[tuple[tuple[int, ...], ...], tuple[list[InBlockMessage], list[list[_Counted]]]] = {}
        self._sends: dict[tuple[object, ...], float] = {}
        row = task.wire.get(MessageClass.CONTEXT, {})
        self._context_wires = [parse_format(row.get(tier.name, task.compute)) for tier in task.cluster.tiers]

    def tensor(self, kind: int, mesh: Mesh, work: Work, own: BlockSeconds) -> PassSeconds:
        """Seconds that a block with compute `own` waits for its tensor ranks on one micro-batch."""
        if work.tensor == 1:
            return NOTHING
        rooms = self.rooms(own.forward_s, own.input_s, own.weight_s)
        forward_s, backward_s, with_forward_s = (
            sum([times * added_s(parts, behind, rooms) for _, behind, parts, times in moments])
            for moments in self._passes(kind, mesh, work.tokens)
        )
        return forward_s, backward_s, with_forward_s - backward_s

    def context(self, kind: int, mesh: Mesh, work: Work) -> PassSeconds:
        """Seconds that a block waits for its context ranks."""
        spec = self.task.kinds.specs[kind]
        if work.context == 1 or not spec.attends:
            return NOTHING
        degrees = mesh.group("ulysses"), mesh.group("ring")
        # Everything that context messages depend on within one task.
        key = (kind, degrees, work.rows, work.micro_batch)
        found = self._contexts.get(key)
        if found is None:
            cluster = self.task.cluster
            work = work_in(work, spec, self.task.backend)
            if spec.operations.delta.heads:
                found = self._contexts[key] = self._scanned(work, degrees)
                return found
            messages, passes = self._counted(degrees)
            prices = InBlockPrices(cluster, None, attention_bytes(work, *degrees, self._context_wires), self._sends)
            seconds = [prices.seconds(message) for message in messages]
            # Without a ring nothing hides messages.
            rooms = self.rooms(0.0, 0.0, 0.0, core_rounds(cluster.device, work)) if work.ring > 1 else {}
            forward_s, backward_s = (
                sum([times * added_s(_parts(counts, seconds), behind, rooms) for times, behind, counts in moments])
                for moments in passes
            )
            found = self._contexts[key] = (forward_s, backward_s, forward_s)
        return found

    def _scanned(self, work: Work, degrees: tuple[tuple[int, ...], ...]) -> PassSeconds:
        ulysses, ring = degrees
        sent = attention_bytes(work, ulysses, ring)
        prices = InBlockPrices(self.task.cluster, None, sent, self._sends)
        forward_s, backward_s = (sum(map(prices.seconds, messages_of(steps))) for steps in steps_of(sent))
        return forward_s, backward_s, forward_s

    def _counted(self, degrees: tuple[tuple[int, ...], ...]) -> tuple[list[InBlockMessage], list[list[_Counted]]]:
        """Distinct messages of context ranks, and how often a forward and a backward send each, whatever their
        bytes.
        """
        found = self._counts.get(degrees)
        if found is None:
            ulysses, ring = degrees
            prices, numbers = InBlockPrices(self.task.cluster), dict[InBlockMessage, int]()
            passes = [
                [(times, behind, _numbered(prices, messages, numbers)) for _, behind, messages, times, _ in moments]
                for moments in attention_moments(math.prod(ulysses), ring)
            ]
            found = self._counts[degrees] = list(numbers), passes
        return found

    def _passes(self, kind: int, mesh: Mesh, num_tokens: int) -> Passes:
        group = mesh.only("tensor")
        # Messages carry tokens that are padded to a multiple of the tensor ranks. The few that do not, with columns or
        # of a loss, are priced too high by less than one token of a rank.
        if self._is_linear:
            num_tokens = -(-num_tokens // group.total("tensor")) * group.total("tensor")
        key = (kind, group, num_tokens)
        found = self._priced.get(key)
        if found is None:
            found = self._priced[key] = self._interpolated(kind, group, num_tokens)
        return found

    def _interpolated(self, kind: int, group: Mesh, num_tokens: int) -> Passes:
        # Seconds are latency plus bytes over a rate, and bytes are linear in the tokens, so two sizes determine all
        # others. Padding of encoded messages breaks linearity, and so does another algorithm for small messages; such
        # sizes are priced individually. So are messages in parts, some of which have an extra token.
        trees = any(self.task.cluster.tiers[tier].tree is not None for tier in group.tiers("tensor"))
        if trees or MessageClass.TENSOR.value in self.task.wire or not self._is_linear:
            return self._passes_of(kind, group, num_tokens)
        size = group.total("tensor") * self.task.sequence
        key = (kind, group)
        ends = self._lines.get(key)
        if ends is None:
            ends = self._lines[key] = self._passes_of(kind, group, size), self._passes_of(kind, group, 2 * size)
        more = num_tokens / size - 1
        return tuple(
            tuple(_on_the_line(one, two, more) for one, two in zip(first, second, strict=True))
            for first, second in zip(*ends, strict=True)
        )

    @property
    def _is_linear(self) -> bool:
        """Whether the elements of all messages grow in a straight line with the tokens of a rank."""
        return self.task.tensor_chunks in (1, FUSED)

    def _passes_of(self, kind: int, group: Mesh, num_tokens: int) -> Passes:
        if group not in self._prices:
            self._prices[group] = InBlockPrices(self.task.cluster, self._axis(group, 1))
        return tuple(map(self._prices[group].priced, self._moments_of(kind, group, num_tokens)))

    def _moments_of(self, kind: int, group: Mesh, num_tokens: int) -> list[tuple[Moment, ...]]:
        key = (kind, group.total("rows"), group.total("columns"), num_tokens)
        found = self._moments.get(key)
        if found is None:
            size = group.total("tensor") * self.task.sequence
            if self._is_linear and num_tokens not in (size, 2 * size):
                ends = (self._moments_of(kind, group, each) for each in (size, 2 * size))
                found = [
                    tuple([_resized(one, two, num_tokens / size - 1) for one, two in zip(*passes, strict=True)])
                    for passes in zip(*ends, strict=True)
                ]
            else:
                found = self._written(kind, group, num_tokens)
            self._moments[key] = found
        return found

    def _written(self, kind: int, group: Mesh, num_tokens: int) -> list[tuple[Moment, ...]]:
        blocks = self.task.kinds.sliced({axis: group.total(axis) for axis in TENSOR})
        tensor, nothing = self._axis(group, num_tokens), ((), ())
        passes = []
        for recomputed in (False, True):
            (forward, backward), (after, before) = tensor_steps(tensor, blocks, blocks[kind], nothing, recomputed)
            passes.append((forward + after, before + backward))
        (forward, backward), again = passes
        return [moments_of(steps) for steps in (forward, backward, again[0] + again[1])]

    def _axis(self, mesh: Mesh, num_tokens: int) -> TensorTraffic:
        cluster = self.task.cluster
        plan = self.plan(mesh)
        return TensorTraffic.of(Mesh.of(cluster, plan), [tier.name for tier in cluster.tiers], plan, num_tokens)

    def rooms(self, forward_s: float, input_s: float, weight_s: float, rounds: Rounds = NO_ROUNDS) -> Rooms:
        """Seconds of compute that can hide messages inside a block."""
        return rooms_of(forward_s, input_s, weight_s, rounds)

    def plan(self, mesh: Mesh) -> Plan:
        """A plan that only specifies messages inside blocks."""
        task = self.task
        plan = Plan(
            params="device",
            grads="device",
            optimizer="device",
            mapping=mesh.mapping([tier.name for tier in task.cluster.tiers]),
            wire={name: row for name, row in task.wire.items() if name == MessageClass.TENSOR.value},
            compute=task.compute,
            master=task.master,
        )
        return with_tensor_chunks(task, mesh, plan)


def _numbered(
    prices: InBlockPrices, messages: Sequence[tuple[InBlockMessage, int]], numbers: dict[InBlockMessage, int]
) -> list[tuple[float, list[tuple[int, int]]]]:
    # As `InBlockPrices.parts`.
    alike = groupby(outermost_first(messages), key=lambda counted: prices.penalty(counted[0]))
    return [
        (penalty, [(count, numbers.setdefault(_priced_as(message), len(numbers))) for message, count in counted])
        for penalty, counted in alike
    ]


def _priced_as(message: InBlockMessage) -> InBlockMessage:
    return same_bytes(message) if isinstance(message, ContextMessage) else message


def _parts(
    counts: Sequence[tuple[float, Sequence[tuple[int, int]]]], seconds: Sequence[float]
) -> list[tuple[float, float]]:
    if len(counts) == 1 and len(counts[0][1]) == 1:  # most moments
        ((penalty, ((count, number),)),) = counts
        return [(count * seconds[number], penalty)]
    return [(sum([count * seconds[number] for count, number in counted]), penalty) for penalty, counted in counts]


def _resized(one: Moment, two: Moment, more: float) -> Moment:
    # `two` has twice the tokens of `one`.
    def between(
        first: Sequence[tuple[InBlockMessage, int]], second: Sequence[tuple[InBlockMessage, int]]
    ) -> tuple[tuple[InBlockMessage, int], ...]:
        return tuple([(_message(a, b, more), count) for (a, count), (b, _) in zip(first, second, strict=True)])

    return one._replace(messages=between(one.messages, two.messages), fused=between(one.fused, two.fused))


def _message(one: InBlockMessage, two: InBlockMessage, more: float) -> InBlockMessage:
    if isinstance(one, TensorMessage) and isinstance(two, TensorMessage):
        return one._replace(numel=one.numel + round(more * (two.numel - one.numel)))
    return one


def _on_the_line(one: PricedMoment, two: PricedMoment, more: float) -> PricedMoment:
    # `two` has twice the tokens of `one`, so their difference is the cost of one more size.
    parts = zip(one.parts, two.parts, strict=True)
    return one._replace(parts=tuple((a + more * (b - a), penalty) for (a, penalty), (b, _) in parts))
