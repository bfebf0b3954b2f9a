"""`terrace plan` and `terrace plan --scale`: their output, their files and their refusals; they need no torch."""

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from typing import Any

import pytest

from terrace.base.words import quantity, seconds
from terrace.cli.main import main
from terrace.cli.no_plan import nodes_words
from terrace.cluster.presets import load_cluster
from terrace.model.block_operations import layer_operations
from terrace.model.config import parse_model
from terrace.plan.layout import Layout
from terrace.plan.plan import Plan
from terrace.plan.presets import PRESETS
from terrace.planner.space import Space
from terrace.planner.task import Task
from terrace.planner.verdicts import size_words
from terrace.program.lowering import build
from terrace.report.plot import round_ticks
from terrace.report.tables import plan_rows
from terrace.simulate.cost import step_costs
from terrace.simulate.events import simulate
from terrace.simulate.footprint import work_of
from terrace.train.resolve import resolve
from tests.support.command_line import without_torch
from tests.support.nightly import nightly
from tests.support.planning import GPT, Planning, here

__all__ = ["here"]


def test_plan_prints_why_and_writes_what_train_reads(here: Planning) -> None:
    code, out, _ = here.say("plan", "--nodes", "1")
    assert code == 0
    for part in ("1 system x 4 node x 2 package = 8", "MFU", "seconds of a step", "memory of a device", "three-level"):
        assert part in out
    reserve = r"allocator is what it reserves beyond tensors: 5\.0 % of them, .* and at least 46\.1 MB, the ends"
    assert re.search(reserve, " ".join(out.split()))
    assert "to train, on a machine with 8 devices: terrace train --plan" in out
    assert "to look at its step: terrace simulate" in out
    flags = {"model": str(here.model), "cluster": "frontier", "plan": "plan.toml"}
    overrides = {
        "cluster": {"tiers": {"system": {"size": 1}}},
        "train": {"batch": 16, "sequence": 256},
    }
    run = resolve(None, flags, overrides)
    assert run.plan.name == "planned"
    assert run.plan.compute == "bf16"
    assert run.plan.micro_batch * run.num_micros() * Layout.of(run.cluster, run.plan).data_degree == 16


def test_a_plan_says_what_it_hides_between_nodes(here: Planning) -> None:
    hides = r"This plan hides \S+ \S+ of messages on tier system behind computing: a step that hid none"
    code, out, _ = here.say("plan", "--nodes", "2", "--pin", "params=system", "--pin", "pipeline=1", cluster="ethernet")
    assert code == 0
    assert len(re.findall(hides, " ".join(out.split()))) == 1
    code, out, _ = here.say("plan", "--nodes", "1", "--force")
    assert code == 0
    assert "This plan hides" not in out


def test_plan_refuses_to_overwrite(here: Planning) -> None:
    (here.folder / "plan.toml").write_text("mine")
    assert "--force" in here.refused("plan", "--nodes", "1")
    assert (here.folder / "plan.toml").read_text() == "mine"
    assert here.say("plan", "--nodes", "1", "--force")[0] == 0
    assert "params" in (here.folder / "plan.toml").read_text()


