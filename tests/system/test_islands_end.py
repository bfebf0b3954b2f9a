"""Islands that stop in an exchange, are slow in one, or end with an error: the messages of the run."""

import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from terrace.base.errors import HangError, TrainingError
from terrace.base.schema import dump
from terrace.cli.overrides import parse_overrides
from terrace.comm.collectives import Collectives
from terrace.launch.start import LocalPool, World, launch_local
from terrace.launch.watchdog import Watchdog
from terrace.program.message import Transfer
from terrace.runtime.flat_param import FlatParam
from terrace.runtime.islands import Island
from terrace.runtime.messages import Carry
from terrace.runtime.step_runner import StepRunner
from terrace.runtime.step_sums import StepSums
from terrace.train import loop
from terrace.train.job import RunJob
from terrace.train.metrics import Silent
from terrace.train.prepare import prepare
from terrace.train.resolve import resolve
from tests.support.nightly import nightly
from tests.support.tiny_runs import write_run
from tests.support.toys import cluster_of

# Longer than a busy machine keeps a rank from the processor.
TIMEOUT_S = 4.0
SLEEP_S = 2.5 * TIMEOUT_S  # longer than any message may take where no island is apart
BEGUN = 4  # the step, counted from 0, that sends the exchange in which something happens

pytestmark = pytest.mark.timeout(300)


def job_of(folder: Path, *words: str, stages: int = 1, steps: int = 100_000, link_bytes_per_s: float = 0.0) -> RunJob:
    """Two islands of `stages` ranks each, which exchange every BEGUN + 1 steps; figures of their link, if given."""
    folder.mkdir(exist_ok=True)
    sizes = (2,) if stages == 1 else (stages, 2)
    path = write_run(folder, *sizes, plan="ddp", steps=steps, batch=4, timeout_s=TIMEOUT_S)
    if link_bytes_per_s:
        cluster = cluster_of(*sizes)
        # Measured figures, which the start of a run leaves as they are.
        device = replace(cluster.device, marks={"memory_bandwidth_bytes_per_s": "measured"})
        tiers = (*cluster.tiers[:-1], replace(cluster.tiers[-1], bandwidth_bytes_per_s=link_bytes_per_s))
        (folder / "cluster.toml").write_text(tomli_w.dumps(dump(replace(cluster, device=device, tiers=tiers))))
    tier = "package" if stages == 1 else "node"
    inside = () if stages == 1 else ("--plan.mapping.package.pipeline", str(stages))
    given = ("--plan.outer.tier", tier, "--plan.outer.every", str(BEGUN + 1), *inside, *words)
    return prepare(resolve(str(path), {}, parse_overrides(given)), folder / "run", None)


def in_exchange(world: World, job: RunJob, victim: int, how: str) -> None:
    """A rank of a run, of which one stops or sleeps in the first exchange, on its lane."""
    send, done = Island.sending, list[int]()

    def sending(island: Island, block: int, collectives: Collectives) -> Carry:
        carry = send(island, block, collectives)

        def strike(flat: FlatParam, transfer: Transfer) -> None:
            if world.rank == victim and not done:
                done.append(block)
                if how == "stops":
                    os.kill(os.getpid(), signal.SIGSTOP)
                time.sleep(SLEEP_S)
            carry(flat, transfer)

        return strike

    Island.sending = sending  # type: ignore[assignment,method-assign]
    loop.train(world, job, Silent())


@pytest.mark.parametrize(
    ("victim", "delay"), [(1, 0), *nightly((1, 2), (0, 0), (0, BEGUN + 1))], ids=lambda each: str(each)
)
def test_an_island_that_stops_in_an_exchange_is_named(tmp_path: Path, victim: int, delay: int) -> None:
    job = job_of(tmp_path, "--plan.outer.delay", str(delay))
    begin_s = time.monotonic()
    with pytest.raises(HangError) as caught:
        launch_local(2, in_exchange, (job, victim, "stops"), grace_s=2.0)
    assert time.monotonic() - begin_s < 20 * TIMEOUT_S
    said = str(caught.value)
    assert "\n" not in said
    assert re.match(rf"rank {victim} stopped at (or before )?step \d+, instruction \d+ `", said), said
    assert f"the process is gone or frozen; island {victim}, host " in said
    other, exchange = 1 - victim, f"the exchange of fragment 0 between islands over tier package, sent in step {BEGUN}"
    at = r"at step \d+, instruction \d+ `OUTER_\w+( b\d+)?"
    waits = rf"waiting for it: rank {other} \(rank {other} {at}, in {exchange}`"
    assert re.search(waits, said), said


@pytest.mark.nightly
@pytest.mark.parametrize(("stages", "delay"), [(1, 0), (1, 1), (2, 0), (2, 1)])
def test_an_exchange_may_take_longer_than_the_timeout(tmp_path: Path, stages: int, delay: int) -> None:
    """As long as its predicted cycles say: over a link said to be slow, and not over one said to be fast.

    The second stage of an island misses the first, which waits for the exchange, in the next step.
    """
    words, num = ("--plan.outer.delay", str(delay)), 2 * stages
    victim = num - stages  # the first stage of the second island
    slow = job_of(tmp_path / "slow", *words, stages=stages, steps=2 * BEGUN + 3, link_bytes_per_s=1e4)
    launch_local(num, in_exchange, (slow, victim, "sleeps"), grace_s=5.0)
    fast = job_of(tmp_path / "fast", *words, stages=stages, link_bytes_per_s=1e9)
    with pytest.raises(HangError, match=r"in the exchange of fragment 0 between islands over tier (package|node)"):
        launch_local(num, in_exchange, (fast, victim, "sleeps"), grace_s=5.0)


def not_finite(world: World, job: RunJob) -> None:
    """A rank of a run whose second island computes nan from its third step on."""
    run = StepRunner.run

    def spoiled(runner: StepRunner, *given: Any) -> StepSums:
        calls = runner.passes.calls
        if world.rank == 1 and runner.island.numbers.num_steps == 2:
            inner = calls.run
            vars(calls)["run"] = lambda block, inputs, micro: inner(block, inputs, micro) * float("nan")
        return run(runner, *given)

    StepRunner.run = spoiled  # type: ignore[assignment,method-assign]
    loop.train(world, job, Silent())


def test_an_island_that_is_not_finite_ends_the_run_with_its_name_and_step(tmp_path: Path) -> None:
    with pytest.raises(TrainingError) as caught:
        launch_local(2, not_finite, (job_of(tmp_path),), grace_s=5.0)
    said = str(caught.value)
    assert "\n" not in said
    assert said.startswith("step 3 has loss nan and gradient norm nan on island 1: "), said
    assert "on rank 1 in micro-batch 0; nothing was updated" in said
    assert said.endswith("(reported by rank 1)")


def patient(world: World) -> None:
    """Two ranks that wait for each other: first where they may for long, then where they may not."""
    with Watchdog(world.store, world.rank, 2, timeout_s=2.0, on_hang=world.on_hang, seal=world.seal) as dog:
        dog.at(3, 0, "OUTER_APPLY b0", (0, 1), 4.0)
        time.sleep(2.5)
        dog.at(3, 1, "REDUCE b0", (0, 1))
        time.sleep(60.0)


def test_a_wait_that_may_be_long_has_a_limit_of_its_own(pool: LocalPool) -> None:
    with pytest.raises(HangError, match=r"ranks 0-1 at step 3, instruction 1 `REDUCE b0`"):
        pool.run(2, patient)
