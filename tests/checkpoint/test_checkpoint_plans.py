"""Checkpoints across tensor plans: every rank is simulated, with the state that its plan gives it.

Nothing trains here. What a rank should hold is cut from a known whole model by plain indexing: once under one plan to
be saved, once under another to compare what was restored with.
"""

import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from terrace.base.errors import CheckpointError
from terrace.checkpoint.layout import checkpoint_bytes, encode, manifest_of
from terrace.checkpoint.parts import BoxValues, held, parts_of, slices_of
from terrace.checkpoint.reading import Checkpoint, restore_flat
from terrace.checkpoint.reshard import hand_over
from terrace.model.blocks import block_specs
from terrace.model.config import parse_model
from terrace.model.experts.config import ExpertsConfig
from terrace.model.params import ParamSpec
from terrace.model.spec import BlockSpec, freeze
from terrace.plan.dims import CUT_BY
from terrace.plan.plan import Plan
from terrace.runtime.settings import OptimizerConfig
from tests.support.nightly import in_turns, nightly
from tests.support.simulated_ranks import NUM_UPDATES, Blocks, Spread, Truth, filled, flats_of, save


def check_stored(checkpoint: Checkpoint, blocks: Blocks, truth: Truth) -> None:
    """Everything is there, is there once, and is what it should be."""
    checkpoint.verify()
    num_bytes = sum(
        tensor.nbytes for name in checkpoint.files for tensor in load_file(checkpoint.folder / name).values()
    )
    assert num_bytes == checkpoint_bytes(
        blocks, OptimizerConfig(), Plan(params="device", grads="device", optimizer="device")
    )
    for block in blocks:
        found = checkpoint.read(block.name)
        wanted = truth.values[block.name]
        assert {name: set(values) for name, values in found.items()} == {
            name: set(kinds) for name, kinds in wanted.items()
        }
        for name, values in found.items():
            assert all(torch.equal(value, wanted[name][kind]) for kind, value in values.items()), name
    masters = {(block, name): value for block, name, value in checkpoint.parameters()}
    assert list(masters) == [(block.name, param.name) for block in blocks for param in block.params]
    for (block_name, name), value in masters.items():
        assert torch.equal(value, next(iter(truth.values[block_name][name].values())))


def check_restored(checkpoint: Checkpoint, blocks: Blocks, spread: Spread, truth: Truth, ranks: Sequence[int]) -> None:
    """Ranks of a plan restore what they should hold, and zeros in what is padding."""
    programs = spread.programs(blocks)
    for rank in ranks:
        program = programs[rank]
        for flat in flats_of(program, rank):
            restore_flat(flat, checkpoint, slices_of(program.mesh, rank))
            for kind, kept, values in truth.of(program, rank, flat):
                assert torch.equal(kept, values), (rank, flat.name, kind)
            assert not flat.spec.trainable or flat.optimizer.num_steps == NUM_UPDATES


def check_everywhere(blocks: Blocks, source: Spread, spreads: Iterable[Spread], folder: Path) -> None:
    """Blocks saved under one plan are stored whole, and restored by every rank of all others."""
    truth = Truth(blocks)
    checkpoint = save(folder, blocks, source, truth)
    check_stored(checkpoint, blocks, truth)
    for spread in spreads:
        check_restored(checkpoint, blocks, spread, truth, range(spread.world_size))


# ---- decoders

LLAMA = {
    "model_type": "llama", "vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 10, "hidden_act": "silu",
}  # fmt: skip
NEOX = {
    "model_type": "gpt_neox", "vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 4,
    "intermediate_size": 13, "rotary_pct": 1.0,
}  # fmt: skip
DECODERS: dict[str, Callable[[], Blocks]] = {
    "llama, frozen in part": lambda: freeze(
        block_specs(parse_model(LLAMA)), ["layers.0.mlp.*", "layers.1.*norm*", "head.weight"]
    ),
    "gpt_neox": lambda: block_specs(parse_model(NEOX)),
    "llama, tied": lambda: block_specs(parse_model(LLAMA | {"tie_word_embeddings": True})),
}
SPREADS = {
    "alone": Spread(((1, 1, 1),)),
    "data 3": Spread(((3, 1, 1),), params=0, optimizer=0),
    "rows 4, more than key-value heads": Spread(((1, 4, 1),), params=-1, optimizer=0),
    "columns 2 inside, data 2 outside": Spread(((1, 1, 2), (2, 1, 1)), params=-1, optimizer=-1),
    "rows 2 x columns 2 on one tier": Spread(((1, 2, 2), (2, 1, 1)), params=0, optimizer=1),
    "rows on two tiers, data between": Spread(((2, 2, 1), (1, 2, 2)), params=1, optimizer=1),
    "columns 4": Spread(((1, 1, 4), (3, 1, 1)), params=0, optimizer=1),
    "2 stages of data 2": Spread(((2, 1, 1),), params=0, optimizer=0, stages=2),
    "3 stages": Spread(((1, 1, 1),), stages=3),
    "2 stages of rows 2, data 2": Spread(((1, 2, 1), (2, 1, 1)), params=-1, optimizer=1, stages=2),
    "ulysses 2 x ring 2, data 2": Spread(((1, 1, 1), (2, 1, 1)), params=0, optimizer=1, context=(2, 2)),
}  # fmt: skip


