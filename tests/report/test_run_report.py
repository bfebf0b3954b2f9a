"""A run as its metrics, its traces and its page: of one that ended, of one that never did, of a damaged one."""

import json
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from terrace.report import plot
from terrace.report.page import page_html
from terrace.report.plot import loss_svg
from terrace.report.run_curves import HEIGHT, WIDTH, Curve, curve_data, curve_svg, curve_tiles, thinned
from terrace.report.run_view import RunView, run_page, run_view
from tests.support import chromium
from tests.support.folders import cut
from tests.support.pages import checked
from tests.support.records import step_record, write_metrics
from tests.support.tiny_runs import metrics, one_line, terrace, write_run

NUM_STEPS = 8


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of four ranks, resumed once, with two traced steps, and its page."""
    folder = tmp_path_factory.mktemp("reported")
    write_run(folder, 2, 2, steps=NUM_STEPS // 2, checkpoint_every=2, target_loss=9.0)
    first = terrace("train", "--config", "run.toml", "--folder", "run", cwd=folder)
    assert first.returncode == 0, first.stderr
    words = ["--train.steps", str(NUM_STEPS), "--train.profile", "6-7", "--train.profile_torch", "true"]
    done = terrace("train", "--resume", "run", *words, "--train.metrics", '["tensorboard"]', "--verbose", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "MFU = " in done.stdout
    assert "MFU = " not in first.stdout
    assert "HFU = " in done.stdout
    made = terrace("report", "run", cwd=folder)
    assert made.returncode == 0, made.stderr
    assert made.stdout.startswith(f"Finished after {NUM_STEPS} steps, with a loss of ")
    assert "missing" not in made.stdout
    return folder / "run"


def test_every_step_has_its_figures(ran: Path) -> None:
    lines = metrics(ran)
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1))
    predicted = json.loads((ran / "prediction.json").read_text())["predicted"]
    by_tier: dict[str, int] = {}
    for name, size in predicted["sent_bytes"].items():
        tier = name.split(".")[1]
        by_tier[tier] = by_tier.get(tier, 0) + size
    for line in lines:
        assert line["tokens_per_s_per_device"] == pytest.approx(line["tokens_per_s"] / 4)
        assert 0 < line["mfu"] <= line["hfu"]
        assert line["peak_memory_bytes"]["resident"] > 50e6
        assert line["memory_bytes"].keys() == predicted["memory_bytes"].keys()
        assert line["time"] > 1e9
    # A refresh that ends after its step is counted in the next line, so only the sum is exact; it lacks the last one's.
    for start, stop in ((0, NUM_STEPS // 2), (NUM_STEPS // 2, NUM_STEPS)):
        for tier, size in by_tier.items():
            sent = sum(line["sent_bytes"][tier] for line in lines[start:stop])
            refreshed = predicted["sent_bytes"].get(f"refresh.{tier}", 0)
            assert size * (stop - start) - refreshed <= sent <= size * (stop - start)


def test_chosen_steps_are_traced_beside_their_prediction(ran: Path) -> None:
    assert sorted(path.name for path in (ran / "profile").iterdir()) == [
        "step-6-rank-0.json",
        "step-7-rank-0.json",
        "torch-rank-0.json",
    ]
    for number in (6, 7):
        table = json.loads((ran / "profile" / f"step-{number}-rank-0.json").read_text())
        processes = {event["pid"] for event in table["traceEvents"] if event["ph"] == "X"}
        assert processes == {0, 1}
        step_s = metrics(ran)[number - 1]["step_s"]
        assert 0 < table["otherData"]["measured_s"] <= step_s
        assert table["otherData"]["step"] == number
    operators = json.loads((ran / "profile" / "torch-rank-0.json").read_text())["traceEvents"]
    assert any(str(event.get("name", "")).startswith("aten::") for event in operators)


def test_the_page_says_what_the_run_did(ran: Path) -> None:
    page = (ran / "report.html").read_text()
    assert re.search(r"predicted were [\d.]+ \w+ \+-\d+&nbsp;% \([+-]\d+&nbsp;%, no verdict: ", page)
    checked(page)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\(", page)
    data = json.loads(re.findall(r'id="data">(.*?)</script>', page)[0])
    assert len(data["charts"]) == page.count('<svg class="chart"') == 1
    assert len(data["curves"]) == page.count('<svg class="curve"') == 6
    losses = [[line["step"], float(f"{line['loss']:.5g}")] for line in metrics(ran)]
    assert data["curves"][0]["lines"]["loss"] == losses
    text = _text(page)
    for words in (
        "resumed after step 4",
        "finished after step 8",
        "saved after step 6",
        "step-00000008",
        "predicted above measured",
        "Bytes rank 0 sends in a step",
        "What happened",
        "wait gather",
        "2 starts",
        "profile/step-7-rank-0.json",
        "llama decoder of 8.8 k parameters",
        "The fox",
    ):
        assert words in text, words
    assert "What is missing" not in text
    bars = data["charts"][0]["bars"]
    named = {words for row in bars for _, _, words in row}
    assert any(words.startswith("FORWARD b1 m") for words in named)
    rows = re.findall(r'class="heading"[^>]*>(\w+)<', page)
    assert rows == ["predicted", "measured"]


class _Words(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.inside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.inside and self.inside.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.inside):
            self.found.append(data)


def _text(page: str) -> str:
    """The words of a page, as a reader sees them."""
    parser = _Words()
    parser.feed(page)
    return " ".join(" ".join(parser.found).split())


def _gone(name: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return damage


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_gone("config.toml"), "settings and plan: cannot read "),
        (cut("config.toml", 100), "settings and plan: "),
        (_gone("metrics.jsonl"), "curves and times: metrics.jsonl cannot be read"),
        (cut("metrics.jsonl", 0), "no step has ended"),
        (_gone("prediction.json"), "predictions: there is no prediction.json"),
        (cut("prediction.json", 300), "predictions: prediction.json is damaged"),
        (_gone("events.jsonl"), "there is no events.jsonl"),
        (_gone("profile"), 'no step was traced; --train.profile "10-12" traces three'),
        (cut("profile/step-7-rank-0.json", 500), "profile/step-7-rank-0.json is damaged"),
        (_gone("checkpoints"), "a checkpoint: none is complete"),
        (cut("events.jsonl", 200), "events: damaged lines in events.jsonl: 1"),
        (cut("metrics.jsonl", 2000), "curves and times: damaged or missing lines in metrics.jsonl: "),
    ],
)
def test_a_broken_run_has_a_page_that_says_what_is_missing(
    ran: Path, tmp_path: Path, damage: Callable[[Path], None], said: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(ran, run)
    damage(run)
    view = run_view(run)
    page = page_html(run_page(view))
    checked(page)
    text = _text(page)
    assert said in text
    assert bool(view.missing) == bool(said)
    assert ("What is missing" in text) == bool(said)
    if not (run / "profile").exists():
        assert "above the mean seconds measured by category" in text
        assert 'class="heading"' in page


def test_an_unfinished_run_is_told_from_a_stopped_one(ran: Path, tmp_path: Path) -> None:
    lines = (ran / "events.jsonl").read_text().splitlines()
    shutil.copytree(ran, tmp_path / "run")
    (tmp_path / "run" / "events.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    assert run_view(tmp_path / "run").status.startswith("Not finished: step 8 of 8 is the last at 20")
    stopped = json.dumps({"time": 5.0, "event": "stopped", "why": "TrainingError: <b>loss</b> is nan"})
    (tmp_path / "run" / "events.jsonl").write_text("\n".join([*lines[:-1], stopped]) + "\n")
    view = run_view(tmp_path / "run")
    assert view.status == "Stopped after step 8 of 8: TrainingError: <b>loss</b> is nan."
    assert "<b>loss" not in page_html(run_page(view))


def test_a_page_goes_where_it_is_told_and_replaces_nothing(ran: Path, tmp_path: Path) -> None:
    assert terrace("report", ran, "--out", "page.html", cwd=tmp_path).returncode == 0
    again = terrace("report", ran, "--out", "page.html", cwd=tmp_path)
    assert again.returncode == 2
    assert "page.html is there already" in one_line(again.stderr)
    assert terrace("report", ran, "--out", "page.html", "--force", cwd=tmp_path).returncode == 0
    (tmp_path / "empty").mkdir()
    nothing = terrace("report", "empty", cwd=tmp_path)
    assert nothing.returncode == 2
    assert "empty is not a run folder" in one_line(nothing.stderr)


def test_long_curves_keep_their_extremes_and_gaps_are_left_out() -> None:
    points = [(step, float(step % 7)) for step in range(1, 5001)]
    points[2500] = (2501, 99.0)
    points[2600] = (2601, float("nan"))
    curve = Curve(title="a < b", lines={"x": points}, smooth=True, level=("aim", 3.0))
    few = thinned([point for point in points if point[1] == point[1]])
    assert len(few) <= 400
    assert (2501, 99.0) in few
    assert [step for step, _ in few] == sorted(step for step, _ in few)
    picture = curve_svg(curve, marks=[100])
    assert len(picture) < 20_000
    assert "a &lt; b" in picture
    assert "resumed after step 100" in picture
    assert "nan" not in picture
    facts = curve_data(curve)
    assert (facts["first"], facts["last"]) == (1, 5000)
    one = curve_svg(Curve(title="one", lines={"x": [(3, 0.0)], "y": []}, from_zero=True))
    assert "<circle" in one


@pytest.mark.parametrize("last", [7, 150, 1000, 250_000, 30_000_000])
def test_no_label_of_a_step_leaves_its_picture(last: int) -> None:
    points = [(1, 2.0), (last, 1.0)]
    svg = curve_svg(Curve(title="c", lines={"x": points}))
    labels = re.findall(rf'<text x="([\d.]+)" y="{HEIGHT - 8}" text-anchor="middle">(\d+)<', svg)
    assert len(labels) > 1
    assert all(float(x) + 7.2 * len(words) / 2 <= WIDTH + 0.1 for x, words in labels)
    picture = loss_svg([1, last], [2.0, 1.0], title="loss")
    labels = re.findall(r'<text x="([\d.]+)" y="\d+" text-anchor="middle" fill="#52525b">([\d.e+]+)<', picture)
    assert len(labels) > 1
    assert all(float(x) + 7.2 * len(words) / 2 <= plot.WIDTH + 0.1 for x, words in labels)


def test_thin_and_thick_lines_have_a_legend_where_both_are() -> None:
    def tile(num_points: int, smooth: bool = True) -> str:
        points = [(step, float(step)) for step in range(num_points)]
        return curve_tiles([Curve(title="c", lines={"x": points}, smooth=smooth)])

    words = "running mean of about ten steps"
    assert words in tile(40)
    assert 'class="faint"' in tile(40)
    for other in (tile(39), tile(400, smooth=False)):
        assert words not in other
        assert 'class="faint"' not in other


def test_an_empty_view_is_a_page() -> None:
    page = page_html(run_page(RunView(name="<i>", status="nothing")))
    checked(page)
    assert "<i>" not in page.replace("<i style", "")


needs_browser = pytest.mark.skipif(
    chromium.BROWSER is None, reason="needs chromium or google-chrome on PATH, to look at the page"
)


@needs_browser
def test_the_page_opens_in_a_browser_without_a_network(ran: Path, tmp_path: Path) -> None:
    found = chromium.seen(ran / "report.html", tmp_path / "profile")
    assert not found.console, found.console
    assert '<body class="live">' in found.dom, "the script ran to its end"
    assert "predicted above measured" in _text(found.dom)
    broken = (ran / "report.html").read_text().replace('"use strict";', '"use strict"; nobody.knows();', 1)
    (tmp_path / "broken.html").write_text(broken)
    assert any(
        "nobody is not defined" in line for line in chromium.seen(tmp_path / "broken.html", tmp_path / "p").console
    )


@needs_browser
@pytest.mark.nightly  # by day its script runs to the end in a browser
def test_the_page_is_not_blank(ran: Path, tmp_path: Path) -> None:
    (tmp_path / "blank.html").write_text("<!doctype html><title>blank</title>")
    shares = {}
    for name, page, width in (("page", ran / "report.html", 1000), ("blank", tmp_path / "blank.html", 400)):
        size = chromium.picture(page, tmp_path / "profile", tmp_path / f"{name}.png", width, 800)
        assert size[:2] == (width, 800)
        shares[name] = size[2]
    assert shares["page"] > 0.02 > 0.001 > shares["blank"]


def test_losses_of_routers_and_dropped_choices_have_curves(tmp_path: Path) -> None:
    losses = [{"sequence": 0.5 / step, "z": 0.25} for step in (1, 2)]
    write_metrics(tmp_path, [step_record(n, router_losses=each, dropped=10 * n) for n, each in enumerate(losses, 1)])
    curves = {curve.title: curve.lines for curve in run_view(tmp_path).curves}
    assert curves["Losses of routers"] == {"sequence": [(1, 0.5), (2, 0.25)], "z": [(1, 0.25), (2, 0.25)]}
    assert curves["Choices of experts dropped"] == {"dropped": [(1, 10.0), (2, 20.0)]}
