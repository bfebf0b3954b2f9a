"""The steps of a block: computing, and the messages among ranks that run the same block, in the order of issue.

    Compute(kind, number)     a piece of computing behind which messages may hide
    Send(messages, behind)    put on the lane of messages inside blocks, one after the other; messages of experts go on
                              the lane of the outermost tier that they cross, like messages between blocks. One that is
                              `fused` is one operation with the computing that follows it
    Await(send)               computing stops until the messages of `send` are there
    Gap(number)               parts of the gradients before it go on their lanes

Between a `Send` and its `Await` the device computes. `Send.behind` names the computing that hides the messages;
None counts all of them as waited for. A piece hides no more than it takes, so its messages share its seconds.

The runtime issues these steps (tests compare a recording of it, step by step), and the simulator prices them.
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
    """Pieces of computing that hide messages."""

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
    """A piece of computing; `number` is the ring step of a round, or the piece of tokens that experts pass.

    Gradients of experts' weights have the number of a chunk.
    """

    kind: ComputeKind
    number: int = 0


@dataclass(frozen=True)
class Send:
    """Messages that one piece of work on the lane carries, and the computing that hides them."""

    messages: tuple[InBlockMessage, ...]
    behind: Compute | None = None
    fused: bool = False


@dataclass(frozen=True)
class Await:
    """The end of the oldest equal `send` that is still under way."""

    send: Send


@dataclass(frozen=True)
class Gap:
    """A place in a backward for parts of the gradients before it (terrace.plan.gaps); gap 0 is before the pass."""

    number: int


BlockStep = Compute | Send | Await | Gap
Steps = tuple[BlockStep, ...]


@dataclass(frozen=True)
class BlockProgram:
    """The steps of a block on one micro-batch; backwards are without recomputation.

    `routed` is the forward and the backward of the experts: after the other steps in a forward, before them in a
    backward. `shared` are the messages of tensor rows for a shared expert: after the experts in a forward, before them
    in a backward.
    """

    forward: Steps
    backward: Steps
    recomputed: bool = False
    routed: tuple[Steps, Steps] = ((), ())
    shared: tuple[Steps, Steps] = ((), ())

    def steps(self, op: Op) -> Steps:
        """Steps of a pass; half a backward has all of them in its first half."""
        # Weight gradients inside a block are computed while its messages travel, so the first half has all steps.
        (there, back), (after, before) = self.routed, self.shared
        return self._of(op, self.forward + there + after, before + back + self.backward)

    def routed_steps(self, op: Op) -> Steps:
        """The steps of a pass that are of the block's experts."""
        return self._of(op, *self.routed)

    def moments(self, op: Op) -> "tuple[Moment, ...]":
        """Moments of a pass, counted once, without messages of experts: these take lanes (terrace.simulate.routed)."""
        if op not in self._moments:
            self._moments[op] = moments_of(self._of(op, self.forward + self.shared[0], self.shared[1] + self.backward))
        return self._moments[op]

    def _of(self, op: Op, forward: Steps, backward: Steps) -> Steps:
        if op not in PASSES or op is Op.BACKWARD_WEIGHT:
            return ()
        if op is Op.FORWARD:
            return forward
        # Half a backward leaves the gradients of experts' weights to the other half. Other weight gradients inside a
        # block are computed while its messages travel, so the first half has all their steps.
        if op is Op.BACKWARD_INPUT and self.routed[0]:
            backward = input_half(backward)
        if not self.recomputed:
            return backward
        # Choices and routes of the first forward are kept, so the second begins with rows.
        return (*filter(moves_rows, forward), *backward)

    @cached_property
    def _moments(self) -> "dict[Op, tuple[Moment, ...]]":
        return {}


def moves_rows(step: BlockStep) -> bool:
    """Whether a second forward has this step: all but the messages of choices and routes."""
    send = step.send if isinstance(step, Await) else step
    return not (isinstance(send, Send) and send.messages[0].message_class in _TOLD)


def input_half(backward: Steps) -> Steps:
    """The steps of a backward that are in its first half: all but the gradients of experts' weights."""
    return tuple(step for step in backward if not _weighs(step))


def _weighs(step: BlockStep) -> bool:
    return isinstance(step, Compute) and step.kind is ComputeKind.EXPERT_WEIGHTS


def messages_of(steps: Iterable[BlockStep]) -> Iterator[InBlockMessage]:
    """Messages of `steps` in the order in which they are issued."""
    for step in steps:
        if isinstance(step, Send):
            yield from step.messages


_Counts = Counter[InBlockMessage]
_Counted = frozenset[tuple[InBlockMessage, int]]


class Moment(NamedTuple):
    """Messages that share the seconds of one piece of computing, `times` over; None: messages that are waited for.

    Each that is `fused` with it leaves a tail (terrace.simulate.inside).

    All pieces of later ring steps take equally long, and have number 1 here.
    """

    message_class: MessageClass
    behind: Compute | None
    messages: tuple[tuple[InBlockMessage, int], ...]  # with how often each is sent
    times: int
    fused: tuple[tuple[InBlockMessage, int], ...] = ()  # those of `messages` that are


def moments_of(steps: Steps) -> tuple[Moment, ...]:
    """Moments of a pass, equal ones folded into one."""
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
