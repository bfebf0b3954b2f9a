"""What a mixture learns: against a dense model of its active size, with and without a moved bias, with rows in fp8.

Two gloo ranks train small decoders on the source text of the Python standard library, with the same batches and
learning rates for all, with several seeds:

    dense      MLPs as large as the experts that a token passes
    mixture    8 experts, of which a token passes 2, by sigmoids (DeepSeek-V3's gate), on both ranks
    bias       the same, the bias moved by the loads (2408.15664)
    fp8        as `bias`, and rows on their way to the other rank's experts in fp8

Compared are the mean loss of the last tenth of the steps and the mean MaxVio of the last 100. Runs already in the
results file are not repeated.

Targets: for every seed the mixture ends below the dense model, and with the bias MaxVio is at most 0.2 and at most a
fifth of that without. In the mean over seeds fp8 raises the loss by at most 0.5 %; rounding alone changes a run, too.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from bench.claims import Claim, judge, measured, options_for_claims, print_table
from bench.common import decoder, engine_of, local_cluster
from terrace.data.batches import Batches
from terrace.data.token_file import TokenFile
from terrace.data.tokenizer import load_tokenizer
from terrace.data.tokens import prepare_tokens
from terrace.launch.start import LocalPool, World
from terrace.model.config import ModelConfig, block_specs
from terrace.model.decoder import build_blocks
from terrace.model.experts.balance import BalanceConfig
from terrace.model.experts.config import ExpertsConfig
from terrace.model.init import initialise
from terrace.plan.plan import Plan
from terrace.plan.presets import preset
from terrace.runtime.batch import Batch, places_of
from terrace.runtime.settings import OptimizerConfig
from terrace.train.config import TrainConfig
from terrace.train.schedule import learning_rate

VARIANTS = ("dense", "mixture", "bias", "fp8")
BALANCED = ("bias", "fp8")
MAX_VIO, PART, FP8_CHANGE = 0.2, 0.2, 0.005
NUM_RANKS, PER_TOKEN = 2, 2
_CALL_S = 3600.0


@dataclass(frozen=True)
class Job:
    """One training run, as given to every rank."""

    variant: str
    seed: int
    steps: int
    sequence: int
    batch: int
    hidden: int
    layers: int
    lr: float
    step_of_bias: float
    tokens: TokenFile

    @property
    def setting(self) -> str:
        """The settings that all compared runs share."""
        size = f"hidden {self.hidden}, {self.layers} layers, lr {self.lr:g}, bias {self.step_of_bias:g}"
        return f"{self.steps} steps of {self.batch} x {self.sequence}, {size}"

    @property
    def config(self) -> ModelConfig:
        dense = decoder(self.hidden, self.layers)
        if self.variant == "dense":
            return dense
        experts = ExpertsConfig(
            num_experts=8,
            per_token=PER_TOKEN,
            intermediate_size=dense.intermediate_size // PER_TOKEN,
            gate="sigmoid",
            biased=True,
        )
        return replace(dense, experts=experts)

    @property
    def plan(self) -> Plan:
        cluster = local_cluster({"package": NUM_RANKS})
        plan = replace(preset("ddp", cluster), micro_batch=self.batch // NUM_RANKS)
        if self.variant == "fp8":
            table, wire = {"package": {"expert": NUM_RANKS}}, {"dispatch": {"package": "fp8"}}
            plan = replace(plan, experts=table, wire={**plan.wire, **wire})
        return plan


@dataclass(frozen=True)
class Found:
    """Result of a run; `max_vio` is 0 without experts."""

    variant: str
    seed: int
    setting: str
    loss: float
    max_vio: float
    seconds: float


def run(world: World, job: Job) -> Found:
    """Train on this rank."""
    config = job.config
    blocks = build_blocks(config)
    initialise(blocks, config, seed=job.seed, dtype=torch.float32)
    optimizer = OptimizerConfig(lr=job.lr)
    schedule = TrainConfig(steps=job.steps, batch=job.batch, sequence=job.sequence, warmup_steps=job.steps // 20)
    engine = engine_of(
        blocks,
        local_cluster({"package": NUM_RANKS}),
        job.plan,
        1,
        rank=world.rank,
        optimizer=optimizer,
        declared=block_specs(config),
        balance=BalanceConfig(bias=job.step_of_bias if job.variant in BALANCED else 0.0),
    )
    batches = Batches(job.tokens, job.sequence, schedule.batch, job.seed)
    losses, max_vio, begin_s = list[float](), list[float](), time.monotonic()
    for step in range(job.steps):
        (arrays,) = batches.micro_batches(step, world.rank, world.world_size, schedule.batch // NUM_RANKS)
        inputs, labels = (torch.from_numpy(array) for array in arrays)
        rows = torch.arange(len(inputs)) + step * schedule.batch + world.rank * len(inputs)
        batch = Batch(inputs, labels, places=places_of(rows, labels))
        result = engine.step([batch], learning_rate(step, schedule, optimizer))
        losses.append(result.loss)
        max_vio.append(result.loads.figures["max_vio"] if result.loads is not None else 0.0)
    engine.check_bytes()
    engine.close()
    loss = statistics.mean(losses[-max(1, job.steps // 10) :])
    return Found(job.variant, job.seed, job.setting, loss, statistics.mean(max_vio[-100:]), time.monotonic() - begin_s)


def claims_of(seed: int, found: Mapping[str, Found]) -> list[Claim]:
    """The claims that the runs of a seed allow."""
    claims = []

    def claim(name: str, value: float, goal: float, rival: str) -> None:
        claims.append(measured(f"{name}, seed {seed}", [value], goal, rival=rival))

    if {"dense", "mixture"} <= found.keys():
        ratio = found["mixture"].loss / found["dense"].loss
        claim("loss of a mixture of 8 experts, 2 a token", ratio, 1.0, "a dense model of its active size")
    if "bias" in found:
        claim("MaxVio with a moved bias, last 100 steps", found["bias"].max_vio, MAX_VIO, "")
    if {"mixture", "bias"} <= found.keys():
        ratio = found["bias"].max_vio / found["mixture"].max_vio
        claim("MaxVio with a moved bias", ratio, PART, "the same without")
    return claims


def fp8_claims(runs: Sequence[Mapping[str, Found]]) -> list[Claim]:
    """The claim about rows in fp8, over the seeds that have both runs."""
    changes = [found["fp8"].loss / found["bias"].loss - 1 for found in runs if {"bias", "fp8"} <= found.keys()]
    name = f"rise of the loss by dispatch in fp8, mean over {len(changes)} seeds"
    if not changes:
        return []
    mean = statistics.mean(changes)
    return [Claim(name=name, found=mean, low=min(changes), high=max(changes), goal=FP8_CHANGE, rival="lossless rows")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; with --check return 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--bias", type=float, default=0.002, help="how far the bias moves in a step")
    parser.add_argument("--results", type=Path, help="append every run to this file as a JSON line")
    options_for_claims(parser)
    options = parser.parse_args(arguments)
    tokens = prepare_tokens("stdlib", load_tokenizer("bytes"), Path(".terrace-cache"))
    held: list[Found] = []
    if options.results is not None and options.results.exists():
        held = [Found(**json.loads(line)) for line in options.results.read_text(encoding="utf-8").splitlines()]
    rows, claims, runs = list[list[str]](), list[Claim](), list[dict[str, Found]]()
    with LocalPool(NUM_RANKS) as pool:
        for seed in options.seeds:
            found: dict[str, Found] = {}
            for variant in options.variants:
                sizes = (options.steps, options.sequence, options.batch, options.hidden, options.layers)
                job = Job(variant, seed, *sizes, options.lr, options.bias, tokens)
                wanted = (variant, seed, job.setting)
                known = [one for one in held if (one.variant, one.seed, one.setting) == wanted]
                one = known[0] if known else pool.run(NUM_RANKS, run, job, timeout_s=_CALL_S)[0]
                found[variant] = one
                print(f"seed {seed} {variant}: {one.loss:.4f} in {one.seconds:.0f} s", flush=True)
                if options.results is not None and not known:
                    with options.results.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(asdict(one)) + "\n")
            rows += [
                [str(seed), name, f"{one.loss:.4f}", f"{one.max_vio:.3f}" if name != "dense" else "-"]
                for name, one in found.items()
            ]
            claims += claims_of(seed, found)
            runs.append(found)
    claims += fp8_claims(runs)
    print_table(["seed", "run", "loss", "MaxVio"], rows)
    return judge(claims, options)


if __name__ == "__main__":
    sys.exit(main())
