"""Do narrow states change the loss of a model? AdamW's moments in bf16 and in 8-bit blocks, and bf16 parameters without
an fp32 master.

One rank trains a decoder of 1.3 M parameters on the source text of the Python standard library, with the same batches,
initial values and learning rates for all, with several seeds:

    fp32              everything in fp32
    bf16 states       moments in bf16
    int8 states       moments in 8-bit blocks
    mixed             products in bf16 of a bf16 copy of fp32 parameters
    bf16              parameters in bf16 alone, each update rounded stochastically
    bf16, int8        the same, and moments in 8-bit blocks
    bf16, nearest     the same with each update rounded to the nearest, which no plan does

Compared is the mean loss of the last tenth of the steps: of the first three with fp32, of the others with mixed.

Target: but for rounding to the nearest, the loss rises by at most 0.5 % in the mean over the seeds.
"""

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.claims import Claim, judge, options_for_claims, print_table
from bench.common import decoder, engine_of, local_cluster
from bench.learning import Held, Job, Result, parser_of, tokens, train
from terrace.model.decoder import build_blocks
from terrace.model.init import initialise
from terrace.plan.plan import Plan
from terrace.plan.presets import preset
from terrace.runtime.noise import Noise

VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16 states": {"optimizer_states": "bf16"},
    "int8 states": {"optimizer_states": "int8"},
    "mixed": {"compute": "bf16"},
    "bf16": {"compute": "bf16", "master": "bf16"},
    "bf16, int8": {"compute": "bf16", "master": "bf16", "optimizer_states": "int8"},
    "bf16, nearest": {"compute": "bf16", "master": "bf16"},
}
COMPARED = {"bf16 states": "fp32", "int8 states": "fp32", "bf16": "mixed", "bf16, int8": "mixed"}
NEAREST = "bf16, nearest"
TARGET = 0.005


@dataclass(frozen=True)
class Found(Result):
    """Result of a run: its loss, and bytes of optimizer state, the master included."""

    num_bytes: int


def plan_of(job: Job) -> Plan:
    plan = preset("ddp", local_cluster({"package": 1}))
    return replace(plan, micro_batch=job.batch, **VARIANTS[job.variant])


def run(job: Job) -> Found:
    config = decoder(job.hidden, job.layers)
    blocks = build_blocks(config)
    initialise(blocks, config, seed=job.seed, dtype=torch.float32)
    engine = engine_of(blocks, local_cluster({"package": 1}), plan_of(job), 1, optimizer=job.optimizer)
    num_bytes = engine.program.state_bytes["optimizer"]
    begin_s = time.process_time()
    with to_the_nearest() if job.variant == NEAREST else noisy():
        results = train(job, engine)
    loss = statistics.mean(each.loss for each in results[-job.last :])
    return Found(job.variant, job.seed, job.setting, loss, time.process_time() - begin_s, num_bytes)


@contextmanager
def noisy() -> Iterator[None]:
    yield


@contextmanager
def to_the_nearest() -> Iterator[None]:
    """Half a step in place of random bits, so that cutting off rounds to the nearest."""
    drawn = Noise.bits

    def half(self: Noise, state: str, step: int, start: int, stop: int, device: torch.device) -> Tensor:
        return torch.full((stop - start,), 1 << 15, dtype=torch.int32, device=device)

    Noise.bits = half  # type: ignore[method-assign]
    try:
        yield
    finally:
        Noise.bits = drawn  # type: ignore[method-assign]


def claims_of(found: dict[tuple[str, int], Found]) -> list[Claim]:
    """How each variant changes the loss, over the seeds that have both runs."""
    claims = list[Claim]()
    for variant, rival in COMPARED.items():
        seeds = [seed for name, seed in found if name == variant and (rival, seed) in found]
        changes = [found[variant, seed].loss / found[rival, seed].loss - 1 for seed in seeds]
        if changes:
            name = f"rise of the loss, {variant}, mean over {len(seeds)} seeds"
            mean, low, high = statistics.mean(changes), min(changes), max(changes)
            claims.append(Claim(name=name, found=mean, low=low, high=high, goal=TARGET, rival=rival))
    return claims


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; with --check return 1 when a target is missed."""
    parser = parser_of(__doc__, tuple(VARIANTS), hidden=256, lr=1e-3)
    parser.add_argument("--batch", type=int, default=8)
    options_for_claims(parser)
    parser.set_defaults(steps=150)
    options = parser.parse_args(arguments)
    text, held, found = tokens(), Held(options.results, Found), dict[tuple[str, int], Found]()
    for seed in options.seeds:
        for variant in options.variants:
            sizes = (options.steps, options.sequence, options.batch, options.hidden, options.layers)
            job = Job(variant, seed, *sizes, options.lr, text)
            found[variant, seed] = held.result(job, (plan_of(job), decoder(job.hidden, job.layers)), partial(run, job))
    rows = [
        [str(seed), name, f"{one.loss:.4f}", f"{one.num_bytes / 1e6:.2f} MB"] for (name, seed), one in found.items()
    ]
    print_table(["seed", "run", "loss", "optimizer state"], rows)
    return judge(claims_of(found), options)


if __name__ == "__main__":
    sys.exit(main())
