"""Bytes of the tensor axis against the published formulas, and rules of its mapping."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrace.base.errors import PlanError
from terrace.cluster.cluster import Cluster
from terrace.model.blocks import block_specs
from terrace.model.config import ModelConfig, parse_model
from terrace.model.params import ParamSpec
from terrace.model.spec import BlockSpec
from terrace.plan.in_block_messages import TensorMessage
from terrace.plan.mesh import ORDER, Mesh, position
from terrace.plan.plan import Plan
from terrace.plan.presets import preset
from terrace.plan.slices import rank_slices, slice_blocks
from terrace.plan.tensor_traffic import TensorTraffic
from terrace.plan.validate import validate
from terrace.plan.wire import MessageClass
from terrace.program.lowering import build
from tests.support.byte_formula import step_bytes
from tests.support.state_formula import model_state_bytes
from tests.support.tensor_formula import block_messages
from tests.support.toys import cluster_of

SEQUENCE, HIDDEN, HEADS, VOCAB = 24, 48, 12, 60
FP32 = 4


def gpt(layers: int = 2, **changes: Any) -> ModelConfig:
    table = {"model_type": "gpt2", "vocab_size": VOCAB, "n_embd": HIDDEN, "n_layer": layers, "n_head": HEADS}
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "n_positions": SEQUENCE}
    return parse_model(table | quiet | changes)


def with_tensor(cluster: Cluster, rows: dict[str, Any], name: str = "ddp", **changes: Any) -> Plan:
    return replace(preset(name, cluster), mapping=rows, micro_batch=2, **changes)


def axis_of(cluster: Cluster, plan: Plan) -> tuple[TensorTraffic, Sequence[BlockSpec]]:
    mesh = Mesh.of(cluster, plan)
    return TensorTraffic.of(mesh, [tier.name for tier in cluster.tiers], plan, SEQUENCE), slice_blocks(
        block_specs(gpt()), mesh
    )


def sent(tensor: TensorTraffic, messages: Sequence[TensorMessage]) -> int:
    return sum(num_bytes for message in messages for _, num_bytes in tensor.sends(message))


@pytest.mark.parametrize("t", [2, 3, 4, 6])
@pytest.mark.parametrize("splits", [False, True])
def test_a_layer_sends_what_megatron_publishes(t: int, splits: bool) -> None:
    """Narayanan et al. 2104.04473, section 3.2: four all-reduces of b s h a layer, 8 b s h (t - 1) / t elements a rank.

    The sequence parallel form sends the same, and gathers two inputs once more (Korthikanti et al., section 4.2.2).
    """
    cluster = cluster_of(t)
    tensor, blocks = axis_of(cluster, with_tensor(cluster, {"package": {"tensor": t}}, sequence_parallel=splits))
    forward, backward = block_messages(tensor, blocks, 1)
    bsh = 2 * SEQUENCE * HIDDEN
    again = 2 * bsh * (t - 1) // t if splits else 0
    assert sent(tensor, forward) == 4 * bsh * (t - 1) // t * FP32
    assert sent(tensor, [*forward, *backward]) == (8 * bsh * (t - 1) // t + again) * FP32


@pytest.mark.parametrize(("rows", "columns", "depth", "data"), [(2, 2, 1, 1), (2, 3, 2, 2), (4, 1, 2, 1), (1, 4, 1, 2)])
def test_a_layer_sends_the_five_terms_of_axonn(rows: int, columns: int, depth: int, data: int) -> None:
    """Singh et al. 2305.13525, section 5, for the four matrices of a layer; norms' statistics come on top."""
    cluster = cluster_of(rows * columns * depth, data)
    mapping = {"package": {"tensor": {"rows": rows, "columns": columns, "depth": depth}}}
    plan = with_tensor(
        cluster, mapping, params="package", grads="package", optimizer="package", sequence_parallel=False
    )
    tensor, blocks = axis_of(cluster, plan)
    m = 2 * SEQUENCE

    def all_reduce(ranks: int, numel: float) -> float:
        return 2 * (ranks - 1) / ranks * numel

    products = [(HIDDEN, 3 * HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 4 * HIDDEN), (4 * HIDDEN, HIDDEN)]  # (in, out)
    forward = backward = weights = 0.0
    for index, (k, n) in enumerate(products):
        over_in, over_out = (rows, columns) if index % 2 else (columns, rows)  # neighbours swap the axes
        forward += all_reduce(over_in, m * n / over_out)
        backward += all_reduce(over_out, m * k / over_in)
        weights += k * n / (rows * columns)
    ahead, back = block_messages(tensor, blocks, 1)
    norms = 4 * (columns - 1) * m * FP32  # two layer norms of two numbers a token, in each direction
    assert sent(tensor, ahead) == pytest.approx(forward * FP32 + norms)
    assert sent(tensor, back) == pytest.approx(backward * FP32 + norms)

    # The two terms of depth, and that of data, are the classes of the data axis; biases and norms come on top.
    bare = tuple(replace(block, params=tuple(p for p in block.params if len(p.shape) == 2)) for block in blocks[1:-1])
    total = step_bytes(cluster, replace(plan, prefetch=0), bare, 1, SEQUENCE)
    layers = len(bare)
    gathers = total.get((MessageClass.GATHER, "package"), 0) + total.get((MessageClass.GATHER_BACKWARD, "package"), 0)
    visits = 2 * layers - 1  # the last layer stays between its forward and its backward
    assert gathers == visits * (depth - 1) * weights / depth * FP32
    assert total.get((MessageClass.REDUCE, "package"), 0) == layers * (depth - 1) / depth * weights * FP32
    shares = layers * all_reduce(data, weights / depth) * FP32
    assert total.get((MessageClass.SYNC, "node"), 0) == pytest.approx(shares)


