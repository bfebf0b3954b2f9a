"""Roles in the controller's own process."""

from collections.abc import Sequence
from typing import Any

from terrace.base.errors import ConfigError
from terrace.rl.calls.host import Host, Part, Task
from terrace.rl.calls.runtime import Handle, Pool, Runtime
from terrace.rl.values.rows import Rows, columns_read


class InlineRuntime(Runtime):
    """Roles in this process, each on a pool of one rank; a call runs when it is made, so that a debugger can follow.

    Rows are handed on as they are. Errors of a worker are raised as they are, with a note of role and method.
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
        """Raises `ConfigError`: calls of this process run one after the other, and meeting takes two at once."""
        raise ConfigError("a rollout with ranks of its own needs processes of its own: use LocalRuntime")

    def collect(self, timeout_s: float | None) -> None:
        """Nothing is ever under way."""

    def forget(self, part: Part) -> None:
        """Python forgets them."""

    def close(self) -> None:
        """Forget the workers."""
        self._hosts.clear()


class _Here:
    """Rows are their own place."""

    def keep(self, rows: Rows) -> Rows:
        return rows

    def fetch(self, place: Any) -> Rows:
        assert isinstance(place, Rows), "places of this store are rows"
        return place

    def drop(self, place: Any) -> None:
        pass

    def part(self, place: Any, start: int, stop: int, columns: Sequence[str] = ()) -> Rows:
        return columns_read(self.fetch(place), columns)
