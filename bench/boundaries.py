"""A pipeline over members of which one has a link ten times slower: boundaries coded as planned, beside uncoded ones.

    python -m bench.boundaries                                                        seconds of a step
    python -m bench.boundaries --unpaced --steps 500 --micros 4 --rounds 1            the loss after 500 steps

Each member is a rank of `terrace train` with a stage of its own; messages are held to the rates of the cluster (as
`TERRACE_PACE` does). The order, the stages and the formats are those that `terrace plan` finds with int8 allowed
between stages. Contestants take turns, a run each a round; a run predicts its step with what it measures at its start.
A loss does not depend on the pace.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.claims import judge, measured, options_for_claims
from terrace.cli.overrides import parse_overrides
from terrace.cluster.members import Member
from terrace.launch.start import World, launch_local
from terrace.plan.plan import Plan
from terrace.plan.wire import BETWEEN_STAGES
from terrace.planner.member_stages import best_pipeline
from terrace.planner.task import Task
from terrace.train import loop, rank
from terrace.train.config import RunConfig
from terrace.train.job import RunJob
from terrace.train.metrics import Silent, num_final, read_metrics
from terrace.train.prepare import prepare
from terrace.train.recorder import read_prediction
from terrace.train.resolve import resolve

SIZE, WARM_UP = 4, 3
FORMATS = {message.value: ("fp32", "int8") for message in BETWEEN_STAGES}


def run_of(options: argparse.Namespace) -> RunConfig:
    """The run without an order or formats: all members are alike but for the link of the last."""
    keys = {
        "model.hidden_size": 64,
        "model.intermediate_size": 176,
        "model.num_attention_heads": 2,
        "model.num_key_value_heads": 2,
        "model.num_hidden_layers": 6,
        "cluster.tiers.package.size": 1,
        "cluster.tiers.node.size": 1,
        "cluster.tiers.system.size": SIZE,
        "cluster.tiers.system.bandwidth_bytes_per_s": options.link,
        "plan.mapping.system.pipeline": SIZE,
        "plan.schedule": "1f1b",
        "plan.micro_batch": 2,
        "plan.compute": "fp32",
        "train.batch": 2 * options.micros,
        "train.sequence": options.sequence,
        "train.steps": options.steps,
        "train.seed": options.seed,
    }
    words = tuple(f"--{key}={value}" for key, value in keys.items())
    run = resolve(None, {"plan": "ddp"}, parse_overrides(words))
    *inner, tier = run.cluster.tiers
    slow = Member(bandwidth_bytes_per_s=options.link / options.times)
    cluster = replace(run.cluster, tiers=(*inner, replace(tier, members=(Member(count=SIZE - 1), slow))))
    return replace(run, cluster=cluster)


def plans_of(run: RunConfig) -> dict[str, Plan]:
    """The plans of both contestants."""
    task = Task(
        model=run.model, cluster=run.cluster, batch=run.rows, sequence=run.train.sequence, compute=run.plan.compute
    )
    return {
        "uncoded": best_pipeline(task, run.plan, {}).step.plan,
        "coded": best_pipeline(task, run.plan, FORMATS).step.plan,
    }


def on_rank(world: World, job: RunJob, scale: float | None) -> None:
    """A member of the run, at a pace."""
    rank.pace = lambda: scale  # type: ignore[attr-defined]  # in place of TERRACE_PACE
    loop.train(world, job, Silent())


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unpaced", action="store_true", help="messages as fast as they are: for losses")
    parser.add_argument("--link", type=float, default=1e6, help="bytes/s of the members' links")
    parser.add_argument("--times", type=float, default=10.0, help="how much slower that of the last member is")
    sizes = (("micros", 8), ("sequence", 128), ("steps", 12), ("rounds", 3), ("seed", 0))
    for name, default in sizes:
        parser.add_argument(f"--{name}", type=int, default=default)
    options_for_claims(parser)
    options = parser.parse_args(words)
    run = run_of(options)
    plans = plans_of(run)
    for name, plan in plans.items():
        print(f"{name}: order {list(plan.order)}, stages {list(plan.stages)}, wire {dict(plan.wire)}", flush=True)
    gains, errors, losses = list[float](), list[float](), list[float]()
    for number in range(options.rounds):
        seconds, loss = dict[str, float](), dict[str, float]()
        for name in sorted(plans, reverse=bool(number % 2)):
            folder = Path(tempfile.mkdtemp()) / "run"
            job = prepare(replace(run, plan=plans[name]), folder, None, say=lambda text: None)
            launch_local(SIZE, on_rank, (job, None if options.unpaced else 1.0), say=lambda text: None)
            records = read_metrics(folder / "metrics.jsonl")
            seconds[name] = statistics.median(each.step_s for each in records[WARM_UP:])
            loss[name] = statistics.mean(each.loss for each in records[-num_final(len(records)) :])
            predicted_s = sum(read_prediction(folder).predicted["time_s"].values())
            print(f"round {number}, {name}: {seconds[name]:.3f} s, predicted {predicted_s:.3f} s", flush=True)
            if name == "coded":
                errors.append(abs(predicted_s / seconds[name] - 1))
        gains.append(seconds["uncoded"] / seconds["coded"])
        losses.append(abs(loss["coded"] / loss["uncoded"] - 1))
        print(f"round {number}: {gains[-1]:.2f} times, loss {loss}", flush=True)
    claims = (
        []
        if options.unpaced
        else [
            measured("tokens with boundaries coded as planned, over uncoded ones", gains, 2.0, at_least=True),
            measured("predicted step of a pipeline with one slow boundary, off by", errors, 0.15),
        ]
    )
    if options.steps >= 500:
        claims.append(measured("loss after 500 steps with coded boundaries, off by", losses, 0.01))
    return judge(claims, options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
