"""Tables and pictures for people: tables have the right cells, the picture is valid and holds the data."""

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from rich.console import Console

from terrace.base.words import quantity, seconds
from terrace.cluster.presets import load_cluster
from terrace.plan.presets import preset
from terrace.plan.wire import MessageClass
from terrace.program.report import StepReport
from terrace.report.plot import loss_svg
from terrace.report.table import Table
from terrace.report.tables import (
    band_words,
    bytes_table,
    comparison_tables,
    equal_bytes,
    largest_miss,
    memory_table,
    plan_table,
)

LOCAL = load_cluster("local")


def _text(*tables: Table) -> str:
    """The text of a terminal: as in `terrace.cli.output.Terminal`, brackets are text."""
    console = Console(width=140, record=True, markup=False, emoji=False, file=open("/dev/null", "w"))  # noqa: SIM115
    for table in tables:
        console.print(table)
    return console.export_text()


def test_plan_table_places_every_state_on_its_tier() -> None:
    lines = _text(plan_table(LOCAL, preset("three-level", LOCAL))).splitlines()
    placed = {line.split()[0]: line for line in lines if line.split()[:1] and line.split()[0] in "package node system"}
    assert "params /2" in placed["package"]
    assert "grads /4" in placed["node"]
    assert "optimizer /8" in placed["system"]
    replicated = _text(plan_table(LOCAL, preset("ddp", LOCAL)))
    assert "params, grads, optimizer (replicated)" in replicated


def test_plan_table_says_which_links_are_shared() -> None:
    ethernet = load_cluster("ethernet")
    lines = _text(plan_table(ethernet, preset("zero3", ethernet))).splitlines()
    for tier in ethernet.tiers:
        line = next(line for line in lines if line.split()[:1] == [tier.name])
        assert (", shared" in line) == tier.shared


def test_bytes_table_totals_each_tier() -> None:
    sent = {(MessageClass.GATHER, "package"): 1500, (MessageClass.SYNC, "system"): 2_000_000}
    text = _text(bytes_table(sent, ["package", "node", "system"]))
    total = next(line for line in text.splitlines() if line.startswith(" total"))
    assert re.findall(r"1\.5 kB|2 MB", total) == ["1.5 kB", "2 MB"]


def test_memory_table_adds_up() -> None:
    text = _text(memory_table({"params": 1000, "grads": 500, "secondary": 0}, "1.9 GB (2 GB less a headroom of 5%)"))
    assert "1.5 kB" in text
    assert "secondary" not in text


def test_comparison_says_where_bytes_differ() -> None:
    predicted = StepReport(
        time_s={"forward": 1.0}, sent_bytes={(MessageClass.SYNC, "node"): 8}, memory_bytes={"params": 4}
    )
    measured = StepReport(
        time_s={"forward": 2.0, "other": 0.5}, sent_bytes={(MessageClass.SYNC, "node"): 9}, memory_bytes={"params": 4}
    )
    text = _text(*comparison_tables(predicted, measured))
    assert "DIFFERENT" in text
    assert "[" not in text, "markup of a table is shown as it stands"
    assert "-50 %" in text
    assert "equal" in _text(*comparison_tables(predicted, predicted))


def test_bytes_that_only_a_batch_tells_are_not_called_different() -> None:
    sent = {(MessageClass.SYNC, "node"): 8}
    predicted = StepReport(time_s={}, sent_bytes=sent, memory_bytes={})
    measured = StepReport(time_s={}, sent_bytes={**sent, (MessageClass.CONTEXT, "node"): 7}, memory_bytes={})
    assert equal_bytes(predicted, measured)
    assert not equal_bytes(measured, predicted)
    assert "as its batches say" in _text(*comparison_tables(predicted, measured))
    assert "DIFFERENT" in _text(*comparison_tables(measured, predicted))
    waited = replace(measured, time_s={"forward": 1.0, "wait context": 9.0})
    words = band_words([(replace(predicted, time_s={"forward": 1.1}), waited)])
    assert "step time, messages in attention left out, +10 %, within" in words


@pytest.mark.parametrize(("value", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2.5e9, "2.5 GB")])
def test_quantities(value: float, text: str) -> None:
    assert quantity(value, "B") == text


@pytest.mark.parametrize(("value", "text"), [(2.5, "2.50 s"), (0.0125, "12.5 ms"), (3e-5, "30 us")])
def test_seconds(value: float, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.parametrize("losses", [[3.0, 2.0, 1.5], [2.0], [1.0, 1.0], [1e-3, 5.0, 4.0]])
def test_loss_curve_is_valid_and_complete(losses: list[float]) -> None:
    svg = loss_svg(list(range(1, len(losses) + 1)), losses, title="a < b & c", target=1.2)
    root = ElementTree.fromstring(svg)
    lines = [element for element in root.iter() if element.tag.endswith("polyline")]
    assert len(lines) == 2
    for line in lines:
        points = [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
        assert len(points) == len(losses)
        assert all(0 <= x <= 720 and 0 <= y <= 360 for x, y in points)
    assert "a < b & c" in "".join(root.itertext())
    assert "target 1.2" in "".join(root.itertext())


@pytest.mark.parametrize(
    ("factor", "verdict"), [(0.79, "OUTSIDE"), (0.81, "within"), (1.19, "within"), (1.21, "OUTSIDE")]
)
def test_a_prediction_outside_its_band_says_so(factor: float, verdict: str) -> None:
    def report(step_s: float, memory: int) -> StepReport:
        return StepReport(time_s={"forward": step_s}, sent_bytes={}, memory_bytes={"params": memory})

    said = band_words([(report(factor, 108), report(1.0, 100))])
    assert said == (
        f"predicted step time {100 * (factor - 1):+.0f} %, {verdict} its limit of 20 %; "
        "predicted model state +8 %, within its limit of 10 %"
    )
    assert band_words([(report(1.0, 0), report(0.0, 100))]) == ""
    miss = largest_miss([(report(1.0, 100), report(1.0, 100)), (report(factor, 108), report(1.0, 100))])
    assert miss == (
        "" if verdict == "within" else f"most is missed of 'forward': {seconds(factor)} predicted, 1.00 s measured"
    )
