"""A run as an island of a roster: it trains the windows that it is dealt, and exchanges after each (docs/elastic.md).

The island's own program, bytes and memory are those of a run without a roster; anchor, momentum and message lie beside
them. All ranks of an island call the methods at the same points.
"""

import hashlib
import json
import os
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from terrace.base.errors import ConfigError, TrainingError
from terrace.base.files import write_atomic
from terrace.base.foreign import read_text
from terrace.base.schema import dump, load
from terrace.base.words import counted
from terrace.comm.collectives import DTYPES
from terrace.data.feeding import Feeder
from terrace.launch.start import secret
from terrace.launch.stop import Stop, StopSignal, Vote
from terrace.launch.world import World
from terrace.plan.outer import Outer
from terrace.roster.entries import Attempted, Dealt, Terms
from terrace.roster.island import Island, Ranks
from terrace.roster.outer import RosterState
from terrace.train.config import RunConfig
from terrace.train.elastic_keys import address_of, default_name
from terrace.train.facts import facts_of
from terrace.train.hooks import Hook, StepDone
from terrace.train.job import RunJob
from terrace.train.micro_batches import MicroBatches, StepBatches
from terrace.train.run_folder import unusable

if TYPE_CHECKING:
    from terrace.train.rank import RankOfRun

OWN = "island.json"  # in a run folder
Make = Callable[[int], StepBatches]
Stretches = Generator[tuple[range, Feeder[StepBatches]], None, None]


class Alone(Hook):
    """A run without a roster: one stretch of steps, and a vote of all ranks on an early stop."""

    def vote(self, world: World, signal: StopSignal, outer: Outer) -> Vote:
        return Vote(world, signal, interval=outer.interval, delay=outer.delay)

    def join(self, first_step: int) -> int:
        """Join the roster. Returns the first step of this run."""
        return first_step

    def stretches(self, made: MicroBatches, make: Make, steps: range, save_last: Callable[[], None]) -> Stretches:
        """The steps of this run, in stretches, each with its batches. `save_last` saves the state after all steps."""
        # Closed on any error too: its thread would go on reading data.
        with closing(Feeder(make, steps.start, steps.stop)) as feeder:
            yield steps, feeder


