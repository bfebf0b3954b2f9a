"""Saves beside training: the state of their step, the same bytes as a save that training waits for, one at a time."""

import hashlib
import json
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, not in __all__

from terrace.base.errors import CheckpointError
from terrace.checkpoint import snapshot
from terrace.checkpoint.layout import decode, encode
from terrace.checkpoint.reading import Checkpoint, newest_whole
from terrace.checkpoint.saving import Saver
from terrace.checkpoint.writing import save
from terrace.launch.start import LocalPool, World
from tests.support.checkpoints import contents, differing, make, train
from tests.support.folders import bytes_of

pytestmark = pytest.mark.timeout(200)


def alone(store: Any = None) -> World:
    return World(0, 1, 0, 1, HashStore() if store is None else store)


def save_beside(world: World, beside: Path, waiting: Path, tiers: tuple[int, ...], plan: str) -> tuple[int, int]:
    """Save after two steps beside two more, and after the same two in a way that training waits for."""
    working, release = snapshot.write_all, threading.Event()

    def held_back(file: Any, data: memoryview) -> None:
        release.wait(60)
        working(file, data)

    engine = make(world, tiers, plan, "bf16")
    saver = Saver(engine, world, beside, {"note": "hello"}, 2)
    train(engine, 0, 2)
    save(engine, waiting, 2, {"note": "hello"}, 2)
    snapshot.write_all = held_back
    try:
        saver.start(2)
        train(engine, 2, 4)
        assert saver.is_under_way, "it goes on beside the steps"
        assert not (beside / "checkpoints" / "step-00000002").exists()
        release.set()
        saver.finish()
    finally:
        snapshot.write_all = working
    told = saver.news()
    assert told is not None
    assert told.folder == beside / "checkpoints" / "step-00000002"
    assert saver.news() is None
    saver.start(4)
    saver.close()
    return saver.staging_bytes, told.num_bytes


def test_a_save_beside_training_has_the_bytes_of_one_that_it_waits_for(pool: LocalPool, tmp_path: Path) -> None:
    sizes = pool.run(4, save_beside, tmp_path / "beside", tmp_path / "waiting", (2, 2), "three-level")
    name = "step-00000002"
    beside, waiting = (bytes_of(tmp_path / how / "checkpoints" / name) for how in ("beside", "waiting"))
    assert beside == waiting
    assert sorted(beside) == ["manifest.json", *(f"rank-0000{rank}.safetensors" for rank in range(4))]
    after = contents(tmp_path / "beside" / "checkpoints" / "step-00000004")
    assert differing(contents(tmp_path / "beside" / "checkpoints" / name), after) != []
    for rank, (staging, told) in enumerate(sizes):  # a file is its header and what was staged, nothing else
        raw = beside[f"rank-0000{rank}.safetensors"]
        assert staging == told == len(raw) - 8 - int.from_bytes(raw[:8], "little")
    assert sorted(os.listdir(tmp_path / "beside" / "checkpoints")) == [name, "step-00000004"]


def test_a_save_waits_for_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release, working, order = threading.Event(), snapshot.write_all, list[str]()

    def held_back(file: Any, data: memoryview) -> None:
        release.wait(20)
        order.append(Path(file.name).parent.name[:14])
        working(file, data)

    monkeypatch.setattr(snapshot, "write_all", held_back)
    saver = Saver(make(alone(), (1,), "ddp"), alone(), tmp_path, {}, 5)
    saver.start(1)
    threading.Timer(0.2, release.set).start()
    saver.start(2)
    assert release.is_set()
    saver.close()
    told = [saver.news() for _ in range(3)]
    assert [each and each.folder.name for each in told] == ["step-00000001", "step-00000002", None], "none is lost"
    assert order == sorted(order)
    assert {Checkpoint(path).step for path in (tmp_path / "checkpoints").iterdir()} == {1, 2}


def keys_after(world: World, folder: Path) -> list[int]:
    """Numbers of keys in the store after each of five saves."""
    saver, found = Saver(make(world, (2,), "zero3"), world, folder, {}, 2), list[int]()
    for step in range(1, 6):
        saver.start(step)
        saver.finish()
        world.store.add(f"at {step}", 1)
        while world.store.add(f"at {step}", 0) < 2:
            time.sleep(0.01)
        found.append(world.store.num_keys() - step)
    saver.close()
    return found


def test_the_store_does_not_grow_with_every_save(pool: LocalPool, tmp_path: Path) -> None:
    for found in pool.run(2, keys_after, tmp_path):
        # The other rank may have begun its next save or have left: three keys at most. Three saves had left six.
        assert found[-1] <= found[1] + 3, found


def test_memory_is_given_back_where_training_waits(tmp_path: Path) -> None:
    engine = make(alone(), (1,), "ddp")
    saver = Saver(engine, alone(), tmp_path, {}, 2, background=False)
    saver.start(1)
    assert not saver.is_under_way
    assert not len(saver._snapshot._staging)
    saver.close()
    Checkpoint(tmp_path / "checkpoints" / "step-00000001").verify()


