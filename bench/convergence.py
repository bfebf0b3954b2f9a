"""Does compression change what a model learns? Three-level placement, lossless, compressed, and without error feedback.

Eight gloo ranks in three tiers train a decoder of 1.3 M parameters on the source text of the Python standard library,
with the same batches, initial values and learning rates for all, with several seeds. Compared is the mean loss of the
last tenth of the steps. Runs already in the results file are not repeated.

Target: after 1,000 steps the compressed preset is within 0.5 % of the lossless one, for every seed.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from bench.claims import print_table
from bench.common import decoder, engine_of, local_cluster
from terrace.cluster.cluster import Cluster
from terrace.data.batches import Batches
from terrace.data.token_file import TokenFile
from terrace.data.tokenizer import load_tokenizer
from terrace.data.tokens import prepare_tokens
from terrace.launch.start import LocalPool, World
from terrace.model.config import num_params
from terrace.model.decoder import build_blocks
from terrace.model.init import initialise
from terrace.plan.plan import Plan
from terrace.plan.presets import preset
from terrace.runtime.batch import Batch
from terrace.runtime.settings import OptimizerConfig
from terrace.train.config import TrainConfig
from terrace.train.schedule import learning_rate

TARGET = 0.005
TIERS = {"package": 2, "node": 2, "system": 2}
VARIANTS = ("lossless", "compressed", "no feedback")
RESIDENT = 1000
_CALL_S = 3600.0


@dataclass(frozen=True)
class Job:
    """One training run, as given to every rank."""

    variant: str
    seed: int
    steps: int
    sequence: int
    hidden: int
    layers: int
    lr: float
    tokens: TokenFile


@dataclass(frozen=True)
class Found:
    """Result of a run; the errors are means over its last tenth. `setting` holds the run's settings."""

    variant: str
    seed: int
    setting: str
    loss: float
    seconds: float
    errors: dict[str, float]


def plan_of(variant: str, cluster: Cluster) -> Plan:
    """The plan of a contestant."""
    # Blocks stay gathered over the whole step: fewer messages, the same numbers.
    if variant == "lossless":
        return replace(preset("three-level", cluster), prefetch=RESIDENT)
    plan = replace(preset("three-level-compressed", cluster), prefetch=RESIDENT)
    if variant == "compressed":
        return plan
    wire = {
        message: {tier: name.removesuffix("+feedback") for tier, name in row.items()}
        for message, row in plan.wire.items()
    }
    return replace(plan, wire=wire)


def setting_of(job: Job) -> str:
    """Settings that all compared runs share."""
    return f"{job.steps} steps of 8 x {job.sequence}, hidden {job.hidden}, {job.layers} layers, lr {job.lr:g}"


def run(world: World, job: Job) -> Found:
    """Train on this rank."""
    cluster, config = local_cluster(TIERS), decoder(job.hidden, job.layers)
    blocks = build_blocks(config)
    initialise(blocks, config, seed=job.seed, dtype=torch.float32)
    optimizer = OptimizerConfig(lr=job.lr)
    schedule = TrainConfig(steps=job.steps, batch=8, sequence=job.sequence, warmup_steps=job.steps // 20)
    plan = plan_of(job.variant, cluster)
    engine = engine_of(blocks, cluster, plan, 1, rank=world.rank, optimizer=optimizer)
    batches = Batches(job.tokens, job.sequence, schedule.batch, job.seed)
    losses, errors, begin_s = [], [], time.monotonic()
    for step in range(job.steps):
        (arrays,) = batches.micro_batches(step, world.rank, world.world_size, 1)
        inputs, labels = (torch.from_numpy(array) for array in arrays)
        result = engine.step([Batch(inputs, labels)], learning_rate(step, schedule, optimizer))
        losses.append(result.loss)
        errors.append(result.quantisation_error)
    engine.check_bytes()
    engine.close()
    last = max(1, job.steps // 10)
    mean = {name: statistics.mean(row[name] for row in errors[-last:]) for name in errors[-1]}
    seconds = time.monotonic() - begin_s
    return Found(job.variant, job.seed, setting_of(job), statistics.mean(losses[-last:]), seconds, mean)


def show(found: Sequence[Found]) -> bool:
    """Print the table; return whether every seed meets the target."""
    by_seed: dict[int, dict[str, Found]] = {}
    for one in found:
        by_seed.setdefault(one.seed, {})[one.variant] = one
    rows, met = [], True
    for seed, row in sorted(by_seed.items()):
        if "lossless" not in row:
            continue
        base = row["lossless"].loss
        for variant in VARIANTS:
            if variant in row:
                change = row[variant].loss / base - 1
                errors = ", ".join(f"{name} {value:.3f}" for name, value in row[variant].errors.items())
                rows.append([str(seed), variant, f"{row[variant].loss:.4f}", f"{100 * change:+.2f} %", errors or "-"])
                met &= variant != "compressed" or abs(change) <= TARGET
    print_table(["seed", "plan", "loss", "against lossless", "relative rounding error"], rows)
    return met


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; with --check return 1 when the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=224)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--results", type=Path, help="append every run to this file as a JSON line")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    tokens = prepare_tokens("stdlib", load_tokenizer("bytes"), Path(".terrace-cache"))
    print(f"{num_params(decoder(options.hidden, options.layers)):,} parameters, {options.steps} steps", flush=True)
    held: list[Found] = []
    if options.results is not None and options.results.exists():
        held = [Found(**json.loads(line)) for line in options.results.read_text(encoding="utf-8").splitlines()]
    found = []
    with LocalPool(8) as pool:
        for seed, variant in ((seed, variant) for seed in options.seeds for variant in options.variants):
            sizes = (options.steps, options.sequence, options.hidden, options.layers)
            job = Job(variant, seed, *sizes, options.lr, tokens)
            wanted = (variant, seed, setting_of(job))
            known = [one for one in held if (one.variant, one.seed, one.setting) == wanted]
            found.append(known[0] if known else pool.run(8, run, job, timeout_s=_CALL_S)[0])
            print(f"seed {seed} {variant}: {found[-1].loss:.4f} in {found[-1].seconds:.0f} s", flush=True)
            if options.results is not None and not known:
                with options.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(found[-1])) + "\n")
    met = show(found)
    print(f"compressed within {100 * TARGET:.1f} % of lossless for every seed: {'met' if met else 'MISSED'}")
    return 0 if met or not options.check else 1


if __name__ == "__main__":
    sys.exit(main())
