"""Loads of experts over a run: the file of each stage, and the heat maps of the page."""

from dataclasses import dataclass
from pathlib import Path

from terrace.program.loads import Loads
from terrace.program.report import StepReport, plain, read_plain
from terrace.report.loads import heat_maps, load_words
from terrace.report.page import page_html
from terrace.report.sections import Page, Section
from terrace.train.gauges import Gauges
from terrace.train.loads import NUM_PARTS, LoadsFile, LoadsOfSteps, cut_other_stages, read_loads

STEPS = 2 * NUM_PARTS + 10  # of which every third is written


def write(folder: Path, stage: int, layer: str, first: int = 0, last: int = STEPS, save_every: int = 0) -> None:
    file = LoadsFile(folder, stage, first, STEPS)
    for step in range(first + 1, last + 1):
        file.add(step, Loads(layers=(layer,), counts=((step, 1),)))
        if save_every and step % save_every == 0:
            file.end()


def test_a_file_has_the_sums_of_parts_of_all_stages(tmp_path: Path) -> None:
    write(tmp_path, 0, "layers.0")
    write(tmp_path, 1, "layers.1")
    parts = read_loads(tmp_path)
    assert len(parts) <= NUM_PARTS
    assert [parts[0].first, *(part.last for part in parts)][-1] == STEPS
    assert parts[0] == LoadsOfSteps(first=1, last=3, counts={"layers.0": [1 + 2 + 3, 3], "layers.1": [6, 3]})
    for layer in ("layers.0", "layers.1"):
        assert sum(part.counts[layer][0] for part in parts) == STEPS * (STEPS + 1) // 2


def test_a_resume_repeats_no_step_and_damage_costs_its_line(tmp_path: Path) -> None:
    write(tmp_path, 0, "layers.0", last=20)
    write(tmp_path, 0, "layers.0", first=10)  # after the checkpoint of step 10
    parts = read_loads(tmp_path)
    assert [(part.first, part.last) for part in parts[:5]] == [(1, 3), (4, 6), (7, 9), (11, 12), (13, 15)]
    path = tmp_path / "loads.jsonl"
    path.write_text(path.read_text().replace('"first": 4', '"first": 5') + '{"torn')
    assert [part.first for part in read_loads(tmp_path)[:3]] == [1, 7, 11]


def test_a_resume_from_a_save_has_all_steps_before_it(tmp_path: Path) -> None:
    write(tmp_path, 0, "layers.0", last=25, save_every=10)
    write(tmp_path, 0, "layers.0", first=20, save_every=10)
    assert sum(part.counts["layers.0"][0] for part in read_loads(tmp_path)) == STEPS * (STEPS + 1) // 2


@dataclass
class _Saved:
    is_saved: bool


def test_a_save_ends_the_range_whenever_it_comes(tmp_path: Path) -> None:
    """As under `train.checkpoint_every = "auto"`; before the next step, or at the end of a run that is stopped."""
    gauges, file = Gauges.__new__(Gauges), LoadsFile(tmp_path, 0, 0, STEPS)
    gauges._loads, saves = file, {4, 5, 11}
    for step in range(1, 12):
        file.add(step, Loads(layers=("layers.0",), counts=((step, 1),)))
        gauges._newest = [_Saved(step in saves)]  # type: ignore[list-item]
        if step < 11:
            gauges.before(step)
    gauges.ended()
    assert [part.last for part in read_loads(tmp_path)] == [3, 4, 5, 6, 9, 11]


def test_a_resume_on_fewer_stages_drops_their_repeated_steps(tmp_path: Path) -> None:
    for stage in range(3):
        write(tmp_path, stage, f"layers.{stage}", last=15)
    write(tmp_path, 0, "layers.1", first=9)
    cut_other_stages(tmp_path, 1, 9)
    assert all(part.last <= 9 or part.counts.keys() == {"layers.1"} for part in read_loads(tmp_path))
    assert read_loads(tmp_path)[2].counts.keys() == {"layers.0", "layers.1", "layers.2"}


def test_heat_maps() -> None:
    parts = [LoadsOfSteps(first=step, last=step, counts={"layers.1": [0, 8], "layers.2": [3, 5]}) for step in (1, 2, 3)]
    text = heat_maps(parts)
    assert text in page_html(Page(title="run", sections=[Section(body=text)]))
    assert [f"Steps {step} to {step}" in text for step in (1, 2, 3)] == [True] * 3
    # Of each map: expert 0 of layers.1 is idle, expert 1 has twice the mean; layers.2 has 0.75 and 1.25 of it.
    for opacity in ("1.0", "0.3", "0.75"):
        assert text.count(f'fill-opacity="{opacity}"') == 3
    assert text.count('class="grid" d="M') == 3
    assert heat_maps([]) == heat_maps([LoadsOfSteps(first=1, last=1, counts={})]) == ""
    many = {f"layers.{layer}": [1] * 128 for layer in range(48)}
    assert heat_maps([LoadsOfSteps(first=step, last=step, counts=many) for step in range(9)]).count("<svg") == 3


def test_a_report_keeps_its_load() -> None:
    load = {"busiest_expert": 1.5, "busiest_rank": 1.25, "max_vio": 0.4, "entropy": 0.9, "idle": 0.5}
    report = StepReport(time_s={"forward": 1.0}, sent_bytes={}, memory_bytes={}, load=load)
    assert read_plain(plain(report)) == report
    words = "the busiest has 1.50 times the mean of its layer, the busiest rank 1.25 times; MaxVio 0.4, entropy 0.900"
    assert words in load_words(load)