def test_a_plan_with_rows_and_columns_is_written_and_read_by_simulate_and_scale(here: Planning) -> None:
    code, out, _ = here.say("plan", "--nodes", "1", "--pin", "tensor=4", "--pin", "columns=2", "--pin", "pipeline=1")
    assert code == 0
    assert "tensor 4 (2 x" in out
    assert "wait tensor" in out
    flags = {"model": str(here.model), "cluster": "frontier", "plan": "plan.toml"}
    overrides = {"cluster": {"tiers": {"system": {"size": 1}}}, "train": {"batch": 16, "sequence": 256}}
    run = resolve(None, flags, overrides)
    program = build(run.cluster, run.plan, run.blocks(), run.num_micros(), run.train.sequence)
    assert program.model.tensor.degrees == {"columns": 2, "rows": 2}
    step_s = simulate(
        program, step_costs(program, work_of(run.cluster, run.plan, layer_operations(run.model), 256))
    ).step_s
    code, out, _ = here.say("plan", "--scale", "--nodes", "1", "--plan", "plan.toml")
    assert code == 0
    assert seconds(step_s) in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--pin", "tensr=1"], "did you mean 'tensor'"),
        (["--pin", "params=rack"], "no tier 'rack'"),
        (["--axes", "tensors"], "did you mean 'tensor'"),
        (["--nodes", "0"], "at least 1 member"),
        (["--best", "0"], "--best 0"),
        (["--train.steps", "3"], "--train: only figures of the cluster and keys of a plan can be set"),
        (["--train.beta", "3"], "figures of the cluster"),
        (["--cluster.tiers.system.sise", "3"], "sise"),
        (
            ["--pin", "micro_batch=3"],
            "micro_batch = 3 does not divide the 16 sequences of a step; micro_batch can be 1",
        ),
        (["--pin", "params=device", "--pin", "optimizer=device", "--pin", "grads=node"], "drop a pin"),
    ],
)
def test_bad_input_of_plan_is_one_line(here: Planning, words: list[str], said: str) -> None:
    assert said in here.refused("plan", *words)


def test_a_batch_that_does_not_divide_names_those_that_do(here: Planning) -> None:
    assert "use --batch 16 or 24, or --axes all" in here.refused("plan", "--nodes", "1", "--axes", "data", batch=20)
    assert "use --batch 8, or --axes all" in here.refused("plan", "--nodes", "1", "--axes", "data", batch=4)
    refused = here.refused("plan", "--nodes", "3", "--axes", "data", batch=32)
    assert "use --batch 24 or 48, --nodes 2 or 4, or --axes all" in refused


def test_presets_refused_alike_say_it_once(here: Planning, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # a reason in one line
    code, out, _ = here.say("plan", "--nodes", "2", "--axes", "tensor", batch=8)
    assert code == 0
    assert out.count("is not a multiple of") == 1
    assert out.count("as above") == len(PRESETS) - 1


def test_context_ranks_count_among_those_that_share_a_state() -> None:
    plan = Plan(params="node", grads="system", optimizer="system", mapping={"node": {"tensor": 4, "context": 2}})
    _, rows = plan_rows(load_cluster("dgx-a100").resized(4), plan)
    assert [row[-1] for row in rows] == ["grads /8, optimizer /8", "params /2", ""]


def test_three_digits_that_round_up_take_the_next_prefix() -> None:
    assert [quantity(value, "B") for value in (999e9, 999.4e9, 999.7e9, 1e12)] == ["999 GB", "999 GB", "1 TB", "1 TB"]


def test_a_terabyte_is_not_said_in_gigabytes() -> None:
    assert [size_words(size) for size in (64e9, 999.4e9, 999.6e9, 1.36e12)] == ["64 GB", "999 GB", "1 TB", "1.36 TB"]


def test_a_model_that_fits_nowhere_gets_the_nearest_plan(here: Planning) -> None:
    error = here.refused("plan", "--nodes", "1", "--axes", "data", "--cluster.device.memory_bytes", "1.55e9")
    assert "the nearest (params" in error
    assert "too much" in error


def test_scale_prints_curves_and_draws_them(here: Planning) -> None:
    words = ("--nodes", "4", "--plan", "zero3", "--price", "2.5", "--picture", "curve.svg")
    code, out, _ = here.say("plan", "--scale", *words, batch=64)
    assert code == 0
    for part in ("weak scaling", "strong scaling", "100.0 %", "per million", "wrote curve.svg"):
        assert part in out
    picture = ElementTree.fromstring((here.folder / "curve.svg").read_text())
    assert len(picture.findall("{*}polyline")) == 2
    assert len(picture.findall("{*}circle")) == 6
    assert "--force" in here.refused("plan", "--scale", *words, batch=64)


def test_scale_takes_a_plan_from_a_file_or_finds_one(here: Planning) -> None:
    assert here.say("plan", "--nodes", "2", "--axes", "data", "--out", "best.toml", batch=32)[0] == 0
    code, out, _ = here.say("plan", "--scale", "--nodes", "2", "--plan", "best.toml", batch=32)
    assert code == 0
    assert "plan planned: params" in out
    code, alone, _ = here.say("plan", "--scale", "--nodes", "2", batch=32)
    assert code == 0
    for line in ("weak scaling", "strong scaling"):
        assert alone.split(line)[1][:400] == out.split(line)[1][:400]  # the same plan, found again


def test_scale_refuses_another_dtype_than_its_plan_file_has(here: Planning) -> None:
    (here.folder / "mine.toml").write_text('preset = "zero3"\ncompute = "bf16"\nmaster = "fp32"\n')
    words = ("plan", "--scale", "--nodes", "1", "--plan", "mine.toml")
    said = here.refused(*words, "--compute", "fp32")
    assert '--compute fp32: plan mine.toml computes in bf16; leave --compute out, or set compute = "fp32"' in said
    assert here.say(*words)[1] == here.say(*words, "--compute", "bf16")[1] != ""
    code, out, _ = here.say("plan", "--scale", "--nodes", "1", "--plan", "zero3", "--compute", "fp32")
    assert code == 0
    assert "in fp32" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--price", "0"], "--price"),
        (["--plan", "zero4"], "zero4"),
        (["--plan", "zero3", "--nodes", "3"], "does not run"),
    ],
)
def test_bad_input_of_scale_is_one_line(here: Planning, words: list[str], said: str) -> None:
    assert said in here.refused("plan", "--scale", *words)


