"""Islands as the processes that they are, with faults: started, watched, and all ended.

One loop reads what ranks have written (terrace.lab.faults.orders), does what only another process can do (start, go on,
hold back reports, end the meeting place), and waits for processes. Nothing that it started is left when it returns.
"""

import os
import re
import signal
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Protocol

from terrace.base.errors import TerraceError, TrainingError
from terrace.lab.faults.grammar import Fault
from terrace.lab.faults.orders import Event, Lines, Orders, event_of
from terrace.lab.faults.relay import Relay
from terrace.roster.entries import Entry, Finished, entry_of

_TICK_S = 0.01
_BEGIN_S = 120.0  # for the meeting place to import torch and listen
_AWAY_S = 2.0  # how long a meeting place is away unless the fault says so
_ENDING_S = 180.0  # for islands to end after the roster: they save, compare and print
_GONE_S = 5.0  # for the other processes of an island to end after it
LOG, EVENTS = "roster.jsonl", "happened.jsonl"


class Process(Protocol):
    """A process that leads a session of its own."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """Its exit code, below 0 for a signal; None while it runs."""


Start = Callable[[Sequence[str], Path, str], Process]  # of words of terrace, a file for their output, and orders


@dataclass
class Ran:
    """A process of an island, from its start to its end. `code` is that of its end, None until then."""

    island: int
    folder: Path
    output: Path
    process: Process
    begin_s: float
    end_s: float = inf
    code: int | None = None


@dataclass
class Seen:
    """All that a rehearsal has seen. `done` is when faults were carried out, by their number."""

    begin_s: float
    num_islands: int  # at the start
    faults: Sequence[Fault]
    entries: list[tuple[float, Entry]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    ran: list[Ran] = field(default_factory=list)
    done: dict[int, float] = field(default_factory=dict)
    end_s: float = inf
    num_left: int = 0  # processes that outlived their island
    is_finished: bool = False  # the run has come to its last step

    @property
    def first_s(self) -> float:
        """When the first island had begun, from which all times are shown."""
        return min((each.at_s for each in self.events), default=self.begin_s)


class Rehearsal:
    """Rehearses `faults` on islands that run `words` (of terrace). `folder` gets all files; `say` gets lines."""

    def __init__(
        self,
        words: Sequence[str],
        num_islands: int,
        faults: Sequence[Fault],
        folder: Path,
        start: Start,
        say: Callable[[str], None],
    ) -> None:
        self._words, self._folder, self._start, self._say = words, folder, start, say
        self.seen = Seen(time.monotonic(), num_islands, faults)
        self._entries, self._events = Lines(folder / LOG), Lines(folder / EVENTS)
        self._place_said = Lines(folder / "meet.txt")
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._held = set[int]()  # islands that are frozen or cut off for good
        self._relays: dict[int, Relay] = {}
        self._groups: list[int] = []
        self._place: Process | None = None
        self._is_away = False  # the meeting place was killed, and comes back
        self._has_ended = False
        self._port = 0

    def run(self) -> Seen:
        """Run until the roster and its islands have ended. Raises `TrainingError` if the meeting place fails."""
        try:
            self._begin_place()
            for island in range(self.seen.num_islands):
                self._begin(island)
            for island in sorted({each.island for each in self.seen.faults if each.what == "join"}):
                if island >= self.seen.num_islands:
                    self._begin(island)
            while not self._is_over():
                time.sleep(_TICK_S)
                self._read_new()
                self._act()
                self._reap()
            self._read_new()
            self.seen.num_left = self._left()
            return self.seen
        finally:
            self.seen.end_s = time.monotonic()
            self._end()

    def _begin_place(self) -> None:
        words = ["meet", f"127.0.0.1:{self._port}", "--islands", str(self.seen.num_islands)]
        self._place = self._started([*words, "--log", str(self._folder / LOG)], self._folder / "meet.txt", "")
        self._is_away, until_s = False, time.monotonic() + _BEGIN_S
        while not self._port:
            for line in self._said():
                if found := re.search(r"meeting at port (\d+)", line):
                    self._port = int(found[1])
            if self._place.poll() is not None or time.monotonic() > until_s:
                raise TrainingError(f"the meeting place did not begin: see {self._place_said.path}")
            time.sleep(_TICK_S)

    def _started(self, words: Sequence[str], output: Path, orders: str) -> Process:
        output.touch()
        process = self._start(words, output, orders)
        self._groups.append(process.pid)
        return process

    def _begin(self, island: int) -> None:
        earlier = [each for each in self.seen.ran if each.island == island]
        name = f"island-{island}" + f"-{len(earlier) + 1}" * bool(earlier)
        output = self._folder / f"{name}.txt"
        orders = self._orders(island)
        port = self._port
        if any(fault.what == "cut" and fault.island == island and fault.rank < 0 for fault in self.seen.faults):
            self._relays.setdefault(island, Relay(self._port))
            port = self._relays[island].port
        more = ["--meet", f"127.0.0.1:{port}", "--island", str(island), "--folder", str(self._folder / name)]
        process = self._started([*self._words, *more], output, orders.text)
        self.seen.ran.append(Ran(island, self._folder / name, output, process, time.monotonic()))

    def _orders(self, island: int) -> Orders:
        open_ = {number: each for number, each in enumerate(self.seen.faults) if number not in self.seen.done}
        return Orders(
            events=str(self._folder / EVENTS),
            island=island,
            faults={str(n): each.text for n, each in open_.items() if not each.by_rehearsal and each.island == island},
            reported={str(n): each.text for n, each in open_.items() if each.by_rehearsal},
            joins=self._join_of(island),
        )

    def _join_of(self, island: int) -> int:
        """The number of the next fault by which an island joins; -1 if it is there from the start or joins no more."""
        if island < self.seen.num_islands and not any(each.island == island for each in self.seen.ran):
            return -1
        joins = (n for n, each in enumerate(self.seen.faults) if each.what == "join" and each.island == island)
        return next((n for n in joins if n not in self.seen.done), -1)

    def _said(self) -> list[str]:
        lines = self._place_said.new()
        for line in lines:
            self._say(line)
        return lines

    def _read_new(self) -> None:
        now_s = time.monotonic()
        for line in self._entries.new():
            entry = entry_of(line, LOG)
            self.seen.entries.append((now_s, entry))
            if isinstance(entry, Finished):
                self.seen.is_finished, self.seen.end_s = True, now_s
        for line in self._events.new():
            event = event_of(line)
            self.seen.events.append(event)
            if event.what == "fault" and event.number not in self.seen.done:
                self.seen.done[event.number] = event.at_s
                fault = self.seen.faults[event.number]
                self._say(f"         {fault.text}")
                self._carry_out(event, fault)
        self._said()

    def _carry_out(self, event: Event, fault: Fault) -> None:
        until_s = event.at_s + (_AWAY_S if fault.is_of_place and fault.seconds == inf else fault.seconds)
        if fault.is_of_place:
            self._stop_place(fault, until_s)
        elif fault.what == "freeze":
            group, pid = event.group, event.pid
            wake = (lambda: _signal_group(group)) if fault.rank < 0 else (lambda: os.kill(pid, signal.SIGCONT))
            self._for_a_while(fault, until_s, wake)
        elif fault.what == "cut" and fault.rank < 0:
            self._relays[fault.island].cut(until_s - time.monotonic())
            self._for_a_while(fault, until_s, lambda: None)
        if fault.by_rehearsal:
            orders = self._orders(fault.island)
            orders.answer(event.number).touch()

    def _for_a_while(self, fault: Fault, until_s: float, end: Callable[[], None]) -> None:
        if until_s == inf:
            self._held.add(fault.island)
        else:
            self._due.append((until_s, end))

    def _stop_place(self, fault: Fault, until_s: float) -> None:
        assert self._place is not None
        place = self._place
        if fault.what == "kill":
            self._is_away = True
            os.kill(place.pid, signal.SIGKILL)
            while place.poll() is None:  # its port and its log are free only then
                time.sleep(_TICK_S)
            self._due.append((until_s, self._begin_place))
        else:
            os.kill(place.pid, signal.SIGSTOP)
            self._due.append((until_s, lambda: os.kill(place.pid, signal.SIGCONT)))

    def _act(self) -> None:
        now_s = time.monotonic()
        due = [each for each in self._due if each[0] <= now_s]
        self._due = [each for each in self._due if each[0] > now_s]
        for _, act in due:
            with suppress(ProcessLookupError):
                act()

    def _reap(self) -> None:
        for each in list(self.seen.ran):
            if each.code is None and (code := each.process.poll()) is not None:
                each.code, each.end_s = code, time.monotonic()
                if self._join_of(each.island) >= 0 and not self.seen.is_finished:
                    self._begin(each.island)
        assert self._place is not None
        if not self._is_away and (code := self._place.poll()) is not None:
            if code:
                raise TrainingError(f"the meeting place has failed with exit code {code}: see {self._place_said.path}")
            self._has_ended = True

    def _is_over(self) -> bool:
        if self.seen.is_finished and time.monotonic() > self.seen.end_s + _ENDING_S:
            return True
        if any(each.code is None and not self._is_held(each) for each in self.seen.ran):
            return False
        # All that can move has ended: what is due may bring one back.
        return self._has_ended if self.seen.is_finished else not self._due

    def _is_held(self, ran: Ran) -> bool:
        """Whether a process stands still for good, or will not join any more: this loop ends it."""
        return ran.island in self._held or (self.seen.is_finished and self._join_of(ran.island) >= 0)

    def _left(self) -> int:
        """Processes of islands that have ended, after they had time to end as well."""
        ended = {each.process.pid for each in self.seen.ran if each.code is not None}
        until_s = time.monotonic() + _GONE_S
        while (num := len(alive(ended))) and time.monotonic() < until_s:
            time.sleep(_TICK_S)
        return num

    def _end(self) -> None:
        for relay in self._relays.values():
            relay.close()
        end_all(self._groups)
        self._reap_rest()

    def _reap_rest(self) -> None:
        for each in self.seen.ran:
            if each.code is None:
                each.end_s = self.seen.end_s
                each.process.poll()


def _signal_group(group: int) -> None:
    os.killpg(group, signal.SIGCONT)


def end_all(groups: Sequence[int]) -> None:
    """End process groups, stopped ones too. Raises `TerraceError` for a process that stays."""
    for group in groups:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    until_s = time.monotonic() + _GONE_S
    while (still := alive(groups)) and time.monotonic() < until_s:
        time.sleep(_TICK_S)
    if still:
        raise TerraceError(f"processes {', '.join(map(str, still))} of the rehearsal cannot be ended: end them by hand")


_GROUP_FIELD = 2  # of /proc/PID/stat after the name: state, parent, group


def alive(groups: Collection[int]) -> list[int]:
    """Processes of these groups; a zombie is none."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, *rest = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            if state != "Z" and int(rest[_GROUP_FIELD - 1]) in groups:
                found.append(int(path.parent.name))
    return found
