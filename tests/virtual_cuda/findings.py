"""Faults and waits of the host, by line of code."""

import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from pathlib import Path
from types import CodeType

ROOT = Path(__file__).parents[2]
_TOOL = Path(__file__).parent
_DEPTH = 3  # callers that a place names

Place = tuple[tuple[CodeType, int], ...]  # code and line, innermost first


class Kind(Enum):
    """What can be wrong, with the sentence that reports it."""

    DEVICES = "tensors of two devices meet"
    RACE = "two streams access the same bytes in no order"
    FREED = "memory is handed out while another stream may use it"
    HOST_READS = "the host reads what is under way"
    HOST_WRITES = "the host writes what is being copied"
    NOT_ON_HOST = "memory of the device is read as if it were the host's"
    COMMUNICATOR = "messages of one communicator on two streams in no order"
    ORDER = "ranks issue the messages of a communicator in different orders"
    MAKING = "ranks make communicators in an order in which they wait for each other"
    LATE_MAKING = "a communicator is made by its first message"
    BOUND_WORLD = "the world is bound to a device, so groups would be split off it by all its ranks"
    MEMORY = "a message of memory that its backend cannot reach"
    STUCK = "a receive waits while its sender waits for this host"
    LATE_SHARING = "memory that ranks share is allocated inside a product"
    UNMAPPED = "an address is used at which no page is mapped"
    UNMAPPING = "a page is unmapped while a stream may use it"
    PAGES = "a call for pages that the driver refuses"


@dataclass(frozen=True)
class Fault:
    """A fault, and how it came about: which operations, on which streams, at which lines."""

    kind: Kind
    words: str

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.words}"


@dataclass
class Findings:
    """What a rank has noticed."""

    faults: Counter[Fault] = field(default_factory=Counter)
    waits: Counter[tuple[str, str]] = field(default_factory=Counter)  # reason and line -> how often the host waited
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, kind: Kind, words: str) -> None:
        """Report a fault."""
        self.faults[Fault(kind, words)] += 1

    def wait(self, reason: str, place: Place) -> None:
        """Count a wait of the host for the device."""
        self.waits[reason, told(place)] += 1

    def told(self) -> str:
        """All faults, one a line."""
        return "\n".join(f"{number} x {fault}" for fault, number in self.faults.items())


_is_own: dict[CodeType, bool] = {}


def here(depth: int = _DEPTH) -> Place:
    """The innermost lines of this project's code that led here, the tool's own left out."""
    found: list[tuple[CodeType, int]] = []
    frame = sys._getframe(1)
    while frame is not None and len(found) < depth:
        code = frame.f_code
        own = _is_own.get(code)
        if own is None:
            own = _is_own[code] = _is_ours(code.co_filename)
        if own:
            found.append((code, frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(found)


def _is_ours(name: str) -> bool:
    path = Path(name)
    is_tool = path.parent == _TOOL and not path.name.startswith("test_")
    return name.startswith(f"{ROOT}/") and "/site-packages/" not in name and not is_tool


@cache
def told(place: Place) -> str:
    """`terrace/comm/lane.py:180 submit < terrace/runtime/messages.py:60 send`."""
    lines = (f"{Path(code.co_filename).relative_to(ROOT)}:{line} {code.co_name}" for code, line in place)
    return " < ".join(lines) or "no line of this project"


def most(waits: Iterable[tuple[tuple[str, str], int]]) -> str:
    """Waits as lines, the most frequent first."""
    rows = sorted(waits, key=lambda row: -row[1])
    return "\n".join(f"{number:5} x {reason}: {line}" for (reason, line), number in rows)
