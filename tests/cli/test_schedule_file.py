"""A schedule from a file of orders: priced as by its name, kept with the plan, refused before anything starts."""

from pathlib import Path

import pytest

from terrace.base.schema import dump
from terrace.cluster.presets import load_cluster
from terrace.plan.presets import parse_plan
from terrace.train.layers import section
from tests.support.command_line import CommandLine
from tests.support.nightly import nightly

PIPELINE = ["--plan", "ddp", "--plan.mapping.system.pipeline", "2"]
SCHEDULES = ["1f1b", "gpipe", "zb-h1", "zbv", "zeropp:2", "interleaved:2"]


@pytest.fixture
def here(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    monkeypatch.chdir(tmp_path)
    return CommandLine(tmp_path, capsys)


def simulated(here: CommandLine, *words: str) -> list[str]:
    """The lines of a program's page, but those that name the schedule or its file."""
    said = here.call("simulate", "--view", "program", *PIPELINE, *words)
    assert said.code == 0, said.error
    return [line for line in said.out.splitlines() if not line.startswith(("wrote", "schedule", "Schedule"))]


@pytest.mark.parametrize("schedule", ["zbv", *nightly(*(each for each in SCHEDULES if each != "zbv"))])
def test_an_order_costs_what_its_schedule_costs_and_needs_its_file_once(here: CommandLine, schedule: str) -> None:
    by_name = simulated(here, "--plan.schedule", schedule, "--lines", "2", "--csv", "order.csv")
    (here.folder / "plans").mkdir()
    (here.folder / "order.csv").rename(here.folder / "plans" / "of.csv")
    assert simulated(here, "--plan.schedule", "plans/of.csv", "--lines", "2") == by_name
    (here.folder / "plans" / "mine.toml").write_text('preset = "ddp"\nschedule = "of.csv"\n')
    cluster = load_cluster("local")
    parsed = parse_plan(section("plan", "plans/mine.toml"), cluster)
    (here.folder / "plans" / "of.csv").unlink()
    assert parse_plan(dump(parsed), cluster) == parsed


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (
            "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n",
            "its order is of 2 stages and 2 micro-batches, and the step has 2 and 4",
        ),
        ("0F0,0X0\n1F0,1B0\n", "row 0: cell '0X0': write virtual stage, letter and micro-batch"),
        (
            "0F0,0B0,0F1,0F2,0F3,0B1,0B2,0B3\n1F1,1B1,1F0,1B0,1F2,1B2,1F3,1B3\n",
            "the ranks wait in a circle",
        ),
    ],
)
def test_an_order_that_cannot_run_is_refused_before_anything_starts(here: CommandLine, rows: str, words: str) -> None:
    (here.folder / "bad.csv").write_text(rows)
    simulate = ["simulate", "--view", "program", *PIPELINE, "--train.batch", "32"]  # four data ranks
    node = [word.replace("system", "node") for word in PIPELINE]  # two data ranks
    ranks = ["--cluster", "local", "--ranks", "4", "--train.batch", "16"]
    for command in (simulate, ["train", "--data", "stdlib", "--folder", "run", *node, *ranks]):
        assert words in here.refusal(*command, "--plan.schedule", "bad.csv", "--plan.micro_batch", "2")
    assert not (here.folder / "run").exists()
    assert "'none.csv': cannot read it" in here.refusal(*simulate, "--plan.schedule", "none.csv")
