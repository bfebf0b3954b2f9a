"""Checkpoints: bitwise under the same plan, equal under any other, whole or not there, damage named."""

import errno
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from terrace.base.errors import CheckpointError, HangError
from terrace.checkpoint import snapshot, writing
from terrace.checkpoint.layout import decode, encode, latest
from terrace.checkpoint.parts import parts_of, slices_of
from terrace.checkpoint.reading import Checkpoint, newest_whole, restore, resume
from terrace.checkpoint.writing import save
from terrace.launch.start import LocalPool, World
from terrace.plan.presets import preset
from terrace.runtime.engine import Engine
from terrace.runtime.setup import Blocks, Workload
from tests.support.checkpoints import contents, differing, make, train
from tests.support.toys import MODELS, cluster_of

ALONE = World(0, 1, 0, 1, None)  # type: ignore[arg-type]  # no store: nobody to meet

pytestmark = pytest.mark.timeout(360)


def state_of(engine: Engine) -> dict[str, Tensor]:
    """Everything a rank keeps from one step to the next."""
    kept: dict[str, Tensor] = {}
    for flat in engine.state:
        kept[f"{flat.name} {'trainable' if flat.spec.trainable else 'frozen'}"] = flat.shard.clone()
        kept |= {f"{flat.name} {hop}": residual.clone() for hop, residual in flat.origin.residuals.items()}
        if flat.spec.trainable:
            for part in flat.optimizer.parts:
                kept |= {f"{flat.name} {kind}": value.clone() for kind, value in part.values.items()}
            kept[f"{flat.name} num_steps"] = torch.tensor(flat.optimizer.num_steps)
    return kept


def continue_here(world: World, folder: Path, tiers: tuple[int, ...], plan: str, compute: str) -> tuple[Any, ...]:
    """Train six steps and save after three; then go on from there in another engine, which had other values."""
    straight = make(world, tiers, plan, compute)
    losses = train(straight, 0, 3)
    saved = save(straight, folder, 3, {"note": "hello"}, keep=1)
    before = state_of(straight)
    losses += train(straight, 3, 6)
    other = make(world, tiers, plan, compute, scale=2.0)
    assert differing(before, state_of(other))
    assert resume(other, Checkpoint(saved)) == ""
    unequal = differing(before, state_of(other))
    again = train(other, 3, 6)
    return losses, again, unequal, differing(state_of(straight), state_of(other))


@pytest.mark.parametrize(
    ("tiers", "plan", "compute"),
    [
        ((2, 2), "three-level", "fp32"),
        ((2, 2), "zero3", "bf16"),
        ((2, 2), "ddp", "bf16"),
        ((3,), "zero++", "fp64"),
        ((2, 1, 2), "hsdp", "fp64"),
        ((2, 1, 2), "three-level-compressed", "fp32"),
    ],
)
def test_going_on_is_bitwise_the_same(
    pool: LocalPool, tmp_path: Path, tiers: tuple[int, ...], plan: str, compute: str
) -> None:
    world_size = cluster_of(*tiers).world_size
    for losses, again, unequal, at_the_end in pool.run(world_size, continue_here, tmp_path, tiers, plan, compute):
        assert again == losses[3:]
        assert len(set(losses)) == 6
        assert unequal == at_the_end == []
    checkpoint = Checkpoint(tmp_path / "checkpoints" / "step-00000003")
    assert (checkpoint.step, checkpoint.num_updates, checkpoint.facts) == (3, 3, {"note": "hello"})


def begin_again(world: World, folder: Path, tiers: tuple[int, ...], plan: str) -> tuple[list[float], list[float]]:
    """Losses of an undisturbed run, and of one that goes on from its checkpoint before the first step."""
    straight = make(world, tiers, plan, "fp32")
    saved = save(straight, folder, 0, {}, keep=1)
    other = make(world, tiers, plan, "fp32", scale=2.0)
    resume(other, Checkpoint(saved))
    return train(straight, 0, 3), train(other, 0, 3)


@pytest.mark.parametrize("plan", ["three-level-compressed", "zero++"])
def test_the_first_step_is_the_same_when_resumed(pool: LocalPool, tmp_path: Path, plan: str) -> None:
    """Working parameters that a refresh rounds are rounded before the first step, too."""
    for losses, again in pool.run(4, begin_again, tmp_path, (2, 1, 2), plan):
        assert again == losses


def go_on(world: World, source: Path, folder: Path, tiers: tuple[int, ...], plan: str) -> list[float]:
    """Load and save at once, then train three more steps."""
    engine = make(world, tiers, plan, scale=2.0)
    restore(engine.state, Checkpoint(source))
    engine.refresh()
    save(engine, folder, 3, {}, keep=1)
    return train(engine, 3, 6)


