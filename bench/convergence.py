"""Does compression change the loss of a model? Three-level placement, lossless, compressed, and without error feedback.

Eight gloo ranks in three tiers train a decoder of 1.3 M parameters on the source text of the Python standard library,
with the same batches, initial values and learning rates for all, with several seeds. Compared is the mean loss of the
last tenth of the steps. Runs already in the results file are not repeated.

Target: after 1,000 steps the compressed preset is within 0.5 % of the lossless one, for every seed.
"""

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from bench.claims import print_table
from bench.common import decoder, engine_of, local_cluster
from bench.learning import Held, Job, Result, first_of, parser_of, tokens, train
from terrace.cluster.cluster import Cluster
from terrace.launch.start import LocalPool, World
from terrace.model.blocks import num_params
from terrace.model.decoder import build_blocks
from terrace.model.init import initialise
from terrace.plan.plan import Plan
from terrace.plan.presets import preset

TARGET = 0.005
TIERS = {"package": 2, "node": 2, "system": 2}
VARIANTS = ("lossless", "compressed", "no feedback")
RESIDENT = 1000
NUM_RANKS = 8


@dataclass(frozen=True)
class Found(Result):
    """Result of a run; the errors are means over its last tenth."""

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


def run(world: World, job: Job) -> Found:
    """Train on this rank."""
    cluster, config = local_cluster(TIERS), decoder(job.hidden, job.layers)
    blocks = build_blocks(config)
    initialise(blocks, config, seed=job.seed, dtype=torch.float32)
    plan = plan_of(job.variant, cluster)
    engine = engine_of(blocks, cluster, plan, 1, rank=world.rank, optimizer=job.optimizer)
    begin_s = time.monotonic()
    results = train(job, engine)[-job.last :]
    errors = [each.quantisation_error for each in results]
    mean = {name: statistics.mean(row[name] for row in errors) for name in errors[-1]}
    loss, seconds = statistics.mean(each.loss for each in results), time.monotonic() - begin_s
    return Found(job.variant, job.seed, job.setting, loss, seconds, mean)


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
    parser = parser_of(__doc__, VARIANTS, hidden=224, lr=1e-3)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    print(f"{num_params(decoder(options.hidden, options.layers)):,} parameters, {options.steps} steps", flush=True)
    text, held, found = tokens(), Held(options.results, Found), []
    with LocalPool(NUM_RANKS) as pool:
        for seed, variant in ((seed, variant) for seed in options.seeds for variant in options.variants):
            sizes = (options.steps, options.sequence, NUM_RANKS, options.hidden, options.layers)
            job = Job(variant, seed, *sizes, options.lr, text)
            work = partial(first_of, pool, NUM_RANKS, run, job)
            found.append(held.result(job, plan_of(variant, local_cluster(TIERS)), work))
    met = show(found)
    print(f"compressed within {100 * TARGET:.1f} % of lossless for every seed: {'met' if met else 'MISSED'}")
    return 0 if met or not options.check else 1


if __name__ == "__main__":
    sys.exit(main())
