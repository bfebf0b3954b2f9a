"""Measured effects of outer loops and wire formats on learning (docs/slow-networks.md), for output that proposes them.

Increase of the held-out loss in percent, for a decoder of 1.0 M parameters on 4 islands, after 1,200 steps from a
checkpoint of 300 steps; means over three seeds (`every` other than 20: one seed). A test compares them with the page.
"""

import math

from terrace.plan.outer import Outer

SOURCE = 'docs/slow-networks.md, "What it does to learning"'

# By variant of the table, each compared with `every-20` unless noted.
RISES = {
    "every-5": 2.9,  # these four are compared with the synchronous run
    "every-10": 2.2,
    "every-20": 2.1,
    "every-50": 5.3,
    "turns": 0.6,
    "late": 4.3,
    "co2": 7.3,
    "co2-bare": 10.4,
    "int4": 0.1,
    "topk-32": 3.9,
    "stages-int8": 0.1,  # these two are compared with the synchronous run
    "stages-int4": 0.0,
}
_EVERY = (5, 10, 20, 50)


def loop_learned(outer: Outer, formats: tuple[str, ...] = ()) -> str:
    """The measurement nearest to a loop whose exchanges use `formats`, in one line."""
    every = min(_EVERY, key=lambda each: abs(math.log(each / outer.every)))
    parts = [f"{every} steps between exchanges {RISES[f'every-{every}']:+.1f} % to a synchronous run"]
    if outer.delay:
        parts.append(_delay(outer))
    if any(name.startswith("int4") for name in formats):
        parts.append(f"int4+feedback {RISES['int4']:+.1f} % more")
    if any(name.startswith("topk") for name in formats):
        parts.append(f"topk:32+feedback {RISES['topk-32']:+.1f} % more")
    return f"held-out loss, measured nearest to it at 1.0 M parameters: {', '.join(parts)} ({SOURCE})"


def formats_learned() -> str:
    """Measurements of rounded messages of synchronous plans, in one line."""
    return (
        f"held-out loss, measured at 1.0 M parameters between two stages: int8 and back int4+feedback "
        f"{RISES['stages-int8']:+.1f} %, int4 both ways {RISES['stages-int4']:+.1f} %; of other classes nothing is "
        f"measured ({SOURCE})"
    )


def _delay(outer: Outer) -> str:
    if outer.keep < 1:
        variant, words = ("co2", "with the penalty") if outer.penalty else ("co2-bare", "without the penalty")
        return f"a delay of a cycle and keep 0 {words} {RISES[variant]:+.1f} % more"
    if 2 * outer.delay > outer.every:
        return f"a delay of a cycle {RISES['late']:+.1f} % more"
    return f"a delay of a fifth of a cycle {RISES['turns']:+.1f} % more"
