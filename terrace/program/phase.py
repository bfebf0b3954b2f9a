"""Phases: the purposes of programs. `SPECS` (terrace.program.instruction) says which ops each may use."""

from enum import StrEnum


class Phase(StrEnum):
    TRAIN = "train"  # a training step
    FORWARD = "forward"  # an evaluation, only forwards
    OUTER = "outer"  # a separate exchange after the last step, so that islands agree
    RESTORE = "restore"  # after loading a state: refresh the working copies from the masters
