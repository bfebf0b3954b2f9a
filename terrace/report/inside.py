"""What ranks of the tensor axis send inside the blocks: a table for the terminal."""

from collections.abc import Iterator

from rich.table import Table

from terrace.plan.tensor_traffic import TensorMessage
from terrace.program import Instruction, Op, Program
from terrace.report.tables import new_table, quantity, seconds
from terrace.simulate.inside import Hidden, hidden_counts, message_seconds

_Alike = tuple[tuple[Hidden, int], ...]


def inside_table(program: Program) -> Table:
    """Return the messages inside FORWARD and BACKWARD of one micro-batch, for each kind of block.

    Messages alike stand in one row: how many, what a rank sends for one and on which tier, how long one takes, and what
    is computed beside it. A program without a tensor axis has none.
    """
    table = new_table("messages inside the blocks, for every micro-batch")
    for heading in ("block", "", "messages", "over", "each sends", "each takes", "meanwhile"):
        table.add_column(heading, justify="right" if heading == "each takes" else "left")
    for name, op, counts in _kinds(program):
        if op is Op.FORWARD:
            table.add_section()
        for index, ((message, behind), count) in enumerate(counts):
            words = (name, op.value.lower()) if index == 0 else ("", "")
            takes_s = sum(message_seconds(program.cluster, program.tensor, message).values())
            table.add_row(
                *words,
                f"{count} {message.leg.value}",
                " and ".join(message.axes),
                _sent(program, message),
                seconds(takes_s),
                "waited for" if behind is None else behind.value,
            )
    return table


def _kinds(program: Program) -> Iterator[tuple[str, Op, _Alike]]:
    """Yield (name, op, messages with their numbers) of each kind of block, in the order of the program."""
    alike: dict[tuple[_Alike, _Alike], list[str]] = {}
    for index, block in enumerate(program.blocks):
        forward, backward = (
            tuple(hidden_counts(program, Instruction(op, index, 0)).items()) for op in (Op.FORWARD, Op.BACKWARD)
        )
        alike.setdefault((forward, backward), []).append(block.name)
    for (forward, backward), names in alike.items():
        name = names[0] if len(names) == 1 else f"{names[0]} (x {len(names)})"
        yield from ((name, op, counts) for op, counts in ((Op.FORWARD, forward), (Op.BACKWARD, backward)) if counts)


def _sent(program: Program, message: TensorMessage) -> str:
    tiers = program.layout.tiers
    return ", ".join(f"{quantity(sent, 'B')} on {tiers[tier]}" for tier, sent in program.tensor.sends(message))
