"""Background saves: the state is copied at the end of a step, and a thread writes the copy.

    main thread    ... step 100 | copy | step 101 | step 102 | ...          | copy |
    its thread                         | write, checksum, sync | commit |

Ranks agree on a commit through keys of the store, so a save sends no message between those of a step. Each rank
increments a counter when its part is on disk; rank 0 waits for the counter, joins the parts and renames the folder. A
rank that cannot write publishes the reason; the folder is then removed and every rank raises the error. Only one save
runs at a time: if the next is due before it has completed, training waits.
"""

import math
import shutil
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from terrace.base.errors import CheckpointError
from terrace.checkpoint.layout import folder_of
from terrace.checkpoint.residuals import num_bytes
from terrace.checkpoint.saved import Saved
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


class SaveBoard:
    """Reports of all ranks about saves, in the store of the world: who has written, problems, outcomes.

    `life` is a new name for this start of the run, so that a restarted run does not mistake earlier files for its own.
    """

    def __init__(self, world: World, run_folder: Path, limit_s: float) -> None:
        """Agree on `life` with all ranks. Raises `CheckpointError` on every rank if rank 0 cannot clear left-overs."""
        self.world, self._limit_s = world, limit_s
        self._store, self._seal = PrefixStore("saves", _own_connection(world.store)), world.seal.within("saves")
        self._longest_poll_s = max(_LONGEST_POLL_S, world.world_size / _MAX_POLLS_PER_S)
        if world.rank == 0:
            life = uuid.uuid4().hex[:8]
            problem = attempt(lambda: clear_leftovers(folder_of(run_folder, 0).parent))
            self._put("life", f"!rank 0: {problem}" if problem else life)
        self._store.wait(["life"], timedelta(seconds=limit_s))
        self.life = self._text_of("life")
        if self.life.startswith("!"):
            raise CheckpointError(not_written(folder_of(run_folder, 0), self.life[1:]))

    def report(self, number: int, problem: str) -> None:
        """Report this rank's problem in save `number`; the first one reported counts."""
        self._store.compare_set(f"{number}/problem", "", self._seal.close(f"{number}/problem", problem))

    def has_written(self, number: int) -> None:
        """Report that this rank has done its part of save `number`."""
        self._store.add(f"{number}/written", 1)

    def wait_for_parts(self, number: int) -> bool:
        """Wait until all ranks have done their parts. Returns whether they have, in time."""
        count = self.world.world_size
        have_written = self._wait(lambda: self._store.add(f"{number}/written", 0) >= count, self._limit_s)
        if have_written:
            # Every rank has read the outcome of the save before; its keys would fill the store of a long run.
            for name in ("written", "problem", "outcome"):
                self._store.delete_key(f"{number - 1}/{name}")
        return have_written

    def problem(self, number: int) -> str:
        return self._text_of(f"{number}/problem") if self._store.check([f"{number}/problem"]) else ""

    def conclude(self, number: int, outcome: str) -> None:
        """Tell all ranks how save `number` ended. Rank 0 calls this."""
        self._put(f"{number}/outcome", outcome)

    def outcome(self, number: int) -> str:
        """How save `number` ended, once rank 0 has concluded it."""
        self._wait(lambda: self._store.check([f"{number}/outcome"]), math.inf)
        return self._text_of(f"{number}/outcome")

    def leave(self) -> None:
        """Wait, on the rank that hosts the store, until all ranks have left: they may still read an outcome."""
        self._store.add("left", 1)
        if self.world.store_rank == self.world.rank:
            self._wait(lambda: self._store.add("left", 0) == self.world.world_size, _LEAVE_S)

    def _put(self, key: str, text: str) -> None:
        self._store.set(key, self._seal.close(key, text))

    def _text_of(self, key: str) -> str:
        return self._seal.open(key, bytes(self._store.get(key)))

    def _wait(self, until: Callable[[], bool], limit_s: float) -> bool:
        begin_s, pause_s = time.monotonic(), _POLL_S
        while not until():
            if time.monotonic() - begin_s > limit_s:
                return False
            time.sleep(pause_s)
            # Fast polls for small checkpoints, rare ones for large worlds and slow disks.
            pause_s = min(self._longest_poll_s, pause_s * _POLL_GROWTH)
        return True


