"""A slow rank of a real run is named while the run goes on, and nobody else is."""

import os
import subprocess
import time
from pathlib import Path

import pytest
from torch import Tensor

from terrace.cli.overrides import parse_overrides
from terrace.launch.start import World, launch_local
from terrace.report.page import page_html
from terrace.report.run_view import run_page, run_view
from terrace.runtime.passes import BlockCalls
from terrace.train import loop
from terrace.train.job import RunJob
from terrace.train.metrics import Silent, read_metrics
from terrace.train.prepare import prepare
from terrace.train.recorder import read_events
from terrace.train.resolve import resolve
from tests.support.nightly import nightly
from tests.support.tiny_runs import write_run

VICTIM, OWN_S = 2, 0.01  # own seconds of every block, so that a busy machine hides no factor of ten

pytestmark = pytest.mark.timeout(400)


def slowed(world: World, job: RunJob, how: str) -> None:
    """One rank of a run: every block takes its time, and the victim's more in one of two ways."""
    run_block, num_calls = BlockCalls.run, 0
    is_victim = world.rank == VICTIM
    bursts = None

    def held_up(self: BlockCalls, block: int, inputs: Tensor, micro: int) -> Tensor:
        nonlocal num_calls, bursts
        num_calls += 1
        late = is_victim and num_calls > 100
        if late and how == "SIGSTOP" and bursts is None:
            pid = os.getpid()
            loop_ = f"while kill -STOP {pid}; do sleep 0.09; kill -CONT {pid}; sleep 0.01; done 2> /dev/null"
            bursts = subprocess.Popen(["bash", "-c", loop_])
        end_s = time.perf_counter() + OWN_S
        while time.perf_counter() < end_s:
            time.sleep(0.001)  # a stopped process sleeps no less
        time.sleep(0.09 * (late and how == "sleep"))
        return run_block(self, block, inputs, micro)

    BlockCalls.run = held_up  # type: ignore[method-assign]
    try:
        loop.train(world, job, Silent())
    finally:
        if bursts is not None:
            bursts.kill()


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["sleep", *nightly("SIGSTOP")])
def test_a_slow_rank_is_named_and_nobody_else(tmp_path: Path, how: str) -> None:
    words = ("--train.slow_factor", "2.5", "--train.slow_steps", "8", "--train.steps", "45")
    config = resolve(str(write_run(tmp_path, 2, 2, checkpoint_every=0, timeout_s=60.0)), {}, parse_overrides(words))
    launch_local(4, slowed, (prepare(config, tmp_path / "run", None), how), say=lambda text: None)
    notes = [event.text or "" for event in read_events(tmp_path / "run")[0]]
    told = [text for text in notes if " is slow: " in text]
    assert len(told) == 1, notes
    assert told[0].startswith(f"rank {VICTIM} is slow: ")
    assert "pid " in told[0]
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    named = {rank for record in records for rank in record.slow_ranks}
    assert named == {str(VICTIM)}
    assert not any(record.slow_ranks for record in records[:20])
    assert records[-1].slowest["rank"] == VICTIM
    assert records[-1].slowest["own_s"] > 0.09
    assert read_events(tmp_path / "run")[0][-1].slowest_rank == VICTIM
    page = page_html(run_page(run_view(tmp_path / "run")))
    assert f"Rank {VICTIM} was slow in " in page
    assert f"rank {VICTIM} is slow: " in page
