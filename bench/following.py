"""A member that becomes slow in mid-run: a run that deals its shares anew, beside one that does not.

    python -m bench.following          three members with 0.3 of a core each; the last falls to 0.1 after 15 steps

Each member is a rank of `terrace train`, a process in a cgroup (v1, as root) that gives it a part of a core.
Contestants take turns, a run each a round. Compared are median seconds of a step once the followed run has dealt anew,
over the same steps of both; predicted is the step with the shares that were dealt, recorded before these steps.
"""

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.claims import judge, measured, options_for_claims
from bench.members import groups
from terrace.cli.overrides import parse_overrides
from terrace.launch.start import World, launch_local
from terrace.train import loop
from terrace.train.deals import read_deals
from terrace.train.job import RunJob
from terrace.train.metrics import Silent, read_metrics
from terrace.train.prepare import prepare
from terrace.train.recorder import read_events
from terrace.train.resolve import resolve

_PERIOD_US = 10_000
WINDOW, CHANGED, SETTLING = 10, 15, 2  # steps of a look; before the change; after a deal, that are not compared


def config_words(options: argparse.Namespace, follows: bool) -> tuple[str, ...]:
    """The options of the run."""
    size = len(options.quotas)
    shares = [options.micros] * size
    keys = {
        "model.hidden_size": 192,
        "model.intermediate_size": 512,
        "model.num_attention_heads": 6,
        "model.num_key_value_heads": 6,
        "cluster.tiers.package.size": 1,
        "cluster.tiers.node.size": 1,
        "cluster.tiers.system.size": size,
        "plan.shares": shares,
        "plan.micro_batch": 2,
        "plan.compute": "fp32",
        "train.batch": 2 * sum(shares),
        "train.sequence": options.sequence,
        "train.steps": options.steps,
        "train.slow_steps": WINDOW,
        "train.follow": str(follows).lower(),
    }
    return tuple(f"--{key}={value}" for key, value in keys.items())


def on_rank(world: World, job: RunJob, whole: str, quotas: Sequence[float]) -> None:
    """A member of the run, within its part of a core."""
    group = Path(whole) / str(world.rank)
    limit(group, quotas[world.rank])
    (group / "cgroup.procs").write_text(str(os.getpid()))
    loop.train(world, job, Silent())


def limit(group: Path, quota: float) -> None:
    """Gives the processes of a cgroup a part of a core."""
    (group / "cpu.cfs_quota_us").write_text(str(round(quota * _PERIOD_US)))


def slow_down(folder: Path, group: Path, quota: float, ended: threading.Event) -> None:
    """Waits for the step after which the last member is slowed."""
    path = folder / "metrics.jsonl"
    while not ended.is_set():
        if path.exists() and path.read_bytes().count(b"\n") >= CHANGED:
            limit(group, quota)
            return
        time.sleep(0.02)


def trained(options: argparse.Namespace, follows: bool, whole: Path) -> Path:
    """The folder of a run whose last member is slowed."""
    folder = Path(tempfile.mkdtemp()) / "run"
    size = len(options.quotas)
    job = prepare(resolve(None, {"plan": "ddp"}, parse_overrides(config_words(options, follows))), folder, None)
    ended = threading.Event()
    slowing = threading.Thread(target=slow_down, args=(folder, whole / str(size - 1), options.slowed, ended))
    slowing.start()
    try:
        launch_local(size, on_rank, (job, str(whole), options.quotas), say=lambda text: None)
    finally:
        ended.set()
        slowing.join()
    return folder


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quotas", type=float, nargs="+", default=[0.3, 0.3, 0.3], help="parts of a core")
    parser.add_argument("--slowed", type=float, default=0.1, help="that of the last member later")
    for name, default in (("micros", 8), ("sequence", 128), ("steps", 70), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options_for_claims(parser)
    options = parser.parse_args(words)

    def trained_run(follows: bool) -> Path:
        with groups(len(options.quotas)) as whole:
            return trained(options, follows, whole)

    return compare(
        options, trained_run, Followed("shares", "shares follow a slowed member", "shares", CHANGED, SETTLING)
    )


class Followed(NamedTuple):
    """What a run chooses anew. `event` is a word of the events that say so."""

    name: str  # of the field of a deal
    words: str  # of the claim
    event: str
    changed: int  # steps before the change
    settling: int  # steps after a choice that are not compared


def compare(options: argparse.Namespace, trained_run: Callable[[bool], Path], of: Followed) -> int:
    """Runs that follow a change beside runs that do not, a run each a round: `trained_run` gives the folder of one."""
    gains, errors = list[float](), list[float]()
    for number in range(options.rounds):
        seconds: dict[bool, list[float]] = {}
        for follows in sorted((False, True), reverse=bool(number % 2)):
            folder = trained_run(follows)
            seconds[follows] = [each.step_s for each in read_metrics(folder / "metrics.jsonl")]
            if follows:
                deals = read_deals(folder)
            for event in read_events(folder)[0]:
                if of.event in (event.text or ""):
                    print(f"round {number}, step {event.step}: {event.text}", flush=True)
        # Later looks may choose again: what the last one chose holds to the end.
        first = deals[-1].step + of.settling
        moved, unmoved = (statistics.median(seconds[follows][first:]) for follows in (True, False))
        gains.append(unmoved / moved)
        errors.append(deals[-1].predicted_s / moved - 1)
        print(
            f"round {number}: unmoved {unmoved:.3f} s, followed {moved:.3f} s, before the change "
            f"{statistics.median(seconds[True][2 : of.changed]):.3f} s, predicted {deals[-1].predicted_s:.3f} s, "
            f"{of.name} {[getattr(each, of.name) for each in deals]}",
            flush=True,
        )
    gain = statistics.median(gains)
    print(f"tokens of a second, over the unmoved run: {gain:.2f} ({min(gains):.2f} - {max(gains):.2f})")
    print(f"predicted: {statistics.median(errors):+.1%}")
    claims = [
        measured(f"tokens of a second once {of.words}, over an unmoved run", gains, 1.2, at_least=True),
        measured(f"predicted step with {of.name} chosen anew, off by", [abs(each) for each in errors], 0.15),
    ]
    return judge(claims, options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
