"""The page of a run of `terrace rl`, from its files alone: responses are a model's, and files may be damaged."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from terrace.base.sealed import sealed_json
from terrace.cli.main import main
from terrace.report.page import page_html
from terrace.report.record import command_of_folder
from terrace.report.run_view import run_page, run_view
from terrace.rl.config import to_toml_table
from terrace.rl.pages.iteration import recorded_step, steady_iteration
from terrace.rl.pages.samples import samples_html, samples_of
from terrace.rl.resolve import resolve
from terrace.train.recorder import Predicted, append_event, write_prediction
from tests.support import chromium
from tests.support.folders import cut
from tests.support.nightly import nightly
from tests.support.pages import checked
from tests.support.records import step_record

EVIL = "</script><script>alert(1)</script>\u202e&\ud800"
STRANGE: tuple[Any, ...] = (None, True, "x", [], [1], {}, {"a": {}}, -1, 1e308, float("nan"), -math.inf, 10**400)
STEPS = 12


def call(role: str, method: str, begin_s: float, end_s: float, pool: str = "ranks 0-3", num: int = 1) -> dict[str, Any]:
    return {"role": role, "pool": pool, "method": method, "begin_s": begin_s, "end_s": end_s, "num": num}


def sample(kind: str, **more: Any) -> dict[str, Any]:
    found = {"kind": kind, "prompt": "1 + 1 =", "response": EVIL, "finish": "length", "reward": 0.25}
    return {**found, "parts": {"my_rewards:near": -0.5}, "cost": None, "advantage": None, **more}


def lines_of(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Lines by file of a run on two pools, whose rollout works on across the ends of steps."""
    numbers = {"reward/mean": 0.5, "actor/kl": 0.1, "time/step": 2.0, "time/generate": 1.0, "time/update": 0.5}
    numbers |= {"reshard/bytes_planned": 64.0, "reshard/bytes_sent": 64.0, "perf/tokens_per_s": 1000.0}
    numbers |= {"score/0/mean": 0.25, "rollout/logprob_diff_max": 1e-6}
    columns = asdict(step_record(1, step_s=2.0, time_s={"generate": 1.0, "update": 0.5}))
    del columns["values"]
    calls = [
        call("rollout", "generate", -0.75, 0.5, "rank 4"),
        call("actor", "update", 0.25, 0.75, num=3),
        call("judge<b>", "unheard", 0.75, 1.0),
    ]
    return {
        "metrics.jsonl": [{**columns, "step": step, **numbers} for step in range(1, STEPS + 1)],
        "calls.jsonl": [
            {"step": step, "begin_s": 2.5 * step, "step_s": 2.0, "calls": calls, "left_out": 7}
            for step in range(1, STEPS + 1)
        ],
        "samples.jsonl": [
            {"step": 0, "samples": [sample("held out")]},
            {
                "step": 10,
                "samples": [
                    sample("drawn", cost=0.5, advantage=-1.5, turns=[["model", "?1*2"], ["environment", EVIL]]),
                    sample("held out"),
                ],
            },
        ],
    }


def page_of(run: Path) -> str:
    return page_html(run_page(run_view(run)))


def write(folder: Path, lines: dict[str, list[dict[str, Any]]]) -> None:
    for name, found in lines.items():
        (folder / name).write_text("".join(sealed_json(json.dumps(line)) for line in found))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    reward = [{"function": "my_rewards:near"}, {"function": "my_rewards:ended"}]
    config = resolve("sort", None, {}, {"run": {"steps": STEPS}, "reward": reward})
    (folder / "config.toml").write_text(tomli_w.dumps(to_toml_table(config)))
    amounts = {"time_s": {"generate": 1.5, "train": 0.5}, "sent_bytes": {"hand_over.node": 64}}
    parts = {"generate": ["generate"], "train": ["update"]}
    write_prediction(folder, Predicted(is_measured=False, cluster={}, predicted=amounts, step_s=2.0, parts=parts))
    append_event(folder, "finished", step=STEPS)
    write(folder, lines_of(folder))
    return folder


def test_a_page_shows_what_the_files_have(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run)]) == 0
    assert "Finished after 12 steps." in capsys.readouterr().out
    page = (run / "report.html").read_text()
    checked(page)
    for words in ("Seconds of a step by phase", "my_rewards:near", "step 10", "before step 1", "7 further calls"):
        assert words in page
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert [list(curve["lines"]) for curve in data["curves"]][:2] == [["drawn"], ["my_rewards:near"]]
    assert len(data["curves"]) == page.count('<svg class="curve"')
    # By pool, in the order of their first calls; the rollout's next call reaches in from the step after.
    assert [[bar[2] for bar in row] for row in data["charts"][0]["bars"]] == [
        ["rollout.generate on rank 4", "rollout.generate on rank 4"],
        ["actor.update x 3 on ranks 0-3"],
        ["judge<b>.unheard on ranks 0-3"],
    ]
    (first, last), units = data["charts"][0]["bars"][0], data["plot"] / 2
    assert first[:2] == [0, 0.5 * units]
    # It begins .75 s before the next step, which begins 2.5 s after this one, of 2 s.
    assert last[:2] == [1.75 * units, 2.0 * units]
    (missing,) = run_view(run).missing
    assert missing.startswith("a checkpoint: none is complete")


def test_a_response_cannot_act(run: Path) -> None:
    page = page_of(run)
    page.encode()
    found = checked(page)
    assert [tag for tag, _ in found.tags].count("script") == 2
    assert "&lt;/script&gt;&lt;script&gt;alert(1)&lt;/script&gt;\\u202e&amp;\\ud800" in page
    assert "judge<b>" not in page


