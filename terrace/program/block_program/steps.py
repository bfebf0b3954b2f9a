"""The steps of a block: compute, and messages among ranks that run the same block, in the order of issue.

    Compute(kind, number)   a piece of compute that can hide messages
    Send(messages, behind)  enqueue on the lane of messages inside blocks, in order; messages of experts use the lane of
                            the outermost tier that they cross, like messages between blocks. If `fused`, it is one
                            operation with the compute that follows it
    Await(send)             compute waits until the messages of `send` have arrived
    Gap(number)             send parts of earlier gradients on their lanes

Between a `Send` and its `Await` the device computes. `Send.behind` is the compute that hides the messages; None means
that they are fully exposed. A piece can hide no more than its own duration, which its messages share. The runtime
issues these steps (tests compare a recording of it, step by step), and the simulator prices them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from terrace.plan.in_block_messages import ContextMessage, RoutedMessage, TensorMessage
from terrace.plan.wire import MessageClass
from terrace.program.instruction import PASSES, Op

InBlockMessage = TensorMessage | ContextMessage | RoutedMessage


_TOLD = (MessageClass.CHOICES, MessageClass.ROUTE)


class ComputeKind(StrEnum):
    OUTPUTS = "outputs"
    INPUT_GRADIENTS = "gradients of inputs"
    WEIGHT_GRADIENTS = "gradients of weights"
    ROUND = "round"  # attention to the keys of one ring step
    ROUND_GRADIENTS = "gradients of a round"
    EXPERTS = "experts"
    EXPERT_GRADIENTS = "gradients of experts"
    EXPERT_WEIGHTS = "gradients of experts' weights"
    SHARED = "shared expert"
    SHARED_GRADIENTS = "gradients of the shared expert"

    __hash__ = str.__hash__  # fast: a search looks pieces up by the thousand


class Compute(NamedTuple):
    """A piece of compute.

    `number` is the ring step of a round, the piece of tokens for experts, or the chunk for gradients of experts'
    weights.
    """

    kind: ComputeKind
    number: int = 0


@dataclass(frozen=True)
class Send:
    """Messages enqueued together on a lane, and the compute that hides them."""

    messages: tuple[InBlockMessage, ...]
    behind: Compute | None = None
    fused: bool = False


@dataclass(frozen=True)
class Await:
    """Wait for the oldest equal `send` that is still in flight."""

    send: Send


@dataclass(frozen=True)
class Gap:
    """A point in a backward where parts of earlier gradients are sent (terrace.plan.gaps); gap 0 is before the pass."""

    number: int


BlockStep = Compute | Send | Await | Gap
Steps = tuple[BlockStep, ...]


@dataclass(frozen=True)
class BlockProgram:
    """The steps of a block on one micro-batch; `backward` does not include recomputation.

    `routed` are the (forward, backward) steps of experts: after `forward`, before `backward`. `shared` are the steps of
    tensor rows after the experts in a forward and before them in a backward.
    """

    forward: Steps
    backward: Steps
    recomputed: bool = False
    routed: tuple[Steps, Steps] = ((), ())
    shared: tuple[Steps, Steps] = ((), ())

    def steps(self, op: Op) -> Steps:
        """Steps of a pass; a backward's input half has all steps except gradients of experts' weights."""
        # Weight gradients inside a block hide its messages, so the input half has all steps.
        (there, back), (after, before) = self.routed, self.shared
        return self._of(op, self.forward + there + after, before + back + self.backward)

    def routed_steps(self, op: Op) -> Steps:
        """The steps of a pass that belong to the block's experts."""
        return self._of(op, *self.routed)

    def moments(self, op: Op) -> "tuple[Moment, ...]":
        """Cached moments of a pass, without expert messages, which use tier lanes (terrace.simulate.routed)."""
        if op not in self._moments:
            self._moments[op] = moments_of(self._of(op, self.forward + self.shared[0], self.shared[1] + self.backward))
        return self._moments[op]

    def _of(self, op: Op, forward: Steps, backward: Steps) -> Steps:
        if op not in PASSES or op is Op.BACKWARD_WEIGHT:
            return ()
        if op is Op.FORWARD:
            return forward
        # In a split backward, gradients of experts' weights are in the weight half. Other weight gradients inside a
        # block hide its messages, so the input half has their steps.
        if op is Op.BACKWARD_INPUT and self.routed[0]:
            backward = input_half(backward)
        if not self.recomputed:
            return backward
        # Choices and routes of the first forward are kept, so the second one only sends rows.
        return (*filter(moves_rows, forward), *backward)

    @cached_property
    def _moments(self) -> "dict[Op, tuple[Moment, ...]]":
        return {}


def moves_rows(step: BlockStep) -> bool:
    """Whether a recomputed forward has this step; it skips messages of choices and routes."""
    send = step.send if isinstance(step, Await) else step
    return not (isinstance(send, Send) and send.messages[0].message_class in _TOLD)


def input_half(backward: Steps) -> Steps:
    """The steps of a backward's input half: all except gradients of experts' weights."""
    return tuple(step for step in backward if not _weighs(step))


def _weighs(step: BlockStep) -> bool:
    return isinstance(step, Compute) and step.kind is ComputeKind.EXPERT_WEIGHTS


def messages_of(steps: Iterable[BlockStep]) -> Iterator[InBlockMessage]:
    for step in steps:
        if isinstance(step, Send):
            yield from step.messages


_Counts = Counter[InBlockMessage]
_Counted = frozenset[tuple[InBlockMessage, int]]


class Moment(NamedTuple):
    """Messages that the compute `behind` hides, `times` over; exposed messages if it is None.

    A message `fused` with the compute leaves a tail (terrace.simulate.inside). Ring steps after the first take equally
    long and all have number 1 here.
    """

    message_class: MessageClass
    behind: Compute | None
    messages: tuple[tuple[InBlockMessage, int], ...]  # (message, how often it is sent)
    times: int
    fused: tuple[tuple[InBlockMessage, int], ...] = ()  # the fused ones of `messages`


def moments_of(steps: Steps) -> tuple[Moment, ...]:
    beside: dict[tuple[MessageClass, Compute | None], tuple[_Counts, _Counts]] = {}
    for step in steps:
        if isinstance(step, Send):
            for message in step.messages:
                all_of, fused = beside.setdefault((message.message_class, step.behind), (Counter(), Counter()))
                all_of[message] += 1
                if step.fused:
                    fused[message] += 1
    times: Counter[tuple[MessageClass, Compute | None, _Counted, _Counted]] = Counter()
    order: dict[object, tuple[tuple[tuple[InBlockMessage, int], ...], ...]] = {}
    for (message_class, behind), counts in beside.items():
        # Later rounds take equally long, so they share a number.
        alike = behind if behind is None else Compute(behind.kind, min(behind.number, 1))
        all_of, fused = counts
        key = message_class, alike, frozenset(all_of.items()), frozenset(fused.items())
        order.setdefault(key, (tuple(all_of.items()), tuple(fused.items())))
        times[key] += 1
    return tuple(Moment(*key[:2], order[key][0], number, order[key][1]) for key, number in times.items())
