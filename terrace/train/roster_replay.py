"""Repeats the run of a roster in one process, from its log (docs/elastic.md), and compares it with what islands wrote.

Every process that was an island has an engine of one rank here, with its own optimizer's states. A window is trained
when an exchange takes its change; one that was lost is trained only if its process joined again, since its optimizer
went on from there. Anchors and outer momentum are kept by version, as long as an island holds them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from terrace.base.errors import ConfigError, TrainingError
from terrace.comm.collectives import DTYPES
from terrace.comm.ledger import Meter
from terrace.comm.rounding import Origin
from terrace.launch.stop import StopSignal
from terrace.launch.watchdog import Watchdog, watch
from terrace.launch.world import World
from terrace.roster.entries import Attempted, Committed, Dealt, Entry, Finished, Gone, Joined, Opened
from terrace.roster.state import folded
from terrace.runtime.outer_state import OuterState
from terrace.runtime.step_sums import StepResult
from terrace.train.job import RunJob
from terrace.train.meeting import island_facts, read_own, terms_of
from terrace.train.one_process import Comparison, Repeated, Twin, Written, on_one_rank


def check_log(job: RunJob, entries: Sequence[Entry]) -> None:
    """Raises `ConfigError` unless the log is whole, and of the run of `job`, which is as its islands had it."""
    opened = entries[0] if entries else None
    if not isinstance(opened, Opened):
        raise ConfigError("the log has no entry yet: no island has joined")
    if opened.terms != terms_of(job.run):
        raise ConfigError(
            f"the log has the terms {opened.terms}, and the run {terms_of(job.run)}: give the log and the run folders "
            "of the same run"
        )
    folded(entries)
    own = island_facts(job)
    other = sorted(name for name, value in own.items() if opened.facts.get(name) != value)
    if other:
        raise ConfigError(f"the run has another {other[0]} than the log: give log and run folders of one run")


def written_by(folders: Iterable[Path], entries: Sequence[Entry], log: Path) -> dict[str, Written]:
    """What the run folders have, by island. Those in which no step was trained are left out.

    Raises `ConfigError` for the folder of an island of another roster than that of the log.
    """
    names = {each.token: each.island for each in entries if isinstance(each, Joined)}
    found = dict[str, Written]()
    for folder in folders:
        of_folder = Written()
        of_folder.add(folder)
        if not of_folder.records:
            continue
        own = read_own(folder)
        if own.token not in names:
            raise ConfigError(
                f"{folder} is of island {own.island!r} of another roster than that of {log}, which it has not joined: "
                "give the log and the run folders of one roster"
            )
        found.setdefault(names[own.token], Written()).add(folder)
    return found


def replay_islands(
    world: World, job: RunJob, entries: Sequence[Entry], written: Mapping[str, Written]
) -> list[Repeated]:
    """Repeats a log on this rank, the only one. `job` is that of an island.

    Top-level, so that a child process can import it. Raises `TrainingError` for a step whose figures are not finite.
    """
    check_log(job, entries)
    with StopSignal(()), watch(world, timeout_s=job.run.train.timeout_s) as dog, dog.guard():
        replay = _Replay(world, job, dog, written)
        try:
            for place, entry in enumerate(entries):
                replay.follow(entry, entries[place + 1 :])
        finally:
            replay.close()
    return replay.comparison.found


@dataclass(frozen=True)
class _Version:
    """Anchor and outer momentum of every trainable flat buffer."""

    anchors: list[Tensor]
    momenta: list[Tensor | None]


class _Replay:
    """The fold over a log that repeats what the islands computed. `comparison` has an item for every exchange."""

    def __init__(self, world: World, job: RunJob, dog: Watchdog, written: Mapping[str, Written]) -> None:
        self._world, self._dog, self._degree = world, dog, job.run.layout.data_degree
        self._job = replace(job, run=on_one_rank(job.run))
        plan = job.run.plan
        self._attempt: Attempted | None = None
        self._twins, self._held, self._hands = dict[str, Twin](), dict[str, int](), dict[str, Dealt]()
        self._ended: dict[str, int] = {}  # steps done at the end of the last window that an exchange took
        first, outer = self._new_twin(), job.run.elastic.outer
        self._spare, self.comparison = [first], Comparison(job.run, written, first)
        self._outer = [
            OuterState(
                outer, each.clone(), torch.zeros_like(each, dtype=DTYPES[plan.sums]), Origin("", each.device, Meter())
            )
            for each in first.masters
        ]
        self._versions = {0: self._kept()}

    def follow(self, entry: Entry, later: Sequence[Entry]) -> None:
        """Repeat one more entry; `later` are those behind it."""
        match entry:
            case Joined():
                self._held[entry.island] = entry.version
            case Dealt():
                for name in entry.shares:
                    self._compare(name, self._ended.get(name, 0))
                    self._hands[name] = entry
            case Attempted():
                self._attempt = entry
            case Committed():
                assert self._attempt is not None, "only an attempt is committed"
                self._commit(self._attempt)
            case Gone():
                self._go(entry, later)
            case Finished():
                for name in self._held:
                    self._compare(name, self._job.run.train.steps)

    def close(self) -> None:
        for twin in [*self._spare, *self._twins.values()]:
            twin.close()

    def _new_twin(self) -> Twin:
        return Twin(self._world, self._job, self._dog, self._degree)

    def _go(self, entry: Gone, later: Sequence[Entry]) -> None:
        name = entry.island
        if entry.first < 0:
            self._compare(name, self._ended.get(name, 0))
        lost = self._hands.pop(name, None)
        again = next((each for each in later if isinstance(each, Joined) and each.island == name), None)
        if again is not None and again.trained >= 0:  # by the same process
            if lost is not None and lost.window == again.trained:
                self._retrain(name, lost)
        elif name in self._twins:
            self._twins.pop(name).close()
        self._held.pop(name)

    def _twin(self, name: str) -> Twin:
        if name not in self._twins:
            self._twins[name] = self._spare.pop() if self._spare else self._new_twin()
            self._twins[name].take(self._versions[self._held[name]].anchors)
        return self._twins[name]

    def _commit(self, attempt: Attempted) -> None:
        brought = {name: each for name, each in sorted(attempt.islands.items()) if each.window >= 0}
        total = sum(each.tokens for each in brought.values())
        steps = {name: self._train(name, each.window, each.tokens) for name, each in brought.items()}
        self._sum({name: each.tokens / max(1, total) for name, each in brought.items()})
        base = self._versions[attempt.version]
        for state, anchor, momentum in zip(self._outer, base.anchors, base.momenta, strict=True):
            state.anchor.copy_(anchor)
            if state.momentum is not None and momentum is not None:
                state.momentum.copy_(momentum)
            if total:
                state.apply(None, waits=True, moved=False)
        self._versions[attempt.result] = self._kept()
        self._held |= dict.fromkeys(attempt.islands, attempt.result)
        self._versions = {number: each for number, each in self._versions.items() if number in self._held.values()}
        for name in attempt.islands:
            if name in self._twins:
                self._twins[name].take(self._versions[attempt.result].anchors)
        windows = {name: _steps(self._hands.pop(name)) for name in brought}
        self._ended |= {name: each.stop for name, each in windows.items()}
        results = {name: (each, steps[name]) for name, each in windows.items()}
        self.comparison.add(attempt.exchange, ", ".join(attempt.islands), results)

    def _retrain(self, name: str, deal: Dealt) -> list[StepResult]:
        names = sorted(deal.shares)
        return self._twin(name).train(_steps(deal), names.index(name), [deal.shares[each] for each in names])

    def _train(self, name: str, window: int, tokens: int) -> list[StepResult]:
        deal = self._hands[name]
        assert deal.window == window, "an island brings the window that it has in hand"
        found = self._retrain(name, deal)
        if (own := sum(each.num_tokens for each in found)) != tokens:
            raise TrainingError(
                f"window {window} of island {name!r} has {own} tokens here, and {tokens} in the log: the data differ"
            )
        return found

    @torch.no_grad()
    def _sum(self, weights: Mapping[str, float]) -> None:
        """The weighted mean of all changes, in the order of names, as islands add them up."""
        for place, state in enumerate(self._outer):
            state.message.zero_()
            for name, weight in weights.items():
                anchor = self._versions[self._held[name]].anchors[place]
                state.message += (anchor - self._twins[name].masters[place]) * weight

    def _kept(self) -> _Version:
        momenta = [None if each.momentum is None else each.momentum.clone() for each in self._outer]
        return _Version([each.anchor.clone() for each in self._outer], momenta)

    def _compare(self, name: str, step: int) -> None:
        """Compare the anchor that an island holds with its checkpoint after `step` steps."""
        self.comparison.state(name, step, self._versions[self._held[name]].anchors)


def _steps(deal: Dealt) -> range:
    return range(deal.first, deal.last + 1)