@dataclass
class _Save:
    """A save under way, whose thread sets `outcome` or `error` at its end."""

    number: int
    step: int
    folder: Path
    best: int  # the step of a checkpoint that is kept beside the newest ones; -1: none
    stalled_s: float = 0.0
    outcome: str = _DONE
    error: BaseException | None = None

    @property
    def problem(self) -> str:
        if self.error is not None:
            return f"{type(self.error).__name__}: {self.error}"
        return "" if self.outcome == _DONE else not_written(self.folder, self.outcome)


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
        self._engine, self._run_folder, self._background = engine, run_folder, background
        self._commit = partial(commit, engine.state, facts=facts, keep=keep)
        self._late = f"{limit_s:g} s after rank 0"
        self._snapshot = snapshot_of(engine.state)
        self.staging_bytes = self._snapshot.num_bytes + num_bytes(engine.program, engine.state)  # of residuals, later
        self._save, self._thread = _Save(0, 0, run_folder, -1), threading.Thread()
        self._finished = deque[Saved]()  # appended by the thread
        self._board = SaveBoard(world, run_folder, limit_s)

    @property
    def is_under_way(self) -> bool:
        return self._thread.is_alive()

    def start(self, step: int, best: int = -1) -> None:
        """Wait for a save in progress, copy the state after `step` steps and start writing it.

        The checkpoint after step `best` is kept beside the newest ones.

        Raises `CheckpointError` on every rank if the earlier save failed.
        """
        begin_s = time.perf_counter()
        self.finish()
        # Work may still be queued on lanes and streams; the copy must see its results.
        self._engine.drain()
        self._snapshot.take()
        self._save = _Save(self._save.number + 1, step, folder_of(self._run_folder, step), best)
        self._save.stalled_s = time.perf_counter() - begin_s
        self._thread = threading.Thread(target=self._run, args=(self._save,), name="checkpoint", daemon=True)
        self._thread.start()
        if not self._background:
            self.finish()
            # Without background saves the copy is needed for this save only.
            self._snapshot.release()

    def finish(self) -> None:
        """Wait for a save in progress. Raises `CheckpointError` on every rank if any rank could not write."""
        if self._thread.ident is not None:
            self._thread.join()
        if self._save.error is not None:
            raise self._save.error
        if self.problem:
            raise CheckpointError(self.problem)

    @property
    def problem(self) -> str:
        """Error of the last save, once known, else ""; equal on every rank."""
        return self._save.problem

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
            self._board.leave()

    def _run(self, save: _Save) -> None:
        # Runs in the thread: results and errors leave it through the save alone.
        begin_s, rank = time.perf_counter(), self._board.world.rank
        try:
            outcome = self._write(save)
            if outcome == _DONE:
                write_s = time.perf_counter() - begin_s
                saved = Saved(
                    folder=save.folder, num_bytes=self.staging_bytes, stalled_s=save.stalled_s, write_s=write_s
                )
                self._finished.append(saved)
            save.outcome = outcome
        except BaseException as error:
            save.error = error
            problem = f"rank {rank}: {type(error).__name__}: {error}"
            # If the store is gone, nobody waits for it.
            with suppress(RuntimeError):
                if rank == 0:
                    self._board.conclude(save.number, problem)
                else:
                    self._board.report(save.number, problem)
                    self._board.has_written(save.number)

    def _write(self, save: _Save) -> str:
        board, rank = self._board, self._board.world.rank
        partial_folder = partial_of(save.folder, board.life)
        problem = attempt(lambda: write_part(self._snapshot, partial_folder, rank))
        if problem:
            board.report(save.number, f"rank {rank}: {problem}")
        board.has_written(save.number)
        if rank == 0:
            board.conclude(save.number, self._join(save, partial_folder))
        return board.outcome(save.number)

    def _join(self, save: _Save, partial_folder: Path) -> str:
        board = self._board
        if not board.wait_for_parts(save.number):
            # A rank's list of pieces exists only after its part is on disk, so missing lists name the late ranks.
            ranks = range(board.world.world_size)
            absent = [rank for rank in ranks if not part_of(partial_folder, rank).exists()]
            problem = f"{in_words(absent)} had not written {self._late}"
        elif not (problem := board.problem(save.number)):
            problem = attempt(lambda: self._commit(partial_folder, save.folder, save.step, best=save.best))
            problem = problem and f"rank 0: {problem}"
        if problem:
            shutil.rmtree(partial_folder, ignore_errors=True)
        return problem or _DONE


def _own_connection(store: Any) -> Any:
    # A store client serves one call at a time; one that cannot be cloned is shared with the main thread.
    try:
        return store.clone()
    except (AttributeError, NotImplementedError, dist.DistError, RuntimeError):
        return store
