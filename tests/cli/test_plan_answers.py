"""Answers of `terrace plan` beside the best plan: cost of a training, the user's own plan, plans with memory left."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace

import pytest

from terrace.base.words import quantity, seconds
from terrace.cli import plan
from terrace.cli.main import main
from terrace.cli.own_plan import own_plan
from terrace.planner.evaluate import step_of
from terrace.planner.ranking import Cost
from terrace.report.training_cost import duration, energy_words, parse_tokens, throughput_words, training_words
from terrace.simulate.fullest import fullest_stage
from terrace.simulate.step import predict_step
from terrace.train.prediction import job_of
from terrace.train.prediction import step_of as run_step
from terrace.train.resolve import resolve
from tests.support.nightly import nightly
from tests.support.planner_cases import CLUSTERS, small_task
from tests.support.planning import GPT, Planning, here

__all__ = ["here"]

SMALL = ("--nodes", "1", "--axes", "data", "--best", "2")
TIGHT = ("--cluster.device.memory_bytes", "1.7e9", "--cluster.device.headroom", "0%")  # 1.5 GB are the process


def cost(step_s: float, memory: Mapping[str, int] | None = None) -> Cost:
    return Cost(num_micros=1, step_s=step_s, time_s={"forward": step_s}, memory_bytes=memory or {"params": 1})


def joined(text: str) -> str:
    return " ".join(text.split())


def test_time_and_price_of_a_training_by_hand() -> None:
    task = small_task(CLUSTERS["dgx 4x2"], batch=16)  # 4,096 tokens a step on 8 devices
    found = cost(0.5)
    assert throughput_words(task, found) == "throughput: 8.19 k tokens/s of all devices, 1.02 k of one"
    # 2,441,407 steps of half a second are 339.08 hours.
    assert (training_words(task, found, 1, None) or "").startswith("1 token: 1 step, 500.0 ms, ")
    said = training_words(task, found, 10**10, None)
    assert said == "10 G tokens: 2,441,407 steps, 14.1 days, 2.71 k device-hours"
    assert training_words(task, found, 10**10, 2.5) == f"{said}, price 6,782"
    # The last step counts whole.
    said = training_words(task, found, 4097, 1000.0)
    assert said == "4.1 k tokens: 2 steps, 1.00 s, 0.00222 device-hours, price 2.22"
    assert training_words(task, found, None, 3.0) == "a million tokens: price 0.814"
    assert training_words(task, found, None, None) == ""
    assert [duration(time_s) for time_s in (60, 7200, 5.5 * 3600, 30 * 86400, 400 * 86400)] == [
        "1 min",
        "2 h",
        "5.5 h",
        "30 days",
        "400 days",
    ]


def test_energy_by_hand() -> None:
    task = small_task(CLUSTERS["dgx 4x2"], batch=16)  # eight devices of 400 W
    said = "energy, at the 400 W that a device takes at most: {} a step{}, without hosts, links and cooling"
    assert energy_words(task, cost(4.5), None) == said.format("4 Wh", "")
    # 2,441,407 steps of 4 Wh.
    assert energy_words(task, cost(4.5), 10**10) == said.format("4 Wh", ", 9.77 MWh for 10 G tokens")
    unknown = replace(task, cluster=replace(task.cluster, device=replace(task.cluster.device, power_watts=0.0)))
    assert energy_words(unknown, cost(4.5), 10**10) == ""


def test_a_plan_says_what_tokens_take(here: Planning) -> None:
    code, out, _ = here.say("plan", *SMALL, "--tokens", "1e9", "--price", "2")
    assert code == 0
    assert re.search(r"^throughput: [\d.]+ k tokens/s of all devices, [\d.]+ k of one \(\+-\d+ %\)$", out, re.M)
    steps = re.search(r"^1 G tokens: ([\d,]+) steps, .* device-hours, price [\d.,]+ \(\+-\d+ %\)$", out, re.M)
    assert steps is not None
    assert int(steps[1].replace(",", "")) == -(-(10**9) // (16 * 256))
    energy = r"energy, at the 280 W that a device takes at most: [\d.]+ k?Wh a step, [\d.]+ [kM]Wh for 1 G tokens"
    assert re.search(energy, joined(out))
    assert "tokens: " not in here.say("plan", *SMALL, "--force")[1]
    assert "a million tokens: price" in here.say("plan", *SMALL, "--force", "--price", "2")[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tokens", "3x"], "--tokens 3x: write a whole number of tokens"),
        (["--tokens", "0"], "--tokens 0: "),
        (["--tokens", "1.5"], "--tokens 1.5: "),
        (["--tokens", "nan"], "--tokens nan: "),
        (["--tokens", "inf"], "--tokens inf: "),
        (["--price", "-1"], "--price -1.0 must be a positive number"),
        (["--plan", "zero4"], "no plan preset or file 'zero4'"),
        (["--plan.micro_batch", "3"], "--plan three-level: batch = 16 is not a multiple"),
        (["--plan", "zero3", "--plan.mapping.node.tensor", "3"], "--plan zero3: "),
        (["--plan.micro_bath", "1"], "did you mean 'plan.micro_batch'"),
        (["--train.steps", "1"], "--train: only figures of the cluster and keys of a plan"),
    ],
)
def test_bad_questions_are_one_line_before_the_search(
    here: Planning, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.setattr(plan, "find_with", None)  # a search would raise
    assert said in here.refused("plan", *SMALL, *words)


def test_tokens_are_read_as_numbers() -> None:
    assert [parse_tokens(text) for text in ("300e9", "1", "2_000")] == [300 * 10**9, 1, 2000]


def test_the_users_plan_is_compared_with_the_best(here: Planning) -> None:
    """As every command predicts it, with the numbers that a run would choose."""
    code, out, _ = here.say("plan", *SMALL, "--plan", "zero3", "--plan.prefetch", "2")
    assert code == 0
    flags = {"model": str(here.model), "cluster": "frontier", "plan": "zero3"}
    sizes = {"cluster": {"tiers": {"system": {"size": 1}}}, "train": {"batch": 16, "sequence": 256}}
    run = resolve(None, flags, sizes | {"plan": {"prefetch": 2, "compute": "bf16"}})
    step_s = predict_step(run_step(run)).step_s
    line = re.search(
        r"your plan zero3, micro-batch (\d+) x \d+: step ([\d.]+ \w+) \+-\d+ %, ([\d.]+) % longer than", joined(out)
    )
    assert line is not None
    assert (int(line[1]), line[2]) == (run.plan.micro_batch, seconds(step_s))
    best = float(re.findall(r"^ 1 +([\d.]+) ms", out, re.M)[0]) / 1e3
    assert float(line[3]) == pytest.approx(100 * (step_s / best - 1), abs=0.3)
    assert re.search(
        r"; needs [\d.]+ GB of 65.27 GB \(68.7 GB less a headroom of 5%\), the best [\d.]+ GB", joined(out)
    )


@pytest.fixture
def teacher(here: Planning) -> str:
    """A folder with a larger model of the same vocabulary."""
    folder = here.model.parent / "teacher"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**GPT, "n_embd": 1024, "n_layer": 8}))
    return str(folder)


def test_a_teacher_is_priced_and_plans_leave_it_room(here: Planning, teacher: str) -> None:
    """As a run under the found plan predicts it, whose memory is that of both models."""
    room = 1.74e9  # the best plan for the student alone would leave too little
    tight = ("--cluster.device.memory_bytes", f"{room:.0f}", "--cluster.device.headroom", "0%")
    code, out, _ = here.say("plan", *SMALL, "--teacher", teacher, *tight)
    assert code == 0
    sizes = {"cluster": {"tiers": {"system": {"size": 1}}, "device": {"memory_bytes": room, "headroom": "0%"}}}
    sizes |= {
        "train": {"batch": 16, "sequence": 256, "objective": "distill", "steps": 1},
        "teacher": {"model": teacher},
    }
    run = resolve(None, {"model": str(here.model), "cluster": "frontier", "plan": "plan.toml"}, sizes)
    found = predict_step(run_step(run))
    said = re.search(r"zero3 takes (.*) before a step and (.*) a rank, a step takes (.*?);", joined(out))
    assert said is not None
    (held,) = (sum(each.memory_bytes.values()) for each in job_of(run).beside)
    assert said.groups() == (seconds(found.times_s[0]["teacher"]), quantity(held, "B"), seconds(found.step_s))
    footprint = fullest_stage(job_of(run), run.blocks(), 256)[1]
    assert footprint["teacher"] == held
    assert sum(footprint.values()) <= room
    # In a run's file, with a key of it on the command line.
    (here.model.parent / "run.toml").write_text('[teacher]\nmodel = "teacher"\ntemperature = 2.0\n')
    code, out, _ = here.say("plan", *SMALL, "--teacher", "run.toml", "--teacher.top_k", "8", "--force")
    assert code == 0
    assert "the teacher runs once, before the first step, and is freed" in joined(out)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        # A second search, and one of what would make room: half the seconds of all these tests.
        pytest.param([*TIGHT, "--axes", "data"], "beside a teacher of", marks=pytest.mark.nightly),
        (["--outer", "every<=10"], "--teacher is not implemented for islands (--outer)"),
        (["--axes", "data,context"], "--teacher is not implemented for a context axis (--axes)"),
        (["--teacher.plan", "zero9"], "teacher.plan = 'zero9' is no preset"),
        (["--teacher.weight", "0"], "teacher.weight = 0.0 must be above 0"),
        (["--teacher.model", "nowhere"], "teacher.model = 'nowhere' is neither a run folder"),
        (["--teacher.mix", "0.4", "--axes", "data", "--pin", "micro_batch=1"], "add --pin micro_batch=2, or another"),
        (["--scale"], "--teacher has no effect with --scale"),
    ],
)
def test_a_teacher_that_cannot_be_is_refused(here: Planning, teacher: str, words: list[str], said: str) -> None:
    assert said in here.refused("plan", "--nodes", "1", "--teacher", teacher, *words)


def test_the_found_plan_is_as_long_as_itself(here: Planning) -> None:
    words = ("--nodes", "1", "--pin", "pipeline=2", "--best", "1")
    assert here.say("plan", *words)[0] == 0
    code, out, _ = here.say("plan", *words, "--plan", "plan.toml", "--out", "other.toml")
    assert code == 0
    assert "0.0 % longer than the best" in joined(out)
    assert "is the file that is read" in here.refused("plan", *words, "--plan", "plan.toml", "--force")


def test_a_plan_of_the_user_that_does_not_fit_says_so(here: Planning) -> None:
    tight = ("--cluster.device.memory_bytes", "1.75e9", "--plan", "ddp", "--plan.micro_batch", "2")
    code, out, _ = here.say("plan", *SMALL, *tight)
    assert code == 0
    assert re.search(r"your plan ddp, micro-batch 2 x 1: .* it does not fit: needs .* too much", joined(out))


def test_the_answers_fit_in_eighty_columns(here: Planning) -> None:
    asked = (
        "--tokens",
        "2e12",
        "--price",
        "2",
        "--plan",
        "three-level-compressed",
        "--cluster.device.memory_bytes",
        "3e9",
    )
    code, out, _ = here.say("plan", "--nodes", "2", *asked, batch=64)
    assert code == 0
    part = out.split("the fastest plan for each headroom")[1].split("why this plan")[0]
    own = out.split("your plan")[1].split("\n\n")[0]
    price = out.split("throughput: ")[1].split("MFU")[0]
    for text in (part, own, price):
        assert max(len(line.rstrip()) for line in text.splitlines()) <= 80


def test_a_step_of_the_users_plan_is_that_of_the_task() -> None:
    task = small_task(CLUSTERS["dgx 4x2"], batch=16)
    own = own_plan(task, "zero1", {"micro_batch": 2})
    assert own.cost.step_s == predict_step(step_of(task, own.plan)).step_s
    assert (own.plan.compute, own.plan.micro_batch) == (task.compute, 2)
    assert own_plan(task, None, {}).plan.name == "three-level"


def test_the_headroom_of_the_command_is_kept_and_shown(here: Planning) -> None:
    """A plan that needs all of the memory is found without headroom, refused with one, and not simulated with more."""
    fixed = (*SMALL, "--pin", "params=device", "--pin", "micro_batch=2", "--pin", "optimizer=node", "--force")
    code, out, _ = here.say("plan", *fixed, "--headroom", "0%")
    assert code == 0
    needed = float(re.findall(r"^ total +([\d.]+) GB", out, re.M)[0])
    memory = ("--cluster.device.memory_bytes", f"{1.004 * needed}e9")
    assert here.say("plan", *fixed, *memory, "--headroom", "0%")[0] == 0
    for headroom in ("3%", "60MB"):
        assert f"less a headroom of {headroom})" in here.refused("plan", *fixed, *memory, "--headroom", headroom)
    assert main(["simulate", "plan.toml", *memory, "--headroom", "97%"]) == 2
    assert "less a headroom of 97%)" in here.error()


def test_a_headroom_is_given_once_and_shown_as_written(here: Planning) -> None:
    twice = here.refused("plan", "--headroom", "5%", "--cluster.device.headroom", "10%")
    assert "--headroom 5% and --cluster.device.headroom set the same: leave one out" in twice
    assert """device.headroom = "5'%" must be""" in here.refused("plan", "--headroom", "5'%")


def test_a_headroom_without_a_unit_is_refused(here: Planning) -> None:
    error = here.refused("plan", *SMALL, "--headroom", "6")
    assert "device.headroom = '6' must be a share of the memory or bytes of it: write 5% or 4GB" in error


@pytest.mark.parametrize("pins", [(), *nightly((("--allow", "sync=int8"),))])
def test_the_plan_written_does_not_depend_on_how_many_are_shown(pins: tuple[str, ...], here: Planning) -> None:
    written, rooms, shown = set(), set(), list[int]()
    for count in (1, 5):
        words = ("--nodes", "2", "--axes", "data", "--best", str(count), *pins, "--force")
        code, out, _ = here.say("plan", *words, batch=64)
        assert code == 0
        written.add((here.folder / "plan.toml").read_text())
        rooms.add(out.split("the fastest plan for each headroom")[1].split("why this plan")[0])
        shown.append(len(re.findall(r"^ +\d+ +[\d.]+ m?s ", out, re.M)))
    assert len(written) == len(rooms) == 1
    assert shown == [1, 5]
