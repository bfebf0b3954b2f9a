"""Plans: presets on any cluster, refusals of validation and their messages, the table form, the layout."""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrace.base.errors import ConfigError, PlanError
from terrace.base.schema import dump
from terrace.cluster.cluster import Cluster
from terrace.model.params import ParamSpec
from terrace.model.spec import BlockSpec
from terrace.plan.layout import Layout
from terrace.plan.outer import Outer
from terrace.plan.plan import Plan
from terrace.plan.presets import PRESETS, parse_plan, preset
from terrace.plan.residency import recomputed
from terrace.plan.state_bytes import keeps_master
from terrace.plan.validate import num_micro_batches, validate
from tests.support.toys import MODELS, cluster_of

BLOCKS = tuple(
    BlockSpec(name=name, params=(ParamSpec(name="weight", shape=(5, 3)),)) for name in ("embedding", "layers.0", "head")
)
CLUSTERS = {len(sizes): cluster_of(*sizes) for sizes in ((4,), (4, 3), (4, 3, 2), (4, 3, 2, 5))}
THREE = CLUSTERS[3]
DEVICE = ("device", "device", "device")

# (params, grads, optimizer) per preset on 1, 2, 3 and 4 tiers; with two tiers `node` is the outer one.
PLACEMENTS = {
    "ddp": (DEVICE, DEVICE, DEVICE, DEVICE),
    "zero1": tuple(("device", "device", last) for last in ("package", "node", "system", "site")),
    "zero2": tuple(("device", last, last) for last in ("package", "node", "system", "site")),
    "zero3": tuple((last, last, last) for last in ("package", "node", "system", "site")),
    "hsdp": tuple((node, node, node) for node in ("package", "node", "node", "node")),
    "mics": tuple((node, node, node) for node in ("package", "node", "node", "node")),
    "zero++": tuple((last, last, last) for last in ("package", "node", "system", "site")),
    "three-level": (
        ("package", "package", "package"),
        ("package", "node", "node"),
        ("package", "node", "system"),
        ("package", "node", "site"),
    ),
}
PLACEMENTS["three-level-compressed"] = PLACEMENTS["three-level"]


@pytest.mark.parametrize("num_tiers", CLUSTERS)
@pytest.mark.parametrize("name", PRESETS)
def test_preset_places_states(name: str, num_tiers: int) -> None:
    plan = preset(name, CLUSTERS[num_tiers])
    assert (plan.params, plan.grads, plan.optimizer) == PLACEMENTS[name][num_tiers - 1]
    assert plan.name == name
    assert plan.params_backward == ("node" if name == "zero++" and num_tiers > 2 else None)
    validate(CLUSTERS[num_tiers], plan, BLOCKS)


def test_node_is_the_tier_below_the_outermost_without_one_of_that_name() -> None:
    tiers = tuple(replace(tier, name=name) for tier, name in zip(THREE.tiers, ("die", "box", "rack"), strict=True))
    assert preset("hsdp", replace(THREE, tiers=tiers)).params == "box"
    assert preset("hsdp", replace(THREE, tiers=tiers[:2])).params == "die"
    assert preset("zero++", replace(THREE, tiers=tiers)).params_backward == "box"


def zero3(**changes: Any) -> Plan:
    return replace(preset("zero3", THREE), **changes)


