"""Programs with gradients in gaps: which messages are, columns of their parts, and damage that the verifier names."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from terrace.base.errors import PlanError, ProgramError
from terrace.model.blocks import block_specs
from terrace.plan.gaps import part_columns
from terrace.plan.plan import Plan
from terrace.plan.presets import preset
from terrace.program.block_program.steps import Gap, Send
from terrace.program.gaps import BETWEEN, Issued
from terrace.program.instruction import Instruction, Op
from terrace.program.lowering import build, build_stages
from terrace.program.program import Program
from terrace.program.text import program_text
from tests.support.mixtures import PLAIN, mixture
from tests.support.totals import verify, verify_stages
from tests.support.toys import cluster_of

CLUSTER = cluster_of(2, 2, 2)
BLOCKS = block_specs(mixture(replace(PLAIN, num_experts=16)))
SEQUENCE = 16


def plan_of(name: str = "zero3", **changes: Any) -> Plan:
    plan: dict[str, Any] = {"experts": {"system": {"expert": 2}}, "expert_gaps": (0.25, 0, 0.75), **changes}
    return replace(preset(name, CLUSTER), **plan)


def program_of(name: str = "zero3", **changes: Any) -> Program:
    return build(CLUSTER, plan_of(name, **changes), BLOCKS, 2, SEQUENCE)


@pytest.mark.parametrize(
    ("name", "ops"),
    [("zero3", {Op.REDUCE}), ("ddp", {Op.SYNC}), ("hsdp", {Op.SYNC}), ("three-level", {Op.SYNC})],
)
def test_a_gradient_is_in_gaps_where_the_next_backward_has_some(name: str, ops: set[Op]) -> None:
    """Of all layers but the first, behind which comes the embedding; and of the head."""
    program = program_of(name)
    verify(program)
    last = len(BLOCKS) - 1
    found = {(each.op, each.block) for each in program.instructions if each.in_gaps}
    assert found == {(op, block) for op in ops for block in range(2, last + 1)}
    held = False
    for each in program.instructions:
        held = (held or each.in_gaps) and each.op in BETWEEN
        assert not held or each.op is not Op.FORWARD
    text = program_text(program)
    assert "in gaps" in text
    assert "parts of 0.25, 0, 0.75" in text


def test_a_sync_follows_the_parts_of_its_reduce() -> None:
    """Gradients inside the node beside experts there, and over systems on a lane of their own."""
    program = program_of("hsdp", experts={"node": {"expert": 2}})
    verify(program)
    reduce, sync = (
        next(each for each in program.instructions if each.in_gaps and each.op is op) for op in (Op.REDUCE, Op.SYNC)
    )
    assert program.message(reduce).lane == 1
    assert program.message(sync).lane == 2
    for one, other in zip(program.message(reduce).parts, program.message(sync).parts, strict=True):
        assert [each.columns for each in one.transfers] == [each.columns for each in other.transfers]


@pytest.mark.parametrize(
    "wire", [{}, {"reduce": {"system": "int4:16"}}, {"reduce": {"system": "fp8:32", "node": "int8"}}]
)
@pytest.mark.parametrize("shares", [(0, 1), (0.3, 0.3, 0.4), (0.01, 0.5, 0.49), (0.5, 0, 0.5)])
def test_parts_are_all_of_a_message(wire: Mapping[str, Mapping[str, str]], shares: tuple[float, ...]) -> None:
    """Columns follow one another to the end, by their shares, and bytes add up exactly on every tier."""
    program = program_of(wire=wire, expert_gaps=shares)
    verify(program)
    for each in program.counts:
        if not each.in_gaps:
            continue
        message, whole = program.message(each), program.message(each._replace(in_gaps=False))
        tiers = range(len(CLUSTER.tiers))
        for part in message.parts:
            assert part.coding_bytes >= 0
        sent = [[sum(size for at, size in one.sends if at == tier) for tier in tiers] for one in (message, whole)]
        assert sent[0] == sent[1]
        assert message.coding_bytes == pytest.approx(whole.coding_bytes, rel=1e-6)
        for transfer in whole.transfers:
            padded = program.model.flats[each.block][transfer.flat].padded
            size = padded // transfer.ranks.degree
            columns = part_columns(program.plan, transfer.ranks, padded)
            ends = [0, *(stop for _, stop in columns)]
            assert ends == sorted(ends)
            assert [start for start, _ in columns] == ends[:-1]
            assert ends[-1] == size
            unit = 8 * max([0, *(hop.wire.block for hop in transfer.hops)]) or 1
            for (start, stop), share in zip(columns, shares, strict=True):
                assert abs(stop - start - share * size) <= max(unit, 1) * len(shares)


def test_gaps_are_between_the_messages_of_a_chunk() -> None:
    program = program_of(expert_chunks={"backward": 2}, expert_gaps=(0, 0.2, 0.3, 0.5))
    steps = program.model.block_program(2).routed_steps(Op.BACKWARD)
    words = []
    for step in steps:
        if isinstance(step, Gap):
            words.append(f"gap {step.number}")
        elif isinstance(step, Send):
            (message,) = step.messages
            words.append(f"{message.message_class.value} {message.chunk + 1}")  # type: ignore[union-attr]
    assert words == ["dispatch 1", "dispatch 2", "gap 1", "combine 1", "gap 2", "combine 2", "gap 3"]
    assert not any(isinstance(step, Gap) for step in program.model.block_program(2).routed_steps(Op.FORWARD))


def test_a_gather_overtakes_what_is_held() -> None:
    """Without it a pass would wait for parts that leave in its own middle."""
    program = program_of(prefetch=0)
    verify(program)
    issued, order = Issued(program), list[tuple[Instruction, Instruction]]()
    for now in program.instructions:
        order += [(of, now) for of, *_ in issued.at(now)]
    held = next(each for each in program.instructions if each.in_gaps)
    places = {at.op for of, at in order if of == held}
    assert places == {Op.REDUCE, Op.BACKWARD}
    first = order.index((held, held))
    last = max(place for place, (of, _) in enumerate(order) if of == held)
    between = {of.op for of, _ in order[first:last]}
    assert between == {Op.REDUCE, Op.GATHER, Op.BACKWARD}


def damaged(program: Program, text: str, *instead: Instruction) -> Program:
    at = [str(each) for each in program.instructions].index(text)
    order = program.instructions
    return replace(program, instructions=(*order[:at], *instead, *order[at + 1 :]))


def test_damage_is_named() -> None:
    program, first = program_of(), Instruction(Op.REDUCE, 1, 0, in_gaps=True)
    verify(program)
    with pytest.raises(ProgramError, match="`BACKWARD b0 m0`: parts of `REDUCE b1 m0 in gaps` are held for the gaps"):
        verify(damaged(program, "REDUCE b1 m0", first))
    with pytest.raises(ProgramError, match="CLIP does not use `in_gaps`"):
        verify(damaged(program, "CLIP", Instruction(Op.CLIP, in_gaps=True)))
    inside = program_of(experts={"package": {"expert": 2}}, expert_gaps=())
    with pytest.raises(ProgramError, match="`REDUCE b3 m0 in gaps`: its lane has no gaps"):
        verify(damaged(inside, "REDUCE b3 m0", Instruction(Op.REDUCE, 3, 0, in_gaps=True)))
    both = program_of("hsdp", experts={"node": {"expert": 2}})
    with pytest.raises(ProgramError, match="the parts of its REDUCE are held: SYNC it in gaps, too"):
        verify(damaged(both, "SYNC b3 in gaps", Instruction(Op.SYNC, 3)))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved:2", "zbv"])
def test_stages_agree(schedule: str) -> None:
    """A chunk's first block has no gaps behind it; halves of backwards have none at all."""
    plan = plan_of(mapping={"node": {"pipeline": 2}}, schedule=schedule)
    if schedule == "zbv":
        with pytest.raises(PlanError, match="expert_gaps has no effect: behind no REDUCE or SYNC"):
            build_stages(CLUSTER, plan, BLOCKS, 4, SEQUENCE)
        for stage in range(2):  # as every rank builds its own
            with pytest.raises(PlanError, match="expert_gaps has no effect: behind no REDUCE or SYNC"):
                build(CLUSTER, plan, BLOCKS, 4, SEQUENCE, stage)
        return
    programs = build_stages(CLUSTER, plan, BLOCKS, 4, SEQUENCE)
    verify_stages(programs)
    for program in programs:
        first = {chunk[0] for chunk in program.stage.chunks}
        found = {each.block for each in program.instructions if each.in_gaps}
        assert found == set(program.stage.own) - first - {1}  # behind block 1 comes the embedding


