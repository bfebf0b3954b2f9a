"""Islands as threads of one process, with the real meeting place, connections and states, and a toy of a model.

A fault is a death (all that the operating system would close is closed), a freeze (nothing is reported or sent for a
while), a cut (other islands are not reached), or slowness.
"""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from terrace.launch.seal import Seal
from terrace.plan.outer import Outer
from terrace.roster.entries import Attempted, Dealt, Terms
from terrace.roster.island import Island
from terrace.roster.links import LinkError, Links
from terrace.roster.outer import RosterState
from terrace.roster.place import Place
from tests.support.roster_replay import Vector

NUMEL, ROWS_A_ROUND = 37, 3
SEAL = Seal(b"0123456789abcdef0123456789abcdef", "the test")
LR, MOMENTUM = 0.7, 0.9


def trained(values: Vector, name: str, first: int, last: int, shares: dict[str, int]) -> tuple[Vector, int]:
    """The toy: each row pulls the parameters towards a point of its own; a step is not linear in them."""
    rounds, num_tokens = sum(shares.values()), 0
    for step in range(first, last + 1):
        # Rounds are dealt in turn among the islands that have so many.
        dealt = [each for turn in range(max(shares.values())) for each in sorted(shares) if shares[each] > turn]
        rows = [
            (step * rounds + number) * ROWS_A_ROUND + row
            for number, each in enumerate(dealt)
            if each == name
            for row in range(ROWS_A_ROUND)
        ]
        pull = sum(np.tanh(values - np.sin(np.arange(NUMEL) + 1.7 * row)) for row in rows)
        values = values - 0.05 * pull / len(rows)
        num_tokens += 10 * len(rows)
    return values, num_tokens


class KilledError(Exception):
    """The island dies here."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to an island in its window number `window`: before it meets the others, or in the exchange."""

    kind: str  # kill, freeze, slow, cut, leave
    window: int
    in_exchange: bool = False
    seconds: float = 0.0


class _Faulty(RosterState):
    """A state whose exchange is hit by a fault."""

    hit: Callable[[], None] = staticmethod(lambda: None)

    def exchange(self, attempt: Attempted, own: str, links: Links) -> None:
        self.hit()
        super().exchange(attempt, own, links)


@dataclass
class Ran:
    """An island that has ended: its anchor, the windows it trained and what was raised."""

    anchor: Vector
    windows: list[Dealt] = field(default_factory=list)
    sent_bytes: int = 0
    error: BaseException | None = None
    waits_s: list[float] = field(default_factory=list)  # at each exchange


class Meeting:
    """A meeting place that may die and come back, on one port with one log."""

    def __init__(self, log: Path, wait_for: int) -> None:
        self._log, self._wait_for, self.said = log, wait_for, list[str]()
        self._over, self._thread, self.port = threading.Event(), threading.Thread(), 0
        self.begin()

    def begin(self) -> None:
        place = Place("127.0.0.1", self.port, SEAL, self._log, self._wait_for, self.said.append)
        self.port, self._over = place.port, threading.Event()
        self._thread = threading.Thread(target=place.serve, args=(self._over.is_set,), daemon=True)
        self._thread.start()

    def die(self) -> None:
        self._over.set()
        self._thread.join()


def initial() -> Vector:
    return np.cos(np.arange(NUMEL, dtype=np.float64))


class Model(Protocol):
    """What an island trains. `slices` are its parameters, 1-D, which an exchange changes."""

    facts: dict[str, str]
    slices: list[torch.Tensor]

    def train(self, name: str, deal: Dealt) -> int:
        """A window; its tokens."""

    def applied(self) -> None:
        """After an exchange."""


class Toy:
    """The toy's parameters."""

    def __init__(self) -> None:
        self._values, self.facts = torch.from_numpy(initial()), {"model": "toy"}
        self.slices = [self._values[:20], self._values[20:]]

    def train(self, name: str, deal: Dealt) -> int:
        new, tokens = trained(self._values.numpy().copy(), name, deal.first, deal.last, deal.shares)
        self._values.copy_(torch.from_numpy(new))
        return tokens

    def applied(self) -> None:
        """Nothing else follows from the parameters."""


