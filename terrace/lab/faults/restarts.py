"""A run without islands, whose ranks die, freeze or slow down: it ends, and is started again from its checkpoint."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path

from terrace.base.words import counted
from terrace.lab.faults.findings import trained_steps
from terrace.lab.faults.grammar import Fault
from terrace.lab.faults.islands import EVENTS, Process, Start, alive, end_all
from terrace.lab.faults.orders import Event, Lines, Orders, event_of

_TICK_S = 0.01
_GONE_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Life:
    """A run from a start to an end: the first step and how many steps it made again, its exit code, its last line.

    `ending_s` is the time from its last fault to its end; `num_left` are processes that outlived it.
    """

    first_step: int
    num_again: int
    code: int
    last_words: str
    ending_s: float
    num_left: int


class Restarts:
    """Rehearses `faults` on a run of `words` (of terrace), which is started again after each end that they cause."""

    def __init__(
        self, words: Sequence[str], faults: Sequence[Fault], folder: Path, start: Start, say: Callable[[str], None]
    ) -> None:
        self._words, self._faults, self._folder, self._start, self._say = words, faults, folder, start, say
        self._lines = Lines(folder / EVENTS)
        self.done: dict[int, float] = {}
        self._wakes: list[tuple[float, int]] = []
        self.lives: list[Life] = []

    @property
    def wrong(self) -> list[str]:
        """Lines on promises that were not kept."""
        found = [
            f"never carried out, since its place was not reached: {fault.text}"
            for number, fault in enumerate(self._faults)
            if number not in self.done
        ]
        num_left = sum(life.num_left for life in self.lives)
        if num_left:
            found.append(f"{counted(num_left, 'process')} outlived a run")
        if self.lives[-1].code:
            found.append(f"the run has not come to its end: {self.lives[-1].last_words}")
        return found

    def run(self) -> None:
        run_folder, again = self._folder / "run", list[str]()
        while True:
            before = max(trained_steps(run_folder), default=0)
            num_done = len(self.done)
            self.lives.append(self._live([*self._words, "--folder", str(run_folder), *again], before))
            life = self.lives[-1]
            if not life.code or len(self.done) == num_done:
                return
            self._say(f"the run has ended with exit code {life.code}, and is started again: {life.last_words}")
            again = ["--resume", "auto"]

    def _live(self, words: Sequence[str], before: int) -> Life:
        number = len(self.lives) + 1
        output = self._folder / f"run-{number}.txt"
        output.touch()
        open_ = {str(n): each.text for n, each in enumerate(self._faults) if n not in self.done}
        orders = Orders(events=str(self._folder / EVENTS), faults=open_, reported={})
        process = self._start(words, output, orders.text)
        first_step, last_s = 0, time.monotonic()
        try:
            while (code := process.poll()) is None:
                time.sleep(_TICK_S)
                for event in map(event_of, self._lines.new()):
                    if event.what == "trains":
                        first_step = first_step or event.number
                    last_s = self._heard(event, last_s)
                self._wake()
            ended_s = time.monotonic()
            return Life(
                first_step=first_step,
                num_again=max(0, before - first_step + 1) if first_step and before else 0,
                code=code,
                last_words=_last_line(output),
                ending_s=ended_s - last_s,
                num_left=_num_left(process),
            )
        finally:
            end_all([process.pid])

    def _heard(self, event: Event, last_s: float) -> float:
        if event.what != "fault":
            return last_s
        fault = self._faults[event.number]
        self.done[event.number] = event.at_s
        self._say(fault.text)
        if fault.what == "freeze" and fault.seconds < inf:
            self._wakes.append((event.at_s + fault.seconds, event.pid))
        return event.at_s

    def _wake(self) -> None:
        due = [each for each in self._wakes if each[0] <= time.monotonic()]
        self._wakes = [each for each in self._wakes if each not in due]
        for _, pid in due:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _num_left(process: Process) -> int:
    until_s = time.monotonic() + _GONE_S
    while (num := len(alive({process.pid}))) and time.monotonic() < until_s:
        time.sleep(_TICK_S)
    return num


def _last_line(output: Path) -> str:
    lines = [line for line in output.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it has said nothing"
