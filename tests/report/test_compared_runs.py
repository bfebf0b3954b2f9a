"""Several runs on one page and on the terminal: all lines of all runs, figures side by side, settings that differ."""

import base64
import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from terrace.cli.main import main
from terrace.report.downloads import run_json, steps_csv
from terrace.report.markup import html_table
from terrace.report.overlay import MOST_RUNS, names_of, overlaid, overlay_page, setting_rows
from terrace.report.page import page_html
from terrace.report.run_curves import COLOURS, Curve
from terrace.report.run_view import RunView, flat_settings, run_view
from terrace.report.table import Table
from tests.support.pages import checked
from tests.support.records import step_record, write_metrics

CONFIG = 'plan = "{plan}"\n[train]\nsteps = {steps}\nbatch = 8\n[data]\npath = "a & b"\n'


def write_folder(folder: Path, factor: float, num_steps: int = 60, plan: str = "zero3", eval_every: int = 0) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(CONFIG.format(plan=plan, steps=num_steps))
    records = []
    for step in range(1, num_steps + 1):
        loss = factor * (1 + 10 / step)
        evaluated = {"holdout": {"loss": loss + 0.5, "tokens": 9.0}} if eval_every and step % eval_every == 0 else {}
        records.append(
            step_record(
                step,
                loss=loss,
                step_s=0.5 * factor,
                tokens_per_s=16.0 / factor,
                time_s={"forward": 0.4 * factor, "wait gather": 0.1 * factor},
                mfu=0.25,
                sent_bytes={"node": 1000},
                peak_memory_bytes={"resident": 5_000_000},
                eval=evaluated,
            )
        )
    write_metrics(folder, records)
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path, Path]:
    return (
        write_folder(tmp_path / "a", 1.0, eval_every=20),
        write_folder(tmp_path / "b", 2.0, num_steps=40, plan="ddp"),
        write_folder(tmp_path / "deep" / "a", 3.0, eval_every=20),
    )


def sides_of(*folders: Path) -> list[RunView]:
    return [replace(run_view(folder), name=name) for name, folder in zip(names_of(folders), folders, strict=True)]


def test_charts_have_every_line_of_every_run(runs: tuple[Path, ...]) -> None:
    sides = sides_of(*runs)
    assert [side.name for side in sides] == [f"{runs[0].parent.name}/a", f"{runs[0].parent.name}/b", "deep/a"]
    curves = {curve.title: curve.lines for curve in overlaid(sides)}
    assert {"Loss", "Loss: holdout", "Throughput", "Seconds of a step", "Utilisation: MFU"} <= curves.keys()
    for lines in curves.values():
        # Also without a point, so that a run has one colour in all charts.
        assert list(lines) == [side.name for side in sides]
    assert curves["Loss: holdout"][sides[2].name] == [(20, 5.0), (40, 4.25), (60, 4.0)]
    assert curves["Loss: holdout"][sides[1].name] == ()
    page = page_html(overlay_page(sides))
    checked(page)
    for words in ("Final figures", "Settings that differ", "Not finished: step 40 is the last", "&quot;ddp&quot;"):
        assert words in page
    assert page.count('<svg class="curve"') == len([lines for lines in curves.values() if any(lines.values())])


def test_figures_and_settings_stand_side_by_side(runs: tuple[Path, ...]) -> None:
    one, two, three = sides_of(*runs)
    assert one.final["steps"].value == three.final["steps"].value == 60
    # The last tenth of 60 steps.
    assert one.final["loss, mean of the last tenth"].value == pytest.approx(
        sum(1 + 10 / step for step in range(55, 61)) / 6
    )
    assert two.final["step"] == (1.0, "1.00 s")
    assert three.final["holdout: lowest loss"] == (4.0, "4 (step 60)")
    assert "holdout: last loss" not in two.final
    assert one.final["waits of rank 0"].words == "20 %"
    assert setting_rows([one, two, three]) == [
        ("plan", ['"zero3"', '"ddp"', '"zero3"']),
        ("train.steps", ["60", "40", "60"]),
    ]
    lost = RunView(name="x", status="")
    assert setting_rows([one, two, lost])[1] == ("train.steps", ["60", "40", "?"])
    more = RunView(name="x", status="", settings={**(one.settings or {}), "train.steps": 60.0, "new": "60"})
    assert setting_rows([one, more]) == [("new", ["-", '"60"']), ("train.steps", ["60", "60.0"])]


