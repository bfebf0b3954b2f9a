"""COUNT: its place in a step, its bytes by hand, and models that send none."""

from dataclasses import replace

import pytest

from terrace.base.errors import ProgramError
from terrace.model.blocks import block_specs
from terrace.plan.presets import preset
from terrace.plan.wire import MessageClass
from terrace.program.instruction import Instruction, Op
from terrace.program.lowering import build, build_stages, forward_programs
from terrace.program.program import Program
from terrace.program.text import program_text
from terrace.program.transfers import transfers_of
from terrace.simulate.cost import step_costs
from terrace.simulate.recording import record
from tests.support.mixtures import mixture
from tests.support.totals import verify, verify_stages
from tests.support.toys import cluster_of

BLOCKS = block_specs(mixture(layers=5, dense_layers=(0,)))  # 4 mixtures of 8 experts: 4 x (8 + 3) = 44 numbers
COUNT = Instruction(Op.COUNT)


def of(name: str = "zero3", *sizes: int, **changes: object) -> Program:
    cluster = cluster_of(*sizes or (2, 3, 2))
    return build(cluster, replace(preset(name, cluster), **changes), BLOCKS, 2, 16)  # type: ignore[arg-type]


def counts(program: Program) -> dict[str, int]:
    return {tier: size for (message, tier), size in program.sent_bytes.items() if message is MessageClass.COUNTS}


def test_instructions_are_not_those_of_a_dense_model_of_the_same_layers() -> None:
    """Programs that depend on the same facts share their instructions."""
    dense = replace(mixture(layers=5, dense_layers=(0,)), experts=None)
    for blocks, has_count in ((block_specs(dense), False), (BLOCKS, True), (block_specs(dense), False)):
        cluster = cluster_of(2)
        program = build(cluster, preset("zero3", cluster), blocks, 2, 16)
        assert (COUNT in program.instructions) == has_count
        verify(program, 0)


@pytest.mark.parametrize("name", ["zero3", "ddp", "three-level"])
def test_bytes_by_hand(name: str) -> None:
    """48 numbers of 8 bytes, which 12 ranks divide: 24 on the first tier, 8 on the second, 4 on the third; there and
    back."""
    assert counts(of(name)) == {"package": 2 * 24 * 8, "node": 2 * 2 * 8 * 8, "system": 2 * 4 * 8}
    assert counts(of(name, 1)) == {}


def test_experts_on_several_ranks_change_nothing() -> None:
    assert counts(of(experts={"system": {"expert": 2}, "package": {"rows": 2}})) == counts(of())


def test_a_stage_counts_its_own_layers() -> None:
    cluster = cluster_of(2, 4)
    plan = replace(preset("zero3", cluster), mapping={"node": {"pipeline": 4}}, schedule="1f1b", stages=(2, 1, 3, 1))
    stages = build_stages(cluster, plan, BLOCKS, 4, 16)
    verify_stages(stages)
    # Embedding and a dense layer; 1 and 3 mixtures of 11 numbers, padded to an even number; the head.
    assert list(map(counts, stages)) == [{}, {"package": 2 * 6 * 8}, {"package": 2 * 17 * 8}, {}]
    assert [COUNT in program.instructions for program in stages] == [False, True, True, False]


def test_dense_models_and_evaluations_count_nothing() -> None:
    cluster = cluster_of(2, 2)
    dense = build(cluster, preset("zero3", cluster), block_specs(replace(mixture(), experts=None)), 2, 16)
    assert COUNT not in dense.instructions
    assert MessageClass.COUNTS not in {transfer.message_class for transfer in transfers_of(dense) if transfer.hops}
    (evaluation,) = forward_programs([of()])
    verify(evaluation)
    assert COUNT not in evaluation.instructions
    assert COUNT in of().instructions


def edited(program: Program, *moved: Instruction, before: Instruction | None) -> Program:
    rest = [each for each in program.instructions if each not in moved]
    place = len(rest) if before is None else rest.index(before)
    return replace(program, instructions=(*rest[:place], *moved, *rest[place:]))


def test_damage_is_named() -> None:
    program = of()
    verify(program)
    damages = {
        "`CLIP`: it needs `COUNT` before it": [each for each in program.instructions if each != COUNT],
        "`COUNT`: it needs `FORWARD b2 m1` before it": edited(
            program, COUNT, before=Instruction(Op.FORWARD, 2, 1)
        ).instructions,
        "`COUNT`: it runs twice": edited(program, COUNT, COUNT, before=Instruction(Op.CLIP)).instructions,
    }
    for words, instructions in damages.items():
        with pytest.raises(ProgramError, match=words):
            verify(replace(program, instructions=tuple(instructions)))
    cluster = cluster_of(2)
    dense = build(cluster, preset("ddp", cluster), block_specs(replace(mixture(), experts=None)), 1, 16)
    with pytest.raises(ProgramError, match="no block of the stage has experts"):
        verify(edited(dense, COUNT, before=Instruction(Op.CLIP)))


def test_it_is_printed_and_travels_behind_backwards() -> None:
    program, words = of("ddp"), "counts: package, node, system"
    assert any("COUNT" in line and words in line for line in program_text(program).splitlines())
    (last,) = (place for place, each in enumerate(program.instructions) if each == COUNT)
    assert program.instructions[last - 1].op is Op.FORWARD
    found = record(program, step_costs(program, [1.0] * len(BLOCKS)))
    (span,) = (each for each in found.spans[found.first :] if each.category == "counts")
    assert span.end_s > span.start_s
    slow = record(program, step_costs(program, [1e15] * len(BLOCKS)))
    assert "wait counts" not in slow.report.time_s
