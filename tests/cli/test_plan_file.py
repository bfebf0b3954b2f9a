"""The file that `terrace plan` writes names its task, and `terrace simulate` needs nothing else."""

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from terrace.base.errors import PlanError
from terrace.base.words import seconds
from terrace.cli.checks import check_devices_here, check_memory_here
from terrace.cli.main import main
from terrace.cluster.presets import load_cluster
from terrace.model.block_operations import layer_operations
from terrace.program.lowering import build
from terrace.simulate.cost import step_costs
from terrace.simulate.events import simulate
from terrace.simulate.footprint import work_of
from terrace.train.resolve import resolve
from tests.support.nightly import nightly
from tests.support.planning import Planning, here

__all__ = ["here"]


def test_a_plan_of_a_cluster_is_not_trained_on_this_machine(here: Planning) -> None:
    """Sixteen ranks with a CUDA device each: the advice and the refusal name the command for the cluster."""
    code, out, _ = here.say("plan", "--nodes", "2", "--axes", "data", batch=16)
    assert code == 0
    command = "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m terrace train"
    assert f"to train, on each of the 2 machines: {command} --plan plan.toml" in out
    assert main(["train", "--plan", "plan.toml"]) == 2
    error = here.error()
    assert re.fullmatch(r"terrace: error: cluster 'frontier' has 16 ranks with a CUDA device each, .*\n", error)
    assert command in error
    assert not (here.folder / "runs").exists()


def test_local_ranks_must_fit_in_this_machine(here: Planning) -> None:
    run = resolve(None, {"model": str(here.model)}, {"train": {"sequence": 256}})
    check_devices_here(run, 0)  # ranks of a CPU
    check_memory_here(run, (), 10**12)
    room = r"0.95 GB \(1 GB less a headroom of 5%\)"
    with pytest.raises(PlanError, match=rf"8 local ranks need about .* GB, and this machine has {room}: take a plan"):
        check_memory_here(run, (), 10**9)
    with pytest.raises(PlanError, match=rf"a rank needs about .*, and a CUDA device here has {room}"):
        check_memory_here(run, [10**9] * 8, 10**12)


def test_plan_with_a_context_axis_is_written_to_be_trained(here: Planning) -> None:
    code, out, _ = here.say("plan", "--nodes", "1", "--axes", "context", "--pin", "context=2")
    assert code == 0
    assert "context 2" in out
    assert "to train, on a machine with 8 devices: terrace train --plan plan.toml" in out


def test_a_plan_with_a_pipeline_is_explained_with_the_stages_that_were_priced(here: Planning) -> None:
    """The programs of all stages take about the step that the planner found for their orders."""
    code, out, _ = here.say("plan", "--nodes", "1", "--pin", "pipeline=2", "--pin", "schedule=1f1b")
    assert code == 0
    assert "to train, on a machine with 8 devices: terrace train --plan plan.toml" in out
    plan = resolve(None, {"plan": "plan.toml"}, {}).plan
    assert sum(plan.stages) == 6  # four layers, embedding and head
    assert main(["simulate", "--view", "program", "--plan", "plan.toml", "--lines", "2"]) == 0
    explained = here.out()
    rows = [line.split() for line in explained.splitlines() if line.split()[-1:] and line.split()[-1].endswith("%")]
    value, unit = rows[0][-3:-1]
    step = next(line.split()[1:3] for line in out.splitlines() if line.startswith(" 1 "))
    assert unit == step[1]
    assert float(value) == pytest.approx(float(step[0]), rel=0.03)


def test_a_plan_with_a_tensor_axis_is_the_program_that_trains(here: Planning) -> None:
    """Every command says the step of the very program, and one with messages in parts."""
    code, out, _ = here.say("plan", "--nodes", "1", "--pin", "tensor=4", "--pin", "columns=2", "--pin", "micro_batch=1")
    assert code == 0
    assert "to be looked at" not in out
    for overrides in ({}, {"plan": {"tensor_chunks": 4}}):
        run = resolve(None, {"plan": "plan.toml"}, overrides)
        program = build(run.cluster, run.plan, run.blocks(), run.num_micros(), run.train.sequence)
        work = work_of(run.cluster, run.plan, layer_operations(run.model), run.train.sequence)
        step = seconds(simulate(program, step_costs(program, work)).step_s)
        words = ["--plan.tensor_chunks", "4"] if overrides else []
        for view in ("program", "step"):
            assert main(["simulate", "--view", view, "--plan", "plan.toml", *words]) == 0
            assert step in here.out()
        assert (step in out) == (not overrides)
    assert main(["plan", "--scale", "--plan", "plan.toml"]) == 0
    assert "wait tensor" in out


