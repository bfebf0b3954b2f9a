"""Phases: the kinds of programs over one instruction set, each with the ops that it may have."""

from enum import StrEnum

from terrace.program.instruction import Op


class Phase(StrEnum):
    """The purpose of a program."""

    TRAIN = "train"  # a training step
    FORWARD = "forward"  # forwards alone: an evaluation
    OUTER = "outer"  # after the last step of islands: they agree again
    RESTORE = "restore"  # after a state was loaded: the working copies from the master parameters


PHASE_OPS = {
    Phase.TRAIN: frozenset(Op),
    Phase.FORWARD: frozenset((Op.GATHER, Op.FREE, Op.FORWARD, Op.SEND, Op.RECV, Op.CLIP)),
    Phase.OUTER: frozenset((Op.OUTER_COUNT, Op.OUTER_START, Op.OUTER_APPLY, Op.REFRESH)),
    Phase.RESTORE: frozenset((Op.REFRESH,)),
}
FOR_EACH_BLOCK = {  # what happens once to each block with trainable parameters, in this order
    Phase.TRAIN: (Op.SYNC, Op.UPDATE, Op.REFRESH),
    Phase.FORWARD: (),
    Phase.OUTER: (),  # its exchange says of which blocks
    Phase.RESTORE: (Op.REFRESH,),
}
