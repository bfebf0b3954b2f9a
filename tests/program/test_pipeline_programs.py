"""Programs of pipelines: sound for any numbers, every damage named, bytes as by hand, bad input refused in one line."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from terrace.base.errors import PlanError, ProgramError
from terrace.plan.plan import Plan
from terrace.plan.presets import preset
from terrace.plan.stage import Pass
from terrace.plan.wire import BETWEEN_STAGES, MessageClass
from terrace.program.instruction import Instruction, Op
from terrace.program.lowering import build, build_stages
from terrace.program.program import Program
from terrace.program.schedules.csv_form import as_schedule
from terrace.program.schedules.orders import Orders, StageTask, looped
from tests.support.byte_formula import step_bytes
from tests.support.pipelines import (
    ALONE,
    OUTER,
    PLACEMENTS,
    SCHEDULES,
    WORLDS,
    Place,
    num_chunks,
    pipelined,
    programs_of,
)
from tests.support.totals import verify, verify_ranks
from tests.support.toys import MODELS, SEQUENCE, cluster_of

MODEL_NAMES = ("deep llama tied", "deep gpt2", "deep gpt_neox", "deep llama, frozen layer", "deep llama, frozen table")
TENSOR = {
    "rows": Place((2, 2), {"package": {"tensor": 2}, "node": {"pipeline": 2}}, 2),
    "rows and columns": Place((4, 4), {"package": {"tensor": {"rows": 2, "columns": 2}}, "node": {"pipeline": 4}}, 4),
}


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Place, Plan, str, int]:
    """A place for the pipeline, a plan, a model and a number of micro-batches, all valid."""
    place = draw(st.sampled_from([*WORLDS.values(), *TENSOR.values()]))
    schedule = draw(st.sampled_from([*SCHEDULES, "interleaved:3", "interleaved:4", "zeropp:1", "zeropp:4"]))
    num_virtual = place.num_stages * num_chunks(schedule)
    assume(num_virtual <= 8)
    micros = draw(st.integers(1, 9)) * (place.num_stages if schedule.startswith("interleaved") else 1)
    cuts = sorted(draw(st.sets(st.integers(1, 7), min_size=num_virtual - 1, max_size=num_virtual - 1)))
    stages = tuple(stop - start for start, stop in zip([0, *cuts], [*cuts, 8], strict=True))
    plan = pipelined(
        draw(st.sampled_from([*PLACEMENTS, "zero1", "zero++", "hsdp"])),
        place,
        schedule,
        unit=draw(st.integers(1, 5)),
        prefetch=draw(st.integers(0, 4)),
        stages=draw(st.sampled_from([(), stages])),
        recompute=draw(st.sampled_from([(), ("*",)])),
        sequence_parallel=draw(st.booleans()),
    )
    return place, plan, draw(st.sampled_from(MODEL_NAMES)), micros


@settings(max_examples=50, deadline=None)
@given(pipelines())
def test_any_pipeline_is_sound_and_holds_the_model_once(case: tuple[Place, Plan, str, int]) -> None:
    place, plan, model, micros = case
    programs = programs_of(plan, place.sizes, model, micros)
    verify_ranks(programs)
    stages = {program.stage.index: program.stage for program in programs.values()}
    assert sorted(block for stage in stages.values() for block in stage.own) == list(range(8))
    if plan.stages:
        holders = {chunk[0]: len(chunk) for stage in stages.values() for chunk in stage.chunks}
        assert tuple(holders[block] for block in sorted(holders)) == plan.stages


@settings(max_examples=60, deadline=None)
@given(pipelines(), st.data())
def test_nothing_can_be_left_out_or_repeated(case: tuple[Place, Plan, str, int], data: st.DataObject) -> None:
    place, plan, model, micros = case
    programs = programs_of(plan, place.sizes, model, min(micros, 4 * place.num_stages))
    rank = data.draw(st.sampled_from(sorted(programs)))
    instructions = programs[rank].instructions
    number = data.draw(st.integers(0, len(instructions) - 1))
    without, twice = (*instructions[:number], *instructions[number + 1 :]), list(instructions)
    twice.insert(number, instructions[number])
    for damaged in (without, tuple(twice)):
        with pytest.raises(ProgramError):
            verify_ranks(programs | {rank: replace(programs[rank], instructions=damaged)})


Edit = Callable[[list[Instruction]], None]


def drop(text: str) -> Edit:
    return lambda list_: list_.remove(_found(list_, text))


def move(text: str, before: str) -> Edit:
    def edit(list_: list[Instruction]) -> None:
        moved, place = _found(list_, text), _found(list_, before)
        list_.remove(moved)
        list_.insert(list_.index(place), moved)

    return edit


def _found(list_: list[Instruction], text: str) -> Instruction:
    return next(instruction for instruction in list_ if str(instruction) == text)


def edited(program: Program, *edits: Edit) -> Program:
    instructions = list(program.instructions)
    for edit in edits:
        edit(instructions)
    return replace(program, instructions=tuple(instructions))


# Four micro-batches in units of two, through blocks 0-3 on ranks 0 and 1, then 4-7 on ranks 2 and 3.
DAMAGES: list[tuple[int, Edit, str, str]] = [
    (
        2,
        drop("RECV activation b3 m1 from stage 0"),
        "FORWARD b4 m1",
        "it needs the result of block 3, which is on another stage: RECV it",
    ),
    (0, drop("SEND activation b3 m1 to stage 1"), "", "the output of block 3, micro-batch 1, is never sent"),
    (0, drop("REDUCE b1 m3"), "SYNC b1", "it comes after the last of the block's 2 reductions"),
    (1, move("TIE b0 with stage 1", "REDUCE b0 m3"), "TIE b0 with stage 1", "it comes after the last of the block's 2"),
    (3, drop("TIE b0 with stage 0"), "SYNC b0", "the gradient that another stage has of this block is not added yet"),
    (
        2,
        move("BACKWARD_WEIGHT b7 m0", "BACKWARD_INPUT b7 m0"),
        "BACKWARD_WEIGHT b7 m0",
        "it needs `BACKWARD_INPUT b7 m0` before it",
    ),
    (2, move("SEND gradient b4 m0 to stage 0", "BACKWARD_INPUT b4 m0"), "SEND gradient b4 m0 to stage 0", "it needs `"),
    (
        2,
        move("RECV activation b3 m1 from stage 0", "RECV activation b3 m0 from stage 0"),
        "RECV activation b3 m1 from stage 0",
        "rank 0 sends `SEND activation b3 m0 to stage 1` instead",
    ),
    (3, drop("GATHER b5 for forward"), "FORWARD b5 m0", "the parameters of block 5 are not gathered"),
]


@pytest.mark.parametrize(("rank", "edit", "where", "words"), DAMAGES, ids=[words for *_, words in DAMAGES])
def test_damage_names_rank_instruction_and_rule(rank: int, edit: Edit, where: str, words: str) -> None:
    plan = pipelined("zero3", OUTER, "zb-h1", unit=2, stages=(4, 4))
    programs = programs_of(plan, OUTER.sizes)
    verify_ranks(programs)
    bad = edited(programs[rank], edit)
    with pytest.raises(ProgramError) as caught:
        verify_ranks(programs | {rank: bad})
    said = str(caught.value)
    assert words in said
    if where:
        number = int(said.split("instruction ")[1].split(" ")[0])
        assert said.startswith(f"rank {rank}, instruction {number} `{where}`: ")
        assert str(bad.instructions[number]) == where
    else:
        assert said.startswith(f"rank {rank}, end of the program: ")


def test_two_sends_of_a_channel_in_the_wrong_order() -> None:
    """Both are made by then, so the rank alone is sound; its receiver is not served."""
    programs = programs_of(pipelined("zero3", OUTER, "1f1b", stages=(4, 4)), OUTER.sizes)
    first, second = (f"SEND activation b3 m{micro} to stage 1" for micro in (0, 1))
    bad = edited(programs[0], move(second, first), move(first, str(_after(programs[0], second))))
    for micro in (1, 0):  # and where both are made before
        bad = edited(bad, move(f"SEND activation b3 m{micro} to stage 1", "RECV gradient b4 m1 from stage 1"))
    verify(bad)
    with pytest.raises(ProgramError) as caught:
        verify_ranks(programs | {0: bad})
    assert "`RECV activation b3 m0 from stage 0`: rank 0 sends `SEND activation b3 m1 to stage 1` instead" in str(
        caught.value
    )
    assert str(caught.value).startswith("rank 2, instruction 0 ")


def _after(program: Program, text: str) -> Instruction:
    return program.instructions[[str(one) for one in program.instructions].index(text) + 1]


F, B = Pass.FORWARD, Pass.BACKWARD
ONE_BY_ONE, ALL_FIRST = ((F, 0), (B, 0), (F, 1), (B, 1)), ((F, 0), (F, 1), (B, 0), (B, 1))


def by_hand(*rows: tuple[tuple[Pass, int], ...]) -> Orders:
    """Orders of two stages and two micro-batches."""
    tasks = tuple(tuple(StageTask(pass_, 0, micro) for pass_, micro in row) for row in rows)
    return Orders(schedule="by hand", num_stages=2, num_chunks=1, num_micros=2, placement=looped(2, 1), tasks=tasks)


def programs_by_hand(name: str, *rows: tuple[tuple[Pass, int], ...], num_micros: int = 2) -> dict[int, Program]:
    plan = pipelined(name, OUTER, as_schedule(by_hand(*rows)), stages=(4, 4))
    return programs_of(plan, OUTER.sizes, num_micros=num_micros)


def test_reading_before_arrival_is_a_circle() -> None:
    """The first stage waits for the last one's gradient before it sends the activation that this one is made from."""
    programs = programs_by_hand("ddp", ONE_BY_ONE, ALL_FIRST)
    for rank, program in programs.items():
        verify(program, rank)
    with pytest.raises(ProgramError, match="the ranks wait in a circle") as caught:
        verify_ranks(programs)
    said = str(caught.value)
    assert "rank 0 waits in `BACKWARD b3 m0` for rank 2" in said
    assert "rank 2 waits in `FORWARD b4 m1` for rank 0" in said