def test_a_plan_says_what_it_was_made_for_and_can_be_moved(here: Planning) -> None:
    """Model, cluster and batch come from its [task] table; flags and dotted keys override them."""
    words = (
        "--nodes",
        "3",
        "--axes",
        "data",
        "--cluster.tiers.node.size",
        "2",
        "--cluster.device.memory_bytes",
        "30e9",
    )
    assert here.say("plan", *words, batch=48)[0] == 0
    here.model.unlink()
    (here.folder / "away").mkdir()
    (here.folder / "plan.toml").rename(here.folder / "away" / "p.toml")
    run = resolve(None, {"plan": "away/p.toml"}, {})
    assert (run.train.batch, run.train.sequence, run.cluster.world_size) == (48, 256, 12)
    assert (run.model.num_layers, run.cluster.device.memory_bytes) == (4, 30e9)
    assert run.cluster.tiers[1].bandwidth_bytes_per_s == load_cluster("frontier").tiers[1].bandwidth_bytes_per_s
    (here.folder / "run.toml").write_text('plan = "away/p.toml"\n[train]\nbatch = 96\n')
    other = resolve("run.toml", {"cluster": "lab"}, {"train": {"sequence": 128}})
    assert (other.train.batch, other.train.sequence, other.cluster.name) == (96, 128, "lab")
    assert other.plan == run.plan
    assert main(["simulate", "--plan", "away/p.toml"]) == 0
    assert here.out()
    assert main(["plan", "--scale", "--plan", "away/p.toml"]) == 0
    assert "48" in here.out()
    assert main(["plan", "--scale", "--plan", "away/p.toml", "--batch", "96"]) == 0
    assert "96 sequences x 256 tokens" in here.out()


@pytest.mark.parametrize("view", ["program", "step"])
def test_a_plan_that_says_nothing_of_its_task_is_one_line(here: Planning, view: str) -> None:
    (here.folder / "mine.toml").write_text('preset = "zero3"\n')
    assert main(["simulate", "--view", view, "--plan", "mine.toml", "--cluster", "lab", "--train.batch", "64"]) == 2
    error = here.error()
    assert "mine.toml does not say what it was made for" in error
    assert "give --model, --train.sequence, or --config FILE" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("task = 3", "task = 3 must be a table"),
        ('[task]\nbatch = 8\nsequence = 8\nmodel = "m.json"', "task.cluster is missing"),
        ('[task]\nbatch = 0\nsequence = 8\nmodel = "m.json"\ncluster = "lab"', "task.batch = 0"),
        ("[task]\nbatches = 8", "did you mean 'task.batch'"),
        ('[task]\nbatch = 8\nsequence = 8\nmodel = 1\ncluster = "lab"', "task.model = 1"),
        ('[task]\nbatch = 8\nsequence = 8\nmodel = "m.json"\ncluster = "lab"', "cannot read"),
    ],
)
def test_a_task_that_is_not_whole_is_one_line(here: Planning, task: str, said: str) -> None:
    (here.folder / "mine.toml").write_text(f'preset = "zero3"\n{task}\n')
    assert main(["simulate", "mine.toml"]) == 2
    error = here.error()
    assert said in error
    assert error.count("\n") == 1


def test_a_task_written_by_hand_names_files_beside_the_plan(here: Planning) -> None:
    (here.folder / "sub").mkdir()
    task = '[task]\nbatch = 16\nsequence = 128\nmodel = "../config.json"\ncluster = "lab"\n'
    (here.folder / "sub" / "mine.toml").write_text(f'preset = "zero3"\n{task}')
    run = resolve(None, {"plan": "sub/mine.toml"}, {})
    assert (run.model.num_layers, run.cluster.name, run.train.batch) == (4, "lab", 16)


