"""Checkpoints whose saving or removal was interrupted."""

import shutil
from pathlib import Path

import pytest

from terrace.checkpoint import writing
from terrace.checkpoint.layout import latest
from terrace.checkpoint.writing import clear_leftovers, remove, save
from terrace.launch.world import World
from tests.support.checkpoints import make

ALONE = World(0, 1, 0, 1, None)  # type: ignore[arg-type]  # no store: nobody to meet


def test_an_interrupted_removal_leaves_no_damaged_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = save(make(ALONE, (1,), "ddp"), tmp_path, 3, {}, keep=1)

    def half(folder: Path, ignore_errors: bool) -> None:
        next(folder.glob("*.safetensors")).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", half)
        with pytest.raises(KeyboardInterrupt):
            remove(saved)
    assert latest(tmp_path) is None
    assert [path.name for path in saved.parent.iterdir()] == [".step-00000003.removed"]
    clear_leftovers(saved.parent)
    assert not list(saved.parent.iterdir())


def test_what_an_interruption_left_is_not_in_the_way_of_a_removal(tmp_path: Path) -> None:
    engine = make(ALONE, (1,), "ddp")
    saved = save(engine, tmp_path, 3, {}, keep=1)
    for name in (f".{saved.name}.removed", f".{saved.name}.replaced"):
        shutil.copytree(saved, saved.with_name(name))
    remove(saved)
    assert [path.name for path in saved.parent.iterdir()] == [f".{saved.name}.replaced"]


def test_what_an_interruption_left_is_not_in_the_way_of_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(ALONE, (1,), "ddp")
    saved = save(engine, tmp_path, 3, {}, keep=1)
    shutil.copytree(saved, saved.with_name(f".{saved.name}.replaced"))
    monkeypatch.setattr(writing, "clear_leftovers", lambda folder: None)  # as when it is left after the start
    save(engine, tmp_path, 3, {}, keep=1)
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]
