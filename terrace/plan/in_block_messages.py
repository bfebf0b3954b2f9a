"""Messages that the ranks of a block send one another inside it, as values; sizes and tiers are computed elsewhere."""

from enum import StrEnum
from typing import NamedTuple

from terrace.plan.layout import INSIDE
from terrace.plan.mesh import SHARING
from terrace.plan.wire import MessageClass


class Leg(StrEnum):
    """The collective of a message."""

    GATHER = "gather"
    REDUCE = "reduce"
    NUMBERS = "numbers"  # a gather of a few numbers a token, never rounded

    __hash__ = str.__hash__  # fast: a search looks messages up by the thousand


class TensorMessage(NamedTuple):
    """One message inside a block: `numel` padded elements between the ranks of `axes`.

    Ranks that share sequences tell one another the choices of routers in the same way.
    """

    leg: Leg
    axes: tuple[str, ...]
    numel: int

    @property
    def message_class(self) -> MessageClass:
        """The class of messages of the tensor axis, and of choices."""
        return MessageClass.CHOICES if self.axes == SHARING else MessageClass.TENSOR

    @property
    def lane(self) -> int:
        """The lane of messages inside blocks."""
        return INSIDE


class RoutedMessage(NamedTuple):
    """A message on the way of tokens to where a router sends them, or back, whose size a batch gives.

    Rows go over one tier, to every peer if `copies`. The table of counts is gathered over all tiers up to `tier`, among
    the ranks of the rows if `copies`. Rows are of one chunk of the tokens.
    """

    message_class: MessageClass
    tier: int
    copies: bool = False
    backward: bool = False
    chunk: int = 0

    @property
    def lane(self) -> int:
        """The lane of its tier, which it shares with messages between blocks."""
        return self.tier


class ContextLeg(StrEnum):
    """A message's content and direction."""

    INTO = "into"  # attention's inputs, to the parts that attend to them
    KEYS = "keys"  # keys and values of a round, to the place whose next round they are
    GRADIENTS = "gradients"  # of keys and values of a round, after those keys
    RETURN_GRADIENTS = "home"  # gradients of the keys and values of the last round, to the place that owns them
    BACK = "back"  # attention's results, to the part that holds the tokens

    __hash__ = str.__hash__  # fast: a search looks messages up by the thousand


class ContextMessage(NamedTuple):
    """A message of a layer's attention; `tier` is the one that a step of the ring goes over."""

    leg: ContextLeg
    tier: int = -1
    backward: bool = False

    @property
    def message_class(self) -> MessageClass:
        """The class of all messages of the context axis."""
        return MessageClass.CONTEXT

    @property
    def lane(self) -> int:
        """The lane of messages inside blocks."""
        return INSIDE
