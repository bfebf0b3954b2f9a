"""Slow ranks of a run, reported as they are found (terrace.launch.slow)."""

from terrace.launch.postmortem import in_words
from terrace.launch.slow import in_lines
from terrace.launch.watchdog import Watchdog
from terrace.program.program import Program
from terrace.runtime.step_sums import StepResult
from terrace.train.keys import TrainConfig
from terrace.train.metrics import Observer, own_seconds


class SlowRanks:
    """Tells the watchdog of each step, and the observer of ranks that have become slow or fast again."""

    def __init__(self, dog: Watchdog, program: Program, train: TrainConfig, observer: Observer) -> None:
        self._dog, self._train, self._observer = dog, train, observer
        self._known = frozenset[int]()
        ranks, mesh = range(program.cluster.world_size), program.mesh
        # Ranks of one stage compute the same.
        peers = [[rank for rank in ranks if mesh.stage(rank) == each] for each in range(program.stage.num_stages)]
        if train.slow_factor:
            dog.look_for_slow(peers, train.slow_factor, train.slow_steps)

    @property
    def factors(self) -> dict[str, float]:
        """Slow rank -> its own time over that of its fast peers, or of the first steps; empty but on rank 0."""
        return {str(each.rank): round(each.factor, 2) for each in self._dog.slow}

    @property
    def slowest(self) -> dict[str, float]:
        """`rank` with the most own work in the last steps, and its seconds `own_s`; empty on ranks other than 0."""
        found = self._dog.slowest
        return {} if found is None else {"rank": found[0], "own_s": found[1]}

    def stepped(self, result: StepResult, data_s: float, step_s: float) -> None:
        self._dog.stepped(data_s + own_seconds(result.time_s), step_s)
        slow = self._dog.slow
        for line in in_lines([each for each in slow if each.rank not in self._known], self._train.slow_steps):
            self._observer.note(line)
        ranks = frozenset(each.rank for each in slow)
        if again := self._known - ranks:
            self._observer.note(f"no longer slow: {in_words(again)}")
        self._known = ranks
