"""Rosters of islands that train a real model, with faults, repeated from their logs by `terrace replay`."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore

from terrace.base.errors import ConfigError, TrainingError
from terrace.launch.seal import Seal
from terrace.launch.watchdog import watch
from terrace.launch.world import World
from terrace.roster.entries import Committed, Dealt, Joined, entry_of
from terrace.roster.place import read_log
from terrace.roster.state import folded
from terrace.train.job import RunJob
from terrace.train.meeting import island_facts, terms_of
from terrace.train.metrics import Silent, StepRecord
from terrace.train.one_process import EXACT, Repeated, Written
from terrace.train.prepare import prepare
from terrace.train.rank import RankOfRun
from terrace.train.resolve import resolve
from terrace.train.roster_replay import replay_islands
from terrace.train.schedule import learning_rate
from tests.support.nightly import nightly
from tests.support.roster_islands import LR, MOMENTUM, Fault, Ran, history, run_all
from tests.support.tiny_runs import write_run


def alone() -> World:
    return World(0, 1, 0, 1, HashStore(), seal=Seal(b"0123456789abcdef0123456789abcdef", "the test"))


class Real:
    """A run's model, data and optimizer as an island of one rank, and the figures of its steps."""

    def __init__(self, job: RunJob) -> None:
        dog = watch(alone(), timeout_s=60.0)
        self._rank, self.facts = RankOfRun(alone(), job, Silent(), dog), island_facts(job)
        self.slices = [flat.optimizer.master for flat in self._rank.engine.state if flat.spec.trainable]
        self.written = Written()

    def train(self, name: str, deal: Dealt) -> int:
        rank, run, names = self._rank, self._rank.run, sorted(deal.shares)
        made = rank.micro_batches(rank.batches, None)
        made.deal(names.index(name), len(names), tuple(deal.shares[each] for each in names))
        rank.engine.take_share(deal.shares[name])
        tokens = 0
        for step in range(deal.first, deal.last + 1):
            rate = learning_rate(step, run.train, run.optimizer)
            result = rank.engine.step(made.step(step).micros, rate)
            tokens += result.num_tokens
            self.written.records[step + 1] = StepRecord(
                step=step + 1,
                loss=result.loss,
                grad_norm=result.grad_norm,
                learning_rate=rate,
                num_tokens=result.num_tokens,
                step_s=1.0,
                tokens_per_s=1.0,
                time_s={},
            )
        return tokens

    def applied(self) -> None:
        self._rank.engine.refresh()


def job_of(folder: Path) -> RunJob:
    write_run(folder, 1, plan="ddp", steps=10, batch=6)
    elastic = {"meet": "localhost:1", "every": 2, "lr": LR, "momentum": MOMENTUM, "patience_s": 4.0}
    exact = {"plan": {"compute": "fp64", "master": "fp64"}, "elastic": elastic}
    return prepare(resolve(str(folder / "run.toml"), {}, exact), folder / "run", None, say=lambda words: None)


def ran(
    folder: Path, faults: dict[str, tuple[Fault, ...]], late_s: dict[str, float], pace_s: float = 0.2
) -> tuple[RunJob, dict[str, Ran], dict[str, Written]]:
    """Islands with these faults: their job, how they ended, and the figures of their steps."""
    job, made = job_of(folder), dict[str, Real]()

    def make(name: str) -> Real:
        made[name] = Real(job)
        return made[name]

    wait_for = len(faults) - sum(late > 0 for late in late_s.values())
    found, _ = run_all(folder / "roster.jsonl", terms_of(job.run), faults, late_s, wait_for, pace_s, make)
    return job, found, {name: each.written for name, each in made.items()}


def repeated(folder: Path, job: RunJob, written: dict[str, Written]) -> list[Repeated]:
    return replay_islands(alone(), job, read_log(folder / "roster.jsonl"), written)


@pytest.mark.parametrize("seed", [2, *nightly(*(each for each in range(20) if each != 2))])
def test_a_random_history_of_four_islands_is_repeated_to_the_same_figures(tmp_path: Path, seed: int) -> None:
    faults, late_s = history(seed)
    job, found, written = ran(tmp_path, faults, late_s)
    again = repeated(tmp_path, job, written)
    entries = read_log(tmp_path / "roster.jsonl")
    assert len(again) == sum(isinstance(entry, Committed) for entry in entries) >= 5
    assert [each.wrong for each in again] == [""] * len(again)
    # Of each step a loss and a norm.
    assert sum(each.compared for each in again) >= 2 * len(written["a"].records) > 10
    survivors = [each.name for each in folded(entries).members]
    assert "a" in survivors
    assert {found[name].anchor.tobytes() for name in survivors} == {found["a"].anchor.tobytes()}


def test_an_island_that_was_frozen_goes_on_with_its_own_optimizer(tmp_path: Path) -> None:
    """Its lost window is repeated, too, though no exchange took it."""
    frozen = Fault(kind="freeze", window=0, seconds=4.5)
    job, _, written = ran(tmp_path, {"a": (), "b": (frozen,)}, {}, 0.6)
    entries = read_log(tmp_path / "roster.jsonl")
    assert [entry.trained for entry in entries if isinstance(entry, Joined)] == [-1, -1, 0]
    again = repeated(tmp_path, job, written)
    assert max(each.gap for each in again) < EXACT
    assert [each.who for each in again].count("a, b") >= 1


def test_what_differs_is_named_with_its_exchange(tmp_path: Path) -> None:
    job, _, written = ran(tmp_path, {"a": (), "b": ()}, {})
    records = written["b"].records
    records[6] = replace(records[6], loss=records[6].loss + 1e-9)
    again = repeated(tmp_path, job, written)
    (wrong,) = [each for each in again if each.wrong]
    assert (wrong.number, wrong.first, wrong.last) == (2, 5, 6)
    assert "island 'b', step 6: loss" in wrong.wrong
    # Of another run, or of other data.
    other = replace(job, run=replace(job.run, train=replace(job.run.train, seed=7)))
    with pytest.raises(ConfigError, match="another seed than the log"):
        repeated(tmp_path, other, written)
    entries = [entry_of(changed(line), "here") for line in lines(tmp_path)]
    with pytest.raises(TrainingError, match="the data differ"):
        replay_islands(alone(), job, entries, {})


def lines(folder: Path) -> Sequence[str]:
    return (folder / "roster.jsonl").read_text().splitlines()


def changed(line: str) -> str:
    """The entry with a token more for island a."""
    table = json.loads(line)
    if table["kind"] == "attempted":
        table["islands"]["a"]["tokens"] += 1
    return json.dumps(table)
