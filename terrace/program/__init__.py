"""The program: what each rank does in one step, in order."""

from terrace.program.data_parallel import build
from terrace.program.instruction import COLLECTIVES, Instruction, Op
from terrace.program.program import Program
from terrace.program.report import StepReport
from terrace.program.text import program_text
from terrace.program.verify import verify
from terrace.program.verify_ranks import verify_ranks

__all__ = [
    "COLLECTIVES",
    "Instruction",
    "Op",
    "Program",
    "StepReport",
    "build",
    "program_text",
    "verify",
    "verify_ranks",
]
