"""The cycle of a plan with islands, for the terminal: steps by exchange, and how far exchanges are hidden."""

import math

from rich.table import Table

from terrace.base.words import counted, seconds
from terrace.plan.outer import NO_EXCHANGE, Exchange
from terrace.plan.wire import MessageClass
from terrace.report.learned import loop_learned
from terrace.report.tables import bytes_words, new_table
from terrace.simulate.cycle import Cycle, Sent
from terrace.simulate.hiding_cycle import Hidden, is_hidden, steps_of_exchange
from terrace.simulate.noting import WAIT_OUTER


def cycle_table(cycle: Cycle) -> Table:
    """One row per turn: its steps, their exchange, seconds of a step, waits for exchanges, bytes between islands.

    Seconds are those of the stage that waits most for exchanges, bytes those of the stage that sends most.
    """
    rows, first = [], 1
    stage = cycle.waiting_stage
    for turn, times in zip(cycle.period.turns, cycle.turns_s, strict=True):
        last, own = first + turn.times - 1, times[stage]
        sent = max(_between(cycle, program.sent_bytes) for program in turn.programs)
        rows.append(
            [
                str(first) if last == first else f"{first} to {last}",
                _words(turn.programs[0].exchange),
                seconds(math.fsum(own.values()) / turn.times),
                seconds(own.get(WAIT_OUTER, 0.0) / turn.times),
                bytes_words(sent),
            ]
        )
        first = last + 1
    outer = cycle.outer
    return new_table(
        f"the cycle of {counted(outer.every, 'step')}: islands exchange over tier {outer.tier}",
        ("steps", "at the end", "a step", "of it wait outer", "sent to islands"),
        left=("steps", "at the end"),
        rows=rows,
    )


def cycle_words(cycle: Cycle, hidden: Hidden | None) -> str:
    """Duration of an exchange, how far it is hidden, and `hidden`, the nearest cycle that hides it, if given."""
    outer, steps = cycle.outer, steps_of_exchange(cycle)
    behind = f"may hide behind {counted(outer.delay, 'step')}" if outer.delay else "is waited for at once"
    waited = f"waited for: {seconds(cycle.waited_s)} of the cycle's {seconds(cycle.cycle_s)}"
    lines = [
        f"an exchange takes {seconds(cycle.exchange_s)}, {steps:.3g} steps of {seconds(cycle.plain_s)}, and {behind}; "
        f"{'nothing is waited for' if is_hidden(cycle) else waited}",
        "local steps change what is learned: more of them, or a longer delay, is not the same training",
        loop_learned(outer, _formats(cycle)),
    ]
    if hidden is not None:
        changed = [f"outer.delay = {hidden.outer.delay}"]
        changed += [f"outer.every = {hidden.outer.every}"] * (hidden.outer.every != outer.every)
        step_s = cycle.cycle_s / outer.every
        gain = 100 * (hidden.prediction.step_s / step_s - 1)
        lines.insert(1, f"{' with '.join(changed)} hides it: step {seconds(hidden.prediction.step_s)}, {gain:+.1f} %")
    return "\n".join(lines)


def _formats(cycle: Cycle) -> tuple[str, ...]:
    plan = cycle.period.turns[0].programs[0].plan
    return tuple(plan.wire.get(MessageClass.OUTER.value, {}).values())


def _between(cycle: Cycle, sent: Sent) -> int:
    program = cycle.period.turns[0].programs[0]
    outside = [program.layout.tiers[tier] for tier in program.model.world_layout.outside]
    return sum(size for (_, tier), size in sent.items() if tier in outside)


def _words(exchange: Exchange) -> str:
    if exchange == NO_EXCHANGE:
        return "nothing"
    parts = [("applied", exchange.arrives), ("sent and waited for" if exchange.waits else "sent", exchange.starts)]
    return ", ".join(f"fragment {' and '.join(map(str, fragments))} {what}" for what, fragments in parts if fragments)
