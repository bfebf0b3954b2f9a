"""What a rehearsal and the ranks that it started tell each other: faults in the environment, events in a file.

Times are of the monotonic clock, which all processes of a machine share. No torch here.
"""

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from terrace.base.errors import ConfigError
from terrace.base.schema import load

Happening = Literal[
    "fault",  # is about to be carried out, by this process or by the rehearsal
    "trains",  # the first step of a window begins
    "meets",  # the window `number` is trained
    "exchanges",  # an attempt at exchange `number` begins here
    "holds",  # its sums are here
    "fails",  # it has failed here
    "heals",  # this rank has sent `num_bytes` to islands that are healed in it
    "healed",  # this rank has received `num_bytes` of the `state_bytes` that it lacked
    "applied",  # the parameters are those after exchange `number`
]


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What a process of island `island` is to do. `faults` and `reported` are words of faults by their number.

    It carries out the faults. At the place of one that is reported, it says so and waits until the rehearsal, which
    carries it out, has answered by a file. An island that `joins` by a fault waits for that answer before it joins.
    """

    events: str  # path
    island: int = -1
    faults: dict[str, str]
    reported: dict[str, str]
    joins: int = -1

    @property
    def text(self) -> str:
        return json.dumps(asdict(self))

    def answer(self, number: int) -> Path:
        """The file by which the rehearsal says that it has carried out a fault."""
        return Path(f"{self.events}.{number}")


def read_orders(text: str) -> Orders:
    """The orders in `TERRACE_FAULTS`. Raises `ConfigError`."""
    try:
        orders = load(Orders, json.loads(text), "TERRACE_FAULTS")
        for number in (*orders.faults, *orders.reported):
            int(number)
        return orders
    except ValueError as error:
        raise ConfigError(f"TERRACE_FAULTS is set by terrace rehearse alone ({error}): unset it") from error


@dataclass(frozen=True, kw_only=True)
class Event:
    """What happened in a rank at `at_s`. `group` is its process group; `number` of a fault, a window or an exchange."""

    what: Happening
    at_s: float
    island: int
    rank: int
    pid: int
    group: int
    number: int = -1
    attempt: int = 0
    num_bytes: int = 0
    state_bytes: int = 0


class Written:
    """The events of one rank, each a line that is on its way before the call returns.

    Raises `ConfigError` for a path that cannot be opened.
    """

    def __init__(self, path: str, island: int, rank: int) -> None:
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigError(
                f"TERRACE_FAULTS has events written to {path}, which cannot be opened ({error.strerror}): unset it, "
                "since terrace rehearse alone sets it"
            ) from error
        self._island, self._rank = island, rank

    def add(
        self, what: Happening, number: int = -1, attempt: int = 0, num_bytes: int = 0, state_bytes: int = 0
    ) -> None:
        event = Event(
            what=what,
            at_s=time.monotonic(),
            island=self._island,
            rank=self._rank,
            pid=os.getpid(),
            group=os.getpgrp(),
            number=number,
            attempt=attempt,
            num_bytes=num_bytes,
            state_bytes=state_bytes,
        )
        os.write(self._file, f"{json.dumps(asdict(event))}\n".encode())


class Lines:
    """The lines of a file that other processes append to, which may not be there yet."""

    def __init__(self, path: Path) -> None:
        self.path, self._read = path, 0

    def new(self) -> list[str]:
        """The whole lines since the last call."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._read)
            whole = file.read().rpartition(b"\n")[0]
        self._read += len(whole) + bool(whole)
        return whole.decode(errors="replace").splitlines()


def event_of(line: str) -> Event:
    return load(Event, json.loads(line), "an event of a rehearsal")
