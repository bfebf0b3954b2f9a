"""The page and the text timeline: valid, self-contained, inside its frame, readable for everyone, safe."""

import json
import re
from dataclasses import replace
from itertools import combinations, pairwise
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from terrace.base.words import seconds
from terrace.plan.presets import PRESETS, preset
from terrace.planner.advice import Change, changes
from terrace.planner.ranking import Cost
from terrace.program.lowering import build
from terrace.program.program import Program
from terrace.program.recording import Recording
from terrace.report.memory import memory_svg
from terrace.report.page import page_html
from terrace.report.palette import MESSAGES, PAPER, PIPELINE, STREAM, colour_key
from terrace.report.sections import Page, Section
from terrace.report.step_sections import changes_section, memory_over_time_section, plan_section, timeline_section
from terrace.report.step_view import advice_words, sources_words
from terrace.report.svg import GUTTER, PLOT, WIDTH, shortened, time_ticks
from terrace.report.timeline import MOST_BARS, DrawnTimeline
from terrace.report.timeline_text import timeline_text
from terrace.simulate.bands import Band
from terrace.simulate.critical import critical_path
from terrace.simulate.curve import memory_curve
from terrace.simulate.recording import record
from terrace.simulate.rows import close_up, recording_timeline
from terrace.simulate.step import Step
from tests.support.pages import BLOCKS, checked, cluster_of, price, recorded

GLYPH = 7.2  # of 12 units: wider than the mean of any common sans-serif

BAND = Band(share=0.08, words="of no rows")


def step_of(program: Program) -> Step:
    return Step(
        cluster=program.cluster,
        plan=program.plan,
        blocks=program.blocks,
        num_micros=program.num_micros,
        sequence=0,
        work=(2.0 * 64 * 64 * 256,) * len(program.blocks),
    )


def page_of(recording: Recording, candidates: list[Change] | None = None, subtitle: str = "a model") -> str:
    """A page with the timeline, the memory and the changes of a step that no run has."""
    found, step_s, program = candidates or [], recording.report.step_s, recording.program
    curve, path = memory_curve(recording), critical_path(recording)
    recorded_step = SimpleNamespace(recordings=(recording,), curves=(curve,), path=path, fullest=0)
    recorded_step.end_s = recorded_step.step_s = step_s
    run = SimpleNamespace(cluster=program.cluster, plan=program.plan)
    view: Any = SimpleNamespace(run=run, recorded=recorded_step, is_pipelined=False, candidates=found)
    sections = plan_section(view) + timeline_section(view) + memory_over_time_section(view) + changes_section(view)
    foot = Section(words=[sources_words(program.cluster)])
    page = Page(title="a plan", subtitle=subtitle, lead=[advice_words(found, step_s, BAND)], sections=[*sections, foot])
    return page_html(page)


def drawn(recording: Recording) -> DrawnTimeline:
    return DrawnTimeline(recording_timeline(recording, critical_path(recording)))


