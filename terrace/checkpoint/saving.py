"""Background saves: the state is copied at the end of a step, and a thread writes the copy.

    main thread    ... step 100 | copy | step 101 | step 102 | ...          | copy |
    its thread                         | write, checksum, sync | commit |

Ranks agree on a commit through keys of the store, so a save sends no message between those of a step. Each rank
increments a counter when its part is on disk; rank 0 waits for the counter, joins the parts and renames the folder. A
rank that cannot write publishes the reason; the folder is then removed and every rank raises the error. Only one save
runs at a time: if the next is due before it has completed, training waits.
"""

import shutil
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from terrace.base.errors import CheckpointError
from terrace.checkpoint.layout import folder_of
from terrace.checkpoint.residuals import num_bytes
from terrace.checkpoint.writing import (
    attempt,
    clear_leftovers,
    commit,
    not_written,
    part_of,
    partial_of,
    snapshot_of,
    write_part,
)
from terrace.launch.postmortem import in_words
from terrace.launch.world import World

if TYPE_CHECKING:
    from terrace.runtime.engine import Engine

_POLL_S, _LONGEST_POLL_S, _POLL_GROWTH = 0.002, 0.25, 1.2
_MAX_POLLS_PER_S = 2000  # of all ranks together, so that one store is not asked too often
_LEAVE_S = 10.0  # for ranks that only read a key
_DONE = "done"


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A complete checkpoint and what it cost this rank."""

    folder: Path
    num_bytes: int  # of this rank
    stalled_s: float  # training stood still: waiting for the previous save, and copying
    write_s: float  # until all ranks had written and the folder was renamed


class Saver:
    """Writes the checkpoints of a run. Every rank of the world constructs one, and calls it after the same steps.

    The copy takes `staging_bytes` of main memory, the size of this rank's part: from the first save to the end of the
    run, or, without `background`, only during a save, for which training waits. `limit_s` bounds how long rank 0
    waits for the other ranks' parts after its own.
    """

    def __init__(
        self,
        engine: "Engine",
        world: World,
        run_folder: Path,
        facts: Mapping[str, Any],
        keep: int,
        *,
        background: bool = True,
        limit_s: float = 3600.0,
    ) -> None:
        self._engine, self._world, self._run_folder = engine, world, run_folder
        self._facts, self._keep, self._background, self._limit_s = facts, keep, background, limit_s
        self._store, self._seal = PrefixStore("saves", _own_connection(world.store)), world.seal.within("saves")
        self._longest_poll_s = max(_LONGEST_POLL_S, world.world_size / _MAX_POLLS_PER_S)
        self._snapshot = snapshot_of(engine.state)
        self.staging_bytes = self._snapshot.num_bytes + num_bytes(engine.program, engine.state)  # of residuals, later
        self._number, self._thread = 0, threading.Thread()
        self._folder, self._stalled_s = run_folder, 0.0
        self._best: int | None = None
        # Outcome of the current save, once it has completed.
        self._outcome: str | None = None
        self._error: BaseException | None = None
        self._finished = deque[Saved]()  # appended by the thread
        self._life = self._agree_on_life()

    @property
    def is_under_way(self) -> bool:
        return self._thread.is_alive()

    def start(self, step: int, best: int | None = None) -> None:
        """Wait for a save in progress, copy the state after `step` steps and start writing it.

        The checkpoint after step `best` is kept beside the newest ones.

        Raises `CheckpointError` on every rank if the earlier save failed.
        """
        begin_s = time.perf_counter()
        self.finish()
        # Work may still be queued on lanes and streams; the copy must see its results.
        self._engine.drain()
        self._snapshot.take()
        self._best = best
        self._folder, self._outcome, self._number = folder_of(self._run_folder, step), None, self._number + 1
        self._stalled_s = time.perf_counter() - begin_s
        self._thread = threading.Thread(target=self._save, args=(step,), name="checkpoint", daemon=True)
        self._thread.start()
        if not self._background:
            self.finish()
            # Without background saves the copy is needed for this save only.
            self._snapshot.release()

    def finish(self) -> None:
        """Wait for a save in progress. Raises `CheckpointError` on every rank if any rank could not write."""
        if self._thread.ident is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        problem = self.problem
        if problem is not None:
            raise CheckpointError(problem)

    @property
    def problem(self) -> str | None:
        """Error of the last save, once known; equal on every rank."""
        if self._error is not None:
            return f"{type(self._error).__name__}: {self._error}"
        return None if self._outcome in (None, _DONE) else not_written(self._folder, str(self._outcome))

    def news(self) -> Saved | None:
        """The next completed checkpoint not yet returned."""
        return self._finished.popleft() if self._finished else None

    def close(self) -> None:
        """Wait for a save in progress, and until all ranks know its outcome: this process may host the store.

        Raises as `finish` does.
        """
        try:
            self.finish()
        finally:
            # The rank that hosts the store ends last, or the others could not read the outcome.
            self._store.add("left", 1)
            if self._world.store_rank == self._world.rank:
                self._wait(lambda: self._store.add("left", 0) == self._world.world_size, _LEAVE_S)

    def _agree_on_life(self) -> str:
        # A new name, so that a restarted run does not mistake an earlier life's files for its own.
        if self._world.rank == 0:
            self._life = uuid.uuid4().hex[:8]
            problem = attempt(lambda: clear_leftovers(folder_of(self._run_folder, 0).parent))
            self._put("life", self._life if problem is None else f"!rank 0: {problem}")
        self._store.wait(["life"], timedelta(seconds=self._limit_s))
        life = self._text_of("life")
        if life.startswith("!"):
            raise CheckpointError(not_written(folder_of(self._run_folder, 0), life[1:]))
        return life

    def _put(self, key: str, text: str) -> None:
        self._store.set(key, self._seal.close(key, text))

    def _put_first(self, key: str, text: str) -> None:
        self._store.compare_set(key, "", self._seal.close(key, text))

    def _text_of(self, key: str) -> str:
        return self._seal.open(key, bytes(self._store.get(key)))

    def _save(self, step: int) -> None:
        # Runs in the thread: results and errors leave it through attributes only.
        begin_s, folder, number = time.perf_counter(), self._folder, self._number
        try:
            outcome = self._write(step, folder, number)
            if outcome == _DONE:
                write_s = time.perf_counter() - begin_s
                self._finished.append(
                    Saved(folder=folder, num_bytes=self.staging_bytes, stalled_s=self._stalled_s, write_s=write_s)
                )
            self._outcome = outcome
        except BaseException as error:
            self._error = error
            # If the store is gone, nobody waits for it.
            with suppress(RuntimeError):
                self._give_up(number, f"rank {self._world.rank}: {type(error).__name__}: {error}")

    def _give_up(self, number: int, problem: str) -> None:
        if self._world.rank == 0:
            self._put(f"{number}/outcome", problem)
        else:
            self._put_first(f"{number}/problem", problem)
            self._store.add(f"{number}/written", 1)

    def _write(self, step: int, folder: Path, number: int) -> str:
        partial, rank = partial_of(folder, self._life), self._world.rank
        problem = attempt(lambda: write_part(self._snapshot, partial, rank))
        if problem is not None:
            self._put_first(f"{number}/problem", f"rank {rank}: {problem}")
        self._store.add(f"{number}/written", 1)
        if rank == 0:
            self._put(f"{number}/outcome", self._join(step, folder, partial, number))
        else:
            self._wait(lambda: self._store.check([f"{number}/outcome"]), None)
        return self._text_of(f"{number}/outcome")

    def _join(self, step: int, folder: Path, partial: Path, number: int) -> str:
        count = self._world.world_size
        have_written = self._wait(lambda: self._store.add(f"{number}/written", 0) >= count, self._limit_s)
        if have_written:
            # Every rank has read the outcome of the save before; its keys would fill the store of a long run.
            for name in ("written", "problem", "outcome"):
                self._store.delete_key(f"{number - 1}/{name}")
        if not have_written:
            # A rank's list of pieces exists only after its part is on disk, so missing lists name the late ranks.
            absent = [rank for rank in range(count) if not part_of(partial, rank).exists()]
            problem: str | None = f"{in_words(absent)} had not written {self._limit_s:g} s after rank 0"
        elif self._store.check([f"{number}/problem"]):
            problem = self._text_of(f"{number}/problem")
        else:
            own = self._facts, self._keep, self._best
            problem = attempt(lambda: commit(self._engine.state, partial, folder, step, *own))
            problem = None if problem is None else f"rank 0: {problem}"
        if problem is not None:
            shutil.rmtree(partial, ignore_errors=True)
        return problem or _DONE

    def _wait(self, until: Callable[[], bool], limit_s: float | None) -> bool:
        begin_s, pause_s = time.monotonic(), _POLL_S
        while not until():
            if limit_s is not None and time.monotonic() - begin_s > limit_s:
                return False
            time.sleep(pause_s)
            # Fast polls for small checkpoints, rare ones for large worlds and slow disks.
            pause_s = min(self._longest_poll_s, pause_s * _POLL_GROWTH)
        return True


def _own_connection(store: Any) -> Any:
    # A store client serves one call at a time; one that cannot be cloned is shared with the main thread.
    try:
        return store.clone()
    except (AttributeError, NotImplementedError, dist.DistError, RuntimeError):
        return store
