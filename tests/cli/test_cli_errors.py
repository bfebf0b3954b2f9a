"""Bad input: one line on stderr, the right exit code, no traceback, nothing half-written, no rank started."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from terrace.checkpoint.layout import decode, encode
from terrace.cli import worker
from terrace.train.job import RunJob
from terrace.train.run_folder import folder_lock
from tests.support.command_line import CommandLine, Said, leave_launcher
from tests.support.tiny_runs import environment, one_line, terrace, write_run

pytestmark = pytest.mark.timeout(360)


class Here(CommandLine):
    """A folder with a tiny run, and the command line called in this process without starting ranks."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        super().__init__(folder, capsys)
        self.config, self.started = write_run(folder, 2, 2), 0
        self.job: RunJob | None = None  # of the start

    def say(self, *words: str | Path) -> Said:
        return self.call(*words)

    def refused(self, *words: str | Path, code: int = 2) -> str:
        """The one line of a refusal; nothing may have been started or written but the token cache."""
        line = self.refusal(*words, code=code)
        assert self.started == 0
        return line

    def train_refused(self, *words: str | Path) -> str:
        return self.refused("train", "--config", self.config, *words)


@pytest.fixture
def here(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Here:
    place = Here(tmp_path, capsys)

    def launch(_world_size: int, _target: object, arguments: tuple[RunJob], **_: object) -> None:
        place.started += 1
        place.job = arguments[0]

    monkeypatch.setattr(worker, "launch_local", launch)
    monkeypatch.chdir(tmp_path)
    leave_launcher(monkeypatch)
    return place


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder after two of four steps, on two ranks, with its text beside it."""
    folder = tmp_path_factory.mktemp("trained")
    write_run(folder, 2, steps=2, batch=4)
    done = terrace("train", "--config", "run.toml", "--folder", "run", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def resumable(here: Here, trained: Path) -> Path:
    """That run folder, to be damaged."""
    shutil.copytree(trained / "run", here.folder / "run")
    return here.folder / "run"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--plan", "zero9"), "no plan preset or file 'zero9'; did you mean 'zero"),
        (("--cluster", "dgx-h10"), "no cluster preset or file 'dgx-h10'; did you mean 'dgx-h100'?"),
        (("--model", "nowhere"), "cannot read nowhere: No such file or directory"),
        (("--cluster.tiers.sytem.size", "2"), "unknown name 'sytem' in tiers; known: node, package"),
        (("--train.stepz", "5"), "unknown key train.stepz; did you mean 'train.steps'?"),
        (("--train.steps", "x"), "train.steps = 'x' must be of type int"),
        (("--train.steps",), "--train.steps needs a value: write --train.steps VALUE"),
        (("--plan",), "argument --plan: expected one argument; see terrace train --help"),
        (("--pla", "ddp"), "unknown argument '--pla'"),
        (("more",), "unknown argument 'more'"),
        (("--plan.mapping.node.data", "3"), "the degrees of mapping.node multiply to 3, but tier 'node' joins 2"),
        (("--plan.params", "node", "--plan.grads", "package"), "'node' lies outside grads = 'package'"),
        (("--train.batch", "6"), "batch = 6 is not a multiple of micro_batch x data ranks = 1 x 4 = 4: use 4 or 8"),
        (
            ("--cluster.tiers.node.size", "1000", "--train.batch", "2000"),
            "has 2000 ranks, and one machine starts at most 64",
        ),
        (("--cluster.device.memory_bytes", "1e4"), "memory"),
        (("--plan", "ddp", "--plan.prefetch", "2"), "plan.prefetch = 2 has no effect"),
        (("--train.sequence", "100000"), "tokens, but one sample of sequence 100000 takes 100001"),
        (("--model.vocab_size", "50"), "but the model's vocab_size is 50"),
        (("--data", "nowhere.txt"), "nowhere.txt"),
        (("--data", "config.json.gz"), "config.json.gz"),
        (("--data.tokenizer", "nowhere"), "nowhere"),
        (("--data.cache", "text.txt"), "text.txt"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_bad_argument_is_one_line(here: Here, words: tuple[str, ...], said: str) -> None:
    assert said in here.train_refused(*words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("trian",), "there is no command 'trian'; did you mean 'train'?"),
        (("simulate", "--lines", "x"), "argument --lines: invalid int value: 'x'"),
        (("simulate", "--plan", "zero9"), "no plan preset"),
        (("generate",), "the following arguments are required: FOLDER"),
        (("generate", "nowhere"), "--prompt TEXT is missing: give the text to continue"),
        (
            ("generate", "nowhere", "--prompt", "a"),
            "nowhere is neither a run folder (config.toml) nor a Hugging Face folder",
        ),
        (("generate", "nowhere", "--temperature", "nan"), "--temperature nan must be at least 0"),
        (("generate", "nowhere", "--tokens", "0"), "--tokens 0 must be at least 1"),
        (("generate", "nowhere", "--seed", str(2**70)), "below 2^63"),
        (("generate", "nowhere", "--top-p", "0"), "--top-p 0.0 must be above 0"),
        (("generate", "nowhere", "--min-p", "1.5"), "--min-p 1.5 must be at least 0, which keeps all, and at most 1"),
        (("generate", "nowhere", "--prompt", "a", "--device", "abacus"), "--device abacus cannot be used"),
        (("generate", "nowhere", "--what", "5"), "unknown argument '--what'"),
        (("train", "--resume", "nowhere"), "nowhere is not a run folder: it has no config.toml"),
        (("train", "--resume", "nowhere", "--data", "x"), "leave out --data"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_bad_command_is_one_line(here: Here, words: tuple[str, ...], said: str) -> None:
    assert said in here.refused(*words)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"  \n \n", "holds no text"),
        (b"caf\xe9 au lait\n", "is not UTF-8"),
        (b"short", "tokens, but one sample of sequence 16 takes 17"),
    ],
    ids=["empty", "blank", "latin-1", "short"],
)
def test_bad_text_is_refused(here: Here, content: bytes, said: str) -> None:
    (here.folder / "text.txt").write_bytes(content)
    assert said in here.train_refused()
    assert not list(here.folder.glob("cache/.*")), "a half-written token file"


def test_unreadable_data_is_refused(here: Here) -> None:
    (here.folder / "loop.txt").symlink_to("loop.txt")
    assert "loop.txt" in here.train_refused("--data", "loop.txt")
    if os.geteuid() == 0:
        pytest.skip("root reads every file: only the link to itself was tried, not a file without permission")
    (here.folder / "text.txt").chmod(0)
    assert "Permission denied" in here.train_refused()


def test_run_folders_that_cannot_be_used_are_refused(here: Here) -> None:
    (here.folder / "full").mkdir()
    (here.folder / "full" / "thesis.tex").write_text("irreplaceable")
    assert "--folder full is not empty: name a new folder" in here.train_refused("--folder", "full")
    assert "--folder text.txt is a file: name a new folder" in here.train_refused("--folder", "text.txt")
    assert "cannot use text.txt/run as run folder" in here.train_refused("--folder", "text.txt/run")
    assert "cannot use /proc/run as run folder" in here.train_refused("--folder", "/proc/run")


def test_a_disk_without_room_is_refused(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 50_000, 50_000))
    words = ("--folder", "new/run", "--train.checkpoint_every", "1")
    assert "50 kB free, but a checkpoint takes " in here.train_refused(*words)
    assert not (here.folder / "new").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_disk_that_fills_up_is_refused(here: Here) -> None:
    disk = here.folder / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], check=False).returncode:
        pytest.skip("this machine does not let root mount a small disk")
    try:
        text = here.folder / "text.txt"  # more than the disk holds, and tokenised at once: no line of progress
        text.write_text("some words " * 20_000)
        said = here.train_refused("--data.path", text, "--data.cache", disk / "cache")
        assert "No space left on device; stopped after" in said
        assert not list((disk / "cache").iterdir())
        assert " free, but a checkpoint takes " in here.train_refused("--folder", disk / "run")
    finally:
        subprocess.run(["umount", disk], check=True)


def test_run_folders_of_one_second_differ(here: Here) -> None:
    for _ in range(3):
        assert here.say("train", "--config", here.config).code == 0
    runs = sorted((here.folder / "runs").iterdir())
    assert len(runs) == here.started == 3
    assert all((run / "config.toml").read_text().count("\n[model]\n") == 1 for run in runs)


def test_resume_refuses_what_would_not_be_the_same_run(here: Here, resumable: Path) -> None:
    def refused(*words: str | Path) -> str:
        return here.refused("train", "--resume", resumable, "--train.steps", "4", *words)

    assert "after step 2 of 2, so nothing is left to train" in here.refused("train", "--resume", resumable)
    assert "was made with seed = 0, now it is 1" in refused("--train.seed", "1")
    assert "was made with batch = 4, now it is 8" in refused("--train.batch", "8")
    assert "was made with sequence = 16, now it is 8" in refused("--train.sequence", "8")
    (here.folder / "other.txt").write_text("another text, long enough for one sample")
    assert "was made with data = " in refused("--data.path", here.folder / "other.txt")
    assert "was made with model.rms_norm_eps = 1e-05, now it is 0.001" in refused("--model.rms_norm_eps", "1e-3")
    assert "embedding.weight is adamw [257, 16] there" in refused("--model.hidden_size", "32")
    assert "head.norm.weight is adamw [16] there and frozen [16] here" in refused("--train.freeze", '["head.*"]')
    assert "leave out --folder" in refused("--folder", "new")
    same = ("--plan.compute", "fp32", "--plan.micro_batch", "1", "--plan.unit", "1")
    said = here.say("train", "--resume", resumable, "--train.steps", "4", "--plan.preset", "zero3", *same)
    assert (said.code, here.started) == (0, 1), said.error
    # Rank 0 replaces the file, once the ranks are ready.
    assert 'name = "zero3"' not in (resumable / "config.toml").read_text()
    assert here.job is not None
    assert 'name = "zero3"' in here.job.config
    assert here.job.changes == ("train.steps 2 -> 4", "plan.name three-level -> zero3")


def test_a_resumed_run_of_epochs_is_refused_in_their_words(here: Here, resumable: Path) -> None:
    said = here.say("train", "--resume", resumable, "--train.epochs", "0.001")
    assert (said.code, here.started) == (2, 0)
    assert "after step 2 of 1, so nothing is left to train: ask for more with --train.epochs N" in said.error
    # The steps in the file of a run follow from its epochs and batch: the batch that changed is named, not they.
    config = resumable / "config.toml"
    config.write_text(config.read_text().replace("\nsteps = 2\n", "\nsteps = 2\nepochs = 1.0\n"))
    said = here.say("train", "--resume", resumable, "--train.batch", "8")
    assert (said.code, here.started) == (2, 0)
    assert "was made with batch = 4, now it is 8" in said.error


@pytest.mark.parametrize(
    ("key", "stored", "now"), [("gate", "expert_choice", "'softmax'"), ("sliding_window", 8, "None")]
)
def test_resume_compares_keys_that_a_model_leaves_out(
    here: Here, resumable: Path, key: str, stored: object, now: str
) -> None:
    path = resumable / "checkpoints" / "step-00000002" / "manifest.json"
    manifest = decode(path.read_text())
    manifest["facts"]["model"][key] = stored
    path.write_text(encode(manifest))
    said = here.refused("train", "--resume", resumable, "--train.steps", "4")
    assert f"was made with model.{key} = {stored!r}, now it is {now}" in said


def test_a_start_in_a_held_folder_leaves_its_configuration_alone(
    here: Here, resumable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first checkpoint as after it: a requeued job with an edited file finds the folder held."""
    monkeypatch.setattr("terrace.train.run_folder._WAIT_S", 0.0)
    before = (resumable / "config.toml").read_text()
    words = ("train", "--config", resumable / "config.toml", "--folder", resumable, "--resume", "auto")
    for _ in range(2):
        with folder_lock(resumable):
            line = here.refused(*words, "--train.steps", "9", "--optimizer.lr", "0.5")
        assert f"another run is writing in {resumable}" in line
        assert (resumable / "config.toml").read_text() == before
        shutil.rmtree(resumable / "checkpoints", ignore_errors=True)


def test_resume_refuses_a_text_that_changed(here: Here, resumable: Path, trained: Path) -> None:
    text = trained / "text.txt"
    before = text.read_bytes()
    try:
        text.write_bytes(before + b"one more line\n")
        said = here.refused("train", "--resume", resumable, "--train.steps", "4")
        assert "was made with data = " in said
        text.unlink()
        said = here.refused("train", "--resume", resumable, "--train.steps", "4")
        assert str(text) in said
    finally:
        text.write_bytes(before)


@pytest.mark.parametrize("what", ["flipped byte", "short", "missing", "manifest", "no manifest", "digit", "piece"])
def test_resume_and_generate_refuse_a_damaged_checkpoint(here: Here, resumable: Path, what: str) -> None:
    folder = resumable / "checkpoints" / "step-00000002"
    manifest, file = folder / "manifest.json", folder / "rank-00001.safetensors"
    raw = bytearray(file.read_bytes())
    if what == "flipped byte":
        raw[-5] ^= 1
        file.write_bytes(raw)
    elif what == "short":
        file.write_bytes(raw[:-7])
    elif what == "missing":
        file.unlink()
    elif what == "manifest":
        manifest.write_text(manifest.read_text()[:-20])
    elif what == "no manifest":
        manifest.unlink()
    elif what == "digit":
        manifest.write_text(manifest.read_text().replace('"num_updates": 2', '"num_updates": 3'))
    else:
        table = decode(manifest.read_text())
        table["files"].pop(file.name)
        manifest.write_text(encode(table))
    expected = {
        "flipped byte": f"{file} is damaged (its checksum differs)",
        "short": f"{file} has {len(raw) - 7} bytes instead of {len(raw)}",
        "missing": f"{file} is missing",
        "manifest": f"{manifest} is damaged (",
        "no manifest": f"cannot read {manifest}",
        "digit": f"{manifest} is damaged (its checksum differs)",
        "piece": f"{folder} lacks elements ",
    }[what]
    for words in (("train", "--resume", resumable, "--train.steps", "4"), ("generate", resumable, "--prompt", "a")):
        assert expected in here.refused(*words)


def test_a_foreign_checkpoint_format_is_named(here: Here, resumable: Path) -> None:
    manifest = resumable / "checkpoints" / "step-00000002" / "manifest.json"
    manifest.write_text(json.dumps({"format": 99}))
    assert "has format 99, but this version of Terrace reads formats 2 and 3" in here.refused(
        "generate", resumable, "--prompt", "a"
    )


def test_the_program_prints_one_line_too(tmp_path: Path) -> None:
    write_run(tmp_path, 2, 2)
    done = terrace("train", "--config", "run.toml", "--train.batch", "5", cwd=tmp_path)
    assert "batch = 5 is not a multiple" in one_line(done.stderr)
    assert (done.returncode, done.stdout) == (2, "")
    assert not (tmp_path / "runs").exists()


def test_a_closed_pipe_ends_quietly(tmp_path: Path) -> None:
    words = "simulate --view program --plan zero3"
    command = f"{shlex.quote(sys.executable)} -m terrace {words} | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] in ("0", "141")  # 0 when all fitted into the pipe first


def test_any_terminal_encoding_will_do(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "terrace", "simulate", "--view", "program", "--lines", "3"],
        cwd=tmp_path,
        env={**environment(), "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_run_goes_on_by_itself_only_when_it_is_told_to(
    here: Here, resumable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("train", "--config", resumable / "config.toml", "--train.steps", "4")
    again = (*words, "--folder", resumable)
    assert "is not empty: name a new folder, or resume with --resume" in here.refused(*again)
    assert "--resume auto needs a folder: give --folder" in here.refused(*words, "--resume", "auto")
    damaged = resumable / "checkpoints" / "step-00000003"
    damaged.mkdir()
    said = here.say(*again, "--resume", "auto")
    assert (said.code, here.started) == (0, 1), said.error
    newest = resumable / "checkpoints" / "step-00000002"
    assert f"resuming from {newest}, since cannot read {damaged / 'manifest.json'}" in said.out
    for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.setenv(name, "1")
        assert here.say(*again).code == 0
        monkeypatch.setenv(name, "0")
        assert here.say(*again).code == 2
    assert here.started == 3
    said = here.say(*again, "--train.steps", "2", "--resume", "auto")
    assert (said.code, here.started) == (0, 3), said.error
    assert "is after step 2 of 2, so nothing is left to train" in said.out
    fresh = here.say(*words, "--folder", here.folder / "fresh", "--resume", "auto")
    assert (fresh.code, here.started) == (0, 4), fresh.error
    begun = here.say(*words, "--folder", here.folder / "fresh", "--resume", "auto")  # ended before it saved anything
    assert (begun.code, here.started) == (0, 5), begun.error


def test_a_cluster_of_other_machines_is_refused_and_rehearsed(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ("--cluster.tiers.node.size", "8", "--train.batch", "16")
    words = ("--folder", "run", "--cluster.device.backend", "cuda", *sizes)
    assert "16 ranks with a CUDA device each" in here.train_refused(*words)
    monkeypatch.setenv("TERRACE_PACE", "0.5")
    assert here.say("train", "--config", here.config, *words).code == 0
    assert here.started == 1
