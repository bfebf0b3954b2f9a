"""`terrace rl`: a task and a folder with prompts, from the command line to the last number; refusals."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from terrace.base.errors import ConfigError, DataError, TrainingError
from terrace.base.printable import escape
from terrace.rl import making
from terrace.rl.config_layers import resolve_table
from terrace.rl.sort_task import SortPrompts, SortTokenizer
from terrace.rl.stream.prompt_file import read_prompts
from tests.support.command_line import CommandLine, own_modules
from tests.support.hf_folder import TABLE, write_model, write_tokenizer
from tests.support.pages import checked

ALONE = [word for name in ("package", "node", "system") for word in (f"--cluster.tiers.{name}.size", 1)]
SMALL = [*ALONE, "--plan", "ddp", "--plan.micro_batch", 16, "--run.rows", 1, "--model.hidden_size", 32]
SMALL += ["--model.num_hidden_layers", 1, "--run.prompts", 4, "--run.mini_batch", 16, "--run.start_steps", 1]
SMALL += ["--run.start_batch", 16]
RECORDS = ("metrics.jsonl", "calls.jsonl", "samples.jsonl")


@pytest.fixture
def here(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[CommandLine]:
    monkeypatch.chdir(tmp_path)
    with own_modules(tmp_path):
        yield CommandLine(tmp_path, capsys)


def test_a_task_runs_and_goes_on(here: CommandLine) -> None:
    said = here.call("rl", "--task", "sort", *SMALL, "--run.steps", 1, "--folder", "made")
    assert (said.code, said.error) == (0, ""), said.error
    for words in ("grpo: 0.04 M parameters, 1 step of 4 prompts", "supervised start: 1 step", "before: val/reward"):
        assert words in said.out
    for words in (
        "step    1   reward",
        "KL 0.000",
        "tokens/s",
        "held out",
        "generate",
        "update",
        "hand-over: predicted",
        "predicted beside measured:",
        "its limit of 20 %",
    ):
        assert words in said.out
    # Steps after the checkpoint, as of a run that was killed before its next one.
    for name in RECORDS:
        with (here.folder / "made" / name).open("a") as file:
            file.write('{"step": 2, "reward/mean": -7.0, "calls": [], "samples": []}\n{"step": 3, "rew')
    again = here.call("rl", "--resume", "made", "--run.steps", 2, "--run.metrics", '["tensorboard"]')
    assert (again.code, again.error) == (0, "")
    assert "going on after step 1" in again.out
    lines, calls, samples = (_lines(here.folder / "made" / name) for name in RECORDS)
    assert [line["step"] for line in lines] == [line["step"] for line in calls] == [1, 2]
    assert [line["step"] for line in samples] == [0, 1, 2]
    assert lines[1]["rollout/logprob_diff_max"] < 1e-4
    assert lines[1]["reward/mean"] >= 0
    _check_calls(calls[1], lines[1])
    (drawn, *_), (held_out, *_) = (
        [each for each in samples[2]["samples"] if each["kind"] == kind] for kind in ("drawn", "held out")
    )
    assert drawn["prompt"] == SortPrompts(0).prompt(4).text, "the second step draws from the fifth prompt on"
    assert drawn["reward"] == (drawn["finish"] == "stop" and drawn["response"] == "".join(sorted(drawn["prompt"][:-1])))
    assert held_out["prompt"] == SortPrompts(0).held_out()[0].text
    _check_tensorboard(here.folder / "made" / "tensorboard", lines[1])
    assert "is after step 2 of 2, so nothing is left to train: ask for more with --run.steps N" in here.refusal(
        "rl", "--resume", "made"
    )
    _check_page(here, samples[2]["samples"])


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _check_calls(line: dict[str, Any], numbers: dict[str, Any]) -> None:
    """Calls lie in the step one after the other, on one rank, and take the seconds of their phases."""
    assert line["step_s"] == pytest.approx(numbers["time/step"], abs=1e-5)
    assert [(call["role"], call["method"], call["pool"]) for call in line["calls"]] == [
        (*each, "rank 0")
        for each in (
            ("actor", "hand_over"),
            ("actor", "generate"),
            ("reward_0", "rewards"),
            ("reference", "logprobs"),
            *[("actor", "update")] * 2,
        )
    ]
    ends = [-1e-3, *(end for call in line["calls"] for end in (call["begin_s"], call["end_s"])), line["step_s"] + 1e-3]
    assert ends == sorted(ends)
    for phase, called in (("generate", "actor.generate"), ("update", "actor.update"), ("ref", "reference.logprobs")):
        own = [call for call in line["calls"] if f"{call['role']}.{call['method']}" == called]
        spent = sum(call["end_s"] - call["begin_s"] for call in own)
        assert spent == pytest.approx(numbers[f"time/{phase}"], abs=1e-4)


def _check_tensorboard(folder: Path, numbers: dict[str, Any]) -> None:
    """Numbers have the names of `metrics.jsonl`, which are verl's, and samples are a text."""
    name = "tensorboard.backend.event_processing.event_accumulator"
    accumulator = pytest.importorskip(name, reason="needs the package tensorboard")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {name for name in numbers if "/" in name}
    verls = {"actor/pg_clipfrac", "actor/entropy", "actor/grad_norm", "response_length/mean", "perf/tokens_per_s"}
    assert verls < numbers.keys()
    (score,) = events.Scalars("reward/mean")
    assert (score.step, score.value) == (2, pytest.approx(numbers["reward/mean"]))
    (written,) = events.Tensors("samples/text_summary")
    assert b"    drawn, " in written.tensor_proto.string_val[0]