def test_step_0_stays_until_a_later_one_and_what_was_cut_short_is_cleared(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    engine = make(alone(), (1,), "ddp")

    def save_at(*steps: int) -> list[str]:
        saver = Saver(engine, alone(), tmp_path, {}, 2)
        for step in steps:
            saver.start(step)
        saver.close()
        return sorted(path.name for path in checkpoints.iterdir())

    assert save_at(0) == ["step-00000000"]
    shutil.copytree(checkpoints / "step-00000000", checkpoints / ".step-00000003.1234.partial")
    (checkpoints / "step-00000000").rename(checkpoints / ".step-00000000.replaced")  # cut short between two renames
    assert save_at() == ["step-00000000"]
    assert save_at(5, 10, 15) == ["step-00000010", "step-00000015"]
    # A run that goes on from before a damaged one neither counts nor removes that.
    assert save_at(11, 12) == ["step-00000011", "step-00000012", "step-00000015"]


@pytest.mark.parametrize("bug", [OSError(28, "No space left on device"), KeyError("a bug")])
def test_what_goes_wrong_is_raised_when_it_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bug: Exception
) -> None:
    def broken(*_: object) -> None:
        raise bug

    monkeypatch.setattr(snapshot, "write_all", broken)
    saver = Saver(make(alone(), (1,), "ddp"), alone(), tmp_path, {}, 2)
    saver.start(1)
    kind = CheckpointError if isinstance(bug, OSError) else KeyError
    with pytest.raises(kind, match=r"No space left|a bug"):
        saver.finish()
    assert saver.problem
    if kind is CheckpointError:
        assert os.listdir(tmp_path / "checkpoints") == []


def late(world: World, folder: Path) -> str:
    """Rank 1 takes longer than rank 0 has patience for."""
    working = snapshot.write_all

    def slow(file: Any, data: memoryview) -> None:
        time.sleep(0.8)
        working(file, data)

    saver = Saver(make(world, (2,), "zero3"), world, folder, {}, 2, limit_s=0.3)
    snapshot.write_all = slow if world.rank == 1 else working
    try:
        saver.start(1)
        saver.finish()
    except CheckpointError as error:
        return str(error)
    finally:
        snapshot.write_all = working
    return "nothing"


def test_a_rank_that_does_not_write_in_time_is_named(pool: LocalPool, tmp_path: Path) -> None:
    for said in pool.run(2, late, tmp_path):
        assert "(rank 1 had not written 0.3 s after rank 0)" in said


def two_checkpoints(folder: Path) -> tuple[Path, Path]:
    engine = make(alone(), (1,), "ddp")
    for step in (1, 2):
        train(engine, step - 1, step)
        save(engine, folder, step, {}, 2)
    first, second = sorted((folder / "checkpoints").iterdir())
    return first, second


def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path: Path) -> None:
    first, second = two_checkpoints(tmp_path)
    assert newest_whole(tmp_path)[0].folder == second
    file = second / "rank-00000.safetensors"
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    found, wrong = newest_whole(tmp_path)
    assert found.folder == first
    assert wrong == [f"{file} is damaged (its checksum differs)"]
    (first / "rank-00000.safetensors").unlink()
    with pytest.raises(CheckpointError) as caught:
        newest_whole(tmp_path)
    said = str(caught.value)
    assert f"{tmp_path} has no checkpoint that is whole: {file} is damaged" in said
    assert f"{first / 'rank-00000.safetensors'} is missing" in said


def test_format_2_is_read(tmp_path: Path) -> None:
    """As it was: SHA-256 of files, and parameters that are trainable or frozen."""
    folder, _ = two_checkpoints(tmp_path)
    before, manifest = contents(folder), folder / "manifest.json"
    table: dict[str, Any] = decode(manifest.read_text())
    old = {"adamw": "trainable", "frozen": "frozen"}
    for parameters in table["layout"].values():
        for entry in parameters.values():
            entry[0] = old[entry[0]]
    for name, entry in table["files"].items():
        del entry["crc32"]
        entry["sha256"] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    del table["groups"]
    manifest.write_text(encode({**table, "format": 2}))
    assert differing(before, contents(folder)) == []
    file = folder / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    with pytest.raises(CheckpointError, match="its checksum differs"):
        Checkpoint(folder).verify()


def test_files_are_of_safetensors_and_aligned(tmp_path: Path) -> None:
    engine = make(alone(), (1,), "ddp", "bf16")
    raw = next(save(engine, tmp_path, 1, {}, 1).glob("*.safetensors")).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert length % 8 == 0
    header = json.loads(raw[8 : 8 + length])
    sizes = {"F32": 4, "BF16": 2}
    assert {entry["dtype"] for entry in header.values()} == {"F32", "BF16"}
    assert all(entry["data_offsets"][0] % sizes[entry["dtype"]] == 0 for entry in header.values())
