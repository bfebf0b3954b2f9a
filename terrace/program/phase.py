"""Phases: the purposes of programs, and the ops that each may use."""

from enum import StrEnum

from terrace.program.instruction import Op


class Phase(StrEnum):
    """The purpose of a program."""

    TRAIN = "train"  # a training step
    FORWARD = "forward"  # an evaluation, only forwards
    OUTER = "outer"  # a separate exchange after the last step, so that islands agree
    RESTORE = "restore"  # after loading a state: refresh the working copies from the masters


PHASE_OPS = {
    Phase.TRAIN: frozenset(Op),
    Phase.FORWARD: frozenset((Op.GATHER, Op.FREE, Op.FORWARD, Op.SEND, Op.RECV, Op.CLIP)),
    Phase.OUTER: frozenset((Op.OUTER_COUNT, Op.OUTER_START, Op.OUTER_APPLY, Op.REFRESH)),
    Phase.RESTORE: frozenset((Op.REFRESH,)),
}
FOR_EACH_BLOCK = {  # ops that run once for each trainable block, in this order
    Phase.TRAIN: (Op.SYNC, Op.UPDATE, Op.REFRESH),
    Phase.FORWARD: (),
    Phase.OUTER: (),  # the exchange determines the blocks
    Phase.RESTORE: (Op.REFRESH,),
}
