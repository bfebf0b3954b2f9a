"""`terrace simulate`: its output and files, and its refusals of one line."""

import json
import math
import re
from pathlib import Path

import pytest

from terrace.base.words import counted
from terrace.cli.overrides import take_word
from tests.support.command_line import CommandLine, Said, without_torch
from tests.support.nightly import in_turns
from tests.support.tiny_runs import write_run


class Here(CommandLine):
    """A folder with a tiny run, and the command called in it."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        super().__init__(folder, capsys)
        write_run(folder, 2, 2)

    def say(self, *words: str) -> Said:
        return self.call("simulate", "--config", "run.toml", *words)

    def refused(self, *words: str) -> str:
        return self.refusal("simulate", "--config", "run.toml", *words)


@pytest.fixture
def here(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Here:
    monkeypatch.chdir(tmp_path)
    return Here(tmp_path, capsys)


def test_it_prints_times_the_critical_path_memory_and_a_timeline(here: Here) -> None:
    said = here.say()
    assert (said.code, said.error) == (0, "")
    for words in (
        "seconds of a step",
        "On the critical path of the step: ",
        "Best next change: ",
        "model state of one rank",
        "over the step, memory is highest at ",
        "compute |",
        ". waiting",
    ):
        assert words in said.out
    assert said.out == here.say().out, "a simulation is deterministic"
    assert not list(here.folder.glob("*.html"))


def test_a_plan_is_a_name_or_a_file_anywhere_among_the_words(here: Here) -> None:
    (here.folder / "own.toml").write_text('preset = "zero3"\nprefetch = 2\n')
    named = here.say("zero3").out
    assert "plan zero3 on cluster" in named
    assert here.say("--train.batch", "8", "zero3").out == named
    assert here.say("--plan", "zero3").out == named
    assert "params /4, grads /4, optimizer /4" in here.say("own.toml", "--train.batch=16").out


@pytest.mark.parametrize(
    ("sizes", "plan"), in_turns(3, [(1,), (3,), (2, 1, 2, 2)], ["ddp", "zero++", "three-level-compressed"])
)
def test_any_cluster_has_a_page(here: Here, sizes: tuple[int, ...], plan: str) -> None:
    write_run(here.folder, *sizes, batch=24)
    said = here.say(plan, "--page", "p.html", "--trace", "t.json")
    assert (said.code, said.error) == (0, "")
    page = (here.folder / "p.html").read_text(encoding="utf-8")
    assert counted(math.prod(sizes), "rank") in page
    assert "nan" not in re.sub(r"<script.*", "", page, flags=re.S)


@pytest.mark.parametrize(
    ("rest", "plan", "others"),
    [
        ([], None, []),
        (["zero3"], "zero3", []),
        (["--a.b", "1", "zero3"], "zero3", ["--a.b", "1"]),
        (["--a.b=1", "zero3", "--c.d", "2"], "zero3", ["--a.b=1", "--c.d", "2"]),
        (["--a.b", "1"], None, ["--a.b", "1"]),
        (["--a.b", "--c.d", "2"], None, ["--a.b", "--c.d", "2"]),
    ],
)
def test_the_plan_among_the_words(rest: list[str], plan: str | None, others: list[str]) -> None:
    assert take_word(rest) == (plan, others)


def test_page_and_trace_are_written_and_not_replaced(here: Here) -> None:
    said = here.say("--page", "out/step.html", "--trace", "out/step.json")
    assert said.code == 0
    assert "wrote out/step.html: " in said.out
    page, trace = here.folder / "out" / "step.html", here.folder / "out" / "step.json"
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert json.loads(trace.read_text())["otherData"]["step_s"] > 0
    assert "--page out/step.html is there already" in here.refused("--page", "out/step.html")
    assert "add --force" in here.refused("--trace", "out/step.json")
    trace.write_text("old")
    assert here.say("--trace", "out/step.json", "--force").code == 0
    assert trace.read_text() != "old"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("zero9",), "no plan preset or file 'zero9'"),
        (("zero3", "--plan", "ddp"), "two plans are given, 'zero3' and --plan 'ddp'"),
        (("zero3", "ddp"), "unknown argument 'ddp'"),
        (("--page", "."), "--page '.' is a folder: name a file"),
        (("--page", "a", "--trace", "./a"), "--page and --trace both name a"),
        (("--page", "text.txt/a"), "--page text.txt/a cannot be written (Not a directory)"),
        (("--trace", "run.toml"), "--trace run.toml is there already"),
        (("--force",), "--force has no effect without --page FILE, --trace FILE or --csv FILE"),
        (("--train.batch", "5"), "batch = 5 is not a multiple"),
        (("ddp", "--cluster.device.memory_bytes", "1000"), "the model state needs"),
        (("--pages", "x"), "unknown argument '--pages'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_line(here: Here, words: tuple[str, ...], said: str) -> None:
    assert said in here.refused(*words)


def test_it_works_without_torch(tmp_path: Path) -> None:
    write_run(tmp_path, 2, 2)
    words = ("simulate", "--config", "run.toml", "--page", "p.html", "--trace", "t.json")
    done = without_torch(*words, cwd=tmp_path, env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "p.html").is_file()
    assert (tmp_path / "t.json").is_file()
