"""Sentences on what a search chose of the options that the user allowed: outer loop, wire formats, products, states."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from terrace.base.words import counted, seconds
from terrace.plan.plan import FUSED, Plan
from terrace.plan.wire import MessageClass, by_boundary, parse_format
from terrace.planner.formats import Allowed, Choice
from terrace.planner.loops import NEAR, Loop
from terrace.planner.narrow_states import Way
from terrace.planner.task import Task
from terrace.report.learned import formats_learned
from terrace.report.plans import percent
from terrace.report.tables import outer_words

if TYPE_CHECKING:
    from terrace.planner.products import ProductsFound
    from terrace.planner.tensor_chunks import ChunksFound


def loop_words(loop: Loop) -> str:
    """The loop that was chosen within the bounds of `--outer`, and whether any loop hides the link."""
    outer, row = loop.cycle.outer, loop.plan.wire.get(MessageClass.OUTER.value, {})
    formats = "".join(f", {name} on {tier}" for tier, name in row.items())
    own, fastest, plain_s = seconds(loop.prediction.step_s), seconds(loop.fastest_s), loop.cycle.plain_s
    lines = [
        f"--outer {loop.bounds.text}: {outer_words(outer)}{formats}",
        f"the least whose mean step ({own}) is within {percent(NEAR)} of the fastest that the bounds allow ({fastest})"
        f"; {counted(loop.num_played, 'loop')} played",
    ]
    if loop.fastest_s > (1 + NEAR) * plain_s:
        lines.append(
            "none of them hides the link: allow more steps, a longer delay, more fragments or a narrower format"
        )
    return "\n".join(lines)


def products_words(found: "ProductsFound", step_s: float) -> str:
    """Whether the plan uses the allowed 8-bit products, with the best step with and without; "" if none were allowed.

    `step_s` is the step of the shown plan, which may tie with the fastest.
    """
    if found.allowed is None:
        return ""
    steps = (step_s, found.plain_s) if found.used else (found.scaled_s, step_s)
    own, plain = ("no plan" if each is None else f"step {seconds(each)}" for each in steps)
    if not found.used:
        return f"allowed and not used: products in {found.allowed}: {own}, without {plain}"
    return f"allowed and used: products in {found.allowed}: {own}, without {plain}; 8 bits change what is learned"


def chunks_words(found: "ChunksFound", step_s: float) -> str:
    """The allowed value of `tensor_chunks` that the plan uses, and the best step with each; "" if none was allowed.

    `step_s` is the step of the shown plan, which may tie with the fastest.
    """
    if len(found.step_s) == 1:
        return ""
    steps = found.step_s | {found.value: step_s}
    each = ", ".join(
        f"{'whole' if value == 1 else 'fused with products' if value == FUSED else f'in {value} parts'} "
        f"{'no plan' if step is None else f'step {seconds(step)}'}"
        for value, step in steps.items()
    )
    used = "not used" if found.value == 1 else "used"
    return f"allowed and {used}: tensor_chunks; with tensor messages {each}"


def formats_words(allowed: Allowed, plan: Plan, step_s: float, plain_s: float) -> str:
    """Which allowed wire formats the plan uses, and why not the others; `plain_s` is the best step without any.

    `step_s` is infinite where the search did not play the plan: a deal among unequal members, whose gain others say.
    """
    used, unused, rounds = dict[str, list[str]](), dict[str, dict[str, list[str]]](), False
    for (message, tier), choice in allowed.items():
        name = plan.wire.get(message, {}).get(tier)
        names = (choice.default,) if name is None else by_boundary(name)
        if name is not None:
            used.setdefault(message, []).append(f"{tier}: {name}")
            rounds = rounds or any(_rounds(each, choice.default) for each in names)
        for each, why in _left_out(message, choice, names):
            unused.setdefault(message, {}).setdefault(f"{each}: {why}", []).append(tier)
    lines = []
    if used:
        gain = "" if plain_s <= step_s else f"; step {seconds(step_s)}, {_plain_words(plain_s)}"
        lines.append(f"allowed and used: {_by_class(used)}{gain}")
        if rounds:
            lines += ["rounded messages change what is learned", formats_learned()]
    if unused:
        lines.append(f"allowed and not used: {_reasons(unused)}")
    return "\n".join(lines)


def stored_words(ways: Sequence[Way], task: Task, step_s: float, plain_s: float) -> str:
    """How the plan of `task` stores states, out of the allowed `ways`; "" if none were allowed."""
    if not ways:
        return ""
    if Way(task.master, task.optimizer_states) not in ways:
        return "narrower states, as allowed, make no step shorter: they are stored as without"
    states = task.optimizer_states or task.sums
    return (
        f"parameters are stored in {task.master} and optimizer states in {states}, as allowed: step "
        f"{seconds(step_s)}, {_plain_words(plain_s)}; rounded states change what is learned (docs/optimizers.md has "
        "measurements)"
    )


def _rounds(name: str, default: str) -> bool:
    # A packed message has the bits of bf16, so it rounds what is wider without it.
    wire, without = parse_format(name), parse_format(default)
    return name != default and not (wire.packed and without.mantissa_bits <= wire.mantissa_bits)


def _left_out(message: str, choice: Choice, used: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The allowed formats that were not chosen, each with the reason."""
    # Exchanges get the widest format of the smallest loop, other messages the widest with the shortest step.
    wider, narrower = "a longer step", "no shorter step or no such message"
    if message == MessageClass.OUTER.value:
        wider, narrower = "not with so small a loop", "no smaller loop"
    at = max(map(choice.formats.index, used))
    for place, name in enumerate(choice.formats):
        if name not in (*used, choice.default):
            yield name, wider if place < at else narrower
    for name in choice.useless:
        yield name, "coding takes longer than it saves"


def _reasons(unused: Mapping[str, Mapping[str, Sequence[str]]]) -> str:
    """Describe {message class: {format and reason: tiers}}; classes with equal reasons are grouped."""
    classes = dict[str, list[str]]()
    for message, reasons in unused.items():
        inner = ", ".join(f"{' and '.join(tiers)} {reason}" for reason, tiers in reasons.items())
        classes.setdefault(inner, []).append(message)
    return "; ".join(f"{', '.join(messages)} ({inner})" for inner, messages in classes.items())


def _by_class(words: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{message} ({', '.join(each)})" for message, each in words.items())


def _plain_words(plain_s: float) -> str:
    return "nothing fits without" if plain_s == math.inf else f"{seconds(plain_s)} without"
