"""Chunks of tokens on their way to experts, and gradients in the gaps between them: 2 x 2 x 2 ranks on paced links.

Experts are on different ranks over the two outer tiers, so that a token's row crosses both. Messages are held to the
rates of the links; attention and experts take seconds that a rank sleeps, experts in proportion to its rows: so the
overlap of messages and computing is measured, whatever the machine. The prediction plays the same program with the same
seconds, and sizes the parts of gradients. Contestants take turns step by step; the median over steps is reported. The
first sends a layer's gradient in one message before the next dispatch, in one chunk.
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.claims import compared, judge, print_table, ratio
from bench.claims import measured as measured_claim
from bench.common import ADAMW, alternate, bench_parser, engine_of, over_ranks, real_blocks
from bench.models import llama_of
from terrace.cluster.cluster import Cluster, Tier
from terrace.cluster.presets import load_cluster
from terrace.lab.pace import Pacer
from terrace.launch.start import LocalPool
from terrace.launch.world import World
from terrace.model.blocks import block_specs
from terrace.model.config import ModelConfig
from terrace.model.experts.config import ExpertsConfig
from terrace.model.experts.mixture import Mixture
from terrace.model.layers import Attention
from terrace.plan.plan import Plan
from terrace.plan.presets import preset
from terrace.program.lowering import build
from terrace.program.program import Program
from terrace.runtime.batch import Batch
from terrace.simulate.cost import Costs
from terrace.simulate.events import simulate
from terrace.simulate.gap_shares import Shares, any_shares, shares_to_try
from terrace.simulate.routed import RoutedSeconds

DEGREES = (1, 2, 4)
SECONDS_AND_RATE = ("forward_s", "backward_s", "attention_s", "rate")  # of a job, as options
Contestant = tuple[int, bool]  # chunks, and whether gradients travel in gaps
CONTESTANTS: tuple[Contestant, ...] = tuple((chunks, in_gaps) for in_gaps in (False, True) for chunks in DEGREES)


@dataclass(frozen=True)
class Job:
    """Seconds of a layer's experts and attention in a forward and in a backward, and bytes/s of the outermost link."""

    forward_s: float = 0.25
    backward_s: float = 0.5
    attention_s: float = 0.1  # of a forward; twice as long in a backward
    rate: float = 5e5
    rounds: int = 3
    layers: int = 3
    rows: int = 8
    sequence: int = 64
    head_size: int = 80  # so that an all-reduce of attention's gradient takes about as long as a dispatch

    @property
    def model(self) -> ModelConfig:
        dense = llama_of(64, self.layers, 4, 4, 64, 64, head_dim=self.head_size)
        experts = ExpertsConfig(num_experts=8, per_token=2, intermediate_size=32)
        return replace(dense, experts=experts)

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

    def plan(self, chunks: int, shares: Shares = ()) -> Plan:
        """All else equal."""
        return replace(
            preset("ddp", self.cluster),
            compute="fp32",
            micro_batch=self.rows,
            experts={"node": {"expert": 2}, "system": {"expert": 2}},
            expert_chunks={"forward": chunks, "backward": chunks},
            expert_gaps=shares,
        )

    def program(self, chunks: int, shares: Shares = ()) -> Program:
        return build(self.cluster, self.plan(chunks, shares), block_specs(self.model), 1, self.sequence)


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


def slow(module: nn.Module, job: Job) -> None:
    """Let a mixture's experts, and attention, take their seconds; experts in proportion to the rows that arrive."""
    if isinstance(module, Mixture):
        tokens = job.rows * job.sequence
        # A rank's rows of all its tokens under even routing: each token goes to about 1.86 of four ranks.
        whole = tokens * 4 * (1 - (6 * 5) / (8 * 7))
        inner = module.pass_through
        module.pass_through = _sleeping(  # type: ignore[method-assign]
            inner, lambda rows: (len(rows) / whole * job.forward_s, len(rows) / whole * job.backward_s)
        )
    elif isinstance(module, Attention):
        module.forward = _sleeping(module.forward, lambda _: (job.attention_s, 2 * job.attention_s))  # type: ignore[method-assign]


def _sleeping(
    function: Callable[..., Tensor], seconds_of: Callable[[Tensor], tuple[float, float]]
) -> Callable[..., Tensor]:
    def sleeping(rows: Tensor, *rest: Any) -> Tensor:
        found: Tensor = _Sleeps.apply(rows, *seconds_of(rows))  # type: ignore[no-untyped-call]
        return function(found, *rest)

    return sleeping


