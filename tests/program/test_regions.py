"""Steps of the tensor axis: of blocks that declare their operations, and of blocks whose dims alone tell them."""

from dataclasses import replace

import pytest

from terrace.model.blocks import block_specs
from terrace.model.spec import BlockSpec
from terrace.plan.in_block_messages import Leg, TensorMessage
from terrace.plan.mesh import Mesh
from terrace.plan.presets import preset
from terrace.plan.slices import slice_blocks
from terrace.plan.tensor_traffic import TensorTraffic
from terrace.program.block_program.regions import tensor_steps
from terrace.program.block_program.steps import Compute, ComputeKind, messages_of
from tests.support.generation import MODELS
from tests.support.toys import cluster_of

FAMILIES = ["llama", "gpt2", "gpt_neox", "normed heads", "norms after, scaled", "one head of keys"]
ATTENTION = (Compute(ComputeKind.ROUND),), (Compute(ComputeKind.ROUND_GRADIENTS),)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("rows", "columns", "splits"), [(2, 1, True), (4, 1, True), (2, 2, False), (1, 2, True)])
@pytest.mark.parametrize("tied", [False, True])
def test_dims_alone_tell_the_steps_that_operations_have(
    name: str, rows: int, columns: int, splits: bool, tied: bool
) -> None:
    declared = block_specs(replace(MODELS[name], tied_embeddings=tied))
    plain = [BlockSpec(name=block.name, params=block.params, tied_to=block.tied_to) for block in declared]
    cluster = cluster_of(rows * columns)
    mapping = {"package": {"tensor": {"rows": rows, "columns": columns}}}
    plan = replace(preset("ddp", cluster), mapping=mapping, sequence_parallel=splits)
    mesh = Mesh.of(cluster, plan)
    tensor = TensorTraffic.of(mesh, [tier.name for tier in cluster.tiers], plan, 6)
    both = slice_blocks(declared, mesh), slice_blocks(plain, mesh)
    for one, other in zip(*both, strict=True):
        assert other.computes is None
        for recomputed in (False, True):
            wanted, found = (
                tensor_steps(tensor, blocks, each, ATTENTION, recomputed)
                for blocks, each in zip(both, (one, other), strict=True)
            )
            assert found == wanted
            assert any(messages_of(found[0][0]))


def test_a_frozen_table_needs_no_gradients() -> None:
    cluster = cluster_of(2)
    plan = replace(preset("ddp", cluster), mapping={"package": {"tensor": 2}})
    mesh = Mesh.of(cluster, plan)
    tensor = TensorTraffic.of(mesh, [tier.name for tier in cluster.tiers], plan, 6)
    for trains in (True, False):
        blocks = list(slice_blocks(block_specs(MODELS["llama"]), mesh))
        params = tuple(replace(param, trainable=trains) for param in blocks[0].params)
        blocks[0] = replace(blocks[0], params=params)
        (_, backward), _ = tensor_steps(tensor, blocks, blocks[0], ATTENTION, False)
        found = [message for message in messages_of(backward) if isinstance(message, TensorMessage)]
        assert [message.leg for message in found] == [Leg.GATHER] * trains
