"""One process of a pool: it holds the workers of its roles and runs their calls.

Returned rows stay in this process's store until the controller drops them. The controller receives only their place and
token counts; consumers fetch the rows from the process that holds them.
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

MAKE = "__init__"  # the method name of the task that creates a worker
_TOKENS = ("prompts", "responses")  # the columns that blocks run on (terrace.rl.algorithms.batches)


@dataclass(frozen=True)
class Part:
    """A reference to rows in a store: their `place` there, and the token count and group of each row.

    `groups` is empty for rows without that column.
    """

    place: Any
    tokens: tuple[int, ...]
    groups: tuple[int, ...] = ()


@dataclass(frozen=True)
class Piece:
    """Rows `start` to `stop` of the rows at `place`."""

    place: Any
    start: int
    stop: int


@dataclass(frozen=True)
class Task:
    """One rank's share of a call: the pieces of each `Rows` argument, and the keyword arguments `values`.

    `worker` is the class to create, with `values` as its settings, or None for an ordinary call. Without `is_taken` the
    result is dropped. `step` is the run's, for the error message of a rank that stopped.
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
        return f"{self.role}.{self.call.method}"


@dataclass(frozen=True)
class Answer:
    """The result of a task: a reference to rows, or a value. It ran from `begin_s` to `end_s` (Unix time)."""

    number: int
    part: Part | None = None
    value: Any = None
    begin_s: float = 0.0
    end_s: float = 0.0


class Store(Protocol):
    """Holds rows of this process, which other processes can fetch."""

    def keep(self, rows: Rows) -> Any:
        """Store rows and return their place."""

    def fetch(self, place: Any) -> Rows:
        """Get rows of any process; do not change them in place."""

    def drop(self, place: Any) -> None:
        """Drop rows that this store keeps."""

    def part(self, place: Any, start: int, stop: int, columns: Sequence[str] = ()) -> Any:
        """A smaller place for a reader of rows `start` to `stop`, and of `columns` if the rows have one of them.

        Row indices stay the same. Python objects of the other rows are left out, and the other columns may be.
        """


class Host:
    def __init__(self, world: World | None, store: Store) -> None:
        self._world, self._store = world, store
        self._workers: dict[str, Any] = {}

    def run(self, task: Task) -> Answer:
        """Run a task; raises the worker's errors, and `ConfigError` for a result of a type that `take` cannot use."""
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
    """Store rows and return a reference to them."""
    return Part(store.keep(rows), tokens_of(rows), groups_of(rows))


def joined(store: Store, pieces: Sequence[Piece]) -> Rows:
    """Fetch and concatenate all pieces; copies only if there are several."""
    found = []
    for piece in pieces:
        rows = store.fetch(piece.place)
        whole = (piece.start, piece.stop) == (0, len(rows))
        found.append(rows if whole else rows.part(piece.start, piece.stop))
    return found[0] if len(found) == 1 else cat(found)


def merged(arguments: Sequence[Rows]) -> Rows:
    """The columns of all arguments side by side; raises `DataError` for a name that occurs twice."""
    found = arguments[0]
    for each in arguments[1:]:
        found = found | each
    return found


def tokens_of(rows: Rows) -> tuple[int, ...]:
    """Token count of each row, over prompt and response if it has one of them, else over all ragged columns."""
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
