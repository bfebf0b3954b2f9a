"""Cost and savings of the context axis, on local processes.

    one rank   attention of a rank that exchanges nothing, through this path and by torch's own: at most 3 % more
    memory     activations of a rank: the longest row on 8 ranks under the memory of one rank's longest: 7 times
    links      a step on 2 x 2 ranks whose outer link is slow: Ulysses outside and the ring inside against the ring
               outside and Ulysses inside, which must be faster

`one rank` takes turns in one process and compares processor time; ratios are medians over rounds, with the quartiles.
`memory` is the most that torch allocates at once in a step on the fullest rank, scratch of kernels included, as
recorded by its profiler on the computing thread: outgoing messages sent in one piece are not seen. The longest row is
read off a line through the peaks at 6 and 8 times the tokens. `links` holds every message to the rate of its tier by
sleeping (terrace.lab.pace), so other jobs disturb it less.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from bench.claims import judge, measured, options_for_claims, print_table, ratio, spread, versioned
from bench.common import alternate, decoder, engine_of, local_cluster, micro_batches
from terrace.cluster.cluster import Cluster
from terrace.comm.group_p2p import GroupP2P
from terrace.comm.lane import make_lane
from terrace.comm.pace import UNPACED
from terrace.lab.pace import Pacer
from terrace.launch.start import LocalPool, World
from terrace.model.blocks import block_specs
from terrace.model.config import ModelConfig
from terrace.model.decoder import build_blocks
from terrace.model.init import initial_value
from terrace.plan.context import ContextGroup
from terrace.plan.layout import INSIDE
from terrace.plan.presets import preset
from terrace.runtime.batch import Batch
from terrace.runtime.clock import HostClock
from terrace.runtime.context.attention import attend
from terrace.runtime.context.device_layout import DeviceLayout
from terrace.runtime.context.peer_exchange import PeerComm
from terrace.runtime.engine import Engine
from terrace.runtime.in_block import InBlockComm
from terrace.runtime.linear import WeightGradients
from terrace.sequence.build import build_token_layout
from terrace.sequence.group_layout import GroupLayout
from terrace.sequence.segments import Segment

ONE_RANK_TARGET, MEMORY_TARGET = 1.03, 7.0
CALL_S = 900.0


@dataclass(frozen=True)
class Job:
    """Steps of one engine: degrees of both forms by tier, tokens of the row, number of steps."""

    cluster: Cluster
    forms: dict[str, dict[str, int]]
    config: ModelConfig
    sequence: int
    num_steps: int
    paced: bool = False


def job_engine(world: World, job: Job) -> Engine:
    """The engine of a job on this rank."""
    specs = block_specs(job.config)
    mapping = {tier: {"context": forms} for tier, forms in job.forms.items()}
    return engine_of(
        build_blocks(job.config),
        job.cluster,
        replace(preset("ddp", job.cluster), mapping=mapping),
        1,
        rank=world.rank,
        initial=lambda block, name, shape: initial_value(job.config, block, name, shape, 0),
        declared=specs,
        sequence=job.sequence,
        pacer=Pacer(job.cluster, 1.0) if job.paced else UNPACED,
    )


def peak_bytes(world: World, job: Job) -> int:
    """Largest number of bytes that a step has allocated at once on this rank, for the step with the fewest."""
    torch.set_num_threads(1)
    engine = job_engine(world, job)
    peaks = []
    for step in range(job.num_steps):
        batch = micro_batches(step, 0, 1, (1, job.sequence), job.config.vocab_size)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
            engine.step([Batch(*each) for each in batch], 1e-3)
            engine.drain()
        results: Any = record.profiler
        events = results.kineto_results.events()
        sizes: list[int] = [event.nbytes() for event in events if event.name() == "[memory]"]
        peaks.append(max(accumulate(sizes)))
    engine.close()
    return min(peaks)  # what other threads free is not seen, and what the first step makes stays


def step_seconds(world: World, jobs: Sequence[Job], rounds: int) -> list[list[float]]:
    """The wall seconds of the steps of each job, which take turns."""
    torch.set_num_threads(1)
    engines = [job_engine(world, job) for job in jobs]
    found: list[list[float]] = [[] for _ in jobs]
    for number in range(rounds + 1):
        order = list(enumerate(jobs))
        for index, job in order if number % 2 == 0 else order[::-1]:
            batch = micro_batches(number, 0, 1, (1, job.sequence), job.config.vocab_size)
            engines[index].comm.exchange(None)  # all begin together
            begin = time.perf_counter()
            engines[index].step([Batch(*each) for each in batch], 1e-3)
            if number:
                found[index].append(time.perf_counter() - begin)
    for engine in engines:
        engine.check_bytes()
        engine.close()
    return found


def one_rank(num_tokens: int, rounds: int) -> tuple[list[str], float]:
    """A row of the table, and the ratio."""
    segment = Segment(0, num_tokens, (0,))
    layout = GroupLayout(
        segments=(segment,), documents=(0,), local_runs=(((0, num_tokens),),), ulysses=1, num_local_tokens=num_tokens
    )
    group = ContextGroup(members=(0,), ulysses=1, ring_degrees=(1,), sizes=(1,))
    in_block = InBlockComm({INSIDE: make_lane(torch.device("cpu"))}, HostClock(), WeightGradients())
    comm = PeerComm(group, 0, cast(GroupP2P, None), in_block)  # nothing is sent
    device_layout = DeviceLayout(build_token_layout(layout, 0), comm, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    *tensors, grad = (torch.randn(1, num_tokens, 8, 64, generator=generator).transpose(1, 2) for _ in range(4))
    for tensor in tensors:
        tensor.requires_grad_()
    query, key, value = tensors
    runs: dict[str, Callable[[], Tensor]] = {
        "plain": lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True),
        "spread": lambda: attend(query, key, value, device_layout),
    }

    def step(name: str, _: int) -> float:
        torch.autograd.grad(runs[name](), tensors, grad)
        return 0.0

    timings = alternate({name: partial(step, name) for name in runs}, rounds, 2, lambda: None)
    plain, own = timings["plain"].cpu_s, timings["spread"].cpu_s
    found, (low, high) = ratio(own, plain), spread(own, plain)
    times = [f"{1e3 * statistics.median(seconds):.2f}" for seconds in (plain, own)]
    return [str(num_tokens), *times, f"{found:.3f} ({low:.3f}, {high:.3f})"], found


def model_of(options: argparse.Namespace) -> ModelConfig:
    """A decoder in which four query heads share a key-value head."""
    config = decoder(options.hidden, options.layers)
    return replace(config, num_kv_heads=config.num_heads // 4)


def memory(pool: LocalPool, options: argparse.Namespace) -> tuple[list[list[str]], float]:
    """(rows of the table, growth of the longest row, the smallest of all forms)."""
    config, base = model_of(options), options.tokens

    def peak(size: int, forms: dict[str, int], sequence: int) -> int:
        job = Job(local_cluster({"node": size}), {"node": forms}, config, sequence, 3)
        peaks: list[int] = pool.run(size, peak_bytes, job, timeout_s=CALL_S)
        return max(peaks)

    cap = peak(1, {}, base)
    rows, fewest = [["1", "", str(base), f"{cap / 1e6:.1f}", "1.00"]], float("inf")
    for ulysses in options.ulysses:
        forms = {"ulysses": ulysses, "ring": 8 // ulysses}
        near, far = (peak(8, forms, times * base) for times in (6, 8))
        longest = 6 + 2 * (cap - near) / (far - near)  # times the base: a step's memory is linear in its tokens
        fewest = min(fewest, longest)
        for times, peaked, found in ((6, near, ""), (8, far, f"{longest:.2f}")):
            rows.append(["8", f"{ulysses} x {8 // ulysses}", str(times * base), f"{peaked / 1e6:.1f}", found])
    return rows, fewest


def links(pool: LocalPool, options: argparse.Namespace) -> tuple[list[list[str]], float]:
    """(rows of the table, ratio of the slower order to the faster)."""
    cluster = local_cluster({"node": 2, "system": 2})
    inner, outer = cluster.tiers
    rates = (options.inner_bytes_per_s, options.outer_bytes_per_s)
    tiers = tuple(replace(tier, bandwidth_bytes_per_s=rate) for tier, rate in zip((inner, outer), rates, strict=True))
    cluster = replace(cluster, tiers=tiers)
    config = model_of(options)
    orders = [{"node": {"ulysses": 2}, "system": {"ring": 2}}, {"node": {"ring": 2}, "system": {"ulysses": 2}}]
    jobs = [Job(cluster, forms, config, 4 * options.tokens // 2, 0, paced=True) for forms in orders]
    by_rank = pool.run(4, step_seconds, jobs, options.rounds, timeout_s=CALL_S)
    slowest = [[max(step) for step in zip(*(found[index] for found in by_rank), strict=True)] for index in (0, 1)]
    found, (low, high) = ratio(slowest[1], slowest[0]), spread(slowest[1], slowest[0])
    names = ("ring outside, ulysses inside", "ulysses outside, ring inside")
    rows = [
        [name, f"{1e3 * statistics.median(seconds):.0f}", each]
        for name, seconds, each in zip(names, slowest, ("1", f"{found:.3f} ({low:.3f}, {high:.3f})"), strict=True)
    ]
    return rows, found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; with `--check` return 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["one-rank", "memory", "links"])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024, help="of a row on one rank")
    parser.add_argument("--ulysses", type=int, nargs="+", default=[1, 2, 8], help="degrees, of 8 ranks, for `memory`")
    parser.add_argument("--inner-bytes-per-s", type=float, default=200e6)
    parser.add_argument("--outer-bytes-per-s", type=float, default=10e6)
    options_for_claims(parser)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    claims = []
    if options.only in (None, "one-rank"):
        rows, ratios = zip(*(one_rank(tokens, options.rounds) for tokens in (512, 2048)), strict=True)
        print_table(("tokens", "plain ms", "spread ms", "ratio (quartiles)"), rows)
        name = "attention of a rank that exchanges nothing, to plain attention"
        claims.append(measured(name, ratios, ONE_RANK_TARGET, rival=versioned("torch", "SDPA")))
    with LocalPool(8) as pool:
        if options.only in (None, "memory"):
            table, longest = memory(pool, options)
            print_table(("ranks", "ulysses x ring", "tokens", "peak MB", "longest row under the cap"), table)
            name = "longest row on 8 ranks in the memory of a row on one"
            claims.append(measured(name, [longest], MEMORY_TARGET, at_least=True))
        if options.only in (None, "links"):
            table, found = links(pool, options)
            print_table(("order", "step ms", "ratio (quartiles)"), table)
            name = "Ulysses outside, ring inside, to ring outside, Ulysses inside"
            claims.append(measured(name, [found], 1.0, at_least=True))
    return judge(claims, options)


if __name__ == "__main__":
    sys.exit(main())
