"""Do products in 8-bit floats change the loss of a model? Against the same run with products in bf16.

One process trains a decoder of 1.3 M parameters, or with `--experts` a mixture, on the source text of the Python
standard library, with the same batches, initial values and learning rates for all, with several seeds; a CPU emulates
the products exactly. Compared is the mean loss of the last tenth of the steps. Runs already in the results file are not
repeated.

Target: the mean over seeds of the loss in 8 bits is within 0.5 % of bf16's.
"""

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from bench.claims import Claim, judge, options_for_claims, print_table
from bench.common import decoder, engine_of, local_cluster
from bench.learning import Held, Result, parser_of, tokens, train
from bench.learning import Job as LearningJob
from terrace.model.blocks import block_specs, num_params
from terrace.model.config import ModelConfig
from terrace.model.decoder import build_blocks
from terrace.model.experts.config import ExpertsConfig
from terrace.model.init import initialise
from terrace.plan.plan import Plan
from terrace.plan.presets import preset

TARGET = 0.005
BASE = "bf16"
_LOCAL = local_cluster({"package": 1})
CLUSTER = replace(_LOCAL, device=replace(_LOCAL.device, backend="cpu"))  # which emulates
VARIANTS = (BASE, "fp8", "fp8:row")


@dataclass(frozen=True)
class Job(LearningJob):
    """One training run; of `experts` a token passes two, without any layers are dense."""

    experts: int

    @property
    def setting(self) -> str:
        """The settings that all compared runs share."""
        return super().setting + (f", {self.experts} experts" if self.experts else "")


@dataclass(frozen=True)
class Found(Result):
    """Result of a run; `seconds` of the processor."""

    grad_norm: float


def plan_of(variant: str) -> Plan:
    """The plan of a contestant."""
    plan = replace(preset("ddp", CLUSTER), compute="bf16")
    return replace(plan, products=None if variant == BASE else variant)


def model_of(hidden: int, layers: int, experts: int) -> ModelConfig:
    """The decoder, or a mixture of experts of which each is as large as a third of its MLP."""
    config = decoder(hidden, layers)
    if not experts:
        return config
    inner = -(-config.intermediate_size // 3 // 16) * 16
    return replace(config, experts=ExpertsConfig(num_experts=experts, per_token=2, intermediate_size=inner))


def run(job: Job) -> Found:
    """Train in this process."""
    config = model_of(job.hidden, job.layers, job.experts)
    blocks = build_blocks(config)
    initialise(blocks, config, seed=job.seed, dtype=torch.float32)
    plan = replace(plan_of(job.variant), micro_batch=job.batch)
    engine = engine_of(blocks, CLUSTER, plan, 1, optimizer=job.optimizer, declared=block_specs(config))
    begin_s = time.process_time()
    last = train(job, engine)[-job.last :]
    loss, norm = (statistics.mean(getattr(each, name) for each in last) for name in ("loss", "grad_norm"))
    return Found(job.variant, job.seed, job.setting, loss, time.process_time() - begin_s, norm)


def claims_of(runs: Sequence[Mapping[str, Found]]) -> list[Claim]:
    """A claim a format, over the seeds that have both runs."""
    claims = []
    for variant in VARIANTS[1:]:
        changes = [found[variant].loss / found[BASE].loss - 1 for found in runs if {BASE, variant} <= found.keys()]
        if changes:
            name = f"rise of the loss by products in {variant}, mean over {len(changes)} seeds"
            mean, low, high = statistics.mean(changes), min(changes), max(changes)
            claims.append(Claim(name=name, found=mean, low=low, high=high, goal=TARGET, rival=BASE))
    return claims


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; with --check return 1 when the target is missed."""
    parser = parser_of(__doc__, VARIANTS, hidden=224, lr=1e-3)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--experts", type=int, default=0, help="of each layer; a token passes two")
    options_for_claims(parser)
    options = parser.parse_args(arguments)
    model = model_of(options.hidden, options.layers, options.experts)
    print(f"{num_params(model):,} parameters, {options.steps} steps", flush=True)
    text, held, rows, runs = tokens(), Held(options.results, Found), list[list[str]](), list[dict[str, Found]]()
    for seed in options.seeds:
        found = dict[str, Found]()
        for variant in options.variants:
            sizes = (options.steps, options.sequence, options.batch, options.hidden, options.layers)
            job = Job(variant, seed, *sizes, options.lr, text, options.experts)
            one = found[variant] = held.result(job, plan_of(variant), partial(run, job))
            against = f"{100 * (one.loss / found[BASE].loss - 1):+.2f} %" if BASE in found else "-"
            rows.append([str(seed), variant, f"{one.loss:.4f}", against, f"{one.grad_norm:.3f}"])
        runs.append(found)
    print_table(["seed", "products", "loss", "against bf16", "gradient norm"], rows)
    return judge(claims_of(runs), options)


if __name__ == "__main__":
    sys.exit(main())
