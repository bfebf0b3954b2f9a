"""Repeats the run of a roster in one process, from its log (docs/elastic.md), and compares it with what islands wrote.

Every process that was an island has an engine of one rank here, with its own optimizer's states. A window is trained
when an exchange takes its change; one that was lost is trained only if its process joined again, since its optimizer
went on from there. Anchors and outer momentum are kept by version, as long as an island holds them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from terrace.base.errors import ConfigError, TrainingError
from terrace.checkpoint.layout import complete, step_of
from terrace.checkpoint.reading import Checkpoint
from terrace.comm.collectives import DTYPES
from terrace.comm.ledger import Meter
from terrace.comm.rounding import Origin
from terrace.launch.stop import StopSignal
from terrace.launch.watchdog import Watchdog, watch
from terrace.launch.world import World
from terrace.roster.entries import Attempted, Committed, Dealt, Entry, Finished, Gone, Joined, Opened
from terrace.runtime.outer_state import OuterState
from terrace.runtime.step_sums import StepResult
from terrace.train.config import RunConfig
from terrace.train.job import RunJob
from terrace.train.meeting import island_facts, terms_of
from terrace.train.metrics import Silent, StepRecord, read_metrics
from terrace.train.rank import RankOfRun
from terrace.train.resolve import fitted_cluster
from terrace.train.schedule import learning_rate

EXACT, PRINTED = 1e-10, 5e-4  # differences that count: in fp64, and in dtypes whose sums depend on the number of ranks


@dataclass(frozen=True, kw_only=True)
class Repeated:
    """An exchange that was repeated: its islands, their steps from `first` to `last` (from 1), and tokens.

    `loss` is the mean over these steps of the loss per token. `compared` counts steps and checkpoints that islands have
    written, `gap` is the largest difference from them, relative where a figure is above 1, and `wrong` says what the
    first one is that counts ("": none).
    """

    exchange: int
    islands: tuple[str, ...]
    first: int
    last: int
    tokens: int
    loss: float
    compared: int = 0
    gap: float = 0.0
    wrong: str = ""


@dataclass(frozen=True)
class Written:
    """What the run folders of an island have: records by step, and the folders of checkpoints by step."""

    records: dict[int, StepRecord] = field(default_factory=dict)
    checkpoints: dict[int, Path] = field(default_factory=dict)

    def add(self, folder: Path) -> None:
        """Add a run folder: an island may have one of every start."""
        if (folder / "metrics.jsonl").is_file():
            self.records.update((each.step, each) for each in read_metrics(folder / "metrics.jsonl"))
        self.checkpoints.update((step_of(path), path) for path in complete(folder / "checkpoints"))


def on_one_rank(run: RunConfig) -> RunConfig:
    """The run of an island on one rank, with the same micro-batches.

    Raises `ConfigError` for a plan whose messages are rounded, which one process cannot repeat.
    """
    if run.cluster.world_size == 1:
        return run
    if run.plan.wire:
        raise ConfigError(
            f"plan.wire = {dict(run.plan.wire)} rounds messages inside an island, and one process has no messages: "
            "only islands without it are replayed"
        )
    plan = replace(
        run.plan,
        mapping={},
        experts={},
        vocabulary={},
        expert_chunks={},
        expert_gaps=(),
        schedule=None,
        stages=(),
        unit=1,
    )
    return replace(run, cluster=fitted_cluster(run.cluster, 1), plan=plan)


def check_log(job: RunJob, entries: Sequence[Entry]) -> None:
    """Raises `ConfigError` unless the log is one of the run of `job`, which is as its islands had it."""
    opened = entries[0] if entries else None
    if not isinstance(opened, Opened):
        raise ConfigError("the log has no entry yet: no island has joined")
    if opened.terms != terms_of(job.run):
        raise ConfigError(
            f"the log has the terms {opened.terms}, and the run {terms_of(job.run)}: give the log and the run folders "
            "of the same run"
        )
    own = island_facts(job)
    other = sorted(name for name, value in own.items() if opened.facts.get(name) != value)
    if other:
        raise ConfigError(f"the run has another {other[0]} than the log: give log and run folders of one run")


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
    return replay.found


@dataclass(frozen=True)
class _Version:
    """Anchor and outer momentum of every trainable flat buffer."""

    anchors: list[Tensor]
    momenta: list[Tensor | None]


class _Twin:
    """The process of an island, repeated: its engine, and the micro-batches of each of the island's data ranks."""

    def __init__(self, world: World, job: RunJob, dog: Watchdog, degree: int) -> None:
        self._rank, self._degree = RankOfRun(world, job, Silent(), dog), degree
        engine = self._rank.engine
        self.flats = [flat for flat in engine.state if flat.spec.trainable]
        self._rank.learning.begin(engine, job, lambda words: None, dog.idle, keeps=False)

    @property
    def masters(self) -> list[Tensor]:
        return [flat.optimizer.master for flat in self.flats]

    def train(self, name: str, deal: Dealt) -> list[StepResult]:
        """The steps of the window that was dealt to island `name`."""
        rank, run, names = self._rank, self._rank.run, sorted(deal.shares)
        shares, place = tuple(deal.shares[each] for each in names), names.index(name) * self._degree
        parts = []
        for data_rank in range(self._degree):
            made = rank.micro_batches(rank.batches, None)
            made.deal(place + data_rank, len(names) * self._degree, shares)
            parts.append(rank.learning.fed(made))
        rank.engine.take_share(deal.shares[name] * self._degree)
        found = []
        for step in range(deal.first, deal.last + 1):
            rank.reporter.step = step
            micros = [each for part in parts for each in rank.learning.ready(part(step), rank.engine).micros]
            found.append(rank.engine.step(micros, learning_rate(step, run.train, run.optimizer)))
        rank.engine.drain()
        self._rank.dog.idle("repeating an exchange")
        return found

    def take(self, version: _Version) -> None:
        """Begin from an anchor."""
        for master, anchor in zip(self.masters, version.anchors, strict=True):
            master.copy_(anchor)
        self._rank.engine.refresh()

    def close(self) -> None:
        self._rank.close()


