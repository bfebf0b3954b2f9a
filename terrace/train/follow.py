"""A run that follows its cluster: measured speeds of members beside those that its shares were dealt for.

The speed of a member is that of its forwards and backwards: the predicted seconds of its micro-batches over the
measured ones, the median of the last `train.slow_steps` steps. After as many steps all ranks exchange their medians. If
speeds have changed by more than `BAND` between members, rank 0 deals the same micro-batches by the new speeds and
predicts a step with both. Under `train.follow` the new shares hold from the first step whose batches are not made yet;
else a line says how long a step would take with them. All members hold the same states, so no state moves and no rank
restarts. All ranks wait while rank 0 predicts, so comparisons are far enough apart to take 2 % of the run at most.

Steps that a resumed run repeats have the shares that they had (terrace.train.deals): nothing is measured in them.
"""

import math
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terrace.base.errors import PlanError, TrainingError
from terrace.base.words import seconds as in_seconds
from terrace.cluster.cluster import Cluster
from terrace.cluster.members import Member
from terrace.data.feeding import MADE_AHEAD
from terrace.plan.members import check_new_shares, num_micros_of
from terrace.simulate.members import member_step
from terrace.simulate.step import Step, predict_alike
from terrace.train.deals import DEALS, Dealt
from terrace.train.hooks import Hook, StepDone
from terrace.train.metrics import read_metrics
from terrace.train.prediction import step_of

if TYPE_CHECKING:
    from terrace.train.rank import RankOfRun

BAND = 0.1  # of speeds between members, by which two measurements of the same members may differ: a guess
WORTH_IT = 0.05  # fraction of a step by which other shares must shorten it
_GRID = 0.02  # step of simulated speeds, by ratio, so that members of one machine type stay alike
_MOST_KINDS = 16  # simulated speeds: for more, the grid is made coarser, since each one takes as long as a search
_MOST_COMPARING = 0.02  # fraction of a run that its comparisons may take
_COMPUTING = ("forward", "backward")
Played = dict[tuple[Cluster, int], Sequence[Mapping[str, float]]]  # seconds by stage, of members alike and their share


def computing_s(time_s: Mapping[str, float]) -> float:
    return sum(time_s.get(name, 0.0) for name in _COMPUTING)


def speeds_of(step: Step, measured_s: Sequence[float], played: Played) -> list[float]:
    """Speeds of members over those of `step`'s cluster. `measured_s` are seconds of a micro-batch by rank.

    A member is as fast as its slowest rank. `played` has the predictions of earlier calls for the same run, and gets
    those of this one.
    """
    cluster, mesh = step.cluster, step.model.mesh
    size, found = cluster.tiers[-1].size, list[float]()
    for member in range(size):
        own = member_step(step, member)
        kind = own.cluster, own.num_micros
        if kind not in played:
            played[kind] = predict_alike(own).times_s
        times_s = played[kind]
        ranks = [rank for rank in range(cluster.world_size) if cluster.coordinates(rank)[-1] == member]
        found.append(min(computing_s(times_s[mesh.stage(rank)]) / own.num_micros / measured_s[rank] for rank in ranks))
    return found


def with_speeds(cluster: Cluster, speeds: Sequence[float]) -> Cluster:
    """The cluster with each member `speeds` times as fast, of `_MOST_KINDS` speeds at most."""
    tier, grid, logs = cluster.tiers[-1], _GRID, [math.log(each) for each in speeds]
    while len({round(each / grid) for each in logs}) > _MOST_KINDS:
        grid *= 1.25
    own = [replace(each, count=1) for each in tier.members or (Member(count=tier.size),) for _ in range(each.count)]
    members = tuple(
        replace(each, speed=each.speed * math.exp(grid * round(log / grid)))
        for each, log in zip(own, logs, strict=True)
    )
    return replace(cluster, tiers=(*cluster.tiers[:-1], replace(tier, members=members)))


def steps_apart(took_s: float, step_s: float) -> int:
    """Steps from a comparison that took `took_s` to the next: comparisons take `_MOST_COMPARING` of a run at most."""
    return math.ceil(took_s / (_MOST_COMPARING * step_s))


def speeds_words(speeds: Sequence[float]) -> str:
    """A line on the members whose speeds fell and rose most."""
    slow, fast = min(speeds), max(speeds)
    return (
        f"member {speeds.index(slow)} computes at {slow:.2f} times the speed that shares were dealt for, member "
        f"{speeds.index(fast)} at {fast:.2f} times"
    )


