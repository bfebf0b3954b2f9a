"""`terrace train` from end to end, as a user runs it: on a tiny model, a tiny text and small worlds."""

import json
import os
import re
import shutil
import signal
import subprocess
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import tomli_w

from terrace.cli.main import main
from terrace.train.metrics import MetricsFile, StepRecord, read_metrics
from tests.support.command_line import torchrun
from tests.support.folders import bytes_of
from tests.support.nightly import nightly
from tests.support.tiny_runs import (
    all_gone,
    descendants,
    losses,
    metrics,
    one_line,
    started,
    terrace,
    wait_for_step,
    write_run,
)

pytestmark = pytest.mark.timeout(500)
ENDED = "ended by SIGTERM"
# Weights grow by their decay, by a factor of 10^12 a step.
GROWING = "--optimizer.lr 1e6 --optimizer.weight_decay 1e6 --optimizer.clip 0 --train.warmup_steps 0"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the output of a run of twelve steps on three tiers."""
    folder = tmp_path_factory.mktemp("trained")
    write_run(folder, 2, 2, steps=12, checkpoint_every=4, log_every=4, prompt="The fox", target_loss=5.4)
    done = terrace("train", "--config", "run.toml", "--folder", "run", cwd=folder)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    return folder / "run", done.stdout


def test_a_run_says_what_it_does(trained: tuple[Path, str]) -> None:
    _, said = trained
    for words in (
        "llama decoder, 0.01 M parameters in 4 blocks",
        "12 steps of 8 sequences x 16 tokens, 2 micro-batches of 1 per rank",
        "plan three-level on cluster test: 4 ranks",
        "predicted step: ",
        "predicted and measured",
        "the model continues the prompt",
        "final loss ",
        ", below the target 5.4",
    ):
        assert words in said
    # With constants measured here, so the rows of probed CPUs are its own.
    assert re.search(r"^predicted step: [\d.]+ \w+ \+-\d+ %, at [\d.]+ \wFLOP/s per rank as measured here$", said, re.M)
    # On a busy machine a line may say that a rank is slow: "step 8: ...".
    shown = re.findall(r"^step +(\d+/\d+) ", said, re.M)
    assert shown == ["1/12", "4/12", "8/12", "12/12"]
    assert re.findall(r"^saved run/checkpoints/step-0*(\d+)$", said, re.M) == ["0", "4", "8", "12"]
    assert "DIFFER" not in said.upper()
    # Ten lines before the first loss, and a machine with other jobs may be told of a faster plan.
    start = said.partition("\nstep  1/12 ")[0].splitlines()
    assert len([line for line in start if not line.startswith("warning: ")]) <= 10
    assert said.endswith("\nnext: terrace report run\n      terrace generate run --prompt 'The fox'\n")


def test_a_run_leaves_its_folder(trained: tuple[Path, str]) -> None:
    run, _ = trained
    assert sorted(os.listdir(run)) == [
        ".lock",
        "checkpoints",
        "config.toml",
        "events.jsonl",
        "loss.svg",
        "metrics.jsonl",
        "prediction.json",
        "report.json",
        "sample.txt",
    ]
    assert sorted(os.listdir(run / "checkpoints")) == ["step-00000008", "step-00000012"]
    lines = metrics(run)
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert all(line["num_tokens"] == 8 * 16 and line["step_s"] > 0 for line in lines)
    assert all(sum(line["time_s"].values()) == pytest.approx(line["step_s"]) for line in lines)
    fall = losses(run)
    assert fall[-1] < fall[0] - 0.3
    report = json.loads((run / "report.json").read_text())
    assert report["predicted"]["sent_bytes"] == report["measured"]["sent_bytes"]
    assert report["predicted"]["memory_bytes"].keys() == report["measured"]["memory_bytes"].keys()
    assert sum(report["measured"]["sent_bytes"].values()) > 0
    assert report["final_loss"] == pytest.approx(fall[-1])
    assert [each["folder"] for each in report["saves"]] == [f"step-{step:08d}" for step in (0, 4, 8, 12)]
    file = (run / "checkpoints" / "step-00000012" / "rank-00000.safetensors").read_bytes()
    staged = len(file) - 8 - int.from_bytes(file[:8], "little")
    assert all(each["num_bytes"] == staged and 0 < each["stalled_s"] < each["write_s"] + 60 for each in report["saves"])
    picture = ElementTree.parse(run / "loss.svg").getroot()
    assert picture.tag.endswith("svg")
    assert (run / "sample.txt").read_text().startswith("The fox")


def test_generate_prints_the_same_text_from_anywhere(
    trained: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def text(*words: str) -> str:
        assert main(["generate", str(trained[0]), "--prompt", "The ", "--tokens", "20", *words]) == 0
        return capsys.readouterr().out

    first, greedy = text(), text("--temperature", "0")
    assert first.startswith("The ")
    assert len(first) > 8
    assert first == text() != greedy
    assert text("--temperature", "1e-6", "--seed", "9") == greedy
    assert len(text("--prompt", "")) > 4


def test_explain_prints_the_program_and_verifies_it(
    trained: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--view", "program", "--config", str(trained[0] / "config.toml"), "--lines", "5"]) == 0
    said = capsys.readouterr().out
    assert "plan three-level on cluster test: 4 ranks" in said
    assert "GATHER" in said
    assert "verified: " in said


def test_a_run_under_another_plan_and_world_resumes(trained: tuple[Path, str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained[0], run)
    shutil.rmtree(run / "checkpoints" / "step-00000012")
    (run / "sample.txt").unlink()
    words = ("--cluster.tiers.node.size", "1", "--plan.preset", "ddp", "--train.target_loss", "0.5")
    (elsewhere := tmp_path / "elsewhere").mkdir()  # the run's own file finds its data from any working directory
    done = terrace("train", "--resume", "../run", *words, cwd=elsewhere)
    assert "resuming after step " in done.stdout
    assert os.listdir(elsewhere) == []
    # The target is out of reach: everything is there all the same, and one line says so.
    assert "is not below the target 0.5" in one_line(done.stderr)
    assert done.returncode == 1
    assert "plan ddp on cluster test: 2 ranks" in done.stdout
    assert losses(run) == pytest.approx(losses(trained[0]), abs=1e-4)
    assert losses(run)[:8] == losses(trained[0])[:8]
    assert {"loss.svg", "report.json", "sample.txt"} <= set(os.listdir(run))


def train_under_torchrun(folder: Path, num_ranks: int) -> "subprocess.CompletedProcess[str]":
    words = ("-m", "terrace", "train", "--config", "run.toml", "--folder", "run")
    return torchrun(num_ranks, *words, cwd=folder, timeout_s=450.0)


@pytest.mark.nightly  # docs/training.md runs under torchrun, too
def test_torchrun_trains_the_same(trained: tuple[Path, str], tmp_path: Path) -> None:
    write_run(tmp_path, 2, 2, steps=12)
    done = train_under_torchrun(tmp_path, 4)
    assert done.returncode == 0, done.stderr
    assert "4 ranks under torchrun, backend " in done.stdout
    assert done.stdout.count("final loss") == done.stdout.count("predicted and measured") == 1
    if "backend gloo" in done.stdout:
        assert losses(tmp_path / "run") == losses(trained[0])


@pytest.mark.nightly
def test_torchrun_with_another_number_of_ranks_is_told_once(tmp_path: Path) -> None:
    write_run(tmp_path, 2, 4)
    done = train_under_torchrun(tmp_path, 2)
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if "terrace: error:" in line]
    assert len(said) == 1, done.stderr
    assert "2 ranks were started, but cluster 'test' has 8: start 8, or resize a tier" in said[0]
    assert "Traceback (most recent call last):\n  File" not in done.stderr.split("terrace: error:")[0]
    assert not (tmp_path / "run").exists()


def test_json_lines_and_a_tokenizer_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="needs the package tokenizers")
    write_run(tmp_path, 2, steps=2)
    text = (tmp_path / "text.txt").read_text()
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in text.splitlines()))
    encoder = tokenizers.Tokenizer(tokenizers.models.BPE())
    encoder.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    encoder.train_from_iterator([text], trainer)
    encoder.save(str(tmp_path / "tokenizer.json"))
    words = ["--data", "text.jsonl", "--data.tokenizer", "tokenizer.json", "--folder", "run"]
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--config", "run.toml", *words]) == 2
    assert "give the model a vocab_size of at least" in one_line(capsys.readouterr().err)
    done = terrace("train", "--config", "run.toml", *words, "--model.vocab_size", "300", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("saved ") == 2
    assert main(["generate", "run", "--prompt", "The fox", "--tokens", "9"]) == 0
    assert capsys.readouterr().out.startswith("The fox")


def test_a_compressed_run_measures_its_rounding_and_a_resume_has_a_budget_of_it(tmp_path: Path) -> None:
    write_run(tmp_path, 2, 1, 2, plan="three-level-compressed", steps=3)
    done = terrace("train", "--config", "run.toml", "--folder", "run", "--verbose", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "bytes one rank sends in a step" in done.stdout.partition("predicted step: ")[0]
    assert "attention: " in done.stdout
    assert "messages travel in fp32, but reduce int4 on node, sync int4+feedback on system" in done.stdout
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    for record in records:
        assert record.quantisation_error.keys() == {"sync", "refresh"}
        assert 0.01 < record.quantisation_error["sync"] < 0.3
        assert 0.001 < record.quantisation_error["refresh"] < 0.02
    said = done.stdout[done.stdout.index("relative rounding error") :].splitlines()[0]
    assert f"sync {records[-1].quantisation_error['sync']:.3g}" in said
    budget = ("--train.error_budget.refresh", "1e-4", "--train.error_budget.sync", "0.9")
    again = terrace("train", "--resume", "run", "--train.steps", "6", *budget, cwd=tmp_path)
    assert again.returncode == 1
    said = one_line(again.stderr)
    assert "step 4: the relative rounding error of refresh messages since the step before is 0.00" in said
    assert "above train.error_budget.refresh = 0.0001: use a wider wire format" in said
    assert len(losses(tmp_path / "run")) == 4


def test_a_bad_pace_is_refused_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERRACE_PACE", "garbage")
    write_run(tmp_path, 2, plan="ddp")
    done = terrace("train", "--config", "run.toml", "--folder", "run", cwd=tmp_path)
    assert done.returncode == 2
    assert "TERRACE_PACE='garbage' must be a number above 0" in one_line(done.stderr)
    assert not (tmp_path / "run").exists()


def test_a_run_on_a_probed_cluster_is_predicted_from_its_file(tmp_path: Path) -> None:
    write_run(tmp_path, 1, plan="zero3", steps=14, batch=2)
    cluster = tmp_path / "cluster.toml"
    table = tomllib.loads(cluster.read_text())
    table["device"] |= {"source": "a probe", "marks": {"kernels.gemm": "fitted"}}
    table["device"]["peak_flops_per_s"]["fp32"] = 7e3  # so slow that no other figure matters
    cluster.write_text(tomli_w.dumps(table))
    done = terrace("train", "--config", "run.toml", "--folder", "run", "--verbose", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "as the cluster's file says, by a probe: 7 kFLOP/s per rank in large products" in done.stdout
    predicted = json.loads((tmp_path / "run" / "report.json").read_text())["predicted"]["time_s"]
    assert predicted["forward"] + predicted["backward"] > 100
    assert "predicted step time +" in done.stdout
    judged = "other programs took" not in done.stdout  # beside others there is no verdict
    assert ("OUTSIDE its limit of 20 %" in done.stdout) == judged
    assert not judged or re.search(r"most is missed of '(for|back)ward': .* probe again; terrace rep", done.stdout)


def test_a_paced_run_takes_as_long_as_its_links_say_and_is_predicted_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes that one rank sends in a step over the slowed tier, at its rate, bound every step from below.

    The file has the probed rate, which is twice that of the pace, and `rehearse run --paced` becomes this command.
    """
    write_run(tmp_path, 1, 2, plan="ddp", steps=3)
    cluster, rate = tmp_path / "cluster.toml", 2e5
    table = tomllib.loads(cluster.read_text())
    table["device"] |= {"source": "a probe", "marks": {"kernels.gemm": "fitted"}}
    table["tiers"][1] |= {"bandwidth_bytes_per_s": rate / 0.5, "latency_s": 0.0}
    cluster.write_text(tomli_w.dumps(table))
    monkeypatch.setenv("TERRACE_PACE", "0.5")
    done = terrace("train", "--config", "run.toml", "--folder", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "as measured here" in done.stdout
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    least_s = report["measured"]["sent_bytes"]["sync.node"] / rate
    assert least_s > 0.1, "the links are slow enough to tell"
    assert all(record.step_s > least_s for record in read_metrics(tmp_path / "run" / "metrics.jsonl"))
    assert sum(report["predicted"]["time_s"].values()) > least_s


def test_a_loss_that_is_not_a_number_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, 1, plan="ddp", steps=40, checkpoint_every=1, keep_checkpoints=50)
    done = terrace("train", "--config", "run.toml", "--folder", "run", *GROWING.split(), cwd=tmp_path)
    assert done.returncode == 1
    assert "The run cannot go on; to see the step block by block: terrace replay" in one_line(done.stderr)
    saved = sorted(os.listdir(tmp_path / "run" / "checkpoints"))
    assert len(saved) == len(losses(tmp_path / "run")) - 1  # none after the bad step
    number, before = len(losses(tmp_path / "run")), bytes_of(tmp_path / "run")
    monkeypatch.chdir(tmp_path)

    def replayed(step: int) -> str:
        assert main(["replay", "run", "--step", str(step)]) == 0
        return capsys.readouterr().out

    again = replayed(number)
    first = next(line for line in again.splitlines() if line.startswith("first: "))
    assert first.removeprefix("first: ") in done.stderr
    assert again.count("nan") + again.count("inf") > 1
    assert bytes_of(tmp_path / "run") == before, "replay only reads the run folder"
    well = replayed(1)
    assert "All results are finite." in well
    figures = next(line for line in well.splitlines() if line.startswith("step 1: loss "))
    now, then = (re.findall(r"[\d.]+", part) for part in figures.removeprefix("step 1: ").split("; in the run "))
    assert now == then == [f"{losses(tmp_path / 'run')[0]:.6g}", now[1]]
    assert "from its initial values" in well
    assert main(["replay", "run", "--step", "41"]) == 2
    assert "--step 41: the run has steps 1 to 40" in one_line(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [("SIGTERM", 143, ENDED), *nightly(("SIGINT", 130, "interrupted"), ("SIGTERM to all", 143, ENDED))],
)
def test_a_signal_ends_a_run_in_order(tmp_path: Path, how: str, code: int, said: str) -> None:
    """Having saved after its last step. A job may send the signal to every process of it."""
    write_run(tmp_path, 2, steps=100_000)
    with started("train", "--config", "run.toml", "--folder", "run", cwd=tmp_path, cold="all" in how) as process:
        wait_for_step(tmp_path / "run", 5)
        family = descendants(process.pid)
        assert len(family) >= 2
        for pid in (process.pid, *(family if "all" in how else ())):
            os.kill(pid, signal.Signals[how.split()[0]])
        _, errors = process.communicate(timeout=120)
        assert process.returncode == code
        assert errors == f"terrace: {said}; saved checkpoints are complete; to go on: terrace train --resume run\n"
        assert all_gone(family)
    last = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1].step
    assert last >= 5
    assert os.listdir(tmp_path / "run" / "checkpoints") == [f"step-{last:08d}"]


