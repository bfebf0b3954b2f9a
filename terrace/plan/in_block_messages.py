"""Messages between ranks inside a block, as plain values; bytes per tier are computed elsewhere."""

from enum import StrEnum
from typing import NamedTuple

from terrace.plan.layout import INSIDE
from terrace.plan.mesh import SHARING
from terrace.plan.wire import MessageClass


class Leg(StrEnum):
    """Collective operation of a tensor message."""

    GATHER = "gather"
    REDUCE = "reduce"
    NUMBERS = "numbers"  # a gather of a few numbers per token, never rounded

    __hash__ = str.__hash__  # fast: a search looks messages up by the thousand


class TensorMessage(NamedTuple):
    """One collective inside a block: `numel` padded elements between the ranks of `axes`.

    Ranks that share sequences exchange router choices with it too (`axes` = `SHARING`).
    """

    leg: Leg
    axes: tuple[str, ...]
    numel: int

    @property
    def message_class(self) -> MessageClass:
        """TENSOR, or CHOICES for router choices."""
        return MessageClass.CHOICES if self.axes == SHARING else MessageClass.TENSOR

    @property
    def lane(self) -> int:
        return INSIDE


class RoutedMessage(NamedTuple):
    """A dispatch or combine of tokens over one tier, or the gather of their counts; its size depends on the batch.

    Token rows of one `chunk` cross one tier, to every peer if `copies`. The table of counts is gathered over all tiers
    up to `tier`, on the rows axis if `copies`.
    """

    message_class: MessageClass
    tier: int
    copies: bool = False
    backward: bool = False
    chunk: int = 0

    @property
    def lane(self) -> int:
        return self.tier


class ContextLeg(StrEnum):
    INTO = "into"  # attention's inputs, to the Ulysses ranks
    KEYS = "keys"  # keys and values of a round, to the ring rank that uses them next
    GRADIENTS = "gradients"  # of a round's keys and values, one round after those
    RETURN_GRADIENTS = "home"  # gradients of the last round's keys and values, to the ring rank that owns them
    HALO = "tokens before"  # the last inputs of a linear layer's convolutions, between the ranks of a tier
    STATE = "state"  # maps of a linear layer's states, between the ranks of a tier
    BACK = "back"  # attention's outputs, to the ranks that hold the tokens

    __hash__ = str.__hash__  # fast: a search looks messages up by the thousand


class ContextMessage(NamedTuple):
    """A message of a layer's attention, or of a linear layer; `tier` is the one that a ring step or a scan crosses."""

    leg: ContextLeg
    tier: int = -1
    backward: bool = False

    @property
    def message_class(self) -> MessageClass:
        return MessageClass.CONTEXT

    @property
    def lane(self) -> int:
        return INSIDE