def test_planning_needs_no_torch(here: Planning) -> None:
    task = ("--cluster", "dgx-a100", "--nodes", "1", "--batch", "8", "--sequence", "128", "--axes", "data")
    done = without_torch("plan", "--model", here.model, *task, "--out", here.folder / "plan.toml")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("option", ["--out", "--picture"])
@pytest.mark.parametrize("output", ["folder", "/dev/full", "taken/plan.toml", "a\0b"])
def test_an_output_that_cannot_be_written_is_refused_before_the_search(
    here: Planning, option: str, output: str
) -> None:
    (here.folder / "folder").mkdir()
    (here.folder / "taken").write_text("a file")
    scale = ("--scale",) if option == "--picture" else ()
    assert "cannot be written" in here.refused("plan", "--nodes", "1", "--force", *scale, option, output)


def test_a_plan_that_runs_at_no_size_prints_no_curve(here: Planning) -> None:
    (here.folder / "mine.toml").write_text('preset = "ddp"\nmicro_batch = 7\n')
    code, out, error = here.say("plan", "--scale", "--plan", "mine.toml", "--picture", "curve.svg")
    assert (code, out) == (2, "")
    assert "runs at no size" in error
    assert not (here.folder / "curve.svg").exists()


@pytest.mark.parametrize("name", ["[/]", "[red]x", "<script>", ":smile:"])
def test_markup_in_a_name_is_text(here: Planning, name: str) -> None:
    code, out, _ = here.say("plan", "--nodes", "1", "--axes", "data", "--cluster.name", f"'{name}'")
    assert code == 0
    assert f"on cluster {name}" in out


@pytest.mark.parametrize(
    ("words", "task", "said"),
    [
        ([], {"batch": 10**30}, "plans are searched up to"),
        (["--nodes", str(10**30)], {}, "ranks: plans are searched up to"),
        (["--cluster.tiers.node.latency_s", "1e308"], {}, "has latency 1e+308 s"),
        (["--cluster.tiers.node.bandwidth_bytes_per_s", "1e-300"], {}, "has bandwidth 1e-300"),
        (["--cluster.device.kernels.launch_s", "nan"], {}, "launch_s = nan"),
        (["--cluster.device.memory_bytes", "inf"], {}, "memory_bytes = inf"),
    ],
)
def test_absurd_numbers_are_refused(here: Planning, words: list[str], task: dict[str, Any], said: str) -> None:
    assert said in here.refused("plan", *words, **task)


@pytest.mark.parametrize(
    ("key", "value"),
    [("n_layer", 10**30), ("vocab_size", 10**30), ("initializer_range", float("nan"))],
)
def test_a_model_of_absurd_numbers_is_refused(here: Planning, key: str, value: float) -> None:
    here.model.write_text(json.dumps({**GPT, key: value}))
    assert key in here.refused("plan", "--nodes", "1")


