"""Copies in memory: who keeps whose, how many bytes, and which files are believed."""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from terrace.base.errors import CheckpointError, ConfigError
from terrace.checkpoint import memory
from terrace.checkpoint.layout import checkpoint_bytes, decode, encode
from terrace.checkpoint.memory import MemoryFile, held, memory_folder, new_life, newest, place, write_list
from terrace.checkpoint.reading import Checkpoint
from terrace.checkpoint.writing import save
from terrace.launch.seal import Seal
from terrace.launch.start import World
from terrace.plan.partners import find_partners
from terrace.program.lowering import build_stages
from terrace.simulate.peer_copies import part_bytes
from terrace.train import from_memory, prepare
from terrace.train.from_memory import check_partners
from terrace.train.keys import TrainConfig
from terrace.train.layers import resolve_table
from terrace.train.resolve import parse_run
from tests.support.checkpoints import make, train
from tests.support.tiny_runs import write_run

LIFE, LATER = "0000000a", "00000010"
ALONE = World(0, 1, 0, 1, None)  # type: ignore[arg-type]  # no store: nobody to meet


@pytest.mark.parametrize(
    ("sizes", "machines", "tier", "keepers"),
    [
        ((2, 2), "aabb", 1, [2, 3, 0, 1]),
        ((2, 3), "aabbcc", 1, [2, 3, 4, 5, 0, 1]),
        ((2, 2, 2), "aabbccdd", 2, [4, 5, 6, 7, 0, 1, 2, 3]),
        ((1, 4), "aabb", 1, [2, 3, 0, 1]),  # the next place is on the same machine
        ((2, 2, 1), "aabb", 1, [2, 3, 0, 1]),
    ],
)
def test_partners_are_on_other_machines_of_the_outermost_tier(
    sizes: tuple[int, ...], machines: str, tier: int, keepers: list[int]
) -> None:
    found = find_partners(sizes, tuple(machines))
    assert found is not None
    assert (found.tier, [found.keeper(rank) for rank in range(len(machines))]) == (tier, keepers)
    assert [found.kept(found.keeper(rank)) for rank in range(len(machines))] == list(range(len(machines)))


@pytest.mark.parametrize(("sizes", "machines"), [((2, 2), "aaaa"), ((1, 1), "a"), ((3,), "aab"), ((2, 2), "aaab")])
def test_no_partners_without_other_machines(sizes: tuple[int, ...], machines: str) -> None:
    assert find_partners(sizes, tuple(machines)) is None


PROJECTED = {"galore": {"rank": 4}, "lsp": {"rank": 5, "density": 2}}


@pytest.mark.parametrize(
    ("plan", "mapping", "optimizer"),
    [
        ("ddp", {}, "adamw"),
        ("zero3", {}, "muon"),
        ("three-level", {}, "lion"),
        ("three-level", {}, "sgd"),
        ("zero1", {"node": {"pipeline": 2}}, "muon"),
        ("zero3", {}, "galore"),
        ("zero1", {"node": {"pipeline": 2}}, "lsp"),
        ("hsdp", {"package": {"tensor": 2}}, "adamw"),
    ],
)
def test_all_parts_have_the_bytes_of_a_checkpoint(
    tmp_path: Path, plan: str, mapping: dict[str, Any], optimizer: str
) -> None:
    table = resolve_table(
        str(write_run(tmp_path, 2, 2)), {}, {"optimizer": {"name": optimizer, **PROJECTED.get(optimizer, {})}}
    )
    table |= {"plan": {"preset": plan, "mapping": mapping}}
    table["train"] |= {"freeze": ["layers.0.*"]}
    table["model"] |= {"vocab_size": 258}  # tensor ranks cut it without padding
    run = parse_run(table)
    programs = build_stages(run.cluster, run.plan, run.blocks(), run.num_micros(), run.train.sequence)
    mesh = programs[0].mesh
    found = sum(part_bytes(programs[mesh.stage(rank)], rank) for rank in range(run.cluster.world_size))
    assert found == checkpoint_bytes(run.blocks(), run.optimizer, run.plan)


