"""A layer of experts, forward and backward: against `transformers` on one rank, against DeepSpeed-MoE on several.

One rank: `transformers` with each of its implementations of Mixtral's experts, and a dense gated MLP of the same active
size. Every contestant has a process of its own and the same values.

Two and four gloo ranks that hold different experts, each with tokens of its own: Terrace with the table `[experts]`,
and DeepSpeed's `MoE` layer twice. Without dropping it computes the same, but pads every expert to the fullest one. With
a capacity it drops tokens, so it computes less: it is shown without a goal. The router of DeepSpeed is its top-2 gate
without sampling, its experts are gated MLPs. Its version 0.16 dispatches by a product with a one-hot tensor, 0.19 by
gathers, as Terrace does: the goal is 0.35 of the first, and no more than the second.

A ratio is of processor time, threads of gloo included, summed over ranks. DeepSpeed is the extra `lab`.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from bench import turns
from bench.claims import Claim, compared, judge, options_for_claims, print_table, ratio_words, versioned
from bench.common import Step, Timing, alternate, decoder, engine_of, local_cluster, over_ranks, real_blocks
from bench.contest import Work, take_turns
from bench.lab.deepspeed_zero import load
from terrace.model.blocks import block_specs
from terrace.model.config import ModelConfig
from terrace.model.experts.config import ExpertsConfig
from terrace.model.experts.mixture import Mixture
from terrace.model.layers import MLP
from terrace.plan.presets import preset
from terrace.runtime.malloc import keep_freed_memory

HF_GOAL = 1.0
ONE_HOT_GOAL, GATHERS_GOAL = 0.35, 1.0
IMPLEMENTATIONS = ("eager", "grouped_mm")  # the third, batched_mm, takes fifty times as long
TOLERANCE = 1e-4  # of results in fp32, relative


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A layer: E experts of inner size I, k of them for a token, hidden H."""

    experts: int
    per_token: int
    hidden: int
    inner: int

    @property
    def words(self) -> str:
        return f"E {self.experts}, k {self.per_token}, H {self.hidden}, I {self.inner}"

    @property
    def config(self) -> ModelConfig:
        experts = ExpertsConfig(num_experts=self.experts, per_token=self.per_token, intermediate_size=self.inner)
        return replace(decoder(self.hidden, layers=1), experts=experts)


ONE_RANK = (
    Sizes(experts=8, per_token=2, hidden=160, inner=432),
    Sizes(experts=32, per_token=4, hidden=256, inner=96),
)
SEVERAL = Sizes(experts=8, per_token=2, hidden=256, inner=512)


def values(sizes: Sizes) -> dict[str, Tensor]:
    """The parameters of a layer by Terrace's names, the same in every process."""
    generator = torch.Generator().manual_seed(0)

    def values_of(*shape: int) -> Tensor:
        drawn: Tensor = torch.randn(*shape, generator=generator) / math.sqrt(shape[-1])
        return drawn

    inner, hidden = (sizes.experts, sizes.inner, sizes.hidden), (sizes.experts, sizes.hidden, sizes.inner)
    return {
        "router.weight": values_of(sizes.experts, sizes.hidden),
        "gate.weight": values_of(*inner),
        "up.weight": values_of(*inner),
        "down.weight": values_of(*hidden),
    }


def tokens_of(sizes: Sizes, num_tokens: int, rank: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1 + rank)
    return torch.randn(1, num_tokens, sizes.hidden, generator=generator)


def passes(layer: nn.Module, x: Tensor) -> list[float]:
    """A forward and a backward of a layer; norms of its output and of the gradient of x (1, T, H)."""
    x = x.detach().requires_grad_()
    out = layer(x)
    out = out[0] if isinstance(out, tuple) else out  # DeepSpeed's layer adds its loss and its counts
    out.backward(torch.ones_like(out))
    for parameter in layer.parameters():
        parameter.grad = None
    assert x.grad is not None
    return [float(out.detach().norm()), float(x.grad.norm())]


def own(sizes: Sizes, num_tokens: int) -> Work:
    keep_freed_memory()  # as the engine does
    layer, x = Mixture(sizes.config), tokens_of(sizes, num_tokens)
    layer.load_state_dict(values(sizes))
    return lambda: passes(layer, x)


