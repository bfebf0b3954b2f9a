"""How do local steps, late exchanges and rounding across a slow tier change the loss of a model?

Four gloo ranks train a decoder of 1.0 M parameters on the source text of the Python standard library. All runs of a
seed begin at one checkpoint of 300 synchronous steps and take 1,200 more, with the same batches and learning rates.
Under an outer loop each rank is an island; the runs in two stages have two replicas of them, one slow link apart.

Compared is the loss on held-out text after the end of the run, when islands have exchanged everything: of one model,
the anchor, as a user gets it. The training loss of the last tenth is shown beside it: there an island's is of its own
parameters on its own part of the batch. Runs already in the results file are not repeated.

Targets, in the mean over seeds: exchanges every 20 steps end at most 5 % above the synchronous run; against these, int4
with feedback at most 0.5 %, five fragments with a delay of 4 steps 1 %, a delay of a whole cycle 3 %; stages with
activations in int8 and their gradients in int4 with feedback at most 0.5 % above the synchronous run.
"""

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import torch

from bench.claims import Claim, judge, options_for_claims, print_table
from bench.common import decoder, engine_of
from bench.keys import key_of
from bench.learning import CALL_S, Held, Result, parser_of, steps, tokens
from bench.learning import Job as LearningJob
from bench.loops import MAIN, NUM_RANKS, SLOW, VARIANTS, Variant
from terrace.checkpoint.layout import complete
from terrace.checkpoint.reading import Checkpoint, resume
from terrace.checkpoint.writing import save
from terrace.data.batches import Batches
from terrace.launch.start import LocalPool, World
from terrace.model.blocks import block_specs, num_params
from terrace.model.decoder import build_blocks
from terrace.model.init import initialise
from terrace.plan.layout import Layout
from terrace.plan.validate import num_micro_batches
from terrace.runtime.batch import Batch
from terrace.runtime.engine import Engine

HOLDOUT, NUM_HELD_BATCHES = 0.01, 128  # of the text's windows, the last; batches of them, evenly spaced
NUM_POINTS = 30  # of a curve


@dataclass(frozen=True)
class Job(LearningJob):
    """One training run, as given to every rank; it begins at step `start` of a synchronous run."""

    start: int
    starts: Path  # folder of checkpoints to begin at

    @property
    def setting(self) -> str:
        """The settings that all compared runs share."""
        return f"{super().setting}, from step {self.start}"

    @property
    def batches(self) -> Batches:
        return Batches(self.tokens, self.sequence, self.batch, self.seed, HOLDOUT)

    @property
    def folder(self) -> Path:
        """Where the synchronous run of this seed has its checkpoint."""
        key = key_of(self.setting, self.tokens.digest, MAIN["synchronous"].plan(self.batch))
        return self.starts / f"{key}-{self.seed}"

    @property
    def plans(self) -> object:
        """The plan of the run on its tiers, and that of the synchronous run that it begins at."""
        variant = VARIANTS[self.variant]
        return variant.plan(self.batch), variant.tiers, MAIN["synchronous"].plan(self.batch), HOLDOUT, NUM_HELD_BATCHES


@dataclass(frozen=True)
class Part:
    """A run on one rank: loss on its part of the held-out text, loss of every step, bytes over the slow tier a step."""

    loss: float
    losses: list[float]
    sent_bytes: int


@dataclass(frozen=True)
class Found(Result):
    """Result of a run: `loss` on held-out text, `train_loss` of the last tenth of the steps, mean bytes that a rank
    sends over the slow tier a step, and the mean training losses of 30 parts of the run.
    """

    train_loss: float
    sent_bytes: float
    curve: list[float]


def engine_for(job: Job, variant: Variant, rank: int) -> Engine:
    """The engine of a rank, with the initial values of the seed."""
    config = decoder(job.hidden, job.layers)
    blocks = build_blocks(config)
    initialise(blocks, config, seed=job.seed, dtype=torch.float32)
    cluster, plan = variant.cluster, variant.plan(job.batch)
    return engine_of(
        blocks,
        cluster,
        plan,
        num_micro_batches(plan, Layout.of(cluster, plan), job.batch),
        rank=rank,
        optimizer=job.optimizer,
        declared=block_specs(config),
        sequence=job.sequence,
        timeout=timedelta(seconds=CALL_S),  # ranks of a busy machine may be far apart between two exchanges
    )


def begin(world: World, job: Job) -> None:
    """Train on this rank up to the start, and save."""
    engine = engine_for(job, MAIN["synchronous"], world.rank)
    steps(job, engine, range(job.start))
    engine.drain()
    save(engine, job.folder, job.start, {}, keep=1)
    engine.close()


def run(world: World, job: Job) -> Part:
    """Train on this rank from the start to the end."""
    engine = engine_for(job, VARIANTS[job.variant], world.rank)
    if job.start:
        resume(engine, Checkpoint(complete(job.folder / "checkpoints")[-1]))
    losses = [each.loss for each in steps(job, engine, range(job.start, job.steps))]
    engine.finish()
    loss = held_out(job, engine)
    sent = sum(size for (_, tier), size in engine.report({}).sent_bytes.items() if tier == SLOW)
    engine.check_bytes()
    engine.close()
    return Part(loss, losses, sent)