@pytest.mark.parametrize(("source", "decoder"), in_turns(5, SPREADS, DECODERS))
def test_a_decoder_saved_under_one_plan_is_there_under_every_other(source: str, decoder: str, tmp_path: Path) -> None:
    blocks = DECODERS[decoder]()
    check_everywhere(blocks, SPREADS[source], SPREADS.values(), tmp_path)


WITHOUT_COLUMNS = [name for name, spread in SPREADS.items() if spread.total(2) == 1]


@pytest.mark.parametrize("source", in_turns(3, WITHOUT_COLUMNS))
def test_a_mixture_saved_under_one_plan_is_there_under_every_other(source: str, tmp_path: Path) -> None:
    experts = ExpertsConfig(num_experts=3, per_token=2, intermediate_size=5, biased=True, dense_layers=(0,))
    blocks = block_specs(replace(parse_model(LLAMA | {"num_hidden_layers": 3}), experts=experts))
    check_everywhere(blocks, SPREADS[source], map(SPREADS.__getitem__, WITHOUT_COLUMNS), tmp_path)


EXPERT_SPREADS = {
    "alone": Spread(((1, 1, 1),)),
    "expert 2": Spread(((2, 1, 1),), params=0, optimizer=0, experts=((2, 1),)),
    "expert 4 of 8, data 2": Spread(((4, 1, 1), (2, 1, 1)), params=0, optimizer=1, experts=((4, 1),)),
    "rows 3 inside, expert 2 outside": Spread(((3, 1, 1), (2, 1, 1)), params=-1, optimizer=1, experts=((1, 3), (2, 1))),
    "expert on two tiers, stages": Spread(
        ((2, 1, 1), (2, 1, 1)), params=1, optimizer=1, stages=2, experts=((2, 1), (2, 1))
    ),
    "beside tensor rows": Spread(((1, 2, 1), (2, 1, 1)), params=0, optimizer=1, experts=((2, 1), (1, 2))),
    "beside a ring": Spread(((1, 1, 1), (2, 1, 1)), params=0, optimizer=1, context=(1, 2), experts=((1, 1), (2, 1))),
}


@pytest.mark.parametrize("source", ["expert 2", *nightly(*(name for name in EXPERT_SPREADS if name != "expert 2"))])
def test_files_know_no_division_of_experts(source: str, tmp_path: Path) -> None:
    """Experts saved under one division are there under every other, and on one rank."""
    experts = ExpertsConfig(num_experts=4, per_token=2, intermediate_size=6, biased=True, dense_layers=(0,))
    blocks = block_specs(replace(parse_model(LLAMA | {"num_hidden_layers": 3}), experts=experts))
    check_everywhere(blocks, EXPERT_SPREADS[source], EXPERT_SPREADS.values(), tmp_path)


@pytest.mark.parametrize(
    ("source", "target"),
    in_turns(3, ["alone", "rows 2 x columns 2 on one tier", "2 stages of rows 2, data 2"], SPREADS),
)
def test_ranks_of_one_plan_hand_over_to_ranks_of_another_without_files(source: str, target: str) -> None:
    """Every element is given by one rank and arrives where a checkpoint would have brought it."""
    blocks = DECODERS["llama, frozen in part"]()
    truth, given = Truth(blocks), dict[str, list[BoxValues]]()
    for rank, program in enumerate(SPREADS[source].programs(blocks)):
        for block, part in parts_of(filled(program, rank, truth), slices_of(program.mesh, rank), first=True):
            given.setdefault(block, []).append(part)
    for rank, program in enumerate(SPREADS[target].programs(blocks)):
        for flat in flats_of(program, rank):
            for each in held(flat):
                for values in each.values.values():
                    values.zero_()
            hand_over(given[flat.name], [part for _, part in parts_of([flat], slices_of(program.mesh, rank))])
            for kind, kept, expected in truth.of(program, rank, flat):
                assert torch.equal(kept, expected), (rank, flat.name, kind)


@contextmanager
def without(paths: Sequence[Path]) -> Iterator[None]:
    """The files are away for a while."""
    for path in paths:
        path.rename(path.with_suffix(".away"))
    yield
    for path in paths:
        path.with_suffix(".away").rename(path)


