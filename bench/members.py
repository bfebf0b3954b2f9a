"""Unequal members: tokens of a fixed processor budget under the planned shares, beside equal ones.

    python -m bench.members                                four members with 0.6, 0.6, 0.3 and 0.3 of a core
    python -m bench.members --pipeline --quotas 0.6 0.3 0.3 --layers 12 --sequence 128

Each member is a rank, a process of its own under torchrun, in a cgroup (v1, as root) that gives it a part of a core.
The shares are those of `terrace plan` for a cluster whose members have these speeds. Contestants take turns in one
world, so that they meet the same neighbours. A budget is the sum of quotas times the wall, so tokens of a budget are
compared as tokens of a second. Beside them: the sum of speeds (each member alone, all at once, without messages), and
the predicted step.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import terrace
from bench.claims import judge, measured, options_for_claims
from bench.common import decoder, engine_with, local_cluster, micro_batches, real_blocks
from bench.lab.launch import child_environment
from terrace.cluster.cluster import Cluster
from terrace.cluster.members import Member
from terrace.model.blocks import block_specs, forward_flops
from terrace.model.config import ModelConfig
from terrace.model.decoder import build_blocks, token_loss
from terrace.model.facts import one_layer
from terrace.model.init import initialise
from terrace.plan.plan import Plan
from terrace.plan.presets import preset
from terrace.planner.evaluate import step_of
from terrace.planner.members import deal, slowest
from terrace.planner.search import find
from terrace.planner.space import Space
from terrace.planner.task import Task
from terrace.runtime.batch import Batch
from terrace.runtime.engine import Engine
from terrace.simulate.step import Step, predict_step, resolved
from terrace.train.calibrate import measure as measure_members

_GROUPS = Path("/sys/fs/cgroup/cpu")
_PERIOD_US = 10_000  # short beside a block, so that a quota looks like a slower core
EQUAL, SHARES, ALONE = "equal", "shares", "alone"
_FIGURES = ("seconds", "predicted")


def cluster_of(quotas: Sequence[float]) -> Cluster:
    """Members that are `quotas` of a core."""
    cluster = local_cluster({"node": len(quotas)})
    members = tuple(Member(speed=quota) for quota in quotas)
    return replace(cluster, tiers=(replace(cluster.tiers[0], members=members),))


def planned(options: argparse.Namespace, plan: Plan, batch: int) -> Plan:
    """`plan` with the shares, or the stages, that the planner gives unequal members."""
    cluster = cluster_of(options.quotas)
    task = Task(model=model_of(options), cluster=cluster, batch=batch, sequence=options.sequence, compute="fp32")
    (estimate, *_) = find(Space(task=replace(task, cluster=slowest(cluster, "fp32"))), count=1)[0].best
    return deal(task, plan, estimate).plan


def planned_shares(options: argparse.Namespace) -> tuple[int, ...]:
    """The shares that the planner deals."""
    plan = replace(preset("ddp", cluster_of(options.quotas)), compute="fp32", micro_batch=options.micro_batch)
    found = planned(options, plan, options.micros * options.micro_batch * len(options.quotas))
    return tuple(share * found.micro_batch // options.micro_batch for share in found.shares)


def planned_stages(options: argparse.Namespace) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Stages of equal members, and those that the planner gives unequal ones."""
    cluster = cluster_of(options.quotas)
    mapping = {"node": {"pipeline": len(options.quotas)}}
    plan = replace(preset("ddp", cluster), compute="fp32", micro_batch=options.micro_batch, mapping=mapping)
    batch = options.micros * options.micro_batch
    task = Task(model=model_of(options), cluster=cluster, batch=batch, sequence=options.sequence, compute="fp32")
    alike = replace(task, cluster=slowest(cluster, "fp32"))
    return resolved(step_of(alike, plan)).plan.stages, planned(options, plan, batch).stages


def model_of(options: argparse.Namespace) -> ModelConfig:
    return decoder(options.hidden, options.layers)


