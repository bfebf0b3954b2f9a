"""The start of a run on the terminal: ten lines of 80 columns before the first loss; tables with `--verbose`."""

import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from terrace.base.progress import Passing
from terrace.cli.first_screen import show_plan
from terrace.cli.screen import Screen, next_commands
from terrace.cli.step_progress import passing_lines
from terrace.train.job import RunJob
from terrace.train.prediction import predict
from terrace.train.prepare import prepare
from terrace.train.resolve import resolve
from tests.support.tiny_runs import MODEL

OF_RANKS = 1  # "8 local processes, backend gloo: ...": the only line of the ranks themselves
PIPELINE = {"preset": "ddp", "mapping": {"node": {"pipeline": 2}}, "schedule": "zbv"}
MIXTURE = MODEL | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
EXPERTS = {"preset": "zero3", "experts": {"node": {"expert": 2}}}
ISLANDS = {"preset": "zero3", "outer": {"preset": "diloco", "tier": "system"}}


def job_of(folder: Path, monkeypatch: pytest.MonkeyPatch, model: dict[str, Any] | None = None, **over: Any) -> RunJob:
    monkeypatch.chdir(folder)
    (folder / "text.txt").write_text("The fox jumps over the lazy dog.\n" * 900)
    given = {} if "data" in over else {"data": "text.txt"}
    if model is not None:
        (folder / "model.json").write_text(json.dumps({k: v for k, v in model.items() if k != "tie_word_embeddings"}))
        given["model"] = "model.json"
    return prepare(resolve(None, given, over), None, None)


def start(job: RunJob, capsys: pytest.CaptureFixture[str], verbose: bool = False) -> list[str]:
    capsys.readouterr()
    show_plan(job, verbose)
    # The figures of the file, since nothing was measured.
    cluster = replace(job.run.cluster, name="measured")
    screen = Screen(job, verbose)
    if not verbose:  # the words of MFU ask the ranks
        screen.started(predict(job.run, cluster).reports[0], cluster, 0)
    screen.detail("attention: a kernel")
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("model", "over"),
    [
        (None, {"train": {"prompt": "def ", "target_loss": 2.1}}),
        (None, {"plan": PIPELINE}),
        (None, {"plan": {"preset": "three-level-compressed"}}),
        (None, {"cluster": {"device": {"backend": "cuda"}}, "train": {"compile": False}}),
        (MIXTURE, {"plan": EXPERTS}),
    ],
    ids=["make train", "pipeline", "compressed", "cuda", "experts"],
)
def test_a_run_starts_in_ten_lines_of_80_columns(
    model: Any,
    over: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = job_of(tmp_path, monkeypatch, model, **over)
    lines = start(job, capsys)
    news = [line for line in lines if not line.startswith("warning: ")]
    assert len(news) + OF_RANKS <= 10, lines
    # Names of files may be long.
    assert [line for line in news if len(line) > 80 and "text.txt" not in line] == []
    assert any(line.startswith(f"plan {job.run.plan.name} on cluster local: 8 ranks") for line in lines)
    assert any(" a rank; sends " in line for line in lines)
    assert lines[-1].startswith("predicted step: ") or lines[-2].startswith("predicted step: ")
    assert not any("attention: " in line for line in lines)
    told = start(job, capsys, verbose=True)
    assert len(told) > 25
    assert any("states placed here" in line for line in told)
    assert "attention: a kernel" in told


def test_a_run_on_loaded_weights_starts_in_ten_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = job_of(tmp_path, monkeypatch)
    run = job.run
    usual = replace(run.optimizer, lr=2e-5)
    loaded = replace(run, train=replace(run.train, weights="model"), optimizer=usual)
    # The text's long name has a line of its own.
    lines = [line for line in start(replace(job, run=loaded), capsys) if line.strip() != str(tmp_path / "text.txt")]
    assert "starts from the weights in model" in lines
    assert any(line.startswith("peak learning rate 2e-05, usual for loaded weights") for line in lines)
    of_tokenizer = 1  # which says the tokens around a text while the data are prepared
    assert len(lines) + OF_RANKS + of_tokenizer <= 10, lines
    # A rate that is too high is said in full.
    high = replace(loaded, optimizer=replace(usual, lr=2e-4))
    told = " ".join(" ".join(start(replace(job, run=high), capsys)).split())
    assert "10 times the usual 2e-05 for loaded weights under adamw, which may undo what they have learned" in told


def test_a_warning_stays_beside_the_line_of_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = job_of(tmp_path, monkeypatch, plan=ISLANDS, train={"steps": 20})
    said, told = (" ".join(" ".join(start(job, capsys, verbose)).split()) for verbose in (False, True))
    words = re.search(r"few exchanges in 20 steps.* lower outer\.momentum", told)
    assert words is not None
    assert words[0] in said


def test_sources_are_listed_for_those_who_ask_and_losses_of_documents_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "long.jsonl").write_text("".join(json.dumps({"text": "word " * n}) + "\n" for n in (3, 4, 5, 40)))
    long = {"path": "long.jsonl", "name": "long", "documents": "whole", "too_long": "drop"}
    mixture = [{"path": "text.txt", "name": "text"}, long]
    job = job_of(tmp_path, monkeypatch, data={"mixture": mixture})
    said, told = start(job, capsys), start(job, capsys, verbose=True)
    assert any("of 2 sources" in line for line in said)
    assert not any("% of the sequences" in line for line in said)
    assert sum("% of the sequences" in line for line in told) == 2
    assert "1 longer than a sequence" in " ".join(" ".join(said).split())


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("live", [True, False])
def test_progress_before_a_run_leaves_little(live: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = _Terminal() if live else io.StringIO()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("COLUMNS", "40")
    clock = iter(range(1000))
    with passing_lines(lambda: float(next(clock))) as progress:
        for second in range(1, 61):
            progress(Passing(f"tokenising: {second} M tokens" + " and more" * 9))
            if second == 30:
                progress("3 empty documents were left out")
    kept = re.split("\r\x1b\\[K|\n", screen.getvalue()) if live else screen.getvalue().splitlines()
    if live:
        # Each in place of the one before, none wider than the terminal, and the last is erased.
        assert max(map(len, kept)) <= 39
        assert kept[-1] == ""
        assert sum(each.startswith("tokenising") for each in kept) == 60
        assert "3 empty documents were left out\n" in screen.getvalue()
    else:
        assert [line.split()[1] for line in kept] == ["5", "15", "empty", "45"]


def test_a_run_ends_with_commands_that_suit_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(tmp_path, monkeypatch, train={"prompt": "it's"})
    folder = job.folder
    assert next_commands(job) == (f"terrace report {folder}", f"""terrace generate {folder} --prompt 'it'"'"'s'""")
    spaced = replace(job, folder=Path("my runs/a"), run=replace(job.run, train=replace(job.run.train, prompt="x\n")))
    assert next_commands(spaced) == (
        "terrace report 'my runs/a'",
        "terrace generate 'my runs/a' --prompt 'The '",
    )
    scored = replace(job, run=replace(job.run, model=replace(job.run.model, scalar_head=True)))
    assert next_commands(scored)[1] == f"terrace export {folder} {folder}-model"
    chats = tmp_path / "chats.jsonl"
    chats.write_text(
        json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
    )
    data = replace(job.run.data, path=str(chats), format="chat")
    chat = replace(job, run=replace(job.run, data=data, train=replace(job.run.train, prompt=None)))
    assert next_commands(chat)[1] == f"terrace generate {folder} --chat --prompt Hello"
