"""Members of the outermost tier with different numbers of micro-batches, against one plain process on whole batches."""

import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from terrace.cluster.cluster import Cluster
from terrace.launch.start import LocalPool, World
from terrace.plan.outer import Outer
from terrace.plan.presets import preset
from terrace.program.lowering import build
from terrace.train.calibrate import measure
from tests.support.checkpoints import contents, differing
from tests.support.member_cases import FOUR, INSIDE, PAIRS, SGD, alone, case_of, rows_of
from tests.support.nightly import nightly
from tests.support.outer_cases import check
from tests.support.parity import (
    ADAMW,
    TOLERANCE,
    Case,
    data_rows,
    engine_of,
    exact,
    run,
)
from tests.support.shares import own_rows
from tests.support.tiny_runs import losses, terrace, write_run
from tests.support.toys import MODELS, cluster_of

VECTORS: dict[str, tuple[Cluster, str, dict[str, Any]]] = {
    "1 2": (PAIRS, "zero2", {"grads": "package"}),
    "2 1": (PAIRS, "ddp", {}),
    "5 3": (PAIRS, "zero3", INSIDE),
    "1 4": (PAIRS, "zero1", {"micro_batch": 2}),
    "4 2": (PAIRS, "zero3", {"unit": 4}),
    "3 4": (PAIRS, "zero3", {"unit": 2}),
    "3 1 2 1": (FOUR, "ddp", {}),
    "1 2 3 4": (FOUR, "zero1", {}),
    "2 2 1 1": (FOUR, "zero2", {"unit": 2}),
    "4 1 1 2": (FOUR, "zero3", {"unit": 4}),
}
DEFAULT = ("5 3, adamw", "4 2, sgd", "3 1 2 1, adamw")
CASES = {f"{shares}, {optimizer.name}": (shares, optimizer) for shares in VECTORS for optimizer in (ADAMW, SGD)}


@pytest.mark.parametrize("name", [each if each in DEFAULT else nightly(each)[0] for each in CASES])
def test_shares_train_as_one_process(pool: LocalPool, name: str) -> None:
    shares, optimizer = CASES[name]
    cluster, preset, changes = VECTORS[shares]
    case = case_of(cluster, preset, [int(each) for each in shares.split()], optimizer, **changes)
    (outcomes,) = run(pool, cluster, [case])
    losses, norms, parameters = alone("llama tied", rows_of(cluster, case.plan), optimizer.name)
    for outcome in outcomes:
        assert outcome.losses == pytest.approx(losses, abs=TOLERANCE)
        assert outcome.norms == pytest.approx(norms, abs=TOLERANCE)
        assert outcome.parameters.sub(parameters).abs().max() < TOLERANCE
        assert not outcome.complaint  # bytes of the ledger, order of messages


def island_case(cluster: Cluster, tier: str, shares: tuple[int, ...], **outer: Any) -> Case:
    inside = {"node": "package", "package": "device"}[tier] if cluster is PAIRS else "device"
    kept = dict.fromkeys(("params", "grads", "optimizer"), inside)
    plan = replace(exact("zero3", cluster, outer=Outer(tier=tier, **outer), **kept), shares=shares)
    return Case(plan, num_steps=2 * plan.outer.every + 1, batches=own_rows)


ISLANDS: dict[str, Case] = {
    "members, average": island_case(PAIRS, "node", (3, 1), every=2, optimizer="average"),
    "members, late in turns": island_case(PAIRS, "node", (1, 2), every=4, fragments=2, delay=2, keep=0.5),
    "every rank": island_case(PAIRS, "package", (2, 1), every=3),
    "four, CO2": island_case(FOUR, "node", (3, 1, 2, 1), every=3, delay=3, optimizer="momentum", penalty=True),
}


@pytest.mark.parametrize("name", ["members, late in turns", *nightly(*(set(ISLANDS) - {"members, late in turns"}))])
def test_islands_with_shares_equal_their_simulation(pool: LocalPool, name: str) -> None:
    case = ISLANDS[name]
    cluster = FOUR if len(case.plan.shares) == 4 else PAIRS
    check(pool, cluster, [case])


def test_equal_shares_are_no_shares(pool: LocalPool) -> None:
    """The same programs, and the same bits in fp32."""
    plain = replace(preset("zero1", PAIRS), compute="fp32", messages=None)
    equal = replace(plain, shares=(2, 2))
    blocks = MODELS["llama tied"].declared
    one, other = (build(PAIRS, plan, blocks, 2).instructions for plan in (plain, equal))
    assert tuple(one) == tuple(other)
    dealt = [
        replace(case_of(PAIRS, "zero1", (), ADAMW), plan=plan, num_micros=2, batches=data_rows)
        for plan in (plain, equal)
    ]
    (found, again) = run(pool, PAIRS, dealt)
    for before, after in zip(found, again, strict=True):
        assert (before.losses, before.norms) == (after.losses, after.norms)
        assert torch.equal(before.parameters, after.parameters)


@pytest.mark.parametrize("shares", ["[4, 4]", *nightly("[6, 2]")])
def test_a_run_resumes_to_the_bit_and_into_other_shares(tmp_path: Path, shares: str) -> None:
    """With a hold-out; in fp64, so that other sums of the same rows show no difference."""
    write_run(tmp_path, 1, 2, plan="ddp", checkpoint_every=3, eval_every=3)
    exactly = ["--plan.compute", "fp64", "--plan.master", "fp64", "--data.holdout", "8", "--plan.shares"]
    done = terrace("train", "--config", "run.toml", "--folder", "whole", *exactly, "[6, 2]", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    whole, begun = tmp_path / "whole", tmp_path / "begun"
    shutil.copytree(whole, begun)
    shutil.rmtree(begun / "checkpoints" / "step-00000006")
    done = terrace("train", "--resume", "begun", "--plan.shares", shares, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    kept, again = (contents(each / "checkpoints" / "step-00000006") for each in (whole, begun))
    if shares == "[6, 2]":
        assert differing(kept, again) == []
    assert all(torch.allclose(kept[name], again[name], rtol=0, atol=1e-9) for name in kept)
    assert losses(begun) == pytest.approx(losses(whole), abs=1e-9)


def _speeds(world: World) -> list[float]:
    cluster = cluster_of(1, 2)
    case = case_of(cluster, "ddp", (2, 1), ADAMW)
    engine = engine_of(world, cluster, case)
    measured = measure(engine, lambda: time.sleep(0.004 * (1 + world.rank)), 10**6)
    engine.close()
    return [member.speed for member in measured.tiers[-1].members]


def test_a_run_with_shares_measures_each_member(pool: LocalPool) -> None:
    """The second takes twice as long for a layer, and both are told so."""
    found = pool.run(2, _speeds, timeout_s=60.0)
    assert found[0] == found[1]
    fast, slow = found[0]
    assert fast / slow == pytest.approx(2.0, rel=0.25)
    assert (fast + slow) / 2 == pytest.approx(1.0)
