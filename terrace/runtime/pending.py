"""Communication in flight."""

from dataclasses import dataclass

from terrace.comm.lane import Ticket
from terrace.program.instruction import Instruction


@dataclass
class Pending:
    """Communication in flight, and the instruction that issued it."""

    ticket: Ticket
    counter: int  # its position in the program
    instruction: Instruction

    @property
    def doing(self) -> object:
        """What a watchdog reports for a rank that waits for it."""
        return self.instruction
