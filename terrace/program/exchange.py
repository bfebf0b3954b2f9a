"""Exchanges between islands at the end of a program: blocks of a fragment, and instructions."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from terrace.program.instruction import Instruction, Op

if TYPE_CHECKING:
    from terrace.program.program import Program


@dataclass(frozen=True, kw_only=True)
class OuterResult:
    """One exchange of a fragment, recorded when it is applied.

    `loss` is the mean over the valid tokens of all islands since the fragment's last exchange began, `change` the RMS
    over islands of the norm of their changes. `agreement` is, for the previous exchange, the norm of the mean change
    divided by `change`: 1 if all islands changed equally, near sqrt(1 / islands) if their changes are uncorrelated,
    which means that `every` is too long.
    """

    fragment: int
    loss: float
    num_tokens: int
    change: float
    agreement: float | None


def exchanged(program: "Program", fragments: Collection[int]) -> list[int]:
    """The trainable blocks of a stage that belong to `fragments`."""
    blocks = (block for block in program.stage.held if program.blocks[block].num_trainable)
    return [block for block in blocks if program.plan.outer.fragment(block) in fragments]


def exchange_instructions(program: "Program") -> Iterator[Instruction]:
    """The exchange at the end of `program`, after all updates.

    Arrivals come first, since a block's next exchange may start in the same step. All changes are sent before the first
    is waited for.
    """
    exchange = program.exchange

    def applied(fragments: Collection[int]) -> Iterator[Instruction]:
        for block in exchanged(program, fragments):
            yield Instruction(Op.OUTER_APPLY, block)
            yield Instruction(Op.REFRESH, block)

    yield from applied(exchange.arrives)
    if exchange.starts:
        yield Instruction(Op.OUTER_COUNT)
        for block in exchanged(program, exchange.starts):
            yield Instruction(Op.OUTER_START, block)
    if exchange.waits:
        yield from applied(exchange.starts)
