"""A program's totals, bytes sent and memory held, against the closed formulas of its plan.

`verify`, `verify_stages` and `verify_ranks` are those of `terrace.program` with the totals checked after the rules.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from terrace.base.alike import first_equal
from terrace.base.errors import ProgramError
from terrace.base.repeated import Repeated
from terrace.plan.wire import MessageClass
from terrace.program import verify as rules
from terrace.program import verify_ranks as between_ranks
from terrace.program.exchange import exchanged
from terrace.program.instruction import Phase
from terrace.program.program import Program
from tests.support.byte_formula import Bytes, block_bytes, outer_bytes, step_bytes
from tests.support.state_formula import model_state_bytes


def verify(program: Program, rank: int = 0) -> None:
    """Raise `ProgramError` at the first rule that one rank's program breaks, its totals included."""
    rules.verify(program, rank)
    check_totals(program, rank)


def verify_stages(programs: Sequence[Program]) -> None:
    """As `verify`, of the programs of all stages, and of the stages against each other."""
    between_ranks.verify_stages(programs)
    for index in dict.fromkeys(first_equal(programs)):
        check_totals(programs[index])


def verify_ranks(programs: Mapping[int, Program]) -> None:
    """As `verify`, of the program of every rank, and of the ranks against each other."""
    between_ranks.verify_ranks(programs)
    ranks = list(programs)
    for index in dict.fromkeys(first_equal(list(programs.values()))):
        check_totals(programs[ranks[index]], ranks[index])


def check_totals(program: Program, rank: int = 0) -> None:
    """Raise `ProgramError` where a program sends other bytes than the formulas say, or holds more memory at once."""
    if not isinstance(program.stage.groups, Repeated):  # then neither can the instructions stand for their groups
        program = program.whole()
    _check_bytes(program, rank)
    held = program.state_bytes
    declared = model_state_bytes(
        program.cluster, program.plan, program.blocks, program.num_micros, program.model.sequence, program.stage
    )
    # Only these categories depend on the order of instructions; the others follow from the plan.
    for category in ("gathered", "grads_full", "buffers"):
        if held[category] > declared[category]:
            raise ProgramError(
                f"rank {rank}: {held[category]} bytes of {category} are held at once, but the formula counts "
                f"{declared[category]}"
            )


def _check_bytes(program: Program, rank: int) -> None:
    if program.phase is Phase.FORWARD:  # no closed formula: what is left of a step follows from its residencies
        return
    sent, declared = program.sent_bytes, _declared(program)
    # Both directions: bytes sent but not declared, and declared but not sent.
    for key in sorted(sent.keys() | declared.keys()):
        if sent.get(key, 0) != declared.get(key, 0):
            raise ProgramError(
                f"rank {rank}: the program sends {sent.get(key, 0)} bytes of {key[0]} on tier {key[1]!r}, "
                f"but the plan declares {declared.get(key, 0)}"
            )


def _declared(program: Program) -> Bytes:
    cluster, plan, blocks = program.cluster, program.plan, program.blocks
    exchange, held = program.exchange, program.stage.held
    if program.trains:
        # Without a pipeline the closed formula makes its own stage: an independent count.
        stage = program.stage if program.stage.num_stages > 1 else None
        found = step_bytes(cluster, plan, blocks, program.num_micros, program.model.sequence, stage)
    else:
        applied = exchanged(program, exchange.applies) if program.phase is Phase.OUTER else held
        found = block_bytes(cluster, plan, blocks, applied, [MessageClass.REFRESH])
    return Counter(found) + Counter(outer_bytes(cluster, plan, blocks, held, exchange))
