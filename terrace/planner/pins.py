"""Pins: values fixed by the user before a search. `tensor=1`, `pipeline<=4`, `params=node`, `recompute=none`."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from terrace.base.errors import PlanError, did_you_mean
from terrace.cluster.cluster import Cluster
from terrace.plan.plan import AXES, CONTEXT_AXES

STACK_PINS = ("expert", "expert_rows")  # ranks that hold different experts, and that cut every one of them
NUMBERS = (*AXES, *CONTEXT_AXES, "columns", *STACK_PINS, "micro_batch", "unit", "chunks")
STATES = ("params", "grads", "optimizer")
WORDS = {"recompute": ("none", "layers")}
_NAMES = (*NUMBERS, *STATES, "params_backward", *WORDS, "schedule")
MOST = 1 << 62


@dataclass(frozen=True)
class Pins:
    """Allowed range of each pinned name: numbers, or tier indices (`device` is -1).

    A word counts as its index in `WORDS`; `params_backward = none` is -1, as in a `Placement`.
    """

    ranges: dict[str, tuple[int, int]] = field(default_factory=dict)
    schedule: str | None = None

    def allows(self, name: str, value: int) -> bool:
        """Whether `value` is within the pin of `name`, if any."""
        low, high = self.ranges.get(name, (-MOST, MOST))
        return low <= value <= high


def parse_pins(texts: Iterable[str], cluster: Cluster, schedules: Sequence[str]) -> Pins:
    """Parse pins; several pins of one name must all hold. Raises `PlanError` for a pin that nothing satisfies."""
    ranges: dict[str, tuple[int, int]] = {}
    schedule = None
    for text in texts:
        match = re.fullmatch(r"\s*([\w-]+)\s*(<=|>=|=)\s*(\S+)\s*", text)
        if match is None:
            raise PlanError(f"pin {text!r}: write NAME=VALUE, NAME<=VALUE or NAME>=VALUE, such as tensor=1")
        name, sign, word = match.groups()
        if name not in _NAMES:
            raise PlanError(f"pin {text!r} names {name!r}{did_you_mean(name, _NAMES)}")
        if sign != "=" and name in (*WORDS, "schedule", "params_backward"):
            raise PlanError(f"pin {text!r}: {name} has no order; write {name}={word}")
        # A name, not a number, so it has no range.
        if name == "schedule":
            if re.fullmatch(r"[\w-]+:[1-9]\d*", word) and word.split(":")[0] in schedules:
                base, chunks = word.split(":")
                raise PlanError(
                    f"pin {text!r}: chunks have a pin of their own; write schedule={base} and chunks={chunks}"
                )
            if word not in schedules:
                raise PlanError(f"pin {text!r}: no schedule {word!r}{did_you_mean(word, schedules)}")
            if schedule not in (None, word):
                raise PlanError(f"pins schedule={schedule} and schedule={word} exclude each other: keep one of them")
            schedule = word
            continue
        value = _value(text, name, word, cluster)
        low, high = ranges.get(name, (-MOST, MOST))
        low, high = max(low, value if sign != "<=" else low), min(high, value if sign != ">=" else high)
        if low > high:
            raise PlanError(f"pin {text!r} and an earlier pin of {name} exclude each other: drop one of them")
        ranges[name] = (low, high)
    return Pins(ranges, schedule)


def _value(text: str, name: str, word: str, cluster: Cluster) -> int:
    if name in WORDS:
        if word not in WORDS[name]:
            raise PlanError(f"pin {text!r}: {word!r} is not a value of {name}{did_you_mean(word, WORDS[name])}")
        return WORDS[name].index(word)
    if name in (*STATES, "params_backward"):
        none = "none" if name == "params_backward" else "device"
        known = [none, *(tier.name for tier in cluster.tiers)]
        if word not in known:
            raise PlanError(f"pin {text!r}: no tier {word!r} in cluster {cluster.name!r}{did_you_mean(word, known)}")
        # `device` is -1, and tiers count from 0.
        return known.index(word) - 1
    if not word.isdecimal() or len(word) > 9 or int(word) < 1:
        raise PlanError(f"pin {text!r}: {word!r} is not a whole number from 1 to 999999999")
    return int(word)


def parse_axes(text: str) -> tuple[str, ...]:
    """Parse `--axes`: comma-separated names, or `all`; the data axis is always included."""
    if text == "all":
        return AXES
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name == "all":
            raise PlanError(f"--axes {text!r}: 'all' stands for every axis; write --axes all alone")
        if name not in AXES:
            raise PlanError(f"--axes {text!r} names axis {name!r}{did_you_mean(name, (*AXES, 'all'))}")
    return tuple(axis for axis in AXES if axis in names or axis == "data")
