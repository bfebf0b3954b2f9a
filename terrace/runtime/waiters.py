"""Who takes part in a message: named when a rank waits, so that the watchdog knows for whom."""

from terrace.plan import Layout
from terrace.program import Instruction, Program


class Waiters:
    """The ranks that take part in a message, computed when somebody waits for it."""

    def __init__(self, program: Program, rank: int) -> None:
        self._program = program
        self._rank = rank
        self._known: dict[tuple[Layout, tuple[int, ...]], tuple[int, ...]] = {}

    def __call__(self, instruction: Instruction) -> tuple[int, ...]:
        if instruction.peer >= 0:
            return tuple(sorted((self._rank, self._program.peer(self._rank, instruction))))
        among, tiers = self._program.among(instruction), self._program.crossed(instruction)
        if (among, tiers) not in self._known:
            ranks = [self._rank]
            for tier in tiers:
                ranks = [peer for rank in ranks for peer in among.peers(rank, tier)]
            self._known[among, tiers] = tuple(sorted(ranks))
        return self._known[among, tiers]