def _check_page(here: CommandLine, samples: list[dict[str, Any]]) -> None:
    said = here.call("report", "made")
    assert (said.code, said.error) == (0, ""), said.error
    assert said.out.startswith("Finished after 2 steps.\nwrote made/report.html")
    page = (here.folder / "made" / "report.html").read_text()
    checked(page)
    for title in ("Reward", "KL to the reference", "Entropy", "Response length", "Clip fraction", "Throughput"):
        assert f"<h3>{title}" in page
    for title in (
        "Timeline of one iteration",
        "Samples",
        "Seconds of a step by phase",
        "Settings",
    ):
        assert title in page
    for each in samples:
        assert f"<div class=text>{escape(each['prompt'])}</div>" in page
    for words in ("actor.generate on rank 0", "reference.logprobs on rank 0", "prepare", "step-00000004"):
        assert words in page


def write_run(folder: Path, **more: Any) -> Path:
    """A run on a Hugging Face folder, with prompts and rewards of the user's own."""
    (folder / "model").mkdir()
    write_model(folder / "model")
    lines = [{"prompt": text, "wanted": len(text)} for text in ("The fox", "lazy dog", "quick", "brown 0123", "jumps")]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "my_rewards.py").write_text(
        "def near(samples):\n    return [-abs(len(each.response) - each.data['wanted']) / 10 for each in samples]\n"
        "def ended(samples):\n    return [float(each.finish == 'stop') for each in samples]\n"
    )
    run = {"prompts_file": "prompts.jsonl", "max_prompt": 12, "max_response": 6, "steps": 1, "held_out": 1}
    run |= {"prompts": 2, "responses": 4, "mini_batch": 4}
    table: dict[str, Any] = {
        "model": "model",
        "cluster": "local",
        "plan": {"preset": "ddp", "micro_batch": 4},
        "run": run,
        "reward": [{"function": "my_rewards:near"}, {"function": "my_rewards:ended", "weight": 0.5}],
        "algorithm": {"name": "dr-grpo"},
    }
    (folder / "run.toml").write_text(tomli_w.dumps(table | more))
    return folder / "run.toml"


def test_a_folder_with_prompts_and_rewards_of_ones_own(here: CommandLine) -> None:
    config = write_run(here.folder)
    said = here.call("rl", "--config", config, *ALONE, "--folder", "made")
    assert (said.code, said.error) == (0, ""), said.error
    (line,) = [json.loads(line) for line in (here.folder / "made" / "metrics.jsonl").read_text().splitlines()]
    assert line["reward/mean"] == pytest.approx(line["score/0/mean"] + 0.5 * line["score/1/mean"], abs=1e-6)
    assert "val/reward" in line
    assert line["prompt_length/max"] <= 12


