"""A period: the programs that a run repeats, in order, and how often each runs.

A training run has a period of one step. If it evaluates every k steps, its period is k steps and an evaluation:

    Period((Turn(steps, times=k), Turn(forward_programs(steps))))

A period's bytes are the sum over its runs; its memory is the peak over its programs, which share state slices and the
message memory of every lane.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from terrace.plan.state_bytes import CATEGORIES
from terrace.plan.wire import MessageClass
from terrace.program.buffers import peak_bytes, state_buffers
from terrace.program.instruction import Phase
from terrace.program.program import Program


@dataclass(frozen=True)
class Turn:
    """The programs of all stages, in stage order, which run together `times` in a row."""

    programs: tuple[Program, ...]
    times: int = 1

    @property
    def phase(self) -> Phase:
        return self.programs[0].phase

    @property
    def key(self) -> tuple[int, ...]:
        """Key that is equal for turns with the same program objects."""
        return tuple(map(id, self.programs))


@dataclass(frozen=True)
class Period:
    """Turns in execution order; after the last, the first runs again."""

    turns: tuple[Turn, ...]

    @property
    def num_stages(self) -> int:
        return len(self.turns[0].programs)

    @property
    def num_steps(self) -> int:
        return sum(turn.times for turn in self.turns if turn.phase is Phase.TRAIN)

    def runs(self, stage: int) -> Iterator[Program]:
        for turn in self.turns:
            for _ in range(turn.times):
                yield turn.programs[stage]

    def sent_bytes(self, stage: int = 0) -> dict[tuple[MessageClass, str], int]:
        total = Counter[tuple[MessageClass, str]]()
        for turn in self.turns:
            total.update({key: turn.times * size for key, size in turn.programs[stage].sent_bytes.items()})
        return dict(total)

    def state_bytes(self, stage: int = 0) -> dict[str, int]:
        return self._state_bytes[stage]

    @cached_property
    def _state_bytes(self) -> list[dict[str, int]]:
        found = []
        for stage in range(self.num_stages):
            programs = [turn.programs[stage].short for turn in self.turns]
            # A lane's memory grows to its largest message, whichever program sends it.
            messages = [message for program in programs for message in program.messages]
            peaks = [
                peak_bytes(state_buffers(each.model, each.stage, each.instructions, messages)) for each in programs
            ]
            found.append({category: max(peak[category] for peak in peaks) for category in CATEGORIES})
        return found