# A plan that breaks one rule, and what its message must hold: the value, the rule and the fix.
REFUSED: list[tuple[Plan, tuple[str, ...]]] = [
    (zero3(params="nodde"), ("places a state on a tier that is not there", "'nodde'", "did you mean 'node'?")),
    (zero3(optimizer="sistem"), ("'sistem'", "did you mean 'system'?")),
    (zero3(params_backward="nod"), ("'nod'", "did you mean 'node'?")),
    (zero3(params="moon"), ("'moon'", "known: device, node, package, system")),
    (zero3(mapping={"nodes": {"data": 3}}), ("mapping", "'nodes'", "not in the cluster", "did you mean 'node'?")),
    (zero3(mapping={"node": {"dat": 3}}), ("mapping.node", "'dat'", "did you mean 'data'?")),
    (zero3(mapping={"node": {"data": 0}}), ("mapping.node.data = 0", "at least 1")),
    (zero3(mapping={"node": {"data": 2}}), ("mapping.node", "multiply to 2", "joins 3", "make them multiply to 3")),
    (zero3(mapping={"node": {}}), ("multiply to 1", "leave the row out")),
    (
        zero3(mapping={"node": {"context": 3}}),
        ("the context axis of the mapping", "no block of this model declares its heads", "give the tier to the data"),
    ),
    (zero3(grads="node"), ("params = 'system' lies outside grads = 'node'", "device <= package <= node <= system")),
    (zero3(params="device", grads="system", optimizer="node"), ("grads = 'system' lies outside optimizer = 'node'",)),
    (zero3(grads="device", params="package"), ("place grads on 'package' or further out",)),
    (zero3(params_backward="system"), ("params_backward = 'system'", "inside params = 'system'", "further in")),
    (zero3(params="node", params_backward="system"), ("params_backward = 'system'", "inside params = 'node'")),
    (zero3(params_backward="device"), ("params_backward = 'device'", "write params = 'device'")),
    (zero3(wire={"gathr": {"node": "bf16"}}), ("message class 'gathr'", "did you mean 'gather'?")),
    (zero3(wire={"control": {"node": "bf16"}}), ("message class 'control'", "known: combine, context, dispatch")),
    (zero3(wire={"gather": {"nod": "bf16"}}), ("wire.gather", "'nod'", "did you mean 'node'?")),
    (zero3(wire={"gather": {"node": "bf61"}}), ("wire.gather.node: 'bf61'", "did you mean 'bf16'?")),
    (zero3(wire={"gather": {"node": "int4:100"}}), ("wire.gather.node: wire format 'int4:100'", "a power of two")),
    (zero3(wire={"gather": {"node": "int4:8"}}), ("a power of two from 16 to 4096", "write int4:128")),
    (zero3(wire={"gather": {"node": "int4:+"}}), ("wire.gather.node", "'int4:+'")),
    (zero3(wire={"reduce": {"node": "int4+feed"}}), ("wire.reduce.node", "'+feed'", "'+feedback'")),
    (zero3(wire={"reduce": {"node": "bf16+feedback"}}), ("a dtype has neither blocks nor feedback", "write 'bf16'")),
    (zero3(wire={"gather": {"node": "bf16:64"}}), ("a dtype has neither blocks nor feedback",)),
    (zero3(wire={"gather": {"node": "int8+feedback"}}), ("error feedback is for gradients", "write 'int8'")),
    (zero3(wire={"gather": {"node": "fp64"}}), ("wire.gather.node = 'fp64'", "wider than the fp32", "use 'fp32'")),
    (zero3(compute="bf16", wire={"refresh": {"node": "fp32"}}), ("wire.refresh.node = 'fp32'", "wider than the bf16")),
    (zero3(wire={"sync": {"node": "fp64"}}), ("wire.sync.node = 'fp64'", "wider than the fp32")),
    (zero3(wire={"sync": {"node": "bf16"}}), ("wire.sync.node has no effect", "what does is gather, gather_backward")),
    (zero3(wire={"pipeline": {"node": "int8"}}), ("wire.pipeline.node has no effect: the pipeline axis has no ranks",)),
    (
        zero3(wire={"pipeline_backward": {"node": "int8"}}, mapping={"package": {"pipeline": 4}}, params="device"),
        ("wire.pipeline_backward.node has no effect", "no ranks on 'node'; leave it out"),
    ),
    (
        zero3(wire={"pipeline": {"package": "int8+feedback"}}, mapping={"package": {"pipeline": 4}}),
        ("wire.pipeline.package = 'int8+feedback'", "pipeline carries activations", "write 'int8'"),
    ),
    (zero3(wire={"context": {"node": "int8"}}), ("wire.context.node has no effect: the context axis has no ranks",)),
    (
        zero3(wire={"context": {"node": "int8"}}, balance="cost"),
        ("wire.context.node with balance", 'write balance = "tokens"'),
    ),
    (zero3(compute="fp64"), ("compute = 'fp64'", "wider than master = 'fp32'", "use master = 'fp64'")),
    (zero3(recompute=("layer.*",)), ("recompute pattern 'layer.*'", "matches no block", "did you mean 'layers.*'?")),
    (zero3(recompute=("layers.*: flash",)), ("recompute 'layers.*: flash'", "'flash' is no operation of a layer")),
    (zero3(recompute=("layers.*:",)), ("'' is no operation of a layer; give one of attention, mlp, norms",)),
    (
        zero3(recompute=("layers.* last 2",)),
        ("recompute 'layers.* last 2': an entry is a pattern of block names, then",),
    ),
    (zero3(recompute=("nothing.*",)), ("matches no block; known: embedding, head, layers.*",)),
    (zero3(recompute=("layers.* every 0",)), ("recompute 'layers.* every 0': every 0 names no block",)),
    (
        zero3(recompute=("head: attention",)),
        ("no decoder layer matches 'head', and no other block has operations; leave attention out",),
    ),
    (zero3(micro_batch=0), ("micro_batch = 0", "at least 1")),
    (zero3(unit=0), ("unit = 0", "at least 1 micro-batch")),
    (zero3(unit=9, compute="bf16"), ("unit = 9 with compute = 'bf16'", "use at most 8")),
    (zero3(wire={"gather": {"node": "int4:064"}}), ("a power of two from 16 to 4096",)),
    (zero3(wire={"gather": {"node": "topk:32"}}), ("sparse format is for gradients", "all but one of 32", "'int4'")),
    (zero3(wire={"reduce": {"node": "topk:16"}}), ("N a power of two from 32 to 1024", "write topk:32")),
    (
        zero3(params="device", grads="device", optimizer="package", wire={"sync": {"node": "topk:32+feedback"}}),
        ("wire.sync.node = 'topk:32+feedback'", "over 'system', which has 'fp32'", "give both 'topk:32+feedback'"),
    ),
    (
        zero3(
            params="device", grads="device", optimizer="device", wire={"sync": {"node": "topk", "system": "topk:64"}}
        ),
        ("wire.sync.node = 'topk'", "over 'system', which has 'topk:64'"),
    ),
    (zero3(prefetch=-1), ("prefetch = -1", "use 0 for no prefetch")),
]


