"""Shares of members: rules, and how a batch is dealt."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrace.base.errors import PlanError
from terrace.data.batches import micros_of_rank
from terrace.plan.layout import Layout
from terrace.plan.members import shares_words, with_shared_size
from terrace.plan.presets import PRESETS, preset
from terrace.plan.validate import num_micro_batches, validate
from terrace.program.instruction import Op
from terrace.program.lowering import build
from terrace.program.program import Program
from tests.support.toys import MODELS, cluster_of

CLUSTER = cluster_of(2, 2, 2)
BLOCKS = MODELS["llama tied"].declared
DDP = preset("ddp", CLUSTER)
ON_SYSTEM = {"grads": "system", "optimizer": "system"}
TABLES = {"package": 2, "node": 2, "system": 2}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shares": (1, 2, 3)}, r"shares = \[1, 2, 3\]: the outermost tier 'system' has 2 members: give the number"),
        ({"shares": (4, 0)}, r"shares = \[4, 0\]: member 1 would have no micro-batch, .*give it 1 or more"),
        ({"shares": (4, -1)}, r"shares = \[4, -1\]: member 1 would have no micro-batch"),
        ({"shares": (1, 2), "mapping": {"system": {"pipeline": 2}}}, r"the pipeline axis crosses tier 'system'"),
        ({"shares": (1, 2), "mapping": {"system": {"tensor": 2}}}, r"the rows axis crosses tier 'system'"),
        (
            {"shares": (1, 2), "grads": "system", "optimizer": "system"},
            r"grads = 'system' are reduced across tier 'system' .* unit = 2$",
        ),
        ({"shares": (1, 2), "vocabulary": TABLES}, r"the vocabulary axis crosses tier 'system'"),
        ({"shares": (1, 2), "mapping": {"package": {"context": 2}}, "balance": "cost"}, 'and balance = "cost" deals'),
    ],
)
def test_a_plan_that_cannot_have_shares_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        validate(CLUSTER, replace(DDP, **changes), MODELS["gpt_neox"].declared)  # type: ignore[arg-type]


def test_shares_add_up_to_the_batch() -> None:
    plan = replace(DDP, shares=(5, 3), micro_batch=2)
    layout = Layout.of(CLUSTER, plan)
    assert num_micro_batches(plan, layout, 8 * 4 * 2) == 5
    with pytest.raises(PlanError, match=r"together 64 sequences, and batch = 80: give shares that add up to 10, or"):
        num_micro_batches(plan, layout, 80)
    with pytest.raises(PlanError, match=r"shares = \[5, 3, 1\]: the outermost tier 'system' has 2 members: give the"):
        num_micro_batches(replace(plan, shares=(5, 3, 1)), layout, 80)
    with pytest.raises(PlanError, match=r"batch = 81: change the batch, or write batch = 64"):
        num_micro_batches(plan, layout, 81)
    with pytest.raises(PlanError, match=r"are of 9 members, and the plan has 8 data ranks: give the number of"):
        num_micro_batches(replace(plan, shares=(1,) * 9), layout, 80)
    assert with_shared_size(plan, layout, 8 * 4 * 3).micro_batch == 3
    assert with_shared_size(plan, layout, 33) is plan
    assert (shares_words((5, 3, 3, 1)), shares_words((2,))) == ("5 + 3 x 2 + 1", "2")


def crossing(program: Program) -> list[tuple[Op, int]]:
    """The messages of a program that cross the outermost tier, in order."""
    outermost = program.layout.outermost

    def sent() -> Iterator[tuple[Op, int]]:
        for each in program.segments.listed():
            if each.message_class is not None and any(tier == outermost for tier, _ in program.message(each).sends):
                yield each.op, each.block

    return list(sent())


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_members_send_the_same_messages_to_each_other_exactly_if_allowed(name: str) -> None:
    """Over all placements of a preset, units and shares: plans that are refused would send different ones."""
    plan, allowed = preset(name, CLUSTER), 0
    for unit, shares, inner in product((1, 2, 4), ((1, 4), (3, 4)), (None, "grads", "params")):
        given = replace(plan, unit=unit)
        if inner is not None:
            given = replace(given, **{inner: "node"})  # type: ignore[arg-type]
        programs = []
        try:
            programs = [build(CLUSTER, given, BLOCKS, share, 16) for share in shares]
        except PlanError:  # a placement of its own that is wrong
            continue
        same = crossing(programs[0]) == crossing(programs[1])
        try:
            validate(CLUSTER, replace(given, shares=shares), BLOCKS)
        except PlanError:
            assert not same, (given, shares)
        else:
            assert same, (given, shares)
            allowed += 1
    assert allowed


@settings(max_examples=30)
@given(
    shares=st.lists(st.integers(1, 6), min_size=1, max_size=5).map(tuple),
    ranks=st.integers(1, 4),
)
def test_every_micro_batch_is_dealt_once_in_turns(shares: tuple[int, ...], ranks: int) -> None:
    number, degree = sum(shares) * ranks, len(shares) * ranks
    dealt = [micros_of_rank(number, rank, degree, shares) for rank in range(degree)]
    assert sorted(np.concatenate(dealt).tolist()) == list(range(number))
    assert [len(each) for each in dealt] == [share for share in shares for _ in range(ranks)]
    assert all((np.diff(each) > 0).all() for each in dealt)
    # Equal shares are the order without shares.
    equal = (shares[0],) * len(shares)
    for rank in range(degree):
        plain = micros_of_rank(shares[0] * degree, rank, degree)
        assert np.array_equal(micros_of_rank(shares[0] * degree, rank, degree, equal), plain)
