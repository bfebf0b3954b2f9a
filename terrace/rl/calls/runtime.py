"""The controller's side of roles: pools of ranks, groups of a role's ranks, handles of results.

One controller, ordinary Python, calls roles. A pool is a number of ranks; roles that one pool hosts are colocated: each
of its processes has them all, and runs their calls in turn. Roles on different pools run at the same time.

A handle says where rows are; they travel when a role that needs them is called, from the processes that have them to
those that need them, or when the controller asks for them (`Handle.get`). To share rows evenly the controller must know
how many tokens they have, so a call waits until the handles it is given have been answered.

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
    """The result of a call, at the ranks that made it."""

    def __init__(
        self,
        runtime: "Runtime",
        name: str,
        take: str,
        sources: Sequence[int],
        weights: Sequence[int],
        pool: int | None = None,
    ) -> None:
        """`name` is `role.method`, of a role on `pool`; rows of the controller are on none."""
        self._runtime, self._name, self._take, self._sources, self._weights = runtime, name, take, sources, weights
        self._answers: dict[int, Answer] = {}  # by rank
        self._pool = pool
        if pool is not None:
            runtime.calls.sent(self, pool)

    def __repr__(self) -> str:
        return f"<result of {self._name}>"

    def __len__(self) -> int:
        """The number of rows; waits for the call. Raises `ConfigError` if its result is no rows."""
        return len(self.tokens)

    @property
    def tokens(self) -> list[int]:
        """Tokens of each row, as shares count them; waits and raises as `len` does."""
        return [each for part in self.parts for each in part.tokens]

    @property
    def groups(self) -> list[int]:
        """The column `groups` of the rows, empty without one; waits and raises as `len` does."""
        return [each for part in self.parts for each in part.groups]

    @property
    def parts(self) -> list[Part]:
        """Where the rows are; waits and raises as `len` does."""
        found = [answer.part for answer in self._all()]
        if self._take not in ("data", "replica", "first") or None in found:
            raise ConfigError(
                f"{self._name} returns no rows that can be joined: only rows have a length and go on to calls"
            )
        return [part for part in found if part is not None]

    def get(self) -> Any:
        """Rows, a value, a list of these by rank, or means by name, as `@call` says; waits for the call.

        Raises the worker's own error, and `HangError` if a rank has died or has not answered in time.
        """
        answers = self._all()
        if self._take == "all":
            return [self._runtime.read([each.part]) if each.part else each.value for each in answers]
        if answers[0].part is not None:
            return self._runtime.read(self.parts)
        return _mean([each.value for each in answers], self._weights) if self._take == "mean" else answers[0].value

    def is_ready(self) -> bool:
        """Whether the call has been answered, so that nothing waits for it."""
        self._runtime.collect(0.0)
        return all(rank in self._answers for rank in self._sources)

    def _all(self) -> list[Answer]:
        while not all(rank in self._answers for rank in self._sources):
            self._runtime.collect(None)
        return [self._answers[rank] for rank in self._sources]

    def take_answer(self, rank: int, answer: Answer) -> None:
        """For the runtime: take the answer of a rank."""
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
    """The ranks of one role. `group.method(rows, name=value)` is a call and its result, `.remote` leaves that there.

    Rows and handles of rows are given by place, all with equally many rows: the method sees their columns side by side.
    """

    def __init__(self, pool: "Pool", name: str, worker: type, layout: RoleLayout) -> None:
        self._pool, self._name, self._worker = pool, name, worker
        self.layout = layout

    def __getattr__(self, method: str) -> "Caller":
        if method.startswith("__"):  # Python asks for these, and takes an AttributeError for no
            raise AttributeError(method)
        return Caller(self._pool, self._name, call_of(self._worker, method, self._name), self.layout)


class Caller:
    """One method of a group."""

    def __init__(self, pool: "Pool", role: str, call: Call, layout: RoleLayout) -> None:
        self._pool, self._role, self._call, self._layout = pool, role, call, layout

    def __call__(self, *rows: Rows | Handle, **values: object) -> Any:
        """The result of the call; waits for it."""
        return self.remote(*rows, **values).get()

    def remote(self, *rows: Rows | Handle, **values: object) -> Handle:
        """Send the call to every rank of the role and return a handle of its result.

        Raises `ConfigError` for arguments with differing numbers of rows, and for a split without rows.
        """
        runtime, name = self._pool.runtime, f"{self._role}.{self._call.method}"
        if self._call.split is not None and not rows:
            raise ConfigError(f"{name} splits rows over {self._call.split!r}, and was given none")
        reads = self._call.reads
        given = [each if isinstance(each, Handle) else runtime.given(columns_read(each, reads)) for each in rows]
        lengths = [len(each) for each in given]
        if len(set(lengths)) > 1:
            raise ConfigError(f"{name} was given {' and '.join(map(str, lengths))} rows: must be equally many")
        # The argument with the most tokens says most about the work.
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
    """Ranks that host roles together."""

    def __init__(self, runtime: "Runtime", index: int, num_ranks: int) -> None:
        self.runtime, self.index, self.num_ranks = runtime, index, num_ranks
        self.roles: dict[str, type] = {}

    def host(self, **roles: tuple[type, Mapping[str, Any]]) -> dict[str, Group]:
        """Make a worker (class, settings) of every role on every rank, and return the groups by role.

        `worker.layout(num_ranks, **settings)`, where the class has it, gives the role's `RoleLayout`; without it every
        rank has a share of its own. Raises `ConfigError` for a role that the runtime has, and a layout of other ranks;
        and the errors of a constructor.
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
    """Starts pools, carries tasks to their ranks and answers back. Use as a context manager."""

    def __init__(self, store: Store) -> None:
        self._store, self._numbers = store, 0
        self.pools: list[Pool] = []
        self.step = 0  # of the run, for words on a rank that stopped
        self.calls = Calls()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def pool(self, num_ranks: int) -> Pool:
        """Start a pool. Raises `ConfigError` for fewer than one rank, or as many as the runtime cannot have."""
        if num_ranks < 1:
            raise ConfigError(f"a pool of {num_ranks} ranks: must be 1 or more")
        pool = Pool(self, len(self.pools), num_ranks)
        self._open(pool)
        self.pools.append(pool)
        return pool

    def number(self) -> int:
        """A number that no other call has."""
        self._numbers += 1
        return self._numbers

    def given(self, rows: Rows) -> Handle:
        """Rows of the controller as a handle."""
        handle = Handle(self, "the controller", "first", (0,), (len(rows),))
        handle.take_answer(0, Answer(0, kept(self._store, rows)))
        return handle

    def read(self, parts: Sequence[Part]) -> Rows:
        """The rows of all parts, here."""
        return joined(self._store, [Piece(part.place, 0, len(part.tokens)) for part in parts])

    def pieces(self, parts: Sequence[Part], start: int, stop: int, columns: Sequence[str]) -> tuple[Piece, ...]:
        """Rows `start` to `stop` of all parts, without the objects of others, for a rank that reads these `columns`."""
        found, first = [], 0
        for part in parts:
            end = first + len(part.tokens)
            if max(start, first) < min(stop, end):
                found.append(self._piece(part, max(start, first) - first, min(stop, end) - first, columns))
            first = end
        # A share without rows still has their columns.
        return tuple(found) or (self._piece(parts[0], 0, 0, columns),)

    def _piece(self, part: Part, start: int, stop: int, columns: Sequence[str]) -> Piece:
        return Piece(self._store.part(part.place, start, stop, columns), start, stop)

    @abstractmethod
    def _open(self, pool: Pool) -> None:
        """Start the ranks of a pool."""

    @abstractmethod
    def meeting(self) -> tuple[str, int]:
        """Address and port of a new store, at which ranks of several pools can meet; it lives as long as this."""

    @abstractmethod
    def send(self, pool: Pool, tasks: Sequence[Task], handle: Handle, given: Sequence[Handle]) -> None:
        """Send each rank its task; answers go to `handle`. Rows of `given` stay until all ranks have answered."""

    @abstractmethod
    def collect(self, timeout_s: float | None) -> None:
        """Give handles the answers that are there; wait until there is one, at most `timeout_s`."""

    @abstractmethod
    def forget(self, part: Part) -> None:
        """Drop rows that no handle refers to."""

    @abstractmethod
    def close(self) -> None:
        """End all ranks; harmless when repeated."""


def _mean(numbers: Sequence[Mapping[str, float]], weights: Sequence[int]) -> dict[str, float]:
    counted_shares = [(each, weight) for each, weight in zip(numbers, weights, strict=True) if weight]
    shares = counted_shares or [(each, 1) for each in numbers]
    total = sum(weight for _, weight in shares)
    return {name: sum(each[name] * weight for each, weight in shares) / total for name in shares[0][0]}