def test_a_whole_step_counts_recomputation_and_micro_batches() -> None:
    cluster = cluster_of(2)
    plan = with_tensor(cluster, {"package": {"tensor": 2}}, sequence_parallel=False)
    blocks = slice_blocks(block_specs(gpt()), Mesh.of(cluster, plan))

    def tensor_bytes(plan: Plan, num_micros: int) -> int:
        return step_bytes(cluster, plan, blocks, num_micros, SEQUENCE)[MessageClass.TENSOR, "package"]

    once = tensor_bytes(plan, 1)
    assert tensor_bytes(plan, 3) == 3 * once
    again = tensor_bytes(replace(plan, recompute=("layers.*",)), 1)
    assert again - once == 2 * 2 * 2 * SEQUENCE * HIDDEN * FP32  # the forwards of two layers: two all-reduces each
    halved = tensor_bytes(replace(plan, wire={"tensor": {"package": "bf16"}}), 1)
    numbers = 3 * 2 * SEQUENCE * FP32  # of the loss, which are never rounded
    assert halved - numbers == (once - numbers) / 2


@settings(max_examples=40, deadline=None)  # a mesh of thousands of ranks, on a busy machine
@given(st.lists(st.tuples(*[st.integers(1, 3)] * 4), min_size=1, max_size=3), st.data())
def test_every_rank_has_one_place_on_the_mesh(degrees: list[tuple[int, int, int, int]], data: st.DataObject) -> None:
    """Places identify ranks; peers on an axis differ there alone and are in the order of their places."""
    mesh = Mesh(tuple((columns, rows, 1, 1, 1, depth, pipeline) for columns, rows, depth, pipeline in degrees))
    world = math.prod(math.prod(row) for row in mesh.degrees)
    axes = data.draw(st.sets(st.sampled_from(ORDER)))
    others = [axis for axis in ORDER if axis not in axes]
    rank = data.draw(st.integers(0, world - 1))
    both = {(mesh.coordinates(each, axes), mesh.coordinates(each, others)) for each in range(world)}
    assert len(both) == world
    tier = data.draw(st.integers(0, len(degrees) - 1))
    peers = mesh.peers(rank, tier, axes)
    assert [mesh.coordinates(peer, axes)[tier] for peer in peers] == list(range(mesh.group(*axes)[tier]))
    assert {mesh.coordinates(peer, others) for peer in peers} == {mesh.coordinates(rank, others)}
    assert rank in peers


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 40), st.integers(1, 7))
def test_slices_of_all_ranks_are_the_parameter(rows: int, columns: int, vocab: int, other: int) -> None:
    spec = ParamSpec(name="w", shape=(vocab, other), dims=(("vocab", vocab), ("features", other)))
    mesh = Mesh(((columns, rows, 1, 1, 1, 1, 1),))
    (block,) = slice_blocks([BlockSpec(name="b", params=(spec,))], mesh)
    (local,) = block.params
    held = []
    for rank in range(rows * columns):
        part = rank_slices(local, mesh, rank)
        held += list(range(*part[0].indices(vocab)))
        assert part[0].stop - part[0].start <= local.shape[0]
        assert part[1] == slice(0, other)
    assert sorted(held) == list(range(vocab))


