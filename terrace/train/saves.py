"""The checkpoints of a run as its loop makes them, and the news of those that are complete."""

from terrace.checkpoint.saved import Saved
from terrace.checkpoint.saving import Saver
from terrace.launch.watchdog import Watchdog
from terrace.launch.world import World
from terrace.runtime.engine import Engine
from terrace.sequence.cost import WorkCost
from terrace.train.facts import facts_of
from terrace.train.job import RunJob
from terrace.train.metrics import NUM_SAVES, Observer

_PATIENCE = 10  # timeouts that rank 0 waits for files of others


class Saves:
    """Every rank calls the methods at the same points; `newest` are the last `NUM_SAVES` complete checkpoints."""

    def __init__(
        self, engine: Engine, world: World, job: RunJob, cost: WorkCost | None, dog: Watchdog, observer: Observer
    ) -> None:
        train = job.run.train
        self._engine, self._dog, self._observer, self.newest = engine, dog, observer, tuple[Saved, ...]()
        self._saver = Saver(
            engine,
            world,
            job.folder,
            facts_of(job, cost),
            train.keep_checkpoints,
            background=train.background_save,
            limit_s=_PATIENCE * train.timeout_s,
        )
        beside = "is written beside the steps" if train.background_save else "is waited for"
        # Checkpoints are copied to main memory first, which the user must have room for.
        staged_mb = self._saver.staging_bytes / 1e6
        self.words = f"a checkpoint takes {staged_mb:.3g} MB of this rank's main memory while it {beside}"

    @property
    def problem(self) -> str | None:
        """Error of the last save, once known; the same on every rank."""
        return self._saver.problem

    def save(self, step: int, best: int | None = None) -> None:
        """Begin a checkpoint after `step` steps; that after step `best` stays, however old it is."""
        self._dog.idle("saving a checkpoint")
        if self._saver.is_under_way:
            self._observer.note(f"step {step}: waiting for the checkpoint before, which is still being written")
        self._saver.start(step, best)
        self.tell()
        self._engine.check_bytes()

    def finish(self) -> None:
        """Wait for a save under way. Raises `CheckpointError` on every rank if any rank could not write."""
        self._dog.idle("finishing a checkpoint")
        self._saver.finish()
        self.tell()

    def tell(self) -> None:
        """Pass the news on: background saves finish at any time."""
        while (saved := self._saver.news()) is not None:
            self.newest = (*self.newest, saved)[-NUM_SAVES:]
            self._observer.saved(saved.folder)

    def close(self) -> None:
        """Wait for a save under way, and until the other ranks know its outcome."""
        self._saver.close()
