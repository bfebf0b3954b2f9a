"""Messages of tensor and context ranks inside the blocks: tables for the terminal."""

from collections.abc import Iterable, Iterator
from itertools import groupby

from terrace.base.words import quantity, seconds
from terrace.plan.context_traffic import NO_ATTENTION, AttentionBytes
from terrace.plan.in_block_messages import ContextLeg, ContextMessage, TensorMessage
from terrace.program.block_program.attention import steps_of
from terrace.program.block_program.steps import Compute, Send, Steps, moments_of
from terrace.program.instruction import Op
from terrace.program.program import Program
from terrace.report.table import Table
from terrace.simulate.inside import InBlockPrices

_Alike = tuple[tuple[TensorMessage, str, int], ...]  # message, the computation that hides it, count
_WORDS = {
    (ContextLeg.INTO, Op.FORWARD): "queries, keys and values",
    (ContextLeg.INTO, Op.BACKWARD): "gradients of the output",
    (ContextLeg.BACK, Op.FORWARD): "output",
    (ContextLeg.BACK, Op.BACKWARD): "gradients of queries, keys and values",
    (ContextLeg.KEYS, Op.FORWARD): "next round's keys and values",
    (ContextLeg.KEYS, Op.BACKWARD): "next round's keys and values",
    (ContextLeg.GRADIENTS, Op.BACKWARD): "gradients of the round before's",
    (ContextLeg.HALO, Op.FORWARD): "tokens before each chunk",
    (ContextLeg.HALO, Op.BACKWARD): "gradients of these tokens",
    (ContextLeg.STATE, Op.FORWARD): "maps of states",
    (ContextLeg.STATE, Op.BACKWARD): "maps of their gradients",
    (ContextLeg.RETURN_GRADIENTS, Op.BACKWARD): "gradients of the last round's",
}


def inside_table(program: Program) -> Table:
    """Tensor messages inside FORWARD and BACKWARD of one micro-batch, by kind of block.

    Equal messages share a row: their count, bytes per rank and tier, seconds of each, and the computation that overlaps
    with it. Empty without a tensor axis.
    """
    left = ("block", "", "messages", "over", "each sends", "meanwhile")
    headings = (*left[:-1], "each takes", "meanwhile")
    table = Table(title="messages inside the blocks, for every micro-batch", headings=headings, left=left)
    for name, op, counts in _kinds(program):
        # A line between the kinds of blocks.
        if op is Op.FORWARD:
            table.add_section()
        prices = InBlockPrices(program.cluster, program.model.tensor)
        for index, (message, meanwhile, count) in enumerate(counts):
            words = (name, op.value.lower()) if index == 0 else ("", "")
            takes_s, _ = prices.price(message)
            table.add_row(
                *words,
                f"{count} {message.leg.value}",
                " and ".join(message.axes),
                tiers_words(program, program.model.tensor.sends(message)),
                seconds(takes_s),
                meanwhile,
            )
    return table


ASSIGNED = (
    'balance = "cost": what a rank sends, computes and keeps in attention depends on the documents of a batch.\n'
    'Predicted are the computing of balance = "tokens", the most memory, and no messages in attention;\n'
    "with --lengths FILE all of it but memory is predicted on documents of these lengths (docs/context.md)"
)


def attention_table(program: Program) -> Table:
    """Messages of a context rank in the attention of one micro-batch, in order, by kind of block.

    Each row is exposed, or overlaps with one round of the ring; equal consecutive rounds share a row. Empty if the
    messages depend on the documents of a batch.
    """
    headings = ("block", "", "sent", "a rank sends", "meanwhile")
    table = Table(title="attention over the context axis, for every micro-batch", headings=headings, left=headings)
    # Blocks with equal messages share rows; in a decoder all layers do.
    alike: dict[tuple[bool, AttentionBytes], list[str]] = {}
    for index, block in enumerate(program.blocks):
        attention = program.model.context.attention(block)
        if attention != NO_ATTENTION:
            alike.setdefault((program.model.recomputes(index), attention), []).append(block.name)
    for (twice, attention), names in alike.items():
        name = names[0] if len(names) == 1 else f"{names[0]} (x {len(names)})"
        forward, backward = steps_of(attention)
        table.add_section()
        _add_moments(table, program, (name, Op.FORWARD), forward, attention)
        # A recomputing backward repeats the forward's messages; listing them again would double the table.
        if twice:
            table.add_row("", Op.BACKWARD.value.lower(), "what the forward sends, again", "", "")
        _add_moments(table, program, ("", Op.BACKWARD), backward, attention, named=not twice)
    return table


def _add_moments(
    table: Table,
    program: Program,
    pass_: tuple[str, Op],
    steps: Steps,
    attention: AttentionBytes,
    *,
    named: bool = True,
) -> None:
    name, op = pass_
    # Messages that overlap with the same round of the ring share a row.
    moments: dict[Compute | ContextLeg, list[tuple[str, str]]] = {}  # exposed messages are keyed by their leg
    for send in (step for step in steps if isinstance(step, Send)):
        for message in send.messages:
            assert isinstance(message, ContextMessage), f"{message} in attention"
            said = _WORDS[message.leg, op], tiers_words(program, attention.sends(message))
            moments.setdefault(send.behind or message.leg, []).append(said)
    first = named
    # Inner rounds of a ring are equal; one row stands for all of them.
    for (waited, rows), group in groupby(
        moments.items(), key=lambda moment: (isinstance(moment[0], ContextLeg), tuple(moment[1]))
    ):
        rounds = [moment.number for moment, _ in group if isinstance(moment, Compute)]
        during = "waited for"
        if not waited:
            during = f"rounds {rounds[0]} to {rounds[-1]}, each" if len(rounds) > 1 else f"round {rounds[0]}"
        for index, (what, sent) in enumerate(rows):
            words = (name, op.value.lower()) if first else ("", "")
            table.add_row(*words, what, sent, during if index == 0 else "")
            first = False


def _kinds(program: Program) -> Iterator[tuple[str, Op, _Alike]]:
    # Blocks with equal messages share rows, as all layers of a decoder do.
    alike: dict[tuple[_Alike, _Alike], list[str]] = {}
    for index, block in enumerate(program.blocks):
        steps = program.model.block_program(index).steps
        forward, backward = (tuple(_counted(steps(op))) for op in (Op.FORWARD, Op.BACKWARD))
        alike.setdefault((forward, backward), []).append(block.name)
    for (forward, backward), names in alike.items():
        name = names[0] if len(names) == 1 else f"{names[0]} (x {len(names)})"
        yield from ((name, op, counts) for op, counts in ((Op.FORWARD, forward), (Op.BACKWARD, backward)) if counts)


def _counted(steps: Steps) -> Iterator[tuple[TensorMessage, str, int]]:
    for moment in moments_of(steps):
        meanwhile, fused = "waited for" if moment.behind is None else moment.behind.kind.value, dict(moment.fused)
        for message, count in moment.messages:
            if not isinstance(message, TensorMessage):
                continue
            apart = count - fused.get(message, 0)
            if apart:
                yield message, meanwhile, apart
            if message in fused:
                yield message, f"fused with {meanwhile}", fused[message]


def tiers_words(program: Program, sends: Iterable[tuple[int, int]]) -> str:
    """(Tier index, bytes) pairs in words."""
    return ", ".join(f"{quantity(sent, 'B')} on {program.layout.tiers[tier]}" for tier, sent in sends)