def test_the_command_writes_the_page_and_tables_of_80_columns(
    runs: tuple[Path, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(runs[0].parent)
    assert main(["report", "a", "b", "deep/a"]) == 0
    said = capsys.readouterr().out
    assert "wrote a/compared.html" in said
    assert (runs[0] / "compared.html").read_text().startswith("<!doctype html>")
    tables = said.partition("\n\n")[2].partition("missing: ")[0]
    assert max(map(len, tables.splitlines())) <= 80
    assert re.search(r'plan +"zero3" \(1, 3\); "ddp" \(2\)$', said, re.M)
    assert re.search(r"^ *MFU +25\.0 % +25\.0 % +25\.0 %$", said, re.M)
    # Losses are as 1 to 2 to 3, those of the holdout 0.5 above; the second run ends after 40 steps and has no holdout.
    assert re.search(r"^ +40 +1\.388 +2\.776 +4\.164$", said, re.M)
    assert re.search(r"^ +60 +1\.212 {11}3\.636$", said, re.M)
    assert re.search(r"^ +40 +1\.75 +4\.25$", said, re.M)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a", "a"], "a and a are the same run: name each once"),
        (["a", "./b/../a"], "are the same run: name each once"),
        (["a", "gone"], "gone is not a run folder"),
        (["a", "rl"], "rl is a run of terrace rl and a one of terrace train"),
        (["a"] * (MOST_RUNS + 1), f"{MOST_RUNS + 1} runs, but a page shows at most {MOST_RUNS}: name fewer"),
        (["a", "--port", "80"], "--port 80 has no effect without --watch"),
        (["a", "--watch", "--port", "70000"], "--port 70000 must be from 1 to 65535, or 0 for any free one"),
        (["a", "--watch", "--out", "x"], "--out has no effect with --watch"),
        (["a", "--watch", "--force"], "--force has no effect with --watch"),
        (["a", "b", "--force"], "--force has no effect without --out FILE"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(
    words: list[str],
    said: str,
    runs: tuple[Path, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(runs[0].parent)
    Path("rl").mkdir()
    Path("rl/config.toml").write_text("[run]\nsteps = 1\n")
    assert main(["report", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_runs_of_feedback_are_compared_by_their_own_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, reward in (("one", 0.25), ("two", 0.75)):
        Path(name).mkdir()
        Path(name, "config.toml").write_text(f"[run]\nsteps = 3\nseed = {int(8 * reward)}\n")
        numbers = {"reward/mean": reward, "time/step": 1.0}
        write_metrics(Path(name), [step_record(step, values=numbers) for step in (1, 2, 3)])
    assert main(["report", "one", "two"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"0\.25 +0\.75$", said, re.M)
    assert re.search(r"run\.seed +2 \(1\); 6 \(2\)$", said, re.M)


def test_numbers_of_a_page_are_in_it(runs: tuple[Path, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs[0].parent)
    assert main(["report", "a"]) == 0
    page = (runs[0] / "report.html").read_text()
    links = dict(re.findall(r'<a download="([^"]+)" href="data:[^,"]+;base64,([^"]+)"', page))
    assert links.keys() == {"steps.csv", "run.json"}
    rows = list(csv.DictReader(io.StringIO(base64.b64decode(links["steps.csv"]).decode())))
    assert [int(row["step"]) for row in rows] == list(range(1, 61))
    assert [float(row["Loss"]) for row in rows] == [1 + 10 / step for step in range(1, 61)]
    assert {row["Loss: holdout"] for row in rows[:19]} == {""}
    assert float(rows[19]["Loss: holdout"]) == 2.0
    (found,) = json.loads(base64.b64decode(links["run.json"]))["runs"]
    assert found["name"] == "a"
    assert found["figures"]["step"] == 0.5
    assert found["settings"]["train.batch"] == 8


def test_a_long_run_is_downloaded_in_part_with_its_evaluations_and_its_end() -> None:
    points = [(step, 1.0) for step in range(1, 40_001)]
    lines = {"loss": points, "=cmd()": [(778, 2.0), (30_001, 1.5)]}
    side = RunView(
        name="@run", status="", curves=[Curve(title="Loss", lines=lines), Curve(title="Rate", lines={"r": points})]
    )
    text, stride = steps_csv([side])
    rows = list(csv.reader(io.StringIO(text)))
    assert stride == 8
    assert rows[0] == ["run", "step", "Loss", "Loss: =cmd()", "Rate"]
    assert len(rows) == 1 + 5000 + 2  # step 778, and the last one; 30,001 is among the others
    assert {row[1]: row[3] for row in rows if row[3]} == {"step": "Loss: =cmd()", "778": "2.0", "30001": "1.5"}
    assert rows[-1][1] == "40000"
    assert {row[0] for row in rows[1:]} == {"'@run"}
    assert json.loads(run_json([side]))["runs"][0]["settings"] is None


def test_many_runs_are_told_apart_by_dashes() -> None:
    names = [f"run {number}" for number in range(MOST_RUNS)]
    sides = [
        RunView(name=name, status="", curves=[Curve(title="Loss", lines={"loss": [(1, 2.0), (2, 1.0)]})])
        for name in names
    ]
    page = page_html(overlay_page(sides))
    drawn = re.findall(r'<polyline class="line"[^>]* stroke="([^"]+)"(?: stroke-dasharray="([^"]+)")?', page)
    assert len(set(drawn)) == len(drawn) == MOST_RUNS
    assert len({colour for colour, _ in drawn}) == len(COLOURS)
    assert page.count(">dashed<") == page.count(">dotted<") == len(COLOURS)


def test_tables_of_a_list_are_compared_by_their_names() -> None:
    text = """[[cluster.tiers]]\nname = "package"\nsize = 2\n[[cluster.tiers]]\nname = "node"\nsize = {}\n"""
    sides = [RunView(name=str(size), status="", settings=flat_settings(text.format(size))) for size in (1, 4)]
    assert setting_rows(sides) == [("cluster.tiers.node.size", ["1", "4"])]
    same = flat_settings("pool = [{name = 'a', ranks = 1}, {name = 'a', ranks = 2}]")
    assert same == {"pool": [{"name": "a", "ranks": 1}, {"name": "a", "ranks": 2}]}


def test_a_cell_with_a_sentence_wraps() -> None:
    sentence = "the second step took longer than was predicted, since the machine is busy"
    assert html_table(Table(headings=["what", "why"], rows=[["note", sentence]], left=["what"])).count("long") == 2
