"""Timeline of a steady cycle of islands: its steps, its exchanges on their link, and waits for them.

The cycle is replayed with ranks that take notes. The clock of a rank stands still where messages share cores or a bus
(terrace.simulate.rank), and messages in flight go on in later steps, so noted times are converted to wall time by
interpolation between moments at which all clocks are known.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from terrace.plan.wire import MessageClass
from terrace.program.period import Turn
from terrace.simulate.carried import Times, play_runs
from terrace.simulate.cycle import Cycle
from terrace.simulate.noting import NotingRank

Stretch = tuple[float, float]  # start and end


class Crossing(NamedTuple):
    """An exchange on its link, in seconds of the cycle; one that ends beyond the cycle continues in the next.

    Steps count from 1: an exchange is sent at the end of `sent` and applied at the end of `applied`, of this cycle or
    the next.
    """

    fragment: int
    sent: int
    applied: int
    start_s: float
    end_s: float
    sent_bytes: Mapping[str, int]  # by a rank, by tier


@dataclass(frozen=True, kw_only=True)
class CycleTimeline:
    """A cycle over time. `ends_s` are the ends of its steps, `steps` their seconds by category."""

    stage: int
    ends_s: tuple[float, ...]
    steps: tuple[Times, ...]
    crossings: tuple[Crossing, ...]
    waits: tuple[Stretch, ...]

    @property
    def cycle_s(self) -> float:
        return self.ends_s[-1]


def cycle_timeline(cycle: Cycle, stage: int | None = None) -> CycleTimeline:
    """Timeline of a predicted cycle on `stage`, by default the stage that waits most."""
    stage = cycle.waiting_stage if stage is None else stage
    clock_s = link_s = wall_s = 0.0
    moments, ends_s, steps = [(0.0, 0.0, 0.0)], list[float](), list[Times]()
    crossings, waits = list[tuple[Turn, int, float, float]](), list[Stretch]()
    turns = play_runs(cycle.period, (), cycle.costs, cycle.unplayed, NotingRank)
    for turn, runs in zip(cycle.period.turns, turns, strict=True):
        for played, times in runs:
            notes, of_step = played.notes[stage], played.times[stage]
            for _ in range(times):
                steps.append(of_step)
                moments += [(clock_s + clock, link_s + link, wall_s + wall) for clock, link, wall in notes.moments]
                ends_s.append(moments[-1][-1])
                waits += [(clock_s + start, clock_s + end) for start, end in notes.waits]
                if notes.sent:
                    first, last = min(start for start, _ in notes.sent), max(end for _, end in notes.sent)
                    crossings.append((turn, len(steps), link_s + first, link_s + last))
                # The remaining micro-batches of a folded step run after its programs, overlapping their messages.
                clock_s, link_s = clock_s + played.clocks_s[stage], link_s + played.links_s[stage]
                wall_s += sum(of_step.values())
                moments.append((clock_s, link_s, wall_s))
    # Exchanges are at the ends of programs, so the timeline puts the ends of steps there.
    shift_s, (clocks, links, walls) = wall_s - ends_s[-1], zip(*moments, strict=True)
    wall, of_link = _Wall(clocks, walls, shift_s), _Wall(links, walls, shift_s)
    return CycleTimeline(
        stage=stage,
        ends_s=tuple(end_s + shift_s for end_s in ends_s),
        steps=tuple(steps),
        crossings=tuple(
            Crossing(
                fragment=fragment,
                sent=sent,
                applied=(sent + cycle.outer.delay - 1) % cycle.outer.every + 1,
                start_s=of_link.at(start),
                end_s=of_link.at(end),
                sent_bytes=_sent_bytes(turn, stage),
            )
            for turn, sent, start, end in crossings
            for fragment in turn.programs[0].exchange.starts
        ),
        waits=tuple((wall.at(start), wall.at(end)) for start, end in waits),
    )


def in_cycle(start_s: float, end_s: float, cycle_s: float) -> Iterator[Stretch]:
    """Split a stretch at the boundary of a repeating cycle."""
    first = start_s // cycle_s * cycle_s
    start_s, end_s = start_s - first, min(end_s - first, start_s - first + cycle_s)
    yield start_s, min(end_s, cycle_s)
    if end_s > cycle_s:
        yield 0.0, end_s - cycle_s


class _Wall:
    """Conversion of a clock to wall seconds, from moments of one cycle; the first and last are its ends."""

    def __init__(self, clocks: Sequence[float], walls: Sequence[float], shift_s: float) -> None:
        self.shift_s = shift_s
        self._clocks, self._walls = clocks, walls

    def at(self, clock_s: float) -> float:
        laps, rest_s = divmod(clock_s, self._clocks[-1])
        after = min(bisect_right(self._clocks, rest_s), len(self._clocks) - 1)
        begin, end = self._clocks[after - 1], self._clocks[after]
        share = (rest_s - begin) / (end - begin) if end > begin else 0.0
        wall_s = self._walls[after - 1] + share * (self._walls[after] - self._walls[after - 1])
        return laps * self._walls[-1] + wall_s + self.shift_s


def _sent_bytes(turn: Turn, stage: int) -> dict[str, int]:
    sent = turn.programs[stage].sent_bytes
    return {tier: size for (message, tier), size in sent.items() if message is MessageClass.OUTER and size}
