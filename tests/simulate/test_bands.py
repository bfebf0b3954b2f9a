"""Bands of predicted figures: pooled over sources that the model was not built on, wide where there are few."""

import random
import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from terrace.cluster.cluster import Cluster
from terrace.cluster.presets import load_cluster, preset_names
from terrace.plan.presets import preset
from terrace.simulate import bands
from terrace.simulate.bands import (
    CPU,
    FEWEST,
    FP8,
    LEVEL,
    MOST_TIE,
    OWN,
    STEP,
    Validated,
    axes_words,
    band_of,
    by_source,
    csv_text,
    generation_of,
    pooled_quantile,
    promised,
    tie_share,
    validated,
    widest_band,
)


def row(
    error: float,
    *axes: str,
    source: str = "s",
    devices: int = 8,
    generation: str = "Ampere",
    task: str = "t",
    software: str = OWN,
    seen: bool = False,
) -> Validated:
    return Validated(STEP, generation, frozenset(axes), devices, task, error, source, software, seen)


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


def of_sources(*errors: float, generation: str = "Ampere") -> list[Validated]:
    """A row for each source."""
    return [row(error, source=f"source {number}", generation=generation) for number, error in enumerate(errors)]


def test_a_miss_is_the_same_for_seconds_and_rates() -> None:
    slow, fast = row(0.25), row(-0.2)
    assert slow.miss == pytest.approx(fast.miss) == pytest.approx(0.25)


def test_a_source_counts_once_whatever_its_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred rows of one software that is missed by 1 % do not make the band of the next software narrow."""
    many = [row(0.01, source="many") for _ in range(100)]
    given(monkeypatch, *many, *of_sources(*(0.05 * number for number in range(1, 9))))
    assert band_of(a100(), preset("zero1", a100())).share == pytest.approx(0.35)


def test_fewer_sources_never_make_a_band_narrower(monkeypatch: pytest.MonkeyPatch) -> None:
    """With three sources of its own a generation has the widest band of all others, however well they agree."""
    others = of_sources(0.1, 0.2, 0.5, 0.6, 0.6, generation="Hopper")
    ampere = [row(0.02, source=name) for name in "abcd"]
    shares = []
    for number in (4, 3, 2, 1, 0):
        given(monkeypatch, *ampere[:number], *others)
        bands._band.cache_clear()
        shares.append(band_of(a100(), preset("zero1", a100())).share)
    assert shares[0] == pytest.approx(0.02)
    assert shares[1:] == pytest.approx([0.6] * 4)


def test_a_generation_with_few_sources_has_at_least_their_largest_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    """A band that its only source contradicts would promise what is known to be false."""
    others = of_sources(0.1, 0.2, 0.5, 0.6, 0.6, generation="Hopper")
    given(monkeypatch, *others, row(-0.5, source="one"), row(-0.1, source="one"), row(0.3, source="two"))
    found = band_of(a100(), preset("zero1", a100()))
    assert found.share == pytest.approx(1.0)
    assert found.words == (
        "2 published sources on Ampere, and the band is their largest miss, which is above the widest of other GPUs; "
        "2 of all 8 published steps took longer than predicted"
    )


def test_seen_rows_and_rows_of_other_software_give_no_band(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = of_sources(0.3, 0.3, 0.3, 0.3)
    seen = [each._replace(error=0.01, seen=True, source=f"seen {each.source}") for each in honest]
    named = [each._replace(error=0.02, software="te", source=f"te {each.source}") for each in honest]
    given(monkeypatch, *honest, *seen, *named)
    found = band_of(a100(), preset("zero1", a100()))
    assert found.share == pytest.approx(0.3)
    assert found.words == (
        "80 % of steps of software and machines not seen before miss by less (4 published sources on Ampere; 0 of "
        "all 4 published steps took longer than predicted; no GPU has run Terrace yet)"
    )
    assert str(found) == "+-30 %"


def test_no_more_is_promised_than_the_theorem_has() -> None:
    """k sources promise k / (k + 1) at most, and the quantile is then the largest miss."""
    assert [promised(number) for number in (1, 3, 4, 19)] == pytest.approx([1 / 2, 3 / 4, 4 / 5, LEVEL])
    assert pooled_quantile([[0.1], [0.3], [0.2]], promised(3)) == pytest.approx(0.3)
    # Nine sources reach 0.8 of ten with eight of them; a source of two rows is half within.
    assert pooled_quantile([[0.01 * number] for number in range(1, 10)], LEVEL) == pytest.approx(0.08)
    assert pooled_quantile([[0.1], [0.2], [0.3], [0.4, 0.5]], 0.7) == pytest.approx(0.4)


def test_the_next_source_lies_within_as_often_as_promised() -> None:
    """Sources with biases of their own, drawn alike: the band of nine holds for steps of a tenth."""
    numbers = random.Random(1)

    def source() -> list[float]:
        bias = numbers.gauss(0, 0.2)
        return [abs(numbers.gauss(bias, 0.07)) for _ in range(numbers.choice((1, 3, 30)))]

    held = []
    for _ in range(2000):
        known, new = [source() for _ in range(9)], source()
        held.append(fmean(miss <= pooled_quantile(known, LEVEL) for miss in new))
    assert LEVEL - 0.02 <= fmean(held) <= LEVEL + 0.08


def test_what_no_row_is_like_has_the_widest_band(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, *of_sources(0.1, 0.1, 0.1, 0.1), *of_sources(0.4, 0.4, 0.4, 0.4, generation="Hopper"))
    found = widest_band("an iteration")
    assert found.share == pytest.approx(0.4)
    assert found.words.startswith(
        "no validated step is like it (an iteration), so the band is the widest of other GPUs"
    )


def test_axes_are_named_in_their_order() -> None:
    assert axes_words(()) == "data axis"
    assert axes_words({"outer"}) == "outer axis"
    assert axes_words({"pipeline", FP8, "tensor"}) == "tensor and pipeline axes in fp8"


def test_a_cpu_has_rows_only_where_it_was_probed() -> None:
    cluster = load_cluster("local")
    plan = preset("zero1", cluster)
    assert "0 published sources on this device" in band_of(cluster, plan).words
    probed = replace(cluster, device=replace(cluster.device, marks={"peak_flops_per_s.bf16": "measured"}))
    assert re.fullmatch(
        r"75 % of steps on other machines miss by less \(3 sets of runs of Terrace on probed CPUs\)",
        band_of(probed, plan).words,
    )


def test_devices_of_presets_have_a_generation_and_a_band() -> None:
    for name in preset_names():
        cluster = load_cluster(name)
        assert generation_of(cluster.device.name) or cluster.device.type == "cpu", name
        largest = max(each.miss for each in validated() if each.is_step and not each.seen)
        assert 0.05 < band_of(cluster, preset("zero1", cluster)).share <= largest
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
    unseen = [each for each in steps if not each.seen]
    assert {each.generation for each in unseen} >= {"Ampere", "Hopper", "CDNA 3", "Blackwell", CPU}
    assert 0.005 < tie_share() <= MOST_TIE
    for generation in ("Ampere", "Hopper"):
        assert len(by_source(each for each in unseen if each.generation == generation)) >= FEWEST


def test_the_file_is_read_as_it_was_written() -> None:
    rows = validated()
    assert csv_text(rows) == Path(bands.__file__).with_name(bands.FILE).read_text(encoding="utf-8")
