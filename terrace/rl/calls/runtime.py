"""The controller's side of role calls: pools of ranks, groups (the ranks of a role), and handles of results.

A single controller, ordinary Python, calls roles. The roles of a pool are colocated: each of the pool's processes holds
all of them and runs their calls in order. Roles on different pools run concurrently.

A handle refers to rows without holding them. They are sent directly from the processes that hold them to those that
need them when another role is called, or to the controller (`Handle.get`). Balancing needs the token counts of the
rows, so a call first waits for the results of its argument handles.

Runtimes: `InlineRuntime` (`inline.py`: one process, for a debugger), `LocalRuntime` (`local.py`: processes of this
machine), `RayRuntime` (`on_ray.py`: several machines).
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Self

from terrace.base.errors import ConfigError
from terrace.base.words import counted
from terrace.rl.calls.call import Call, call_of
from terrace.rl.calls.host import MAKE, Answer, Part, Piece, Store, Task, joined, kept
from terrace.rl.calls.layout import RoleLayout
from terrace.rl.calls.spans import Calls, Span
from terrace.rl.values.rows import Rows, columns_read

_MAKING = Call(MAKE, None, "all")


class Handle:
    """A reference to the result of a call, which stays at the ranks that produced it."""

    def __init__(
        self,
        runtime: "Runtime",
        name: str,
        take: str,
        sources: Sequence[int],
        weights: Sequence[int],
        pool: int | None = None,
    ) -> None:
        """`name` is `role.method`; `pool` is the role's pool, None for the controller's own rows."""
        self._runtime, self._name, self._take, self._sources, self._weights = runtime, name, take, sources, weights
        self._answers: dict[int, Answer] = {}  # by rank
        self._pool = pool
        if pool is not None:
            runtime.calls.sent(self, pool)

    def __repr__(self) -> str:
        return f"<result of {self._name}>"

    def __len__(self) -> int:
        """The number of rows; waits for the call. Raises `ConfigError` if the result is not `Rows`."""
        return len(self.tokens)

    @property
    def tokens(self) -> list[int]:
        """Token count of each row, as used for balancing; waits and raises as `len` does."""
        return [each for part in self.parts for each in part.tokens]

    @property
    def groups(self) -> list[int]:
        """The column `groups`, empty if there is none; waits and raises as `len` does."""
        return [each for part in self.parts for each in part.groups]

    @property
    def parts(self) -> list[Part]:
        """References to the rows; waits and raises as `len` does."""
        found = [answer.part for answer in self._all()]
        if self._take not in ("data", "replica", "first") or None in found:
            raise ConfigError(
                f"{self._name} returns no rows that can be joined: only rows have a length and go on to calls"
            )
        return [part for part in found if part is not None]

    def get(self) -> Any:
        """Wait for the call and return its result: rows, a value, a list by rank, or means by name (`Call.take`).

        Raises the worker's error, and `HangError` if a rank has died or has not answered in time.
        """
        answers = self._all()
        if self._take == "all":
            return [self._runtime.read([each.part]) if each.part else each.value for each in answers]
        if answers[0].part is not None:
            return self._runtime.read(self.parts)
        return _mean([each.value for each in answers], self._weights) if self._take == "mean" else answers[0].value

    def is_ready(self) -> bool:
        """Whether the result has arrived, so that `get` would not wait."""
        self._runtime.collect(0.0)
        return all(rank in self._answers for rank in self._sources)

    def _all(self) -> list[Answer]:
        while not all(rank in self._answers for rank in self._sources):
            self._runtime.collect(None)
        return [self._answers[rank] for rank in self._sources]

    def take_answer(self, rank: int, answer: Answer) -> None:
        """Store a rank's answer; for the runtime."""
        if rank in self._sources:
            self._answers[rank] = answer
            if answer.part is not None:
                weakref.finalize(self, self._runtime.forget, answer.part)
            if self._pool is not None and len(self._answers) == len(self._sources):
                begin_s = min(each.begin_s for each in self._answers.values())
                end_s = max(each.end_s for each in self._answers.values())
                role, _, method = self._name.rpartition(".")
                self._runtime.calls.ended(self, Span(self._pool, role, method, begin_s, end_s))


