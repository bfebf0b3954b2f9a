"""A run of `terrace rl` is a run as any: known by what it reads, stopped by signals, a model for every command."""

import gc
import json
import os
import shutil
import signal
import tempfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from terrace.checkpoint.layout import complete
from terrace.checkpoint.writing import clear_leftovers
from terrace.rl.commands import run as rl_run
from terrace.rl.sort_task import SortTokenizer
from terrace.rl.stream.saved import clear_states, state_file
from tests.chaos import feedback
from tests.chaos.feedback import KINDS, MODEL
from tests.support.command_line import CommandLine, leave_launcher, own_modules
from tests.support.hf_folder import write_model
from tests.support.nightly import nightly
from tests.support.rl_runs import write_own
from tests.support.tiny_runs import metrics, started, terrace, wait_for_step

ALONE = [word for name in ("package", "node", "system") for word in (f"--cluster.tiers.{name}.size", 1)]
TINY = ["--plan", "ddp", "--plan.micro_batch", 4, "--run.rows", 1, "--model.hidden_size", 16]
TINY += ["--model.intermediate_size", 16, "--model.num_hidden_layers", 1, "--run.prompts", 2, "--run.responses", 2]
TINY += ["--run.mini_batch", 4, "--run.start_steps", 0, "--run.evaluate_every", 0]


