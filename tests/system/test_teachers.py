"""`terrace train` with a teacher: beside the steps and from kept tokens, predicted and measured, resumed, refused."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from terrace.base.errors import PlanError, TerraceError
from terrace.base.schema import read_table
from terrace.data.tokenizer import ByteTokenizer
from terrace.report.step_view import StepView
from terrace.simulate.fullest import fullest_stage
from terrace.simulate.recorded import record_predicted
from terrace.simulate.step import predict_step
from terrace.train.config import RunConfig
from terrace.train.prediction import checked_programs, job_of, resolved_run, step_of
from terrace.train.resolve import resolve
from terrace.train.runs import read_run
from terrace.train.teacher_keys import teacher_model
from terrace.train.weights import check_values, version_of
from tests.support.tiny_runs import losses, metrics, terrace, write_run

pytestmark = pytest.mark.timeout(360)

DISTILL = ("--train.objective", "distill", "--teacher.model", "teacher")


def taught(folder: Path, name: str, *words: str) -> Path:
    done = terrace("train", "--config", "run.toml", "--folder", name, *DISTILL, *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / name


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run's files, and a teacher."""
    folder = tmp_path_factory.mktemp("teachers")
    write_run(folder, 2, plan="zero3", steps=3)
    table = json.loads((folder / "config.json").read_text())
    (folder / "large.json").write_text(json.dumps(table | {"num_hidden_layers": 3, "hidden_size": 24}))
    words = ("--model", "large.json", "--optimizer.lr", "3e-2", "--train.steps", "12", "--train.log_every", "100")
    done = terrace("train", "--config", "run.toml", "--folder", "teacher", *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def online(here: Path) -> Path:
    """A run with the teacher beside its steps."""
    return taught(here, "online", "--train.log_every", "1", "--data.holdout", "16", "--train.eval_every", "3")


def test_a_run_with_a_teacher_sends_and_holds_what_was_predicted(here: Path, online: Path) -> None:
    run = online
    report = json.loads((run / "report.json").read_text())
    predicted, measured = report["predicted"], report["measured"]
    assert predicted["sent_bytes"] == measured["sent_bytes"]
    assert predicted["memory_bytes"] == measured["memory_bytes"]
    assert measured["memory_bytes"]["teacher"] > 0
    assert predicted["time_s"]["teacher"] > 0
    for line in metrics(run):
        found = line["teacher"]
        assert line["loss"] == pytest.approx(0.1 * found["cross_entropy"] + 0.9 * found["divergence"], rel=1e-6)
        assert 0 < line["time_s"]["teacher"] < line["step_s"]
    # An evaluation is of the labels alone, so that runs with and without a teacher can be compared.
    last = metrics(run)[-1]
    assert last["eval"]["holdout"]["loss"] == pytest.approx(last["teacher"]["cross_entropy"], rel=0.05)
    # A replayed step has the teacher's loss.
    replayed = terrace("replay", "online", "--step", "2", cwd=here)
    assert replayed.returncode == 0, replayed.stderr
    (found,) = re.findall(r"step 2: loss ([0-9.]+), gradient norm", replayed.stdout)
    assert float(found) == pytest.approx(losses(run)[1], rel=1e-4)
    # Whoever uses the model needs no teacher any more.
    (here / "teacher").rename(here / "away")
    assert read_run(run).context == 16
    (here / "away").rename(here / "teacher")


@pytest.mark.nightly
def test_an_exported_teacher_is_the_teacher(here: Path, online: Path) -> None:
    exported = terrace("export", "teacher", "exported", cwd=here)
    assert exported.returncode == 0, exported.stderr
    published = taught(here, "published", "--data.holdout", "16", "--teacher.model", "exported")
    assert losses(published) == pytest.approx(losses(online), rel=1e-6)


def test_kept_tokens_give_nearly_the_loss_of_the_teacher_and_a_resume_the_same_bits(here: Path, online: Path) -> None:
    words = ("--data.holdout", "16", "--teacher.top_k", "200", "--train.checkpoint_every", "2")
    whole = losses(taught(here, "whole", *words))
    assert whole == pytest.approx(losses(online), rel=3e-3)
    before = (here / "whole" / "teacher.ids.npy").read_bytes()
    assert len(before) - 128 == 3 * 8 * 16 * 200 * 2, "24 sequences of 16 tokens, 2 bytes an id"
    (here / "whole" / "checkpoints" / "step-00000003" / "manifest.json").unlink()
    done = terrace("train", "--resume", "whole", "--teacher.model", "teacher", cwd=here)
    assert done.returncode == 0, done.stderr
    assert losses(here / "whole") == whole
    assert read_table(here / "whole" / "config.toml")["teacher"]["model"] == str(here / "teacher"), "from any folder"
    assert "most probable" not in done.stdout, "they were found before"


def taught_run(here: Path, plan: str, **overrides: dict[str, object]) -> RunConfig:
    own = {"train": {"objective": "distill"}, "teacher": {"model": str(here / "teacher")}}
    return resolve(str(here / "run.toml"), {"plan": plan}, own | overrides)


def test_a_teacher_that_does_not_fit_is_refused_before_the_run(here: Path) -> None:
    run = taught_run(here, "zero3")
    (report,) = predict_step(step_of(run)).reports
    own, held = sum(report.memory_bytes.values()), report.memory_bytes["teacher"]
    assert fullest_stage(job_of(run), run.blocks(), run.train.sequence)[1]["teacher"] == held

    def on_device(room: float) -> RunConfig:
        return replace(run, cluster=replace(run.cluster, device=replace(run.cluster.device, memory_bytes=room)))

    checked_programs(on_device(own))
    with pytest.raises(PlanError, match=r"the teacher takes .* a rank beside .* of the student's model state") as found:
        checked_programs(on_device(own - 1))
    assert "\n" not in str(found.value)
    view = StepView(resolved_run(on_device(own)), checked_programs(on_device(own)))
    assert "does not fit" in view.misfit  # activations and the process are missing
    assert "the teacher's forward before the step" in view.path_words


def test_refreshes_have_ended_when_the_predicted_teacher_begins(here: Path) -> None:
    predicted = predict_step(step_of(taught_run(here, "zero1")))
    (times_s,), (recording,) = predicted.times_s, record_predicted(predicted).recordings
    # A recording is the same step without the teacher.
    assert recording.report.step_s + times_s["teacher"] == pytest.approx(predicted.step_s)
    assert times_s["wait refresh"] > 0
    step = recording.spans[recording.first :]
    computes_s = min(span.start_s for span in step if span.category == "forward")
    own_lane = [span for span in recording.spans[: recording.first] if span.lane >= 0]
    assert own_lane, "refreshes of the step before"
    assert max(span.end_s for span in own_lane) <= computes_s
    assert times_s["wait refresh"] == pytest.approx(max(span.end_s for span in own_lane))
    alone = predict_step(replace(step_of(taught_run(here, "zero1")), beside=()))
    assert alone.times_s[0].get("wait refresh", 0.0) < times_s["wait refresh"], "alone, some are hidden"


def test_a_teacher_with_fewer_positions_is_refused(here: Path) -> None:
    gpt = {"model_type": "gpt2", "vocab_size": 257, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8}
    (here / "gpt").mkdir()
    (here / "gpt" / "config.json").write_text(json.dumps(gpt))
    with pytest.raises(TerraceError, match=r"train.sequence = 16 is longer than the 8 positions of teacher.model = "):
        taught_run(here, "zero3", teacher={"model": str(here / "gpt")})
    (here / "file").mkdir()
    (here / "file" / "config.toml").write_text('model = "config.json"')
    with pytest.raises(TerraceError, match=r"its config.toml has no model, so it is no run folder"):
        taught_run(here, "zero3", teacher={"model": str(here / "file")})


def test_other_weights_in_a_teachers_folder_are_seen(here: Path, tmp_path: Path) -> None:
    shutil.copytree(here / "teacher", tmp_path / "teacher")
    before = version_of(str(tmp_path / "teacher"))
    assert before == version_of(str(here / "teacher"))
    (manifest,) = (tmp_path / "teacher" / "checkpoints").glob("*/manifest.json")
    manifest.write_text(manifest.read_text() + " ")
    assert version_of(str(tmp_path / "teacher")) != before


def test_another_tokenizer_is_named(here: Path) -> None:
    other = ByteTokenizer()
    other.fingerprint = "another-1"
    folder = str(here / "teacher")
    with pytest.raises(TerraceError, match=r"teacher.model = .* has another tokenizer \(bytes-1, not another-1\)"):
        check_values(folder, teacher_model(folder), other, "teacher.model")
    with pytest.raises(TerraceError, match=r"has no weights"):
        check_values(str(here), teacher_model(folder), ByteTokenizer(), "teacher.model")


WRONG = [
    ({"teacher": {"model": "teacher"}}, r"\[teacher\] has no effect: train.objective = \"next-token\""),
    ({"train": {"objective": "distill"}}, "needs a teacher: give its folder"),
    ({"teacher": {"weight": 0.0}}, "teacher.weight = 0.0 must be above 0 and at most 1"),
    ({"teacher": {"weight": 1.5}}, "teacher.weight = 1.5 must be above 0 and at most 1"),
    ({"teacher": {"temperature": 0.0}}, "teacher.temperature = 0.0 must be at least 0.001"),
    ({"teacher": {"temperature": -1.0}}, "teacher.temperature = -1.0 must be at least 0.001"),
    ({"teacher": {"temperature": 1e-30}}, "teacher.temperature = 1e-30 must be at least 0.001"),
    ({"teacher": {"temperature": float("nan")}}, "teacher.temperature = nan must be at least 0.001"),
    ({"teacher": {"top_k": -1}}, "teacher.top_k = -1 must be 0, or a number"),
    ({"teacher": {"top_k": 257}}, "teacher.top_k = 257 must be below the 257 tokens"),
    ({"teacher": {"mix": -0.5}}, "teacher.mix = -0.5 must be at least 0"),
    ({"teacher": {"mix": 0.4, "top_k": 8}}, "teacher.mix = 0.4 with teacher.top_k = 8: kept tokens are those of whole"),
    ({"teacher": {"mix": 0.4}, "data": {"documents": "separate"}}, "and here rows hold several documents"),
    ({"teacher": {"mix": 0.4}, "plan": {"micro_batch": 1}}, "mixes rows in pairs, and plan.micro_batch is 1: make it"),
    ({"teacher": {"model": "nowhere"}}, "neither a run folder .config.toml. nor a Hugging Face folder"),
    ({"teacher": {"plan": "zero9"}}, "teacher.plan = 'zero9' is no preset and no file"),
    ({"model": {"vocab_size": 300}}, "has a vocabulary of 257 tokens, and the model one of 300"),
    ({"plan": {"mapping": {"package": {"context": 2}}}}, "divides rows over a context axis"),
    ({"train": {"batch": 2}, "plan": {"mapping": {"package": {"tensor": 2}}}, "teacher": {"plan": "rows.toml"}}, ""),
    (
        {"plan": {"mapping": {"package": {"tensor": 2}}}, "teacher": {"top_k": 8}},
        "teacher.top_k = 8 is not implemented on tensor ranks",
    ),
    ({"train": {"batch": 1}, "plan": {"mapping": {"package": {"tensor": 2}}}}, "teacher.plan = 'zero3': batch = 1"),
    ({"train": {"batch": 9}, "plan": {"preset": "ddp", "shares": [5, 4]}}, "has plan.shares, which a teacher"),
    ({"teacher": {"plan": "rows.toml"}}, "cuts the vocabulary over other tensor ranks"),
    ({"teacher": {"plan": "stages.toml"}}, "ends on other ranks than the plan"),
]


@pytest.mark.parametrize(("given", "why"), WRONG)
def test_what_cannot_be_is_refused_in_a_line(here: Path, given: dict[str, dict[str, object]], why: str) -> None:
    (here / "rows.toml").write_text('preset = "zero3"\nmapping = { package = { tensor = 2 } }\n')
    (here / "stages.toml").write_text('preset = "zero3"\nmapping = { package = { pipeline = 2 } }\nschedule = "1f1b"\n')
    base = {"train": {"objective": "distill"}, "teacher": {"model": str(here / "teacher")}}
    if "objective" in given.get("train", {}) or why.startswith(r"\[teacher"):
        base = {"train": {}, "teacher": {}}
    overrides = {name: base.get(name, {}) | given.get(name, {}) for name in {*base, *given}}
    for key in ("model", "plan"):
        if str(overrides["teacher"].get(key, "")).endswith(("teacher", ".toml")):
            overrides["teacher"][key] = str(here / str(overrides["teacher"][key]))
    overrides = {name: table for name, table in overrides.items() if table}
    if not why:  # what is right between the wrong ones
        resolve(str(here / "run.toml"), {}, overrides)
        return
    with pytest.raises(TerraceError, match=why) as raised:
        resolve(str(here / "run.toml"), {}, overrides)
    assert "\n" not in str(raised.value)
