"""Runs that are repeated in one process, and compared with what their ranks wrote (`terrace replay` without a step)."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from torch import Tensor

from terrace.base.errors import ConfigError
from terrace.checkpoint.layout import complete, step_of
from terrace.checkpoint.reading import Checkpoint
from terrace.launch.stop import StopSignal
from terrace.launch.watchdog import Watchdog, watch
from terrace.launch.world import World
from terrace.plan.keep import ALL_ON_DEVICE
from terrace.runtime.step_sums import StepResult
from terrace.train.config import RunConfig
from terrace.train.job import RunJob
from terrace.train.metrics import Silent, StepRecord, read_metrics
from terrace.train.rank import RankOfRun
from terrace.train.resolve import fitted_cluster
from terrace.train.schedule import learning_rate
from terrace.train.teacher_keys import DISTILL

EXACT, PRINTED = 1e-10, 5e-4  # differences that count: in fp64, and in dtypes whose sums depend on the number of ranks


@dataclass(frozen=True, kw_only=True)
class Repeated:
    """Steps that were repeated, from `first` to `last` (from 1): those of exchange `number`, or of a run's deal.

    `who` names the islands, or the shares. `loss` is the mean over these steps of the loss per token. `compared` counts
    steps' figures and checkpoints that were written, `gap` is the largest difference from them, relative where a figure
    is above 1, and `wrong` says what the first one is that counts ("": none).
    """

    number: int
    who: str
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
    """A run, or that of an island, on one rank with micro-batches of the same size and all states on the device.

    Raises `ConfigError` for a run whose numbers need its ranks.
    """
    why = ""
    if run.plan.wire:
        why = f"plan.wire = {dict(run.plan.wire)} rounds messages between ranks, and one process has none"
    elif run.plan.outer.has_islands:
        why = "plan.outer has islands on the ranks of the run"
    elif run.train.objective == DISTILL:
        why = f'train.objective = "{DISTILL}" has a teacher on the ranks of the run'
    if why:
        fix = "only islands without it are replayed" if run.elastic.meet else "name a step (--step N) to repeat on them"
        raise ConfigError(f"{why}: {fix}")
    if run.cluster.world_size == 1:
        return run
    plan = replace(
        run.plan,
        mapping={},
        experts={},
        vocabulary={},
        expert_chunks={},
        expert_gaps=(),
        schedule=None,
        shares=(),
        order=(),
        stages=(),
        unit=1,
        keep=ALL_ON_DEVICE,
    )
    return replace(run, cluster=fitted_cluster(run.cluster, 1), plan=plan)


class Twin:
    """The ranks of an island, or of a run, repeated on one: `degree` is their number of data ranks."""

    def __init__(self, world: World, job: RunJob, dog: Watchdog, degree: int) -> None:
        self._rank, self._degree = RankOfRun(world, job, Silent(), dog), degree
        engine = self._rank.engine
        self.flats = [flat for flat in engine.state if flat.spec.trainable]
        self._rank.learning.begin(engine, job, lambda words: None, dog.idle, keeps=False)

    @property
    def masters(self) -> list[Tensor]:
        return [flat.optimizer.master for flat in self.flats]

    def train(self, steps: range, place: int, shares: Sequence[int]) -> list[StepResult]:
        """These steps, counted from 0, of group `place` of equal groups of data ranks with these shares."""
        rank, run = self._rank, self._rank.run
        parts = []
        for data_rank in range(self._degree):
            made = rank.micro_batches(rank.batches, None)
            made.deal(place * self._degree + data_rank, len(shares) * self._degree, tuple(shares))
            parts.append(rank.learning.fed(made))
        rank.engine.take_share(shares[place] * self._degree)
        found = []
        for step in steps:
            rank.reporter.step = step
            micros = [each for part in parts for each in rank.learning.ready(part(step), rank.engine).micros]
            found.append(rank.engine.step(micros, learning_rate(step, run.train, run.optimizer)))
        rank.engine.drain()
        rank.dog.idle("comparing what was repeated")
        return found

    def take(self, values: Iterable[Tensor]) -> None:
        """Go on from other masters."""
        for master, value in zip(self.masters, values, strict=True):
            master.copy_(value)
        self._rank.engine.refresh()

    def close(self) -> None:
        self._rank.close()


class Comparison:
    """What was repeated, in order, compared with the run folders of islands, by name."""

    def __init__(self, run: RunConfig, written: Mapping[str, Written], twin: Twin) -> None:
        self.found, self._written, self._flats = list[Repeated](), written, twin.flats
        self._tolerance = EXACT if run.plan.compute == run.plan.master == "fp64" else PRINTED

    def add(self, number: int, who: str, windows: Mapping[str, tuple[range, list[StepResult]]]) -> None:
        """Add the steps of an exchange or a deal, by island, and compare their figures."""
        losses = [(each.loss, each.num_tokens) for _, results in windows.values() for each in results]
        tokens = sum(count for _, count in losses)
        self.found.append(
            Repeated(
                number=number,
                who=who,
                first=1 + min((steps.start for steps, _ in windows.values()), default=-1),
                last=max((steps.stop for steps, _ in windows.values()), default=0),
                tokens=tokens,
                loss=sum(loss * count for loss, count in losses) / max(1, tokens),
            )
        )
        for name, (steps, results) in windows.items():
            records = self._written.get(name, Written()).records
            for step, result in zip(steps, results, strict=True):
                if (record := records.get(step + 1)) is not None:
                    what = f"{_of(name)}step {step + 1}"
                    self._compare(f"{what}: loss", result.loss, record.loss)
                    self._compare(f"{what}: gradient norm", result.grad_norm, record.grad_norm)

    def state(self, name: str, step: int, values: Sequence[Tensor]) -> None:
        """Compare masters with the island's checkpoint after `step` steps, if there is one."""
        path = self._written.get(name, Written()).checkpoints.get(step)
        if path is None or not self.found:
            return
        there = {(block, parameter): value for block, parameter, value in Checkpoint(path).parameters()}
        apart, size = 0.0, 0.0
        for flat, own in zip(self._flats, values, strict=True):
            for spec, start, stop in flat.spec.extents:
                value = there[flat.name, spec.name].reshape(-1).double()
                apart += float((own[start:stop].cpu().double() - value).square().sum())
                size += float(value.square().sum())
        gap = math.sqrt(apart / max(size, 1e-300))
        self._note(f"{_of(name)}parameters after step {step} differ from {path.name} by {gap:.3g} of their norm", gap)

    def _compare(self, what: str, here: float, there: float) -> None:
        gap = abs(here - there) / max(1.0, abs(there))
        self._note(f"{what} {here!r}, in the run {there!r}", gap)

    def _note(self, words: str, gap: float) -> None:
        newest = self.found[-1]
        wrong = newest.wrong or ("" if gap <= self._tolerance else words)
        self.found[-1] = replace(newest, compared=newest.compared + 1, gap=max(newest.gap, gap), wrong=wrong)


