"""What a roster decides: the entries of its log, one JSON object a line. No torch here.

The log is the roster's only memory. `terrace.roster.state.after` folds entries into a state, so a process that reads
the log again knows everything that it has ever promised. A line counts once it is on the disk.

Words: a *window* is `every` steps, numbered from 0. An *exchange* is numbered from 0 as well, and its result is the
*version* of the outer parameters with the number one higher; version 0 are the initial values. A *share* is how many of
a step's rounds an island trains: a round is one micro-batch on each of its data ranks. A window is *in hand* from the
time it is dealt to an island until an exchange has taken the island's change.
"""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from terrace.base.errors import ConfigError
from terrace.base.schema import load


@dataclass(frozen=True, order=True)
class Attempt:
    """The number of an exchange and of an attempt at it, both from 0."""

    exchange: int
    attempt: int


NO_ATTEMPT = Attempt(-1, -1)


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Settings of the run that its roster needs, equal on all islands.

    `every` is the number of steps in a window, `steps` that in the run, and `rounds` the number of rounds in a step,
    which are dealt among islands. `patience_s` is how long any process waits for one of another island.
    """

    every: int
    steps: int
    rounds: int
    patience_s: float

    @property
    def num_windows(self) -> int:
        return -(-self.steps // self.every)

    def steps_of(self, window: int) -> range:
        """The steps of a window, from 0. The last window may be shorter."""
        return range(window * self.every, min(self.steps, (window + 1) * self.every))


@dataclass(frozen=True, kw_only=True)
class Opened:
    """The first island has joined: the terms of the run, and the facts, by name, that must be equal on every island."""

    terms: Terms
    facts: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Joined:
    """A process takes part as an island. `version` is 0 if it holds the initial values, and -1 if it must be healed.

    `trained` is the last window that this process has trained (-1: none): it was counted as lost meanwhile, and its own
    optimizer goes on from there.
    """

    island: str
    token: str  # identifies this process
    addresses: tuple[str, ...]  # of its ranks
    version: int
    trained: int = -1


@dataclass(frozen=True, kw_only=True)
class Dealt:
    """A window was dealt among the islands of roster `number`. `shares` leaves out islands with a share of 0."""

    number: int
    window: int
    first: int  # step, from 0
    last: int
    shares: dict[str, int]

    def __hash__(self) -> int:
        return hash((self.number, self.window))


@dataclass(frozen=True, kw_only=True)
class Brought:
    """What an island brings to an exchange: its version, the window of its change, and the tokens of that window."""

    token: str
    version: int  # below the attempt's: it is healed
    window: int  # -1: no change
    tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Attempted:
    """An attempt at an exchange among `islands`, whose result follows from `version`.

    `missed` names islands that are left out, and says why.
    """

    exchange: int
    attempt: int
    version: int
    islands: dict[str, Brought]
    missed: dict[str, str] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def key(self) -> Attempt:
        return Attempt(self.exchange, self.attempt)

    @property
    def result(self) -> int:
        """The version that it makes."""
        return self.exchange + 1


@dataclass(frozen=True, kw_only=True)
class Committed:
    """All islands of the attempt hold its sums, so all of them apply it: the exchange has happened."""

    exchange: int
    attempt: int


@dataclass(frozen=True, kw_only=True)
class Gone:
    """An island left the roster, or was lost, with what it had in hand: its share of the steps from `first` to `last`.

    `first` is -1 if it had nothing in hand.
    """

    island: str
    token: str
    why: str
    share: int = 0
    first: int = -1
    last: int = -1


@dataclass(frozen=True, kw_only=True)
class Finished:
    """All windows were dealt and exchanged."""

    version: int


Entry = Opened | Joined | Dealt | Attempted | Committed | Gone | Finished
_KINDS: dict[str, type[Any]] = {
    "opened": Opened,
    "joined": Joined,
    "dealt": Dealt,
    "attempted": Attempted,
    "committed": Committed,
    "gone": Gone,
    "finished": Finished,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def line_of(entry: Entry) -> str:
    return json.dumps({"kind": _NAMES[type(entry)], **asdict(entry)})


def entry_of(line: str, where: str) -> Entry:
    """Inverse of `line_of`. Raises `ConfigError`, which names `where`, for any other text."""
    try:
        table = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is no entry of a roster ({error}): give the log of terrace meet") from error
    kind = _KINDS.get(table.pop("kind", "")) if isinstance(table, dict) else None
    if kind is None:
        raise ConfigError(f"{where} is no entry of a roster: give the log of terrace meet")
    entry: Entry = load(kind, table, where)
    return entry
