"""GaLore and LSP in runs: checkpoints hold projectors and moments, of any plan for any other; what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from terrace.base.errors import CheckpointError, ConfigError, PlanError
from terrace.checkpoint.layout import checkpoint_bytes
from terrace.checkpoint.reading import Checkpoint, resume
from terrace.checkpoint.writing import save
from terrace.launch.start import LocalPool, World
from terrace.plan.outer import Outer
from terrace.plan.plan import Plan
from terrace.program.lowering import build
from terrace.runtime.settings import OptimizerConfig
from terrace.simulate.peer_copies import part_bytes
from tests.support.checkpoints import contents, differing, make, train
from tests.support.parity import exact
from tests.support.toys import MODELS, cluster_of

ALONE = World(0, 1, 0, 1, None)  # type: ignore[arg-type]  # no store: nobody to meet
MODEL, EXPERTS = "llama tied", "experts"
# Saved after three steps, in the middle of a period and, for LSP, after moments have moved.
OPTIMIZERS = {
    "galore": OptimizerConfig(name="galore", lr=1e-2, rank=3, check_every=2),
    "lsp": OptimizerConfig(name="lsp", lr=1e-2, rank=3, density=2, check_every=2, alpha=0.3),
}


def model_of(stored: dict[str, Any]) -> str:
    return EXPERTS if "experts" in stored else MODEL


def continued(
    world: World, folder: Path, name: str, plan: str, stored: dict[str, Any]
) -> tuple[list[float], list[float], list[str], int]:
    """Losses of steps 4 to 6 with and without a stop, kinds of state that differ afterwards, bytes of a rank's part."""
    made: dict[str, Any] = {"model": model_of(stored), "optimizer": OPTIMIZERS[name], "stored": stored}
    straight = make(world, (2, 2), plan, **made)
    train(straight, 0, 3)
    saved = save(straight, folder, 3, {}, keep=2)
    losses, size = train(straight, 3, 6), part_bytes(straight.program, world.rank)
    after = save(straight, folder, 6, {}, keep=2)
    straight.close()
    other = make(world, (2, 2), plan, scale=2.0, **made)
    resume(other, Checkpoint(saved))
    again = train(other, 3, 6)
    unequal = differing(contents(after), contents(save(other, folder / "again", 6, {}, keep=1)))
    other.close()
    return losses, again, unequal, size


@pytest.mark.parametrize(
    ("name", "plan", "stored"),
    [
        ("galore", "zero3", {}),
        ("lsp", "three-level", {}),
        ("lsp", "zero1", {"compute": "bf16", "master": "bf16", "optimizer_states": "int8"}),
        ("lsp", "zero1", {"experts": {"node": {"expert": 2}}}),
    ],
    ids=str,
)
def test_a_resume_has_the_same_bits_and_another_plan_the_same_numbers(
    pool: LocalPool, tmp_path: Path, name: str, plan: str, stored: dict[str, Any]
) -> None:
    found = pool.run(4, continued, tmp_path, name, plan, stored, timeout_s=120.0)
    for losses, again, unequal, _ in found:
        assert (losses, unequal) == (again, [])
    folder = tmp_path / "checkpoints" / "step-00000003"
    tensors = [each for path in folder.glob("*.safetensors") for each in load_file(path).items()]
    states = [name for name, _ in tensors if name.endswith("/projection")]
    # Each matrix of both layers once: of attention, and of the MLP or of a router and eight experts.
    assert len(states) == len(set(states)) == 2 * (4 + (1 + 8 * 3 if "experts" in stored else 3))
    alone_stored = {key: value for key, value in stored.items() if key != "experts"}
    made: dict[str, Any] = {"model": model_of(stored), "optimizer": OPTIMIZERS[name], "stored": alone_stored}
    alone = make(ALONE, (1,), "ddp", scale=2.0, **made)
    num_bytes = sum(value.nbytes for _, value in tensors)
    assert num_bytes == checkpoint_bytes(alone.state.specs, OPTIMIZERS[name], alone.program.plan)
    assert num_bytes == sum(size for *_, size in found)
    resume(alone, Checkpoint(folder))
    if not alone_stored:
        assert train(alone, 3, 6) == pytest.approx(found[0][0], rel=1e-10)
    # One without its projectors.
    (file,) = [path for path in folder.glob("*.safetensors") if states[0] in load_file(path)]
    block, matrix = states[0].split("/")[0], states[0].split("/")[1].partition("[")[0]
    text = (folder / "manifest.json").read_text()
    checkpoint = Checkpoint(folder, text)
    checkpoint._pieces.pop((block, matrix))
    with pytest.raises(CheckpointError, match=f"lacks elements .* of {block}.{matrix}"):
        resume(alone, checkpoint)
    assert file.name in checkpoint.files


