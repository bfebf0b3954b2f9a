"""A rank's account of bytes: those that its programs declare, those that it has sent, and the share of training steps.

Evaluations, restores and the last exchanges of islands do not count as training steps. Neither do steps that were given
up, whose bytes no program declares.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from terrace.base.errors import ProgramError
from terrace.comm.ledger import Ledger
from terrace.plan.wire import MessageClass
from terrace.program.program import Program

Key = tuple[MessageClass, str]  # message class and tier


class Declares(Protocol):
    """Declares bytes that the plan alone does not give."""

    @property
    def declared(self) -> Mapping[Key, int]: ...


class ByteAccount:
    """The account of one rank that runs `program`. `executed` are the bytes declared by all programs that have run.

    `by_batch` have counted bytes that depend on the micro-batches: axes, and rows below the device.
    `num_steps` counts training steps that were not given up.
    """

    def __init__(self, program: Program, ledger: Ledger, executed: Counter[Key], by_batch: Sequence[Declares]) -> None:
        self._program, self._ledger, self._executed, self._by_batch = program, ledger, executed, by_batch
        self.num_steps = 0
        self._cycles = (0, Counter[Key]())  # of whole cycles of islands: steps, their bytes
        self._given_up, self._outside = Counter[Key](), Counter[Key]()

    def stepped(self) -> None:
        self.num_steps += 1
        every = self._program.plan.outer.every
        if every > 1 and self.num_steps % every == 0:
            self._cycles = self.num_steps, self._of_steps()

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Context in which the bytes of programs count as none of a training step."""
        before = self.declared()
        yield
        self._outside.update(self.declared() - before)

    def leave_out(self, sent_bytes: Mapping[Key, int]) -> None:
        """Count declared bytes as none of a training step."""
        self._outside.update(sent_bytes)

    def give_up(self) -> None:
        """Count the bytes of a step that was given up after CLIP. Nothing may be in flight."""
        sent = Counter(self._ledger.total())
        sent.subtract(self.declared())
        self._given_up.update(sent)
        self._outside.update(sent)

    def declared(self) -> Counter[Key]:
        """Bytes that the programs executed so far declare, and what no program can: plain values after packed
        messages that did not fit, and steps that were given up.
        """
        # Zero of each key of the program if its first step was given up.
        expected = {**dict.fromkeys(self._program.sent_bytes, 0), **self._executed}
        for each in self._by_batch:
            expected = {**each.declared, **expected}
        return Counter(expected) + Counter(self._ledger.again()) + self._given_up

    def check(self, rank: int) -> None:
        """Raise `ProgramError` if the bytes sent differ from those declared. Nothing may be in flight."""
        measured, expected = self._ledger.total(), self.declared()
        for key in sorted(measured.keys() | expected.keys()):
            sent, declared = measured.get(key, 0), expected.get(key, 0)
            if sent != declared:
                message, tier = key
                raise ProgramError(
                    f"rank {rank} sent {sent} bytes of {message} on tier {tier!r} in {self.num_steps} steps, "
                    f"but the programs declare {declared}"
                )

    @property
    def of_steps(self) -> Counter[Key]:
        """Bytes that training steps have sent so far, by message class and tier."""
        sent = Counter(self._ledger.total())
        sent.subtract(self._outside)
        return sent

    def of_a_step(self) -> dict[Key, int]:
        """Mean bytes of a training step: over whole cycles of islands once there is one, else over all steps so far."""
        steps, behind = self._cycles
        rest = self._of_steps() - behind if steps else Counter[Key]()
        steps = steps or max(1, self.num_steps)
        return {
            key: round((size - self._outside[key] - rest[key]) / steps) for key, size in self._ledger.total().items()
        }

    def _of_steps(self) -> Counter[Key]:
        # Declared bytes, since some may still be in flight.
        return self.declared() - self._outside