@pytest.mark.parametrize(
    ("cluster", "pins"),
    [
        ("frontier", ("pipeline=2", "schedule=interleaved", "recompute=layers")),
        ("frontier", ("tensor=2", "context=1", "pipeline=1")),
        *nightly(
            ("dgx-a100", ("pipeline=2", "tensor=2")),
            ("dgx-a100", ("pipeline=4", "params=system", "schedule=1f1b")),
            ("frontier", ("tensor=2", "context=2", "pipeline=1")),
            ("frontier", ("data=16",)),
        ),
    ],
)
def test_what_plan_writes_simulate_plays_with_the_same_step(
    here: Planning, cluster: str, pins: tuple[str, ...]
) -> None:
    """From plan.toml alone, with a page and a trace; the seconds are those of the table of plans."""
    words = [word for pin in pins for word in ("--pin", pin)]
    code, out, _ = here.say("plan", "--nodes", "2", "--axes", "all", *words, cluster=cluster)
    assert code == 0
    step = next(line.split()[1:3] for line in out.splitlines() if line.startswith(" 1 "))
    here.model.unlink()
    assert main(["simulate", "plan.toml", "--page", "p.html", "--trace", "t.json"]) == 0
    played = here.out()
    pipelined = "pipeline=1" not in pins and "data=16" not in pins
    assert ("Timeline of all stages" in played) == pipelined
    said = [line for line in played.splitlines() if line.startswith(("step ", " step "))]
    assert any(" ".join(step) in line for line in said), (step, said)
    assert "On the critical path of the step: " in played
    assert "Best next change: " in played
    page = (here.folder / "p.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert ("Timeline of all stages" in page) == pipelined
    trace = json.loads((here.folder / "t.json").read_text())
    step_s = {"s": 1.0, "ms": 1e-3, "us": 1e-6}[step[1]] * float(step[0])
    assert trace["otherData"]["step_s"] == pytest.approx(step_s, rel=5e-3)
    # Another batch, by a dotted key, is another step.
    assert main(["simulate", "plan.toml", "--train.batch", "64"]) == 0
    assert here.out() != played


def test_a_plan_of_other_axes_that_cannot_be_played_is_one_line(here: Planning) -> None:
    assert here.say("plan", "--nodes", "1", "--axes", "all", "--pin", "pipeline=2")[0] == 0
    for words, said in (
        (("--cluster.device.memory_bytes", "1e8"), "may take 0.095 GB (0.1 GB less a headroom of 5%)"),
        (("--train.batch", "7"), "not a multiple"),
        (("--plan.schedule", "2f2b"), "no schedule '2f2b'"),
        (("--plan.mapping.node.pipeline", "3"), "joins"),
    ):
        assert main(["simulate", "plan.toml", *words]) == 2
        error = here.error()
        assert said in error, error
        assert error.count("\n") == 1


def test_the_pipeline_in_the_docs_is_what_is_printed(here: Planning) -> None:
    docs = Path(__file__).parents[2] / "docs"
    text = (docs / "simulating.md").read_text(encoding="utf-8")
    command = next(line for line in text.splitlines() if line.startswith("$ terrace plan"))
    words = [re.sub("^docs/", f"{docs}/", word.removeprefix("/tmp/")) for word in shlex.split(command)[2:]]
    assert main(words) == 0
    here.out()
    assert main(["simulate", "pipelined.toml"]) == 0
    said = " ".join(here.out().split())
    start = text.index("stage 0 |F0")
    for paragraph in text[start : text.index("```", start)].strip().split("\n\n"):
        assert " ".join(paragraph.split()) in said


def test_the_first_layers_that_a_plan_recomputes_are_written_and_priced(here: Planning) -> None:
    tight = ("--axes", "data", "--pin", "micro_batch=8", "--headroom", "0%", "--cluster.device.memory_bytes", "1.763e9")
    code, out, _ = here.say("plan", "--nodes", "1", *tight, cluster="dgx-a100", batch=64)
    assert code == 0
    best = next(line for line in out.splitlines() if line.startswith(" 1 "))
    assert re.search(r"mlp of \d layers? run again", best), best
    entries = tomllib.loads((here.folder / "plan.toml").read_text())["recompute"]
    assert re.fullmatch(r"layers\.\* first [123]: mlp", entries[0])
    assert main(["simulate", "plan.toml", "--view", "step"]) == 0
    assert f"step {' '.join(best.split()[1:3])}" in " ".join(here.out().split())


def test_waits_for_tensor_ranks_are_shown_in_pipelines(here: Planning) -> None:
    """A row of the seconds of a step, a column of those of the stages, and a row by tier."""
    code, planned, _ = here.say("plan", "--nodes", "1", "--pin", "tensor=2", "--pin", "pipeline=2", "--pin", "data=2")
    assert code == 0
    row = re.search(r"^ wait tensor +([\d.]+ [mu]s) +([\d.]+) %$", planned, re.MULTILINE)
    assert row is not None
    assert float(row[2]) > 0
    for view in ("step", "program"):
        assert main(["simulate", "--view", view, "--plan", "plan.toml"]) == 0
        lines = here.out().splitlines()
        start = next(number for number, line in enumerate(lines) if line.startswith("seconds of a step"))
        names = next(number for number in range(start, len(lines)) if lines[number].startswith(" stage"))
        place = lines[names].index("tensor")
        assert lines[names - 1][place : place + 6].strip() == "wait"
        waits = [line[place - 2 : place + 6].strip() for line in lines[names + 2 : names + 4]]
        # The plan's row is of the busiest stage.
        assert row[1] in waits
        assert all(float(wait.split()[0]) > 0 for wait in waits)
        if view == "step":
            assert any(line.startswith(" tensor ") and row[1] in line for line in lines)
