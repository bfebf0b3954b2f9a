"""The outer loops that a search may choose, as bounded by a user: `--outer "every<=100,delay<=20"`.

Comma-separated words: the name of a preset, then NAME<=VALUE, NAME>=VALUE or NAME=VALUE for `every`, `delay` and
`fragments`, and NAME=VALUE for the outer step. A preset sets the outer step, and its numbers are upper bounds where no
word gives one.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from terrace.base.errors import PlanError, did_you_mean
from terrace.base.schema import load, parse_override
from terrace.plan.outer import OUTERS, Outer
from terrace.plan.outer_rules import check_outer_step

_NUMBERS = {"every": 1, "delay": 0, "fragments": 1}  # the least of each
_STEP = ("optimizer", "lr", "momentum", "keep", "penalty", "clip")
_MOST = 1_000_000  # steps: more than most runs have
Range = tuple[int, int]  # both ends included


@dataclass(frozen=True, kw_only=True)
class OuterBounds:
    """Outer loops with the outer step of `outer`, which has the upper bounds as numbers; `text` is for display."""

    text: str
    outer: Outer
    every: Range
    delay: Range
    fragments: Range

    def loop(self, every: int, delay: int, fragments: int) -> Outer:
        return replace(self.outer, every=every, delay=delay, fragments=fragments)

    def waiting(self) -> "OuterBounds | None":
        """The bounds restricted to `delay` = 0, which saves two slices of memory; None if they already are, or
        exclude 0.
        """
        least, most = self.delay
        if least > 0 or most == 0:
            return None
        text = f"{self.text} with delay=0, since no plan fits with a delay"
        return replace(self, text=text, outer=replace(self.outer, delay=0), delay=(0, 0))


def parse_outer(text: str, tier: str) -> OuterBounds:
    """Parse `--outer` for islands on `tier`. Raises `TerraceError` for bounds that no loop satisfies."""
    words = [word.strip() for word in text.split(",")]
    base: Outer | None = None
    if words[0] in OUTERS:
        base = OUTERS[words.pop(0)](tier)
    ranges: dict[str, Range] = {}
    step: dict[str, Any] = {}
    for word in sorted(words, key=lambda each: ">=" in each):  # a preset's number holds where no upper bound is
        match = re.fullmatch(r"([\w-]+)\s*(<=|>=|=)\s*(\S+)", word)
        if match is None and word in OUTERS:
            named = [each for each in map(str.strip, text.split(",")) if each in OUTERS]
            rest = ",".join([named[0], *(each for each in words if each not in OUTERS)])
            raise PlanError(f"--outer {text!r}: the preset stands first, and there is one: write {rest}")
        if match is None:
            known = did_you_mean(word, OUTERS) if word else f": name a preset ({', '.join(OUTERS)}) or bounds"
            raise PlanError(f"--outer {text!r}: {word!r} is no preset and no bound such as every<=100{known}")
        name, sign, value = match.groups()
        if name in _NUMBERS:
            most = _MOST if base is None or sign != ">=" else getattr(base, name)
            ranges[name] = _narrowed(text, word, ranges.get(name, (_NUMBERS[name], most)), sign, value)
        elif name not in _STEP:
            raise PlanError(f"--outer {text!r} names {name!r}{did_you_mean(name, (*_NUMBERS, *_STEP))}")
        elif sign != "=":
            raise PlanError(f"--outer {text!r}: {name} is not searched; write {name}={value}")
        else:
            step |= parse_override(name, value)
    return _bounds(text, base, ranges, step, tier)


def _narrowed(text: str, word: str, known: Range, sign: str, value: str) -> Range:
    if not value.isdecimal() or len(value) > 9:
        raise PlanError(f"--outer {text!r}: {value!r} is not a whole number")
    low, high = known
    low, high = max(low, int(value) if sign != "<=" else low), min(high, int(value) if sign != ">=" else high)
    if low > high:
        name = re.split("[<>=]", word)[0].strip()
        more = f"; to allow it, write {name}<={value}" if sign == ">=" and int(value) <= _MOST else ""
        raise PlanError(
            f"--outer {text!r}: nothing satisfies {word}, since {name} is from {known[0]} to {known[1]}{more}"
        )
    return low, high


def _bounds(
    text: str, base: Outer | None, ranges: Mapping[str, Range], step: Mapping[str, Any], tier: str
) -> OuterBounds:
    if base is None and "every" not in ranges:
        raise PlanError(f"--outer {text!r} does not bound every: add every<=100, or begin with {' or '.join(OUTERS)}")
    own = {"tier": tier} if base is None else {name: getattr(base, name) for name in ("tier", *_STEP)}
    own = {name: value for name, value in own.items() if value is not None}
    largest = {"every": _MOST, "delay": _MOST, "fragments": 1}
    if base is not None:
        largest = {name: getattr(base, name) for name in _NUMBERS}
    every, delay, fragments = (ranges.get(name, (least, largest[name])) for name, least in _NUMBERS.items())
    # An exchange ends before the next one of its blocks, and each fragment is exchanged once per cycle.
    for name, (low, _) in (("delay", delay), ("fragments", fragments)):
        if low > every[1]:
            raise PlanError(f"--outer {text!r}: {name} is at most every, so at most {every[1]}, not {low}")
    # An upper bound that `every` already implies is omitted; a preset has its own.
    for name, (_, high) in (("delay", delay), ("fragments", fragments)):
        if name in ranges and every[1] < high < _MOST:
            raise PlanError(
                f"--outer {text!r}: {name}<={high} has no effect, since {name} is at most every, so at most "
                f"{every[1]}: leave it out, or lower it"
            )
    delay, fragments = (delay[0], min(delay[1], every[1])), (fragments[0], min(fragments[1], every[1]))
    table = {**own, **step, "every": every[1], "delay": delay[1], "fragments": fragments[1]}
    outer = load(Outer, table, "--outer")
    check_outer_step(outer)
    if outer.keep != 1.0 or outer.penalty:
        delay = (max(1, delay[0]), delay[1])  # without a delay they have no effect
    return OuterBounds(text=text, outer=outer, every=every, delay=delay, fragments=fragments)