def run_island(
    name: str,
    port: int,
    terms: Terms,
    faults: tuple[Fault, ...] = (),
    pace_s: float = 0.0,
    make: Callable[[str], Model] = lambda name: Toy(),
) -> Ran:
    """One island from joining to the end; called in a thread of its own."""
    model = make(name)
    outer = Outer(tier="roster", every=terms.every, lr=LR, momentum=MOMENTUM)
    state = _Faulty(outer, model.slices, torch.float64)
    where = ("127.0.0.1", port)
    island = Island(name, where, SEAL, terms, model.facts, state, lost_s=30.0, applied=lambda attempt: model.applied())
    ran = Ran(state.anchor.numpy())
    try:
        _run(island, state, ran, model, faults, pace_s)
    except KilledError as error:
        ran.error = error
    except Exception as error:
        ran.error = error
    finally:
        island.close()
    ran.sent_bytes = island.sent_bytes
    return ran


def _run(island: Island, state: _Faulty, ran: Ran, model: Model, faults: tuple[Fault, ...], pace_s: float) -> None:
    deal, number = island.join(), 0
    while deal is not None:
        ran.windows.append(deal)
        tokens = model.train(island.name, deal)
        time.sleep(pace_s)
        now = [each for each in faults if each.window == number]
        for fault in now:
            if fault.in_exchange:
                state.hit = _hit(island, fault, state)
            else:
                _suffer(island, fault)
        begin_s = time.monotonic()
        deal = island.meet(tokens, leaves=any(each.kind == "leave" for each in now))
        ran.waits_s.append(time.monotonic() - begin_s)
        number += 1


def _hit(island: Island, fault: Fault, state: _Faulty) -> Callable[[], None]:
    def hit() -> None:
        state.hit = lambda: None  # once
        if fault.kind == "kill":
            _die(island)
        _suffer(island, fault)
        if fault.kind == "freeze":
            raise LinkError([], "it was frozen")

    return hit


def _die(island: Island) -> None:
    # From within the thread of an exchange: connections end, and nobody reports any more.
    for reporter in island._reporters:
        reporter._closed.set()
        reporter._exchanged = _silent  # type: ignore[method-assign, assignment]
        reporter._drop()
    for making in island._makings:
        making.links.close()
    raise KilledError


def _silent() -> None:
    raise KilledError


def _suffer(island: Island, fault: Fault) -> None:
    if fault.kind == "kill":
        raise KilledError
    if fault.kind == "freeze":
        for reporter in island._reporters:
            with reporter._talking:  # no report leaves
                time.sleep(fault.seconds)
    if fault.kind == "slow":
        time.sleep(fault.seconds)
    if fault.kind == "cut":
        raise LinkError([each for each in "abcd" if each != island.name], "it is cut off")


def run_all(
    log: Path,
    terms: Terms,
    faults: dict[str, tuple[Fault, ...]],
    late_s: dict[str, float],
    wait_for: int,
    pace_s: float,
    make: Callable[[str], Model] = lambda name: Toy(),
) -> tuple[dict[str, Ran], Meeting]:
    """Run islands, named by `faults`; those in `late_s` come so many seconds later."""
    meeting, found = Meeting(log, wait_for), dict[str, Ran]()

    def run(name: str) -> None:
        time.sleep(late_s.get(name, 0.0))
        found[name] = run_island(name, meeting.port, terms, faults[name], pace_s, make)

    threads = [threading.Thread(target=run, args=(name,), daemon=True) for name in faults]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive(), "an island has not ended"
    return found, meeting


def history(seed: int) -> tuple[dict[str, tuple[Fault, ...]], dict[str, float]]:
    """Faults of four islands, of which the first lives."""
    draw = random.Random(seed)
    faults: dict[str, tuple[Fault, ...]] = {"a": ()}
    for name in "bcd":
        kind = draw.choice(["kill", "freeze", "slow", "cut", "leave", "none"])
        fault = Fault(
            kind=kind,
            window=draw.randrange(4),
            in_exchange=kind == "cut" or (kind in ("kill", "freeze") and draw.random() < 0.5),
            seconds=draw.choice([0.5, 5.0]),
        )
        faults[name] = () if kind == "none" else (fault,)
    return faults, {name: draw.choice([0.0, 0.0, 0.6]) for name in "bcd"}
