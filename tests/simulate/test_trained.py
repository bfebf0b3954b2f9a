"""The part of weight gradients that is computed: by elements that a token meets, the same for slices of a rank."""

from dataclasses import replace

import pytest

from terrace.cluster.presets import load_cluster
from terrace.model.block_operations import layer_operations
from terrace.model.blocks import block_specs
from terrace.model.lora.config import LoraConfig, with_adapters
from terrace.model.spec import BlockSpec, freeze
from terrace.plan.mesh import Mesh
from terrace.plan.presets import preset
from terrace.plan.slices import slice_blocks
from terrace.program.lowering import build
from terrace.simulate.cost import step_costs
from terrace.simulate.layers import seconds_of
from terrace.simulate.trained import trained_part
from terrace.simulate.work import Work
from tests.support.mixtures import SHARED, mixture
from tests.support.planner_cases import SMALL

TIED = replace(SMALL, tied_embeddings=True)
HIDDEN, INNER = SMALL.hidden_size, SMALL.mlp_size
LAYER = 4 * HIDDEN**2 + 2 * HIDDEN * INNER


def parts(blocks: tuple[BlockSpec, ...]) -> list[float]:
    return [trained_part(block, blocks) for block in blocks]


def test_all_of_a_model_that_trains_is_computed() -> None:
    for model in (TIED, mixture(SHARED)):
        assert set(parts(block_specs(model))) == {1.0}


def test_adapters_are_a_small_part_of_a_layer() -> None:
    blocks = with_adapters(block_specs(TIED), LoraConfig(rank=4, targets=("layers.*.mlp.*",)))
    adapters = 2 * 4 * (HIDDEN + INNER)
    assert parts(blocks) == [0.0, *[pytest.approx(adapters / (LAYER + adapters))] * 4, 0.0]


@pytest.mark.parametrize(
    ("patterns", "head"),
    [(("embedding.weight",), 0.0), (("embedding.positions",), 1.0), (("head.*", "layers.*"), 1.0), (("*",), 0.0)],
)
def test_a_tied_head_computes_the_gradient_of_its_matrix_if_that_trains(patterns: tuple[str, ...], head: float) -> None:
    assert parts(freeze(block_specs(TIED), patterns))[-1] == head


def test_a_head_that_is_frozen_takes_no_seconds_for_its_gradient() -> None:
    cluster, blocks = load_cluster("dgx-a100"), block_specs(TIED)
    work = Work(layer=layer_operations(TIED), sequence=256)
    plan = replace(preset("zero3", cluster), compute="bf16")
    whole, frozen = (
        step_costs(build(cluster, plan, each, 1), work).backward_s[-1] for each in (blocks, freeze(blocks, ["emb*"]))
    )
    assert whole - frozen == pytest.approx(seconds_of(cluster.device, work, blocks[-1]).weight_s)


def test_of_experts_those_count_that_a_token_meets() -> None:
    model = mixture(SHARED)
    experts = model.experts
    assert experts is not None
    blocks = freeze(block_specs(model), ["layers.*.mlp.gate.*", "layers.*.mlp.up.*", "layers.*.mlp.down.*"])
    routed = 3 * experts.per_token * experts.intermediate_size * model.hidden_size
    others = sum(param.numel for param in blocks[1].params if param.decays and not param.is_stack)
    assert parts(blocks)[1] == pytest.approx(others / (others + routed))


@pytest.mark.parametrize("mesh", [Mesh.build(1, rows=(2,)), Mesh.build(1, columns=(2,), rows=(2,))], ids=["2", "2 x 2"])
def test_slices_have_the_part_of_whole_blocks(mesh: Mesh) -> None:
    """Although ranks hold some matrices of adapters whole."""
    blocks = with_adapters(block_specs(TIED), LoraConfig(rank=4))
    sliced = slice_blocks(blocks, mesh)
    assert sliced[1].num_trainable / blocks[1].num_trainable > 1.1 * sliced[1].num_frozen / blocks[1].num_frozen
    assert parts(sliced) == parts(blocks)
