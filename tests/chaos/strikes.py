"""Strikes of the campaign: which process gets which signal, and at which instant of a run."""

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.support.tiny_runs import descendants, is_alive, rank_pids

# Of a run; of a run at the pace of its cluster; and of an export of a whole run.
PHASES = ("starting", "tokenising", "calibrating", "computing", "saving", "ending", "rehearsing", "exporting")
_COLD_S = 12.0  # about as long as torchrun takes to start, and then its ranks to measure
_PAUSE_S, _PATIENCE_S = 0.002, 120.0
# victim -> signals; `stall` is SIGSTOP with SIGCONT after a part of the watchdog's limit.
_SIGNALS = {
    "worker": ("SIGKILL", "SIGKILL", "SIGSTOP", "stall", "SIGTERM", "SIGINT"),
    "launcher": ("SIGKILL", "SIGTERM", "SIGINT", "stall"),
    "all": ("SIGKILL", "SIGTERM", "SIGINT"),
    "fork server": ("SIGKILL",),
}
_VICTIMS = ("worker",) * 5 + ("launcher",) * 3 + ("all", "fork server")


@dataclass(frozen=True)
class Strike:
    """A signal; `where` in [0, 1) is its instant within the phase, `rank` that of a struck worker."""

    phase: str
    victim: str
    signal: str
    rank: int
    where: float
    restarts: int | None = None  # of a run under torchrun; None: of one that `terrace` starts

    def __str__(self) -> str:
        who = f"rank {self.rank}" if self.victim == "worker" else self.victim
        under = "" if self.restarts is None else f" under torchrun, which starts its ranks {1 + self.restarts} times"
        return f"{self.signal} to {who} while {self.phase} ({self.where:.3f}){under}"


def drawn(generator: random.Random, num_ranks: int) -> Strike:
    """A strike at a random instant of a random phase; the data are tokenised before there are ranks."""
    phase = generator.choice((*PHASES, *PHASES[:6]))
    victim = "launcher" if phase in ("starting", "tokenising", "exporting") else generator.choice(_VICTIMS)
    return Strike(
        phase=phase,
        victim=victim,
        signal=generator.choice(_SIGNALS[victim]),
        rank=generator.randrange(num_ranks),
        where=generator.random(),
    )


@dataclass(frozen=True)
class Clock:
    """Seconds that the phases of an undisturbed run took, for instants within them."""

    starting: float
    calibrating: float
    step: float
    ending: float
    exporting: float


@dataclass(frozen=True)
class Struck:
    """Processes that got the signal, the pid of the struck rank if it was one, and when (monotonic)."""

    pids: tuple[int, ...]
    at_s: float


class Markers:
    """What a running `terrace train` in `folder` has come to, seen from outside."""

    def __init__(self, folder: Path, launcher: int, num_ranks: int, num_steps: int) -> None:
        self._folder, self._launcher, self._num_ranks, self._num_steps = folder, launcher, num_ranks, num_steps
        self._run, self._saves = folder / "run", folder / "run" / "checkpoints"
        # Events of earlier starts are not this one's.
        self._num_events = len(self._events())

    def num_lines(self) -> int:
        """Steps in the metrics file."""
        try:
            return (self._run / "metrics.jsonl").read_bytes().count(b"\n")
        except OSError:
            return 0

    def ranks_exist(self) -> bool:
        return len(ranks_of(self._launcher)) == self._num_ranks

    def has_made(self, num_steps: int) -> bool:
        """Wait until the metrics file has so many steps; False if the run ended first."""
        return self._until(lambda: self.num_lines() >= num_steps)

    def is_measured(self) -> bool:
        """Whether the ranks have begun with the steps of this start."""
        return any('"started"' in line for line in self._events()[self._num_events :])

    def wait(self, strike: Strike, clock: Clock) -> bool:
        """Wait for the instant of a strike; False if the run ended first."""
        where, is_cold = strike.where, strike.restarts is not None
        if strike.phase == "starting":
            return self._sleep(where * _COLD_S) if is_cold else self._sleep(where * clock.starting)
        if strike.phase == "tokenising":
            return self._until(self._is_tokenising) and self._sleep(where * 0.05)
        if strike.phase == "calibrating":
            return self._until(self.ranks_exist) and self._sleep(where * (_COLD_S if is_cold else clock.calibrating))
        if strike.phase == "exporting":
            return self._sleep(where * clock.exporting)
        if strike.phase in ("computing", "rehearsing"):
            step = 1 + int(where * (self._num_steps - 1))
            return self._until(lambda: self.num_lines() >= step) and self._sleep(where * 7 % 1 * clock.step)
        if strike.phase == "saving":
            least = int(where * (self._num_steps - 2))
            return self._until(lambda: self.num_lines() >= least and self._is_saving()) and self._sleep(where * 0.01)
        assert strike.phase == "ending", strike
        return self._until(lambda: self.num_lines() >= self._num_steps) and self._sleep(where * clock.ending)

    def _events(self) -> list[str]:
        try:
            return (self._run / "events.jsonl").read_text().splitlines()
        except OSError:
            return []

    def _is_tokenising(self) -> bool:
        cache = self._folder / "cache"
        return cache.is_dir() and any(cache.iterdir())

    def _is_saving(self) -> bool:
        return self._saves.is_dir() and any(path.name.startswith(".") for path in self._saves.iterdir())

    def _sleep(self, duration_s: float) -> bool:
        time.sleep(duration_s)
        return is_alive(self._launcher)

    def _until(self, come: Callable[[], bool]) -> bool:
        deadline_s = time.monotonic() + _PATIENCE_S
        while not come():
            if not is_alive(self._launcher) or time.monotonic() > deadline_s:
                return False
            time.sleep(_PAUSE_S)
        return True


def ranks_of(launcher: int) -> list[int]:
    """Processes of the ranks of a command, in no order."""
    if b"torch.distributed.run" not in _command_line(launcher):
        return rank_pids(launcher)
    # A child that has not become a rank yet has the command line of torchrun.
    children = {pid: _command_line(pid) for pid in descendants(launcher) if launcher in _parents([pid])}
    return sorted(pid for pid, line in children.items() if b"terrace" in line and b"torch.distributed.run" not in line)


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def strike(what: Strike, launcher: int, timeout_s: float) -> Struck | None:
    """Send the signal; None if there is no such process (yet, or any more)."""
    pids = _victims(what, launcher)
    if not pids:
        return None
    stalls = what.signal == "stall"
    number = signal.SIGSTOP if stalls else signal.Signals[what.signal]
    at_s = time.monotonic()
    _send(pids, number)
    if stalls:
        time.sleep(timeout_s * (0.05 + 0.25 * what.where))
        _send(pids, signal.SIGCONT)
    return Struck(tuple(pids), at_s)


def _victims(what: Strike, launcher: int) -> list[int]:
    ranks = ranks_of(launcher)
    if what.victim == "launcher":
        return [launcher]
    if what.victim == "worker":
        return [ranks[what.rank]] if what.rank < len(ranks) else []
    family = descendants(launcher)
    if what.victim == "all":
        return [launcher, *family]
    return sorted(_parents(ranks) & family)[:1]


def _parents(pids: list[int]) -> set[int]:
    found = set()
    for pid in pids:
        try:
            found.add(int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1]))
        except OSError:
            continue
    return found


def _send(pids: "list[int]", number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