@pytest.mark.parametrize(("plan", "words"), REFUSED, ids=[words[0] for _, words in REFUSED])
def test_refusal_names_value_rule_and_fix(plan: Plan, words: tuple[str, ...]) -> None:
    with pytest.raises(PlanError) as caught:
        validate(THREE, plan, BLOCKS)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_mixtures_that_have_no_form_are_refused() -> None:
    with pytest.raises(PlanError) as caught:
        validate(THREE, zero3(mapping={"node": {"tensor": {"columns": 3}}}), MODELS["mixture tied"].declared)
    for word in ("3 tensor columns", "layers.0.mlp.gate.weight holds 4 experts", "use tensor rows"):
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    validate(THREE, zero3(compute="bf16"), MODELS["mixture, grouped"].declared)


def test_what_is_just_inside_the_rules_passes() -> None:
    validate(THREE, zero3(mapping={"node": {"data": 3, "tensor": 1}, "package": {"data": 4}}), BLOCKS)
    validate(THREE, zero3(params_backward="node"), BLOCKS)
    inside = {"sync": {"package": "topk", "system": "topk:64"}}  # a slice of a sum is coded anew on each tier
    validate(THREE, zero3(params="device", grads="device", wire=inside), BLOCKS)
    outermost = {"sync": {"node": "topk:64", "system": "topk:64"}}
    validate(THREE, zero3(params="device", grads="device", optimizer="device", wire=outermost), BLOCKS)
    validate(THREE, zero3(compute="bf16", wire={"reduce": {"node": "fp32", "system": "fp32"}}), BLOCKS)
    validate(THREE, zero3(compute="fp64", master="fp64", prefetch=0, recompute=("*",)), BLOCKS)


def test_unknown_preset_and_keys_are_refused() -> None:
    with pytest.raises(PlanError, match=r"no plan preset 'zero33'; did you mean 'zero3'\?"):
        preset("zero33", THREE)
    with pytest.raises(ConfigError, match=r"unknown key plan\.optimiser; did you mean 'plan.optimizer'\?"):
        parse_plan({"preset": "ddp", "optimiser": "node"}, THREE)
    with pytest.raises(ConfigError, match=r"plan\.compute = 'fp61' is not one of its values; did you mean 'fp64'\?"):
        parse_plan({"preset": "ddp", "compute": "fp61"}, THREE)
    with pytest.raises(ConfigError, match=r"plan\.preset = 3 must be the name of a preset"):
        parse_plan({"preset": 3}, THREE)
    with pytest.raises(ConfigError, match=r"plan\.params is missing"):
        parse_plan({"grads": "node", "optimizer": "node"}, THREE)


