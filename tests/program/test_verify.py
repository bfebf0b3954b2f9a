"""The verifier refuses every damaged program and names rank, position, instruction and rule."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from terrace.base.errors import ProgramError
from terrace.model.blocks import block_specs
from terrace.plan.plan import Plan
from terrace.plan.presets import preset
from terrace.program.instruction import SPECS, Instruction, Op
from terrace.program.lowering import build
from terrace.program.program import Program
from terrace.program.rules import OF_OP, RULES
from tests.support.mixtures import mixture
from tests.support.programs import BLOCKS, program_of
from tests.support.strategies import Setting, settings_of_a_step
from tests.support.totals import verify, verify_ranks
from tests.support.toys import cluster_of

Edit = Callable[[list[Instruction]], object]


def edited(program: Program, edit: Edit) -> Program:
    instructions = list(program.instructions)
    edit(instructions)
    return replace(program, instructions=tuple(instructions))


def at(instructions: list[Instruction], text: str) -> int:
    """Position of the first instruction with this text."""
    return [str(instruction) for instruction in instructions].index(text)


def remove(text: str) -> Edit:
    return lambda list_: list_.pop(at(list_, text))


def repeat(text: str) -> Edit:
    return lambda list_: list_.insert(at(list_, text) + 1, list_[at(list_, text)])


def move(text: str, before: str) -> Edit:
    def edit(list_: list[Instruction]) -> None:
        moved = list_.pop(at(list_, text))
        list_.insert(at(list_, before), moved)

    return edit


def add(instruction: Instruction, before: str) -> Edit:
    return lambda list_: list_.insert(at(list_, before), instruction)


def change(text: str, instruction: Instruction) -> Edit:
    return lambda list_: list_.__setitem__(at(list_, text), instruction)


# preset, damage, and what the message says: the instruction and the rule
DAMAGES: list[tuple[str, Edit, str]] = [
    ("zero3", remove("GATHER b1 for forward"), "`FORWARD b1 m0`: the parameters of block 1 are not gathered"),
    ("zero3", remove("GATHER b0 for forward"), "`FORWARD b0 m0`: the parameters of block 0 are not gathered"),
    ("zero3", move("FREE b2", "FORWARD b2 m0"), "`FREE b2`: the block is gathered for nothing"),
    ("zero3", add(Instruction(Op.SYNC, 3, 0), "CLIP"), "SYNC does not use `micro`, which is 0"),
    ("zero3", add(Instruction(Op.CLIP, 1), "UPDATE b0"), "CLIP does not use `block`, which is 1"),
    ("ddp", add(Instruction(Op.FORWARD, 0, 0, backward=True), "CLIP"), "FORWARD does not use `backward`"),
    ("zero3", move("FREE b3", "BACKWARD b3 m0"), "`BACKWARD b3 m0`: the parameters of block 3 are not gathered"),
    ("zero3", repeat("GATHER b2 for backward"), "`GATHER b2 for backward`: the block is already gathered"),
    ("zero3", remove("FREE b2"), "`GATHER b2 for backward`: the block is already gathered"),
    ("zero3", repeat("FREE b2"), "`FREE b2`: the block is not gathered"),
    ("ddp", add(Instruction(Op.GATHER, 1), "FORWARD b1 m0"), "there is nothing to gather"),
    ("zero3", repeat("FORWARD b1 m0"), "`FORWARD b1 m0`: it runs twice"),
    ("zero3", repeat("BACKWARD b1 m1"), "`BACKWARD b1 m1`: it runs twice"),
    ("ddp", remove("FORWARD b1 m0"), "`FORWARD b2 m0`: it needs `FORWARD b1 m0` before it"),
    ("ddp", remove("BACKWARD b2 m1"), "`REDUCE b2 m1`: it needs 1 more complete backwards of its block"),
    ("ddp", move("BACKWARD b1 m0", "BACKWARD b2 m0"), "`BACKWARD b1 m0`: it needs `BACKWARD b2 m0` before it"),
    ("ddp", move("BACKWARD b3 m0", "FORWARD b3 m0"), "`BACKWARD b3 m0`: it needs `FORWARD b3 m0` before it"),
    ("zero3", repeat("REDUCE b1 m0"), "`REDUCE b1 m0`: it runs twice"),
    (
        "zero3",
        move("REDUCE b1 m0", "BACKWARD b1 m0"),
        "`REDUCE b1 m0`: it needs 1 more complete backwards of its block",
    ),
    (
        "zero3",
        move("REDUCE b1 m0", "REDUCE b1 m1"),
        "a unit of 1 micro-batches of block 1 is not reduced yet",
    ),
    ("zero3", move("SYNC b1", "REDUCE b1 m1"), "`SYNC b1`: it comes after the last of the block's 2 reductions"),
    ("zero3", remove("REDUCE b1 m1"), "`SYNC b1`: it comes after the last of the block's 2 reductions"),
    ("zero3", remove("SYNC b2"), "`CLIP`: it needs `SYNC b2` before it"),
    ("zero3", move("UPDATE b0", "CLIP"), "`UPDATE b0`: it needs `CLIP` before it"),
    ("zero3", repeat("CLIP"), "`CLIP`: it runs twice"),
    ("zero3", move("REFRESH b1", "UPDATE b1"), "`REFRESH b1`: it needs `UPDATE b1` before it"),
    ("zero3", add(Instruction(Op.GATHER, 0), "UPDATE b0"), "`UPDATE b0`: the block is still gathered"),
    ("zero3", add(Instruction(Op.GATHER, 0), "UPDATE b1"), "`GATHER b0 for forward`: the parameters are being updated"),
    ("zero++", change("GATHER b1 for forward", Instruction(Op.GATHER, 1, secondary=True)), "only written by a gather"),
    ("zero3", change("GATHER b1 for forward", Instruction(Op.GATHER, 1, secondary=True)), "keeps no secondary copy"),
    ("ddp", add(Instruction(Op.FORWARD, 4, 0), "CLIP"), "`FORWARD b4 m0`: there is no block 4"),
    ("ddp", add(Instruction(Op.FORWARD, 0, 2), "CLIP"), "`FORWARD b0 m2`: there is no micro-batch 2"),
    ("ddp", add(Instruction(Op.BACKWARD, 0, 2), "CLIP"), "`BACKWARD b0 m2`: there is no micro-batch 2"),
    ("ddp", add(Instruction(Op.REDUCE, 0, 2), "CLIP"), "`REDUCE b0 m2`: there is no micro-batch 2"),
    ("ddp", add(Instruction(Op.SEND, 3, 0, peer=1), "CLIP"), "b3 m0 to stage 1`: stage 1 does not read it"),
    ("ddp", add(Instruction(Op.RECV, 3, 0, peer=1), "CLIP"), "from stage 1`: block 3 runs on this stage"),
    ("ddp", add(Instruction(Op.BACKWARD_INPUT, 3, 0), "CLIP"), "the backward of this micro-batch has run"),
    ("ddp", add(Instruction(Op.BACKWARD_WEIGHT, 3, 0), "CLIP"), "it needs `BACKWARD_INPUT b3 m0` before it"),
    ("ddp", add(Instruction(Op.TIE, 0, peer=1), "CLIP"), "stage 1 holds no copy of the block"),
    (
        "ddp",
        add(Instruction(Op.EVICT, 1, 0), "FORWARD b2 m0"),
        "`EVICT b1 m0`: the input of the block stays on the device",
    ),
    ("ddp", add(Instruction(Op.COUNT), "CLIP"), "no block of the stage has a router"),
    ("ddp", add(Instruction(Op.AGREE, 0), "CLIP"), "`AGREE b0`: blocks are updated behind CLIP"),
    ("ddp", add(Instruction(Op.ORTHOGONALISE, 0), "UPDATE b0"), "the optimizer updates as wholes"),
    ("ddp", add(Instruction(Op.OUTER_COUNT), "CLIP"), "no exchange starts here"),
    ("ddp", add(Instruction(Op.OUTER_START, 0), "CLIP"), "it is not the turn of its fragment"),
    ("ddp", add(Instruction(Op.OUTER_APPLY, 0), "CLIP"), "no exchange of its fragment is over"),
]


@pytest.mark.parametrize(("name", "edit", "words"), DAMAGES, ids=[f"{name}: {words}" for name, _, words in DAMAGES])
def test_damage_is_named(name: str, edit: Edit, words: str) -> None:
    program = program_of(name)
    verify(program)
    with pytest.raises(ProgramError) as caught:
        verify(edited(program, edit), rank=5)
    message = str(caught.value)
    assert words in message
    assert message.startswith("rank 5, instruction ")
    position, instruction = message.removeprefix("rank 5, instruction ").split(" ", 1)
    assert str(edited(program, edit).instructions[int(position)]) == instruction.split("`")[1]


# Faults of these rules need frozen blocks, units, a pipeline, a whole secondary copy, inputs below, Muon, an exchange.
ELSEWHERE = {
    "block {} runs on another stage",
    "block {} is on another stage",
    "the block has nothing to train",
    "it needs the result of block {}, which is on another stage: RECV it before",
    "the gradient of block {} is synchronised already",
    "the newest micro-batch whose gradient is complete is {}: say so",
    "its secondary copy is whole and stays",
    "{} inputs are fetched ahead already",
    "stage {} makes nothing of it that this stage reads",
    "the gradient that another stage has of this block is not added yet: TIE it before",
    "the whole matrices of two layers are held already",
    "it needs `OUTER_COUNT` before it: weights go by the tokens of all islands",
    "nothing has changed the block",
}


def test_every_rule_has_a_planted_fault() -> None:
    planted = "\n".join(words for _, _, words in DAMAGES)
    rules = {rule.words for rule in RULES}
    assert rules > ELSEWHERE
    for words in rules - ELSEWHERE:
        pattern = re.escape(words).replace(r"\{\}", ".+")
        assert any(re.search(pattern, said) or said.split(": ", 1)[-1] in words for said in planted.splitlines()), words


def test_ops_have_rules_for_declared_fields_alone() -> None:
    assert OF_OP.keys() == SPECS.keys() == set(Op)
    for op, spec in SPECS.items():
        assert OF_OP[op]
        assert set(spec.fields) < set(Instruction._fields)
        assert set(spec.of_each_block) <= set(spec.phases)


ENDINGS = [
    ("ddp", "REFRESH b3", "`REFRESH b3` never happens"),
    ("ddp", "UPDATE b3", "`UPDATE b3`"),
    ("zero3", "FREE b0", "`UPDATE b0`: the block is still gathered: its full parameters would go stale"),
]


def remove_last(text: str) -> Edit:
    def edit(list_: list[Instruction]) -> None:
        list_.pop(max(place for place, instruction in enumerate(list_) if str(instruction) == text))

    return edit


@pytest.mark.parametrize(("name", "text", "words"), ENDINGS)
def test_what_is_missing_at_the_end_is_named(name: str, text: str, words: str) -> None:
    with pytest.raises(ProgramError) as caught:
        verify(edited(program_of(name), remove_last(text)), rank=3)
    assert str(caught.value).startswith("rank 3, ")
    assert words in str(caught.value)


def test_a_unit_is_not_reduced_in_its_middle() -> None:
    cluster = cluster_of(2, 2)
    program = build(cluster, replace(preset("zero3", cluster), unit=2), BLOCKS, 2)
    place = next(i for i, one in enumerate(program.instructions) if one.op is Op.REDUCE)
    early = program.instructions[place]._replace(micro=0)
    instructions = (*program.instructions[:place], early, *program.instructions[place + 1 :])
    with pytest.raises(ProgramError, match="the newest micro-batch whose gradient is complete is 1: say so"):
        verify(replace(program, instructions=instructions))


def test_frozen_block_has_nothing_to_train() -> None:
    frozen = replace(BLOCKS[1], params=tuple(replace(param, trainable=False) for param in BLOCKS[1].params))
    good = program_of("ddp")
    program = build(good.cluster, good.plan, (BLOCKS[0], frozen, *BLOCKS[2:]), 1)
    for instruction in (Instruction(Op.REDUCE, 1, 0), Instruction(Op.SYNC, 1), Instruction(Op.UPDATE, 1)):
        with pytest.raises(ProgramError, match="the block has nothing to train"):
            verify(edited(program, add(instruction, "UPDATE b0")))
    sharded = build(good.cluster, program_of("zero3").plan, program.blocks, 1)
    with pytest.raises(ProgramError, match="rank 0, end of the program: block 1 is still gathered at the end: FREE it"):
        verify(edited(sharded, remove_last("FREE b1")))


@settings(max_examples=150, deadline=None)
@given(settings_of_a_step(max_world=8), st.data())
def test_no_instruction_can_be_left_out_or_repeated(case: Setting, data: st.DataObject) -> None:
    program = build(case.cluster, case.plan, case.blocks, case.num_micros)
    place = data.draw(st.integers(0, len(program.instructions) - 1))
    with pytest.raises(ProgramError):
        verify(edited(program, lambda list_: list_.pop(place)))
    with pytest.raises(ProgramError):
        verify(edited(program, lambda list_: list_.insert(place, list_[place])))


@settings(max_examples=50, deadline=None)
@given(settings_of_a_step(max_world=8), st.data())
def test_free_cannot_come_before_the_last_use(case: Setting, data: st.DataObject) -> None:
    program = build(case.cluster, case.plan, case.blocks, case.num_micros)
    frees = [place for place, instruction in enumerate(program.instructions) if instruction.op is Op.FREE]
    assume(frees)
    place = data.draw(st.sampled_from(frees))
    block = program.instructions[place].block
    use = max(
        earlier
        for earlier, instruction in enumerate(program.instructions[:place])
        if instruction.op in (Op.FORWARD, Op.BACKWARD)
        and block in (instruction.block, *case.blocks[instruction.block].tied_to)
    )
    with pytest.raises(ProgramError):
        verify(edited(program, lambda list_: list_.insert(use, list_.pop(place))))


def test_model_state_beyond_the_device_is_refused() -> None:
    program = program_of("ddp")
    small = cluster_of(2, 2, 2, memory_bytes=1000)
    with pytest.raises(
        ProgramError, match=r"rank 2: the model state needs .* GB a rank, and a plan may take 1e-06 GB of the"
    ):
        verify(replace(program, model=replace(program.model, cluster=small)), rank=2)


def late_reduce(list_: list[Instruction]) -> None:
    """Issue one reduction after the next block's: sound for the rank alone."""
    list_.insert(at(list_, "REDUCE b0 m0"), list_.pop(at(list_, "REDUCE b1 m0")))