@pytest.fixture
def two_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Memory folders of two hosts with copies of steps 1 and 2 of a run: one file each."""
    monkeypatch.setattr(memory, "ROOT", tmp_path)
    engine = make(ALONE, (1,), "zero3")
    folders = [memory_folder("run", tmp_path, host) for host in "ab"]
    for step in (1, 2):
        train(engine, step - 1, step)
        saved = save(engine, tmp_path, step, {}, keep=2)
        (name, entry), *_ = Checkpoint(saved).files.items()
        raw = (saved / name).read_bytes()
        for folder in folders:
            memory.make_private(folder)
            memory.make_private(folder / f"{LIFE}.{step}")
            file = MemoryFile(folder / f"{LIFE}.{step}" / name, b"", len(raw))
            file.data.numpy()[:] = bytearray(raw)
            manifest = decode((saved / "manifest.json").read_text())
            write_list(file.path, {**manifest, "files": {name: entry}, "life": LIFE})
    return folders


def chosen_step(run_folder: Path) -> int | None:
    """Step that rank 0, on host a, chooses with the rank of host b."""
    (run_folder / ".memory").write_text(f"run {LIFE}")
    world = replace(ALONE, world_size=2, store=HashStore(), hosts=("a", "b"), seal=Seal.fresh())
    other = replace(world, rank=1)
    with ThreadPoolExecutor() as threads:
        answers = threads.submit(lambda: from_memory.check_when_asked(other, from_memory.offer(other, run_folder)))
        with from_memory.checks_end(world):
            here = from_memory.offer(world, run_folder)
            assert here is not None
            found = from_memory.chosen(world, run_folder, here)
        answers.result(timeout=30)
    return None if found is None else found.step


def test_the_newest_whole_copy_is_an_ordinary_checkpoint(two_hosts: list[Path]) -> None:
    here = held(two_hosts[0])
    assert (len(here.copies), here.wrong) == (2, ())
    found = newest(here.copies, two_hosts[0])
    assert found is not None
    assert here.check(found.text) == {}
    folder = place(here, found.text)
    checkpoint = Checkpoint(folder)
    checkpoint.verify()
    assert (checkpoint.step, folder.stat().st_mode & 0o777) == (2, 0o700)
    # Placed again, as after a start that did not get further.
    assert place(held(two_hosts[0]), found.text) == folder
    Checkpoint(folder).verify()


def test_a_later_life_is_newer_than_any_earlier_one(two_hosts: list[Path]) -> None:
    """At the same step, where only its bytes are wanted, and behind a step of a host that was away."""
    earlier, later = two_hosts
    for path in sorted(later.glob("*")):
        path.rename(later / path.name.replace(LIFE, LATER))
    for path in later.glob("*/rank-*.json"):
        path.write_text(encode({**decode(path.read_text()), "life": LATER}))

    def chosen() -> tuple[str, int]:
        found = newest([copy for folder in two_hosts for copy in held(folder).copies], earlier)
        assert found is not None
        return decode(found.text)["life"], found.step

    assert chosen() == (LATER, 2)
    for path in later.glob(f"{LATER}.2/*"):
        path.unlink()
    assert chosen() == (LATER, 1)
    for path in later.glob(f"{LATER}.1/*.safetensors"):
        path.write_bytes(b"")
    assert chosen() == (LIFE, 2)


def test_lives_of_a_run_are_in_order(tmp_path: Path) -> None:
    found = [new_life(tmp_path) for _ in range(20)]
    assert len({run for run, _ in found}) == 1
    assert [life for _, life in found] == sorted({life for _, life in found})
    assert memory.run_id(tmp_path) == found[0][0]
    (tmp_path / ".memory").write_text("cut")
    assert memory.run_id(tmp_path) == ""
    assert new_life(tmp_path)[0] not in (found[0][0], "")


def test_damaged_files_are_named_and_not_believed(
    two_hosts: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def flip(folder: Path, step: int) -> None:
        file = folder / f"{LIFE}.{step}" / "rank-00000.safetensors"
        raw = bytearray(file.read_bytes())
        raw[-3] ^= 1
        file.write_bytes(raw)

    def said(host: str, folder: Path, step: int) -> str:
        file = folder / f"{LIFE}.{step}" / "rank-00000.safetensors"
        return f"{host}: {file} is damaged (its checksum differs), so this copy is not used\n"

    flip(two_hosts[0], 2)
    assert chosen_step(tmp_path) == 2, "the other host has it"
    assert capsys.readouterr().out == said("a", two_hosts[0], 2)
    here = held(two_hosts[0])
    found = newest(here.copies, two_hosts[0])
    assert found is not None
    here.check(found.text)
    assert not list(place(here, found.text).glob("rank-*")), "what is damaged is not placed"
    memory.clear(two_hosts[0], keep=lambda name: ".step-" not in name)
    flip(two_hosts[1], 2)
    assert chosen_step(tmp_path) == 1
    assert capsys.readouterr().out == said("a", two_hosts[0], 2) + said("b", two_hosts[1], 2)
    flip(two_hosts[0], 1)
    assert chosen_step(tmp_path) == 1
    flip(two_hosts[0], 1)
    # A list without its file's place, a cut list, a list of another file.
    lists = [folder / f"{LIFE}.1" / "rank-00000.json" for folder in two_hosts]
    lists[0].write_text(lists[0].read_text()[:-40])
    table = decode(lists[1].read_text())
    lists[1].write_text(
        encode({**table, "files": {"../rank-00000.safetensors": table["files"]["rank-00000.safetensors"]}})
    )
    assert chosen_step(tmp_path) is None
    assert capsys.readouterr().out.endswith("no copy in the memory of the machines is whole: resuming from disk\n")


def test_only_the_files_of_the_newest_whole_copy_are_read(
    two_hosts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, damage = list[Path](), memory._damage

    def noted(path: Path, entry: Mapping[str, Any]) -> str:
        read.append(path)
        return damage(path, entry)

    monkeypatch.setattr(memory, "_damage", noted)
    assert chosen_step(tmp_path) == 2
    assert sorted(read) == sorted(folder / f"{LIFE}.2" / "rank-00000.json" for folder in two_hosts)
    # A truncated file is told by its size, and one without its list does not count: neither is read.
    os.truncate(two_hosts[0] / f"{LIFE}.2" / "rank-00000.safetensors", 100)
    (two_hosts[1] / f"{LIFE}.2" / "rank-00000.json").unlink()
    read.clear()
    assert chosen_step(tmp_path) == 1
    assert sorted(read) == sorted(folder / f"{LIFE}.1" / "rank-00000.json" for folder in two_hosts)


def test_hosts_go_on_when_rank_0_fails_before_it_asks(two_hosts: list[Path], tmp_path: Path) -> None:
    world = replace(ALONE, world_size=2, store=HashStore(), hosts=("a", "b"), seal=Seal.fresh())
    with pytest.raises(ConfigError, match="bad"), from_memory.checks_end(world):
        raise ConfigError("bad")
    from_memory.check_when_asked(replace(world, rank=1), held(two_hosts[1]))


def test_a_copy_that_was_cut_short_gives_way_to_the_one_before(two_hosts: list[Path], tmp_path: Path) -> None:
    for folder in two_hosts:
        path = folder / f"{LIFE}.2" / "rank-00000.json"
        table = decode(path.read_text())
        pieces = table["files"]["rank-00000.safetensors"]["pieces"]
        pieces.pop(next(iter(pieces)))
        path.write_text(encode(table))
    assert chosen_step(tmp_path) == 1


def test_a_folder_that_others_may_use_is_not_believed(two_hosts: list[Path], tmp_path: Path) -> None:
    two_hosts[0].chmod(0o755)
    assert held(two_hosts[0]).copies == ()
    with pytest.raises(PermissionError, match="not a folder of this user alone"):
        memory.make_private(two_hosts[0])
    link = tmp_path / "link"
    link.symlink_to(two_hosts[1])
    assert held(link).copies == ()
    taken = two_hosts[1] / f"{LIFE}.1" / "rank-00000.safetensors"
    with pytest.raises(FileExistsError):
        MemoryFile(taken, b"", 8)


def test_too_little_room_is_an_error_before_anything_is_written(tmp_path: Path) -> None:
    room = os.statvfs(tmp_path)
    with pytest.raises(OSError, match=r"No space left|File too large|Invalid argument"):
        MemoryFile(tmp_path / "file", b"", 2 * room.f_frsize * room.f_blocks)
    assert not (tmp_path / "file").exists()


def test_a_run_on_one_machine_is_refused(tmp_path: Path) -> None:
    run = parse_run(resolve_table(str(write_run(tmp_path, 2, 2, peer_copies=1)), {}, {}))
    world = replace(ALONE, machines=("a",) * 4)
    with pytest.raises(ConfigError, match=r"train.peer_copies = 1 .* all ranks are on one machine: leave it out"):
        check_partners(world, run, is_new=True)
    check_partners(world, run, is_new=False)
    check_partners(replace(world, machines=("a", "a", "b", "b")), run, is_new=True)


def test_islands_are_refused(tmp_path: Path) -> None:
    """No step of theirs ends on all ranks."""
    path, outer = str(write_run(tmp_path, 2, 2, peer_copies=1)), {"tier": "node", "every": 2}
    with pytest.raises(ConfigError, match=r"train.peer_copies = 1 .* islands \(plan.outer\) .* leave one of them out"):
        parse_run(resolve_table(path, {}, {"plan": {"preset": "ddp", "outer": outer}}))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"peer_copies": 2}, "must be 0 or 1"),
        ({"peer_copies": -1}, "must be 0 or 1"),
        ({"peer_copies_every": 3}, "train.peer_copies_every has no effect: train.peer_copies = 0"),
        ({"peer_copies": 1, "peer_copies_every": -1}, "must be at least 0"),
    ],
)
def test_bad_keys_are_refused(keys: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TrainConfig(steps=1, batch=1, sequence=1, **keys)  # type: ignore[arg-type]


@pytest.mark.parametrize(("whole", "step"), [(100, 100), (50, 95), (None, 95)])
def test_memory_is_taken_where_the_later_checkpoint_on_disk_is_damaged(
    monkeypatch: pytest.MonkeyPatch, whole: int | None, step: int
) -> None:
    def newest_whole(run_folder: Path) -> tuple[Any, list[str]]:
        if whole is None:
            raise CheckpointError("none is whole")
        return SimpleNamespace(step=whole), [] if whole == 100 else ["step 100 is damaged"]

    monkeypatch.setattr(prepare, "latest", lambda run_folder: Path("step-00000100"))
    monkeypatch.setattr(prepare, "newest_whole", newest_whole)
    in_memory: Any = SimpleNamespace(step=95)
    found, wrong = prepare._newest(Path("run"), in_memory, print)
    assert (found.step, bool(wrong)) == (step, whole != 100)