def test_a_checkpoint_of_another_rank_is_refused(tmp_path: Path) -> None:
    engine = make(ALONE, (1,), "ddp", model=MODEL, optimizer=OPTIMIZERS["galore"])
    train(engine, 0, 1)
    saved = save(engine, tmp_path, 1, {}, keep=1)
    other = make(ALONE, (1,), "ddp", model=MODEL, optimizer=replace(OPTIMIZERS["galore"], rank=2))
    with pytest.raises(CheckpointError, match=r"is galore:3 \[8, 8\] there and galore:2 \[8, 8\] here"):
        resume(other, Checkpoint(saved))


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"name": "galore", "rank": 0}, "optimizer.rank = 0 must be at least 1"),
        ({"name": "lsp", "rank": 4, "density": 0}, "optimizer.density = 0 must be 1 to rank = 4"),
        ({"name": "lsp", "rank": 4, "density": 5}, "optimizer.density = 5 must be 1 to rank = 4"),
        ({"name": "galore", "check_every": 0}, "optimizer.check_every = 0 must be at least 1"),
        ({"name": "lsp", "alpha": 0.0}, "optimizer.alpha = 0.0 must be above 0 and below 1"),
        ({"name": "lsp", "alpha": float("nan")}, "optimizer.alpha = nan must be above 0 and below 1"),
        ({"name": "galore", "scale": 0.0}, "optimizer.scale = 0 would leave every matrix as it is"),
        ({"name": "galore", "scale": -1.0}, "optimizer.scale = -1.0 must be zero or a positive number"),
        ({"name": "galore", "density": 2}, "optimizer.density = 2 has no effect under optimizer.name = 'galore'"),
        ({"name": "galore", "alpha": 0.1}, "optimizer.alpha = 0.1 has no effect"),
        ({"name": "lsp", "momentum": 0.9}, "optimizer.momentum = 0.9 has no effect"),
        ({"name": "muon", "rank": 4}, "optimizer.rank = 4 has no effect under optimizer.name = 'muon'"),
        ({"rank": 4}, "optimizer.rank = 4 has no effect under optimizer.name = 'adamw'"),
    ],
    ids=str,
)
def test_wrong_numbers_are_named(table: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        OptimizerConfig(**table)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"update": "galore:9"},
            "'galore' is larger than a side of layers.0.attention.key.weight (4 x 8): use at most 4",
        ),
        (
            {"update": "lsp:5:2"},
            "rank = 5 of optimizer 'lsp' is larger than a side of layers.0.attention.key.weight (4",
        ),
        ({"update": "galore:0"}, "update = 'galore:0': rank = 0 must be at least 1"),
        ({"update": "lsp:4:5"}, "update = 'lsp:4:5': density = 5 must be 1 to rank = 4"),
        ({"update": "lsp:4"}, "update = 'lsp:4' is not of the form 'lsp:RANK:DENSITY'"),
        ({"update": "galore:x"}, "update = 'galore:x' is not of the form 'galore:RANK'"),
        ({"update": "muon:2"}, "update = 'muon:2' is not of the form 'muon'"),
        ({"update": "adam"}, "update = 'adam' names no optimizer; did you mean 'adamw'?"),
        ({"update": "lsp:4:2", "mapping": {"package": {"tensor": 2}}}, "optimizer 'lsp' keeps projectors of whole"),
        (
            {"update": "galore:2", "experts": {"package": {"rows": 2}}},
            "optimizer 'galore' keeps projectors of whole matrices, and rows of the table experts cut them",
        ),
        (
            {"update": "galore:2", "params": "device", "grads": "device", "optimizer": "package"}
            | {"outer": Outer(tier="node", every=2)},
            "optimizer 'galore' under an outer loop is not built",
        ),
    ],
    ids=str,
)
def test_plans_that_cannot_be_are_refused(changes: dict[str, Any], words: str) -> None:
    cluster = cluster_of(2, 2)
    plan: Plan = replace(exact("ddp", cluster), **changes)
    with pytest.raises(PlanError) as caught:
        build(cluster, plan, MODELS[EXPERTS if plan.experts else MODEL].declared, 1)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
