"""The words of a fault: who, what and where, as in `island 2 kill at exchange 3`. No torch here.

    WHO     island N | rank N | island N rank M | meet
    WHAT    kill | freeze | slow xF | cut | leave | join, each but kill of an island, leave and join with `for S s`
    WHERE   at step N | at instruction NAME of step N | at exchange N | within exchange N | while healing

Steps count from 1, as on all screens; islands, ranks and exchanges from 0. `meet` is the meeting place.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import product
from math import inf
from typing import Literal

from terrace.base.errors import ConfigError
from terrace.program.instruction import Op

What = Literal["kill", "freeze", "slow", "cut", "leave", "join"]
Kind = Literal["step", "instruction", "exchange", "within", "healing"]

_WHO = re.compile(r"meet|island (?P<island>\d+)(?: rank (?P<of_island>\d+))?|rank (?P<rank>\d+)")
_WHAT = re.compile(
    r"(?P<what>kill|freeze|cut|leave|join|slow x(?P<factor>\d+(?:\.\d+)?))(?: for (?P<seconds>\d+(?:\.\d+)?) s)?"
)
_WHERE = re.compile(
    r"at step (?P<step>\d+)|at instruction (?P<name>\w+) of step (?P<of_step>\d+)|at exchange (?P<exchange>\d+)"
    r"|within exchange (?P<within>\d+)|while healing"
)
_MOST_SLOW = 1e6
_RULES = (
    (_WHO, "who", "use island N, rank N, island N rank M or meet"),
    (_WHAT, "what", "use kill, freeze, slow xF, cut, leave or join, perhaps with for S s"),
    (
        _WHERE,
        "where",
        "use at step N, at instruction NAME of step N, at exchange N, within exchange N or while healing",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Where:
    """A place of a run. `number` is that of the step, from 1, or of the exchange, from 0; `name` an instruction's."""

    kind: Kind
    number: int = 0
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """`text` is how the user wrote it. An `island` or `rank` of -1 is not named. `seconds`: how long it lasts."""

    text: str
    island: int
    rank: int
    what: What
    where: Where
    factor: float = 1.0
    seconds: float = inf

    @property
    def is_of_place(self) -> bool:
        return self.island < 0 and self.rank < 0

    @property
    def by_rehearsal(self) -> bool:
        """Whether the rehearsal carries it out, once any island has reached its place, and not the process itself."""
        return self.is_of_place or self.what == "join"

    @property
    def ends(self) -> bool:
        return self.what in ("kill", "leave")


def parse_fault(text: str) -> Fault:
    """The fault of `text`. Raises `ConfigError`, which names the wrong part, its rule and the nearest right form."""
    rest, found = " ".join(text.split()), list[re.Match[str]]()
    for pattern, name, rule in _RULES:
        match = pattern.match(rest)
        if match is None or not (match.end() == len(rest) or rest[match.end()] == " "):
            raise ConfigError(f"--fault {text!r}: {rest!r} does not say {name}: {rule}; {_nearest(text)}")
        found.append(match)
        rest = rest[match.end() :].strip()
    if rest:
        raise ConfigError(f"--fault {text!r}: {rest!r} is left over: who, what and where are all; {_nearest(text)}")
    fault = _fault(text, *found)
    if wrong := _wrong(fault):
        raise ConfigError(f"--fault {text!r}: {wrong}")
    return fault


def _fault(text: str, who: re.Match[str], what: re.Match[str], where: re.Match[str]) -> Fault:
    kind: Kind = "healing"
    number = 0
    for name, of_kind in (("step", "step"), ("of_step", "instruction"), ("exchange", "exchange"), ("within", "within")):
        if where[name] is not None:
            kind, number = of_kind, int(where[name])  # type: ignore[assignment]  # one of the words of `Kind`
    return Fault(
        text=" ".join(text.split()),
        island=-1 if who["island"] is None else int(who["island"]),
        rank=int(who["rank"] or who["of_island"] or -1),
        what=what["what"].split()[0],  # type: ignore[arg-type]  # one of the words of `What`
        where=Where(kind=kind, number=number, name=(where["name"] or "").upper()),
        factor=float(what["factor"] or 1.0),
        seconds=inf if what["seconds"] is None else float(what["seconds"]),
    )


