"""Checkpoints of states in bf16 and in 8-bit blocks: bitwise under the same plan, and what other plans make of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from terrace.checkpoint.layout import checkpoint_bytes
from terrace.checkpoint.reading import Checkpoint, resume
from terrace.checkpoint.writing import save
from terrace.launch.start import LocalPool, World
from terrace.plan.outer import Outer
from terrace.runtime.settings import OptimizerConfig
from terrace.simulate.peer_copies import part_bytes
from tests.support.checkpoints import ADAMW, contents, differing, make, train
from tests.support.nightly import nightly

ALONE = World(0, 1, 0, 1, None)  # type: ignore[arg-type]  # no store: nobody to meet

pytestmark = pytest.mark.timeout(360)

LION, MUON = OptimizerConfig(name="lion", lr=1e-2), OptimizerConfig(name="muon", lr=1e-2)
STORED: dict[str, dict[str, Any]] = {
    "bf16 states": {"optimizer_states": "bf16"},
    "int8 states": {"optimizer_states": "int8"},
    "bf16 parameters": {"compute": "bf16", "master": "bf16"},
    "all narrow": {"compute": "bf16", "master": "bf16", "optimizer_states": "int8"},
}


def state_of(engine: Any) -> dict[str, Tensor]:
    kept: dict[str, Tensor] = {}
    for flat in engine.state:
        if flat.spec.trainable:
            for part in flat.optimizer.parts:
                kept |= {f"{flat.name} {part.group} {kind}": value.clone() for kind, value in part.values.items()}
    return kept


def continue_here(world: World, folder: Path, plan: str, stored: dict[str, Any], optimizer: Any) -> tuple[Any, ...]:
    """Train six steps with a save after three, then go on from there in another engine, which had other values."""
    straight = make(world, (2, 2), plan, stored=stored, optimizer=optimizer)
    losses = train(straight, 0, 3)
    saved, at_save = save(straight, folder, 3, {}, keep=1), state_of(straight)
    losses += train(straight, 3, 6)
    other = make(world, (2, 2), plan, scale=2.0, stored=stored, optimizer=optimizer)
    said = resume(other, Checkpoint(saved))
    unequal = differing(at_save, state_of(other))
    again = train(other, 3, 6)
    size = part_bytes(straight.program, world.rank)
    return losses[3:], again, said, unequal, differing(state_of(straight), state_of(other)), size


@pytest.mark.parametrize("optimizer", [ADAMW, *nightly(LION, MUON)], ids=lambda config: config.name)
@pytest.mark.parametrize("stored", STORED.values(), ids=STORED)
def test_a_resume_under_the_same_plan_has_the_same_bits(
    pool: LocalPool, tmp_path: Path, stored: dict[str, Any], optimizer: OptimizerConfig
) -> None:
    plan = "three-level" if optimizer == ADAMW else "zero1"
    found = pool.run(4, continue_here, tmp_path, plan, stored, optimizer, timeout_s=120.0)
    for losses, again, said, unequal, at_end, _ in found:
        assert (losses, said, unequal, at_end) == (again, "", [], [])
    folder = tmp_path / "checkpoints" / "step-00000003"
    tensors = [each for path in folder.glob("*.safetensors") for each in load_file(path).items()]
    states = {str(value.dtype) for name, value in tensors if name.rpartition("/")[2] not in ("master", "frozen")}
    exactly = "torch.float32" if "master" in stored else "torch.float64"
    wanted = {"bf16": "torch.bfloat16", "int8": "torch.float32"}.get(stored.get("optimizer_states", ""), exactly)
    assert states == {wanted}
    engine = make(ALONE, (1,), "ddp", stored=stored, optimizer=optimizer)
    num_bytes = sum(value.nbytes for _, value in tensors)
    assert num_bytes == checkpoint_bytes(engine.state.specs, optimizer, engine.program.plan)
    assert num_bytes == sum(size for *_, size in found)


def test_islands_go_on_from_narrow_states(pool: LocalPool, tmp_path: Path) -> None:
    """Their anchor is in fp32, whatever each island's parameters are in."""
    outer = Outer(tier="node", every=2, delay=1)
    stored = STORED["all narrow"] | {"params": "device", "grads": "device", "optimizer": "package", "outer": outer}
    for losses, again, said, unequal, at_end, _ in pool.run(4, continue_here, tmp_path, "zero1", stored, ADAMW):
        assert (losses, said, unequal, at_end) == (again, "", [], [])
    checkpoint = Checkpoint(tmp_path / "checkpoints" / "step-00000003")
    (anchor,) = checkpoint.read("block.1", ["master"])["gain"].values()
    assert anchor.dtype == torch.float32


def test_another_plan_reads_the_values_and_says_how_it_stores_them(pool: LocalPool, tmp_path: Path) -> None:
    stored = STORED["int8 states"]
    pool.run(4, continue_here, tmp_path, "zero3", stored, ADAMW, timeout_s=120.0)
    checkpoint = Checkpoint(tmp_path / "checkpoints" / "step-00000003")
    everything, where = contents(checkpoint.folder), checkpoint.folder.name
    # In fp32 and wider every value is there as it was.
    wide = make(ALONE, (1,), "ddp", scale=2.0)
    assert resume(wide, checkpoint) == (
        f"{where} was saved with parameters in fp64 and optimizer states in int8, and goes on with parameters in fp64 "
        "and optimizer states in fp64"
    )
    again = save(wide, tmp_path / "wide", 3, {}, keep=1)
    assert not [
        name for name, value in contents(again).items() if not torch.equal(value, everything[name].to(value.dtype))
    ]
    # In blocks that slices do not cut, values are coded anew: each is off by one of 256 points at most.
    whole = make(ALONE, (1,), "ddp", scale=2.0, stored=stored)
    assert resume(whole, checkpoint) == ""
    for name, value in contents(save(whole, tmp_path / "whole", 3, {}, keep=1)).items():
        wanted = everything[name]
        assert torch.allclose(value, wanted, rtol=0.1, atol=0.01 * float(wanted.abs().max())), name
    # Parameters in bf16 are rounded to the nearest; those of a run in bf16 are exact in fp32.
    narrow = make(ALONE, (1,), "ddp", scale=2.0, stored=STORED["all narrow"])
    assert "parameters in bf16 and optimizer states in int8" in resume(narrow, checkpoint)
    saved = save(narrow, tmp_path / "narrow", 3, {}, keep=1)
    for name, value in contents(saved).items():
        if name.endswith("/master"):
            assert torch.equal(value, everything[name].bfloat16()), name
    widened = make(ALONE, (1,), "ddp", "fp32", scale=2.0)
    assert "goes on with parameters in fp32" in resume(widened, Checkpoint(saved))
    assert train(widened, 3, 5)
