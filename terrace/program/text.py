"""A program as text, as `terrace simulate --view program` prints it."""

from collections.abc import Iterator

from terrace.base.repeated import Repeated
from terrace.base.words import counted
from terrace.plan.recompute import WHOLE
from terrace.plan.wire import BETWEEN_STAGES, MessageClass
from terrace.program.instruction import PASSES, Instruction, Op
from terrace.program.program import Program


def program_text(program: Program, *, max_lines: int | None = None) -> str:
    """One line per instruction: position, instruction, block name, tiers crossed and wire formats.

    If the program repeats, all bodies but the first are one line.
    """
    order = program.segments.whole
    if isinstance(order, Repeated) and order.repeats > 1:
        begin, behind = len(order.prefix) + len(order.body), len(order) - len(order.suffix)
        again = f"  ...  the last {counted(len(order.body), 'instruction')} {order.repeats - 1:,} times more, "
        again += f"each time {counted(order.every, 'micro-batch')} later"
        lines = [*_lines(program, range(begin)), again, *_lines(program, range(behind, len(order)))]
    else:
        lines = list(_lines(program, range(len(order))))
    if max_lines is not None and len(lines) > max_lines:
        # The beginning and the end of a step differ most; its middle repeats.
        head, tail = lines[: max_lines // 2], lines[len(lines) - max_lines // 2 :]
        left_out = len(order) - sum(not line.startswith("  ...") for line in (*head, *tail))
        lines = [*head, f"  ...  {left_out} more instructions", *tail]
    return "\n".join(lines)


def _lines(program: Program, positions: range) -> Iterator[str]:
    width = len(str(len(program.instructions)))
    for position in positions:
        instruction = program.instructions[position]
        name = program.blocks[instruction.block].name if instruction.block >= 0 else ""
        yield f"{position:>{width}}  {instruction!s:<44} {name:<14} {_note(program, instruction)}".rstrip()


def _formats(program: Program, instruction: Instruction, tier: str) -> str:
    message = program.message(instruction)
    if message.message_class in BETWEEN_STAGES:
        return program.edge_hop(instruction).wire.name
    flats = program.model.flats[instruction.block] if instruction.block >= 0 else ()
    if not any(flat.is_coded or flat.layout.code for flat in flats):
        return program.plan.wire_format(message.message_class, tier).name
    # Codes, and the block's other parameters.
    return ", ".join(dict.fromkeys(hop.wire.name for hop in message.hops if program.layout.tiers[hop.tier] == tier))


def _note(program: Program, instruction: Instruction) -> str:
    if instruction.op in PASSES:
        twice = instruction.op is not Op.FORWARD and instruction.op is not Op.BACKWARD_WEIGHT
        parts = program.model.recomputed[instruction.block] if twice else ()
        notes = [f"recomputes {'its forward' if parts == WHOLE else ', '.join(parts)}"] if parts else []
        attending = (
            each for each in program.messages_inside(instruction) if each.message_class is MessageClass.CONTEXT
        )
        tiers = sorted({tier for message in attending for tier in message.tiers})
        names = [program.layout.tiers[tier] for tier in tiers]
        wires = [program.plan.wire_format(MessageClass.CONTEXT, name) for name in names]
        said = [f"{name} ({wire.name})" if wire.block else name for name, wire in zip(names, wires, strict=True)]
        notes += ["attends over " + ", ".join(said)] if tiers else []
        return "; ".join(notes)
    message_class = instruction.message_class
    if message_class is None:
        return ""
    names = [program.layout.tiers[tier] for tier in program.message(instruction).tiers]
    if instruction.op is Op.TIE:
        return ", ".join(names)
    if not names:
        return "local"
    if message_class in (MessageClass.COUNTS, MessageClass.CONTROL):
        return f"{message_class}: " + ", ".join(names)
    words = ", ".join(f"{tier} ({_formats(program, instruction, tier)})" for tier in names)
    if instruction.in_gaps:
        words += "; parts of " + ", ".join(f"{share:.3g}" for share in program.plan.gap_shares)
    return words
