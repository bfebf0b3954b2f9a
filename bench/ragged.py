"""Data of very different lengths on a few gloo ranks: balance = "cost" against packing with equal tokens.

    tokens   plain data parallelism: every rank has equally many packed rows, and waits for the slowest
    cost     the documents of all ranks' rows are assigned by their cost of attention, long ones as rings

The same model, data, batches and processes for both, which take turns step by step: reported are the median over steps
of the ratio within a step, and the ratio of all steps together. A step takes as long as its slowest rank. Lengths come
from a published histogram (terrace.sequence.distributions), or are of two kinds, short and long, where the long
ones have a quarter of the tokens; they are divided by `--scale`, and packed as by `data.documents = "whole"`. The cost
of attention is measured at the start, as in a run. With `--pace` messages are held to the rates of a cluster, whose
tiers `--tiers` sizes.

Target: all steps of equal tokens take at least 1.5 times as long, and the losses are the same. Ranks that share a core
wait for each other anyway, so it needs an idle core for each.
"""

import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from bench.claims import Claim, judge, print_table, ratio_words, spread
from bench.common import (
    ADAMW,
    Timing,
    alternate,
    bench_parser,
    engine_of,
    loss_difference,
    norm_difference,
    over_ranks,
    real_blocks,
)
from bench.models import llama_of
from terrace.cluster.cluster import Cluster, Device, Tier
from terrace.comm.pace import UNPACED
from terrace.data.batches import Batches, Source
from terrace.data.block_sums import write_sums
from terrace.data.token_file import TokenFile
from terrace.lab.pace import Pacer
from terrace.launch.start import LocalPool
from terrace.launch.world import World
from terrace.model.blocks import block_specs
from terrace.model.config import ModelConfig
from terrace.plan.context import is_context_parallel
from terrace.plan.mesh import Mesh
from terrace.plan.plan import Plan
from terrace.plan.presets import preset
from terrace.runtime.engine import Engine
from terrace.sequence.distributions import bimodal, sample
from terrace.train.calibrate import calibrate
from terrace.train.config import RunConfig
from terrace.train.context_batches import ContextBatches
from terrace.train.facts import work_cost
from terrace.train.keys import TrainConfig
from terrace.train.micro_batches import MicroBatches, StepBatches