class _Replay:
    """The fold over a log that repeats what the islands computed. `found` has an item for every exchange."""

    def __init__(self, world: World, job: RunJob, dog: Watchdog, written: Mapping[str, Written]) -> None:
        self._world, self._dog, self._written, self._degree = world, dog, written, job.run.layout.data_degree
        self._job = replace(job, run=on_one_rank(job.run))
        plan, self.found = job.run.plan, list[Repeated]()
        self._tolerance = EXACT if plan.compute == plan.master == "fp64" else PRINTED
        self._attempt: Attempted | None = None
        self._twins, self._held, self._hands = dict[str, _Twin](), dict[str, int](), dict[str, Dealt]()
        self._ended: dict[str, int] = {}  # steps done at the end of the last window that an exchange took
        first, outer = self._new_twin(), job.run.elastic.outer
        self._spare, self._flats = [first], first.flats
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
                    self._compare_checkpoint(name, self._ended.get(name, 0))
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
                    self._compare_checkpoint(name, self._job.run.train.steps)

    def close(self) -> None:
        for twin in [*self._spare, *self._twins.values()]:
            twin.close()

    def _new_twin(self) -> _Twin:
        return _Twin(self._world, self._job, self._dog, self._degree)

    def _go(self, entry: Gone, later: Sequence[Entry]) -> None:
        name = entry.island
        if entry.first < 0:
            self._compare_checkpoint(name, self._ended.get(name, 0))
        lost = self._hands.pop(name, None)
        again = next((each for each in later if isinstance(each, Joined) and each.island == name), None)
        if again is not None and again.trained >= 0:  # by the same process
            if lost is not None and lost.window == again.trained:
                self._twin(name).train(name, lost)
        elif name in self._twins:
            self._twins.pop(name).close()
        self._held.pop(name)

    def _twin(self, name: str) -> _Twin:
        if name not in self._twins:
            self._twins[name] = self._spare.pop() if self._spare else self._new_twin()
            self._twins[name].take(self._versions[self._held[name]])
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
                self._twins[name].take(self._versions[attempt.result])
        windows = [self._hands.pop(name) for name in brought]
        self._ended |= {name: each.last + 1 for name, each in zip(brought, windows, strict=True)}
        self._add(attempt, windows, total, steps)

    def _train(self, name: str, window: int, tokens: int) -> list[StepResult]:
        deal, twin = self._hands[name], self._twin(name)
        assert deal.window == window, "an island brings the window that it has in hand"
        found = twin.train(name, deal)
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

    def _add(self, attempt: Attempted, windows: list[Dealt], tokens: int, steps: dict[str, list[StepResult]]) -> None:
        losses = [(each.loss, each.num_tokens) for results in steps.values() for each in results]
        self.found.append(
            Repeated(
                exchange=attempt.exchange,
                islands=tuple(attempt.islands),
                first=1 + min((each.first for each in windows), default=-1),
                last=1 + max((each.last for each in windows), default=-1),
                tokens=tokens,
                loss=sum(loss * number for loss, number in losses) / max(1, tokens),
            )
        )
        for name, deal in zip(steps, windows, strict=True):
            records = self._written.get(name, Written()).records
            for step, result in enumerate(steps[name], deal.first + 1):
                if step in records:
                    what = f"island {name!r}, step {step}"
                    self._compare(f"{what}: loss", result.loss, records[step].loss)
                    self._compare(f"{what}: gradient norm", result.grad_norm, records[step].grad_norm)

    def _compare(self, what: str, here: float, there: float) -> None:
        gap = abs(here - there) / max(1.0, abs(there))
        self._note(f"{what} {here!r}, in the run {there!r}", gap)

    def _note(self, words: str, gap: float) -> None:
        newest = self.found[-1]
        wrong = newest.wrong or ("" if gap <= self._tolerance else words)
        self.found[-1] = replace(newest, compared=newest.compared + 1, gap=max(newest.gap, gap), wrong=wrong)

    def _compare_checkpoint(self, name: str, step: int) -> None:
        """Compare the anchor that an island holds with its checkpoint after `step` steps, if there is one."""
        path = self._written.get(name, Written()).checkpoints.get(step)
        if path is None or not self.found:
            return
        there = {(block, parameter): value for block, parameter, value in Checkpoint(path).parameters()}
        apart, size = 0.0, 0.0
        for flat, anchor in zip(self._flats, self._versions[self._held[name]].anchors, strict=True):
            for spec, start, stop in flat.spec.extents:
                value = there[flat.name, spec.name].reshape(-1).double()
                apart += float((anchor[start:stop].cpu().double() - value).square().sum())
                size += float(value.square().sum())
        gap = math.sqrt(apart / max(size, 1e-300))
        self._note(
            f"island {name!r}: parameters after step {step} differ from {path.name} by {gap:.3g} of their norm", gap
        )