class Group:
    """The ranks of one role. `group.method(rows, name=value)` calls and returns the result; `.remote` returns a handle.

    Positional arguments are rows or handles of rows, all with the same number of rows; the method receives their
    columns merged into one `Rows`.
    """

    def __init__(self, pool: "Pool", name: str, worker: type, layout: RoleLayout) -> None:
        self._pool, self._name, self._worker = pool, name, worker
        self.layout = layout

    def __getattr__(self, method: str) -> "Caller":
        if method.startswith("__"):  # Python probes for these and expects an AttributeError
            raise AttributeError(method)
        return Caller(self._pool, self._name, call_of(self._worker, method, self._name), self.layout)


class Caller:
    """Callable for one method of a role; returns a handle of its result."""

    def __init__(self, pool: "Pool", role: str, call: Call, layout: RoleLayout) -> None:
        self._pool, self._role, self._call, self._layout = pool, role, call, layout

    def __call__(self, *rows: Rows | Handle, **values: object) -> Any:
        """Call and wait for the result."""
        return self.remote(*rows, **values).get()

    def remote(self, *rows: Rows | Handle, **values: object) -> Handle:
        """Send the call to every rank of the role and return a handle of its result.

        Raises `ConfigError` for arguments with different numbers of rows, and for a call that splits rows without any.
        """
        runtime, name = self._pool.runtime, f"{self._role}.{self._call.method}"
        if self._call.split is not None and not rows:
            raise ConfigError(f"{name} splits rows over {self._call.split!r}, and was given none")
        reads = self._call.reads
        given = [each if isinstance(each, Handle) else runtime.given(columns_read(each, reads)) for each in rows]
        lengths = [len(each) for each in given]
        if len(set(lengths)) > 1:
            raise ConfigError(f"{name} was given {' and '.join(map(str, lengths))} rows: must be equally many")
        # Balance by the argument with the most tokens, which determines most of the work.
        tokens = max((each.tokens for each in given), key=sum, default=[])
        groups = next((found for each in given if self._call.keeps_groups and (found := each.groups)), ())
        bounds = self._layout.bounds(self._call, tokens, groups)
        sources = self._layout.sources(self._call)
        pieces = [[runtime.pieces(each.parts, *bound, reads) for each in given] for bound in bounds]
        weights = [bounds[rank][1] - bounds[rank][0] for rank in sources]
        handle = Handle(runtime, name, self._call.take, sources, weights, self._pool.index)
        number = runtime.number()
        tasks = [
            Task(number, self._role, self._call, tuple(own), values, rank in sources, step=runtime.step)
            for rank, own in enumerate(pieces)
        ]
        runtime.send(self._pool, tasks, handle, given)
        return handle


class Pool:
    def __init__(self, runtime: "Runtime", index: int, num_ranks: int) -> None:
        self.runtime, self.index, self.num_ranks = runtime, index, num_ranks
        self.roles: dict[str, type] = {}

    def host(self, **roles: tuple[type, Mapping[str, Any]]) -> dict[str, Group]:
        """Create a worker (class, settings) of every role on every rank, and return the groups by role.

        A class may define `layout(num_ranks, **settings)`, which returns the role's `RoleLayout`; by default every rank
        has its own share. Raises `ConfigError` for a role name that the runtime already has, `ConfigError` for a layout
        with another number of ranks, and the errors of constructors.
        """
        groups = {name: self._group(name, worker, settings) for name, (worker, settings) in roles.items()}
        for name, (worker, settings) in roles.items():
            handle = Handle(self.runtime, f"{name}.{MAKE}", "all", range(self.num_ranks), (), self.index)
            number = self.runtime.number()
            tasks = [Task(number, name, _MAKING, (), settings, False, worker) for _ in range(self.num_ranks)]
            self.runtime.send(self, tasks, handle, ())
            handle.get()
        return groups

    def _group(self, name: str, worker: type, settings: Mapping[str, Any]) -> Group:
        if any(name in pool.roles for pool in self.runtime.pools):
            raise ConfigError(f"two roles are called {name!r}: names are of the whole runtime")
        layout = worker.layout(self.num_ranks, **settings) if hasattr(worker, "layout") else None
        layout = layout or RoleLayout.alike(self.num_ranks)
        if layout.num_ranks != self.num_ranks:
            raise ConfigError(
                f"role {name!r} has a plan for {counted(layout.num_ranks, 'rank')}, and its pool has {self.num_ranks}: "
                f"use a pool of {layout.num_ranks}"
            )
        self.roles[name] = worker
        return Group(self, name, worker, layout)


