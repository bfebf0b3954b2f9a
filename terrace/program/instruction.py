"""The instruction set.

| op              | meaning                                                                           |
|-----------------|-----------------------------------------------------------------------------------|
| GATHER          | materialise the full parameters of a block, from its primary or secondary copy    |
| FREE            | drop them                                                                         |
| FORWARD         | run a block on a micro-batch; keep its input, and its graph unless recomputed     |
| BACKWARD        | run the backward of a block on a micro-batch, recomputing its graph if need be    |
| BACKWARD_INPUT  | its first half: the gradient of the input, which the block before waits for       |
| BACKWARD_WEIGHT | its second half, any time later: the gradients of linear layers' weights          |
| REDUCE          | reduce the block's gradient so far, up to `micro`, into the grads tier's shard    |
| TIE             | add the gradient shard that another stage has of the same block, once a step      |
| SYNC            | finish the accumulated gradient over the tiers outside, once a step               |
| COUNT           | choices of the routers of the stage, added up over its ranks, once a step         |
| CLIP            | global gradient norm, loss and token count: one message, one scale                |
| ORTHOGONALISE   | Muon: the momentum of a layer's matrices, gathered whole from the optimizer tier  |
| UPDATE          | the optimizer, on the shard of the optimizer tier                                 |
| REFRESH         | round the master parameters into the working copy, back on the params tier        |
| OUTER_COUNT     | numbers of all islands: tokens, losses, norms of changes, digests of parameters   |
| OUTER_START     | send the change of a block's parameters on this island; its mean over islands     |
| OUTER_APPLY     | take an outer step with that mean                                                 |
| SEND / RECV     | pipeline point to point: a block's output onward, the gradient of its input back  |

Communication is issued without blocking; an instruction waits only for its operands. `SPECS` declares the fields and
the message class of every op, once for the verifier, the printer, the simulator and the executor.
"""

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from terrace.plan.wire import BETWEEN_STAGES, MessageClass


class Op(StrEnum):
    """The operation of an instruction."""

    GATHER = "GATHER"
    FREE = "FREE"
    FORWARD = "FORWARD"
    BACKWARD = "BACKWARD"
    BACKWARD_INPUT = "BACKWARD_INPUT"
    BACKWARD_WEIGHT = "BACKWARD_WEIGHT"
    REDUCE = "REDUCE"
    TIE = "TIE"
    SYNC = "SYNC"
    COUNT = "COUNT"
    CLIP = "CLIP"
    ORTHOGONALISE = "ORTHOGONALISE"
    UPDATE = "UPDATE"
    REFRESH = "REFRESH"
    OUTER_COUNT = "OUTER_COUNT"
    OUTER_START = "OUTER_START"
    OUTER_APPLY = "OUTER_APPLY"
    SEND = "SEND"
    RECV = "RECV"

    __hash__ = str.__hash__  # as fast as its text's: instructions are looked up by the thousand


@dataclass(frozen=True)
class OpSpec:
    """The declaration of an op: the `fields` its instructions set, the class of the message they send.

    `message_backward` is the class of an instruction with `backward` set, where it differs. `peer` is the word before
    the other stage of a point-to-point op.
    """

    fields: Collection[str] = ("block",)
    message: MessageClass | None = None
    message_backward: MessageClass | None = None
    is_pass: bool = False
    peer: str = ""


_PASS = OpSpec(("block", "micro"), is_pass=True)
_POINT_TO_POINT = ("block", "micro", "backward", "peer")

SPECS: dict[Op, OpSpec] = {
    Op.GATHER: OpSpec(("block", "backward", "secondary"), MessageClass.GATHER, MessageClass.GATHER_BACKWARD),
    Op.FREE: OpSpec(),
    Op.FORWARD: _PASS,
    Op.BACKWARD: _PASS,
    Op.BACKWARD_INPUT: _PASS,
    Op.BACKWARD_WEIGHT: _PASS,
    Op.REDUCE: OpSpec(("block", "micro", "in_gaps"), MessageClass.REDUCE),
    Op.TIE: OpSpec(("block", "peer"), MessageClass.TIE, peer="with"),
    Op.SYNC: OpSpec(("block", "in_gaps"), MessageClass.SYNC),
    Op.COUNT: OpSpec((), MessageClass.COUNTS),
    Op.CLIP: OpSpec((), MessageClass.CONTROL),
    Op.ORTHOGONALISE: OpSpec(message=MessageClass.ORTHOGONALISE),
    Op.UPDATE: OpSpec(),
    Op.REFRESH: OpSpec(message=MessageClass.REFRESH),
    Op.OUTER_COUNT: OpSpec((), MessageClass.OUTER),
    Op.OUTER_START: OpSpec(message=MessageClass.OUTER),
    Op.OUTER_APPLY: OpSpec(),
    Op.SEND: OpSpec(_POINT_TO_POINT, *BETWEEN_STAGES, peer="to"),
    Op.RECV: OpSpec(_POINT_TO_POINT, *BETWEEN_STAGES, peer="from"),
}
PASSES = frozenset(op for op, spec in SPECS.items() if spec.is_pass)
COLLECTIVES = frozenset(op for op, spec in SPECS.items() if spec.message is not None and not spec.peer)


class Instruction(NamedTuple):
    """One instruction; fields that an op does not use keep their default.

    `micro` is the micro-batch, `backward` tells a GATHER for a backward (and a gradient SEND or RECV)
    from one for a forward, `secondary` that a GATHER reads the secondary copy, `peer` the other stage
    of a SEND, a RECV or a TIE: of the ranks there, the one at the same place on every other axis. The `block` of a RECV
    is the one that the sender ran. A REDUCE or SYNC `in_gaps` leaves in parts (terrace.program.gaps).
    """

    op: Op
    block: int = -1
    micro: int = -1
    backward: bool = False
    secondary: bool = False
    peer: int = -1
    in_gaps: bool = False

    @property
    def message_class(self) -> MessageClass | None:
        """The class of the message it sends or receives; None for an op that does not communicate."""
        spec = SPECS[self.op]
        return spec.message_backward or spec.message if self.backward else spec.message

    def later(self, micros: int) -> "Instruction":
        """The same instruction of a later micro-batch; itself where it names none."""
        op, block, micro, backward, secondary, peer, gaps = self
        if micro < 0 or not micros:
            return self
        return Instruction(op, block, micro + micros, backward, secondary, peer, gaps)

    def __str__(self) -> str:
        words = [self.op.value]
        # Words for people; the verifier's errors quote them.
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
        if self.in_gaps:
            words.append("in gaps")
        if self.peer >= 0:
            words.append(f"{SPECS[self.op].peer} stage {self.peer}")
        return " ".join(words)
