"""The program: the instructions of each rank for one step, in order."""

from terrace.program.instruction import COLLECTIVES, PASSES, Instruction, Op
from terrace.program.lowering import build, build_stages, forward_programs
from terrace.program.program import Program
from terrace.program.report import StepReport
from terrace.program.text import program_text
from terrace.program.verify import verify
from terrace.program.verify_ranks import verify_ranks, verify_stages

__all__ = [
    "COLLECTIVES",
    "PASSES",
    "Instruction",
    "Op",
    "Program",
    "StepReport",
    "build",
    "build_stages",
    "forward_programs",
    "program_text",
    "verify",
    "verify_ranks",
    "verify_stages",
]
