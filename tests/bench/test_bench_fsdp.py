"""The contest against FSDP2, on a tiny decoder: all contestants train alike, and a slow or a wrong engine shows."""

import pytest
import torch.distributed as dist

from bench.against_fsdp import HEADER, LIBRARIES, REDUCES, Job, claim, contest, faster, row
from bench.common import Timing
from bench.turns import Result, differences
from terrace.launch.start import LocalPool, World

TINY = Job(
    world=2, per_node=2, hidden=(64,), layers=2, batch=2, sequence=16, rounds=2, micros=(1, 2), placements=("zero3",)
)


def run(world: World, job: Job) -> dict[str, Result]:
    return contest(world.rank, world.world_size, job, LIBRARIES, dist.barrier)


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_all_train_alike() -> None:
    with LocalPool(2) as pool:
        found = pool.run(2, run, TINY, timeout_s=200)[0]
    for case in TINY.cases():
        results = {library: found[f"{library} {case.name}"] for library in LIBRARIES}
        assert len(row(case, results)) == len(HEADER)
        for reduce in REDUCES:
            assert differences(case.name, results["engine"], results[reduce], "fp32") == []


def result(wall_s: float, norm: float = 2.0) -> Result:
    return Result(Timing([wall_s] * 2, [wall_s] * 2, [5.0] * 4, [10] * 2), [norm] * 4)


def test_the_faster_rival_counts_and_a_wrong_engine_fails() -> None:
    case = TINY.cases()[0]
    found = {"ring": result(1.2), "all-to-all": result(1.0), "engine": result(1.1)}
    assert faster(found) is found["all-to-all"]
    assert not claim(case, found).is_met
    assert claim(case, {**found, "engine": result(1.0)}).is_met
    assert "differ" in differences(case.name, result(1.0, norm=2.01), faster(found), "fp32")[0]