class Runtime(ABC):
    """Starts pools and transports tasks and answers. Use as a context manager."""

    def __init__(self, store: Store) -> None:
        self._store, self._numbers = store, 0
        self.pools: list[Pool] = []
        self.step = 0  # of the run, for the error message of a rank that stopped
        self.calls = Calls()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def pool(self, num_ranks: int) -> Pool:
        """Start a pool. Raises `ConfigError` for fewer than one rank, or more than the runtime supports."""
        if num_ranks < 1:
            raise ConfigError(f"a pool of {num_ranks} ranks: must be 1 or more")
        pool = Pool(self, len(self.pools), num_ranks)
        self._open(pool)
        self.pools.append(pool)
        return pool

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    def given(self, rows: Rows) -> Handle:
        """Store rows of the controller and return a handle."""
        handle = Handle(self, "the controller", "first", (0,), (len(rows),))
        handle.take_answer(0, Answer(0, kept(self._store, rows)))
        return handle

    def read(self, parts: Sequence[Part]) -> Rows:
        return joined(self._store, [Piece(part.place, 0, len(part.tokens)) for part in parts])

    def pieces(self, parts: Sequence[Part], start: int, stop: int, columns: Sequence[str]) -> tuple[Piece, ...]:
        """Rows `start` to `stop` of the concatenated parts, for a rank that reads `columns` (`Store.part`)."""
        found, first = [], 0
        for part in parts:
            end = first + len(part.tokens)
            if max(start, first) < min(stop, end):
                found.append(self._piece(part, max(start, first) - first, min(stop, end) - first, columns))
            first = end
        # An empty share still has the columns.
        return tuple(found) or (self._piece(parts[0], 0, 0, columns),)

    def _piece(self, part: Part, start: int, stop: int, columns: Sequence[str]) -> Piece:
        return Piece(self._store.part(part.place, start, stop, columns), start, stop)

    @abstractmethod
    def _open(self, pool: Pool) -> None:
        """Start the ranks of a pool."""

    @abstractmethod
    def meeting(self) -> tuple[str, int]:
        """Address and port of a new rendezvous store for ranks of several pools; it lives as long as this runtime."""

    @abstractmethod
    def send(self, pool: Pool, tasks: Sequence[Task], handle: Handle, given: Sequence[Handle]) -> None:
        """Send each rank its task; answers go to `handle`. Keeps `given` alive until all ranks have answered."""

    @abstractmethod
    def collect(self, timeout_s: float | None) -> None:
        """Pass received answers to their handles; wait for at least one, at most `timeout_s`."""

    @abstractmethod
    def forget(self, part: Part) -> None:
        """Drop rows that no handle refers to any more."""

    @abstractmethod
    def close(self) -> None:
        """End all ranks; safe to call again."""


def _mean(numbers: Sequence[Mapping[str, float]], weights: Sequence[int]) -> dict[str, float]:
    counted_shares = [(each, weight) for each, weight in zip(numbers, weights, strict=True) if weight]
    shares = counted_shares or [(each, 1) for each in numbers]
    total = sum(weight for _, weight in shares)
    return {name: sum(each[name] * weight for each, weight in shares) / total for name in shares[0][0]}
