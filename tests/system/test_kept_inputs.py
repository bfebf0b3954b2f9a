"""Inputs of blocks that leave the device after their forward and come back: the same bits, bytes of the formula."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from terrace.base.errors import ModelError
from terrace.launch.start import LocalPool, World
from terrace.plan.keep import Keep
from terrace.plan.plan import Plan
from terrace.plan.presets import preset
from terrace.runtime.kept.boundaries import Boundaries, alone, shares
from terrace.runtime.settings import OptimizerConfig
from tests.support.kept import check_same_bits, traced_steps
from tests.support.nightly import in_turns, nightly
from tests.support.parity import Case, check, exact
from tests.support.toys import cluster_of

CLUSTER = cluster_of(2, 2)
INPUTS = Keep(activations="disk", piece=128)  # several pieces in an input of a toy, and a partial one
ALL = replace(INPUTS, optimizer="disk", params="disk", ring=3)
PIPELINE = {"mapping": {"node": {"pipeline": 2}}}


def same_bits(pool: LocalPool, plan: Plan, keep: Keep = INPUTS, **changes: Any) -> None:
    case = Case(plan, num_steps=3, **{"model": "deep llama tied", "num_micros": 3, **changes})
    check_same_bits(pool, CLUSTER, case, keep)


@pytest.mark.parametrize(
    ("placement", "schedule", "recompute", "keep"),
    in_turns(
        13,
        ("ddp", "zero3", "three-level"),
        ("", "1f1b", "zbv", "interleaved:2"),
        ((), ("*",), ("block.* every 2",)),
        (INPUTS, ALL, replace(INPUTS, blocks=("block.* every 2", "block.7"))),
    ),
)
def test_inputs_on_a_disk_change_no_bit(
    pool: LocalPool, placement: str, schedule: str, recompute: tuple[str, ...], keep: Keep
) -> None:
    changes: Any = {**PIPELINE, "schedule": schedule} if schedule else {}
    same_bits(pool, replace(preset(placement, CLUSTER), recompute=recompute, **changes), keep, num_micros=4)


OTHERS: list[Any] = [
    ("zero3", {"unit": 2, "recompute": ("block.*",)}, {}),
    ("zero3", {"compute": "bf16", "unit": 2, "keep": replace(ALL, grads="disk")}, {"num_micros": 2}),
    *nightly(
        ("ddp", {"compute": "fp16"}, {}),
        ("zero3", {**PIPELINE, "schedule": "zb-h1", "recompute": ("*",), "keep": ALL}, {"num_micros": 4}),
        ("zero3", {**PIPELINE, "schedule": "gpipe", "unit": 2}, {"num_micros": 4}),
        ("ddp", {"recompute": ("block.*: attention, mlp",)}, {"model": "deep gpt2"}),
        ("ddp", {"recompute": ("block.*",)}, {"model": "deep llama, frozen layer"}),
        ("ddp", {}, {"model": "deep llama, frozen table"}),
        ("zero3", {"experts": {"node": {"expert": 2}}, "unit": 2}, {"model": "experts"}),
        ("zero1", {}, {"optimizer": OptimizerConfig(name="muon", lr=3e-3)}),
    ),
]


@pytest.mark.parametrize(("name", "changes", "case"), OTHERS, ids=str)
def test_other_plans_and_models_change_no_bit(
    pool: LocalPool, name: str, changes: dict[str, Any], case: dict[str, Any]
) -> None:
    plan = replace(preset(name, CLUSTER), **changes)
    same_bits(pool, plan, plan.keep if plan.keep.is_below else INPUTS, **case)


AXES: list[Any] = [
    {"mapping": {"package": {"tensor": 2}}, "recompute": ("block.*",)},
    *nightly(
        {"mapping": {"node": {"context": {"ring": 2}}}},
        {"mapping": {"package": {"tensor": {"columns": 2}}}},
        {"mapping": {"package": {"tensor": 2}}, "sequence_parallel": False},
        {"mapping": {"package": {"tensor": 2}, "node": {"pipeline": 2}}, "schedule": "1f1b", "recompute": ("*",)},
    ),
]


@pytest.mark.parametrize("changes", AXES, ids=str)
def test_axes_equal_one_process(pool: LocalPool, changes: dict[str, Any]) -> None:
    check(pool, CLUSTER, [Case(exact("zero1", CLUSTER, keep=INPUTS, **changes), model="deep llama tied", num_micros=2)])


def test_an_input_of_another_size_is_refused() -> None:
    with pytest.raises(
        ModelError, match=r"block 3 reads \(2, 4\) in torch.float32, 32 bytes, but inputs that plan.keep"
    ):
        Boundaries([], 64).evict((3, 0), torch.zeros(2, 4), None)  # type: ignore[arg-type]  # nothing is waited for


def test_a_storage_that_holds_more_is_not_freed() -> None:
    whole = torch.arange(12.0)
    assert alone(whole) is whole
    part = alone(whole[2:8])
    assert torch.equal(part, whole[2:8])
    assert not shares(part, whole)
    assert shares(whole[2:8], whole)


def traced(world: World) -> tuple[dict[str, int], int]:
    """Messages of a traced step, and the pieces that its program passes each way."""
    program, spans = traced_steps(world, INPUTS)
    return dict(Counter(category for lane, category in spans if lane == "disk")), program.most_inputs_below


def test_inputs_are_traced_on_the_lane_of_their_medium(pool: LocalPool) -> None:
    ((found, number),) = pool.run(1, traced, timeout_s=60.0)
    assert found == {"keep_read": number, "keep_write": number}
    assert number == 2
