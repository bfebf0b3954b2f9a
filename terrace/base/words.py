"""Counts with nouns, quantities with units, and paragraphs, in English."""

import textwrap

_WIDTH = 80


def counted(number: int, noun: str, spec: str = "") -> str:
    """`1 step`, `2 steps`, `3 micro-batches`, `4 copies`; `spec` formats the number."""
    return f"{number:{spec}} {noun if number == 1 else plural(noun)}"


def were(number: int, noun: str) -> str:
    """`1 rank was`, `2 ranks were`."""
    return f"{counted(number, noun)} {'was' if number == 1 else 'were'}"


def plural(noun: str) -> str:
    """Regular plural of a noun."""
    if noun.endswith(("s", "x", "ch", "sh")):
        return f"{noun}es"
    return f"{noun[:-1]}ies" if noun.endswith("y") and noun[-2] not in "aeiou" else f"{noun}s"


def quantity(value: float, unit: str) -> str:
    """A number with a metric prefix: 1234567 B -> 1.23 MB."""
    number, prefix = scaled(value)
    return f"{value:.0f} {unit}" if not prefix and value == int(value) else f"{number:.3g} {prefix}{unit}"


def scaled(value: float) -> tuple[float, str]:
    """(number, metric prefix) of a value."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        # 0.9995, since three digits would round up to the next prefix.
        if abs(value) >= 0.9995 * factor:
            return value / factor, prefix
    return value, ""


def seconds(value: float) -> str:
    """A duration in s, ms or us."""
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms" if value >= 1e-3 else f"{value * 1e6:.0f} us"


def longer(step_s: float, than_s: float) -> str:
    """How much longer a step is than another, as "+3.1 %"; "" if the other takes no time."""
    return f"{100 * (step_s / than_s - 1):+.1f} %" if than_s else ""


def filled(words: str) -> str:
    """Wrap each line of `words` to 80 characters, with no break before a percent sign."""
    kept = words.replace(" %", "\N{NO-BREAK SPACE}%").splitlines()
    lines = [textwrap.fill(each, _WIDTH, break_on_hyphens=False, break_long_words=False) for each in kept]
    return "\n".join(lines).replace("\N{NO-BREAK SPACE}", " ")
