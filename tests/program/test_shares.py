"""How blocks are shared among stages: even in time, within memory, and never worse than any other way."""

import math
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrace.base.errors import PlanError
from terrace.model.blocks import block_specs
from terrace.model.config import parse_model
from terrace.model.experts.config import ExpertsConfig
from terrace.plan.plan import Plan
from terrace.program.lowering import build_stages
from terrace.program.shares import block_costs, share
from tests.support.toys import cluster_of

MODEL = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 4,
         "num_key_value_heads": 4, "intermediate_size": 64, "vocab_size": 500}  # fmt: skip


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_no_other_way_has_a_smaller_slowest_part_or_is_more_even(data: st.DataObject) -> None:
    costs = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=8))
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=len(costs), max_size=len(costs)))
    room = data.draw(st.sampled_from([math.inf, 8, 12, 20]))
    num_parts = data.draw(st.integers(1, len(costs)))

    def worth(parts: list[range]) -> tuple[bool, int, int]:
        totals = [sum(costs[block] for block in part) for part in parts]
        crowded = any(sum(sizes[block] for block in part) > room for part in parts)
        return crowded, max(totals), sum(total**2 for total in totals)

    found = share(costs, num_parts, sizes, room)
    assert [block for part in found for block in part] == list(range(len(costs)))
    assert all(found)
    ways = []
    for cuts in combinations(range(1, len(costs)), num_parts - 1):
        bounds = (0, *cuts, len(costs))
        ways.append([range(start, stop) for start, stop in pairwise(bounds)])
    best = min(map(worth, ways))
    assert worth(found)[1:] == best[1:] if best[0] else worth(found) == best


def test_of_equally_even_ways_later_parts_have_more_blocks() -> None:
    """Whatever the rounding of their sums of squares, which depends on the order of the parts."""
    found = share([1, *[1_234_567] * 20, 1_200_001], 12)
    assert [len(part) for part in found] == [2, 1, 1, *[2] * 8, 2]
    assert [len(part) for part in share([7] * 8, 3)] == [2, 3, 3]


def test_the_head_counts_and_the_table_does_not() -> None:
    blocks = block_specs(parse_model(MODEL))
    costs = block_costs(blocks, 16)
    assert costs[0] == (0, 0)
    assert costs[-1] == (500 * 32, 0)
    assert costs[1] == (4 * 32 * 32 + 3 * 32 * 64, 16 * 32)
    tied = block_specs(parse_model(MODEL | {"tie_word_embeddings": True}))
    assert block_costs(tied, 16)[-1] == (500 * 32, 0)


def test_of_a_mixture_the_experts_of_a_token_count() -> None:
    experts = ExpertsConfig(num_experts=8, per_token=2, intermediate_size=24, shared_size=10, dense_layers=(0,))
    costs = block_costs(block_specs(replace(parse_model(MODEL), experts=experts)), 16)
    assert costs[1] == (4 * 32 * 32 + 3 * 32 * 64, 16 * 32)
    assert costs[2] == (4 * 32 * 32 + 8 * 32 + 3 * 32 * (2 * 24 + 10), 16 * 32)


def plan(stages: tuple[int, ...] = ()) -> Plan:
    mapping = {"package": {"pipeline": 2}}
    return Plan(params="device", grads="device", optimizer="device", mapping=mapping, stages=stages)


def test_a_stage_that_would_not_fit_gives_layers_away() -> None:
    """The head is heavy in memory and in time, so the table's stage takes layers until it is full."""
    blocks = block_specs(parse_model(MODEL | {"vocab_size": 3000}))
    wide = build_stages(cluster_of(2), plan(), blocks, 2, 16)
    assert [len(program.stage.own) for program in wide] == [7, 1]
    needed = [sum(program.state_bytes.values()) for program in wide]
    narrow = build_stages(cluster_of(2, memory_bytes=needed[0] - 1), plan(), blocks, 2, 16)
    assert [len(program.stage.own) for program in narrow] == [6, 2]
    assert all(sum(program.state_bytes.values()) < needed[0] for program in narrow)


def test_stages_by_hand_are_taken_as_they_are() -> None:
    blocks = block_specs(parse_model(MODEL))
    programs = build_stages(cluster_of(2), plan((2, 6)), blocks, 2, 16)
    assert [program.stage.own for program in programs] == [(0, 1), tuple(range(2, 8))]
    with pytest.raises(PlanError, match=r"stages = \[2, 5\]: give the number of blocks of each of the 2 virtual"):
        build_stages(cluster_of(2), plan((2, 5)), blocks, 2, 16)