def test_a_rank_reads_what_it_needs_alone(tmp_path: Path) -> None:
    """Under the plan that saved and with all states cut over all ranks, that is its own file."""
    blocks = DECODERS["llama, frozen in part"]()
    truth, spread = Truth(blocks), Spread(((1, 2, 2), (2, 1, 1)), params=1, optimizer=1)
    checkpoint = save(tmp_path, blocks, spread, truth)
    files = sorted(tmp_path / name for name in checkpoint.files)
    assert len(files) == 8
    for rank, own in enumerate(files):
        with without([file for file in files if file != own]):
            check_restored(checkpoint, blocks, spread, truth, [rank])
            with pytest.raises(CheckpointError, match="cannot read"):
                check_restored(checkpoint, blocks, spread, truth, [(rank + 1) % 8])


def test_a_rank_whose_pieces_are_missing_is_noticed(tmp_path: Path) -> None:
    """The first that is missing is named: its third of the four parts of the vocabulary, 12 with padding."""
    blocks = DECODERS["llama, frozen in part"]()
    checkpoint = save(tmp_path, blocks, Spread(((1, 4, 1),)), Truth(blocks))
    files: dict[str, Any] = dict(checkpoint.files)
    del files["rank-00002.safetensors"]
    (tmp_path / "manifest.json").write_text(
        encode(manifest_of(blocks, OptimizerConfig(), NUM_UPDATES, NUM_UPDATES, {}, files))
    )
    with pytest.raises(CheckpointError, match=r"lacks elements \[6:9,0:8\] of embedding\.weight: delete the folder"):
        Checkpoint(tmp_path).verify()


# ---- any blocks under any pair of plans


@st.composite
def spreads(draw: st.DrawFn) -> Spread:
    """Up to three tiers and twelve ranks."""
    tiers: list[tuple[int, int, int]] = []
    world = 1
    for _ in range(draw(st.integers(1, 3))):
        tier = [1, 1, 1]
        for axis in draw(st.permutations(range(3))):
            tier[axis] = draw(st.sampled_from([n for n in (1, 2, 3) if n == 1 or world * n <= 12]))
            world *= tier[axis]
        tiers.append((tier[0], tier[1], tier[2]))
    params, optimizer = sorted(draw(st.tuples(*[st.integers(-1, len(tiers) - 1)] * 2)))
    return Spread(tuple(tiers), params, optimizer)


def _cut_once(names: list[str]) -> bool:
    """Whether no axis cuts two dims: there would be elements that no rank has."""
    axes = [axis for name in names for axis in CUT_BY.get(name, ())]
    return len(axes) == len(set(axes))


@st.composite
def blocks_for(draw: st.DrawFn, one: Spread, other: Spread) -> Blocks:
    """Blocks of parameters with zero to three dims of any kind that both plans can cut; some empty, some frozen."""
    rows, columns = (math.lcm(one.total(axis), other.total(axis)) for axis in (1, 2))
    head = draw(st.integers(1, 3))
    groups = [n for n in range(1, rows + 1) if all(n % s.total(1) == 0 or s.total(1) % n == 0 for s in (one, other))]
    num_kv = draw(st.sampled_from(groups))
    dims = {  # what is counted -> (elements, units)
        "heads": (rows * head, rows),
        "kv_heads": (num_kv * head, num_kv),
        "hidden": (columns * draw(st.integers(1, 2)),) * 2,
        "intermediate": (draw(st.integers(1, 13)),) * 2,
        "vocab": (draw(st.integers(1, 13)),) * 2,
        "features": (draw(st.integers(1, 5)),) * 2,
        "nothing": (0, 1),
    }
    shapes = st.lists(st.sampled_from([*dims]), max_size=3, unique=True).filter(_cut_once)
    blocks = []
    for index in range(draw(st.integers(1, 3))):
        params = tuple(
            ParamSpec(
                name=f"p{number}",
                shape=tuple(dims[name][0] for name in names),
                trainable=trainable,
                dims=tuple((name, dims[name][1]) for name in names),
            )
            for number, (names, trainable) in enumerate(draw(st.lists(st.tuples(shapes, st.booleans()), max_size=5)))
        )
        blocks.append(BlockSpec(name=f"block.{index}", params=params))
    return tuple(blocks)


@settings(max_examples=60, deadline=None)
@given(one=spreads(), other=spreads(), data=st.data())
def test_any_plan_loads_what_any_other_saved(one: Spread, other: Spread, data: st.DataObject) -> None:
    blocks = data.draw(blocks_for(one, other))
    truth = Truth(blocks)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = save(Path(folder), blocks, one, truth)
        check_stored(checkpoint, blocks, truth)
        check_restored(checkpoint, blocks, other, truth, range(other.world_size))