TARGET = 1.5
_BOUND = "ranks share cores: one that waits for the longest document gives its core to the others"
LIMIT = 1e-4  # largest difference of losses and norms, in fp32
BALANCES = ("tokens", "cost")
LONGEST = 196608  # tokens of a document of the histogram
SHORT, ONE_IN = 1024, 577  # of two kinds: one of LONGEST beside 576 short ones, which have three times its tokens
HEADER = ["ranks", "balance", "steps", "median s", "all s", "CPU s", "busiest CPU s", "waiting", "modelled"]
HEADER += ["median ratio", "ratio of all", "of busiest CPU", "loss diff"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """Settings given to every process."""

    folder: Path
    tiers: tuple[tuple[str, int], ...]
    pace: float = 0.0  # of the rates below; 0: messages are not held
    hidden: int = 64
    layers: int = 2
    scale: int = 24
    documents: int = 4000
    rows: int = 1  # of a rank and step
    rounds: int = 30
    lengths: str = "published"
    dtype: str = "fp32"

    @property
    def sequence(self) -> int:
        """Tokens of a row: the longest document fits."""
        return -(-LONGEST // self.scale)

    @property
    def model(self) -> ModelConfig:
        """The decoder; with these lengths most of a step is attention."""
        heads, inner = self.hidden // 16, -(-8 * self.hidden // 3 // 32) * 32
        more = {"head_dim": 32, "max_position_embeddings": self.sequence, "tie_word_embeddings": True}
        return llama_of(self.hidden, self.layers, heads, heads, inner, 257, **more)

    @property
    def cluster(self) -> Cluster:
        """The ranks: tiers from 2 GB/s on, each four times as slow as the one inside it, for a paced run."""
        device = Device(
            name="cpu",
            memory_bytes=1e12,
            memory_bandwidth_bytes_per_s=1e9,
            backend="cpu",
            peak_flops_per_s={self.dtype: 1e10},
        )
        tiers = (
            Tier(name=name, size=size, bandwidth_bytes_per_s=2e9 / 4**index, latency_s=2e-5 * 4**index)
            for index, (name, size) in enumerate(self.tiers)
        )
        return Cluster(name="bench", device=device, tiers=tuple(tiers))


@dataclass
class Result:
    """Figures of one contestant over all ranks."""

    timing: Timing
    norms: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)  # share of each step, mean over ranks
    busiest_s: list[float] = field(default_factory=list)  # processor seconds of the busiest rank
    balances: list[float] = field(default_factory=list)


def lengths_of(job: Job) -> list[int]:
    """Tokens of every document."""
    long = sample(job.documents) if job.lengths == "published" else bimodal(job.documents, SHORT, LONGEST, ONE_IN)
    return [max(2, length // job.scale) for length in long]


def write_tokens(folder: Path, lengths: Sequence[int], vocab: int) -> TokenFile:
    """Write a corpus of random tokens in documents of these lengths."""
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype("<i8")
    ids = np.random.default_rng(0).integers(0, vocab, sum(lengths)).astype("<u2")
    ids.tofile(folder / "ragged.tokens")
    starts.tofile(folder / "ragged.starts")
    tokens = TokenFile(
        path=folder / "ragged.tokens",
        dtype="uint16",
        num_tokens=len(ids),
        max_token=int(ids.max()),
        digest="ragged",
        num_documents=len(starts),
        starts=folder / "ragged.starts",
        sums_digest="",
    )
    return replace(tokens, sums_digest=write_sums(tokens))


def plan_of(job: Job, balance: str) -> Plan:
    """The plan of a contestant: data parallel, nothing sharded."""
    numbers = {"compute": job.dtype, "master": job.dtype, "micro_batch": job.rows, "balance": balance}
    return replace(preset("ddp", job.cluster), wire={}, **numbers)  # type: ignore[arg-type]


def contest(world: World, job: Job, tokens: TokenFile) -> dict[str, Result]:
    """Let both train on one rank, in turns."""
    torch.set_num_threads(1)
    cluster, results, steps, engines = job.cluster, dict[str, Result](), {}, {}
    pacer = Pacer(cluster, job.pace) if job.pace else UNPACED
    source = Source(tokens=tokens, documents="whole", too_long="split")
    batch = job.rows * cluster.world_size
    batches = Batches([source], job.sequence, batch, seed=0)
    for balance in BALANCES:
        plan = plan_of(job, balance)
        engine = engines[balance] = engine_of(
            real_blocks(job.model),
            cluster,
            plan,
            1,
            rank=world.rank,
            declared=block_specs(job.model),
            sequence=job.sequence,
            pacer=pacer,
        )
        train = TrainConfig(steps=1, batch=batch, sequence=job.sequence)
        run = RunConfig(model=job.model, cluster=cluster, plan=plan, train=train)
        context = None
        if is_context_parallel(Mesh.of(cluster, plan), plan):
            cost = work_cost(run, calibrate(engine, run))
            context = ContextBatches(batches, cluster, plan, 1, world.rank, cost)
        made = MicroBatches(batches, engine.program, world.rank, False, context)
        fed = [made.step(number) for number in range(job.rounds + 2)]  # as a feeder makes them beside the steps before
        results[balance] = Result(Timing(), balances=[each.balance or 0.0 for each in fed])

        def step(
            number: int, engine: Engine = engine, fed: list[StepBatches] = fed, result: Result = results[balance]
        ) -> float:
            done = engine.step(fed[number].micros, ADAMW.lr)
            waited = sum(spent for name, spent in done.time_s.items() if name.startswith("wait"))
            result.waits.append(waited / sum(done.time_s.values()))
            result.norms.append(done.grad_norm)
            return done.loss

        steps[balance] = step
    timings = alternate(steps, job.rounds, warmup=2, before=dist.barrier)
    for balance, result in results.items():
        engines[balance].check_bytes()
        busiest = torch.tensor(timings[balance].cpu_s)
        dist.all_reduce(busiest, dist.ReduceOp.MAX)
        result.busiest_s, result.timing = busiest.tolist(), over_ranks(timings[balance])
        waits = torch.tensor(result.waits[2:])
        dist.all_reduce(waits)
        result.waits = (waits / world.world_size).tolist()
        engines[balance].close()
    return results


def rows(job: Job, results: dict[str, Result]) -> list[list[str]]:
    found, equal = [], results["tokens"]
    tiers = " x ".join(f"{size} {name}" for name, size in job.tiers) + (f", paced {job.pace:g}" if job.pace else "")
    for balance, result in results.items():
        wall, busiest = result.timing.wall_s, result.busiest_s
        row = [tiers, balance, str(job.rounds), f"{statistics.median(wall):.3f}", f"{sum(wall):.1f}"]
        row += [
            f"{sum(result.timing.cpu_s):.1f}",
            f"{sum(busiest):.1f}",
            f"{100 * statistics.fmean(result.waits):.0f} %",
        ]
        if balance == "cost":
            row += [f"{statistics.fmean(result.balances):.2f}"]
            row += [ratio_words(equal.timing.wall_s, wall, digits=2)]
            row += [f"{sum(equal.timing.wall_s) / sum(wall):.2f}", f"{sum(equal.busiest_s) / sum(busiest):.2f}"]
            row += [f"{loss_difference(result.timing, equal.timing):.0e}"]
        found.append(row + [""] * (len(HEADER) - len(row)))
    return found


def main() -> int:
    """Print a table; return 1 when --check is given and the target is missed."""
    names = ("hidden", "layers", "scale", "documents", "rows", "rounds")
    parser = bench_parser(__doc__, **{name: getattr(Job, name) for name in names})
    parser.add_argument("--tiers", type=int, nargs="+", default=[2], help="sizes of node, system, site")
    parser.add_argument("--pace", type=float, default=0.0, help="hold messages to this part of the cluster's rates")
    parser.add_argument("--lengths", choices=("published", "bimodal"), default=Job.lengths)
    options = parser.parse_args()
    given = {name: value for name, value in vars(options).items() if name not in ("check", "claims", "tiers")}
    tiers = tuple(zip(("node", "system", "site"), options.tiers, strict=False))
    with tempfile.TemporaryDirectory() as folder:
        job = Job(folder=Path(folder), tiers=tiers, **given)
        lengths = lengths_of(job)
        tokens = write_tokens(job.folder, lengths, job.model.vocab_size)
        print(
            f"{job.documents} documents of {min(lengths)} to {max(lengths)} tokens in rows of {job.sequence}, "
            f"{job.rows} a rank and step; {job.layers} layers of {job.hidden}\n"
        )
        with LocalPool(job.cluster.world_size) as pool:
            results = pool.run(job.cluster.world_size, contest, job, tokens, timeout_s=3600.0)[0]
    print_table(HEADER, rows(job, results))
    equal, ours = results["tokens"], results["cost"]
    walls = equal.timing.wall_s, ours.timing.wall_s
    differs = max(loss_difference(ours.timing, equal.timing), norm_difference(ours.norms, equal.norms))
    wrong = [f"losses or norms differ by {differs:.0e}"] if differs > LIMIT else []
    gain = sum(walls[0]) / sum(walls[1])
    low, high = spread(*walls)
    name = "steps of equal tokens a rank, as a multiple of `balance = cost`"
    claim = Claim(name=name, found=gain, low=low, high=high, goal=TARGET, at_least=True, bound=_BOUND)
    return judge([claim], options, wrong)


if __name__ == "__main__":
    sys.exit(main())