@pytest.mark.parametrize("theta", [10**400, float("inf"), float("nan")])
def test_a_rope_base_without_end_is_refused(here: Planning, theta: float) -> None:
    llama = {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 64,
        "rope_theta": theta,
    }
    here.model.write_text(json.dumps(llama))
    assert "rope_theta" in here.refused("plan", "--nodes", "1")


def test_a_step_too_long_to_draw_is_refused_and_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--train.batch", str(10**12), "--plan.micro_batch", "2", "--plan.unit", "1"]
    assert main(["simulate", *words]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert "more than the 2,000,000 passes of a step that is drawn" in error
    assert main(["simulate", "--view", "program", *words]) == 0
    out, _ = capsys.readouterr()
    assert len(out.splitlines()) < 2000
    assert re.search(r"the last \d+ instructions 62,499,999,9\d\d times more, each time 1 micro-batch later", out)


def test_explain_prints_nothing_of_a_step_that_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--view", "program", "--cluster.device.memory_bytes", "1000"]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert "model state needs" in error


def test_no_output_replaces_what_is_read(here: Planning) -> None:
    assert "is the file that is read" in here.refused("plan", "--out", here.model, "--force")
    assert here.say("plan", "--nodes", "1", "--out", "mine.toml")[0] == 0
    for words in (["plan", "--scale", "--plan", "mine.toml", "--picture"], ["simulate", "mine.toml", "--page"]):
        before = (here.folder / "mine.toml").read_text()
        assert main([*words, "./mine.toml", "--force"]) == 2
        assert "mine.toml is the file that is read" in here.error()
        assert (here.folder / "mine.toml").read_text() == before


def test_a_pinned_axis_that_is_not_searched_is_named(here: Planning) -> None:
    said = here.refused("plan", "--nodes", "1", "--axes", "data,tensor,pipeline", "--pin", "context=2")
    assert "add --axes data,tensor,pipeline,context" in said


@pytest.mark.parametrize("is_tried", [False, *nightly(True)])
def test_the_nodes_and_the_batch_of_the_remedy_do_fit(here: Planning, is_tried: bool) -> None:
    """A remedy for a task that does not fit can be planned exactly as it is printed."""
    tight = ("--cluster.device.memory_bytes", "1.622e9", "--headroom", "0%")
    error = here.refused("plan", "--nodes", "1", "--axes", "data", *tight, batch=8)
    assert "with --axes all one fits: " in error
    if is_tried:
        assert here.say("plan", "--nodes", "1", *tight, batch=8)[0] == 0
    device = replace(load_cluster("frontier").device, memory_bytes=1.622e9, headroom="0%")
    cluster = replace(load_cluster("frontier").resized(1), device=device)
    task = Task(model=parse_model(GPT), cluster=cluster, batch=8, sequence=256)
    words = nodes_words(Space(task=task, axes=("data",)), 400)
    nodes, batch = re.findall(r"--nodes (\d+) --batch (\d+), the fewest", words)[0]
    assert here.say("plan", "--nodes", nodes, "--axes", "data", *tight, "--force", batch=int(batch))[0] == 0


@pytest.mark.parametrize("is_tried", [False, *nightly(True)])
def test_a_pin_that_leaves_nothing_is_told(here: Planning, is_tried: bool) -> None:
    tight = ("--nodes", "1", "--cluster.device.memory_bytes", "1.622e9", "--headroom", "0%")
    error = here.refused("plan", *tight, "--pin", "optimizer=device", "--pin", "data=8")
    assert "without optimizer=device and data=8 one fits: " in error
    if is_tried:
        assert here.say("plan", *tight)[0] == 0


@pytest.mark.parametrize(("command", "word"), [("train", "mine.toml"), ("train", "zero3")])
def test_a_plan_without_its_option_is_told_how(here: Planning, command: str, word: str) -> None:
    assert main([command, word]) == 2
    assert f"--plan {word}" in here.error()


def test_the_axis_of_a_scaling_picture_starts_at_zero() -> None:
    assert [str(tick) for tick in round_ticks(0, 105)] == ["0.0", "50.0", "100.0"]