def test_the_steady_step_of_median_length_is_drawn() -> None:
    lengths = [9.0, 9.0, 2.0, 1.0, 3.0, 2.5, 2.25, 4.0]
    lines = [
        {"step": 1 + at, "begin_s": 10.0 * at, "step_s": length, "calls": [call("actor", "update", 0.0, 0.5)]}
        for at, length in enumerate(lengths)
    ]
    drawn = steady_iteration([recorded_step(line) for line in lines])
    assert drawn is not None
    assert (drawn.step, drawn.step_s) == (7, 2.25)
    assert steady_iteration([]) is None


def test_a_call_that_reaches_into_the_next_step_is_drawn_to_its_end() -> None:
    def line(step: int, begin_s: float, *calls: dict[str, Any]) -> dict[str, Any]:
        return {"step": step, "begin_s": begin_s, "step_s": 2.0, "calls": list(calls)}

    late = call("rollout", "generate", -1.5, 0.5)  # from 1.0 of the step before, which begins 2.5 s earlier
    steps = [line(1, 0.0, call("actor", "update", 0.0, 1.0)), line(2, 2.5, late)]
    drawn = steady_iteration([recorded_step(each) for each in steps])
    assert drawn is not None
    assert [(each.role, each.begin_s, each.end_s) for each in drawn.calls] == [
        ("actor", 0.0, 1.0),
        ("rollout", 1.0, 3.0),
    ]
    # A resumed run has another start, from which nothing reaches back.
    steps[1]["begin_s"] = 0.0
    drawn = steady_iteration([recorded_step(each) for each in steps])
    assert drawn is not None
    assert [each.role for each in drawn.calls] == ["actor"]


def test_a_page_has_at_most_forty_steps_of_samples() -> None:
    steps = [samples_of({"step": step, "samples": [sample("drawn")]}) for step in range(500)]
    page = samples_html(steps)
    checked(page)
    assert page.count("<details class=step") == 40
    assert page.count(" open>") == 1
    assert 'data-step="0"' in page
    assert 'data-step="499" open' in page
    assert "460 further steps are in samples.jsonl" in page


def _without(name: str) -> Callable[[Path], None]:
    return lambda run: (run / name).unlink()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_without("metrics.jsonl"), "curves and times: metrics.jsonl cannot be read"),
        (cut("metrics.jsonl", 900), "curves and times: damaged or missing lines in metrics.jsonl: 1"),
        (cut("metrics.jsonl", 0), "curves and times: no step has ended"),
        (_without("calls.jsonl"), "the timeline: calls.jsonl cannot be read"),
        (cut("samples.jsonl", 100), "samples: damaged lines in samples.jsonl: 1"),
        (_without("prediction.json"), "predictions: there is no prediction.json"),
        (cut("prediction.json", 40), "predictions: prediction.json is damaged"),
    ],
)
def test_a_damaged_run_has_a_page_that_says_what_is_missing(
    run: Path, damage: Callable[[Path], None], said: str
) -> None:
    damage(run)
    view = run_view(run)
    checked(page_html(run_page(view)))
    assert any(said in words for words in view.missing), view.missing


@pytest.mark.parametrize("every", [6, *nightly(1)])
@pytest.mark.parametrize("name", ["metrics.jsonl", "calls.jsonl", "samples.jsonl"])
def test_strange_values_are_no_values(run: Path, name: str, every: int) -> None:
    """Each key has one in so many of these values, and each value comes to one in so many of the keys."""
    for number, key in enumerate(("step", *lines_of(run)[name][-1])):
        for value in STRANGE[number % every :: every]:
            lines = lines_of(run)
            lines[name] = [{**line, key: value} for line in lines[name]]
            write(run, lines)
            checked(page_of(run))
    inner = {"calls.jsonl": "calls", "samples.jsonl": "samples"}.get(name, "")
    for number, key in enumerate(lines_of(run)[name][-1][inner][0] if inner else ()):
        for value in STRANGE[number % every :: every]:
            lines = lines_of(run)
            lines[name] = [{**line, inner: [{**line[inner][0], key: value}]} for line in lines[name]]
            write(run, lines)
            checked(page_of(run))


@pytest.mark.parametrize("key", ["run", "algorithm", "cluster", "plan", "model", "reward"])
def test_strange_settings_are_named(run: Path, key: str) -> None:
    table = to_toml_table(resolve("sort", None, {}, {}))
    strange: tuple[Any, ...] = (3, "x", [1], {"a": {}})
    for value in strange:
        (run / "config.toml").write_text(tomli_w.dumps({**table, key: value}))
        checked(page_of(run))


def test_a_run_of_training_is_none_of_feedback(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[train]\nsteps = 1\n")
    assert command_of_folder(tmp_path) == "train"
    (tmp_path / "config.toml").write_text("[run]\nsteps = 1\n")
    assert command_of_folder(tmp_path) == "rl"


@pytest.mark.skipif(chromium.BROWSER is None, reason="needs chromium or google-chrome on PATH, to look at the page")
def test_a_button_shows_the_samples_of_another_step(run: Path, tmp_path: Path) -> None:
    script = "<script>document.querySelector('[data-pick=\"-1\"]').click()</script></body>"
    (run / "page.html").write_text(page_of(run).replace("</body>", script))
    found = chromium.seen(run / "page.html", tmp_path / "profile")
    assert not found.console, found.console
    assert '<body class="live">' in found.dom
    assert 'data-step="0" open=""' in found.dom
    assert 'data-step="10" open=""' not in found.dom
