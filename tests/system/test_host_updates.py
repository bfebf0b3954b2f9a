"""Updates on the host's cores beside what a rank computes: no bit changes."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from terrace.cluster.below import Medium
from terrace.launch.start import LocalPool, World
from terrace.plan.keep import CORES, Keep
from terrace.plan.presets import preset
from tests.support.kept import OPTIMIZERS, check_same_bits, resumed, traced_steps
from tests.support.nightly import in_turns, nightly
from tests.support.parity import Case, check, data_rows, engine_of, exact
from tests.support.toys import cluster_of

CLUSTER = cluster_of(2, 2)
ON_HOST = Keep(optimizer="disk", update="host", piece=128, ring=3)
WHOLE = replace(ON_HOST, params="disk")


@pytest.mark.parametrize(
    ("name", "placement", "schedule", "keep"),
    in_turns(13, ("adamw", "lion"), ("ddp", "zero1", "zero3", "three-level"), ("", "1f1b", "zbv"), (ON_HOST, WHOLE)),
)
def test_updates_on_the_host_change_no_bit(
    pool: LocalPool, name: str, placement: str, schedule: str, keep: Keep
) -> None:
    mapping: Any = {"mapping": {"node": {"pipeline": 2}}, "schedule": schedule} if schedule else {}
    plan = replace(preset(placement, CLUSTER), **mapping)
    case = Case(plan, num_steps=3, model="llama tied", optimizer=OPTIMIZERS[name], num_micros=2)
    check_same_bits(pool, CLUSTER, case, keep)


FORMS: list[Any] = [
    ("adamw", {"compute": "bf16", "master": "bf16", "optimizer_states": "int8"}, "llama tied"),
    *nightly(
        ("adamw", {"compute": "bf16", "optimizer_states": "int8"}, "llama tied"),
        ("lion", {"compute": "fp16"}, "llama tied"),
        ("adamw", {"compute": "bf16", "unit": 2}, "llama, frozen layer"),
        ("adamw", {"compute": "bf16", "master": "bf16", "optimizer_states": "bf16"}, "llama tied"),
        ("adamw", {"experts": {"node": {"expert": 2}}}, "experts"),
    ),
]


@pytest.mark.parametrize(("name", "changes", "model"), FORMS, ids=str)
def test_other_formats_and_models_change_no_bit(
    pool: LocalPool, name: str, changes: dict[str, Any], model: str
) -> None:
    keep = replace(ON_HOST, piece=1 << 16) if "optimizer_states" in changes else ON_HOST
    plan = replace(preset("zero3", CLUSTER), **changes)
    case = Case(plan, num_steps=3, model=model, optimizer=OPTIMIZERS[name], num_micros=2)
    check_same_bits(pool, CLUSTER, case, keep)


AXES: list[Any] = [
    {"mapping": {"package": {"tensor": 2}}},
    *nightly({"mapping": {"node": {"context": {"ring": 2}}}}, {"mapping": {"package": {"tensor": {"columns": 2}}}}),
]


@pytest.mark.parametrize("keep", [WHOLE, *nightly(ON_HOST)], ids=["whole", "optimizer"])
@pytest.mark.parametrize("mapping", AXES, ids=str)
def test_axes_equal_one_process(pool: LocalPool, mapping: dict[str, Any], keep: Keep) -> None:
    check(pool, CLUSTER, [Case(exact("zero1", CLUSTER, keep=keep, **mapping), model="llama tied", num_micros=2)])


def test_a_run_resumes_with_and_without_them(pool: LocalPool, tmp_path: Path) -> None:
    stored: dict[str, Any] = {"compute": "bf16", "keep": ON_HOST}
    for (whole, again, on_device), names in pool.run(
        2, resumed, tmp_path, stored, OPTIMIZERS["adamw"], timeout_s=120.0
    ):
        assert whole == again == on_device
        assert names == [[], []]


def traced(world: World) -> tuple[int, dict[str, int]]:
    """Trainable blocks, and the spans of a traced step on the lane of the host's cores."""
    program, spans = traced_steps(world, ON_HOST)
    return len(program.blocks), dict(Counter(category for lane, category in spans if lane == CORES))


def test_updates_are_traced_on_the_lane_of_the_hosts_cores(pool: LocalPool) -> None:
    ((number, found),) = pool.run(1, traced, timeout_s=60.0)
    assert found == {"update": number}


def overflowing(world: World) -> list[tuple[bool, bool]]:
    """Steps whose loss scale doubles until one is skipped: whether each was, and whether all parameters are finite.

    The gradients of eight micro-batches are added in fp32, and leave in fp16 for the host's memory.
    """
    cluster = cluster_of(1)
    host = Medium(memory_bytes=1e9, read_bytes_per_s=1e10, write_bytes_per_s=1e10, update_bytes_per_s=1e10)
    cluster = replace(cluster, device=replace(cluster.device, backend="cuda", below={"host": host}))
    keep = Keep(optimizer="host", grads="host", update="host", piece=128)
    plan = replace(preset("ddp", cluster), compute="fp16", unit=8, keep=keep)
    engine = engine_of(world, cluster, case := Case(plan, 8, "llama tied"))
    found = list[tuple[bool, bool]]()
    while len(found) < 30 and not any(skipped for skipped, _ in found):
        engine.state.loss_scale.value = 2.0 ** (6 + len(found))
        skipped = engine.step(data_rows(engine, case, 0), 1e-3).skipped
        engine.drain()
        found.append((skipped, all(bool(flat.working.values.isfinite().all()) for flat in engine.state)))
    engine.close()
    return found


def test_a_sum_that_overflows_where_it_is_handed_over_skips_its_step(pool: LocalPool) -> None:
    ((*before, last),) = pool.run(1, overflowing, timeout_s=60.0)
    assert before
    assert last == (True, True)
    assert set(before) == {(False, True)}