class Following(Hook):
    """Measures the speeds of members, and deals shares anew or says how long a step would take with new ones.

    It measures nothing if the plan has no shares, or cannot have others.
    """

    def __init__(self, rank: "RankOfRun", cluster: Cluster, first_step: int) -> None:
        self._rank, self._at_start, self._cluster = rank, cluster, cluster
        self._measured_s = deque[float](maxlen=rank.run.train.slow_steps)
        self._steps_s = deque[float](maxlen=rank.run.train.slow_steps)
        self._compares = self._may()
        self._said: tuple[int, ...] = ()
        self._played = Played()
        self._known_until = first_step
        if self._compares and rank.job.resume is not None:
            self._known_until = self._rank.engine.comm.exchange(self._last_step(rank.job.folder))[0]

    def _may(self) -> bool:
        return _may_deal(self._rank)

    def begin(self) -> None:
        if self._rank.job.resume is not None:
            _check_alike(self._rank)
        # A resume may have changed some deals of the file; a run that starts anew removes those of an earlier run.
        if self._rank.deals.dealt or (self._rank.job.folder / DEALS).exists():
            self._write()

    def before(self, step: int) -> None:
        if self._rank.deal(step):
            self._measured_s.clear()

    def stepped(self, done: StepDone) -> None:
        rank, program = self._rank, self._rank.engine.program
        if not self._compares or done.problem is not None:
            return
        micros = num_micros_of(program.cluster, program.plan, rank.engine.rank, program.num_micros)
        self._measured_s.append(computing_s(done.result.time_s) / micros)
        self._steps_s.append(time.perf_counter() - done.started_s)
        # Islands compare where all of them exchange.
        if len(self._measured_s) == self._measured_s.maxlen and not done.number % rank.run.plan.outer.every:
            if done.number >= self._known_until:
                self._compare(done.number)
            self._measured_s.clear()

    def _compare(self, number: int) -> None:
        rank = self._rank
        rank.dog.idle("comparing the speeds of members")
        every = rank.engine.comm.exchange(statistics.median(self._measured_s))
        begin_s = time.perf_counter()
        found = self._found(every) if rank.engine.rank == 0 else None
        apart = steps_apart(time.perf_counter() - begin_s, statistics.median(self._steps_s))
        found, apart = rank.engine.comm.exchange((found, apart))[0]
        self._known_until = max(self._known_until, number + apart)
        if found is None:
            return
        shares, now_s, dealt_s = tuple(found["shares"]), found["now_s"], found["dealt_s"]
        own = list(rank.engine.program.plan.shares)
        first, words = number + MADE_AHEAD, speeds_words(found["speeds"])
        brings = f"a step takes {in_seconds(dealt_s)}, and {in_seconds(now_s)} with {own} (predicted)"
        if not rank.run.train.follow:
            if not self._said or max(abs(new - old) for new, old in zip(shares, self._said, strict=True)) > 1:
                self._said = shares
                rank.observer.note(
                    f"{words}; with shares = {list(shares)} {brings}: set train.follow = true, or resume with "
                    f'--plan.shares "{list(shares)}"'
                )
        elif first < rank.run.train.steps:
            self._cluster = with_speeds(self._cluster, found["speeds"])
            rank.deals.add(Dealt(step=first, shares=shares, predicted_s=dealt_s))
            self._write()
            self._known_until = max(self._known_until, first)
            rank.observer.note(f"{words}; with shares = {list(shares)}, from step {first + 1} on, {brings}")

    def _found(self, measured_s: Sequence[float]) -> dict[str, Any] | None:
        # Only the rank that deals needs the planner.
        from terrace.planner.members import dealt_anew

        plan = self._rank.engine.program.plan
        step = replace(
            step_of(self._rank.run, self._at_start), cluster=self._cluster, plan=plan, num_micros=max(plan.shares)
        )
        speeds = speeds_of(step, measured_s, self._played)
        if max(speeds) / min(speeds) <= 1 + BAND:
            return None
        shares, now_s, dealt_s = dealt_anew(replace(step, cluster=with_speeds(step.cluster, speeds)))
        if dealt_s > (1 - WORTH_IT) * now_s:
            return None
        return {"speeds": speeds, "shares": shares, "now_s": now_s, "dealt_s": dealt_s}

    def _last_step(self, folder: Path) -> int:
        # The last step with fixed shares: of the metrics of the earlier start, or of its deals.
        dealt = max((each.step for each in self._rank.deals.dealt), default=0)
        path = folder / "metrics.jsonl"
        if self._rank.engine.rank or not path.is_file():
            return dealt
        return max([dealt, *(record.step for record in read_metrics(path))])

    def _write(self) -> None:
        if self._rank.engine.rank:
            return
        try:
            self._rank.deals.write(self._rank.job.folder)
        except OSError as error:
            raise TrainingError(f"cannot write the shares of {self._rank.job.folder}: {error.strerror}") from error


def _check_alike(rank: "RankOfRun") -> None:
    """Raises `TrainingError` on every rank if their records of deals differ: their messages would not match."""
    records = rank.engine.comm.exchange([[each.step, each.shares, dict(each.formats)] for each in rank.deals.dealt])
    other = next((number for number, each in enumerate(records) if each != records[0]), None)
    if other is not None:
        raise TrainingError(
            f"rank {other} resumes with other deals than rank 0: {records[other]} and {records[0]}, as [step, shares, "
            f"formats]; copy {DEALS} of the run folder from rank 0's machine to all, and resume again"
        )


def _may_deal(rank: "RankOfRun") -> bool:
    run = rank.run
    if run.on_pairs or rank.engine.comm.context_group is not None:
        return False
    try:
        check_new_shares(run.cluster, run.plan, run.layout, "train.follow = true")
    except PlanError:
        return False
    return True
