"""Reports each step to the watchdog, and tells of ranks that have become slow or fast again (terrace.launch.slow)."""

from collections import defaultdict
from typing import TYPE_CHECKING

from terrace.launch.postmortem import in_words
from terrace.launch.slow import in_lines
from terrace.plan.members import num_micros_of
from terrace.train.hooks import Hook, StepDone
from terrace.train.metrics import own_seconds

if TYPE_CHECKING:
    from terrace.train.rank import RankOfRun


class SlowRanks(Hook):
    """Adds the slow ranks of the steps before to a step's figures, on rank 0."""

    def __init__(self, rank: "RankOfRun") -> None:
        self._dog, self._train, self._observer = rank.dog, rank.run.train, rank.observer
        self._known = frozenset[int]()
        self._engine, self._shares = rank.engine, rank.engine.program.plan.shares
        self._compare()

    def before(self, step: int) -> None:
        if self._shares != self._engine.program.plan.shares:  # dealt anew
            self._shares = self._engine.program.plan.shares
            self._compare()

    def _compare(self) -> None:
        program, peers = self._engine.program, defaultdict[tuple[int, int], list[int]](list)
        for each in range(program.cluster.world_size):
            # Ranks of one stage compute the same, if their members have equal shares.
            micros = num_micros_of(program.cluster, program.plan, each, program.num_micros)
            peers[program.mesh.stage(each), micros].append(each)
        if self._train.slow_factor:
            self._dog.look_for_slow(list(peers.values()), self._train.slow_factor, self._train.slow_steps)

    def stepped(self, done: StepDone) -> None:
        lookout = self._dog.lookout
        # Rank -> its own time over that of its fast peers, or of the first steps; empty on ranks other than 0.
        done.figures["slow_ranks"] = {str(each.rank): round(each.factor, 2) for each in lookout.slow}
        slowest = lookout.slowest
        done.figures["slowest"] = {} if slowest is None else {"rank": slowest[0], "own_s": slowest[1]}
        self._dog.stepped(done.data_s + own_seconds(done.result.time_s), done.figures["step_s"])
        slow = self._dog.lookout.slow
        for line in in_lines([each for each in slow if each.rank not in self._known], self._train.slow_steps):
            self._observer.note(line)
        ranks = frozenset(each.rank for each in slow)
        if again := self._known - ranks:
            self._observer.note(f"no longer slow: {in_words(again)}")
        self._known = ranks
