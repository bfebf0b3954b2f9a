"""States that rest on a disk: the same bits as on the device, the bytes of the formula, and checkpoints as before."""

import os
import signal
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from terrace.base.errors import HangError
from terrace.checkpoint.reading import Checkpoint, resume
from terrace.checkpoint.writing import save
from terrace.launch.start import LocalPool, World
from terrace.plan.keep import Keep
from terrace.plan.outer import Outer
from terrace.plan.plan import Plan
from terrace.plan.presets import preset
from tests.support.checkpoints import make, train
from tests.support.kept import OPTIMIZERS, check_same_bits, resumed, traced_steps
from tests.support.nightly import in_turns, nightly
from tests.support.parity import Case, check, exact
from tests.support.toys import cluster_of

ON_DISK = Keep(optimizer="disk", piece=128, ring=3)  # several pieces in the flat buffers of a toy, and a partial one
WHOLE = replace(ON_DISK, params="disk")
ALONE = Keep(params="disk", piece=128)
ALL = replace(WHOLE, grads="disk")
GRADS = Keep(grads="disk", piece=128)
NARROW = replace(ON_DISK, piece=1 << 16)
CLUSTER = cluster_of(2, 2)


def same_bits(pool: LocalPool, plan: Plan, keep: Keep, **changes: Any) -> None:
    case = Case(plan, num_steps=3, **{"model": "llama tied", **changes})
    check_same_bits(pool, CLUSTER, case, keep)


@pytest.mark.parametrize(
    ("name", "placement", "schedule", "recompute"),
    in_turns(13, OPTIMIZERS, ("ddp", "zero3", "three-level"), ("", "1f1b", "zbv"), ((), ("*",))),
)
def test_states_on_a_disk_change_no_bit(
    pool: LocalPool, name: str, placement: str, schedule: str, recompute: tuple[str, ...]
) -> None:
    mapping: Any = {"mapping": {"node": {"pipeline": 2}}, "schedule": schedule} if schedule else {}
    plan = replace(preset(placement, CLUSTER), recompute=recompute, **mapping)
    same_bits(pool, plan, ON_DISK, optimizer=OPTIMIZERS[name], num_micros=2)


@pytest.mark.parametrize(
    ("name", "placement", "schedule", "recompute"),
    in_turns(13, OPTIMIZERS, ("ddp", "zero3", "three-level"), ("", "1f1b", "zbv"), ((), ("*",))),
)
def test_parameters_on_a_disk_change_no_bit(
    pool: LocalPool, name: str, placement: str, schedule: str, recompute: tuple[str, ...]
) -> None:
    mapping: Any = {"mapping": {"node": {"pipeline": 2}}, "schedule": schedule} if schedule else {}
    plan = replace(preset(placement, CLUSTER), recompute=recompute, **mapping)
    same_bits(pool, plan, WHOLE, optimizer=OPTIMIZERS[name], num_micros=2)


@pytest.mark.parametrize(
    ("name", "placement", "recompute", "keep"),
    in_turns(11, OPTIMIZERS, ("ddp", "zero3", "three-level"), ((), ("*",)), (ALL, GRADS)),
)
def test_gradients_on_a_disk_change_no_bit(
    pool: LocalPool, name: str, placement: str, recompute: tuple[str, ...], keep: Keep
) -> None:
    plan = replace(preset(placement, CLUSTER), recompute=recompute, unit=2)
    same_bits(pool, plan, keep, optimizer=OPTIMIZERS[name], num_micros=2)


FORMS: list[Any] = [
    ("muon", {"compute": "bf16", "optimizer_states": "int8"}),
    *nightly(
        ("adamw", {"compute": "bf16"}),
        ("lsp", {"compute": "bf16", "optimizer_states": "int8"}),
        ("adamw", {"optimizer_states": "bf16"}),
        ("lion", {"compute": "bf16", "master": "bf16", "optimizer_states": "int8"}),
        ("muon", {"compute": "bf16"}),
        ("adamw", {"compute": "bf16", "wire": {"refresh": {"node": "int8"}}}),
        ("adamw", {"compute": "fp16"}),
        ("lion", {"unit": 2, "recompute": ("*",)}),
    ),
]


@pytest.mark.parametrize(("name", "changes"), FORMS, ids=str)
def test_separate_masters_and_narrow_states_change_no_bit(pool: LocalPool, name: str, changes: dict[str, Any]) -> None:
    keep = NARROW if "optimizer_states" in changes else ON_DISK
    same_bits(pool, replace(preset("three-level", CLUSTER), **changes), keep, optimizer=OPTIMIZERS[name])


