"""The key `vocabulary`: what it refuses, how rows are cut, and the bytes of look-ups by their mean."""

import random
from dataclasses import replace
from typing import Any

import pytest

from terrace.base.errors import PlanError
from terrace.model.blocks import block_specs
from terrace.model.config import parse_model
from terrace.model.params import ParamSpec
from terrace.model.spec import BlockSpec
from terrace.plan.in_block_messages import RoutedMessage
from terrace.plan.keep import Keep
from terrace.plan.mesh import Mesh
from terrace.plan.outer import Outer
from terrace.plan.plan import Plan
from terrace.plan.presets import preset
from terrace.plan.slices import rank_slices, slice_blocks
from terrace.plan.tables import TableTraffic, distinct
from terrace.plan.validate import validate
from terrace.plan.wire import FORMATS, MessageClass
from terrace.simulate.states import look_ups_of
from tests.support.toys import MODELS, cluster_of

FOUR = cluster_of(2, 2)
BLOCKS = MODELS["llama, many ids"].declared
ALL = {"package": 2, "node": 2}


def plan_of(name: str = "zero3", **changes: Any) -> Plan:
    return replace(preset(name, FOUR), **{"vocabulary": ALL, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocabulary": {"rack": 2}}, "vocabulary names tier 'rack', which is not in the cluster"),
        ({"vocabulary": {"package": 0}}, r"vocabulary.package = 0: a degree is at least 1"),
        ({"vocabulary": {"package": 4, "node": 2}}, r"vocabulary.package = 4: a stage has 2 ranks .* use 2, or leave"),
        (
            {"vocabulary": {"package": 2}},
            r"node = 1, and a stage has 2 ranks .* write vocabulary = { package = 2, node = 2 }, or",
        ),
        ({"mapping": {"node": {"pipeline": 2}}}, r"vocabulary.node = 2: a stage has 1 ranks on tier 'node'; use 1"),
        ({"outer": Outer(tier="node", every=2)}, r"vocabulary.node = 2: tier 'node' is not synchronised every step"),
        ({"mapping": {"package": {"tensor": 2}}, "vocabulary": {"package": 2, "node": 2}}, "with a tensor axis"),
        (
            {"mapping": {"package": {"tensor": {"columns": 2}}}},
            "vocabulary with a tensor axis, whose rows and columns cut embedding.weight already",
        ),
        ({"master": "bf16", "compute": "bf16"}, "master = 'bf16' with vocabulary: rows of embedding.weight"),
        ({"optimizer_states": "int8"}, "optimizer_states = 'int8' with vocabulary"),
        (
            {"keep": Keep(table="disk"), "vocabulary": {}},
            "keep.table = 'disk' has no effect: .* write vocabulary, too, or leave it out",
        ),
        ({"keep": Keep(table="host")}, "keep.table = 'host' under a CPU: the host is the device"),
        (
            {
                "keep": Keep(table="disk"),
                "vocabulary": {"package": 2},
                "outer": Outer(tier="node", every=2),
                **dict.fromkeys(("params", "grads", "optimizer"), "device"),
            },
            "keep.table = 'disk' beside plan.outer: islands exchange the changes of all rows",
        ),
        ({"recompute": ("*",)}, "recompute names embedding, whose rows would be looked up on other ranks again"),
    ],
    ids=str,
)
def test_what_is_refused_in_a_line(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words) as error:
        validate(FOUR, plan_of(**changes), BLOCKS)
    assert "\n" not in str(error.value)


def of_models() -> dict[str, tuple[tuple[BlockSpec, ...], str]]:
    table = {"model_type": "llama", "vocab_size": 40, "hidden_size": 8, "num_hidden_layers": 1}
    table |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 10, "hidden_act": "silu"}
    two = ParamSpec(name="other", shape=(9, 8), dims=(("vocab", 9), ("hidden", 8)))
    return {
        "tied": (block_specs(parse_model(table | {"tie_word_embeddings": True})), "to which head is tied"),
        "few rows": (
            block_specs(parse_model(table | {"vocab_size": 3})),
            "of 3 rows over 4 ranks: use 4 to 2147483647",
        ),
        "two tables": (
            (BlockSpec(name="own", params=(replace(two, name="one"), two)), *BLOCKS[1:]),
            "takes one table, and the model has own.one, own.other: join their rows",
        ),
        "no table": (tuple(replace(each, declared=BLOCKS[1].declared) for each in BLOCKS[1:2]), "no effect"),
    }


