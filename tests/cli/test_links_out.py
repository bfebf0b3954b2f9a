"""Folders of a stranger under each command that copies, shows or goes on from them: no link out, no pipe, no hang."""

import json
import os
import shutil
from pathlib import Path

import pytest

from terrace.base.errors import CheckpointError, DataError, ModelError
from terrace.checkpoint.reading import Checkpoint
from terrace.data.files import find_documents
from terrace.data.tokenizer import load_tokenizer
from terrace.model.config import load_model, parse_model
from terrace.model.hf.folder import TOKENIZER_FILES, carried_files
from terrace.model.hf.pretrained import Pretrained
from terrace.report.page import page_html
from terrace.report.run_view import run_page, run_view
from terrace.train.config import run_toml
from terrace.train.resolve import resolve
from terrace.train.run_folder import folder_lock
from tests.support.command_line import CommandLine
from tests.support.hf_folder import TABLE, write_folder, write_tokenizer
from tests.support.tiny_runs import write_run

pytestmark = pytest.mark.timeout(60)
SECRET = "-----BEGIN OPENSSH PRIVATE KEY-----"


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "id_ed25519"
    path.write_text(SECRET)
    return path


@pytest.fixture
def here(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    monkeypatch.chdir(tmp_path)
    return CommandLine(tmp_path, capsys)


def link(path: Path, target: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target)


@pytest.mark.parametrize("name", [*TOKENIZER_FILES, "generation_config.json"])
def test_no_small_file_of_a_model_is_copied_through_a_link(name: str, tmp_path: Path, key: Path) -> None:
    folder = write_folder(tmp_path / "model")
    link(folder / name, key)
    with pytest.raises(ModelError, match=f"{name}: it is a link out of .*model: put a copy of the file there"):
        carried_files(folder)


def test_no_template_is_copied_from_a_folder_elsewhere(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "key.jinja").write_text(SECRET)
    link(folder / "additional_chat_templates", tmp_path / "elsewhere")
    with pytest.raises(ModelError, match=r"key\.jinja: it is a link out of .*model: put a copy of the file there"):
        carried_files(folder)


@pytest.mark.parametrize("config", ["[1]", "[" * 100_000, '"a"'])
def test_a_damaged_configuration_beside_templates_is_one_line(config: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("x")
    (folder / "tokenizer_config.json").write_text(config)
    with pytest.raises(ModelError, match=r"tokenizer_config\.json in .*model is damaged"):
        carried_files(folder)


def test_upcycle_does_not_copy_a_key(here: CommandLine, key: Path) -> None:
    folder = write_folder(here.folder / "model")
    link(folder / "vocab.txt", key)
    said = here.call("upcycle", "model", "out", "--experts", 2)
    assert said.code == 2
    assert "it is a link out of model" in said.error
    assert not (here.folder / "out").exists()


def test_weights_configurations_and_tokenizers_are_not_read_through_a_link(tmp_path: Path, key: Path) -> None:
    folder = write_folder(tmp_path / "model")
    shutil.copytree(folder, tmp_path / "other")
    for path in folder.glob("*.safetensors"):
        link(path, tmp_path / "other" / path.name)
    with pytest.raises(ModelError, match="it is a link out of"):
        Pretrained(folder, parse_model(TABLE)).check()
    link(folder / "config.json", tmp_path / "other" / "config.json")
    with pytest.raises(ModelError, match="it is a link out of"):
        load_model(str(folder))
    write_tokenizer(folder)
    shutil.move(folder / "tokenizer.json", tmp_path / "other" / "tokenizer.json")
    link(folder / "tokenizer.json", tmp_path / "other" / "tokenizer.json")
    with pytest.raises(DataError, match="it is a link out of"):
        load_tokenizer(str(folder))
    # A file that the user names may be a link.
    link(tmp_path / "mine.json", tmp_path / "other" / "tokenizer.json")
    assert load_tokenizer(str(tmp_path / "mine.json")).vocab_size


def test_the_page_of_a_run_has_no_text_from_elsewhere(tmp_path: Path, key: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in ("config.toml", "metrics.jsonl", "sample.txt", "prediction.json", "events.jsonl"):
        link(run / name, key)
    (run / "checkpoints").symlink_to("/")
    view = run_view(run)
    assert SECRET not in page_html(run_page(view))
    assert any("it is a link out of" in words for words in view.missing)
    assert not any(section.title == "Checkpoints" and section.table.rows for section in view.sections if section.table)


@pytest.mark.parametrize("made", ["pipe", "device", "folder"])
@pytest.mark.parametrize("of_rl", [False, True])
def test_a_page_is_made_whatever_stands_in_place_of_a_file(made: str, of_rl: bool, here: CommandLine) -> None:
    run = here.folder / "run"
    run.mkdir()
    (run / "config.toml").write_text("[run]\n" if of_rl else "")
    names = ("metrics.jsonl", "samples.jsonl", "prediction.json", "events.jsonl", "loads.jsonl", "sample.txt")
    for name in (*names, "config.toml", "calls.jsonl", "profile/step-1-rank-0.json", "checkpoints"):
        path = run / name
        path.parent.mkdir(exist_ok=True)
        if path.exists():
            continue
        if made == "pipe":
            os.mkfifo(path)
        elif made == "folder":
            path.mkdir()
        else:
            path.symlink_to("/dev/zero")
    said = here.call("report", "run")
    assert (said.code, said.error) == (0, "")
    for command in (["generate", "run", "--prompt", "a"], ["train", "--resume", "run"], ["export", "run", "out"]):
        assert here.call(*command).code == 2


def test_a_run_does_not_write_through_a_link(tmp_path: Path, key: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").symlink_to(tmp_path)  # a whole folder may be kept elsewhere
    with folder_lock(run):
        pass
    for name in ("events.jsonl", "metrics.jsonl", "loads.jsonl", ".lock"):
        link(run / name, key)
        with pytest.raises(CheckpointError, match="is a link out of the run folder"), folder_lock(run):
            pass
        (run / name).unlink()
    assert key.read_text() == SECRET


def test_a_checkpoint_is_not_read_through_a_link_and_its_pieces_have_few_dims(tmp_path: Path, key: Path) -> None:
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    link(folder / "manifest.json", key)
    with pytest.raises(CheckpointError, match="it is a link out of"):
        Checkpoint(folder)
    box = ",".join(["0:1"] * 40)
    manifest = {"format": 3, "step": 1, "num_updates": 1, "facts": {}, "groups": {}, "layout": {}}
    files = {"a.safetensors": {"pieces": {"block": {"weight": [box]}}}}
    (folder / "manifest.json").unlink()
    for text, said in ((json.dumps(manifest | {"files": files}), "damaged"), ("[" * 100_000, "nested too deeply")):
        (folder / "manifest.json").write_text(text)
        with pytest.raises(CheckpointError, match=said):
            Checkpoint(folder)


def test_a_data_set_names_no_file_elsewhere(tmp_path: Path, key: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": f"../{key.name}"}]}))
    with pytest.raises(DataError, match=r"names id_ed25519, which lies elsewhere"):
        find_documents(folder)
    (folder / "state.json").unlink()
    (tmp_path / "other").mkdir()
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["../other"]}))
    with pytest.raises(DataError, match="lies elsewhere"):
        find_documents(folder)


def test_links_in_a_folder_of_data_are_followed(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "text.txt").write_text("words")
    link(tmp_path / "data" / "text.txt", tmp_path / "text.txt")
    assert find_documents(tmp_path / "data") == [tmp_path / "data" / "text.txt"]


def test_a_step_of_too_many_passes_is_not_drawn(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    settings = resolve(str(write_run(tmp_path, 1, plan="ddp", batch=2_000_000)), {}, {})
    (run / "config.toml").write_text(run_toml(settings))
    (run / "prediction.json").write_text(
        json.dumps({"is_measured": False, "cluster": {}, "predicted": {"time_s": {"x": 1.0}}})
    )
    assert any("a step passes layers 4,000,000 times" in words for words in run_view(run).missing)


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "calls.jsonl", "config.toml"])
def test_a_run_does_not_wait_at_a_pipe_in_its_folder(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match=f"{name} is a pipe, a socket or a device"), folder_lock(tmp_path):
        pass
    (tmp_path / name).rename(tmp_path / "own")
    with folder_lock(tmp_path):
        assert (tmp_path / "own").is_fifo(), "what a run does not write is the user's"
