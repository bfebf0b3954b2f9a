"""The watchdogs' keys in the store; terrace.launch.postmortem explains their meaning.

Every method may raise `torch.distributed.DistError` (a `RuntimeError`) once the process that hosts the store is gone.
No method waits for a key that may never be written.
"""

import time
from datetime import timedelta
from typing import Any, NamedTuple

from torch.distributed.distributed_c10d import PrefixStore, Store

from terrace.base.errors import ConfigError
from terrace.launch.postmortem import Heartbeat, decode
from terrace.launch.seal import Seal


class Position(NamedTuple):
    """A position in a run. It must not change, because the watchdog's thread calls `str(doing)` later."""

    step: int
    counter: int
    doing: object
    ranks: tuple[int, ...] | None  # those that it waits with; empty: it computes; None: outside a step
    extra_s: float  # that it may stand still beyond the timeout


class Stillness:
    """How many `seconds` a rank has been at one `position` of a step; looks count for at most `most_s` each."""

    def __init__(self, position: Position, most_s: float) -> None:
        self.position, self.seconds = position, 0.0
        self._most_s, self._looked_s = most_s, time.monotonic()

    def look(self, position: Position) -> float:
        """Returns the seconds since the last look.

        A longer gap does not count, because a process that was itself suspended has not been watching.
        """
        now_s = time.monotonic()
        passed_s = min(now_s - self._looked_s, self._most_s)
        is_still = position is self.position and position.ranks is not None
        self.seconds = self.seconds + passed_s if is_still else 0.0
        self.position, self._looked_s = position, now_s
        return passed_s


_CHUNK = 256  # keys a call: keeps one reply of the store to some tens of kilobytes
_MIN_STORE_TIMEOUT_S = 5.0


class HeartbeatStore:
    """Heartbeats, the election of the rank that does the post-mortem, and its verdict.

    Uses its own connection, because a store client serves one call at a time and the main thread may block in one. A
    store that cannot be cloned is shared; a blocking call then delays the heartbeats. A heartbeat that this run did not
    write is ignored.
    """

    def __init__(self, store: Store, rank: int, world_size: int, timeout_s: float, seal: Seal) -> None:
        self._rank, self._world_size, self._seal = rank, world_size, seal
        try:
            own: Any = getattr(store, "clone")()  # noqa: B009  (missing from the stubs)
            own.set_timeout(timedelta(seconds=max(timeout_s, _MIN_STORE_TIMEOUT_S)))
        except (AttributeError, NotImplementedError, RuntimeError):
            own = store
        self._store = PrefixStore("watchdog", own)

    def publish(self, beat: Heartbeat) -> None:
        key = f"beat/{self._rank}"
        self._store.set(key, self._seal.close(key, beat.encode()))

    def read_all(self) -> list[Heartbeat]:
        beats: list[Heartbeat] = []
        for start in range(0, self._world_size, _CHUNK):
            ranks = range(start, min(start + _CHUNK, self._world_size))
            beats += self._read(ranks)
        return beats

    def elect(self, attempt: int) -> bool:
        """Whether this rank is the first to claim the post-mortem of `attempt`."""
        return bool(self._store.add(f"ticket/{attempt}", 1) == 1)

    def withdraw(self, attempt: int) -> None:
        """Withdraws an election that led to no verdict, so that a later hang can elect again."""
        self._store.delete_key(f"ticket/{attempt}")

    def settle(self, verdict: str) -> str:
        """Publishes `verdict` unless there is one already. Returns the published one."""
        own = self._seal.close("verdict", verdict)
        return self._verdict(self._store.compare_set("verdict", "", own))

    def verdict(self) -> str | None:
        return self._verdict(self._store.get("verdict")) if self._store.check(["verdict"]) else None

    def _verdict(self, raw: bytes) -> str:
        try:
            return self._seal.open("verdict", bytes(raw))
        except ConfigError as error:
            return f"hang {error}"

    def _read(self, ranks: range) -> list[Heartbeat]:
        keys = [f"beat/{rank}" for rank in ranks]
        # One round trip for many ranks, once all have published.
        if self._store.check(keys):
            values = self._store.multi_get(keys)
            return [self._decoded(rank, bytes(raw)) for rank, raw in zip(ranks, values, strict=True)]
        # A key that was never written would block a read, so ask for each.
        return [
            self._decoded(rank, bytes(self._store.get(key)) if self._store.check([key]) else None)
            for rank, key in zip(ranks, keys, strict=True)
        ]

    def _decoded(self, rank: int, raw: bytes | None) -> Heartbeat:
        try:
            return decode(rank, None if raw is None else self._seal.open(f"beat/{rank}", raw).encode())
        except ConfigError:
            return decode(rank, None)
