"""Inputs of blocks that are kept below the device: where they leave and come back, their bytes, and their memory."""

from dataclasses import replace
from typing import Any

import pytest

from terrace.base.errors import PlanError, ProgramError
from terrace.plan.boundaries import leaving
from terrace.plan.keep import Keep
from terrace.plan.kinds import Kinds
from terrace.plan.plan import Plan
from terrace.plan.presets import preset
from terrace.plan.wire import MessageClass
from terrace.program.instruction import HALVES, Instruction, Op
from terrace.program.lowering import build, build_stages
from terrace.program.program import Program
from terrace.program.verify import verify
from terrace.program.verify_ranks import verify_ranks
from terrace.runtime.setup import Workload
from terrace.simulate.footprint import footprint, work_of
from terrace.simulate.held_activations import activation_bytes, activations_by_block
from tests.support.toys import MODELS, cluster_of

CLUSTER = cluster_of(2, 2)
BLOCKS = MODELS["deep llama tied"].declared
LAYERS = range(1, len(BLOCKS) - 1)
SEQUENCE = 32
KEEP = Keep(activations="disk", piece=128)
PIPELINE = {"mapping": {"node": {"pipeline": 2}}}
SHAPES: list[dict[str, Any]] = [
    {},
    {"unit": 2},
    {"recompute": ("layers.*",)},
    {**PIPELINE, "schedule": "1f1b"},
    {**PIPELINE, "schedule": "interleaved:2", "recompute": ("layers.*",)},
    {**PIPELINE, "schedule": "zbv"},
    {**PIPELINE, "schedule": "gpipe", "unit": 2},
    {"mapping": {"package": {"tensor": 2}}},
    {"mapping": {"package": {"tensor": 2}}, "sequence_parallel": False},
    {"mapping": {"package": {"context": {"ring": 2}}}},
]


def kept(keep: Keep = KEEP, **changes: Any) -> Plan:
    return replace(preset("zero3", CLUSTER), keep=keep, **changes)


def programs(plan: Plan, num_micros: int = 4) -> list[Program]:
    return build_stages(CLUSTER, plan, BLOCKS, num_micros, SEQUENCE)