def charts(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(text) for text in re.findall(r'<svg class="chart".*?</svg>\s*(?:<.*?)?</svg>', page)]


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_page_is_whole_and_needs_nothing_from_elsewhere(name: str) -> None:
    page = page_of(recorded(name))
    checker = checked(page)
    outside = [value for _, attrs in checker.tags for key, value in attrs.items() if key in ("src", "href")]
    assert not outside
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\(", page)
    data = json.loads(re.findall(r'id="data">(.*?)</script>', page)[0])
    assert len(data["charts"]) == page.count('<svg class="chart"') == 2
    timeline, memory = data["charts"]
    assert len(timeline["bars"]) == len(timeline["rows"]) == len(recorded(name).lanes)
    assert all(0 <= start <= end <= PLOT for row in timeline["bars"] for start, end, _ in row)
    assert max(memory["memory"]) == memory_curve(recorded(name)).peak[0]
    for key in {colour_key(span.category) for _, span in recorded(name).visible()}:
        assert f'fill="var(--c-{key})"' in page
        assert f"--c-{key}:#" in page


def test_names_cannot_become_markup() -> None:
    evil = "</script><img src=x>"
    cluster = cluster_of("package", "node")
    cluster = replace(cluster, name=f"<div class={evil}", device=replace(cluster.device, name=evil, source="a&b"))
    blocks = tuple(replace(block, name=f"{evil}{i}") for i, block in enumerate(BLOCKS))
    plan = replace(preset("three-level", cluster), name=evil)
    program = build(cluster, plan, blocks, 2)
    recording = record(program, price(program))
    spans = tuple(s._replace(category=f"wait {evil}") if s.category[:5] == "wait " else s for s in recording.spans)
    assert spans != recording.spans
    recording = replace(recording, spans=spans)
    cost = Cost(num_micros=1, step_s=1.0, time_s={}, memory_bytes={})
    change = Change(words=evil, note=evil, cluster=cluster, plan=plan, cost=cost)
    page = page_of(recording, [change], subtitle=evil)
    assert evil not in page
    checker = checked(page)
    assert "img" not in [tag for tag, _ in checker.tags]
    assert "<b>guess" not in page
    assert "a&b" not in page
    assert page.count("</script>") == 2
    assert "&lt;/script&gt;&lt;img src=x&gt;" in page


@pytest.mark.parametrize("micros", [4, 16])
def test_a_large_program_s_page_stays_small_and_loses_no_time(micros: int) -> None:
    recording = recorded("zero3", micros, 40)
    chart = drawn(recording)
    assert sum(map(len, chart.bars)) <= MOST_BARS
    assert (chart.least_s > 0) == (len(recording.visible()) > MOST_BARS)
    for lane, row in zip(recording.lanes, chart.bars, strict=True):
        found: dict[str, float] = {}
        for bar in row:
            assert sum(share for _, share in bar.shares) <= 1 + 1e-9
            for category, share in bar.shares:
                found[category] = found.get(category, 0.0) + share * (bar.end_s - bar.start_s)
        wanted: dict[str, float] = {}
        for _, span in recording.visible():
            if span.lane == lane:
                inside = min(recording.report.step_s, span.end_s) - max(0.0, span.start_s)
                wanted[span.category] = wanted.get(span.category, 0.0) + inside
        assert found == pytest.approx(wanted)
        assert all(before.end_s <= after.start_s + 1e-12 for before, after in pairwise(row))
    page = page_of(recording, changes(step_of(recording.program)) if micros == 4 else None)
    checked(page)
    assert len(page) < 200_000
    assert page.count('<svg class="chart"') == (3 if chart.least_s else 2)


def test_the_close_up_tells_spans_apart_and_stays_inside_its_frame() -> None:
    recording = recorded("zero3", 64, 40)
    near = close_up(recording_timeline(recording))
    assert 0 < near.start_s < recording.report.step_s / 2 < near.end_s < recording.report.step_s
    assert near.length_s < 0.05 * recording.report.step_s
    chart = DrawnTimeline(near)
    assert chart.least_s == 0
    assert sum(map(len, chart.bars)) > 32
    svg = ElementTree.fromstring(chart.svg())
    plot = next(child for child in svg if child.tag.endswith("svg"))
    assert all(-0.01 <= x <= PLOT + 0.01 for shape in plot for x, _ in _numbers(shape.attrib["d"]))
    labels = [words for _, _, _, words in _texts(svg)]
    assert len(set(labels)) == len(labels)


@pytest.mark.parametrize("first", [0.0, 1.2345, 5e-4, 30.0])
@pytest.mark.parametrize("length", [1e-4, 3e-3, 0.7, 12.0])
def test_ticks_of_time_are_told_apart(first: float, length: float) -> None:
    ticks = time_ticks(first, first + length)
    assert 2 <= len(ticks) <= 12
    assert len({words for _, words in ticks}) == len(ticks)
    assert len({words.split()[1] for _, words in ticks}) == 1
    for tick, words in ticks:
        assert first <= tick <= (first + length) * (1 + 1e-9)
        value, unit = words.split()
        assert float(value) / {"s": 1, "ms": 1e3, "us": 1e6}[unit] == pytest.approx(tick, abs=1e-9)


def _numbers(d: str) -> list[tuple[float, float]]:
    """The corners of a path that uses M, H, V, h, v and z."""
    points, x, y = [], 0.0, 0.0
    for command, values in re.findall(r"([MHVhvz])([^MHVhvz]*)", d):
        numbers = [float(value) for value in values.split()]
        if command == "M":
            x, y = numbers
        elif command == "H":
            x = numbers[0]
        elif command == "V":
            y = numbers[0]
        elif command == "h":
            x += numbers[0]
        elif command == "v":
            y += numbers[0]
        points.append((x, y))
    return points


def _texts(svg: ElementTree.Element) -> list[tuple[float, float, float, str]]:
    """(left, right, baseline, words) of every text."""
    found = []
    for text in svg.iter("{http://www.w3.org/2000/svg}text"):
        words = text.text or ""
        room, x = GLYPH * len(words), float(text.attrib["x"])
        left = {"end": x - room, "middle": x - room / 2}[text.attrib["text-anchor"]]
        found.append((left, left + room, float(text.attrib["y"]), words))
    return found


@pytest.mark.parametrize("name", sorted(PRESETS))
@pytest.mark.parametrize("capacity", [1e5, 2e5, 2e9])
def test_pictures_stay_inside_their_frames_and_no_words_overlap(name: str, capacity: float) -> None:
    recording = recorded(name)
    curve = memory_curve(recording)
    for text in (
        drawn(recording).svg(),
        memory_svg(curve, recording.report.step_s, capacity),
    ):
        svg = ElementTree.fromstring(text)
        _, _, width, height = map(float, svg.attrib["viewBox"].split())
        assert width == WIDTH
        plot = next(svg.iter("{http://www.w3.org/2000/svg}svg"), None)
        plots = [child for child in svg if child.tag.endswith("svg")]
        assert plot is not None
        assert len(plots) == 1
        inner_height = float(plots[0].attrib["height"])
        assert inner_height <= height
        for shape in plots[0]:
            for x, y in _numbers(shape.attrib["d"]):
                assert -0.01 <= x <= PLOT + 0.01
                assert -0.01 <= y <= inner_height + 0.01
        words = _texts(svg)
        assert len(words) >= 4
        for left, right, y, _ in words:
            assert left >= 0
            assert right <= WIDTH
            assert 0 < y <= height
        for one, other in combinations(words, 2):
            apart = one[1] <= other[0] or other[1] <= one[0] or abs(one[2] - other[2]) >= 12
            assert apart, (one, other)


def test_long_names_are_cut_to_the_gutter() -> None:
    cluster = cluster_of("a-tier-whose-name-is-far-too-long-for-any-gutter", "node")
    program = build(cluster, preset("three-level", cluster), BLOCKS, 1)
    recording = record(program, price(program))
    svg = ElementTree.fromstring(drawn(recording).svg())
    name = next(words for _, _, _, words in _texts(svg) if words.startswith("a-tier"))
    assert name.endswith("\u2026")
    assert len(name) * GLYPH <= GUTTER
    assert "far-too-long-for-any-gutter" in "".join(svg.itertext())
    assert shortened("node", 100) == "node"


def test_memory_is_drawn_as_high_as_it_gets() -> None:
    recording = recorded("zero3")
    curve = memory_curve(recording)
    svg = ElementTree.fromstring(memory_svg(curve, recording.report.step_s, 2e9))
    plot = next(child for child in svg if child.tag.endswith("svg"))
    highest = min(y for shape in plot for _, y in _numbers(shape.attrib["d"]))
    bottom = float(plot.attrib["height"])
    ticks = [(float(text[2]), text[3]) for text in _texts(svg) if text[3].endswith("B")]
    base = next(y for y, words in ticks if words == "0 B")
    y, words = ticks[-1]
    value, unit = words.split()
    bytes_per_unit = float(value) * {"B": 1, "kB": 1e3, "MB": 1e6}[unit] / (base - y)
    assert (bottom - highest) * bytes_per_unit == pytest.approx(curve.peak[0], rel=0.01)


# Machado, Oliveira, Fernandes: A Physiologically-based Model for Simulation of Color Vision Deficiency (2009),
# severity 1.0, on linear RGB.
_VISIONS = {
    "usual": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039)),
}