def dense(sizes: Sizes, num_tokens: int) -> Work:
    layer = MLP(replace(sizes.config, intermediate_size=sizes.per_token * sizes.inner, experts=None))
    x = tokens_of(sizes, num_tokens)
    return lambda: passes(layer, x)


def theirs(implementation: str, sizes: Sizes, num_tokens: int) -> Work:
    """Mixtral's layer of `transformers`."""
    from transformers.models.mixtral.configuration_mixtral import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=sizes.hidden,
        intermediate_size=sizes.inner,
        num_local_experts=sizes.experts,
        num_experts_per_tok=sizes.per_token,
    )
    config._experts_implementation = implementation
    layer: Any = MixtralSparseMoeBlock(config)
    found = values(sizes)
    with torch.no_grad():
        layer.gate.weight.copy_(found["router.weight"])
        layer.experts.gate_up_proj.copy_(torch.cat((found["gate.weight"], found["up.weight"]), 1))
        layer.experts.down_proj.copy_(found["down.weight"])
    x = tokens_of(sizes, num_tokens)
    return lambda: passes(layer, x)


def one_rank(sizes: Sizes, num_tokens: int, rounds: int) -> tuple[list[list[str]], Claim, list[str]]:
    """Rows of the table, the claim, and the faults of the numbers."""
    contestants: dict[str, Any] = {"terrace": (own, (sizes, num_tokens)), "dense": (dense, (sizes, num_tokens))}
    contestants |= {name: (theirs, (name, sizes, num_tokens)) for name in IMPLEMENTATIONS}
    seconds, found = take_turns(contestants, rounds)
    rows, wrong = [], []
    for name, took_s in seconds.items():
        row = [f"one rank, {sizes.words}", name, f"{statistics.median(took_s) * 1e3:.1f}"]
        rows.append([*row, "" if name == "terrace" else ratio_words(seconds["terrace"], took_s)])
        if name != "dense" and differs(found[name], found["terrace"]):
            wrong.append(f"{name}, {sizes.words}: norms {found[name]}, not {found['terrace']}")
    fastest = min(IMPLEMENTATIONS, key=lambda name: statistics.median(seconds[name]))
    rival = versioned("transformers", fastest)
    claim = f"layer of experts, one rank, {sizes.words}, processor time"
    return rows, compared(claim, seconds["terrace"], seconds[fastest], HF_GOAL, rival=rival), wrong


def differs(ours: Sequence[float], other: Sequence[float]) -> bool:
    return any(abs(a - b) > TOLERANCE * abs(b) for a, b in zip(ours, other, strict=True))


class Expert(nn.Module):
    """One gated MLP, for DeepSpeed to copy."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate = nn.Linear(sizes.hidden, sizes.inner, bias=False)
        self.up = nn.Linear(sizes.hidden, sizes.inner, bias=False)
        self.down = nn.Linear(sizes.inner, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


def deepspeed_layer(sizes: Sizes, rank: int, num_ranks: int, capacity: float | None) -> nn.Module:
    """DeepSpeed's layer with the experts of this rank; without a `capacity` nothing is dropped."""
    deepspeed = load(num_ranks)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    from deepspeed.moe.layer import MoE

    layer: nn.Module = MoE(
        sizes.hidden,
        Expert(sizes),
        num_experts=sizes.experts,
        ep_size=num_ranks,
        k=sizes.per_token,
        capacity_factor=capacity or 1.0,
        drop_tokens=capacity is not None,
        top2_2nd_expert_sampling=False,
    )
    layer.set_deepspeed_parallelism()  # type: ignore[operator]
    found, moe = values(sizes), layer.deepspeed_moe
    held = sizes.experts // num_ranks
    with torch.no_grad():
        moe.gate.wg.weight.copy_(found["router.weight"])  # type: ignore[union-attr, operator]
        for index, expert in enumerate(moe.experts.deepspeed_experts):  # type: ignore[union-attr, arg-type]
            for name in ("gate", "up", "down"):
                getattr(expert, name).weight.copy_(found[f"{name}.weight"][rank * held + index])
    return layer


