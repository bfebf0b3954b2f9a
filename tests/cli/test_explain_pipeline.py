"""`terrace simulate --view program` of a plan with a pipeline, and the comparison of its runs: output and refusals."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from terrace.base.words import quantity, seconds
from terrace.cluster.cluster import Cluster
from terrace.cluster.presets import load_cluster
from terrace.model.block_operations import layer_operations
from terrace.model.blocks import block_specs
from terrace.model.config import parse_model
from terrace.model.spec import BlockSpec
from terrace.plan.plan import Plan
from terrace.plan.wire import BETWEEN_STAGES, MessageClass
from terrace.program.instruction import Op
from terrace.program.lowering import build_stages
from terrace.program.program import Program
from terrace.program.report import StepReport
from terrace.program.schedules.csv_form import from_csv, to_csv
from terrace.program.schedules.orders import Orders
from terrace.program.schedules.registry import orders_for, schedule_names, takes
from terrace.program.stages import plan_orders
from terrace.report.stage_tables import (
    block_words,
    computing_s,
    order_text,
    others_s,
    stage_bytes_tables,
    stage_comparison_table,
)
from terrace.report.table import Table
from terrace.report.tables import band_words
from terrace.report.timeline_text import timeline_text
from terrace.simulate.cost import step_costs
from terrace.simulate.footprint import work_of
from terrace.simulate.recorded import record_predicted
from terrace.simulate.rows import step_timeline, task_spans
from terrace.simulate.stages import StagesStep, simulate_stages
from terrace.simulate.step import bubble, idle_s, predict_step
from terrace.simulate.timeline import play
from terrace.train.config import RunConfig
from terrace.train.prediction import checked_programs, kept_activations, resolved_run, step_of
from terrace.train.resolve import resolve
from tests.support.command_line import CommandLine
from tests.support.nightly import every
from tests.support.schedules import even_seconds, peak_activation_bytes

PIPELINE = ["--plan", "ddp", "--plan.mapping.system.pipeline", "2"]
SCHEDULES = ["1f1b", "gpipe", "zb-h1", "zbv", "zeropp:2", "interleaved:2"]
GPT = {
    "model_type": "gpt2",
    "vocab_size": 300,
    "n_embd": 32,
    "n_layer": 6,
    "n_head": 2,
    "n_positions": 128,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}


class Here(CommandLine):
    """A folder with a model, and `terrace simulate` called in this process."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        super().__init__(folder, capsys)
        (folder / "config.json").write_text(json.dumps(GPT))

    def explain(self, *words: str | Path, plan: Sequence[str] = PIPELINE) -> str:
        said = self.call("simulate", "--view", "program", "--model", "config.json", *plan, *words)
        assert said.code == 0, said.error
        return said.out

    def refused(self, *words: str, plan: Sequence[str] = PIPELINE) -> str:
        return self.refusal("simulate", "--view", "program", *plan, *words)


@pytest.fixture
def here(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Here:
    monkeypatch.chdir(tmp_path)
    return Here(tmp_path, capsys)


def _config(schedule: str, num_stages: int = 2, **plan: object) -> RunConfig:
    mapping = {"system": {"pipeline": num_stages}}
    overrides = {
        "plan": {"mapping": mapping, "schedule": schedule, **plan},
        "cluster": {"tiers": {"system": {"size": num_stages}}},
    }
    return resolved_run(resolve(None, {"model": "config.json", "plan": "ddp"}, overrides))


def _played(config: RunConfig) -> tuple[list[Program], StagesStep]:
    programs = checked_programs(config)
    work = work_of(config.cluster, config.plan, layer_operations(config.model), config.train.sequence)
    return programs, simulate_stages(programs, [step_costs(program, work) for program in programs])


def orders_of(config: RunConfig) -> Orders:
    return plan_orders(config.plan, config.blocks(), 2, config.num_micros(), config.train.sequence)


def _section(out: str, title: str) -> list[str]:
    """Return the lines from the one that begins with `title` to the next empty one, the frame of a table left out."""
    lines = out.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith(title))
    section: list[str] = []
    for line in lines[start + 1 :]:
        if not line.strip() and any(re.match(r"\s*(\d+|all|total|stage \d+) ", each) for each in section):
            break
        section.append(line.rstrip())
    return section