def _of(name: str) -> str:
    return f"island {name!r}, " if name else ""


def replay_deals(world: World, job: RunJob, written: Written) -> list[Repeated]:
    """Repeats all steps of a run that dealt shares anew (terrace.train.deals) on this rank, the only one.

    Top-level, so that a child process can import it.
    """
    run = on_one_rank(job.run)
    ends = [*(each.step for each in job.deals if each.step < run.train.steps), run.train.steps]
    with StopSignal(()), watch(world, timeout_s=run.train.timeout_s) as dog, dog.guard():
        twin = Twin(world, replace(job, run=run, deals=()), dog, 1)
        comparison = Comparison(run, {"": written}, twin)
        for number, (first, end) in enumerate(pairwise(ends)):
            shares = f"shares {list(job.deals[number].shares)}"
            found: list[StepResult] = []
            stops = [step for step in sorted(written.checkpoints) if first < step < end]
            kept = {}
            for begin, stop in pairwise([first, *stops, end]):
                found += twin.train(range(begin, stop), 0, [run.num_micros()])
                kept[stop] = [master.clone() for master in twin.masters] if stop in written.checkpoints else []
            comparison.add(number, shares, {"": (range(first, end), found)})
            for step, values in kept.items():
                comparison.state("", step, values)
        twin.close()
    return comparison.found