def held_out(job: Job, engine: Engine) -> float:
    """Mean loss on this rank's part of the held-out text; of all parts, where ranks are synchronous."""
    batches, layout, size = job.batches, engine.program.layout, engine.program.plan.micro_batch
    share, losses = job.batch // layout.data_degree, list[float]()
    first = layout.data_rank(engine.rank) * share
    chosen = np.linspace(0, batches.num_holdout_samples - 1, NUM_HELD_BATCHES * job.batch).astype(np.int64)
    for at in range(first, len(chosen), job.batch):
        arrays = [torch.from_numpy(array) for array in batches.holdout(chosen[at : at + share])]
        micros = [Batch(*(array[row : row + size] for array in arrays)) for row in range(0, share, size)]
        losses.append(engine.evaluate(micros).loss)
    return statistics.mean(losses)


def found_of(pool: LocalPool, job: Job) -> Found:
    """The result of a run, after the synchronous one that it begins at. Means over ranks are over islands."""
    if job.start and not complete(job.folder / "checkpoints"):
        pool.run(NUM_RANKS, begin, job, timeout_s=CALL_S)
    begin_s = time.monotonic()
    parts: list[Part] = pool.run(NUM_RANKS, run, job, timeout_s=CALL_S)
    losses = np.mean([part.losses for part in parts], axis=0)
    return Found(
        job.variant,
        job.seed,
        job.setting,
        loss=statistics.mean(part.loss for part in parts),
        train_loss=float(losses[-job.last :].mean()),
        sent_bytes=statistics.mean(part.sent_bytes for part in parts),
        seconds=time.monotonic() - begin_s,
        curve=[float(part.mean()) for part in np.array_split(losses, min(NUM_POINTS, len(losses)))],
    )


def rises(found: Sequence[Mapping[str, Found]], name: str) -> list[float]:
    """By how much the held-out loss of a variant lies above that of the one it is compared with, as a part, by seed."""
    against = VARIANTS[name].against
    return [runs[name].loss / runs[against].loss - 1 for runs in found if {name, against} <= runs.keys()]


def claims_of(found: Sequence[Mapping[str, Found]]) -> list[Claim]:
    """The claims that the runs of all seeds allow."""
    made = list[Claim]()
    for name, variant in VARIANTS.items():
        values = rises(found, name)
        if values and variant.most is not None:
            words = f"rise of the held-out loss, {variant.label}, mean over seeds ({len(values)})"
            mean, rival = statistics.mean(values), VARIANTS[variant.against].label
            made.append(
                Claim(name=words, found=mean, low=min(values), high=max(values), goal=variant.most, rival=rival)
            )
    return made


def show(found: Sequence[Mapping[str, Found]]) -> None:
    """Print a row for each variant: means over its seeds, and the spread of the compared figures."""
    rows = []
    for name, variant in VARIANTS.items():
        runs, values = [each[name] for each in found if name in each], rises(found, name)
        if not runs:
            continue
        figures = [(each.loss, each.train_loss, max(each.curve)) for each in runs]
        means = [f"{statistics.mean(column):.4f}" for column in zip(*figures, strict=True)]
        change = "-"
        if values and name != variant.against:
            spread = f"{100 * min(values):+.2f} to {100 * max(values):+.2f}"
            change = f"{100 * statistics.mean(values):+.2f} % ({spread}, {len(values)})"
        kilobytes = f"{statistics.mean(each.sent_bytes for each in runs) / 1e3:.1f}"
        rows.append([name, variant.label, *means, variant.against, change, kilobytes])
    header = ["variant", "", "held-out loss", "training", "its highest", "against", "rise (spread, seeds)", "kB a step"]
    print_table(header, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; with --check return 1 when a target is missed."""
    parser = parser_of(__doc__, list(VARIANTS), hidden=160, lr=2e-3)
    parser.set_defaults(steps=1500, layers=3, variants=list(MAIN))
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--start", type=int, default=300, help="steps of the synchronous run that all begin with")
    starts = Path(".terrace-cache/local-steps")
    parser.add_argument("--starts", type=Path, default=starts, help=f"folder of its checkpoints (default: {starts})")
    options_for_claims(parser)
    options = parser.parse_args(arguments)
    print(f"{num_params(decoder(options.hidden, options.layers)):,} parameters, {options.steps} steps", flush=True)
    text, held, found = tokens(), Held(options.results, Found), list[dict[str, Found]]()
    with LocalPool(NUM_RANKS) as pool:
        for seed in options.seeds:
            found.append({})
            for variant in options.variants:
                sizes = (options.steps, options.sequence, options.batch, options.hidden, options.layers)
                job = Job(variant, seed, *sizes, options.lr, text, options.start, options.starts.resolve())
                found[-1][variant] = held.result(job, job.plans, partial(found_of, pool, job))
    show(found)
    return judge(claims_of(found), options)


if __name__ == "__main__":
    sys.exit(main())