def _rows(out: str, title: str) -> dict[str, list[str]]:
    """Return the cells of a table's rows by stage; cells stand at least two spaces apart."""
    found = {}
    for line in _section(out, title):
        cells = re.split(r"\s{2,}", line.strip())
        if cells[0].isdecimal():
            found[cells[0]] = cells[1:]
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_the_stages_are_exactly_the_model(here: Here, schedule: str) -> None:
    out = here.explain("--plan.schedule", schedule, "--lines", "2")
    blocks = _config(schedule).blocks()
    whole = sum(param.numel for block in blocks for param in block.params)
    rows = _rows(out, "stages: what each runs")
    assert set(rows) == {"0", "1"}
    assert sum(int(row[-1].replace(",", "")) for row in rows.values()) == whole
    assert f"together exactly the model's {whole:,} parameters" in out
    tied = f"a copy of embedding ({blocks[0].num_trainable:,} parameters), tied to that of stage 0"
    assert (tied in " ".join(out.split())) == (
        schedule == "1f1b"
    )  # the first stage of a V holds both ends of the model
    assert rows["0"][0].startswith("embedding, layers.0")
    assert rows["0" if schedule == "zbv" else "1"][-2].endswith("head")


def test_memory_bytes_and_seconds_are_those_of_the_programs(here: Here) -> None:
    config = _config("zb-h1")
    programs, step = _played(config)
    out = here.explain("--plan.schedule", "zb-h1", "--lines", "2")
    memory = _rows(out, "model state and activations")
    sent = _section(out, "bytes one rank of each stage")
    spent = _rows(out, "seconds of a step")
    for index, (program, report) in enumerate(zip(programs, step.reports, strict=True)):
        state, kept = sum(program.state_bytes.values()), kept_activations(config, program)
        assert memory[str(index)][-3:] == [quantity(size, "B") for size in (state, kept, state + kept)]
        assert spent[str(index)][-2:] == [seconds(report.step_s), f"{idle_s(report) / report.step_s:.1%}"]
    onward, back = (
        [report.sent_bytes.get((message, "system"), 0) for report in step.reports] for message in BETWEEN_STAGES
    )
    totals = [sum(report.sent_bytes.values()) for report in step.reports]
    for words, sizes in (("pipeline +system", onward), ("pipeline_backward +system", back), ("total", totals)):
        cells = " +".join(quantity(size, "B") if size else "-" for size in sizes)
        assert any(re.fullmatch(rf" {words} +{cells}", line) for line in sent), (words, sent)
    assert re.search(rf"^ +all +{bubble(step.reports):.1%} *$", out, re.M)


@pytest.mark.parametrize("schedule", every(3, SCHEDULES))
def test_what_is_drawn_is_what_is_played(here: Here, schedule: str) -> None:
    """The rows of the table and of the picture are the passes of the programs, in the order of the schedule."""
    config = _config(schedule)
    programs, step = _played(config)
    orders = orders_of(config)
    for stage, (program, passes) in enumerate(zip(programs, step.passes, strict=True)):
        spans = list(task_spans(program.stage, passes))
        assert tuple(task for task, _, _ in spans) == orders.tasks[stage]
        assert all(before[2] <= after[1] + 1e-12 for before, after in pairwise(spans))
        assert sum(end_s - start_s for _, start_s, end_s in spans) >= step.reports[stage].time_s["forward"]
    out = here.explain("--plan.schedule", schedule, "--lines", "2")
    rows = _section(out, "Schedule ")
    for stage, line in enumerate(to_csv(orders).splitlines()):
        cells = line.split(",")
        shown = next(row for row in rows if row.startswith(f"stage {stage}")).split()[2:]
        number = _num_shown(shown)
        assert number > 10
        assert shown[:number] == cells[:number]
        assert shown[number:] == (["...", str(len(cells) - number), "more"] if number < len(cells) else [])
    wide = timeline_text(step_timeline(record_predicted(predict_step(step_of(config), programs))), 2000)
    for stage, line in enumerate(wide.splitlines()[:2]):
        tasks = [task for task in orders.tasks[stage] if task.chunk == 0]
        first = [f"{task.pass_.letter}{task.micro}" for task in tasks[:3]]
        assert re.findall(r"[FBIW]\d+(?=[- ])", re.sub(r"[FBIW]1\.\d+-*", "", line))[:3] == first
        assert len(line) == 2000


