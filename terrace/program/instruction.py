"""The instruction set.

| op            | meaning                                                                          |
|---------------|----------------------------------------------------------------------------------|
| GATHER        | materialise the full parameters of a block, from its primary or secondary copy   |
| FREE          | drop them                                                                        |
| FORWARD       | run a block on a micro-batch; keep its input, and its graph unless recomputed    |
| BACKWARD      | run the backward of a block on a micro-batch, recomputing its graph if need be   |
| REDUCE        | reduce the block's gradient of a unit, up to `micro`, into the grads tier's shard |
| SYNC          | finish the accumulated gradient over the tiers outside, once a step              |
| CLIP          | global gradient norm, loss and token count: one message, one scale               |
| UPDATE        | the optimizer, on the shard of the optimizer tier                                |
| REFRESH       | bring the new parameters back to the params tier                                 |
| SEND / RECV   | pipeline point to point: an activation onward, a gradient back                   |

Communication is issued without blocking; an instruction waits only for what it reads.
"""

from dataclasses import dataclass
from enum import StrEnum


class Op(StrEnum):
    """What an instruction does."""

    GATHER = "GATHER"
    FREE = "FREE"
    FORWARD = "FORWARD"
    BACKWARD = "BACKWARD"
    REDUCE = "REDUCE"
    SYNC = "SYNC"
    CLIP = "CLIP"
    UPDATE = "UPDATE"
    REFRESH = "REFRESH"
    SEND = "SEND"
    RECV = "RECV"

    __hash__ = str.__hash__  # as fast as its text's: instructions are looked up by the thousand


COLLECTIVES = frozenset({Op.GATHER, Op.REDUCE, Op.SYNC, Op.CLIP, Op.REFRESH})


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction; fields that an op does not use keep their default.

    `micro` is the micro-batch, `backward` tells a GATHER for a backward (and a gradient SEND or RECV)
    from one for a forward, `secondary` that a GATHER reads the secondary copy, `peer` the other rank
    of a SEND or RECV.
    """

    op: Op
    block: int = -1
    micro: int = -1
    backward: bool = False
    secondary: bool = False
    peer: int = -1

    def __str__(self) -> str:
        words = [self.op.value]
        if self.op in (Op.SEND, Op.RECV):
            words.append("gradient" if self.backward else "activation")
        if self.block >= 0:
            words.append(f"b{self.block}")
        if self.micro >= 0:
            words.append(f"m{self.micro}")
        if self.op is Op.GATHER:
            words.append("for backward" if self.backward else "for forward")
            if self.secondary:
                words.append("from the secondary copy")
        if self.peer >= 0:
            words.append(f"{'to' if self.op is Op.SEND else 'from'} rank {self.peer}")
        return " ".join(words)