def test_data_groups_and_stages_that_wait_in_a_circle() -> None:
    """Every group agrees on its order and every channel on its messages, and still nobody can go on.

    Rank 3 reads micro-batch 1 before it joins rank 2 in reducing micro-batch 0. Rank 2 sends its gradient after that,
    rank 0 joins rank 1 in reducing after it has come, and rank 1 sends micro-batch 1 after that.
    """
    programs = programs_by_hand("zero2", ONE_BY_ONE, ONE_BY_ONE)
    verify_ranks(programs)
    bad = programs | {3: edited(programs[3], move("REDUCE b4 m0", "BACKWARD b7 m1"))}
    with pytest.raises(ProgramError, match="the ranks wait in a circle") as caught:
        verify_ranks(bad)
    said = str(caught.value)
    for part in (
        "rank 0 waits in `BACKWARD b3 m0` for rank 2",
        "rank 2 waits in `REDUCE b4 m0` on tier 'package' for rank 3",
        "rank 3 waits in `FORWARD b4 m1` for rank 1",
        "rank 1 waits in `REDUCE b3 m0` on tier 'package' for rank 0",
    ):
        assert part in said


def test_ranks_of_a_stage_that_differ_are_named() -> None:
    one, other = programs_by_hand("zero3", ALL_FIRST, ONE_BY_ONE), programs_by_hand("zero3", ONE_BY_ONE, ONE_BY_ONE)
    verify_ranks(one)
    with pytest.raises(ProgramError, match=r"ranks 0 and 1 share a group on tier 'package' but disagree"):
        verify_ranks(one | {1: other[1]})


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "interleaved:2"])
def test_activations_between_stages_by_hand(schedule: str) -> None:
    """2 m b s h items cross every boundary between virtual stages that are on two stages, half of them each way."""
    micros, batch, item, chunks = 4, 3, 8, num_chunks(schedule)
    cluster = cluster_of(*OUTER.sizes)
    plan = pipelined("ddp", OUTER, schedule, micro_batch=batch)
    stages = build_stages(cluster, plan, MODELS["deep gpt_neox"].declared, micros, SEQUENCE)
    sent = [tier_bytes(program, *BETWEEN_STAGES) for program in stages]
    message = batch * SEQUENCE * 8 * item
    # The turn of a V stays on one stage.
    boundaries = {"1f1b": 1, "zbv": 2, "interleaved:2": 2 * chunks - 1}[schedule]
    assert {tier for row in sent for tier in row} == {"node"}
    assert sum(row["node"] for row in sent) == boundaries * 2 * micros * message
    assert all(tier_bytes(program, MessageClass.TIE) == {} for program in stages)