class Meeting(Alone):
    """One rank of an island. `stretches` yields a stretch for each window that is dealt to it."""

    def __init__(self, rank: "RankOfRun", signal: StopSignal) -> None:
        run, engine, elastic = rank.run, rank.engine, rank.run.elastic
        self._rank, self._elastic, self._stops = rank, elastic, Vote(rank.world, signal)
        flats = [flat for flat in engine.state if flat.spec.trainable]
        self.state = RosterState(elastic.outer, [flat.optimizer.master for flat in flats], DTYPES[run.plan.sums])
        engine.comm.meter.add("outer", self.state.nbytes)
        self._island = Island(
            elastic.island or default_name(os.getpid()),
            address_of(elastic.meet),
            secret().within("roster"),
            terms_of(run),
            island_facts(rank.job),
            rank.reporter.faults.kept(self.state),
            ranks=Ranks(rank=rank.world.rank, gather=engine.comm.exchange),
            applied=self._applied,
            lost_s=run.train.timeout_s,
            say=rank.observer.note,
        )
        self._tokens, self._last = 0, -1
        self._deal: Dealt | None = None

    def vote(self, world: World, signal: StopSignal, outer: Outer) -> Vote:
        """A vote that no signal decides: an island leaves after an exchange (`stepped`)."""
        return Vote(world, StopSignal(()), interval=self._elastic.every, asks_outside=False)

    def join(self, first_step: int) -> int:
        """Join the roster, and wait for the first window. Raises `ConfigError` if the roster refuses this island."""
        assert not first_step, "islands are not resumed"
        self._rank.dog.idle("joining the roster")
        self._rank.observer.note(f"island {self._island.name} joins the roster at {self._elastic.meet}")
        if self._island.token:
            write_own(self._rank.job.folder, Own(island=self._island.name, token=self._island.token))
        self._rank.reporter.faults.joins()
        self._deal = self._island.join()
        if self._deal is None:
            raise TrainingError("the roster was finished before a window was dealt to this island: nothing was trained")
        return self._deal.first

    def stretches(self, made: MicroBatches, make: Make, steps: range, save_last: Callable[[], None]) -> Stretches:
        layout = self._rank.engine.program.layout
        degree, place = layout.data_degree, layout.data_rank(self._rank.world.rank)
        while (deal := self._deal) is not None:
            names = sorted(deal.shares)
            first = names.index(self._island.name) * degree
            made.deal(first + place, len(names) * degree, tuple(deal.shares[name] for name in names))
            self._rank.engine.take_share(deal.shares[self._island.name])
            window = range(deal.first, deal.last + 1)
            with closing(Feeder(make, window.start, window.stop)) as feeder:
                yield window, feeder
            self._last = deal.last
        if self._last != steps.stop - 1:
            save_last()  # other islands trained the last window

    def stepped(self, done: StepDone) -> None:
        if done.problem is not None:
            return  # the run ends
        self._tokens += done.result.num_tokens
        assert self._deal is not None, "steps are of a window"
        if done.step < self._deal.last:
            return
        engine = self._rank.engine
        engine.drain()
        self._rank.dog.idle("meeting the other islands")
        self._rank.reporter.faults.meets(self._deal.window)
        name = next(filter(None, engine.comm.exchange(self._stops.requested() or "")), "")
        self._deal = self._island.meet(self._tokens, leaves=bool(name))
        self._tokens = 0
        if name:
            done.stop = Stop(step=done.number, why="signal", text=name)

    def ended(self) -> None:
        self._island.close()

    def failed(self) -> None:
        self._island.close()

    def _applied(self, attempt: Attempted) -> None:
        self._rank.engine.refresh()
        again = f", attempt {attempt.attempt + 1}" * bool(attempt.attempt)
        tokens = sum(each.tokens for each in attempt.islands.values())
        self._rank.observer.note(
            f"exchange {attempt.exchange}{again}: {counted(len(attempt.islands), 'island')} "
            f"({', '.join(attempt.islands)}), {tokens} tokens"
        )


@dataclass(frozen=True, kw_only=True)
class Own:
    """Which island a run folder is of: its name, and the token by which the log of its roster knows the process."""

    island: str
    token: str


def write_own(folder: Path, own: Own) -> None:
    """Write `island.json`. Raises `ConfigError` if the folder cannot be written."""
    try:
        write_atomic(folder / OWN, json.dumps(dump(own)) + "\n")
    except OSError as error:
        raise unusable(folder, error) from error


def read_own(folder: Path) -> Own:
    """The island that wrote this run folder. Raises `ConfigError` if none did, or for a damaged file."""
    try:
        return load(Own, json.loads(read_text(folder / OWN, folder)), OWN)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {folder / OWN} ({error}): give run folders of islands that trained") from error


def terms_of(run: RunConfig) -> Terms:
    elastic = run.elastic
    return Terms(every=elastic.every, steps=run.train.steps, rounds=run.num_micros(), patience_s=elastic.patience_s)


def island_facts(job: RunJob) -> dict[str, str]:
    """Digests of all that must be the same on every island, by name."""
    run = job.run
    outer = run.elastic.outer
    found = {
        **facts_of(job, None),
        "plan": dump(run.plan),
        "number of ranks": run.cluster.world_size,
        "optimizer": dump(run.optimizer),
        "outer step": [outer.optimizer, outer.rate, outer.beta],
        "schedule": [run.train.schedule, run.train.warmup_steps, run.train.final_lr_fraction],
    }
    texts = {name: json.dumps(value, sort_keys=True, default=str) for name, value in found.items()}
    return {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in texts.items()}


def meeting_of(rank: "RankOfRun", signal: StopSignal) -> Alone:
    """What a run does about other islands: nothing without a roster."""
    return Meeting(rank, signal) if rank.run.elastic.meet else Alone()