def _linear(colour: str) -> list[float]:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def _lab(rgb: list[float]) -> tuple[float, float, float]:
    r, g, b = (min(1.0, max(0.0, part)) for part in rgb)
    xyz = (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.95047, 0.2126 * r + 0.7152 * g + 0.0722 * b
    z = (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.08883
    fx, fy, fz = (part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116 for part in (*xyz, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


def _contrast(one: str, other: str) -> float:
    dark, light = sorted(
        sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), _linear(x), strict=True)) for x in (one, other)
    )
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("vision", sorted(_VISIONS))
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("row", [STREAM, PIPELINE, MESSAGES], ids=["stream", "pipeline", "messages"])
def test_colours_of_a_row_differ_for_every_eye(row: dict[str, tuple[str, str]], dark: bool, vision: str) -> None:
    def seen(colour: str) -> tuple[float, float, float]:
        rgb = _linear(colour)
        return _lab([sum(w * c for w, c in zip(weights, rgb, strict=True)) for weights in _VISIONS[vision]])

    for one, other in combinations(row, 2):
        distance = sum((a - b) ** 2 for a, b in zip(seen(row[one][dark]), seen(row[other][dark]), strict=True)) ** 0.5
        assert distance > 20, (one, other, distance)
    for name, pair in row.items():
        assert _contrast(pair[dark], PAPER[dark]) >= (1.4 if name == "wait" else 2.95), name


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_the_text_timeline_has_a_line_a_lane(name: str) -> None:
    recording = recorded(name)
    text = timeline_text(recording_timeline(recording), width=60)
    assert text.isascii()
    lines, count = text.splitlines(), len(recording.lanes)
    lanes, ruler, legend = lines[:count], lines[count], "\n".join(lines[count + 1 :])
    assert max(map(len, lines)) <= 60
    assert [line.split("|")[0].strip() for line in lanes] == [recording.lane_name(lane) for lane in recording.lanes]
    assert all(len(line) == 60 for line in (*lanes, ruler))
    stream = lanes[0].split("|")[1]
    assert " " not in stream
    share = recording.report.time_s["backward"] / recording.report.step_s
    assert stream.count("B") / len(stream) == pytest.approx(share, abs=0.25)
    for letter in set("".join(line.split("|")[1] for line in lanes)) - {" ", "?"}:
        assert f"{letter} " in legend
    assert "?" not in "".join(lanes)


def test_advice_names_the_best_of_the_plan_and_of_the_cluster() -> None:
    recording = recorded("zero3")
    found = changes(step_of(recording.program))
    words = advice_words(found, recording.report.step_s, BAND)
    for kind in ("plan", "cluster"):
        best = min((change for change in found if change.kind == kind), key=lambda change: change.step_s)
        assert f"in the {kind}, {best.words} (step {seconds(best.step_s)} +-8 %, " in words
    assert advice_words([], 1.0, BAND) == "No change of one thing makes it shorter."