MODELS_AND_PLANS: list[Any] = [
    ("zero3", "llama, frozen layer", {"compute": "bf16"}),
    ("zero3", "experts", {"experts": {"node": {"expert": 2}}}),
    ("ddp", "llama tied", {"compute": "bf16", "outer": Outer(tier="node", every=2)}),
    ("zero++", "llama tied", {}),
    ("zero3", "llama, frozen layer", {"compute": "bf16", "keep": WHOLE}),
    ("zero3", "llama, frozen layer", {"keep": ALONE}),
    ("zero3", "experts", {"experts": {"node": {"expert": 2}}, "keep": WHOLE}),
    ("three-level", "llama tied", {"unit": 2, "prefetch": 2, "keep": WHOLE}),
    ("ddp", "llama tied", {"compute": "fp16", "prefetch": 0, "keep": ALONE}),
    ("zero3", "llama, frozen layer", {"compute": "bf16", "unit": 2, "keep": ALL}),
    ("zero3", "experts", {"experts": {"node": {"expert": 2}}, "unit": 2, "keep": ALL}),
    ("zero2", "llama tied", {"compute": "fp16", "unit": 2, "keep": ALL}),
]


@pytest.mark.parametrize(("name", "model", "changes"), nightly(*MODELS_AND_PLANS), ids=str)
def test_other_models_and_plans_change_no_bit(pool: LocalPool, name: str, model: str, changes: dict[str, Any]) -> None:
    """Frozen parameters, experts, islands and secondary copies."""
    plan = replace(preset(name, CLUSTER), **changes)
    same_bits(pool, plan, plan.keep if plan.keep.is_below else ON_DISK, model=model, num_micros=2)


AXES: list[Any] = [
    {"mapping": {"package": {"tensor": 2}}},
    *nightly({"mapping": {"node": {"context": {"ring": 2}}}}, {"mapping": {"package": {"tensor": {"columns": 2}}}}),
]


@pytest.mark.parametrize("keep", [ALL, *nightly(ON_DISK, WHOLE)], ids=["all", "optimizer", "and params"])
@pytest.mark.parametrize("mapping", AXES, ids=str)
def test_axes_equal_one_process(pool: LocalPool, mapping: dict[str, Any], keep: Keep) -> None:
    plan = exact("zero1", CLUSTER, keep=keep, unit=2 if keep is ALL else 1, **mapping)
    check(pool, CLUSTER, [Case(plan, model="llama tied", num_micros=2)])


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("adamw", {"compute": "bf16", "keep": ALL}),
        *nightly(
            ("muon", {"compute": "bf16", "keep": ON_DISK}),
            ("adamw", {"keep": ON_DISK}),
            ("muon", {"keep": ALONE}),
            ("adamw", {"optimizer_states": "int8", "keep": NARROW}),
        ),
    ],
    ids=str,
)
def test_checkpoints_hold_what_rests_on_a_disk(
    pool: LocalPool, tmp_path: Path, name: str, stored: dict[str, Any]
) -> None:
    for (whole, on_disk, on_device), names in pool.run(2, resumed, tmp_path, stored, OPTIMIZERS[name], timeout_s=120.0):
        assert whole == on_disk == on_device
        assert names == [[], []]


def killed(world: World, folder: Path, keep: Keep, strikes: bool) -> list[float]:
    """Losses of two steps behind a checkpoint of two; with `strikes`, rank 1 is killed in the middle of a write."""
    before, tempfile.tempdir = tempfile.tempdir, str(folder / "kept")
    engine = make(world, (2,), "zero1", "fp32", model="llama tied", stored={"keep": keep})
    checkpoints = folder / "checkpoints"
    if checkpoints.is_dir():
        resume(engine, Checkpoint(checkpoints / "step-00000002"))
    else:
        train(engine, 0, 2)
        engine.drain()
        save(engine, folder, 2, {}, 2)
    if strikes and world.rank == 1:
        vars(os)["pwritev"] = _half_then_killed
    found = train(engine, 2, 4)
    engine.close()
    tempfile.tempdir = before
    return found


def _half_then_killed(handle: int, parts: Sequence[Any], offset: int, flags: int = 0) -> int:
    os.pwrite(handle, parts[0][: len(parts[0]) // 2], offset)
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


@pytest.mark.parametrize("keep", [ON_DISK, *nightly(ALONE, GRADS)], ids=["optimizer", "params", "grads"])
def test_a_rank_that_is_killed_in_a_write_leaves_no_file(pool: LocalPool, tmp_path: Path, keep: Keep) -> None:
    """And the run goes on from its checkpoint with the same bits."""
    for name in ("whole", "run"):
        (tmp_path / name / "kept").mkdir(parents=True)
    whole = pool.run(2, killed, tmp_path / "whole", keep, False, timeout_s=120.0)
    with pytest.raises(HangError, match=r"killed by SIGKILL|the process is gone"):
        pool.run(2, killed, tmp_path / "run", keep, True, timeout_s=120.0)
    assert not list((tmp_path / "run" / "kept").iterdir())
    assert pool.run(2, killed, tmp_path / "run", keep, False, timeout_s=120.0) == whole


def traced(world: World) -> tuple[list[str], dict[str, int], int]:
    """Lanes and messages of a traced step, and the pieces that its program passes."""
    program, spans = traced_steps(world, ON_DISK)
    return sorted({lane for lane, _ in spans}), dict(Counter(each for _, each in spans)), program.num_kept_pieces


def test_pieces_are_traced_on_a_lane_of_their_own(pool: LocalPool) -> None:
    ((lanes, found, number),) = pool.run(1, traced, timeout_s=60.0)
    assert "disk" in lanes
    assert found["keep_read"] == found["keep_write"] == number > 3
