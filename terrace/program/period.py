"""A period: the programs that a run repeats, in order, and how often each runs.

A training run is a period of one step. A run that evaluates every k-th step is one of k steps and an evaluation:

    Period((Turn(steps, times=k), Turn(forward_programs(steps))))

Bytes of a period are the sum over its runs, its memory is the peak over its programs: they share the slices of every
state and the message memory of every lane.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from terrace.plan.state_bytes import CATEGORIES
from terrace.plan.wire import MessageClass
from terrace.program.buffers import peak_bytes, state_buffers
from terrace.program.phase import Phase
from terrace.program.program import Program


@dataclass(frozen=True)
class Turn:
    """The programs of all stages, in order, that run together, `times` in a row."""

    programs: tuple[Program, ...]
    times: int = 1

    @property
    def phase(self) -> Phase:
        """The purpose of its programs."""
        return self.programs[0].phase

    @property
    def key(self) -> tuple[int, ...]:
        """Equal for turns that run the same program objects on all stages."""
        return tuple(map(id, self.programs))


@dataclass(frozen=True)
class Period:
    """Turns in the order in which they run; after the last the first runs again."""

    turns: tuple[Turn, ...]

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages, each with a program of its own."""
        return len(self.turns[0].programs)

    @property
    def num_steps(self) -> int:
        """Number of training steps."""
        return sum(turn.times for turn in self.turns if turn.phase is Phase.TRAIN)

    def runs(self, stage: int) -> Iterator[Program]:
        """The programs of one stage, run by run."""
        for turn in self.turns:
            for _ in range(turn.times):
                yield turn.programs[stage]

    def sent_bytes(self, stage: int = 0) -> dict[tuple[MessageClass, str], int]:
        """Bytes each rank of a stage sends, by message class and tier."""
        total = Counter[tuple[MessageClass, str]]()
        for turn in self.turns:
            total.update({key: turn.times * size for key, size in turn.programs[stage].sent_bytes.items()})
        return dict(total)

    def state_bytes(self, stage: int = 0) -> dict[str, int]:
        """Peak bytes of each category of model state on a rank of a stage."""
        return self._state_bytes[stage]

    @cached_property
    def _state_bytes(self) -> list[dict[str, int]]:
        found = []
        for stage in range(self.num_stages):
            programs = [turn.programs[stage].short for turn in self.turns]
            # A lane's memory grows to its largest message, whichever program sends it.
            messages = [message for program in programs for message in program.messages]
            peaks = [
                peak_bytes(state_buffers(each.plan, each.stage, each.blocks, each.flats, each.instructions, messages))
                for each in programs
            ]
            found.append({category: max(peak[category] for peak in peaks) for category in CATEGORIES})
        return found