def trainer_of(options: argparse.Namespace, numbers: Sequence[int]) -> terrace.Trainer:
    """A trainer of this rank, for its own part of the batch; `numbers` are shares, or stages of a pipeline."""
    config, pipeline = model_of(options), {"mapping": {"node": {"pipeline": len(options.quotas)}}}
    keys: dict[str, Any] = {**pipeline, "stages": list(numbers)} if options.pipeline else {"shares": list(numbers)}
    return terrace.Trainer(
        real_blocks(config),
        plan={"preset": "ddp", "compute": "fp32", "micro_batch": options.micro_batch, **keys},
        cluster=cluster_of(options.quotas),
        num_micros=options.micros if options.pipeline else 1,
        loss=token_loss,
        lr=1e-4,
        declared=block_specs(config),
        activation=(options.sequence, options.hidden),
        local_batches=True,
        predict=False,
        say=lambda words: None,
    )


def on_rank(options: argparse.Namespace) -> None:
    """One member: its quota, then in turns both contestants, and itself alone."""
    config, shape = model_of(options), (options.micro_batch, options.sequence)
    torch.set_num_threads(1)
    equal = [options.micros] * len(options.quotas)
    shares = {EQUAL: equal, SHARES: equal if options.pipeline else options.shares}
    numbers = {EQUAL: options.unplanned if options.pipeline else equal, SHARES: options.shares}
    trainers = {name: trainer_of(options, own) for name, own in numbers.items()}
    rank = dist.get_rank()  # of the world that the trainers have joined
    group = Path(options.groups) / str(rank)
    (group / "cgroup.procs").write_text(str(os.getpid()))
    (group / "cpu.cfs_quota_us").write_text(str(round(options.quotas[rank] * _PERIOD_US)))
    seed = 0 if options.pipeline else rank  # stages read the same rows
    cuts = {name: micro_batches(0, seed, own[rank], shape, config.vocab_size) for name, own in shares.items()}
    batches = {name: joined(each) for name, each in cuts.items()}
    alone, own = engine_alone(options, shares[SHARES][rank]), [Batch(*each) for each in cuts[SHARES]]
    turns: dict[str, Callable[[], object]] = {
        EQUAL: lambda: trainers[EQUAL].step(*batches[EQUAL]),
        SHARES: lambda: trainers[SHARES].step(*batches[SHARES]),
        ALONE: lambda: alone.step(own, 1e-4),
    }
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    predicted: dict[str, list[float]] = {name: [] for name in trainers}
    for number in range(-1, options.rounds):  # the first warms up
        for name in sorted(turns, reverse=bool(number % 2)):
            if name in trainers and number >= 0:
                predicted[name].append(predicted_s(trainers[name].engine, config, shape))
            dist.barrier()
            begin_s = time.perf_counter()
            for _ in range(options.steps):
                turns[name]()
            if name in trainers:
                trainers[name].engine.drain()
                dist.barrier()
            if number >= 0:
                seconds[name].append((time.perf_counter() - begin_s) / options.steps)
    every: list[Any] = [None] * len(options.quotas)
    dist.all_gather_object(every, [shares[SHARES][rank] / each for each in seconds[ALONE]])
    if rank == 0:
        print(json.dumps({"seconds": seconds, "predicted": predicted, "micros_per_s": every}), flush=True)
    for each in trainers.values():
        each.close()


def predicted_s(engine: Engine, config: ModelConfig, shape: tuple[int, int]) -> float:
    """Seconds of the engine's step as `terrace train` predicts them: all members measure themselves and their links."""
    program, one = engine.program, one_layer(config)
    blocks = build_blocks(one)
    initialise(blocks, one, 0, torch.float32)
    x = torch.randn((*shape, config.hidden_size), requires_grad=True)
    cluster = measure_members(engine, lambda: blocks[1](x), forward_flops(config, 1, *shape))
    step = Step(
        cluster=cluster,
        plan=program.plan,
        blocks=tuple(engine.state.specs),
        num_micros=max(program.plan.shares, default=program.num_micros),
        sequence=shape[1],
        work=tuple(block.forward_flops(*shape) for block in block_specs(config)),
    )
    return predict_step(step).step_s