def test_an_output_that_nobody_reads_ends_a_run_in_one_line(tmp_path: Path) -> None:
    write_run(tmp_path, 2, steps=100_000, log_every=1)
    with started("train", "--config", "run.toml", "--folder", "run", cwd=tmp_path) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        family = descendants(process.pid)
        wait_for_step(tmp_path / "run", 1)
        family |= descendants(process.pid)
        process.stdout.close()
        assert "reader is gone" in one_line(process.stderr.read())
        assert process.wait(30) == 1
        assert all_gone(family)


def test_a_metrics_file_survives_a_crash(tmp_path: Path) -> None:
    def record(step: int) -> StepRecord:
        return StepRecord(
            step=step, loss=1.0, grad_norm=1.0, learning_rate=1.0, num_tokens=1, step_s=1.0, tokens_per_s=1.0, time_s={}
        )

    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    for step in (1, 2, 3):
        file.write(record(step))
    file.close()
    whole = path.read_bytes()
    for tail in (b'{"step": 4, "lo', b"\xff\xfe", b"\n", b"{}\n", b"\0\0\0\0"):
        path.write_bytes(whole + tail)
        assert [line.step for line in read_metrics(path)] == [1, 2, 3]
    file = MetricsFile(path, 2)
    file.write(record(3))
    file.close()
    assert path.read_bytes() == whole