@pytest.mark.parametrize("changes", SHAPES, ids=str)
def test_each_input_leaves_once_and_comes_back_ahead_of_its_backward(changes: dict[str, Any]) -> None:
    found = programs(kept(**changes))
    item = 4
    for program in found:
        verify(program)
        order = {now[:3]: place for place, now in enumerate(program.instructions) if now.micro >= 0}
        own = [block for block in program.stage.own if block in LAYERS]
        for block in own:
            for micro in range(4):
                backward = min(order.get((op, block, micro), len(program.instructions)) for op in HALVES)
                assert order[Op.EVICT, block, micro] == order[Op.FORWARD, block, micro] + 1
                assert order[Op.EVICT, block, micro] < order[Op.FETCH, block, micro] < backward
        numel = program.model.input_numel
        each = sum(-(-(min(128, numel - start) * item + 64) // 4096) * 4096 for start in range(0, numel, 128))
        for message in (MessageClass.KEEP_READ, MessageClass.KEEP_WRITE):
            assert program.sent_bytes[message, "disk"] == 4 * len(own) * each
        assert program.resting_bytes["disk"] == program.most_inputs_below * each
        without = next(other for other in programs(kept(Keep(), **changes)) if other.stage.index == program.stage.index)
        assert program.state_bytes["buffers"] == without.state_bytes["buffers"] + 2 * min(each, 4096)
    flying = changes.get("unit", 1)
    if len(found) == 1:
        assert found[0].most_inputs_below == flying * len(LAYERS)


def test_a_stage_that_no_input_leaves_has_no_buffer_for_one() -> None:
    plan = kept(replace(KEEP, blocks=("layers.0",)), **PIPELINE, schedule="1f1b")
    found, bare = programs(plan), programs(replace(plan, keep=Keep()))
    more = [each.state_bytes["buffers"] - other.state_bytes["buffers"] for each, other in zip(found, bare, strict=True)]
    assert more == [2 * 4096, 0]
    assert [each.most_inputs_below for each in found] == [2, 0]


@pytest.mark.parametrize("recompute", [(), ("layers.*",), ("layers.* every 2",), ("*",)])
@pytest.mark.parametrize("unit", [1, 2, 4])
def test_memory_falls_by_what_left_and_rises_by_the_ring(unit: int, recompute: tuple[str, ...]) -> None:
    """Of six inputs a micro-batch, that of the layer that runs is there, and one on its way."""
    cluster = cluster_of(1)

    def memory(keep: Keep) -> tuple[dict[str, int], int]:
        plan = replace(preset("ddp", cluster), keep=keep, unit=unit, recompute=recompute)
        program = build(cluster, plan, BLOCKS, 4, SEQUENCE)
        work = work_of(cluster, plan, BLOCKS[1].operations, SEQUENCE)
        held = activations_by_block(work, plan, program.blocks, "cpu")
        return footprint(cluster, plan, Kinds.of(BLOCKS), SEQUENCE, 4, backend="cpu"), activation_bytes(program, held)

    (before, peak), (after, low) = memory(Keep()), memory(KEEP)
    one = SEQUENCE * 8 * 4  # bytes: tokens, hidden size, fp32
    ring = 2 * 4096
    assert after["buffers"] == before["buffers"] + ring
    fell = sum(before.values()) - sum(after.values()) + ring
    assert fell in {(len(LAYERS) * unit - on_device) * one for on_device in (1, 2)}
    # A walk knows when other micro-batches of a unit hold gradients, which the closed form bounds.
    assert abs(fell - (peak - low)) <= one * (unit > 1)


def without(program: Program, op: Op, block: int) -> Program:
    return replace(program, instructions=tuple(each for each in program.instructions if each[:2] != (op, block)))


def test_what_is_not_there_is_not_read() -> None:
    (program,) = programs(kept(), 1)
    with pytest.raises(ProgramError, match=r"BACKWARD b3 m0`: it needs `FETCH b3 m0` before it"):
        verify(without(program, Op.FETCH, 3))
    with pytest.raises(ProgramError, match=r"FETCH b3 m0`: it needs `EVICT b3 m0` before it"):
        verify(without(program, Op.EVICT, 3))
    order = list(program.instructions)
    order.insert(order.index(Instruction(Op.FORWARD, 3, 0)), order.pop(order.index(Instruction(Op.EVICT, 3, 0))))
    with pytest.raises(ProgramError, match=r"EVICT b3 m0`: it needs `FORWARD b3 m0` before it"):
        verify(replace(program, instructions=tuple(order)))
    order = list(program.instructions)
    for block in (5, 4):
        order.insert(order.index(Instruction(Op.FETCH, 6, 0)), order.pop(order.index(Instruction(Op.FETCH, block, 0))))
    with pytest.raises(ProgramError, match=r"2 inputs are fetched ahead already"):
        verify(replace(program, instructions=tuple(order)))
    stays = replace(KEEP, blocks=("layers.0",))
    (other,) = programs(kept(stays), 1)
    with pytest.raises(ProgramError, match=r"EVICT b2 m0`: the input of the block stays on the device"):
        verify(replace(other, instructions=program.instructions))


def test_a_long_step_repeats() -> None:
    both: list[dict[str, Any]] = [{}, {**PIPELINE, "schedule": "1f1b"}]
    for changes in both:
        found = programs(kept(**changes), 2000)
        verify_ranks(dict(enumerate([found[0]] if len(found) == 1 else [found[0], found[0], found[1], found[1]])))
        assert all(program.segments.repeats for program in found)
        assert found[0].most_inputs_below == len([block for block in found[0].stage.own if block in LAYERS]) * len(
            found
        )


@pytest.mark.parametrize(
    ("blocks", "chosen"),
    [
        ((), {1, 2, 3, 4, 5, 6}),
        (("layers.* first 2",), {1, 2}),
        (("layers.* every 3", "head"), {1, 4, 7}),
        (("*",), {1, 2, 3, 4, 5, 6, 7}),
    ],
)
def test_blocks_are_chosen_by_the_patterns_of_recomputation(blocks: tuple[str, ...], chosen: set[int]) -> None:
    assert leaving(replace(KEEP, blocks=blocks), BLOCKS) == chosen
    (program,) = programs(kept(replace(KEEP, blocks=blocks)), 1)
    assert {each.block for each in program.instructions if each.op is Op.EVICT} == chosen


@pytest.mark.parametrize(
    ("keep", "words"),
    [
        (Keep(activations="host"), r"keep\.activations = 'host' under a CPU: the host is the device"),
        (Keep(blocks=("layers.*",)), r"keep\.blocks = \['layers\.\*'\] has no effect: their inputs would leave"),
        (Keep(optimizer="disk", blocks=("layers.*",)), r"keep\.blocks = \['layers\.\*'\] has no effect"),
        (replace(KEEP, blocks=("layer.*",)), r"keep\.blocks 'layer\.\*' matches no block; did you mean 'layers\.\*'"),
        (replace(KEEP, blocks=("embedding",)), r"names no block behind the first one, which reads tokens"),
        (replace(KEEP, blocks=("layers.*: attention",)), "the inputs of blocks leave, not of operations"),
        (replace(KEEP, blocks=("layers.* last 2",)), r"keep\.blocks 'layers\.\* last 2': an entry is a pattern"),
    ],
)
def test_inputs_that_cannot_leave_are_refused(keep: Keep, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        programs(kept(keep))


def test_the_length_of_a_sequence_is_needed() -> None:
    words = r"keep\.activations = 'disk' needs the length of a sequence, .*: name it as `sequence`"
    with pytest.raises(PlanError, match=words):
        build(CLUSTER, kept(), BLOCKS, 1)


def test_a_program_for_another_length_is_refused_before_a_step() -> None:
    cluster = cluster_of(1)
    plan = replace(preset("ddp", cluster), keep=KEEP)
    given = build(cluster, plan, BLOCKS, 1, SEQUENCE)
    work = Workload(cluster=cluster, plan=plan, num_micros=1, sequence=SEQUENCE, program=given)
    assert work.program_of(0, BLOCKS) is given
    with pytest.raises(ProgramError, match=r"built for sequences of 32 tokens, the engine is asked for 64"):
        replace(work, sequence=64).program_of(0, BLOCKS)