@pytest.mark.parametrize(("name", "tier"), [("zero3", "system"), ("three-level", "node"), ("hsdp", "node")])
def test_ranks_of_a_group_must_reduce_in_one_order(name: str, tier: str) -> None:
    good = program_of(name)
    bad = edited(good, late_reduce)
    verify(bad)
    programs = dict.fromkeys(range(8), good)
    with pytest.raises(ProgramError) as caught:
        verify_ranks(programs | {6: bad})
    message = str(caught.value)
    assert "ranks 4 and 6 share a group on tier 'node' but disagree on its collective number" in message
    assert "rank 4 issues `REDUCE b1 m0`, rank 6 issues `" in message
    assert "every member must issue the same order" in message
    verify_ranks(dict.fromkeys(range(8), bad))
    # Ranks 4 to 7 are one node: with reductions inside nodes only, a node may have its own order.
    node = programs | dict.fromkeys(range(4, 8), bad)
    if tier == "node":
        verify_ranks(node)
    else:
        with pytest.raises(ProgramError, match="on tier 'system'"):
            verify_ranks(node)


def test_lanes_that_wait_in_a_circle_are_refused() -> None:
    """Orders agree inside every group, and still nobody can go on."""
    cluster = cluster_of(2, 2)
    package, outside = cluster.tiers[0].name, cluster.tiers[1].name
    plan = Plan(params="device", grads=package, optimizer=outside)
    program = build(cluster, plan, BLOCKS, 2)

    def swap(list_: list[Instruction]) -> None:
        one, other = at(list_, "SYNC b3"), at(list_, "REDUCE b2 m1")
        backward = list_.pop(at(list_, "BACKWARD b2 m1"))
        list_.insert(one, backward)
        one, other = at(list_, "SYNC b3"), at(list_, "REDUCE b2 m1")
        list_[one], list_[other] = list_[other], list_[one]

    swapped = edited(program, swap)
    verify_ranks(dict.fromkeys(range(4), swapped))
    with pytest.raises(ProgramError, match="wait in a circle: rank 0 waits in") as caught:
        verify_ranks({0: program, 1: swapped, 2: swapped, 3: program})
    assert "SYNC b3" in str(caught.value)
    assert "REDUCE b2 m1" in str(caught.value)


