"""The instruction set.

| op              | meaning                                                                           |
|-----------------|-----------------------------------------------------------------------------------|
| GATHER          | gather the full parameters of a block, from its primary or secondary copy         |
| FREE            | free these parameters                                                             |
| FORWARD         | run a block on a micro-batch; keep its input, and its graph unless recomputed     |
| BACKWARD        | run the backward of a block on a micro-batch, recomputing its graph if need be    |
| BACKWARD_INPUT  | its first half: the gradient of the input, which the block before waits for       |
| BACKWARD_WEIGHT | its second half, any time later: the gradients of linear layers' weights          |
| EVICT           | write a block's input below the device after its forward, and free its memory     |
| FETCH           | read it back ahead of its backward                                                |
| REDUCE          | reduce the block's gradient so far, up to `micro`, into the grads tier's shard    |
| TIE             | add another stage's gradient shard of the same block, once a step                 |
| SYNC            | reduce the accumulated gradient over tiers outside the grads tier, once a step    |
| COUNT           | sum the router choices of the stage over its ranks, once a step                   |
| CLIP            | reduce gradient norm, loss and token count in one message, for one scale          |
| AGREE           | sum a block's squared gradient norm, and tokens, for an update before CLIP        |
| ORTHOGONALISE   | Muon: gather the whole momentum of a layer's matrices from the optimizer tier     |
| UPDATE          | run the optimizer on the shard of the optimizer tier                              |
| REFRESH         | round the master parameters into the working copy, back on the params tier        |
| OUTER_COUNT     | exchange tokens, losses, norms of changes and parameter digests between islands   |
| OUTER_START     | start averaging the change of a block's parameters over islands                   |
| OUTER_APPLY     | take an outer step with that mean                                                 |
| SEND / RECV     | pipeline point to point: a block's output onward, the gradient of its input back  |

Communication is asynchronous; an instruction waits only for its operands. `SPECS` declares the fields, the message
class and the phases of every op, for the verifier, the printer, the simulator and the executor; its rules are in
terrace.program.verify.
"""

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from terrace.plan.wire import BETWEEN_STAGES, MessageClass


class Phase(StrEnum):
    TRAIN = "train"  # a training step
    FORWARD = "forward"  # an evaluation, only forwards
    OUTER = "outer"  # a separate exchange after the last step, so that islands agree
    RESTORE = "restore"  # after loading a state: refresh the working copies from the masters


class Op(StrEnum):
    GATHER = "GATHER"
    FREE = "FREE"
    FORWARD = "FORWARD"
    BACKWARD = "BACKWARD"
    BACKWARD_INPUT = "BACKWARD_INPUT"
    BACKWARD_WEIGHT = "BACKWARD_WEIGHT"
    EVICT = "EVICT"
    FETCH = "FETCH"
    REDUCE = "REDUCE"
    TIE = "TIE"
    SYNC = "SYNC"
    COUNT = "COUNT"
    CLIP = "CLIP"
    AGREE = "AGREE"
    ORTHOGONALISE = "ORTHOGONALISE"
    UPDATE = "UPDATE"
    REFRESH = "REFRESH"
    OUTER_COUNT = "OUTER_COUNT"
    OUTER_START = "OUTER_START"
    OUTER_APPLY = "OUTER_APPLY"
    SEND = "SEND"
    RECV = "RECV"

    __hash__ = str.__hash__  # fast: instructions are looked up by the thousand


@dataclass(frozen=True)
class OpSpec:
    """Declaration of an op: the `fields` that its instructions set, their message class, and the phases that use it.

    `message_backward` is the class if `backward` is set and the class differs. `peer` is the word printed before the
    other stage of a point-to-point op. In the phases `of_each_block` it runs once on each trainable block.
    """

    fields: Collection[str] = ("block",)
    message: MessageClass | None = None
    message_backward: MessageClass | None = None
    is_pass: bool = False
    peer: str = ""
    phases: Collection[Phase] = (Phase.TRAIN,)
    of_each_block: Collection[Phase] = ()