def _num_shown(cells: list[str]) -> int:
    return cells.index("...") if "..." in cells else len(cells)


def test_the_picture_of_the_terminal_begins_with_the_first_forward(here: Here) -> None:
    out = here.explain("--plan.schedule", "gpipe", "--lines", "2")
    picture = _picture(out)
    assert picture[0].startswith("stage 0 |F0")
    assert re.match(r"stage 1 \| +F0?", picture[1])
    assert {len(line) for line in picture} == {120}


def _picture(out: str) -> list[str]:
    lines = out.splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("Timeline of all stages"))
    return [line for line in lines[start + 1 : start + 3] if line.startswith("stage")]


def test_the_program_is_that_of_the_stage_asked_for(here: Here) -> None:
    first, last = here.explain("--lines", "8"), here.explain("--lines", "8", "--stage", "1")
    assert "program of every rank of stage 0" in first
    assert "FORWARD b0 m0" in first
    assert "program of every rank of stage 1" in last
    assert re.search(r"RECV activation b\d m0 from stage 0 +layers\.\d +system", last)


@pytest.mark.parametrize("schedule", every(3, SCHEDULES))
def test_the_csv_file_is_the_schedule(here: Here, schedule: str) -> None:
    out = here.explain("--plan.schedule", schedule, "--lines", "2", "--csv", "order.csv")
    assert "wrote order.csv: the order of 2 stages" in out
    orders, again = orders_of(_config(schedule)), from_csv((here.folder / "order.csv").read_text())
    assert again.tasks == orders.tasks
    assert again.placement == orders.placement


def test_the_csv_file_is_not_overwritten(here: Here) -> None:
    (here.folder / "order.csv").write_text("mine")
    assert "add --force to replace it" in here.refused("--csv", "order.csv")
    assert (here.folder / "order.csv").read_text() == "mine"
    here.explain("--csv", "order.csv", "--force", "--lines", "2")
    assert (here.folder / "order.csv").read_text().startswith("0F0,")
    assert "is the file that is read as the model" in here.refused(
        "--model", "config.json", "--csv", "config.json", "--force"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--stage", "2"], "the plan has stages 0 to 1"),
        (["--stage", "-1"], "the plan has stages 0 to 1"),
        (["--force"], "no effect without --page FILE, --trace FILE or --csv FILE"),
        (["--csv", "."], "is a folder"),
        (["--plan.schedule", "zb-h3"], "did you mean 'zb-h2'"),
        (["--plan.stages", "[1, 2]"], "give the number of blocks of each of the 2 virtual stages"),
    ],
)
def test_bad_input_is_one_line(here: Here, words: list[str], said: str) -> None:
    assert said in here.refused(*words)


def test_without_a_pipeline_nothing_of_one_is_taken_or_printed(here: Here) -> None:
    plan = ["--plan", "ddp"]
    assert "leave --stage out" in here.refused("--stage", "1", plan=plan)
    assert "no pipeline axis" in here.refused("--csv", "order.csv", plan=plan)
    out = here.explain("--lines", "2", plan=plan)
    assert "program of every rank, " in out
    assert "bubble" not in out
    assert "stage" not in out.replace("stages", "").replace("--stage", "")


def test_names_of_neighbouring_blocks_are_joined(here: Here) -> None:
    blocks = _config("1f1b").blocks()
    assert block_words(blocks, range(4)) == "embedding, layers.0-2"
    assert block_words(blocks, range(6, 8)) == "layers.5, head"


def test_a_schedule_is_cut_to_the_width_and_says_what_is_left() -> None:
    orders = orders_for("1f1b", num_stages=2, num_micros=20)
    assert order_text(orders, 400).splitlines()[1].split()[2:] == to_csv(orders).splitlines()[1].split(",")
    for width in (30, 80, 120):
        for line in order_text(orders, width).splitlines():
            assert len(line) <= width
            cells = line.split()[2:]
            assert cells[_num_shown(cells) :] == ["...", str(40 - _num_shown(cells)), "more"]


