"""The context axis in a plan: its forms, refusals, and which ranks attend together."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from terrace.base.errors import ConfigError, PlanError
from terrace.base.schema import dump
from terrace.model.params import ParamSpec
from terrace.model.spec import BlockSpec
from terrace.plan.context import ContextGroup, attention_heads, local_tokens, ring_axes
from terrace.plan.flats import stage_layout, world_layout
from terrace.plan.layout import Layout
from terrace.plan.mesh import ORDER, Mesh
from terrace.plan.plan import Plan
from terrace.plan.presets import parse_plan, preset
from terrace.plan.slices import slice_blocks
from terrace.plan.validate import num_micro_batches, validate
from terrace.report.tables import plan_rows
from tests.support.toys import cluster_of


def attending(heads: int, kv_heads: int, size: int = 2) -> tuple[BlockSpec, ...]:
    """Return an embedding, a layer whose attention has these heads, and a head."""
    hidden = ("hidden", heads * size)
    layer = [
        ParamSpec(name=f"attention.{name}.weight", shape=(number * size, hidden[1]), dims=((counted, number), hidden))
        for name, counted, number in (("query", "heads", heads), ("key", "kv_heads", kv_heads))
    ]
    plain = ParamSpec(name="weight", shape=(6, hidden[1]), dims=(("vocab", 6), hidden))
    return (
        BlockSpec(name="embedding", params=(plain,)),
        BlockSpec(name="layers.0", params=tuple(layer)),
        BlockSpec(name="head", params=(plain,)),
    )


FOUR = cluster_of(4, 2)


def plan_with(mapping: dict[str, Any], **changes: Any) -> Plan:
    return replace(preset("zero3", FOUR), mapping=mapping, **changes)


def test_the_forms_of_the_axis_and_their_degrees() -> None:
    blocks = attending(8, 4)
    for form, ulysses, ring in (
        (4, 1, 4),
        ({"ulysses": 4}, 4, 1),
        ({"ring": 4}, 1, 4),
        ({"ulysses": 2, "ring": 2}, 2, 2),
    ):
        plan = parse_plan({"preset": "zero3", "mapping": {"package": {"context": form}, "node": {"data": 2}}}, FOUR)
        layout = validate(FOUR, plan, blocks)
        mesh = Mesh.of(FOUR, plan)
        assert (mesh.total("ulysses"), mesh.total("ring"), layout.data_degree, layout.degree) == (ulysses, ring, 2, 8)
        assert parse_plan(dump(plan), FOUR) == plan
        assert num_micro_batches(plan, layout, 6) == 3
        validate(FOUR, replace(plan, update="muon"), blocks)  # matrices stay whole


def test_a_plan_is_shown_with_the_forms_of_its_context_axis() -> None:
    mapping = {"package": {"context": {"ulysses": 2, "ring": 2}}, "node": {"context": 2}}
    headings, rows = plan_rows(FOUR, plan_with(mapping))
    assert headings[3] == "context"
    assert [row[3] for row in rows] == ["2 ring", "2 ulysses x 2 ring", "1"]
    assert rows[0][-1].endswith("optimizer /8")  # states are shared among context ranks too


REFUSED: list[tuple[Plan, tuple[int, int], tuple[str, ...]]] = [
    (plan_with({"package": {"context": {"ulises": 4}}}), (8, 4), ("context names 'ulises'", "mean 'ulysses'?")),
    (plan_with({"package": {"context": {"ring": 0}}}), (8, 4), ("mapping.package.context.ring = 0", "at least 1")),
    (plan_with({"package": {"context": {"ring": 2}}}), (8, 4), ("multiply to 2", "joins 4")),
    (plan_with({"package": {"data": {"ring": 4}}}), (8, 4), ("only the tensor and the context axis are factored",)),
    (plan_with({"package": {"context": {"ulysses": 4}}}), (6, 6), ("ulysses = 4", "6 heads", "use 1 or 2 or 3 or 6")),
    (
        plan_with({"package": {"context": {"ulysses": 4}}}),
        (12, 3),
        ("12 heads and 3 key-value heads", "1 or 3 or 6 or 12"),
    ),
    (
        plan_with({"package": {"context": {"ulysses": 4}}, "node": {"tensor": 2}}),
        (4, 4),
        ("2 heads and 2 key-value heads of layers.0 on one of 2 tensor rows", "use 1 or 2,"),
    ),
    (plan_with({"package": {"context": 4}}), (0, 0), ("the context axis", "no block of this model declares its heads")),
    (plan_with({}, balance="cost"), (0, 0), ('balance = "cost"', "no block of this model declares its heads")),
    (
        plan_with({"package": {"context": {"ulysses": 4}}, "node": {"pipeline": 2}}, balance="cost"),
        (8, 4),
        ('balance = "cost" has no effect', "leave balance out"),
    ),
    (
        plan_with({"package": {"context": 4}}, wire={"context": {"node": "bf16"}}),
        (8, 4),
        ("the context axis has no ranks on 'node'",),
    ),
]


@pytest.mark.parametrize(("plan", "heads", "words"), REFUSED, ids=[words[0] for _, _, words in REFUSED])
def test_what_is_refused(plan: Plan, heads: tuple[int, int], words: tuple[str, ...]) -> None:
    with pytest.raises(PlanError) as caught:
        validate(FOUR, plan, attending(*heads) if all(heads) else ())
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_an_unknown_balance_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"plan\.balance = 'costs' is not one of its values; did you mean 'cost'\?"):
        parse_plan({"preset": "zero3", "balance": "costs"}, FOUR)


def test_a_batch_counts_data_ranks_alone() -> None:
    plan = plan_with({"package": {"context": 4}}, micro_batch=3)
    with pytest.raises(
        PlanError, match="batch = 8 is not a multiple of micro_batch x data ranks = 3 x 2 = 6: use 6 or 12"
    ):
        num_micro_batches(plan, Layout.of(FOUR, plan), 8)


def test_heads_are_what_a_tensor_rank_uses() -> None:
    for rows, queries, keys in ((1, 8, 2), (2, 4, 1), (4, 2, 1)):
        cluster = cluster_of(rows)
        plan = replace(preset("ddp", cluster), mapping={"package": {"tensor": rows}})
        for blocks in (attending(8, 2, 5), slice_blocks(attending(8, 2, 5), Mesh.of(cluster, plan))):
            found = attention_heads(blocks[1], rows)
            assert found is not None
            assert (found.queries, found.keys, found.size) == (queries, keys, 5)
            assert attention_heads(blocks[0], rows) is None


@st.composite
def mappings(draw: st.DrawFn) -> tuple[list[int], dict[str, Any]]:
    """Draw the sizes of a cluster's tiers and a mapping over all axes."""
    row = st.tuples(*(st.sampled_from((1, 1, 2)) for _ in range(6)))
    rows = draw(st.lists(row, min_size=1, max_size=3))
    names = ("package", "node", "system")
    table = {
        name: {
            "tensor": {"columns": columns, "rows": across},
            "context": {"ulysses": ulysses, "ring": ring},
            "data": data,
            "pipeline": pipeline,
        }
        for name, (columns, across, ulysses, ring, data, pipeline) in zip(names, rows, strict=False)
    }
    sizes = [math.prod(row) for row in rows]
    assume(math.prod(sizes) <= 256)
    return sizes, table