def test_a_reward_model_beside_a_function(here: CommandLine) -> None:
    functions = [{"function": "my_rewards:near"}, {"function": "my_rewards:ended", "weight": 0.5}]
    config = write_run(here.folder, reward=[*functions, {"model": "judge", "weight": 2.0}])
    (here.folder / "judge").mkdir()
    write_model(here.folder / "judge", {**TABLE, "architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1})
    said = here.call("rl", "--config", config, *ALONE, "--folder", "made")
    assert (said.code, said.error) == (0, ""), said.error
    (line,) = [json.loads(line) for line in (here.folder / "made" / "metrics.jsonl").read_text().splitlines()]
    parts = [line[f"score/{number}/mean"] for number in range(3)]
    assert parts[2] != 0
    assert line["reward/mean"] == pytest.approx(parts[0] + 0.5 * parts[1] + 2 * parts[2], abs=1e-6)
    write_tokenizer(here.folder / "judge", num_added=2)
    assert "judge has another tokenizer than the actor's model" in here.refusal("rl", "--config", config, *ALONE)
    (here.folder / "judge" / "tokenizer.json").write_bytes((here.folder / "model" / "tokenizer.json").read_bytes())
    refused = here.refusal("rl", "--config", config, *ALONE, "--model", "judge")
    assert "the model is a reward model, which writes nothing" in refused


def test_wrong_input_is_one_line_before_anything_starts(here: CommandLine) -> None:
    config = write_run(here.folder)

    def refused(*words: object) -> str:
        return here.refusal("rl", *words)

    assert "section [run] is missing: give --task sort" in refused()
    assert "unknown key run.step" in refused("--task", "sort", "--run.step", 3)
    assert "rows = 3 of a replica cannot share the model's 4 heads" in refused("--task", "sort", "--run.rows", 3)
    assert "leave out --task" in refused("--resume", "model", "--task", "sort")
    assert "model is not a run folder" in refused("--resume", "model")
    assert "--explain starts nothing: leave out --resume auto" in refused("--explain", "--resume", "auto")
    assert "line 2 has a prompt of" in refused("--config", config, *ALONE, "--run.max_prompt", 3)
    assert "leave some to train on" in refused("--config", config, *ALONE, "--run.held_out", 5)
    for text in ("run = 3", "algorithm = 3", "[algorithm]\nname = []"):
        (here.folder / "wrong.toml").write_text(text + "\n")
        refused("--config", "wrong.toml")
        refused("--config", "wrong.toml", "--task", "sort")
    context = ["--plan.mapping.package.context", 2]
    assert "leave out the context axis" in refused("--task", "sort", *context)


def test_files_are_named_from_where_their_names_stand(here: CommandLine) -> None:
    (here.folder / "sub").mkdir()
    config = write_run(here.folder / "sub", weights="model")

    def table(*layers: dict[str, Any]) -> dict[str, Any]:
        return resolve_table(None, str(config), {}, *layers)

    own = table({})
    assert own["run"]["prompts_file"] == str(here.folder / "sub" / "prompts.jsonl")
    assert own["weights"] == str(here.folder / "sub" / "model")
    assert table({"run": {"prompts_file": "b.jsonl"}})["run"]["prompts_file"] == str(here.folder / "b.jsonl")
    given = {"cost": {"model": "judge"}}
    assert table(given)["cost"]["model"] == str(here.folder / "judge")
    assert given == {"cost": {"model": "judge"}}


def test_a_run_that_ends_in_its_supervised_start_goes_on(here: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(*_: object) -> None:
        raise TrainingError("ended early")

    words = ["rl", "--task", "sort", *SMALL, "--run.steps", 1, "--run.evaluate_every", 0, "--folder", "made"]
    with monkeypatch.context() as patch:
        patch.setattr(making, "_begun", ended)
        assert "ended early" in here.call(*words).error
    said = here.call("rl", "--resume", "made")
    assert (said.code, said.error) == (0, ""), said.error
    assert "step    1   reward" in said.out
    assert "before" not in said.out
    assert "held out" not in said.out


def test_prompts_of_a_file_by_place(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": "{number}>", "answer": {number}}}\n' for number in range(7)))
    source = read_prompts(path, "prompt", SortTokenizer(), longest=2, num_held_out=2, seed=1)
    assert [prompt.text for prompt in source.held_out()] == ["0>", "1>"]
    passes = [[source.prompt(5 * turn + place).text for place in range(5)] for turn in range(3)]
    assert all(sorted(each) == ["2>", "3>", "4>", "5>", "6>"] for each in passes)
    assert len({tuple(each) for each in passes}) > 1
    assert source.prompt(4).data == {"answer": int(source.prompt(4).text[0])}


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ('{"prompt": "1>"}\n{"text": "2>"}\n', DataError, "line 2 has no text in 'prompt': it has text"),
        ('{"prompt": "1>"\n', DataError, "line 1 is not JSON"),
        ('{"prompt": "1>"}\n\n{"prompt": "2>"\n', DataError, "line 3 is not JSON"),
        ('{"prompt": "1>"}\n\n{"text": "2>"}\n', DataError, "line 3 has no text"),
        ('{"prompt": "1>"}\n{"prompt": "\udcff2>"}\n', DataError, "line 2 is not UTF-8, at its byte 13"),
        ("[1]\n", DataError, "line 1 is no object of JSON: write an object on each line"),
        ('{"prompt": "123>"}\n', DataError, "line 1 has a prompt of 4 tokens: 1 to run.max_prompt = 3"),
        ("", ConfigError, "has 0 prompts, and run.held_out = 0"),
    ],
)
def test_wrong_files_of_prompts_are_refused(tmp_path: Path, text: str, error: type[Exception], message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(error, match=message):
        read_prompts(path, "prompt", SortTokenizer(), longest=3, num_held_out=0, seed=0)


def test_a_line_ends_where_json_lines_end(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    notes = ["a\u2028b", "a\u0085b"]
    path.write_text("\r\n".join(json.dumps({"prompt": "1>", "note": note}, ensure_ascii=False) for note in notes))
    source = read_prompts(path, "prompt", SortTokenizer(), longest=3, num_held_out=1, seed=0)
    assert [each.data["note"] for each in source.prompts] == notes


def test_a_parquet_file_has_the_same_prompts(tmp_path: Path) -> None:
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    parquet.write_table(arrow.table({"prompt": ["1>", "2>"], "answer": [1, 2]}), tmp_path / "prompts.parquet")
    source = read_prompts(tmp_path / "prompts.parquet", "prompt", SortTokenizer(), longest=3, num_held_out=1, seed=0)
    assert source.prompt(0).text == "2>"
    assert source.prompt(0).data == {"answer": 2}
