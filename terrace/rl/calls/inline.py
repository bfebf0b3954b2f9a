"""Roles in the controller's own process."""

from collections.abc import Sequence
from typing import Any

from terrace.base.errors import ConfigError
from terrace.rl.calls.host import Host, Part, Task
from terrace.rl.calls.runtime import Handle, Pool, Runtime
from terrace.rl.values.rows import Rows, columns_read


class InlineRuntime(Runtime):
    """Roles in this process, on pools of one rank. Calls run synchronously, so that a debugger can step into them.

    Rows are passed by reference. A worker's errors are raised unchanged, with a note that names role and method.
    """

    def __init__(self) -> None:
        super().__init__(_Here())
        self._hosts: dict[int, Host] = {}

    def _open(self, pool: Pool) -> None:
        if pool.num_ranks > 1:
            raise ConfigError(f"a pool of {pool.num_ranks} ranks inline: one process is one rank, so use LocalRuntime")
        self._hosts[pool.index] = Host(None, self._store)

    def send(self, pool: Pool, tasks: Sequence[Task], handle: Handle, given: Sequence[Handle]) -> None:
        """Run the task now."""
        for rank, task in enumerate(tasks):
            try:
                handle.take_answer(rank, self._hosts[pool.index].run(task))
            except Exception as error:
                error.add_note(f"in {task.name}")
                raise

    def meeting(self) -> tuple[str, int]:
        """Raises `ConfigError`: meeting takes two concurrent calls, and calls in one process are sequential."""
        raise ConfigError("a rollout with ranks of its own needs processes of its own: use LocalRuntime")

    def collect(self, timeout_s: float | None) -> None:
        """Does nothing: no call is ever pending."""

    def forget(self, part: Part) -> None:
        """Does nothing: rows are garbage-collected."""

    def close(self) -> None:
        self._hosts.clear()


class _Here:
    """A `Store` in which the place of rows is the rows themselves."""

    def keep(self, rows: Rows) -> Rows:
        return rows

    def fetch(self, place: Any) -> Rows:
        assert isinstance(place, Rows), "places of this store are rows"
        return place

    def drop(self, place: Any) -> None:
        pass

    def part(self, place: Any, start: int, stop: int, columns: Sequence[str] = ()) -> Rows:
        return columns_read(self.fetch(place), columns)
