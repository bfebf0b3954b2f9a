"""Checkpoints of islands: bitwise at every step of a cycle, at the anchor for any others, their damage named."""

import shutil
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from terrace.base.boxes import whole as box_of
from terrace.base.errors import CheckpointError
from terrace.checkpoint.islands import NUMBERS_BLOCK, ONE, TOLD, own_name
from terrace.checkpoint.layout import checkpoint_bytes, decode, encode
from terrace.checkpoint.parts import BoxValues
from terrace.checkpoint.reading import Checkpoint, newest_whole, resume
from terrace.checkpoint.writing import save
from terrace.launch.start import LocalPool, World
from terrace.model.spec import BlockSpec
from terrace.plan.outer import ONE_ISLAND, Outer
from terrace.runtime.describe import describe
from terrace.runtime.engine import Engine
from terrace.runtime.states import FROZEN, KINDS
from terrace.train.user_blocks import whole_values
from tests.support.checkpoints import differing
from tests.support.nightly import nightly
from tests.support.parity import ADAMW, TOLERANCE, Case, engine_of, exact
from tests.support.toys import MODELS, cluster_of

TIERS = (2, 2)
pytestmark = pytest.mark.timeout(360)


def islands_on(outer: Outer, tiers: tuple[int, ...] = TIERS, inside: str = "package", **changes: Any) -> Case:
    """A case in fp64 whose states lie on `inside`, one row for each of four places of the batch."""
    plan = exact("zero3", cluster_of(*tiers), outer=outer, params=inside, grads=inside, optimizer=inside)
    return Case(replace(plan, micro_batch=4 // cluster_of(*tiers).world_size, **changes))


NODE = Outer(tier="node", every=3)
LOOPS = {
    "waited for": islands_on(NODE),
    "in turns": islands_on(replace(NODE, fragments=3)),
    "late in turns": islands_on(replace(NODE, every=6, fragments=3, delay=3, keep=0.5)),
    "CO2": islands_on(replace(NODE, delay=3, optimizer="momentum", keep=0.0, penalty=True, clip=0.02)),
    "a cycle late in turns": islands_on(replace(NODE, fragments=3, delay=3, keep=0.5, penalty=True)),
    "late, an average": islands_on(replace(NODE, delay=1, optimizer="average")),
    "coded": islands_on(replace(NODE, delay=1), wire={"outer": {"node": "int4:16+feedback"}}),
    "coded in turns": islands_on(
        replace(NODE, fragments=3, delay=3), wire={"outer": {"node": "int4:16+feedback"}}, params="device"
    ),
}


def engine_for(world: World, case: Case, tiers: tuple[int, ...] = TIERS, scale: float = 1.0) -> Engine:
    blocks = MODELS[case.model].blocks(torch.float64)
    for block in blocks:
        for parameter in block.parameters():
            parameter.data.mul_(scale)
    return engine_of(world, cluster_of(*tiers), case, blocks)


def specs_of(case: Case) -> tuple[BlockSpec, ...]:
    blocks = MODELS[case.model].blocks(torch.float64)
    return describe(blocks, [f"block.{index}" for index in range(len(blocks))])


def stepped(engine: Engine, case: Case, step: int) -> tuple[float, float, tuple[Any, ...]]:
    result = engine.step(case.batches(engine, case, step), ADAMW.lr)
    return result.loss, result.grad_norm, result.outer


def state_of(engine: Engine) -> dict[str, Tensor]:
    """Everything a rank keeps from one step to the next."""
    engine.drain()
    kept: dict[str, Tensor] = {}
    for number, flat in enumerate(engine.state):
        name = f"{number} {flat.name}"
        kept[name] = flat.shard.clone()
        if not flat.spec.trainable:
            continue
        values = {kind: value for part in flat.optimizer.parts for kind, value in part.values.items()}
        origins = [flat.origin]
        for outer in flat.outer_states:
            values |= {"anchor": outer.anchor, **outer.shared, **outer.own}
            origins.append(outer.origin)
        # A residual that nothing has made yet is as one of zeros.
        values |= {str(hop): left for origin in origins for hop, left in origin.residuals.items() if left.any()}
        kept |= {f"{name} {kind}": value.clone() for kind, value in values.items()}
    numbers = engine.state.outer_numbers
    kept |= {"told": numbers.own_figures.clone(), "heard": numbers.heard.clone(), "marks": numbers.marks.clone()}
    kept["steps"] = torch.tensor(numbers.num_steps)
    return kept


@dataclass(frozen=True)
class Went:
    """What differed in bits after a resume, and notes, by step."""

    unequal: dict[int, list[str]] = field(default_factory=dict)
    notes: dict[int, str] = field(default_factory=dict)


def stop_at_every_step(world: World, case: Case, folder: Path, cycles: int) -> Went:
    """Save after every step of so many cycles, and of two more; go on from each for a cycle in an engine that had other
    values.
    """
    outer = case.plan.outer
    last, straight = cycles * outer.every + 2, engine_for(world, case)
    states, figures = [state_of(straight)], []
    for step in range(last + outer.every):
        figures.append(stepped(straight, case, step))
        states.append(state_of(straight))
        if step < last:
            save(straight, folder, step + 1, {}, keep=99)
    straight.finish()
    straight.check_bytes()
    states.append(state_of(straight))
    other, found = engine_for(world, case, scale=2.0), Went()
    for first in range(1, last + 1):
        found.notes[first] = resume(other, Checkpoint(folder / "checkpoints" / f"step-{first:08d}"))
        found.unequal[first] = differing(states[first], state_of(other))
        for step in range(first, first + outer.every):
            assert stepped(other, case, step) == figures[step], (first, step)
        found.unequal[first] += differing(states[first + outer.every], state_of(other))
    other.finish()
    found.unequal[last] += differing(states[-1], state_of(other))
    other.check_bytes()
    return found


@pytest.mark.parametrize(("name", "cycles"), [("coded", 1), *nightly(*((name, 2) for name in sorted(LOOPS)))])
def test_going_on_is_bitwise_the_same_at_every_step_of_a_cycle(
    pool: LocalPool, tmp_path: Path, name: str, cycles: int
) -> None:
    case = LOOPS[name]
    for found in pool.run(4, stop_at_every_step, case, tmp_path, cycles, timeout_s=300.0):
        assert found.unequal.keys() == found.notes.keys()
        assert not any(found.unequal.values()), found.unequal
        assert not any(found.notes.values())
    for folder in (tmp_path / "checkpoints").iterdir():
        checkpoint = Checkpoint(folder)
        checkpoint.verify()
        tensors = [tensor for file in checkpoint.files for tensor in load_file(folder / file).items()]
        stored = sum(value.nbytes for name, value in tensors if not name.startswith((NUMBERS_BLOCK, "feedback/")))
        assert stored == checkpoint_bytes(specs_of(case), ADAMW, case.plan, num_islands=2)


@dataclass(frozen=True)
class Taken:
    """What a run made of a checkpoint: its note; the whole parameters; whether this island is at the anchor, with
    nothing under way; figures of the steps after it.
    """

    note: str
    values: dict[str, Tensor]
    is_calm: bool
    figures: list[list[float]]


def whole(engine: Engine) -> dict[str, Tensor]:
    return {f"{block}.{name}": value.clone() for block, name, value in whole_values(engine)}


def trained(engine: Engine, case: Case, first: int, last: int) -> list[list[float]]:
    """Loss, norm and figures of exchanges of each step."""
    found = []
    for step in range(first, last):
        loss, norm, ended = stepped(engine, case, step)
        outer = ((each.fragment, each.loss, each.num_tokens, each.change, each.agreement or 0.0) for each in ended)
        found.append([loss, norm, *chain.from_iterable(outer)])
    return found


def go_on(world: World, tiers: tuple[int, ...], case: Case, folder: Path, again: Path, last: int) -> Taken:
    """Resume, save at once in `again`, and train on."""
    engine, checkpoint = engine_for(world, case, tiers, scale=2.0), Checkpoint(folder)
    said = resume(engine, checkpoint)
    numbers = engine.state.outer_numbers
    is_calm = not (numbers.marks.any() or numbers.own_figures.any() or numbers.heard.any())
    for flat in engine.state:
        for outer in flat.outer_states:
            is_calm &= torch.equal(outer.x, outer.anchor)
    values = whole(engine)
    save(engine, again, checkpoint.step, {}, keep=1)
    return Taken(said, values, is_calm, trained(engine, case, checkpoint.step, last))


@dataclass(frozen=True)
class SavedRun:
    """A checkpoint, the whole parameters as they were given out then, and figures of the steps after it."""

    folder: Path
    values: dict[str, Tensor]
    figures: list[list[float]]


def save_and_go_on(world: World, case: Case, folder: Path, steps: int, last: int) -> SavedRun:
    engine = engine_for(world, case)
    trained(engine, case, 0, steps)
    engine.drain()
    saved = save(engine, folder, steps, {}, keep=1)
    return SavedRun(saved, whole(engine), trained(engine, case, steps, last))


LATE = islands_on(replace(NODE, fragments=3, delay=2))
STEPS, LAST = 5, 9  # one fragment is under way


@pytest.fixture(scope="module")
def late(pool: LocalPool, tmp_path_factory: pytest.TempPathFactory) -> list[SavedRun]:
    """By rank, a run of two islands that was saved with an exchange under way, and went on."""
    found = pool.run(4, save_and_go_on, LATE, tmp_path_factory.mktemp("late"), STEPS, LAST)
    assert len({tuple(map(tuple, each.figures)) for each in found}) == 2
    return found


def anchor_of(checkpoint: Checkpoint) -> dict[str, Tensor]:
    return {f"{block}.{name}": value for block, name, value in checkpoint.parameters()}


def own_of(checkpoint: Checkpoint, island: int) -> dict[str, Tensor]:
    """An island's own parameters."""
    found = {}
    for block, layout in checkpoint.layout.items():
        for name, (group, shape) in layout.items():
            if group != FROZEN:
                values = torch.full(shape, torch.nan, dtype=torch.float64)
                kept = {KINDS[group][0]: values}
                checkpoint.fill(block, [BoxValues(parameter=own_name(name, island), box=box_of(shape), values=kept)])
                found[f"{block}.{name}"] = values
    return found


def test_the_anchor_is_what_is_read_and_given_out(late: list[SavedRun]) -> None:
    checkpoint = Checkpoint(late[0].folder)
    checkpoint.verify()
    anchor = anchor_of(checkpoint)
    for each in late:
        assert differing(anchor, each.values) == []
    own = [own_of(checkpoint, island) for island in range(2)]
    assert len(differing(*own)) == len(own[0]) > 0
    for values in own:
        assert len(differing(values, {name: anchor[name] for name in values})) == len(values)


def test_other_placements_inside_go_on_with_the_same_numbers(
    pool: LocalPool, late: list[SavedRun], tmp_path: Path
) -> None:
    """Islands of whole states, and of one rank each."""
    for tiers, inside in ((TIERS, "device"), ((1, 2), "device")):
        case = islands_on(LATE.plan.outer, tiers, inside)
        world = cluster_of(*tiers).world_size
        found = pool.run(world, go_on, tiers, case, late[0].folder, tmp_path / f"{world}", LAST)
        for rank, taken in enumerate(found):
            assert taken.note == ""
            for now, before in zip(taken.figures, late[rank * 4 // world].figures, strict=True):
                assert now == pytest.approx(before, abs=TOLERANCE, rel=TOLERANCE)


def test_others_begin_at_the_anchor_and_say_so(pool: LocalPool, late: list[SavedRun], tmp_path: Path) -> None:
    """Other islands, none, or another cycle; then islands from a run without."""
    anchor, folder = anchor_of(Checkpoint(late[0].folder)), late[0].folder
    four, plain = islands_on(LATE.plan.outer, (1, 4), "device"), islands_on(ONE_ISLAND)
    slower = islands_on(replace(NODE, fragments=3, delay=1))
    for case, tiers, words in (
        (four, (1, 4), "every island begins at the anchor of step-00000005, which is of 2 islands"),
        (slower, TIERS, "delay = 2), not 2 islands (every = 3, fragments = 3, delay = 1), with the optimizer state"),
        (plain, TIERS, "training begins at the anchor of step-00000005, which is of 2 islands"),
    ):
        for taken in pool.run(4, go_on, tiers, case, folder, tmp_path / words[:8], STEPS + 1):
            assert words in taken.note
            assert taken.is_calm
            assert differing(anchor, taken.values) == []
    # The run without islands has saved what it took up, and islands take that up in turn.
    kept = tmp_path / "training" / "checkpoints" / folder.name
    assert Checkpoint(kept).islands == ONE
    for block in Checkpoint(kept).layout:
        before = Checkpoint(folder).read(block)
        for name, kinds in Checkpoint(kept).read(block).items():
            assert differing(kinds, {kind: before[name][kind] for kind in kinds}) == [], (block, name)
    for taken in pool.run(4, go_on, TIERS, LATE, kept, tmp_path / "again", STEPS + 1):
        assert "islands begin at the parameters of step-00000005" in taken.note
        assert taken.is_calm
        assert differing(anchor, taken.values) == []


def test_damage_of_an_island_is_refused(late: list[SavedRun], tmp_path: Path) -> None:
    """Bytes of a file, missing pieces of one island, missing numbers, and a damaged table of islands."""
    folder = tmp_path / "checkpoints" / late[0].folder.name
    shutil.copytree(late[0].folder, folder)
    file = folder / "rank-00003.safetensors"
    sound = file.read_bytes()
    file.write_bytes(sound[:-9] + bytes([sound[-9] ^ 1]) + sound[-8:])
    with pytest.raises(CheckpointError, match=r"rank-00003\.safetensors is damaged \(its checksum differs\)"):
        newest_whole(tmp_path)
    file.write_bytes(sound)
    Checkpoint(folder).verify()
    whole_text = (folder / "manifest.json").read_text()
    for block, name in (("block.1", own_name("down.weight", 1)), (NUMBERS_BLOCK, TOLD)):
        manifest = decode(whole_text)
        del manifest["files"][file.name]["pieces"][block][name]
        (folder / "manifest.json").write_text(encode(manifest))
        with pytest.raises(CheckpointError, match=f"lacks elements .* of {block}.{name}"):
            Checkpoint(folder).verify()
    manifest = decode(whole_text)
    manifest["islands"]["num"] = 0
    (folder / "manifest.json").write_text(encode(manifest))
    with pytest.raises(CheckpointError, match=r"is damaged \(islands\.num = 0\)"):
        Checkpoint(folder)
