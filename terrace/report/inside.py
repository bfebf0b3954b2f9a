"""What ranks of the tensor and of the context axis send inside the blocks: tables for the terminal."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from rich.table import Table

from terrace.plan.context_traffic import ContextLeg, ContextMessage
from terrace.plan.residency import recomputed
from terrace.plan.tensor_traffic import TensorMessage
from terrace.program import Instruction, Op, Program
from terrace.report.tables import new_table, quantity, seconds
from terrace.simulate.inside import Hidden, hidden_counts, message_seconds

_Alike = tuple[tuple[Hidden, int], ...]
_WORDS = {
    (ContextLeg.INTO, Op.FORWARD): "queries, keys and values",
    (ContextLeg.INTO, Op.BACKWARD): "gradients of the output",
    (ContextLeg.BACK, Op.FORWARD): "output",
    (ContextLeg.BACK, Op.BACKWARD): "gradients of queries, keys and values",
    (ContextLeg.KEYS, Op.FORWARD): "next round's keys and values",
    (ContextLeg.KEYS, Op.BACKWARD): "next round's keys and values",
    (ContextLeg.GRADIENTS, Op.BACKWARD): "gradients of the round before's",
    (ContextLeg.HOME, Op.BACKWARD): "gradients of the last round's",
}


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


ASSIGNED = (
    'balance = "cost": what a rank sends, computes and keeps in attention depends on the documents of a batch.\n'
    'Predicted are the computing of balance = "tokens", the most memory, and no messages in attention;\n'
    "terrace data lengths says what policies cost on a data set"
)


def attention_table(program: Program) -> Table:
    """Return what a rank of the context axis sends in the attention of a micro-batch, in order, for each kind of block.

    A row is a moment: what is waited for, or what travels while a round of the ring is computed; rounds alike that
    follow one another stand in one row. Empty where the plan alone does not say it (`Program.attention`).
    """
    table = new_table("attention over the context axis, for every micro-batch")
    for heading in ("block", "", "sent", "a rank sends", "meanwhile"):
        table.add_column(heading)
    alike: dict[tuple[bool, tuple[ContextMessage, ...], tuple[ContextMessage, ...]], list[str]] = {}
    again = recomputed(program.plan, program.blocks)
    for index, block in enumerate(program.blocks):
        forward, backward = (program.attention(Instruction(op, index, 0)) for op in (Op.FORWARD, Op.BACKWARD))
        if forward:
            alike.setdefault((index in again, forward, backward), []).append(block.name)
    for (twice, forward, backward), names in alike.items():
        name = names[0] if len(names) == 1 else f"{names[0]} (x {len(names)})"
        table.add_section()
        _add_moments(table, program, (name, Op.FORWARD), forward)
        if twice:
            table.add_row("", Op.BACKWARD.value.lower(), "what the forward sends, again", "", "")
        _add_moments(table, program, ("", Op.BACKWARD), backward[len(forward) if twice else 0 :], named=not twice)
    return table


def _add_moments(
    table: Table, program: Program, pass_: tuple[str, Op], messages: Sequence[ContextMessage], *, named: bool = True
) -> None:
    """Add the rows of a pass; `named` says whether the first one names it."""
    name, op = pass_
    moments = [
        (moment, tuple((_WORDS[each.leg, op], _tiers_words(program, each.sends)) for each in group))
        for moment, group in groupby(messages, key=lambda each: each.leg if each.beside is None else each.beside)
    ]
    first = named
    for (waited, said), group in groupby(moments, key=lambda moment: (isinstance(moment[0], ContextLeg), moment[1])):
        rounds = [moment for moment, _ in group]
        during = f"rounds {rounds[0]} to {rounds[-1]}, each" if len(rounds) > 1 else f"round {rounds[0]}"
        during = "waited for" if waited else during
        for index, (what, sent) in enumerate(said):
            words = (name, op.value.lower()) if first else ("", "")
            table.add_row(*words, what, sent, during if index == 0 else "")
            first = False


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
    return _tiers_words(program, program.tensor.sends(message))


def _tiers_words(program: Program, sends: Iterable[tuple[int, int]]) -> str:
    return ", ".join(f"{quantity(sent, 'B')} on {program.layout.tiers[tier]}" for tier, sent in sends)