_PASS = OpSpec(("block", "micro"), is_pass=True)
_POINT_TO_POINT = ("block", "micro", "backward", "peer")
_EVALUATED = (Phase.TRAIN, Phase.FORWARD)
_EXCHANGED = (Phase.TRAIN, Phase.OUTER)

SPECS: dict[Op, OpSpec] = {
    Op.GATHER: OpSpec(
        ("block", "backward", "secondary"), MessageClass.GATHER, MessageClass.GATHER_BACKWARD, phases=_EVALUATED
    ),
    Op.FREE: OpSpec(phases=_EVALUATED),
    Op.FORWARD: OpSpec(("block", "micro"), is_pass=True, phases=_EVALUATED),
    Op.BACKWARD: _PASS,
    Op.BACKWARD_INPUT: _PASS,
    Op.BACKWARD_WEIGHT: _PASS,
    Op.EVICT: OpSpec(("block", "micro")),
    Op.FETCH: OpSpec(("block", "micro")),
    Op.REDUCE: OpSpec(("block", "micro", "in_gaps"), MessageClass.REDUCE),
    Op.TIE: OpSpec(("block", "peer"), MessageClass.TIE, peer="with"),
    Op.SYNC: OpSpec(("block", "in_gaps"), MessageClass.SYNC, of_each_block=(Phase.TRAIN,)),
    Op.COUNT: OpSpec((), MessageClass.COUNTS),
    Op.CLIP: OpSpec((), MessageClass.CONTROL, phases=_EVALUATED),
    Op.AGREE: OpSpec(message=MessageClass.CONTROL),
    Op.ORTHOGONALISE: OpSpec(message=MessageClass.ORTHOGONALISE),
    Op.UPDATE: OpSpec(of_each_block=(Phase.TRAIN,)),
    Op.REFRESH: OpSpec(
        message=MessageClass.REFRESH,
        phases=(Phase.TRAIN, Phase.OUTER, Phase.RESTORE),
        of_each_block=(Phase.TRAIN, Phase.RESTORE),
    ),
    Op.OUTER_COUNT: OpSpec((), MessageClass.OUTER, phases=_EXCHANGED),
    Op.OUTER_START: OpSpec(message=MessageClass.OUTER, phases=_EXCHANGED),
    Op.OUTER_APPLY: OpSpec(phases=_EXCHANGED),
    Op.SEND: OpSpec(_POINT_TO_POINT, *BETWEEN_STAGES, peer="to", phases=_EVALUATED),
    Op.RECV: OpSpec(_POINT_TO_POINT, *BETWEEN_STAGES, peer="from", phases=_EVALUATED),
}
HALVES = (Op.BACKWARD, Op.BACKWARD_INPUT)  # passes that read the input of a block
PASSES = frozenset(op for op, spec in SPECS.items() if spec.is_pass)
COLLECTIVES = frozenset(op for op, spec in SPECS.items() if spec.message is not None and not spec.peer)


class Instruction(NamedTuple):
    """One instruction; fields that an op does not use keep their default.

    `micro` is the micro-batch. `backward` marks a GATHER for a backward, or a SEND or RECV of a gradient. `secondary`:
    a GATHER reads the secondary copy. `peer` is the other stage of a SEND, RECV or TIE; the rank there has the same
    position on every other axis. The `block` of a RECV is the one that the sender ran. A REDUCE or SYNC `in_gaps` is
    sent in parts (terrace.program.gaps).
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
        """Class of the message that it sends or receives; None if it does not communicate."""
        spec = SPECS[self.op]
        return spec.message_backward or spec.message if self.backward else spec.message

    def later(self, micros: int) -> "Instruction":
        """The instruction with `micro` increased by `micros`; itself if it has no micro-batch."""
        op, block, micro, backward, secondary, peer, gaps = self
        if micro < 0 or not micros:
            return self
        return Instruction(op, block, micro + micros, backward, secondary, peer, gaps)

    def __str__(self) -> str:
        words = [self.op.value]
        # Readable text, which the verifier's errors quote.
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
