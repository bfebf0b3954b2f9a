"""The verifier of a hand-over: checks a rank's program before it runs, using only the rank's own boxes.

 1. the tiers of blocks follow one another from the outermost inward, and no instruction comes twice;
 2. a box crosses the tier of its instruction: its two ranks are in one unit around the tier and in two inside it;
 3. the rank holds all that it sends, or has received it over an outer tier;
 4. it needs all that it receives and does not hold it, and no element comes twice;
 5. after the last instruction it has all that it needs; so it receives |need minus own| elements, the closed formula.

The check does not depend on how the moves were planned.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NoReturn

from terrace.base.boxes import Box, numel, to_text
from terrace.base.errors import ProgramError
from terrace.rl.hand_over.moves import Move
from terrace.rl.hand_over.overlay import overlay
from terrace.rl.hand_over.program import HandOverProgram

_NEEDED, _OWN, _CAME = 1, 2, 4


def verify_hand_over(program: HandOverProgram) -> None:
    """Raise `ProgramError`, naming rank, instruction and rule, for a program that breaks a rule."""
    _ordered(program)
    came: dict[tuple[int, str], list[tuple[Box, int]]] = {}  # block, parameter -> boxes with the tiers they crossed
    for position, instruction in enumerate(program.instructions):
        for block, move in program.moves[position]:
            if block not in instruction.blocks:
                _fail(program, position, f"block {block} is not one of its blocks")
            _crosses(program, position, move)
            key = block, move.parameter
            if move.source == program.rank:
                outer = [box for box, tier in came.get(key, ()) if tier > instruction.tier]
                if not _covered(move.box, [*_own(program, *key), *outer]):
                    _fail(program, position, f"the rank has no {move.parameter}[{to_text(move.box)}] to send")
            else:
                came.setdefault(key, []).append((move.box, instruction.tier))
    _receives_what_it_needs(program, {key: [box for box, _ in boxes] for key, boxes in came.items()})


def _ordered(program: HandOverProgram) -> None:
    done: dict[int, int] = {}  # block -> the tier that it has crossed last
    for position, (blocks, tier) in enumerate(program.instructions):
        for block in blocks:
            if done.get(block, len(program.names)) <= tier:
                _fail(program, position, "tiers follow one another from the outermost inward")
            done[block] = tier


def _crosses(program: HandOverProgram, position: int, move: Move) -> None:
    tier = program.instructions[position].tier
    size = math.prod(program.transition.tiers[:tier])
    ends, around = (move.source, move.target), size * program.transition.tiers[tier]
    inside, outside = ({rank // each for rank in ends} for each in (size, around))
    if program.rank not in ends or len(inside) < 2 or len(outside) > 1:
        _fail(program, position, f"a box from rank {ends[0]} to rank {ends[1]} does not cross its tier")


def _receives_what_it_needs(program: HandOverProgram, came: dict[tuple[int, str], list[Box]]) -> None:
    last = len(program.instructions) - 1
    for block in range(len(program.transition.alike)):
        need = program.transition.needs(block)[program.rank]
        for name in sorted(need.keys() | {parameter for of, parameter in came if of == block}):
            boxes = came.get((block, name), [])
            labelled = [(box, _NEEDED) for box in need.get(name, ())]
            labelled += [(box, _OWN) for box in _own(program, block, name)]
            found = Counter[int]()  # labels -> elements
            for cell, labels in overlay([*labelled, *((box, _CAME) for box in boxes)]):
                found[labels] += numel(cell)
            if any(found[labels] for labels in found if labels & _CAME and labels != _NEEDED | _CAME):
                _fail(program, last, f"{name} of block {block} comes to a rank that holds it or does not need it")
            if sum(map(numel, boxes)) > found[_NEEDED | _CAME]:
                _fail(program, last, f"a part of {name} of block {block} comes twice")
            if found[_NEEDED]:
                _fail(program, last, f"{found[_NEEDED]} elements of {name} of block {block} never come")


def _own(program: HandOverProgram, block: int, name: str) -> Sequence[Box]:
    transition = program.transition
    return transition.holds[transition.alike[block]][program.rank].get(name, ())


def _covered(box: Box, by: Iterable[Box]) -> bool:
    return all(labels != 1 for _, labels in overlay([(box, 1), *((each, 2) for each in by)]))


def _fail(program: HandOverProgram, position: int, rule: str) -> NoReturn:
    where = "at its end" if position < 0 else f"instruction {position}, `{program.instructions[position]}`"
    raise ProgramError(f"rank {program.rank}: {where}: {rule}")
