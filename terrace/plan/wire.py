"""Message classes and wire formats.

A message class says what a message is for; a wire format says how many bytes its elements take. The
table `wire.<class>.<tier> = "<format>"` of a plan combines them.
"""

from dataclasses import dataclass
from enum import StrEnum


class MessageClass(StrEnum):
    """What a message carries."""

    GATHER = "gather"  # parameters, for a forward
    GATHER_BACKWARD = "gather_backward"  # parameters, for a backward
    REDUCE = "reduce"  # gradients of one micro-batch, up to the grads tier
    SYNC = "sync"  # accumulated gradients, once a step, over the tiers outside
    REFRESH = "refresh"  # new parameters, from the optimizer tier back to the params tier
    CONTROL = "control"  # squared gradient norm, loss and token count: three fp64 numbers a step


PLACEABLE = tuple(message for message in MessageClass if message is not MessageClass.CONTROL)

# One control message: the squared norm, the loss sum and the token count, as fp64.
CONTROL_BYTES = 3 * 8


@dataclass(frozen=True)
class WireFormat:
    """How elements travel. `mantissa_bits` orders formats by precision."""

    name: str
    element_bytes: int
    mantissa_bits: int

    def message_bytes(self, numel: int) -> int:
        """Return the size of one message of `numel` elements."""
        return self.element_bytes * numel


FORMATS = {
    "fp64": WireFormat("fp64", 8, 52),
    "fp32": WireFormat("fp32", 4, 23),
    "bf16": WireFormat("bf16", 2, 7),
}
