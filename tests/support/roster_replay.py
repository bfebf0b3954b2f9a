"""A run of islands repeated in one process from its log alone: the reference of a roster.

Written from docs/design/roster.md and the equations of DiLoCo; it imports nothing from Terrace and reads the log as
JSON. Every island has parameters of its own, which it trains on its share of the steps of each window, from the anchor
of its version. An exchange replaces the anchor by the outer step with the mean of all changes, weighted by tokens.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]
# Of parameters, an island's name, the first and the last step of a window (from 0), and the window's shares: the
# parameters and the tokens after it.
Train = Callable[[Vector, str, int, int, dict[str, int]], tuple[Vector, int]]


@dataclass
class Replayed:
    """`anchors` by version, `taken` and `lost` as (island, first step, last step)."""

    anchors: dict[int, Vector] = field(default_factory=dict)
    taken: list[tuple[str, int, int]] = field(default_factory=list)
    lost: list[tuple[str, int, int]] = field(default_factory=list)


def replayed(lines: Iterable[str], initial: Vector, train: Train, lr: float, momentum: float) -> Replayed:
    """Repeat a log with Nesterov's momentum."""
    found = Replayed(anchors={0: initial})
    velocity, held = {0: np.zeros_like(initial)}, dict[str, int]()
    hands: dict[str, tuple[int, int, dict[str, int]]] = {}
    attempt: dict[str, Any] = {}
    for each in map(json.loads, lines):
        kind = each["kind"]
        if kind == "joined":
            held[each["island"]] = each["version"]
            hands.pop(each["island"], None)
        elif kind == "dealt":
            for name in each["shares"]:
                hands[name] = (each["first"], each["last"], each["shares"])
        elif kind == "attempted":
            attempt = each
        elif kind == "gone":
            if each["first"] >= 0:
                found.lost.append((each["island"], each["first"], each["last"]))
            hands.pop(each["island"], None)
        elif kind == "committed":
            base, result = attempt["version"], attempt["exchange"] + 1
            mean, total = np.zeros_like(initial), 0
            for name, brought in attempt["islands"].items():
                if brought["window"] < 0:
                    continue
                first, last, shares = hands.pop(name)
                anchor = found.anchors[held[name]]
                trained, tokens = train(anchor.copy(), name, first, last, shares)
                assert tokens == brought["tokens"], "the log has the tokens that it trained on"
                found.taken.append((name, first, last))
                mean, total = mean + tokens * (anchor - trained), total + tokens
            if total:
                velocity[result] = momentum * velocity[base] + mean / total
                step = mean / total + momentum * velocity[result]
                found.anchors[result] = found.anchors[base] - lr * step
            else:
                velocity[result], found.anchors[result] = velocity[base], found.anchors[base]
            held |= dict.fromkeys(attempt["islands"], result)
    return found