@pytest.mark.parametrize("name", of_models())
def test_models_that_it_does_not_take(name: str) -> None:
    blocks, words = of_models()[name]
    with pytest.raises(PlanError, match=words):
        validate(FOUR, plan_of(), blocks)


def test_every_row_has_one_home_and_inner_tiers_cut_first() -> None:
    mesh = Mesh.of(FOUR, plan_of())
    (table,) = slice_blocks(BLOCKS, mesh)[0].params
    homes = [rank_slices(table, mesh, rank)[0] for rank in range(4)]
    # Ranks 0 and 2 are in place 0 of their packages.
    assert [(each.start, each.stop) for each in homes] == [(0, 10), (20, 30), (10, 20), (30, 40)]
    assert table.whole == (40, 8)
    head = slice_blocks(BLOCKS, mesh)[-1].params
    assert not any(param.is_spread for param in head)


def test_distinct_ids_are_those_of_draws() -> None:
    generator = random.Random(0)
    for rows, draws in ((7, 5), (100, 250), (1000, 100)):
        found = [len({generator.randrange(rows) for _ in range(draws)}) for _ in range(2000)]
        assert sum(found) / len(found) == pytest.approx(distinct(rows, draws), rel=0.01)
    assert distinct(1, 9) == 1
    assert distinct(10**9, 1000) == pytest.approx(1000, rel=1e-5)


def test_mean_bytes_are_those_of_uniform_ids() -> None:
    """Against draws: the same sets as in tests/system/test_tables.py, of uniform ids."""
    plan = plan_of(wire={"combine": {"node": "bf16"}})
    traffic = look_ups_of(FOUR, replace(plan, micro_batch=2), slice_blocks(BLOCKS, Mesh.of(FOUR, plan)), 6)
    assert isinstance(traffic, TableTraffic)
    assert (traffic.tokens, traffic.rows, traffic.width, traffic.tiers) == (12, 40, 8, (0, 1))
    generator, passed = random.Random(1), {"package": 0.0, "node": 0.0}
    for _ in range(4000):
        ids = [{generator.randrange(40) for _ in range(12)} for _ in range(2)]
        passed["package"] += len([i for i in ids[0] if i >= 20]) / 4000
        passed["node"] += len([i for i in ids[0] | ids[1] if i < 10]) / 4000
    fp32, bf16 = FORMATS["fp32"].message_bytes(8), FORMATS["bf16"].message_bytes(8)
    for tier, (name, vector) in enumerate((("package", fp32), ("node", bf16))):
        for message, row in (
            (RoutedMessage(MessageClass.DISPATCH, tier), 4),
            (RoutedMessage(MessageClass.COMBINE, tier), vector),
            (RoutedMessage(MessageClass.DISPATCH, tier, backward=True), fp32),
        ):
            ((crossed, num_bytes),) = traffic.sends(message)
            assert crossed == tier
            assert num_bytes == pytest.approx(passed[name] * row, rel=0.03)
        assert traffic.sends(RoutedMessage(MessageClass.ROUTE, tier)) == ((tier, 8),)
    assert traffic.used(num_micros=3) == pytest.approx(distinct(40, 144) / 4)


def test_formats_of_rows_are_checked_where_rows_travel() -> None:
    validate(FOUR, plan_of(wire={"dispatch": {"package": "int8"}}), BLOCKS)
    with pytest.raises(PlanError, match=r"wire\.dispatch\.package has no effect"):
        validate(FOUR, plan_of(vocabulary={}, wire={"dispatch": {"package": "int8"}}), BLOCKS)
