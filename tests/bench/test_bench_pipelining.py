"""The contest of pipelines against torch.distributed.pipelining, on a tiny decoder."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bench.against_pipelining import CASES, HEADER, Job, Result, contest, pipeline_for, planned, rows, verdict
from bench.common import ADAMW, Timing, local_cluster, real_blocks, torch_adamw
from bench.torch_pipelining import Pipeline
from terrace.launch.start import LocalPool, World
from terrace.model.decoder import token_loss
from tests.support.toys import count_tokens, run_blocks

NUM_RANKS = 4
TINY = Job(hidden=32, layers=6, vocab=96, batch=1, sequence=16, micros=8, rounds=2, dtype="fp64")
NUM_STEPS = TINY.rounds + 2

pytestmark = pytest.mark.timeout(360)


def run(world: World, job: Job, names: tuple[str, ...]) -> dict[str, dict[str, Result]]:
    return {name: contest(world.rank, world.world_size, job, name, job.libraries, dist.barrier) for name in names}


@pytest.fixture(scope="module")
def found(pool: LocalPool) -> dict[str, dict[str, Result]]:
    """Results of rank 0 in every case, both libraries in turn."""
    results: dict[str, dict[str, Result]] = pool.run(NUM_RANKS, run, TINY, tuple(CASES), timeout_s=240)[0]
    return results


def serial(num_data_ranks: int) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of plain PyTorch in this process, on all micro-batches at once."""
    blocks = real_blocks(TINY.model, torch.float64)
    parameters = [parameter for block in blocks for parameter in block.parameters()]
    optimizer = torch_adamw(parameters)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        batches = [batch for rank in range(num_data_ranks) for batch in TINY.batches(step, rank)]
        tokens, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
        loss = token_loss(run_blocks(blocks, tokens), labels) / count_tokens(labels)
        loss.backward()  # type: ignore[no-untyped-call]
        norms.append(nn.utils.clip_grad_norm_(parameters, ADAMW.clip).item())
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


@pytest.mark.nightly
def test_torch_has_the_numbers_of_one_process_in_every_case(found: dict[str, dict[str, Result]]) -> None:
    for name, case in CASES.items():
        result = found[name]["torch"]
        losses, norms = serial(case.num_data_ranks)
        assert result.timing.losses == pytest.approx(losses, rel=1e-10), name
        assert result.norms == pytest.approx(norms, rel=1e-10), name


@pytest.mark.nightly
def test_what_torch_keeps_is_counted(found: dict[str, dict[str, Result]]) -> None:
    own = [
        sum(p.numel() for p in block.parameters()) * 8 for block in real_blocks(TINY.model, torch.float64)
    ]  # bytes of every block
    quarters, halves = [sum(own[i : i + 2]) for i in range(0, 8, 2)], [sum(own[:4]), sum(own[4:])]
    assert found["1f1b"]["torch"].kept_bytes == [2 * size for size in quarters]
    assert found["data"]["torch"].kept_bytes == [2 * halves[0]] * 2 + [2 * halves[1]] * 2
    # FSDP2 in a stage: whole parameters and whole gradients besides its half of the parameters.
    assert found["zero3"]["torch"].kept_bytes == pytest.approx([2.5 * halves[0]] * 2 + [2.5 * halves[1]] * 2, rel=0.02)


@pytest.mark.nightly
def test_both_train_alike(found: dict[str, dict[str, Result]]) -> None:
    for name in CASES:
        assert verdict(NUM_RANKS, TINY, name, found[name])[1] == []
        assert len(rows(NUM_RANKS, TINY, name, found[name])) == 2


def test_stages() -> None:
    zbv = pipeline_for(replace(TINY, layers=7), 4, CASES["zbv"])
    assert zbv.stages == (2, 1, 1, 1, 1, 1, 1, 1)
    assert [zbv.own(rank) for rank in range(4)] == [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert zbv.blocks(0) == range(2)
    assert zbv.blocks(1) == range(2, 3)
    interleaved = pipeline_for(TINY, 4, CASES["interleaved"])
    assert [interleaved.own(rank) for rank in range(4)] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert pipeline_for(TINY, 8, CASES["data"]) == Pipeline(
        schedule="1f1b", stages=(2, 2, 2, 2), num_stage_ranks=4, num_data_ranks=2
    )
    with pytest.raises(AssertionError, match="more --layers"):
        pipeline_for(TINY, 16, CASES["1f1b"])


def test_the_planner_keeps_parameters_whole_in_a_stage() -> None:
    case, cluster = CASES["zero3"], local_cluster({"package": 2, "node": 2})
    assert planned(Job(), case, cluster) == {"params": "device", "grads": "device", "optimizer": "package"}


def result(wall_s: float, loss: float = 5.0, norm: float = 2.0, peak: int = 100) -> Result:
    return Result(Timing([wall_s] * 2, [wall_s] * 2, [loss] * 4, [10] * 2), [norm] * 4, [peak, 90], [50, 40])


def test_a_slow_a_large_or_a_wrong_engine_fails() -> None:
    def against(engine: Result, name: str) -> list[str]:
        found = {"torch": result(1.0), "engine": engine}
        claims, wrong = verdict(2, TINY, name, found)
        missed = wrong + [f"{claim.name} {claim.found_words}" for claim in claims if not claim.is_met]
        ours = rows(2, TINY, name, found)[1]
        assert ours[-1] == ("missed" if missed else "met")
        assert len(ours) == len(HEADER)
        return missed

    assert against(result(0.9), "zero3") == []
    assert against(result(1.1), "1f1b")[0].endswith(" 1.1")
    assert against(result(1.1), "zero3") == []
    assert "1.2" in against(result(1.2), "zero3")[0]
    assert "peak" in against(result(0.9, peak=101), "zero3")[0]
    assert against(result(1.2), "gathered") == []
    assert "peak" in against(result(0.9, peak=101), "gathered")[0]
    assert against(result(0.9, peak=101), "1f1b") == []
    assert "differ" in against(result(0.9, loss=5.0 + 1e-6), "1f1b")[0]
    assert "differ" in against(result(0.9, norm=2.0 + 1e-6), "1f1b")[0]