DOCS = Path(__file__).parents[2] / "docs"
_ROW = re.compile(r"^\| `([^`]+)` \| ([^|]+ %[^|]*) \| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.M)


def _two(values: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(values))


def _figures(schedule: str, blocks: Sequence[BlockSpec], cluster: Cluster) -> list[str]:
    """Return bubble, activations kept, gathers and reductions of a layer, for 4 stages and 8 micro-batches."""
    bubbles, peaks, gathers, reductions = [], [], [], []
    for unit in (1, 4):
        plan = Plan(
            params="package",
            grads="package",
            optimizer="package",
            mapping={"node": {"pipeline": 4}},
            schedule=schedule,
            unit=unit,
        )
        orders = plan_orders(plan, blocks, 4, 8, 64)
        plan = replace(plan, stages=(len(blocks) // orders.num_virtual,) * orders.num_virtual)
        played = play(orders, even_seconds(orders.num_virtual, forward_s=1.0, input_s=1.0, weight_s=1.0))
        bubbles.append(f"{1 - sum(played.busy_s) / 4 / played.makespan_s:.0%}".replace("%", " %"))
        peaks.append(f"{max(peak_activation_bytes(orders, [1.0] * orders.num_virtual)) / orders.num_chunks:g}")
        ops = Counter(
            each.op
            for program in build_stages(cluster, plan, blocks, 8, 64)
            for each in program.instructions
            if 0 < each.block < len(blocks) - 1
        )
        gathers.append(f"{ops[Op.GATHER] / (len(blocks) - 2):.1f}")
        reductions.append(f"{ops[Op.REDUCE] / (len(blocks) - 2):g}")
    return [_two(bubbles), _two(peaks), *gathers, _two(reductions)]


def test_the_table_of_schedules_in_the_docs_is_what_the_programs_do() -> None:
    rows = _ROW.findall((DOCS / "pipelines.md").read_text())
    by_numbers = {name for name in schedule_names() if "seconds" not in takes(name)}
    assert {name.partition(":")[0] for name, *_ in rows} == by_numbers
    blocks = block_specs(parse_model(GPT | {"n_layer": 22}))
    local = load_cluster("local")
    cluster = replace(local, tiers=(local.tiers[0], replace(local.tiers[1], size=4)))
    for name, *figures in rows:
        assert figures == _figures(name, blocks, cluster), name


def _report(scale: float, sent: int = 5, state: int = 100) -> StepReport:
    parts = {"forward": 2.0, "update": 0.5, "wait pipeline": 0.25, "wait control": 0.125, "wait gather": 1.0}
    return StepReport(
        time_s={name: scale * spent for name, spent in parts.items()},
        sent_bytes={(MessageClass.PIPELINE, "node"): sent},
        memory_bytes={"params": state},
    )


def test_a_step_is_computing_waiting_for_stages_and_waiting_for_others() -> None:
    report = _report(1.0)
    assert (computing_s(report), idle_s(report), others_s(report)) == (2.5, 0.375, 1.0)
    assert bubble([report, _report(3.0)]) == pytest.approx(0.375 / 3.875)


def test_every_stage_counts_in_the_verdict() -> None:
    good, slow = (_report(1.0), _report(1.0)), (_report(1.0), _report(2.0))
    said = band_words([good, slow, good])
    assert "predicted step time -50 % at most (stage 1), OUTSIDE its limit of 20 %" in said
    assert "predicted model state +0 % at most (stage 0), within its limit of 10 %" in said
    assert said.endswith("bytes equal on every stage")
    wrong = (_report(1.0), _report(1.0, sent=6))
    assert band_words([good, wrong]).endswith("bytes DIFFERENT on stage 1")
    assert "OUTSIDE" in band_words([good, (_report(1.0), _report(1.0, state=80))])
    assert "stage" not in band_words([slow])
    text = _text(stage_comparison_table([good, wrong]))
    assert re.search(r"0 +3\.88 / 3\.88 s +\+0 % +2\.50 / 2\.50 s +375\.0 / 375\.0 ms +1\.00 / 1\.00 s .* yes", text)
    assert re.search(r"1 .* NO", text)


def test_the_bytes_of_many_stages_stand_in_several_tables() -> None:
    sent = [{(MessageClass.PIPELINE, "node"): stage + 1} for stage in range(10)]
    first, second = map(_text, stage_bytes_tables(sent, ["package", "node"]))
    assert re.search(r"pipeline +node +1 B +2 B .* 8 B", first)
    assert re.search(r"stage 8 +stage 9", second)
    assert re.search(r"pipeline +node +9 B +10 B", second)


def _text(table: Table) -> str:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(table)
    return capture.get()