@pytest.fixture(scope="module")
def saved(pool: LocalPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A checkpoint of eight ranks on three tiers after three steps, and the losses of six."""
    folder = tmp_path_factory.mktemp("eight")
    results = pool.run(8, continue_here, folder, (2, 2, 2), "three-level", "fp64")
    found = latest(folder)
    assert found is not None
    return found, results[0][0]


@pytest.mark.parametrize(
    ("tiers", "plan"),
    [((3,), "ddp"), ((3,), "zero3"), ((2, 2), "zero1"), ((2, 3), "three-level"), ((1,), "zero2"), ((2, 2, 2), "ddp")],
)
def test_another_plan_and_world_go_on_with_the_same_numbers(
    pool: LocalPool, saved: tuple[Path, list[float]], tmp_path: Path, tiers: tuple[int, ...], plan: str
) -> None:
    source, losses = saved
    for again in pool.run(cluster_of(*tiers).world_size, go_on, source, tmp_path, tiers, plan):
        assert again == pytest.approx(losses[3:], abs=1e-10, rel=0)
    copy = latest(tmp_path)
    assert copy is not None
    assert differing(contents(source), contents(copy)) == []


def saved_alone(folder: Path) -> tuple[Engine, Path]:
    engine = make(ALONE, (1,), "zero3")
    train(engine, 0, 1)
    return engine, save(engine, folder, 1, {}, keep=1)


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    engine = make(ALONE, (1,), "ddp")
    assert latest(tmp_path) is None
    for step in (8, 9, 10, 11):
        save(engine, tmp_path, step, {}, keep=2)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000010", "step-00000011"]
    newest = latest(tmp_path)
    assert newest is not None
    assert newest.name == "step-00000011"
    train(engine, 0, 1)
    save(engine, tmp_path, 11, {}, keep=2)  # the same step again replaces it
    assert Checkpoint(newest).num_updates == 1


def refused(work: Callable[[], object]) -> str:
    with pytest.raises(CheckpointError) as caught:
        work()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("where", [0, 9, -1])
def test_a_flipped_byte_is_found_wherever_it_is(tmp_path: Path, where: int) -> None:
    _, folder = saved_alone(tmp_path)
    file = folder / "rank-00000.safetensors"
    raw = bytearray(file.read_bytes())
    raw[where] ^= 4
    file.write_bytes(raw)
    assert refused(Checkpoint(folder).verify).startswith(f"{file} is damaged (its checksum differs)")


def test_damage_is_named_also_when_nobody_verified(tmp_path: Path) -> None:
    engine, folder = saved_alone(tmp_path)
    file, manifest = folder / "rank-00000.safetensors", folder / "manifest.json"
    raw, text = file.read_bytes(), manifest.read_text()
    file.write_bytes(raw[:-8])
    assert f"{file} has {len(raw) - 8} bytes instead of {len(raw)}" in refused(Checkpoint(folder).verify)
    assert str(file) in refused(lambda: restore(engine.state, Checkpoint(folder)))
    file.unlink()
    assert f"{file} is missing" in refused(Checkpoint(folder).verify)
    assert str(file) in refused(lambda: restore(engine.state, Checkpoint(folder)))
    file.write_bytes(raw)
    Checkpoint(folder).verify()
    for damaged in (text[:-30], text.replace('"step": 1', '"step": 7'), "[]", '{"format": 2}', "{}", "\0"):
        manifest.write_text(damaged)
        assert f"{manifest} is damaged" in refused(lambda: Checkpoint(folder))
    table = decode(text)
    boxes = table["files"][file.name]["pieces"]["block.1"]
    boxes["up.weight"].append("3:5,0:6")
    manifest.write_text(encode(table))
    assert "has elements of block.1.up.weight twice" in refused(Checkpoint(folder).verify)
    boxes["up.weight"] = ["0:3,0:6", "5:12,0:6"]
    manifest.write_text(encode(table))
    for work in (Checkpoint(folder).verify, lambda: restore(engine.state, Checkpoint(folder))):
        assert "lacks elements [3:5,0:6] of block.1.up.weight" in refused(work)
    manifest.write_text('{"format": 1}')
    assert "has format 1, but this version of Terrace reads formats 2 and 3 only" in refused(lambda: Checkpoint(folder))
    manifest.unlink()
    assert f"cannot read {manifest}" in refused(lambda: Checkpoint(folder))


def resume_under(world: World, folder: Path, tiers: tuple[int, ...], plan: str) -> tuple[str, bool]:
    """The note of a resume over residuals of an earlier step, and whether all residuals are zero after it."""
    engine = make(world, tiers, plan)
    train(engine, 0, 1)
    note = resume(engine, Checkpoint(folder))
    return note, not any(
        residual.count_nonzero() for flat in engine.state for residual in flat.origin.residuals.values()
    )


def save_after(world: World, folder: Path, tiers: tuple[int, ...], plan: str, num_steps: int) -> None:
    engine = make(world, tiers, plan)
    train(engine, 0, num_steps)
    save(engine, folder, num_steps, {}, keep=3)


def test_residuals_of_another_plan_or_of_none_start_at_zero_with_a_note(pool: LocalPool, tmp_path: Path) -> None:
    compressed = ((2, 1, 2), "three-level-compressed")
    pool.run(4, save_after, tmp_path, *compressed, 2)
    folder = latest(tmp_path)
    assert folder is not None
    assert set(pool.run(4, resume_under, folder, *compressed)) == {("", False)}
    ((note, zero),) = set(pool.run(2, resume_under, folder, (1, 1, 2), "three-level-compressed"))
    assert (note, zero) == (
        "residuals of error feedback start at zero, since step-00000002 was saved under another plan",
        True,
    )
    # A checkpoint of an earlier version.
    manifest = folder / "manifest.json"
    table = decode(manifest.read_text())
    del table["feedback"]
    manifest.write_text(encode(table))
    ((note, zero),) = set(pool.run(4, resume_under, folder, *compressed))
    assert (note, zero) == ("residuals of error feedback start at zero, since step-00000002 has none", True)
    assert not any("feedback" in name for name in contents(folder)), "pieces alone"


def test_nan_in_a_checkpoint_is_refused_by_name_on_every_rank(pool: LocalPool, tmp_path: Path) -> None:
    _, name = pool.run(2, save_spoiled, tmp_path)
    folder = latest(tmp_path)
    assert folder is not None
    (said,) = set(pool.run(2, refuses, folder))
    assert said.startswith(f"{folder}: the state 'exp_avg' of {name} holds inf or nan: use a checkpoint")


def save_spoiled(world: World, folder: Path) -> str:
    """Save a checkpoint with a nan of the last rank; returns the name of the rank's first trained parameter."""
    engine = make(world, (2,), "zero3")
    parts = parts_of(engine.state, slices_of(engine.program.mesh, world.rank))
    block, part = next(found for found in parts if "exp_avg" in found[1].values)
    if world.rank == 1:
        part.values["exp_avg"].fill_(float("nan"))
    save(engine, folder, 0, {}, keep=1)
    return f"{block}.{part.parameter}"


def refuses(world: World, folder: Path) -> str:
    return refused(lambda: resume(make(world, (2,), "zero3"), Checkpoint(folder)))


def test_a_renamed_folder_and_impossible_manifests_are_refused(tmp_path: Path) -> None:
    engine, folder = saved_alone(tmp_path)
    manifest, table = folder / "manifest.json", decode((folder / "manifest.json").read_text())
    renamed = folder.rename(folder.with_name("step-00000009"))
    assert f"{renamed} holds step 1, so it was renamed" in refused(lambda: Checkpoint(renamed))
    assert "step-00000009 holds step 1" in refused(lambda: newest_whole(tmp_path))
    # A copy under a name of the user's own is no step of a run.
    own = renamed.rename(folder.with_name("best"))
    assert Checkpoint(own).step == 1
    own.rename(folder)
    (file,) = table["files"]
    cases: dict[str, dict[str, Any]] = {
        "files names '../outside'": {"files": {"../outside": table["files"][file]}},
        "files names '/etc/passwd'": {"files": {"/etc/passwd": table["files"][file]}},
        "step = -5 is not": {"step": -5},
        "step = '1' is not": {"step": "1"},
        "step = True is not": {"step": True},
        "num_updates = 1000000000000 is not possible after 1 steps": {"num_updates": 10**12},
        "num_updates = -1 is not": {"num_updates": -1},
        "groups has no kinds of state for 'adamw'": {"groups": {}},
    }
    for said, changed in cases.items():
        manifest.write_text(encode({**table, **changed}))
        assert said in refused(lambda: Checkpoint(folder))
    manifest.write_text(encode({**table, "num_updates": 0}))
    assert "after 1 steps with 0 updates" in refused(lambda: restore(engine.state, Checkpoint(folder)))


def test_every_cut_of_a_manifest_is_refused(tmp_path: Path) -> None:
    _, folder = saved_alone(tmp_path)
    manifest = folder / "manifest.json"
    text = manifest.read_text()
    for length in range(0, len(text), 97):
        manifest.write_text(text[:length])
        refused(lambda: Checkpoint(folder))


def test_another_model_is_refused(tmp_path: Path) -> None:
    _, folder = saved_alone(tmp_path)
    cluster = cluster_of(1)
    toy = MODELS["toy"]

    def engine(blocks: Sequence[torch.nn.Module], **options: Any) -> Engine:
        plan = preset("ddp", cluster)
        workload = Workload(cluster=cluster, plan=plan, num_micros=1)
        return Engine(Blocks(blocks, **options), workload, toy.objective)

    decoder = engine(MODELS["llama tied"].blocks(torch.float32), names=["embedding", "layer", "other", "head"])
    assert "embedding.weight is absent there and adamw [11, 8] here" in refused(
        lambda: restore(decoder.state, Checkpoint(folder))
    )
    frozen = engine(toy.blocks(torch.float32), freeze=["block.4.norm.*"])
    assert "block.4.norm.weight is adamw [6] there and frozen [6] here" in refused(
        lambda: restore(frozen.state, Checkpoint(folder))
    )


def fail_to_write(world: World, folder: Path, victim: int, what: str) -> tuple[str, list[str], list[float]]:
    """Save, fail to save, show what is left, save again, and train on."""
    engine = make(world, (2, 2), "three-level")
    train(engine, 0, 1)
    save(engine, folder, 1, {}, keep=3)
    module, name = (writing, "encode") if what == "commit" else (snapshot, "write_all")
    working = getattr(module, name)

    def broken(*arguments: Any) -> None:
        if what == "half":
            arguments[0].write(arguments[1][:9])
        if what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(errno.ENOSPC, "No space left")

    said = ""
    if world.rank == victim:
        setattr(module, name, broken)
    try:
        save(engine, folder, 2, {}, keep=3)
    except CheckpointError as error:
        said = str(error)
    finally:
        setattr(module, name, working)
    left = engine.comm.exchange(sorted(path.name for path in (folder / "checkpoints").iterdir()))[0]
    save(engine, folder, 3, {}, keep=3)
    return said, left, train(engine, 1, 2)


@pytest.mark.parametrize(("victim", "what"), [(1, "half"), (0, "commit")])
def test_a_rank_that_cannot_write_stops_the_save_everywhere(
    pool: LocalPool, tmp_path: Path, victim: int, what: str
) -> None:
    for said, left, _ in pool.run(4, fail_to_write, tmp_path, victim, what):
        assert said.startswith(f"cannot write a checkpoint in {tmp_path}/checkpoints (rank {victim}: ")
        assert "No space left" in said
        assert left == ["step-00000001"]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-00000001", "step-00000003"]
    for folder in (tmp_path / "checkpoints").iterdir():
        Checkpoint(folder).verify()


def test_a_rank_killed_while_it_saves_leaves_the_checkpoint_before(pool: LocalPool, tmp_path: Path) -> None:
    with pytest.raises(HangError, match="rank 2 was killed by SIGKILL"):
        pool.run(4, fail_to_write, tmp_path, 2, "killed")
    assert sorted(os.listdir(tmp_path / "checkpoints")) == [".step-00000002.partial", "step-00000001"]
    found = latest(tmp_path)
    assert found is not None
    assert found.name == "step-00000001"
    pool.run(3, go_on, found, tmp_path, (3,), "zero3")
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000003"]  # the half-written one is cleared away


def fill(world: World, folder: Path) -> tuple[int, str]:
    """Save until the disk is full; return how often that worked, and what was said then."""
    engine = make(world, (2, 2), "zero3")
    for step in range(1, 100):
        try:
            save(engine, folder, step, {}, keep=100)
        except CheckpointError as error:
            return step - 1, str(error)
    return 100, "never full"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_disk_that_fills_up_keeps_what_was_saved(pool: LocalPool, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", disk], check=False).returncode:
        pytest.skip("this machine does not let root mount a small disk")
    try:
        (num_saved, said), *others = pool.run(4, fill, disk)
        assert [(num_saved, said)] * 3 == others
        assert 2 < num_saved < 100
        assert "No space left on device" in said
        names = sorted(os.listdir(disk / "checkpoints"))
        assert names == [f"step-{step:08d}" for step in range(1, num_saved + 1)]
        for name in names:
            Checkpoint(disk / "checkpoints" / name).verify()
        shutil.rmtree(disk / "checkpoints" / names[0])
    finally:
        subprocess.run(["umount", disk], check=True)
