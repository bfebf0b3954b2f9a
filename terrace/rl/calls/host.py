"""A process of a role's ranks: it holds workers by name and runs their calls.

Rows that a call returns stay here, in the process's store, until the controller drops them; the controller learns where
they are and how many tokens each has. Whoever needs them fetches them from where they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from terrace.base.errors import ConfigError
from terrace.launch.world import World
from terrace.rl.calls.call import Call
from terrace.rl.calls.spans import now_s
from terrace.rl.values.ragged import Ragged
from terrace.rl.values.rows import Rows, cat

MAKE = "__init__"  # the method of the task that makes a worker
_TOKENS = ("prompts", "responses")  # the columns that blocks run on (terrace.rl.algorithms.batches)


@dataclass(frozen=True)
class Part:
    """Rows where they were made: `place` is a store's name for them, `tokens` and `groups` are those of each row.

    `groups` is empty for rows without that column.
    """

    place: Any
    tokens: tuple[int, ...]
    groups: tuple[int, ...] = ()


@dataclass(frozen=True)
class Piece:
    """Rows `start` to `stop` of those at a place."""

    place: Any
    start: int
    stop: int


@dataclass(frozen=True)
class Task:
    """One rank's part of a call. `rows` are the pieces of each argument; `values` is the rest, or a role's settings.

    `worker` is the class of a role that is made. Without `is_taken` the result is dropped. `step` is the run's, for
    words on a rank that stopped.
    """

    number: int
    role: str
    call: Call
    rows: tuple[tuple[Piece, ...], ...]
    values: Mapping[str, Any]
    is_taken: bool
    worker: type | None = None
    step: int = 0

    @property
    def name(self) -> str:
        """Role and method."""
        return f"{self.role}.{self.call.method}"


@dataclass(frozen=True)
class Answer:
    """The result of a task: rows that stayed, or a value; it ran from `begin_s` to `end_s`, seconds of the epoch."""

    number: int
    part: Part | None = None
    value: Any = None
    begin_s: float = 0.0
    end_s: float = 0.0


class Store(Protocol):
    """Rows of a process that others can fetch."""

    def keep(self, rows: Rows) -> Any:
        """Keep rows and return their place."""

    def fetch(self, place: Any) -> Rows:
        """Rows of any process, which must not be changed in place."""

    def drop(self, place: Any) -> None:
        """Forget rows that `keep` kept here."""

    def part(self, place: Any, start: int, stop: int, columns: Sequence[str] = ()) -> Any:
        """The place for who reads rows `start` to `stop` alone, and of these `columns`, if it has one of them.

        It is as long as before; objects of other rows are missing, and may be other columns.
        """


class Host:
    """The roles of one process."""

    def __init__(self, world: World | None, store: Store) -> None:
        self._world, self._store = world, store
        self._workers: dict[str, Any] = {}

    def run(self, task: Task) -> Answer:
        """Run a task; raises the errors of the worker, and `ConfigError` for a result that cannot be taken."""
        begin_s = now_s()
        return replace(self._answer(task), begin_s=begin_s, end_s=now_s())

    def _answer(self, task: Task) -> Answer:
        if task.worker is not None:
            self._workers[task.role] = task.worker(self._world, **task.values)
            return Answer(task.number)
        arguments = [joined(self._store, pieces) for pieces in task.rows]
        rows = [merged(arguments)] if arguments else []
        result = getattr(self._workers[task.role], task.call.method)(*rows, **task.values)
        if not task.is_taken:
            return Answer(task.number)
        _check(result, task)
        return (
            Answer(task.number, kept(self._store, result))
            if isinstance(result, Rows)
            else Answer(task.number, value=result)
        )


def kept(store: Store, rows: Rows) -> Part:
    """Rows kept in a store."""
    return Part(store.keep(rows), tokens_of(rows), groups_of(rows))


def joined(store: Store, pieces: Sequence[Piece]) -> Rows:
    """The rows of all pieces; a copy only where there are several."""
    found = []
    for piece in pieces:
        rows = store.fetch(piece.place)
        whole = (piece.start, piece.stop) == (0, len(rows))
        found.append(rows if whole else rows.part(piece.start, piece.stop))
    return found[0] if len(found) == 1 else cat(found)


def merged(arguments: Sequence[Rows]) -> Rows:
    """The columns of all arguments; `DataError` for a name that two have."""
    found = arguments[0]
    for each in arguments[1:]:
        found = found | each
    return found


def tokens_of(rows: Rows) -> tuple[int, ...]:
    """Tokens of each row: of prompt and response where it has these columns, else of all its ragged columns."""
    ragged = {name: column for name, column in rows.columns.items() if isinstance(column, Ragged)}
    counted = [ragged[name] for name in _TOKENS if name in ragged] or list(ragged.values())
    return tuple(map(sum, zip(*(column.lengths.tolist() for column in counted), strict=True))) or (0,) * len(rows)


def groups_of(rows: Rows) -> tuple[int, ...]:
    """The column `groups`; empty without one."""
    column = rows.columns.get("groups")
    return tuple(column.tolist()) if isinstance(column, Tensor) else ()


def _check(result: object, task: Task) -> None:
    take, name = task.call.take, task.name
    if take in ("data", "replica") and not isinstance(result, Rows):
        raise ConfigError(f"{name} returned {type(result).__name__}, and take = {take!r} joins Rows: return Rows")
    if take == "mean":
        numbers = isinstance(result, Mapping) and all(isinstance(each, (int, float)) for each in result.values())
        if not numbers:
            raise ConfigError(f"{name} returned {type(result).__name__}, and take = 'mean' needs numbers by name")