def _wrong(fault: Fault) -> str:
    """Why a fault of right words cannot be; "" if it can."""
    where, what = fault.where, fault.what
    if where.kind in ("step", "instruction") and not where.number:
        return "there is no step 0: steps count from 1"
    if where.name and where.name not in set(Op):
        close = max(Op, key=lambda op: SequenceMatcher(None, where.name, op.value).ratio())
        return f"{where.name!r} is no instruction: use the name of one, such as {close.value}"
    if what == "slow" and fault.factor <= 1:
        return f"x{fault.factor:g} slows nothing down: use a factor above 1, such as slow x3"
    if fault.factor > _MOST_SLOW:
        return f"x{fault.factor:g} is a stop: use a factor of at most {_MOST_SLOW:g}, or freeze"
    if fault.seconds == 0 or (fault.seconds < inf and (what in ("leave", "join") or _is_final(fault))):
        return f"{what} has no duration here: leave out for {fault.seconds:g} s"
    if fault.is_of_place and what not in ("kill", "freeze"):
        return f"the meeting place is killed or frozen, and {what} is for islands: use meet kill or meet freeze"
    if fault.rank >= 0 and what in ("leave", "join"):
        return f"a rank does not {what} alone: use island N {what}"
    if fault.island < 0 and fault.rank >= 0 and (what == "cut" or where.kind not in ("step", "instruction")):
        return (
            "a run without islands has no exchanges: use kill, freeze or slow, at a step or an instruction of one, or "
            "name the island too, as in island 0 rank 1"
        )
    return ""


def _is_final(fault: Fault) -> bool:
    return fault.what == "kill" and not fault.is_of_place  # a meeting place is started again after so many seconds


def _nearest(text: str) -> str:
    numbers = [word.strip("x") for word in text.split() if word.strip("x").replace(".", "", 1).isdigit()]
    best, most = "", -1.0
    for who, what, where in product(
        ("island #", "rank #", "island # rank #", "meet"),
        ("kill", "freeze", "freeze for # s", "slow x#", "cut", "cut for # s", "leave", "join"),
        ("at step #", "at exchange #", "within exchange #", "at instruction BACKWARD of step #", "while healing"),
    ):
        form = f"{who} {what} {where}"
        for number in (*numbers, *(8 * ["2"]))[: form.count("#")]:
            form = form.replace("#", number, 1)
        try:
            right = _fault(form, *_matched(form))
        except ValueError:
            continue
        alike = SequenceMatcher(None, " ".join(text.split()).lower(), form.lower()).ratio()
        if alike > most and not _wrong(right):
            best, most = form, alike
    return f"the nearest right form is {best!r}"


def _matched(form: str) -> Iterable[re.Match[str]]:
    rest, found = form, list[re.Match[str]]()
    for pattern, _, _ in _RULES:
        match = pattern.match(rest)
        if match is None:
            raise ValueError(form)
        found.append(match)
        rest = rest[match.end() :].strip()
    return found


def check_faults(faults: Sequence[Fault], num_islands: int) -> None:
    """Checks faults for a rehearsal of `num_islands` islands, or of a run without islands if 0.

    Raises `ConfigError` for the first that cannot.
    """
    is_there = dict.fromkeys(range(num_islands), True)
    for fault in faults:
        if wrong := _wrong_here(fault, num_islands, is_there):
            raise ConfigError(f"--fault {fault.text!r}: {wrong}")
        if fault.what == "join":
            is_there[fault.island] = True
        elif fault.ends:
            is_there[fault.island] = False


def _wrong_here(fault: Fault, num_islands: int, is_there: dict[int, bool]) -> str:
    if not num_islands:
        if fault.rank < 0 or fault.island >= 0:
            return "the run has no islands: say how many start (--islands 3), or use rank N"
        return ""
    if fault.is_of_place:
        return ""
    if fault.island < 0:
        return f"each island has a rank {fault.rank}: name the island too, as in island 0 rank {fault.rank}"
    if fault.what == "join":
        if is_there.get(fault.island):
            return f"island {fault.island} is there already: join brings a new one, or one that was killed or has left"
        return ""
    if not is_there.get(fault.island):
        names = ", ".join(str(each) for each, there in is_there.items() if there) or "none"
        return f"island {fault.island} is not there (islands: {names}): bring it by a --fault with join before this one"
    return ""
