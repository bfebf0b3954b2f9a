"""Bands of predicted figures: from the nearest validated rows, wide where nothing near was validated."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from terrace.cluster.cluster import Cluster
from terrace.cluster.presets import load_cluster, preset_names
from terrace.plan.presets import preset
from terrace.simulate import bands
from terrace.simulate.bands import (
    CPU,
    FEWEST,
    FP8,
    MOST_TIE,
    OF_FAR,
    OF_NEAR,
    STEP,
    WIDTH,
    Validated,
    axes_words,
    band_of,
    csv_text,
    generation_of,
    quantile,
    tie_share,
    validated,
)


def row(error: float, *axes: str, devices: int = 8, generation: str = "Ampere", task: str = "t") -> Validated:
    return Validated(STEP, generation, frozenset(axes), devices, task, error)


def given(monkeypatch: pytest.MonkeyPatch, *rows: Validated) -> None:
    """Bands are taken from these rows; cached bands of others are forgotten, before and after."""
    monkeypatch.setattr(bands, "validated", lambda: rows)
    bands._band.cache_clear()
    tie_share.cache_clear()


@pytest.fixture(autouse=True)
def _forgotten() -> None:
    bands._band.cache_clear()
    tie_share.cache_clear()


def a100(nodes: int = 1) -> Cluster:
    return load_cluster("dgx-a100").resized(nodes)


def share(cluster: Cluster, **keys: object) -> float:
    bands._band.cache_clear()
    return band_of(cluster, replace(preset("zero1", cluster), **keys)).share  # type: ignore[arg-type]


def test_a_miss_is_the_same_for_seconds_and_rates() -> None:
    slow, fast = row(0.25), row(-0.2)
    assert slow.miss == pytest.approx(0.25)
    assert fast.miss == pytest.approx(0.25)


def test_the_quantile_by_hand() -> None:
    """The ceil(0.8 (n + 1))-th of n: the 8th of 9, and the largest where there are too few."""
    misses = [0.01 * number for number in range(1, 10)]
    assert quantile(misses[::-1], 0.8) == 0.08
    assert quantile(misses, 0.95) == 0.09
    assert quantile([0.3], 0.8) == 0.3


def test_a_band_is_that_of_rows_with_the_same_axes_and_about_as_many_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    near = [row(0.01 * number, devices=devices) for number, devices in zip(range(1, 6), (2, 8, 8, 16, 32), strict=True)]
    others = [
        row(0.5, devices=64),  # wider
        row(0.5, "tensor"),
        row(0.5, generation="Hopper"),
        row(0.5)._replace(kind="layer"),
    ]
    given(monkeypatch, *near, *others)
    found = band_of(a100(), preset("zero1", a100()))
    assert found.share == pytest.approx(quantile([each.miss for each in near], OF_NEAR)) == pytest.approx(0.05)
    assert found.words == "80 % of 5 validated steps like it miss by less (Ampere, data axis, 2 to 32 devices)"
    assert str(found) == "+-5 %"


def test_without_near_rows_it_is_wider_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, *(row(0.01 * number) for number in range(1, 10)), row(0.4, generation="Hopper"))
    wide = band_of(a100(16), preset("zero1", a100(16)))
    assert wide.share == pytest.approx(0.09)
    assert wide.words == (
        "no validated step is near (Ampere, data axis, 128 devices); 95 % of all 9 on Ampere miss by less"
    )
    tensor = replace(preset("zero1", a100()), mapping={"node": {"data": 4, "tensor": 2}})
    assert "no validated step is near (Ampere, tensor axis, 8 devices)" in band_of(a100(), tensor).words
    # One row of a generation is too few: it is as good as new, and gets the band of that which is missed most.
    hopper = load_cluster("dgx-h100").resized(1)
    found = band_of(hopper, preset("zero1", hopper))
    assert found.share == pytest.approx(0.4)
    assert "no validated step is near (Hopper, " in found.words
    assert found.words.endswith("band taken from all 10 rows, of the devices missed most")
    unknown = replace(hopper, device=replace(hopper.device, name="a new device"))
    assert band_of(unknown, preset("zero1", unknown)).share == found.share


def test_rows_of_one_plan_on_several_numbers_of_devices_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six widths of one plan are no six witnesses: with four others they are five, and the largest miss is theirs."""
    widths = [row(0.01 * number, devices=8 * number, task="wide")._replace(kind=WIDTH) for number in range(1, 7)]
    others = [row(0.02), row(0.02), row(0.02)]
    given(monkeypatch, *widths, *others)
    assert "no validated step is near" in band_of(a100(), preset("zero1", a100())).words
    given(monkeypatch, *widths, *others, row(0.02))
    near = band_of(a100(), preset("zero1", a100()))
    assert near.words == "80 % of 5 validated steps like it miss by less (Ampere, data axis, 8 to 32 devices)"
    assert near.share == pytest.approx(0.04)  # of at most four times as many devices
    # They compare no plans of a search.
    given(monkeypatch, row(0.2, task="a"), row(0.212, task="a"), *(each._replace(task="a") for each in widths))
    assert tie_share() == pytest.approx(0.01)