def test_a_stage_without_gaps_is_built_where_another_has_some() -> None:
    plan = plan_of(mapping={"node": {"pipeline": 2}}, stages=(2, 4))
    gaps = [build(CLUSTER, plan, BLOCKS, 4, SEQUENCE, stage) for stage in range(2)]
    assert [any(each.in_gaps for each in program.instructions) for program in gaps] == [False, True]


def test_many_micro_batches_repeat() -> None:
    plan = plan_of()
    program = build(CLUSTER, plan, BLOCKS, 3000, SEQUENCE)
    assert program.short is not program
    verify(program)
    assert sum(times for each, times in program.counts.items() if each.in_gaps and each.op is Op.REDUCE) == 3000 * 4


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"experts": {}}, "expert_gaps has no effect: every rank has all experts"),
    ({"expert_gaps": (0.5, 0.4)}, r"= \[0.5, 0.4\]: shares of a gradient are numbers of at least 0 that add"),
    ({"expert_gaps": (1.5, -0.5)}, "numbers of at least 0"),
    ({"expert_gaps": (math.nan, 1.0)}, "numbers of at least 0"),
    ({"expert_gaps": (0, 0, 0.5, 0.5)}, "has 4 shares, and a backward of 1 chunks has 3 places"),
    ({"expert_gaps": (1.0, 0.0)}, "has no effect: without it all of a gradient leaves first, too"),
    ({"experts": {"package": {"expert": 2}}}, "no message of gradients has a tier in common with the table experts"),
    ({"expert_gaps": "auto"}, "a program needs shares in numbers"),
]


@pytest.mark.parametrize(("changes", "said"), REFUSED)
def test_what_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        program_of(**changes)
