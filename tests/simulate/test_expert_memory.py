"""Memory of experts on several ranks, and the bytes that even routing is expected to send."""

import math
from dataclasses import replace

import pytest

from terrace.model.block_operations import layer_operations
from terrace.model.blocks import block_specs
from terrace.plan.expert_traffic import mean_units
from terrace.plan.kinds import Kinds
from terrace.plan.presets import preset
from terrace.plan.wire import MessageClass
from terrace.program.lowering import build
from terrace.simulate.footprint import LOAD_FACTOR, footprint, work_of
from terrace.simulate.fullest import Job, worst_words
from terrace.simulate.kept_by_mixture import rows_of, worst_load
from tests.support.mixtures import PLAIN, mixture
from tests.support.toys import cluster_of

CLUSTER = cluster_of(2, 4)
MODEL = mixture(PLAIN, layers=3)


def test_rows_of_a_rank() -> None:
    plan = replace(preset("zero3", CLUSTER), experts={"package": {"rows": 2}, "node": {"expert": 4}})
    work = work_of(CLUSTER, plan, layer_operations(MODEL), 64)
    tokens = work.tokens
    # Two ranks' tokens pass each half of an expert, and every token goes to each of the units that has one of its two.
    assert rows_of(work, PLAIN) == (math.ceil(2 * tokens * mean_units(8, 2, 4)), 2 * tokens * 2)
    assert worst_load(work, PLAIN) == 4
    assert rows_of(replace(work, load=math.inf), PLAIN) == (2 * 4 * tokens, 2 * 4 * tokens * 2)
    alone = replace(work, expert=1, expert_rows=1, load=math.inf)
    assert rows_of(alone, PLAIN) == (tokens, 2 * tokens)  # a skewed load has no more rows where all experts are here


def test_stacks_are_divided_and_rows_grow_with_their_load() -> None:
    blocks, kinds = block_specs(MODEL), Kinds.of(block_specs(MODEL))
    whole = preset("ddp", CLUSTER)
    spread = replace(whole, experts={"node": {"expert": 4}})
    alone, cut = (footprint(CLUSTER, plan, kinds, 64, 1) for plan in (whole, spread))
    stacks = sum(param.numel for block in blocks for param in block.params if param.is_stack)
    for state, times in (("params", 1), ("grads", 1), ("optimizer", 2)):
        assert alone[state] - cut[state] == times * stacks * 4 * 3 // 4
    even, worst = (footprint(CLUSTER, spread, kinds, 64, 1, load=load) for load in (1.0, math.inf))
    assert even["experts"] < cut["experts"] < worst["experts"]
    # What is kept of a row goes with the rows.
    assert worst["experts"] == pytest.approx(4 * even["experts"], rel=0.1)
    assert even["activations"] == worst["activations"]
    job = Job(cluster=CLUSTER, plan=spread, num_micros=1)
    more = sum(worst.values()) - sum(cut.values())
    assert worst_words(job, blocks, 64) == (
        f"rows of a rank's experts are counted at {LOAD_FACTOR:g} times their mean; "
        f"{more / 1e9:.3g} GB more if all choices of all ranks fall on them"
    )
    assert not worst_words(replace(job, plan=whole), blocks, 64)


def test_bytes_of_experts_are_expected_and_declared_by_batches() -> None:
    plan = replace(preset("zero1", CLUSTER), experts={"node": {"expert": 4}})
    blocks = block_specs(MODEL)
    program = build(CLUSTER, plan, blocks, 2, 64)
    more = {key: size for key, size in program.expected_bytes.items() if key not in program.sent_bytes}
    assert {message for message, _ in more} == {MessageClass.ROUTE, MessageClass.DISPATCH, MessageClass.COMBINE}
    tokens = 64
    row = round(tokens * mean_units(8, 2, 4) * (1 - 1 / 4) * (64 * 4 + 2 * 8))
    back = round(tokens * mean_units(8, 2, 4) * (1 - 1 / 4) * 64 * 4)
    # Three layers and two micro-batches, rows there and gradients of results.
    assert more[MessageClass.DISPATCH, "node"] == 3 * 2 * (row + back)
    assert {key: size for key, size in program.expected_bytes.items() if key not in more} == program.sent_bytes