def test_without_near_rows_those_with_one_of_its_axes_come_before_all(monkeypatch: pytest.MonkeyPatch) -> None:
    akin = [row(0.01 * number, "tensor", "pipeline", devices=1024) for number in range(1, 6)]
    given(monkeypatch, *akin, *(row(0.5) for _ in range(5)), *(row(0.3, "tensor", FP8) for _ in range(5)))
    plan = replace(preset("zero1", a100()), mapping={"node": {"data": 4, "tensor": 2}})
    found = band_of(a100(), plan)
    assert found.share == pytest.approx(0.05)
    assert found.words == (
        "no validated step is near (Ampere, tensor axis, 8 devices); 95 % of 5 with one of its axes miss by less"
    )
    # Steps in fp8 are near to others in fp8 alone.
    eight = band_of(a100(), replace(plan, products="fp8"))
    assert eight.share == pytest.approx(0.3)
    assert eight.words == "80 % of 5 validated steps like it miss by less (Ampere, tensor axis in fp8, 8 devices)"


def test_the_axes_of_a_plan_are_those_of_its_mapping_its_experts_and_its_islands() -> None:
    cluster = a100(2)
    base = preset("zero1", cluster)
    plan = replace(
        base,
        mapping={"node": {"data": 4, "tensor": 2}, "system": {"pipeline": 2}},
        experts={"node": {"expert": 4}},
    )
    assert "(Ampere, tensor, pipeline and experts axes, 16 devices)" in band_of(cluster, plan).words
    assert axes_words(()) == "data axis"
    assert axes_words({"outer"}) == "outer axis"
    assert axes_words({"pipeline", FP8, "tensor"}) == "tensor and pipeline axes in fp8"


def test_a_cpu_has_rows_only_where_it_was_probed() -> None:
    cluster = load_cluster("local")
    plan = preset("zero1", cluster)
    assert "(this device, data axis, 8 devices)" in band_of(cluster, plan).words
    probed = replace(cluster, device=replace(cluster.device, marks={"peak_flops_per_s.bf16": "measured"}))
    assert f"({CPU}, data axis, 8 devices)" in band_of(probed, plan).words


def test_devices_of_presets_have_a_generation_and_a_band() -> None:
    for name in preset_names():
        cluster = load_cluster(name)
        assert generation_of(cluster.device.name) or cluster.device.type == "cpu", name
        assert 0.01 < band_of(cluster, preset("zero1", cluster)).share < 0.5
    assert generation_of("NVIDIA A100-SXM4-80GB") == "Ampere"
    assert generation_of("NVIDIA H200") == generation_of("NVIDIA GH200 480GB") == "Hopper"


def test_plans_tie_within_the_relative_error_of_rows_of_one_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both rows of a task are 20 % off, and 1 % off each other."""
    given(monkeypatch, row(0.2, task="a"), row(0.212, task="a", devices=16), row(-0.3, task="b"))
    assert tie_share() == pytest.approx(0.01)
    # Neither the same task on many more devices nor a row of a CPU says what two plans of a search are off.
    given(
        monkeypatch,
        row(0.2, task="a"),
        row(0.212, task="a"),
        row(0.4, task="a", devices=64),
        row(0.0, task="c", generation=CPU),
        row(0.3, task="c", generation=CPU),
    )
    assert tie_share() == pytest.approx(0.01)


def test_a_tie_never_reaches_far(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, row(0.2), row(-0.2))
    assert tie_share() == MOST_TIE == 0.05


def test_the_validated_rows_are_many_and_tie_plans_within_some_percents() -> None:
    steps = [each for each in validated() if each.kind == STEP]
    assert len(steps) >= 200
    assert {each.generation for each in steps} >= {"Ampere", "Hopper", CPU}
    assert 0.005 < tie_share() <= MOST_TIE
    # At least a share of the rows lie within the band that they give.
    alike = [each.miss for each in steps if each.generation == "Ampere" and not each.axes]
    assert len(alike) >= FEWEST
    for part in (OF_NEAR, OF_FAR):
        assert sum(miss <= quantile(alike, part) for miss in alike) >= math.floor(part * len(alike))


def test_the_file_is_read_as_it_was_written() -> None:
    rows = validated()
    assert csv_text(rows) == Path(bands.__file__).with_name(bands.FILE).read_text(encoding="utf-8")
