"""The contest of the tensor axis against torch's tensor parallelism, on a tiny decoder."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch.distributed as dist

from bench.against_tensor import HEADER, Job, Result, contest, rows, verdict
from bench.claims import Claim
from bench.common import Timing
from terrace.launch.start import LocalPool, World

TINY = Job(
    hidden=32, layers=2, heads=4, kv_heads=2, intermediate=48, vocab=96, batch=2, sequence=16, rounds=2, dtype="fp64"
)

pytestmark = pytest.mark.timeout(360)


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalPool]:
    with LocalPool(2) as pool:
        yield pool


def run(world: World, job: Job) -> dict[str, Result]:
    return contest(world.rank, world.world_size, job, job.libraries, dist.barrier)


@pytest.mark.nightly
def test_both_train_alike_and_are_counted_alike(pool: LocalPool) -> None:
    found = pool.run(2, run, TINY, timeout_s=200)[0]
    assert verdict(2, TINY, found)[1] == []
    assert len(rows(2, TINY, found)) == 4
    for form in TINY.forms:
        assert len(found[f"torch {form}"].norms) == len(found[f"engine {form}"].norms) == 4
    # The whole form sends the same, but for what statistics a token takes in the loss and numbers a step.
    ours, theirs = (found[f"{who} whole"].sent_bytes for who in ("engine", "torch"))
    assert ours == pytest.approx(theirs, rel=0.05)
    # In the other the engine gathers what attention and MLP read once more, in the backward.
    regathered = 2 * TINY.layers * TINY.micros * TINY.batch * TINY.sequence * TINY.hidden * 8 // 2
    ours, theirs = (found[f"{who} sequence"].sent_bytes for who in ("engine", "torch"))
    assert ours - regathered == pytest.approx(theirs, rel=0.05)


def result(wall_s: float, loss: float, norm: float) -> Result:
    return Result(Timing([wall_s] * 2, [wall_s] * 2, [loss] * 4, [10] * 2), [norm] * 4, 1000)


def test_a_slow_or_a_wrong_engine_fails() -> None:
    job = replace(TINY, forms=("whole",))
    good = {"torch whole": result(1.0, 5.0, 2.0), "engine whole": result(0.9, 5.0, 2.0)}

    def against(ours: Result) -> tuple[list[Claim], list[str]]:
        return verdict(2, job, {**good, "engine whole": ours})

    (claim,), wrong = against(good["engine whole"])
    assert claim.is_met
    assert wrong == []
    assert all(len(row) == len(HEADER) for row in rows(2, job, good))
    assert [each.is_met for each in against(result(1.1, 5.0, 2.0))[0]] == [False]
    assert "differ" in against(result(0.9, 5.0 + 1e-6, 2.0))[1][0]
    assert "differ" in against(result(0.9, 5.0, 2.0 + 1e-6))[1][0]