def test_more_gathered_blocks_than_the_formula_counts_are_refused() -> None:
    program = program_of("zero3")

    def hold(list_: list[Instruction]) -> None:
        place = at(list_, "GATHER b2 for backward")
        list_.insert(at(list_, "BACKWARD b3 m0"), list_.pop(place))  # as built
        for text in ("FREE b1", "GATHER b1 for backward"):
            list_.pop(at(list_, text))

    with pytest.raises(ProgramError, match="bytes of gather"):
        verify(edited(program, hold))


def test_more_gradient_buffers_than_the_formula_counts_are_refused() -> None:
    """Reductions that all wait for the last backward: in order, complete, and too much memory."""
    program = build(cluster_of(2, 2), preset("zero2", cluster_of(2, 2)), BLOCKS, 1)
    verify(program)

    def wait(list_: list[Instruction]) -> None:
        late = [each for each in list_ if each.op in (Op.REDUCE, Op.SYNC)]
        list_[:] = [each for each in list_ if each not in late]
        place = at(list_, "CLIP")
        list_[place:place] = sorted(late, key=lambda each: each.op is Op.SYNC)

    with pytest.raises(ProgramError, match="bytes of grads_full are held at once"):
        verify(edited(program, wait))


def test_ranks_of_experts_must_meet_gradients_and_rows_in_one_order() -> None:
    """A message of experts is on the lane of its tier, in the middle of a pass: a gather may not overtake it."""
    cluster = cluster_of(2, 2)
    outside = cluster.tiers[1].name
    plan = replace(preset("zero3", cluster), experts={outside: {"expert": 2}})
    program = build(cluster, plan, tuple(block_specs(mixture(layers=2))), 2, 8)

    def late(list_: list[Instruction]) -> None:
        list_.insert(at(list_, "FORWARD b1 m0") + 1, list_.pop(at(list_, "GATHER b2 for forward")))

    other = edited(program, late)
    for each in (program, other):
        verify_ranks(dict.fromkeys(range(4), each))
    with pytest.raises(ProgramError, match="wait in a circle: rank 0 waits in") as caught:
        verify_ranks({0: program, 1: program, 2: other, 3: other})
    assert f"`FORWARD b1 m0` on tier '{outside}'" in str(caught.value)


def test_ranks_of_experts_must_pass_micro_batches_in_one_order() -> None:
    cluster = cluster_of(2)
    plan = replace(preset("zero3", cluster), unit=2, experts={cluster.tiers[0].name: {"expert": 2}})
    program = build(cluster, plan, tuple(block_specs(mixture(layers=1))), 2, 8)

    def swap(list_: list[Instruction]) -> None:
        one, two = at(list_, "FORWARD b1 m0"), at(list_, "FORWARD b1 m1")
        list_[one], list_[two] = list_[two], list_[one]

    swapped = edited(program, swap)
    verify_ranks(dict.fromkeys(range(2), swapped))
    with pytest.raises(ProgramError, match="disagree on its collective number"):
        verify_ranks({0: program, 1: swapped})
