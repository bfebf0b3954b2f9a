"""A boundary of a pipeline that gets ten times slower in mid-run: a run that chooses formats anew, beside one that does
not.

    python -m bench.following_links         four members, a stage each; the last boundary is slowed after 8 steps

Each member is a rank of `terrace train`; messages are held to the rates of the cluster, as `TERRACE_PACE` does, and
later those of the slowed boundary to a tenth. Contestants take turns, a run each a round. Compared are median seconds
of a step once the followed run has other formats, over the same steps of both; predicted is the step with these
formats, recorded before these steps.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.boundaries import SIZE, run_of
from bench.claims import options_for_claims
from bench.following import Followed, compare
from terrace.cluster.cluster import Cluster
from terrace.lab.pace import Pacer
from terrace.launch.start import World, launch_local
from terrace.train import loop, rank
from terrace.train.job import RunJob
from terrace.train.metrics import Silent
from terrace.train.prepare import prepare

WINDOW, CHANGED, SETTLING = 5, 8, 1  # steps of a look; before the change; after it, that are not compared


class Slowed(Pacer):
    """Messages between the last two members take `times` as long once `CHANGED` steps have ended."""

    def __init__(self, cluster: Cluster, metrics: Path, times: float) -> None:
        super().__init__(cluster, 1.0)
        self.metrics, self.times = metrics, times

    def between(self, rank: int, other: int) -> Pacer:
        if {rank, other} != {SIZE - 2, SIZE - 1}:
            return super().between(rank, other)
        return SlowedLink(self._cluster, self.metrics, self.times)


class SlowedLink(Slowed):
    """The pace of these messages."""

    def least_s(self, tier_name: str, num_bytes: int, num_messages: int = 1) -> float:
        ended = self.metrics.read_bytes().count(b"\n") if self.metrics.exists() else 0
        found = super().least_s(tier_name, num_bytes, num_messages)
        return found * self.times if ended >= CHANGED else found


def on_rank(world: World, job: RunJob, times: float) -> None:
    """A member of the run, at the cluster's pace."""
    rank.pace_of = lambda cluster, scale: Slowed(cluster, job.folder / "metrics.jsonl", times)  # type: ignore[attr-defined]
    loop.train(world, job, Silent())


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", type=float, default=1e6, help="bytes/s of the members' links")
    parser.add_argument("--slowed", type=float, default=10.0, help="how much slower the last boundary gets")
    sizes = (("micros", 8), ("sequence", 128), ("steps", 24), ("rounds", 3), ("seed", 0))
    for name, default in sizes:
        parser.add_argument(f"--{name}", type=int, default=default)
    options_for_claims(parser)
    options = parser.parse_args(words)
    options.times = 1.0  # of the cluster's file: all links are alike
    run = run_of(options)

    def trained_run(follows: bool) -> Path:
        folder = Path(tempfile.mkdtemp()) / "run"
        train = replace(run.train, slow_steps=WINDOW, follow=follows)
        job = prepare(replace(run, train=train), folder, None, say=lambda text: None)
        launch_local(SIZE, on_rank, (job, options.slowed), say=lambda text: None)
        return folder

    return compare(
        options, trained_run, Followed("formats", "formats follow a slowed link", "boundary", CHANGED, SETTLING)
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