def costs_of(program: Program, job: Job, chunks: int) -> Costs:
    """Seconds where nothing but attention and experts takes time to compute."""
    layers = [bool(program.model.routed.traffic(block).way) for block in range(len(program.blocks))]
    own = RoutedSeconds((job.forward_s, job.backward_s, 0.0), pieces=chunks, chunks=chunks)
    return Costs(
        forward_s=tuple((job.forward_s + job.attention_s) * layer for layer in layers),
        backward_s=tuple((job.backward_s + 2 * job.attention_s) * layer for layer in layers),
        update_s=(0.0,) * len(layers),
        program=program,
        weight_s=(0.0,) * len(layers),
        routed=tuple(own if layer else RoutedSeconds() for layer in layers),
    )


def predicted_s(program: Program, job: Job, chunks: int) -> float:
    """Seconds of the step."""
    return simulate(program, costs_of(program, job, chunks)).step_s


def best_shares(job: Job, chunks: int) -> Shares:
    """The shares of a gradient in the gaps with which the predicted step is shortest."""
    costs = costs_of(job.program(chunks, any_shares(chunks)), job, chunks)
    return min(shares_to_try(costs), key=lambda shares: predicted_s(job.program(chunks, shares), job, chunks))


def contest(world: World, job: Job, shares: dict[Contestant, Shares]) -> dict[Contestant, tuple[float, list[float]]]:
    """Predicted seconds and the seconds of each step, by contestant."""
    torch.set_num_threads(1)
    pacer, steps, predicted = Pacer(job.cluster, 1.0), {}, {}
    engines = []
    generator = torch.Generator().manual_seed(world.rank)
    inputs = torch.randint(64, (job.rows, job.sequence), generator=generator)
    batch = Batch(inputs, inputs.roll(-1, 1))
    for contestant in CONTESTANTS:
        chunks, _ = contestant
        blocks = real_blocks(job.model)
        engine = engine_of(
            blocks,
            job.cluster,
            job.plan(chunks, shares[contestant]),
            1,
            rank=world.rank,
            declared=block_specs(job.model),
            sequence=job.sequence,
            pacer=pacer,
        )
        for module in (module for block in blocks for module in block.modules()):
            slow(module, job)
        predicted[contestant] = predicted_s(engine.program, job, chunks)

        def step(number: int, engine: Any = engine) -> float:
            loss: float = engine.step([batch], ADAMW.lr).loss
            return loss

        steps[str(contestant)] = step
        engines.append(engine)
    timings = alternate(steps, job.rounds, warmup=1, before=dist.barrier)
    found = {each: (predicted[each], over_ranks(timings[str(each)]).wall_s) for each in CONTESTANTS}
    for engine in engines:
        engine.check_bytes()
        engine.close()
    return found


def main() -> int:
    """Print a table, and hold its figures to their goals."""
    parser = bench_parser(__doc__, rounds=Job.rounds)
    for name in SECONDS_AND_RATE:
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=getattr(Job, name))
    options = parser.parse_args()
    job = Job(**{name: getattr(options, name) for name in (*SECONDS_AND_RATE, "rounds")})
    shares = {(chunks, in_gaps): best_shares(job, chunks) if in_gaps else () for chunks, in_gaps in CONTESTANTS}
    with LocalPool(job.cluster.world_size) as pool:
        found = pool.run(job.cluster.world_size, contest, job, shares, timeout_s=900.0)[0]
    alone_s, alone = found[1, False]
    rows = []
    for (chunks, in_gaps), (predicted, measured) in found.items():
        words = ", ".join(f"{share:.3g}" for share in shares[chunks, in_gaps]) or "before the dispatch"
        median = statistics.median(measured)
        figures = predicted, median, median / predicted, alone_s / predicted, ratio(alone, measured)
        rows.append([str(chunks), words, *(f"{figure:.2f}" for figure in figures)])
    heading = ["chunks", "gradients", "predicted s", "measured s", "measured / predicted", "gain predicted", "gain"]
    print_table(heading, rows)
    predicted, best = found[max(DEGREES), True]
    names = f"{max(DEGREES)} chunks, gradients in gaps", "one chunk, gradients before the dispatch"
    claims = [
        compared(f"{names[0]}: gain", alone, best, 1.15, at_least=True, rival=names[1]),
        measured_claim(f"{names[0]}: measured over predicted", [each / predicted for each in best], 1.2),
        compared("gradients in one message lose", found[max(DEGREES), False][1], best, 1.0, at_least=True),
    ]
    return judge(claims, options)


if __name__ == "__main__":
    sys.exit(main())
