"""Programs are sound, small, readable, and independent of the number of ranks."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings

from terrace.base.errors import PlanError
from terrace.cluster.cluster import Cluster
from terrace.model.blocks import block_specs
from terrace.model.config import parse_model
from terrace.model.spec import BlockSpec
from terrace.plan.presets import PRESETS, preset
from terrace.plan.residency import residencies
from terrace.plan.stage import whole_stage
from terrace.program.instruction import Instruction, Op
from terrace.program.lowering import build
from terrace.program.program import Program
from terrace.program.text import program_text
from tests.support.effort import lines_run
from tests.support.programs import BLOCKS, program_of
from tests.support.strategies import Setting, settings_of_a_step
from tests.support.totals import verify, verify_ranks
from tests.support.toys import cluster_of


@settings(max_examples=300, deadline=None)
@given(settings_of_a_step())
def test_every_built_program_verifies(case: Setting) -> None:
    program = build(case.cluster, case.plan, case.blocks, case.num_micros)
    verify(program)
    verify_ranks(dict.fromkeys(range(case.cluster.world_size), program))


@settings(max_examples=200, deadline=None)
@given(settings_of_a_step(max_world=8))
def test_gathers_are_issued_ahead_and_nothing_is_gathered_without_need(case: Setting) -> None:
    program = build(case.cluster, case.plan, case.blocks, case.num_micros)
    uses = -1  # visits to blocks, so far
    before: tuple[Op, int] | None = None
    issued_at: dict[int, int] = {}
    used: set[int] = set()
    for instruction in program.instructions:
        block = instruction.block
        if instruction.op in (Op.FORWARD, Op.BACKWARD):
            uses += before != (instruction.op, block)  # further micro-batches of a unit belong to one visit
            before = (instruction.op, block)
            for needed in (block, *case.blocks[block].tied_to):
                used.add(needed)
                if needed in issued_at:
                    assert uses - issued_at.pop(needed) in range(case.plan.prefetch + 1)
        elif instruction.op is Op.GATHER:
            issued_at[block] = uses + 1
            used.discard(block)
        elif instruction.op is Op.FREE:
            assert block in used, "gathered and freed without a use"
    assert not issued_at


@pytest.mark.parametrize(("num_micros", "wanted"), [(1, [2, 2, 2, 1]), (4, [5, 8, 8, 4])])
def test_gathers_of_each_block(num_micros: int, wanted: list[int]) -> None:
    """Tied: the embedding is also used by the head, at distance 3 from its own uses, as untied blocks are."""
    untied = tuple(replace(block, tied_to=()) for block in BLOCKS)
    for blocks, first in ((untied, wanted[0]), (BLOCKS, wanted[0] + num_micros)):
        counts = Counter(stay.block for stay in residencies(whole_stage(len(blocks), num_micros, 1), blocks, 1))
        assert [counts[block] for block in range(4)] == [first, *wanted[1:]]


def test_without_prefetch_as_many_gathers_as_with_distance_one() -> None:
    """The last block stays between its forward and its backward, but nothing is gathered ahead."""
    one, none = (
        residencies(whole_stage(len(BLOCKS), 3, 1), BLOCKS, 1),
        residencies(whole_stage(len(BLOCKS), 3, 1), BLOCKS, 0),
    )
    assert [(stay.block, stay.first, stay.last) for stay in one] == [(s.block, s.first, s.last) for s in none]
    assert all(stay.issue == stay.first for stay in none)


def test_prefetch_beyond_the_step_gathers_once() -> None:
    assert [stay.block for stay in residencies(whole_stage(len(BLOCKS), 3, 1), BLOCKS, 99)] == [0, 1, 2, 3]


@pytest.mark.parametrize(("unit", "num_reductions"), [(1, 5), (2, 3), (3, 2), (5, 1), (9, 1)])
def test_a_unit_is_gathered_and_reduced_once(unit: int, num_reductions: int) -> None:
    cluster = cluster_of(2, 2, 2)
    program = build(cluster, replace(preset("zero3", cluster), unit=unit), BLOCKS, 5)
    verify(program)
    counts = Counter((instruction.op, instruction.block) for instruction in program.instructions)
    assert counts[Op.REDUCE, 1] == num_reductions
    assert counts[Op.GATHER, 1] == 2 * num_reductions, "for the forward and for the backward of every unit"
    assert counts[Op.FORWARD, 1] == counts[Op.BACKWARD, 1] == 5


def test_order_of_a_unit() -> None:
    program = replace_blocks(program_of("ddp", 3, unit=2), BLOCKS[1:3])
    words = [str(instruction) for instruction in program.instructions if instruction.op in (Op.FORWARD, Op.BACKWARD)]
    assert words == [
        *("FORWARD b0 m0", "FORWARD b0 m1", "FORWARD b1 m0", "FORWARD b1 m1"),
        *("BACKWARD b1 m0", "BACKWARD b1 m1", "BACKWARD b0 m0", "BACKWARD b0 m1"),
        *("FORWARD b0 m2", "FORWARD b1 m2", "BACKWARD b1 m2", "BACKWARD b0 m2"),
    ]


def test_order_of_a_small_program() -> None:
    program = replace_blocks(program_of("zero3", 1), BLOCKS[1:3])
    assert [str(instruction) for instruction in program.instructions] == [
        "GATHER b0 for forward",
        "GATHER b1 for forward",
        "FORWARD b0 m0",
        "FREE b0",
        "FORWARD b1 m0",
        "GATHER b0 for backward",
        "BACKWARD b1 m0",
        "REDUCE b1 m0",
        "SYNC b1",
        "FREE b1",
        "BACKWARD b0 m0",
        "REDUCE b0 m0",
        "SYNC b0",
        "FREE b0",
        "CLIP",
        "UPDATE b0",
        "REFRESH b0",
        "UPDATE b1",
        "REFRESH b1",
    ]


def replace_blocks(program: Program, blocks: tuple[BlockSpec, ...]) -> Program:
    return build(program.cluster, program.plan, blocks, program.num_micros)


def test_text_names_positions_blocks_tiers_and_formats() -> None:
    cluster = cluster_of(2, 2, 2)
    wire = {"gather": {"system": "bf16"}}
    plan = replace(preset("three-level", cluster), params="system", grads="system", wire=wire, recompute=("head",))
    lines = program_text(build(cluster, plan, BLOCKS, 1)).splitlines()
    assert lines[0] == (
        f"{'0':>2}  {'GATHER b0 for forward':<44} {'embedding':<14} system (bf16), node (fp32), package (fp32)"
    )
    assert any("BACKWARD b3 m0" in line and line.endswith("recomputes its forward") for line in lines)
    assert any("CLIP" in line and line.endswith("control: package, node, system") for line in lines)
    assert any("SYNC b1" in line and line.endswith("local") for line in lines)
    assert not any(line != line.rstrip() for line in lines)
    secondary = program_text(program_of("zero++")).splitlines()
    assert any("from the secondary copy" in line and line.endswith("node (fp32), package (fp32)") for line in secondary)


@pytest.mark.parametrize("name", PRESETS)
def test_text_is_cut_in_the_middle(name: str) -> None:
    program = program_of(name)
    whole = program_text(program).splitlines()
    assert len(whole) == len(program.instructions)
    assert program_text(program, max_lines=len(whole)).splitlines() == whole
    cut = program_text(program, max_lines=10).splitlines()
    assert cut == [*whole[:5], f"  ...  {len(whole) - 10} more instructions", *whole[-5:]]


def test_instruction_names_its_peer() -> None:
    assert str(Instruction(Op.SEND, 3, 1, peer=5)) == "SEND activation b3 m1 to stage 5"
    assert str(Instruction(Op.RECV, 3, 1, backward=True, peer=5)) == "RECV gradient b3 m1 from stage 5"


def test_a_step_needs_a_micro_batch() -> None:
    with pytest.raises(PlanError, match="num_micros = 0: a step has at least one"):
        program_of(num_micros=0)


def test_ten_thousand_ranks_cost_what_eight_do() -> None:
    table = {"model_type": "llama", "vocab_size": 32000, "hidden_size": 8192, "intermediate_size": 28672}
    table |= {"num_hidden_layers": 90, "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_act": "silu"}
    blocks = block_specs(parse_model(table))
    assert len(blocks) == 92
    small, large = cluster_of(2, 2, 2, memory_bytes=1e15), cluster_of(8, 25, 50, memory_bytes=80e9)
    assert large.world_size == 10_000
    plan = replace(preset("zero++", large), compute="bf16")
    program = build(large, plan, blocks, 4)
    assert program.instructions == build(small, replace(plan, name=""), blocks, 4).instructions

    def effort(cluster: Cluster, rank: int) -> int:
        return lines_run(lambda: verify(build(cluster, plan, blocks, 4), rank=rank))

    assert effort(large, 9_999) < 1.1 * effort(small, 7)
