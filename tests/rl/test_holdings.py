"""Boxes of parameters that ranks hold, held against numbers of their elements in flat buffers."""

from math import prod

import numpy as np
import pytest

from terrace.model.blocks import block_specs
from terrace.model.config import parse_model
from terrace.model.spec import BlockSpec, freeze
from terrace.plan.flats import FlatParamSpec
from terrace.plan.mesh import Mesh
from terrace.plan.slices import rank_slices
from terrace.rl.hand_over.moves import Parts
from terrace.rl.hand_over.transition import generation_slices, training_parts
from tests.support.hand_overs import elements
from tests.support.simulated_ranks import Spread

LLAMA = {
    "model_type": "llama", "vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 10, "hidden_act": "silu",
}  # fmt: skip
BLOCKS = freeze(block_specs(parse_model(LLAMA)), ["layers.1.*norm*", "head.weight"])
SPREADS = {
    "data 3": Spread(((3, 1, 1),), params=0, optimizer=0),
    "three levels": Spread(((2, 1, 1), (2, 1, 1), (2, 1, 1)), params=0, optimizer=2),
    "rows 4, more than key-value heads": Spread(((1, 4, 1),), params=-1, optimizer=0),
    "rows 2 x columns 2, data 2": Spread(((1, 2, 2), (2, 1, 1)), params=0, optimizer=1),
    "2 stages of rows 2, data 2": Spread(((1, 2, 1), (2, 1, 1)), params=-1, optimizer=1, stages=2),
    "ulysses 2 x ring 2, data 2": Spread(((1, 1, 1), (2, 1, 1)), params=0, optimizer=1, context=(2, 2)),
}


def kept(flat: FlatParamSpec, mesh: Mesh, rank: int, tier: int) -> set[tuple[str, int]]:
    """(Parameter, number of an element) in a rank's slice of a flat buffer; padding has no number."""
    found = []
    for param in flat.params:
        numbers = np.full(param.shape, -1)
        part = np.arange(prod(param.whole or param.shape)).reshape(param.whole or param.shape)
        part = part[rank_slices(param, mesh, rank)]
        numbers[tuple(slice(size) for size in part.shape)] = part
        found += [(param.name, int(number)) for number in numbers.flatten()]
    return {each for each in found[flat.layout.slice(tier, flat.layout.coordinates(rank), flat.padded)] if each[1] >= 0}


def numbers(parts: Parts, block: BlockSpec) -> set[tuple[str, int]]:
    shapes = {param.name: param.shape for param in block.params}
    return {(name, int(np.ravel_multi_index(index, shapes[name]))) for name, index in elements(parts)}


@pytest.mark.parametrize("name", SPREADS)
def test_ranks_hold_their_ranges_of_flat_buffers(name: str) -> None:
    spread = SPREADS[name]
    programs = spread.programs(BLOCKS)
    mesh = programs[0].mesh
    for index, block in enumerate(BLOCKS):
        stages = {mesh.stage(rank) for rank, program in enumerate(programs) if index in program.stage.held}
        flats = programs[0].model.flats[index]
        working, masters = training_parts(flats, mesh, stages), training_parts(flats, mesh, stages, "optimizer")
        for rank in range(spread.world_size):
            if mesh.stage(rank) not in stages:
                assert not working[rank]
                assert not masters[rank]
                continue
            params = [kept(flat, mesh, rank, flat.layout.params) for flat in flats]
            owned = [
                kept(flat, mesh, rank, flat.layout.optimizer if flat.trainable else flat.layout.params)
                for flat in flats
            ]
            assert numbers(working[rank], block) == set().union(*params)
            assert numbers(masters[rank], block) == set().union(*owned)


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_slices_of_generation_are_those_of_tensor_ranks(rows: int) -> None:
    programs = Spread(((1, rows, 1),)).programs(BLOCKS)
    for index, block in enumerate(BLOCKS):
        held = training_parts(programs[0].model.flats[index], programs[0].mesh, {0})
        slices = generation_slices(block, rows)
        assert [*map(elements, slices)] == [*map(elements, held)]
        for param in block.params:
            covered = set().union(*(elements({param.name: part.get(param.name, [])}) for part in slices))
            assert len(covered) == param.numel
