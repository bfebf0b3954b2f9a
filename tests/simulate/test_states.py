"""The closed form of model state against the formula that walks through the visits, and against counts by hand."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from terrace.model.blocks import block_specs, num_params
from terrace.model.config import ModelConfig, parse_model
from terrace.model.spec import BlockSpec, freeze
from terrace.plan.kinds import Kinds
from terrace.plan.mesh import Mesh
from terrace.plan.outer import Outer
from terrace.plan.plan import Plan
from terrace.plan.presets import PRESETS, preset
from terrace.plan.slices import slice_blocks
from terrace.program.lowering import build_stages
from terrace.simulate.footprint import footprint
from terrace.simulate.states import model_states, stage_blocks
from tests.support.differing import differing, undeclared
from tests.support.mixtures import EXPERTS, GROUPED, PLAIN
from tests.support.state_formula import model_state_bytes
from tests.support.strategies import expert_tables, plans
from tests.support.toys import cluster_of

LLAMA = parse_model(
    {
        "model_type": "llama",
        "vocab_size": 101,
        "hidden_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 36,
    }
)
SIZES = [(1,), (2,), (3, 2), (2, 2, 2), (1, 4, 1, 2)]


def closed_form(plan: Plan, sizes: tuple[int, ...], blocks: Sequence[BlockSpec], num_micros: int) -> dict[str, int]:
    cluster = cluster_of(*sizes)
    kinds = Kinds.of(blocks)
    states = model_states(cluster, plan, kinds, stage_blocks(kinds, range(len(blocks))), num_micros)
    updating = {"buffers": states.steady["buffers"] + states.updating["buffers"]}
    return states.steady | {"gathered": max(states.gathered), "grads_full": max(states.gradients)} | updating


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_experts_on_several_ranks_are_the_walk_too(data: st.DataObject) -> None:
    """Stacks are cut by experts and rows, and sharded over the ranks that hold the same ones."""
    sizes = data.draw(st.sampled_from(SIZES))
    cluster = cluster_of(*sizes)
    table = data.draw(expert_tables(cluster))
    updates = ("adamw", "sgd") if any("rows" in row for row in table.values()) else ("adamw", "muon")
    plan = replace(data.draw(plans(cluster)), experts=table, update=data.draw(st.sampled_from(updates)))
    experts = replace(PLAIN, dense_layers=data.draw(st.sampled_from(((), (0,), (1,)))))
    blocks = block_specs(replace(LLAMA, experts=experts, tied_embeddings=data.draw(st.booleans())))
    num_micros = data.draw(st.integers(1, 5))
    held = slice_blocks(blocks, Mesh.of(cluster, plan))
    assert closed_form(plan, sizes, blocks, num_micros) == model_state_bytes(cluster, plan, held, num_micros)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_the_closed_form_is_the_walk(data: st.DataObject) -> None:
    """On the data axis alone, for any placement, wire formats, prefetch, unit, tied or not, padded or not, with frozen
    parameters, with layers of two kinds, and with matrices that are held as codes.
    """
    sizes = data.draw(st.sampled_from(SIZES))
    cluster = cluster_of(*sizes)
    plan = replace(
        data.draw(plans(cluster)),
        update=data.draw(st.sampled_from(("adamw", "muon", "sgd", "sgd+momentum"))),
        products=data.draw(st.sampled_from((None, "fp8"))),
    )
    if plan.products and data.draw(st.booleans()):
        plan = replace(plan, wire={**plan.wire, "gather": {"package": "fp8"}})
    model = replace(
        LLAMA,
        num_layers=data.draw(st.integers(1, 6)),
        tied_embeddings=data.draw(st.booleans()),
        vocab_size=data.draw(st.sampled_from((5, 101, 1000))),
    )
    num_micros = data.draw(st.integers(1, 7))
    frozen = freeze(block_specs(model), data.draw(st.sampled_from((["*norm*"], ["layers.*.mlp.*"], ["layers.0.m*"]))))
    mixtures = replace(model, experts=data.draw(st.sampled_from(list(EXPERTS.values()))))
    first = replace(mixtures, num_layers=model.num_layers + 1, experts=replace(GROUPED, dense_layers=(0,)))
    every = (block_specs(model), *differing(model), *undeclared(model), frozen, *map(block_specs, (mixtures, first)))
    blocks = data.draw(st.sampled_from(every))
    assert closed_form(plan, sizes, blocks, num_micros) == model_state_bytes(cluster, plan, blocks, num_micros)


def test_what_is_read_often_stays() -> None:
    """With `prefetch` above the distance of any two readers no block is gathered twice, so no such message is kept."""
    cluster = cluster_of(2, 2, 2)
    plan = replace(preset("three-level", cluster), wire={"gather_backward": {"package": "fp8"}}, compute="bf16")
    _, _, _, two_lookups = differing(replace(LLAMA, num_layers=1, vocab_size=5, tied_embeddings=True))
    for prefetch in range(9):
        for num_micros in (1, 2):
            chosen = replace(plan, prefetch=prefetch)
            found = closed_form(chosen, (2, 2, 2), two_lookups, num_micros)
            assert found == model_state_bytes(cluster, chosen, two_lookups, num_micros), (prefetch, num_micros)


def test_a_block_without_gradients_does_not_hide_the_one_in_flight() -> None:
    """Below a frozen head that borrows from the look-ups, their gradient of the micro-batch before is in flight."""
    cluster = cluster_of(2)
    tied = replace(LLAMA, num_layers=1, tied_embeddings=True)
    for patterns in (["*norm*"], ["layers.0.*"], ["layers.*", "*norm*"]):
        blocks = freeze(block_specs(tied), patterns)
        for num_micros in (1, 2, 3):
            plan = replace(preset("zero3", cluster), grads="package")
            found = closed_form(plan, (2,), blocks, num_micros)
            assert found == model_state_bytes(cluster, plan, blocks, num_micros), (patterns, num_micros)


def test_presets_too() -> None:
    for name in PRESETS:
        cluster = cluster_of(2, 2, 2)
        plan = replace(preset(name, cluster), compute="bf16")
        assert closed_form(plan, (2, 2, 2), block_specs(LLAMA), 3) == model_state_bytes(
            cluster, plan, block_specs(LLAMA), 3
        )


def test_islands_keep_the_parameters_they_agreed_on() -> None:
    cluster = cluster_of(2, 2, 2)
    outers = (Outer(tier="system", every=4, delay=2), Outer(tier="system", every=4, optimizer="average"))
    for name, outer in product(PRESETS, outers):
        plan = preset(name, cluster)
        inside = {state: "node" for state in ("params", "grads", "optimizer") if getattr(plan, state) == "system"}
        pause = plan.params_backward and "package"
        plan = replace(plan, outer=outer, params_backward=pause, compute="bf16", wire={})
        plan = replace(plan, **inside)  # type: ignore[arg-type]
        found = closed_form(plan, (2, 2, 2), block_specs(LLAMA), 3)
        assert found == model_state_bytes(cluster, plan, block_specs(LLAMA), 3)
        (program,) = build_stages(cluster, plan, block_specs(LLAMA), 3, 16)
        assert found["outer"] == program.state_bytes["outer"] > 0
        assert footprint(cluster, plan, Kinds.of(block_specs(LLAMA)), 16, 3)["outer"] == found["outer"]


def test_tensor_ranks_and_stages_hold_the_whole_model() -> None:
    """Beyond their shares of it, several ranks hold only the parts that each holds whole."""
    untied = replace(LLAMA, num_layers=6)
    for num_stages in (1, 2, 3, 4):
        assert sum(held_by_stage(untied, num_stages)) == num_params(untied)
    tied = replace(untied, tied_embeddings=True)
    assert sum(held_by_stage(tied, 2)) == num_params(tied) + 101 * 24  # a copy beside the head
    norms = 6 * 2 * 24 + 24
    even = replace(untied, vocab_size=100)
    assert 2 * held_by_stage(even, 1, 2)[0] == num_params(even) + norms
    # Each of four tensor ranks holds both key-value heads.
    keys = 6 * 2 * 2 * 6 * 24
    assert 4 * held_by_stage(even, 1, 4)[0] == num_params(even) + 3 * norms + 3 * keys


def held_by_stage(model: ModelConfig, num_stages: int, tensor: int = 1) -> list[int]:
    """Parameters on a rank of each stage of an even pipeline."""
    kinds, cluster = Kinds.of(block_specs(model)), cluster_of(tensor, num_stages)
    plan = replace(preset("ddp", cluster), mapping={"package": {"tensor": tensor}, "node": {"pipeline": num_stages}})
    cuts = [index * len(kinds.blocks) // num_stages for index in range(num_stages + 1)]
    stages = (stage_blocks(kinds, range(*each)) for each in pairwise(cuts))
    return [model_states(cluster, plan, kinds, stage, 1).steady["params"] // 4 for stage in stages]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_closed_form_is_the_walk_under_a_tensor_axis(data: st.DataObject) -> None:
    """Buffers that tensor ranks share, messages inside blocks, and padding included."""
    sizes = data.draw(st.sampled_from([(2, 2), (4, 3), (2, 2, 2)]))
    cluster = cluster_of(*sizes)
    factors = data.draw(st.sampled_from([{"rows": 2}, {"columns": 2}, {"rows": 2, "columns": 2}]))
    tensor = math.prod(factors.values())
    mapping: dict[str, Any] = {"package": {"data": sizes[0], "tensor": 1}}
    if sizes[0] % tensor == 0:
        mapping["package"] = {"data": sizes[0] // tensor, "tensor": factors}
    else:
        mapping = {"package": {"tensor": {"rows": 2}}, "node": {"tensor": {"columns": 2}}}
    plan = replace(
        preset(data.draw(st.sampled_from(sorted(PRESETS))), cluster),
        wire={},
        mapping=mapping,
        compute=data.draw(st.sampled_from(("fp32", "bf16"))),
        recompute=data.draw(st.sampled_from(((), ("layers.*",)))),
        sequence_parallel=data.draw(st.booleans()),
        prefetch=data.draw(st.integers(0, 3)),
    )
    model = replace(LLAMA, num_layers=data.draw(st.integers(1, 4)), tied_embeddings=data.draw(st.booleans()))
    num_micros = data.draw(st.integers(1, 4))
    mixed = replace(model, experts=data.draw(st.sampled_from(list(EXPERTS.values()))))
    whole = data.draw(st.sampled_from((block_specs(model), *differing(model), block_specs(mixed))))
    blocks = slice_blocks(whole, Mesh.of(cluster, plan))
    walked = model_state_bytes(cluster, plan, blocks, num_micros, 7)
    found = footprint(cluster, plan, Kinds.of(whole), 7, num_micros, backend="cpu")
    for name in ("params", "secondary", "grads", "optimizer", "feedback", "buffers"):
        assert found[name] == walked[name], name
    for name in ("gathered", "grads_full"):
        assert found.get(name, 0) <= walked[name], name