def tier_bytes(program: Program, *messages: MessageClass) -> dict[str, int]:
    """Bytes that a rank of a program sends of some classes, by tier."""
    verify(program)
    found = step_bytes(
        program.cluster, program.plan, program.blocks, program.num_micros, program.model.sequence, program.stage
    )
    total: Counter[str] = Counter()
    for (message, tier), num in found.items():
        total[tier] += num if message in messages else 0
    return {tier: num for tier, num in total.items() if num}


def test_an_interior_stage_sends_both_ways_and_over_the_tiers_that_its_edges_cross() -> None:
    place = Place((2, 2), {"package": {"pipeline": 2}, "node": {"pipeline": 2}}, 4)
    micros, message = 5, SEQUENCE * 8 * 8
    programs = programs_of(pipelined("ddp", place), place.sizes, "deep gpt_neox", micros)
    sent = [tier_bytes(programs[rank], *BETWEEN_STAGES) for rank in range(4)]
    half = micros * message
    assert sent == [
        {"package": half},
        {"package": half, "node": half},
        {"package": half, "node": half},
        {"package": half},
    ]
    chunks = 2
    looped_programs = programs_of(pipelined("ddp", ALONE, "interleaved:2"), ALONE.sizes, "deep gpt_neox", 4)
    for rank, ends in ((0, 1), (1, 0), (2, 0), (3, 1)):
        found = tier_bytes(looped_programs[rank], *BETWEEN_STAGES)
        assert found == {"package": (2 * chunks - ends) * 4 * message}