def joined(batches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Micro-batches as one batch of this rank."""
    tokens, labels = zip(*batches, strict=True)
    return torch.cat(tokens), torch.cat(labels)


def engine_alone(options: argparse.Namespace, num_micros: int) -> Engine:
    """An engine of this member alone."""
    cluster = local_cluster({"node": 1})
    return engine_with(
        real_blocks(model_of(options)),
        objective=token_loss,
        cluster=cluster,
        plan=replace(preset("ddp", cluster), compute="fp32", micro_batch=options.micro_batch),
        num_micros=num_micros,
    )


@contextmanager
def groups(number: int) -> Iterator[Path]:
    """A cgroup with one below it for each rank, without a quota yet. Raises `SystemExit` where none can be made."""
    whole = _GROUPS / f"terrace-members-{os.getpid()}"
    try:
        for path in (whole, *(whole / str(rank) for rank in range(number))):
            path.mkdir()
            (path / "cpu.shares").write_text("4096")
            (path / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
    except OSError as error:
        raise SystemExit(f"members need cgroups of processors (v1, as root), and {whole}: {error.strerror}") from error
    try:
        yield whole
    finally:
        for rank in range(number):
            (whole / str(rank)).rmdir()
        whole.rmdir()


def measure(options: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    """The figures of a world of members."""
    even, shares = planned_stages(options) if options.pipeline else ((), planned_shares(options))
    with groups(len(options.quotas)) as whole:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(len(options.quotas)), "-m", "bench.members", *words]
        command += ["--groups", str(whole), "--shares", *map(str, shares), "--unplanned", *map(str, even)]
        environment = child_environment()
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=540)
    if done.returncode:
        raise SystemExit(f"exit {done.returncode}: {done.stderr[:2000]}")
    found: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return {**found, "even": even, "shares": shares}


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quotas", type=float, nargs="+", default=[0.6, 0.6, 0.3, 0.3], help="parts of a core")
    sizes = (("hidden", 192), ("layers", 4), ("sequence", 256), ("micro-batch", 2), ("micros", 9))
    for name, default in (*sizes, ("steps", 1), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--groups", default="", help=argparse.SUPPRESS)
    parser.add_argument("--pipeline", action="store_true", help="a stage a member, in place of shares of the batch")
    parser.add_argument("--shares", type=int, nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--unplanned", type=int, nargs="*", help=argparse.SUPPRESS)
    options_for_claims(parser)
    options = parser.parse_args(words)
    if options.groups:
        on_rank(options)
        return 0
    found = measure(options, words)
    equal_s, shares_s = (found["seconds"][name] for name in (EQUAL, SHARES))
    micros = options.micros * len(options.quotas)
    gains = [one / other for one, other in zip(equal_s, shares_s, strict=True)]
    speeds = map(sum, zip(*found["micros_per_s"], strict=True))  # of all members, by round
    reached = [micros / each / speed for each, speed in zip(shares_s, speeds, strict=True)]
    medians = {kind: {name: statistics.median(found[kind][name]) for name in (EQUAL, SHARES)} for kind in _FIGURES}
    errors = {name: medians["predicted"][name] / medians["seconds"][name] - 1 for name in (EQUAL, SHARES)}
    what = f"stages {list(found['even'])}, planned" if options.pipeline else "shares"
    print(f"{what} = {list(found['shares'])}; {json.dumps(found)}")
    gain = statistics.median(gains)
    print(f"tokens of a processor budget, over equal shares: {gain:.2f} ({min(gains):.2f} - {max(gains):.2f})")
    if not options.pipeline:
        print(f"of the sum of speeds: {statistics.median(reached):.1%}")
    print("predicted: " + ", ".join(f"{name} {error:+.1%}" for name, error in errors.items()))
    kind = "stages" if options.pipeline else "shares"
    claims = [
        measured(f"tokens of a processor budget under planned {kind}, over equal ones", gains, 1.25, at_least=True),
        measured(f"predicted step of unequal members, {kind}, off by", [abs(errors[SHARES])], 0.15),
    ]
    if not options.pipeline:
        name = "tokens under planned shares, of the sum of members' speeds"
        claims.append(measured(name, reached, 0.9, at_least=True))
    return judge(claims, options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