@settings(max_examples=30, deadline=None)
@given(mappings(), st.sampled_from(("tokens", "cost")), st.data())
def test_pools_are_the_ranks_that_differ_on_their_axes_alone(
    case: tuple[list[int], dict[str, Any]], balance: Any, data: st.DataObject
) -> None:
    sizes, mapping = case
    cluster = cluster_of(*sizes)
    plan = replace(preset("ddp", cluster), mapping=mapping, balance=balance)
    mesh = Mesh.of(cluster, plan)
    axes = (*ring_axes(plan), "ulysses")
    others = tuple(axis for axis in ORDER if axis not in axes)
    rank = data.draw(st.integers(0, cluster.world_size - 1))
    group = ContextGroup.of(cluster, plan, rank)
    key = mesh.coordinates(rank, others)
    assert sorted(group.members) == [
        other for other in range(cluster.world_size) if mesh.coordinates(other, others) == key
    ]
    assert group.num_ring_ranks == math.prod(group.ring_degrees) == math.prod(mesh.group(*ring_axes(plan)))
    member = data.draw(st.integers(0, len(group.members) - 1))
    assert ContextGroup.of(cluster, plan, group.members[member]) == group
    ring_rank, part = divmod(member, group.ulysses)
    found = group.members[member]
    assert (mesh.group_rank(found, ring_axes(plan)), mesh.group_rank(found, ("ulysses",))) == (ring_rank, part)
    digits = []
    for degree in group.ring_degrees:  # the innermost fastest
        ring_rank, digit = divmod(ring_rank, degree)
        digits.append(digit)
    assert tuple(digits) == mesh.coordinates(found, ring_axes(plan))


@settings(max_examples=40, deadline=None)
@given(mappings())
def test_states_are_cut_over_data_and_context(case: tuple[list[int], dict[str, Any]]) -> None:
    sizes, mapping = case
    cluster = cluster_of(*sizes)
    plan = replace(preset("zero3", cluster), mapping=mapping)
    layout, mesh = Layout.of(cluster, plan), Mesh.of(cluster, plan)
    assert layout.degree == mesh.total("ulysses") * mesh.total("ring") * mesh.total("data")
    assert stage_layout(cluster, plan).degree == layout.degree * mesh.total("columns") * mesh.total("rows")
    assert world_layout(cluster, plan).degree == cluster.world_size
    ring_ranks = [layout.data_rank(rank) for rank in range(cluster.world_size)]
    share = cluster.world_size // layout.data_degree
    assert all(ring_ranks.count(ring_rank) == share for ring_rank in range(layout.data_degree))
    for ring_rank in set(ring_ranks):
        first = ring_ranks.index(ring_rank)
        assert {ring_ranks[other] for other in mesh.members(first, ("ulysses", "ring"))} == {ring_rank}


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 3), st.sampled_from((1, 2, 4)), st.sampled_from((1, 2, 3)), st.booleans())
def test_ranks_hold_every_token(sequence: int, micro_batch: int, ulysses: int, ring: int, by_cost: bool) -> None:
    cluster = cluster_of(ulysses, ring)
    mapping = {"package": {"context": {"ulysses": ulysses}}, "node": {"context": {"ring": ring}}}
    balance: Any = "cost" if by_cost else "tokens"
    plan = replace(preset("ddp", cluster), mapping=mapping, micro_batch=micro_batch, balance=balance)
    mesh = Mesh.of(cluster, plan)
    held = local_tokens(plan, mesh, sequence) * ulysses * ring
    spare = held - micro_batch * sequence
    assert spare >= 0
    assert spare < ulysses * ring + (0 if by_cost else 2 * ring * micro_batch)