@pytest.mark.parametrize(("name", "span"), [("ddp", 1), ("zero2", 2)])
def test_both_ends_of_a_tie_send_their_shard_of_the_gradient(name: str, span: int) -> None:
    programs = programs_of(pipelined(name, OUTER), OUTER.sizes)
    table = 11 * 8
    for program in programs.values():
        assert tier_bytes(program, MessageClass.TIE) == {"node": table // span * 8}
    frozen = programs_of(pipelined(name, OUTER), OUTER.sizes, "deep llama, frozen table")
    assert all(tier_bytes(program, MessageClass.TIE) == {} for program in frozen.values())


def test_tensor_rows_halve_what_crosses_an_edge() -> None:
    place, micros = TENSOR["rows"], 4
    whole = micros * SEQUENCE * 8 * 8
    for splits in (True, False):
        plan = pipelined("ddp", place, sequence_parallel=splits)
        programs = programs_of(plan, place.sizes, "deep gpt_neox", micros)
        for program in programs.values():
            assert tier_bytes(program, *BETWEEN_STAGES) == {"node": whole // 2}
    inside = []
    for number in (micros, 2 * micros):  # what the receivers gather again is a tensor message: half of a part each
        one, two = (
            programs_of(pipelined("ddp", place, stages=cut, sequence_parallel=False), place.sizes, "deep gpt_neox", n)
            for cut, n in (((4, 4), number), ((2, 6), number))
        )
        both = [sum(tier_bytes(ps[rank], MessageClass.TENSOR)["package"] for rank in (0, 2)) for ps in (one, two)]
        assert both[0] == both[1], "wherever the cut is"
        inside.append(both[0])
    alone = replace(pipelined("ddp", place, sequence_parallel=False), schedule=None)
    alone = replace(alone, mapping={"package": {"tensor": 2}})
    program = build(cluster_of(2, 2), alone, MODELS["deep gpt_neox"].declared, micros, SEQUENCE)
    assert inside[0] - tier_bytes(program, MessageClass.TENSOR)["package"] == 2 * whole // 2
    assert inside[1] == 2 * inside[0]


# What is asked, for how many micro-batches, of which model and sequence, and what the one line says.
BAD: list[tuple[dict[str, Any], int, str, int, tuple[str, ...]]] = [
    ({"schedule": "interleaved:5"}, 4, "deep llama tied", 6, ("10 virtual stages", "8 blocks", "use at most 8")),
    (
        {"stages": (4, 3)},
        4,
        "deep llama tied",
        6,
        ("stages = [4, 3]", "2 virtual stages", "8 together", "leave it out"),
    ),
    ({"stages": (8, 0)}, 4, "deep llama tied", 6, ("stages = [8, 0]", "at least 1 each")),
    ({"stages": (2, 2, 4)}, 4, "deep llama tied", 6, ("stages = [2, 2, 4]", "2 virtual stages")),
    ({"schedule": "1f1"}, 4, "deep llama tied", 6, ("'1f1'", "did you mean '1f1b'")),
    ({"schedule": "interleavd:2"}, 4, "deep llama tied", 6, ("'interleavd'", "did you mean 'interleaved'")),
    (
        {"schedule": "interleaved:0"},
        4,
        "deep llama tied",
        6,
        ("'interleaved:0'", "'0' is no number", "1 or more"),
    ),
    ({"schedule": "zeropp:-2"}, 4, "deep llama tied", 6, ("'-2' is no number of chunks", "write 1 or more")),
    ({"schedule": "1f1b:2"}, 4, "deep llama tied", 6, ("'1f1b:2'", "one chunk a stage", "write '1f1b'")),
    ({"schedule": "zbv:3"}, 4, "deep llama tied", 6, ("num_chunks = 3", "write num_chunks = 2")),
    ({"schedule": "zb-auto"}, 4, "deep llama tied", 6, ("'zb-auto'", "write 'zb-auto:4' for four")),
    ({"schedule": "interleaved:2"}, 5, "deep llama tied", 6, ("num_micros = 5", "write num_micros = 6", "'1f1b'")),
    ({"schedule": "interleaved:2"}, 1, "deep llama tied", 6, ("num_micros = 1", "write num_micros = 2")),
    ({"mapping": {}, "schedule": "1f1b"}, 4, "deep llama tied", 6, ("'1f1b' has no effect", "leave it out")),
    (
        {"mapping": {}, "schedule": None, "stages": (4, 4)},
        4,
        "deep llama tied",
        6,
        ("[4, 4] has no effect without a pipeline axis", "leave it out"),
    ),
    ({}, 4, "no dims", 6, ("hidden", "dims")),
    ({}, 4, "deep llama tied", 0, ("length of a sequence",)),
]


@pytest.mark.parametrize(("changes", "micros", "model", "sequence", "words"), BAD, ids=[str(row[-1]) for row in BAD])
def test_bad_input_is_one_line_with_value_rule_and_fix(
    changes: dict[str, Any], micros: int, model: str, sequence: int, words: tuple[str, ...]
) -> None:
    cluster = cluster_of(*OUTER.sizes)
    blocks = MODELS["deep llama tied"].declared
    if model == "no dims":
        blocks = tuple(
            replace(block, params=tuple(replace(param, dims=()) for param in block.params)) for block in blocks
        )
    plan = replace(preset("zero3", cluster), **({"mapping": OUTER.mapping} | changes))
    with pytest.raises(PlanError) as caught:
        build(cluster, plan, blocks, micros, sequence)
    said = str(caught.value)
    assert "\n" not in said
    for word in words:
        assert word in said, said


def test_orders_for_another_pipeline_are_refused() -> None:
    with pytest.raises(PlanError, match="its order is of 2 stages and 2 micro-batches, and the step has 2 and 3: "):
        programs_by_hand("ddp", ONE_BY_ONE, ONE_BY_ONE, num_micros=3)


def test_recv_stands_before_its_reader_and_one_task_ahead() -> None:
    """So that a message arrives while the task before is computed, and no buffer waits much longer."""
    programs = programs_of(pipelined("ddp", OUTER, "1f1b", stages=(4, 4)), OUTER.sizes)
    passes, waiting = 0, dict[int, int]()
    for one in (one for one in programs[2].instructions if one.op in (Op.RECV, Op.FORWARD, Op.BACKWARD)):
        if one.op is Op.RECV:
            waiting[one.micro] = passes
        elif one.op is Op.FORWARD and one.block == 4:
            assert passes - waiting[one.micro] in (0, 4)
        passes += one.op is not Op.RECV