def contest(
    rank: int, num_ranks: int, num_tokens: int, rounds: int, libraries: Sequence[str], turn: Callable[[], None]
) -> dict[str, Any]:
    """Let the contestants take turns; timings and norms, summed over ranks, of those in `libraries`."""
    sizes, engines = SEVERAL, []
    steps: dict[str, Step] = dict.fromkeys(CONTESTANTS, turns.sit_out)
    norms: dict[str, list[float]] = {}
    for name in libraries:
        if name == "terrace":
            cluster = local_cluster({"package": num_ranks})
            plan = replace(preset("ddp", cluster), experts={"package": {"expert": num_ranks}}, micro_batch=1)
            blocks = real_blocks(sizes.config)
            blocks[1].mlp.load_state_dict(values(sizes))  # type: ignore[union-attr]
            engines.append(engine_of(blocks, cluster, plan, 1, rank=rank, declared=block_specs(sizes.config)))
            for axis in engines[0].axes:  # outside of a step nobody is told about waiting
                axis.in_block.waiting_on = lambda ranks: None
            layer: Any = engines[0].state.modules[1].mlp
        else:
            layer = deepspeed_layer(sizes, rank, num_ranks, CONTESTANTS[name])
        x = tokens_of(sizes, num_tokens, rank)

        def step(number: int, layer: nn.Module = layer, x: Tensor = x, name: str = name) -> float:
            norms[name] = passes(layer, x)
            return 0.0

        steps[name] = step
    timings = alternate(steps, rounds, warmup=2, before=turn)
    found: dict[str, Any] = {}
    for name in libraries:
        squares = torch.tensor(norms[name]).square()
        dist.all_reduce(squares)
        found[name] = over_ranks(timings[name]), squares.sqrt().tolist()
    for engine in engines:
        engine.close()
    return found


DROPLESS = "deepspeed, dropless"
CONTESTANTS: dict[str, float | None] = {"terrace": None, DROPLESS: None, "deepspeed, capacity 1.25": 1.25}


def several(num_ranks: int, num_tokens: int, rounds: int) -> tuple[list[list[str]], Claim, list[str]]:
    """Rows of the table, the claim, and the faults of the numbers."""
    found: dict[str, tuple[Timing, list[float]]]
    found = turns.hold(contest, list(CONTESTANTS), num_ranks, num_tokens, rounds)
    ours, rows = found["terrace"], []
    for name, (timing, _) in found.items():
        row = [f"{num_ranks} ranks, {SEVERAL.words}", name, f"{statistics.median(timing.cpu_s) * 1e3:.1f}"]
        rows.append([*row, "" if name == "terrace" else ratio_words(ours[0].cpu_s, timing.cpu_s)])
    other = found[DROPLESS]
    wrong = [f"{DROPLESS}: norms {other[1]}, not {ours[1]}"] if differs(other[1], ours[1]) else []
    about = f"layer of experts, {num_ranks} ranks, {num_tokens} tokens each, processor time"
    rival = versioned("deepspeed", "MoE, dropless")
    load(num_ranks)
    from deepspeed.moe import sharded_moe

    goal = GATHERS_GOAL if hasattr(sharded_moe, "_sparse_encode") else ONE_HOT_GOAL
    return rows, compared(about, ours[0].cpu_s, other[0].cpu_s, goal, rival=rival), wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return 1 when --check is given and a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--tokens", type=int, default=1024, help="of the one rank")
    parser.add_argument("--rank-tokens", type=int, default=2048, help="of each of several ranks")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    options_for_claims(parser)
    options = parser.parse_args(arguments)
    rows: list[list[str]] = []
    claims: list[Claim] = []
    wrong: list[str] = []
    for sizes in ONE_RANK:
        found = one_rank(sizes, options.tokens, options.rounds)
        rows, claims, wrong = rows + found[0], [*claims, found[1]], wrong + found[2]
    if find_spec("deepspeed") is None:
        print("DeepSpeed is not installed (the extra `lab`): its layer is left out", flush=True)
        options.ranks = []
    for num_ranks in options.ranks:
        found = several(num_ranks, options.rank_tokens, options.rounds)
        rows, claims, wrong = rows + found[0], [*claims, found[1]], wrong + found[2]
    print_table(["layer", "contestant", "CPU ms", "terrace's ratio (quartiles)"], rows)
    return judge(claims, options, wrong)


if __name__ == "__main__":
    sys.exit(main())
