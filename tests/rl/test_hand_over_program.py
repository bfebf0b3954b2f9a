"""Programs of a hand-over: sound for every rank, together the planned bytes; a damaged one is named."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from terrace.base.errors import ProgramError
from terrace.plan.plan import Plan
from terrace.plan.wire import MessageClass
from terrace.rl.hand_over.moves import Move, crossing
from terrace.rl.hand_over.program import HandOverProgram, Reshard, hand_over_program, hand_over_programs, hand_over_text
from terrace.rl.hand_over.verify import verify_hand_over
from tests.support.hand_overs import mlp, transition_of
from tests.support.toys import cluster_of

CLUSTER = cluster_of(2, 2, 2)
SHARDS = Plan(params="system", grads="system", optimizer="system")
PLANS = {
    "shards over all": (SHARDS, 1),
    "shards of a node": (Plan(params="node", grads="node", optimizer="system"), 2),
    "rows and stages": (
        Plan(
            params="device",
            grads="device",
            optimizer="system",
            mapping={"package": {"tensor": 2}, "system": {"pipeline": 2}},
            schedule="1f1b",
        ),
        1,
    ),
}


def programs_of(name: str) -> list[HandOverProgram]:
    plan, rows = PLANS[name]
    blocks = [mlp(8, norm=True), mlp(12), mlp(8, norm=True), mlp(8, norm=True)]
    return hand_over_programs(CLUSTER, transition_of(CLUSTER, plan, blocks, rows))


@pytest.mark.parametrize("name", PLANS)
def test_programs_are_sound_and_send_what_cells_say(name: str) -> None:
    programs = programs_of(name)
    total = Counter[str]()
    for rank, program in enumerate(programs):
        verify_hand_over(program)
        # A rank finds its own program without those of others.
        assert hand_over_program(CLUSTER, program.transition, rank) == program
        assert program.instructions == programs[0].instructions
        for (message, tier), num_bytes in program.sent_bytes.items():
            assert message is MessageClass.RESHARD
            total[tier] += num_bytes
    transition = programs[0].transition
    of_blocks = [crossing(transition.cells[first], transition.tiers) for first in transition.alike]
    wanted = {tier.name: 4 * sum(own) for tier, own in zip(CLUSTER.tiers, zip(*of_blocks, strict=True), strict=True)}
    assert total == Counter(wanted)


@pytest.mark.parametrize("name", PLANS)
def test_ends_of_a_message_agree(name: str) -> None:
    programs = programs_of(name)
    for position in range(len(programs[0].instructions)):
        ends = [program.ends(position) for program in programs]
        for rank, (leaving, _) in enumerate(ends):
            for peer, num_bytes in leaving.items():
                assert ends[peer][1][rank] == num_bytes


def test_the_text_says_blocks_tiers_and_bytes() -> None:
    program = programs_of("shards over all")[0]
    lines = hand_over_text(program, ["embedding", "layers.0", "layers.1", "head"]).splitlines()
    assert len(lines) == len(program.instructions) == 12
    assert lines[0].startswith(" 0  RESHARD b0       embedding")
    assert lines[0].endswith("system: 28 bytes to 1 rank, 20 bytes from 1 rank")
    assert [line.split(":")[0].split()[-1] for line in lines[:3]] == ["system", "node", "package"]


Damage = Callable[[HandOverProgram], HandOverProgram]


def with_moves(program: HandOverProgram, position: int, moves: Sequence[tuple[int, Move]]) -> HandOverProgram:
    found = list(program.moves)
    found[position] = tuple(moves)
    return replace(program, moves=tuple(found))


def taken(program: HandOverProgram, position: int = 0) -> int:
    """The number of the first move of an instruction that the rank receives."""
    return next(number for number, (_, move) in enumerate(program.moves[position]) if move.target == program.rank)


def without(program: HandOverProgram) -> HandOverProgram:
    number = taken(program, 2)
    return with_moves(program, 2, [*program.moves[2][:number], *program.moves[2][number + 1 :]])


def twice(program: HandOverProgram) -> HandOverProgram:
    return with_moves(program, 0, [*program.moves[0], program.moves[0][taken(program)]])


def inner_first(program: HandOverProgram) -> HandOverProgram:
    order = (1, 0, *range(2, len(program.instructions)))
    instructions, moves = ([of[each] for each in order] for of in (program.instructions, program.moves))
    return replace(program, instructions=tuple(instructions), moves=tuple(moves))  # type: ignore[arg-type]


def at_another_tier(program: HandOverProgram) -> HandOverProgram:
    blocks, _ = program.instructions[0]
    return replace(program, instructions=(Reshard(blocks, 1), *program.instructions[2:]), moves=program.moves[1:])


def not_held(program: HandOverProgram) -> HandOverProgram:
    block, move = program.moves[0][taken(program)]
    sent = move._replace(source=program.rank, target=move.source)
    return with_moves(program, 0, [(block, sent), *program.moves[0]])


def held_already(program: HandOverProgram) -> HandOverProgram:
    block, move = next(each for each in program.moves[0] if each[1].source == program.rank)
    return with_moves(program, 0, [*program.moves[0], (block, move._replace(source=move.target, target=program.rank))])


def crossing_another(program: HandOverProgram) -> HandOverProgram:
    moves = [(block, move._replace(source=program.rank ^ 1)) for block, move in program.moves[0]]
    return with_moves(program, 0, moves)


def of_another_block(program: HandOverProgram) -> HandOverProgram:
    return with_moves(program, 0, [(3, move) for _, move in program.moves[0]])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (without, r"rank 5: instruction 11, `RESHARD b3`: \d+ elements of mlp\.\w+ of block 0 never come"),
        (twice, "comes twice"),
        (inner_first, "instruction 1, `RESHARD b0`: tiers follow one another from the outermost inward"),
        (at_another_tier, "does not cross its tier|has no"),
        (not_held, r"the rank has no mlp\.\w+\[.*\] to send"),
        (held_already, "comes to a rank that holds it or does not need it"),
        (crossing_another, "does not cross its tier"),
        (of_another_block, "block 3 is not one of its blocks"),
    ],
)
def test_damage_is_named(damage: Damage, said: str) -> None:
    program = programs_of("shards over all")[5]
    verify_hand_over(program)
    with pytest.raises(ProgramError, match=said):
        verify_hand_over(damage(program))