@pytest.fixture
def here(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[CommandLine]:
    leave_launcher(monkeypatch)
    monkeypatch.chdir(tmp_path)
    with own_modules(tmp_path):
        yield CommandLine(tmp_path, capsys)


def test_what_a_run_depends_on_is_known_by_content(here: CommandLine) -> None:
    KINDS[0].write(here.folder / "files")
    files, rewards = here.folder / "files", here.folder / "my_rewards.py"
    shutil.move(files / "my_rewards.py", rewards)
    rewards.write_text(rewards.read_text() + "import helping\n")
    (here.folder / "helping.py").write_text("one = 1\n")
    made = here.call("rl", "--config", "files/run.toml", *ALONE, "--folder", "run", "--run.steps", 1)
    assert (made.code, made.error) == (0, ""), made.error

    def again(*words: object) -> str:
        return here.refusal("rl", "--resume", "run", *words)

    same = "is after step 1 of 1, so nothing is left to train"
    assert same in again()
    # Other names of the same content: a file written in another way, folders that have moved.
    prompts, lines = files / "prompts.jsonl", (files / "prompts.jsonl").read_text().splitlines()
    (here.folder / "moved.jsonl").write_text("\n\n".join(json.dumps(json.loads(line), indent=None) for line in lines))
    assert same in again("--run.prompts_file", "moved.jsonl")
    shutil.move(files / "model", here.folder / "model")
    assert same in again("--model", "model")
    shutil.copytree(here.folder / "run", here.folder / "elsewhere")
    assert same in here.refusal("rl", "--resume", "elsewhere", "--model", "model")
    shutil.move(here.folder / "model", files / "model")
    # The same names of other content.
    for changed in ([*lines[:2], lines[2].replace("quick", "slow"), *lines[3:]], lines[::-1], [*lines, lines[0]]):
        prompts.write_text("".join(f"{line}\n" for line in changed))
        assert "made with run.prompts_file = 'sha256-" in again()
    prompts.write_text("".join(f"{line}\n" for line in lines))
    for module in (rewards, here.folder / "helping.py"):
        text = module.read_text()
        module.write_text(text + "more = 2\n")
        assert "made with reward[0].function = 'near of sha256-" in again()
        module.write_text(text)
    # Another token ends a response.
    (files / "model" / "generation_config.json").write_text('{"eos_token_id": [0, 5]}')
    assert "made with ends = [0], now it is [0, 5], " in (said := again())
    assert "restore generation_config.json" in said
    (files / "model" / "generation_config.json").unlink()
    (files / "other").mkdir()
    write_model(files / "other", MODEL, seed=5)
    assert "made with weights = 'sha256-" in again("--model", "files/other")
    assert same in again()
    # A run in which every line stays the same goes on, and says which settings it has otherwise.
    more = here.call("rl", "--resume", "run", "--run.steps", 2)
    assert (more.code, more.error) == (0, "")
    assert "going on after step 1\nrun.steps 1 -> 2 since step 1" in more.out


def test_what_feedback_has_trained_is_a_model_for_every_command(here: CommandLine) -> None:
    words = ["--task", "sort", *ALONE, *TINY, "--run.steps", 2, "--run.checkpoint_every", 1, "--folder", "a"]
    words += ["--algorithm.importance_bound", 2]  # that of runs on servers
    said = here.call("rl", *words)
    assert (said.code, said.error) == (0, "")
    written = here.call("generate", "a", "--prompt", "3142>", "--tokens", 4, "--temperature", 0)
    assert (written.code, written.error) == (0, "")
    assert written.out.startswith("3142>")
    assert "the model after step 2 in fp32" in here.call("export", "a", "newest").out
    assert here.call("generate", "newest", "--prompt", "3142>", "--tokens", 4, "--temperature", 0).out == written.out
    assert "the model after step 1 in fp32" in here.call("export", "a", "first", "--step", 1).out
    assert "after step 2 in fp32, with the states of adamw" in here.call("export", "a", "dcp", "--format", "dcp").out
    assert "no checkpoint after step 7, but after 1, 2" in here.call("export", "a", "none", "--step", 7).error
    (here.folder / "text.txt").write_text("3142>1234")
    assert here.call("eval", "a", "--data", "text.txt").code == 0
    assert "no data with a loss per token: give --data" in here.refusal("eval", "a")
    assert "terrace rl: to go on: terrace rl --resume a" in here.refusal("train", "--resume", "a")
    assert "a is a run of terrace rl" in here.refusal("replay", "a", "--step", 1)
    # Nor does another command's --resume auto write over it.
    shutil.copytree(here.folder / "a", here.folder / "kept")
    (here.folder / "run.toml").write_text("[train]\nsteps = 1\n")
    over = here.refusal("train", "--config", "run.toml", "--folder", "kept", "--resume", "auto", "--ranks", 1)
    assert "terrace rl: to go on: terrace rl --resume kept" in over
    assert "is a run folder: make a model of it first" in here.refusal("train", "--model", "a")
    assert "that is a section of terrace rl" in here.refusal("train", "--config", "a/config.toml")
    (here.folder / "trained").mkdir()
    (here.folder / "trained" / "config.toml").write_text("[train]\nsteps = 1\n")
    assert "terrace train: to go on: terrace train --resume trained" in here.refusal("rl", "--resume", "trained")
    shutil.copytree(here.folder / "a", here.folder / "b")
    for folders in (["a"], ["a", "b"]):
        assert here.call("report", *folders).code == 0
    whole = here.call("rl", *words, "--resume", "auto")
    assert (whole.code, whole.error) == (0, "")
    assert "nothing is left to train" in whole.out
    # Servers are asked by what has steps left, and by nothing else.
    served = ["--resume", "a", "--rollout.engine", "http", "--rollout.urls", "http://127.0.0.1:1"]
    assert "nothing is left to train" in here.refusal("rl", *served)
    assert "Connection refused; start it first" in here.refusal("rl", *served, "--run.steps", 3)
    # A newest checkpoint that is damaged is said, and the one before it taken.
    newest = complete(here.folder / "a" / "actor" / "checkpoints")[-1]
    (newest / "manifest.json").write_text("{")
    went_on = here.call("rl", "--resume", "a", "--run.steps", 2)
    assert went_on.code == 0
    assert "resuming from a/actor/checkpoints/step-00000001, since" in went_on.out


def test_the_tokenizer_of_a_task_is_the_one_in_its_folder(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="a folder's tokenizer is read with it")
    own = SortTokenizer()
    (tmp_path / "tokenizer.json").write_bytes(own.files()["tokenizer.json"])
    found = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in ("0123456789>", "77>", ">"):
        assert found.encode(text).ids == own.encode(text).tolist()
        assert found.decode([*own.encode(text).tolist(), 11]) == own.decode([*own.encode(text).tolist(), 11]) == text


def test_only_what_a_run_wrote_is_removed(tmp_path: Path) -> None:
    stream, saves = tmp_path / "stream", tmp_path / "checkpoints"
    newest = state_file(stream, 4, 2)
    for name in ("notes", "step-00000001.1.safetensors"):
        (stream / name).mkdir(parents=True)
    own = [state_file(stream, updates, step) for updates, step in ((0, 0), (2, 1), (4, 1))]
    strangers = [stream / "step-00000001.txt", stream / "step-00000009", stream / "mine.safetensors"]
    for path in (newest, *own, *strangers):
        path.touch()
    (stream / "step-00000003.1.safetensors").symlink_to(newest)
    clear_states(newest, {2, 4})
    assert {path.name for path in stream.iterdir()} == {
        *(path.name for path in (newest, own[1], *strangers)),
        *("notes", "step-00000001.1.safetensors", "step-00000003.1.safetensors"),
    }
    for name in (".step-00000003.partial", ".step-00000003.0a1b.partial", ".step-00000002.removed", ".step-notes"):
        (saves / name).mkdir(parents=True)
    (saves / ".step-00000004.partial").write_text("a file of the user's")
    clear_leftovers(saves)
    assert {path.name for path in saves.iterdir()} == {".step-notes", ".step-00000004.partial"}


def test_strangers_in_the_folder_of_a_run_stay(here: CommandLine) -> None:
    words = ["--task", "sort", *ALONE, *TINY, "--run.checkpoint_every", 1, "--run.keep_checkpoints", 1]
    assert here.call("rl", *words, "--run.steps", 1, "--folder", "run").code == 0
    strangers = [here.folder / "run" / name for name in ("stream/notes/a.txt", "actor/checkpoints/step-00000000/a.txt")]
    strangers += [
        here.folder / "run" / name for name in ("stream/b.txt", "actor/checkpoints/.step-mine/c.txt", "d.txt")
    ]
    for path in strangers:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    assert here.call("rl", "--resume", "run", "--run.steps", 3).code == 0
    assert [path.read_text() for path in strangers] == ["mine"] * len(strangers)
    assert [path.name for path in complete(here.folder / "run/actor/checkpoints")] == ["step-00000000", "step-00000003"]


@pytest.mark.parametrize(
    ("name", "num_ranks"), [("SIGUSR1", 2), *nightly(("SIGINT", 1), ("SIGTERM", 1), ("SIGTERM", 2))]
)
def test_a_signal_ends_a_run_after_its_step(tmp_path: Path, name: str, num_ranks: int) -> None:
    words = [*map(str, [*ALONE, *TINY])]
    words[1] = str(num_ranks)
    words += ["--plan.micro_batch", str(4 // num_ranks)]
    with started("rl", "--task", "sort", *words, "--run.steps", "5000", "--folder", "run", cwd=tmp_path) as command:
        wait_for_step(tmp_path / "run", 2)
        os.kill(command.pid, signal.Signals[name])
        _, errors = command.communicate(timeout=60)
    code, how = (130, "interrupted") if name == "SIGINT" else (143, f"ended by {name}")
    assert command.returncode == code
    assert errors.rstrip("\n") == f"terrace: {how}; saved checkpoints are complete; to go on: terrace rl --resume run"
    num = len(metrics(tmp_path / "run"))
    (last,) = complete(tmp_path / "run" / "actor" / "checkpoints")
    assert json.loads((last / "manifest.json").read_text())["facts"]["rl"]["step"] == num
    again = terrace("rl", "--resume", "run", "--run.steps", str(num + 1), cwd=tmp_path)
    assert (again.returncode, again.stderr) == (0, "")
    assert f"going on after step {num}" in again.stdout


def test_a_signal_before_the_first_step_ends_at_once(tmp_path: Path) -> None:
    words = [*map(str, [*ALONE, *TINY]), "--run.start_steps", "100000"]
    with started("rl", "--task", "sort", *words, "--run.steps", "1", "--folder", "run", cwd=tmp_path) as command:
        assert command.stdout is not None, "it is a pipe"
        assert any("run folder" in line for line in command.stdout)
        os.kill(command.pid, signal.SIGTERM)
        _, errors = command.communicate(timeout=60)
    assert command.returncode == 143
    assert errors.rstrip("\n") == (
        "terrace: ended by SIGTERM; nothing was saved yet; to begin again: terrace rl --config run/config.toml "
        "--folder run --resume auto"
    )


@pytest.mark.nightly
@pytest.mark.parametrize("case", range(2 * len(KINDS)))
def test_struck_runs_go_on_with_the_same_bits(
    case: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A case of the campaign of `python -m tests.chaos.feedback`."""
    monkeypatch.setenv("TMPDIR", tempfile.gettempdir())  # the campaign names a folder that goes with it
    code = feedback.main(["--first", str(case), "--cases", "1", "--seed", "4"])
    said = capsys.readouterr().out
    assert (code, "1 cases: " in said) == (0, True), said


def test_every_line_of_prompts_has_the_columns_that_a_reward_needs(here: CommandLine) -> None:
    config = write_own(here.folder, reward=[{"function": "needing:f"}])
    (here.folder / "needing.py").write_text("def f(completions, wanted):\n    return wanted\n")
    (here.folder / "good.jsonl").write_text('{"prompt": "The fox", "wanted": 1}\n{"prompt": "lazy", "other": 1}\n')
    said = here.refusal("rl", "--config", config)
    assert "'needing:f' needs 'wanted', and lines of prompts have other beside the prompt" in said


def test_a_launcher_does_not_start_a_run_with_every_rank(here: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["rl", "--task", "sort", *ALONE, *TINY]
    for variables in (
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
        {"RANK": "0", "WORLD_SIZE": "2"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
    ):
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            said = here.refusal(*words)
            assert "terrace rl starts its ranks itself, and " in said
            assert "start it once, without a launcher" in said
            # What is no rank may be the text of every process.
            patch.setenv(next(iter(variables)), "one")
            assert "terrace rl starts its ranks itself, and " in here.refusal(*words)
            patch.setenv(next(iter(variables)), "1")
            with pytest.raises(SystemExit) as ended:
                here.call(*words)
            assert ended.value.code == 2
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert here.call(*words, "--run.steps", 1, "--folder", "alone").code == 0


def test_the_controller_keeps_nothing_of_a_step(here: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    held, line = dict[int, int](), rl_run._line

    def weighed(step: int, found: dict[str, float]) -> str:
        if step in (10, 25, 40):
            gc.collect()
            held[step] = tracemalloc.get_traced_memory()[0]
        return line(step, found)

    monkeypatch.setattr(rl_run, "_line", weighed)
    tracemalloc.start()
    try:
        said = here.call("rl", "--task", "sort", *ALONE, *TINY, "--run.steps", 40, "--folder", "run")
    finally:
        tracemalloc.stop()
    assert (said.code, said.error) == (0, "")
    # A step has some 50 numbers: 15 steps kept would take 75 kB and more. A table of the interpreter that grows takes
    # as much, but not twice.
    assert min(held[25] - held[10], held[40] - held[25]) < 45_000, held