@pytest.mark.parametrize(
    ("batch", "fix"), [(49, "use 48 or 96"), (95, "use 48 or 96"), (7, "use 48,"), (0, "use 48,"), (-48, "use 48,")]
)
def test_batch_that_does_not_divide_names_the_nearest(batch: int, fix: str) -> None:
    plan = zero3(micro_batch=2)
    with pytest.raises(PlanError, match=f"batch = {batch} is not a multiple of .* = 2 x 24 = 48: {fix}"):
        num_micro_batches(plan, Layout.of(THREE, plan), batch)


def test_batch_that_divides_gives_the_micro_batches() -> None:
    plan = zero3(micro_batch=2)
    assert [num_micro_batches(plan, Layout.of(THREE, plan), batch) for batch in (48, 144)] == [1, 3]


def test_recomputed_blocks_follow_the_patterns() -> None:
    assert recomputed(zero3(recompute=("layers.*", "head")), BLOCKS) == {1, 2}
    assert recomputed(zero3(), BLOCKS) == frozenset()


CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "name": st.text(min_size=1, max_size=5),
        "wire": st.dictionaries(
            st.sampled_from(("gather", "sync")), st.dictionaries(st.just("node"), st.just("bf16")), max_size=2
        ),
        "mapping": st.just({"node": {"data": 3}}),
        "compute": st.sampled_from(("bf16", "fp32")),
        "micro_batch": st.integers(1, 9),
        "recompute": st.sampled_from((("layers.*",), ("layers.* every 2: attention, mlp", "head"))),
        "prefetch": st.integers(0, 9),
        "unit": st.integers(1, 9),
    },
)


@given(st.sampled_from(sorted(PRESETS)), CHANGES)
def test_plan_survives_its_table(name: str, changes: dict[str, Any]) -> None:
    base = preset(name, THREE)
    plan = replace(base, **changes)
    assert parse_plan(dump(plan), THREE) == plan
    wire = {**base.wire, **{message: {**base.wire.get(message, {}), **row} for message, row in plan.wire.items()}}
    assert parse_plan({"preset": name, **dump(changes)}, THREE) == replace(plan, wire=wire)  # tables are laid over


def test_islands_are_numbered_as_ranks_are() -> None:
    """The innermost tier outside islands varies fastest."""
    cluster = cluster_of(2, 2, 3)
    layout = Layout.of(cluster, replace(preset("ddp", cluster), outer=Outer(tier="node", every=2)))
    assert [layout.island_of(cluster.coordinates(rank)) for rank in range(12)] == [rank // 2 for rank in range(12)]


@pytest.mark.parametrize(("wire", "wanted"), [({}, False), ({"refresh": {"package": "bf16"}}, True)])
def test_a_refresh_that_rounds_on_the_first_tier_asks_for_a_master_copy(
    wire: dict[str, dict[str, str]], wanted: bool
) -> None:
    plan = replace(preset("zero1", CLUSTERS[1]), compute="fp32", master="fp32", wire=wire)
    assert keeps_master(plan, Layout.of(CLUSTERS[1], plan)) is wanted


DEGREES = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@settings(max_examples=60)
@given(DEGREES, st.integers(0, 5000))
def test_slices_nest_and_partition(degrees: list[int], numel: int) -> None:
    cluster: Cluster = cluster_of(*degrees)
    layout = Layout.of(cluster, preset("ddp", cluster))
    padded = layout.padded(numel)
    assert numel <= padded < numel + layout.degree
    assert padded % layout.degree == 0
    assert layout.degree == math.prod(degrees)
    cuts = {
        rank: [layout.slice(tier, cluster.coordinates(rank), padded) for tier in range(-1, len(degrees))]
        for rank in range(cluster.world_size)
    }
    for own in cuts.values():
        assert own[0] == slice(0, padded)
        for tier, (inner, outer) in enumerate(pairwise(own)):
            assert inner.start <= outer.start <= outer.stop <= inner.stop
            assert (outer.stop - outer.start) * layout.span(tier) == padded
    for tier in range(len(degrees)):
        group = range(cluster.ranks_within(tier))  # the first group of the tier: ranks from 0
        pieces = sorted((cuts[rank][tier + 1].start, cuts[rank][tier + 1].stop) for rank in group)
        if padded:
            assert pieces[0][0] == 0
            assert pieces[-1][1] == padded
            assert all(left[1] == right[0] for left, right in pairwise(pieces))
        for rank in range(cluster.world_size):
            assert cuts[rank][tier + 1] == cuts[rank % cluster.ranks_within(tier)][tier + 1]
