"""Pipelines whose members have an order of their own, and a format for each boundary: the numbers of one process."""

import shutil
from pathlib import Path

import pytest
import torch

from terrace.launch.start import LocalPool
from terrace.plan.plan import Plan
from tests.support.checkpoints import contents, differing
from tests.support.coded_edges import Formats, coded_serial
from tests.support.nightly import nightly
from tests.support.parity import TOLERANCE, Case, check, deviation, run
from tests.support.pipelines import Place, pipelined
from tests.support.tiny_runs import losses, terrace, write_run
from tests.support.toys import cluster_of

MEMBERS = Place((1, 4), {"node": {"pipeline": 4}}, 4)
PAIRS = Place((2, 2), {"package": {"pipeline": 2}, "node": {"pipeline": 2}}, 4)  # two stages a member
WIRE = {"pipeline": {"node": "fp64, int8:16, fp64"}, "pipeline_backward": {"node": "int4:16+feedback, fp64, int8:16"}}
# By the block before each boundary, of two blocks a stage.
BY_BLOCK = {1: Formats("", "int4:16+feedback"), 3: Formats("int8:16", ""), 5: Formats("", "int8:16")}


def plan_of(place: Place, schedule: str, order: tuple[int, ...], cut: tuple[int, ...], **changes: object) -> Plan:
    plan = pipelined("ddp", place, schedule, stages=cut)
    return Plan(**{**vars(plan), "order": order, **changes})


@pytest.mark.parametrize(
    ("place", "schedule", "order", "cut"),
    [
        (MEMBERS, "1f1b", (2, 0, 3, 1), (1, 3, 2, 2)),
        *nightly(
            (MEMBERS, "zbv", (3, 1, 0, 2), (1,) * 8),
            (MEMBERS, "interleaved:2", (1, 2, 3, 0), (1,) * 8),
            (PAIRS, "zb-h1", (1, 0), (2, 2, 2, 2)),
        ),
    ],
)
def test_any_order_of_members_is_one_process(
    pool: LocalPool, place: Place, schedule: str, order: tuple[int, ...], cut: tuple[int, ...]
) -> None:
    """Their first and last stages hold one table, wherever they are."""
    check(pool, cluster_of(*place.sizes), [Case(plan_of(place, schedule, order, cut), 4, "deep llama tied")])


@pytest.mark.parametrize("order", [(2, 0, 3, 1), *nightly(((),))])
def test_a_format_of_each_boundary_is_one_process_that_rounds_there(pool: LocalPool, order: tuple[int, ...]) -> None:
    case = Case(plan_of(MEMBERS, "1f1b", order, (2, 2, 2, 2), wire=WIRE), 4, "deep llama tied", num_steps=3)
    (outcomes,) = run(pool, cluster_of(*MEMBERS.sizes), [case])
    assert not any(outcome.complaint for outcome in outcomes), outcomes[0].complaint
    found = deviation(outcomes, coded_serial(case, BY_BLOCK, 1, 1))
    assert max(found.values()) < TOLERANCE, found


@pytest.mark.parametrize("sabotage", ["", *nightly("never_fits")])
def test_one_boundary_may_be_packed(pool: LocalPool, sabotage: str) -> None:
    """With the bits of bf16, also where its messages are followed by plain values."""
    plain, packed = (
        Case(
            plan_of(MEMBERS, "1f1b", (1, 0, 3, 2), (2, 2, 2, 2), wire={"pipeline": {"node": text}}),
            4,
            "deep llama tied",
            sabotage=sabotage * (text != "bf16"),
        )
        for text in ("bf16", "bf16, packed, bf16")
    )
    expected, found = run(pool, cluster_of(*MEMBERS.sizes), [plain, packed])
    for one, other in zip(expected, found, strict=True):
        assert not other.complaint, other.complaint
        assert (other.losses, other.norms) == (one.losses, one.norms)
        assert torch.equal(other.parameters, one.parameters)


@pytest.mark.nightly
def test_a_run_resumes_with_another_order(tmp_path: Path) -> None:
    """In fp64; the same order to the bit."""
    write_run(tmp_path, 1, 2, plan="ddp", checkpoint_every=3)
    words = ["--plan.compute", "fp64", "--plan.master", "fp64", "--plan.mapping.node.pipeline", "2"]
    done = terrace("train", "--config", "run.toml", "--folder", "whole", *words, "--plan.order", "[1, 0]", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    whole, begun = tmp_path / "whole", tmp_path / "begun"
    for order in ("[1, 0]", "[0, 1]"):
        shutil.copytree(whole, begun)
        shutil.rmtree(begun / "checkpoints" / "step-00000006")
        done = terrace("train", "--resume", "begun", "--plan.order", order, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        kept, again = (contents(each / "checkpoints" / "step-00000006") for each in (whole, begun))
        assert order == "[0, 1]" or differing(kept, again) == []
        assert losses(begun) == pytest.approx(losses(whole), abs=1e-9)
        shutil.rmtree(begun)
