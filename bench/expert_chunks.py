"""Chunks of tokens on their way to experts, predicted and executed: 2 x 2 x 2 ranks on paced links.

Experts are on different ranks over the two outer tiers, so that a token's row crosses both. Messages are held to the
rates of the links, and experts to seconds that a rank sleeps in proportion to its rows: what is measured is how the
runtime overlaps messages and computing, whatever the machine. The prediction plays the same program with the same
seconds. Degrees take turns step by step; the median over steps is reported.
"""

import statistics
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.common import ADAMW, alternate, bench_parser, engine_of, over_ranks, real_blocks
from terrace.cluster.cluster import Cluster, Tier
from terrace.cluster.presets import load_cluster
from terrace.comm.pace import Pacer
from terrace.launch.start import LocalPool
from terrace.launch.world import World
from terrace.model.config import ModelConfig, block_specs, parse_model
from terrace.model.experts.config import ExpertsConfig
from terrace.model.experts.mixture import Mixture
from terrace.plan.plan import Plan
from terrace.plan.presets import preset
from terrace.program.program import Program
from terrace.runtime.batch import Batch
from terrace.simulate.cost import Costs
from terrace.simulate.events import simulate
from terrace.simulate.experts import ExpertSeconds

DEGREES = (1, 2, 4)


@dataclass(frozen=True)
class Job:
    """Seconds of a layer's experts in a forward and in a backward, and bytes/s of the outermost link."""

    forward_s: float = 0.25
    backward_s: float = 0.5
    rate: float = 5e5
    rounds: int = 3
    layers: int = 2
    rows: int = 8
    sequence: int = 64

    @property
    def model(self) -> ModelConfig:
        table = {
            "model_type": "llama",
            "vocab_size": 64,
            "hidden_size": 64,
            "num_hidden_layers": self.layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "intermediate_size": 64,
        }
        experts = ExpertsConfig(num_experts=8, per_token=2, intermediate_size=32)
        return replace(parse_model(table), experts=experts)

    @property
    def cluster(self) -> Cluster:
        device = load_cluster("local").device
        tiers = (("package", 100.0), ("node", 2.0), ("system", 1.0))
        return Cluster(
            name="paced",
            device=replace(device, overlap_penalty=0.0),
            tiers=tuple(
                Tier(name=name, size=2, bandwidth_bytes_per_s=self.rate * times, latency_s=1e-3)
                for name, times in tiers
            ),
        )

    def plan(self, chunks: int) -> Plan:
        """All else equal."""
        return replace(
            preset("ddp", self.cluster),
            compute="fp32",
            micro_batch=self.rows,
            experts={"node": {"expert": 2}, "system": {"expert": 2}},
            expert_chunks={"forward": chunks, "backward": chunks},
        )


class _Sleeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradient, None, None


def sleeping(mixture: Mixture, job: Job) -> None:
    """Let the experts of a mixture take their seconds, in proportion to the rows that arrive."""
    pass_through, tokens = mixture.pass_through, job.rows * job.sequence
    # A rank's rows of all its tokens under even routing: each token goes to about 1.86 of four ranks.
    whole = tokens * 4 * (1 - (6 * 5) / (8 * 7))

    def slow(rows: Tensor, *rest: Any) -> Tensor:
        share = len(rows) / whole
        found: Tensor = _Sleeps.apply(rows, share * job.forward_s, share * job.backward_s)  # type: ignore[no-untyped-call]
        return pass_through(found, *rest)

    mixture.pass_through = slow  # type: ignore[method-assign, assignment]


def predicted_s(program: Program, job: Job, chunks: int) -> float:
    """Seconds of the step, if nothing but the experts takes time to compute."""
    layers = [program.experts(block) is not None for block in range(len(program.blocks))]
    own = ExpertSeconds((job.forward_s, job.backward_s, 0.0), pieces=chunks, chunks=chunks)
    costs = Costs(
        forward_s=tuple(job.forward_s * layer for layer in layers),
        backward_s=tuple(job.backward_s * layer for layer in layers),
        update_s=(0.0,) * len(layers),
        program=program,
        weight_s=(0.0,) * len(layers),
        experts=tuple(own if layer else ExpertSeconds() for layer in layers),
    )
    return simulate(program, costs).step_s


def contest(world: World, job: Job) -> dict[int, tuple[float, list[float]]]:
    """Predicted seconds and the seconds of each step, by degree."""
    torch.set_num_threads(1)
    pacer, steps, predicted = Pacer(job.cluster, 1.0), {}, {}
    engines = []
    generator = torch.Generator().manual_seed(world.rank)
    inputs = torch.randint(64, (job.rows, job.sequence), generator=generator)
    batch = Batch(inputs, inputs.roll(-1, 1))
    for chunks in DEGREES:
        blocks = real_blocks(job.model)
        engine = engine_of(
            blocks,
            job.cluster,
            job.plan(chunks),
            1,
            rank=world.rank,
            declared=block_specs(job.model),
            sequence=job.sequence,
            pacer=pacer,
        )
        for block in blocks:
            for module in block.modules():
                if isinstance(module, Mixture):
                    sleeping(module, job)
        predicted[chunks] = predicted_s(engine.program, job, chunks)

        def step(number: int, engine: Any = engine) -> float:
            loss: float = engine.step([batch], ADAMW.lr).loss
            return loss

        steps[str(chunks)] = step
        engines.append(engine)
    timings = alternate(steps, job.rounds, warmup=1, before=dist.barrier)
    found = {chunks: (predicted[chunks], over_ranks(timings[str(chunks)]).wall_s) for chunks in DEGREES}
    for engine in engines:
        engine.check_bytes()
        engine.close()
    return found


def main() -> int:
    """Print a table."""
    parser = bench_parser(
        __doc__, **{name: getattr(Job, name) for name in ("forward_s", "backward_s", "rate", "rounds")}
    )
    options = parser.parse_args()
    job = Job(**{name: getattr(options, name) for name in ("forward_s", "backward_s", "rate", "rounds")})
    with LocalPool(job.cluster.world_size) as pool:
        found = pool.run(job.cluster.world_size, contest, job, timeout_s=600.0)[0]
    alone = found[1]
    print("chunks  predicted  measured  measured/predicted  gain predicted  gain measured")
    for chunks, (predicted, measured) in found.items():
        median = statistics.median(measured)
        print(
            f"{chunks:>6}  {predicted:>8.3f}s  {median:>7.3f}s  {median / predicted:>18.2f}"
            f"  {alone[0] / predicted:>14.2f}  {statistics.median(alone[1]) / median:>13.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