def test_parts_of_nested_tiers_are_numbered_outermost_last() -> None:
    assert [position((2, 3), (inner, outer)) for inner in range(2) for outer in range(3)] == list(range(6))


REFUSED = [
    ({"package": {"tensor": 8}}, {}, ("12 heads", "rows = 8", "use 6")),
    ({"package": {"tensor": {"columns": 5}}, "node": {}}, {}, ("hidden", "columns = 5")),
    (
        {"package": {"tensor": {"rows": 2, "depth": 2}}},
        {"params": "device"},
        ("depth = 2", "place params on 'package'"),
    ),
    ({"package": {"tensor": {"height": 4}}}, {}, ("height", "rows")),
    ({"package": {"tensor": {"rows": 0}}}, {}, ("rows = 0", "at least 1")),
    ({"package": {"data": {"rows": 4}}}, {}, ("only the tensor and the context axis are factored",)),
    ({}, {"tensor_chunks": 2}, ("tensor_chunks = 2 has no effect",)),
    ({}, {"wire": {"tensor": {"package": "bf16"}}}, ("wire.tensor.package", "has no effect")),
    (
        {"package": {"tensor": 4}},
        {"wire": {"tensor": {"package": "int8+feedback"}}},
        ("error feedback", "carries activations"),
    ),
]


@pytest.mark.parametrize(("mapping", "changes", "words"), REFUSED, ids=[words[0] for *_, words in REFUSED])
def test_a_mapping_that_cannot_run_is_refused(mapping: Any, changes: Any, words: tuple[str, ...]) -> None:
    sizes = {"package": 4}
    for axes in mapping.values():
        for degree in axes.values():
            sizes["package"] = max(
                4, degree if isinstance(degree, int) else math.prod(max(1, d) for d in degree.values())
            )
    cluster = cluster_of(sizes["package"])
    mapping = {name: row for name, row in mapping.items() if name == "package"}
    with pytest.raises(PlanError) as caught:
        build(cluster, replace(preset("ddp", cluster), mapping=mapping, **changes), block_specs(gpt()), 1, SEQUENCE)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("formula", [step_bytes, model_state_bytes])
def test_whole_blocks_and_a_missing_sequence_are_refused(formula: Callable[..., object]) -> None:
    """A formula over the elements of a rank does not count whole blocks, or messages of no tokens."""
    cluster = cluster_of(2)
    plan = with_tensor(cluster, {"package": {"tensor": 2}})
    held = slice_blocks(block_specs(gpt()), Mesh.of(cluster, plan))
    assert formula(cluster, plan, held, 1, SEQUENCE)
    with pytest.raises(PlanError, match="give what one tensor rank holds"):
        formula(cluster, plan, block_specs(gpt()), 1, SEQUENCE)
    with pytest.raises(PlanError, match="length of a sequence"):
        formula(cluster, plan, held, 1)


def test_blocks_that_declare_nothing_are_refused() -> None:
    cluster = cluster_of(2)
    plan = with_tensor(cluster, {"package": {"tensor": 2}})
    validate(cluster, plan, block_specs(gpt()))
    bare = (BlockSpec(name="block", params=(ParamSpec(name="weight", shape=(4, 4)),)),)
    with pytest.raises(PlanError, match=r"block\.weight does not declare"):
        build(cluster, plan, bare, 1, SEQUENCE)
    with pytest.raises(PlanError, match="length of a sequence"):
        build(cluster, plan, block_specs(gpt()), 1)
