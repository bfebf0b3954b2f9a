"""The verifier's rules for REFRESH and exchanges between islands, as listed in terrace.program.verify."""

from terrace.program.exchange import exchanged
from terrace.program.instruction import Instruction, Op
from terrace.program.phase import Phase
from terrace.program.walk import Walk


class ExchangeWalk(Walk):
    """A walk that knows the exchange at the end of its program."""

    def _refresh(self, now: Instruction) -> None:
        self._once()
        self._holds()
        self._trains()
        if self.program.trains:
            self._after(Op.UPDATE, now.block)
        if Op.OUTER_APPLY in self.exchanged_in(now.block):
            self._after(Op.OUTER_APPLY, now.block)
        elif self.program.phase is Phase.OUTER:
            self._fail("nothing has changed the block")

    def _outer_count(self, now: Instruction) -> None:
        self._once()
        exchange = self.program.exchange
        if not exchange.starts:
            self._fail("no exchange starts here")
            return
        arrives = exchanged(self.program, exchange.arrives)
        for block in exchanged(self.program, exchange.starts):
            if self.program.trains:
                self._after(Op.UPDATE, block)
            if block in arrives:
                self._after(Op.OUTER_APPLY, block)

    def _outer_start(self, now: Instruction) -> None:
        self._once()
        self._holds()
        self._trains()
        if Op.OUTER_START not in self.exchanged_in(now.block):
            self._fail("it is not the turn of its fragment")
        if Instruction(Op.OUTER_COUNT) not in self.done:
            self._fail("it needs `OUTER_COUNT` before it: weights go by the tokens of all islands")

    def _outer_apply(self, now: Instruction) -> None:
        self._once()
        self._holds()
        self._trains()
        if Op.OUTER_APPLY not in self.exchanged_in(now.block):
            self._fail("no exchange of its fragment is over")
        if self.program.trains:
            self._after(Op.UPDATE, now.block)
        if now.block not in exchanged(self.program, self.program.exchange.arrives):
            self._after(Op.OUTER_START, now.block)

    def exchanged_in(self, block: int) -> tuple[Op, ...]:
        """Ops that the exchange at the end of the program needs on a block."""
        program, found = self.program, self.program.exchange
        start = (Op.OUTER_START,) if block in exchanged(program, found.starts) else ()
        apply = (Op.OUTER_APPLY, Op.REFRESH) if block in exchanged(program, found.applies) else ()
        return (*start, *apply)
