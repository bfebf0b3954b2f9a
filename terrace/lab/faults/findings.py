"""What a rehearsal has found: what was lost by whom, how long the others waited, what is left. Pure but for reading
the steps that each run has recorded.

The wait for a fault runs from the fault, or from the time at which the last of the other islands has trained its
window if that is later, until they train again. So it holds nothing that they would have waited for without the fault.
"""

import json
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from pathlib import Path

from terrace.base.words import counted
from terrace.data.batches import micros_of_rank
from terrace.lab.faults.grammar import Fault
from terrace.lab.faults.islands import Ran, Seen
from terrace.lab.faults.orders import Event
from terrace.roster.entries import Committed, Dealt, Entry, Gone, Opened

MARGIN_S = 1.0  # beyond the patience
MOST_HEALING = 1.02  # of the state


@dataclass(frozen=True)
class Wait:
    """A wait of an island for the others: from the end of window `window` until it trains again."""

    island: int
    window: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class Found:
    """What came of a fault: when it happened, from the first event on (None: never), what was lost, and how long the
    others waited for it.
    """

    fault: Fault
    at_s: float | None
    lost: str
    waited_s: float | None


@dataclass(frozen=True, kw_only=True)
class Findings:
    """`wrong` are lines on promises that were not kept. `healing` is the bytes that healed, over the state, of each
    healing. `slower` is the median window of others with a healing over one without (0: unknown).
    """

    found: Sequence[Found]
    patience_s: float
    num_steps_lost: int  # by islands without a fault
    num_left: int
    healing: Sequence[float]
    slower: float
    wrong: Sequence[str]


def waits(seen: Seen) -> list[Wait]:
    """All waits, by the first ranks of islands, in order of their beginning."""
    found = []
    for ran in seen.ran:
        begun: Event | None = None
        last_s = ran.end_s
        for event in _of(seen, ran):
            if event.what == "meets":
                begun = event
            elif begun is not None and event.what in ("applied", "trains"):
                last_s = event.at_s
                if event.what == "trains":
                    found.append(Wait(ran.island, begun.number, begun.at_s, last_s))
                    begun = None
        if begun is not None:
            found.append(Wait(ran.island, begun.number, begun.at_s, max(begun.at_s, last_s)))
    return sorted(found, key=lambda wait: wait.begin_s)


def _of(seen: Seen, ran: Ran) -> Iterator[Event]:
    for event in seen.events:
        if event.island == ran.island and not event.rank and ran.begin_s <= event.at_s <= ran.end_s:
            yield event


def has_fault(seen: Seen, island: int, begin_s: float, end_s: float) -> bool:
    for number, at_s in seen.done.items():
        fault = seen.faults[number]
        if fault.island != island or fault.by_rehearsal:
            continue
        # One that has lost its place needs until the next exchange to come back, so its fault counts for longer.
        until_s = min((ran.begin_s for ran in seen.ran if ran.island == island and ran.begin_s > at_s), default=inf)
        if fault.seconds < inf:
            until_s = min(until_s, _back(seen, island, at_s + fault.seconds))
        if at_s <= end_s and begin_s <= until_s:
            return True
    return False


def _back(seen: Seen, island: int, from_s: float) -> float:
    trains = (each.at_s for each in seen.events if each.what == "trains" and each.island == island)
    return min((at_s for at_s in trains if at_s > from_s), default=inf)


def waited_s(seen: Seen, number: int) -> float | None:
    """How long the others waited because of a fault; None if none of them met after it."""
    at_s, fault = seen.done[number], seen.faults[number]
    after = [each for each in waits(seen) if each.end_s > at_s and each.island != fault.island]
    after = [each for each in after if not has_fault(seen, each.island, each.begin_s, each.end_s)]
    if not after:
        return None
    of_rounds = list[tuple[float, float]]()  # beginning and length
    for window in sorted({each.window for each in after}):
        same = [each for each in after if each.window == window]
        begin_s = max(at_s, max(each.begin_s for each in same))
        of_rounds.append((begin_s, max(each.end_s for each in same) - begin_s))
    next_s = min((each for each in seen.done.values() if each > at_s), default=inf)
    gone_s = (when_s for when_s, each in seen.entries if isinstance(each, Gone) and each.island == str(fault.island))
    until_s = min((when_s for when_s in gone_s if when_s > at_s), default=inf)
    reports_on = fault.what == "cut" and fault.rank >= 0  # so that it may be missed in two exchanges before it is lost
    if until_s < next_s and not reports_on:
        # Until it is out, each exchange may wait for it.
        return sum(length_s for begin_s, length_s in of_rounds if begin_s < until_s)
    return max((length_s for begin_s, length_s in of_rounds if begin_s < next_s), default=None)


def entries(seen: Seen) -> list[Entry]:
    return [entry for _, entry in seen.entries]


def lost_by(seen: Seen, number: int, rows: "Rows") -> str:
    at_s, fault = seen.done[number], seen.faults[number]
    if fault.by_rehearsal:
        return "nothing"
    own = [each for each, other in seen.done.items() if other > at_s and seen.faults[each].island == fault.island]
    next_s = min((seen.done[each] for each in own), default=inf)
    for gone_s, entry in seen.entries:
        if isinstance(entry, Gone) and entry.island == str(fault.island) and at_s <= gone_s < next_s:
            return rows.lost(entry) if entry.first >= 0 else "nothing"
    return "nothing"


class Rows:
    """Names the rows of each step that an island had, by the deals of a log and the sizes of a run."""

    def __init__(self, dealt: Sequence[Dealt], rounds: int, batch: int, micro_batch: int) -> None:
        self._dealt = {entry.first: entry for entry in dealt}
        self._size, self._num_micros = micro_batch, batch // micro_batch
        self._degree = max(1, self._num_micros // max(1, rounds))  # data ranks of an island

    def of(self, deal: Dealt, island: str) -> list[int]:
        """Rows of each batch of the window, from 0."""
        names = sorted(deal.shares)
        shares = tuple(deal.shares[name] for name in names)
        first = names.index(island) * self._degree
        micros = [
            int(micro)
            for rank in range(first, first + self._degree)
            for micro in micros_of_rank(self._num_micros, rank, len(names) * self._degree, shares)
        ]
        return sorted(micro * self._size + row for micro in micros for row in range(self._size))

    def lost(self, entry: Gone) -> str:
        rows = self.of(self._dealt[entry.first], entry.island)
        num = len(rows) * (entry.last - entry.first + 1)
        is_one = entry.first == entry.last
        steps = f"step {entry.first + 1}" if is_one else f"steps {entry.first + 1} to {entry.last + 1}"
        return f"{counted(num, 'sequence')}: rows {_ranges(rows)} of {steps}"


def steps_lost(seen: Seen) -> int:
    """Steps that were dealt to islands without a fault, and that these have not recorded."""
    num = 0
    for ran in seen.ran:
        if has_fault(seen, ran.island, ran.begin_s, ran.end_s):
            continue
        expected = set[int]()
        for at_s, entry in seen.entries:
            if isinstance(entry, Dealt) and str(ran.island) in entry.shares and ran.begin_s <= at_s <= ran.end_s:
                expected |= set(range(entry.first + 1, entry.last + 2))
        num += len(expected - trained_steps(ran.folder))
    return num


def trained_steps(folder: Path) -> set[int]:
    """The steps in a run's metrics, from 1."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return set()
    return {int(json.loads(line)["step"]) for line in path.read_text(encoding="utf-8").splitlines()}


def healings(seen: Seen) -> list[float]:
    """Bytes sent to heal an island over the bytes of its anchor and momentum, for each exchange that healed."""
    sent, lacking = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for event in seen.events:
        if event.what == "heals":
            sent[event.number, event.attempt] += event.num_bytes
        elif event.what == "healed":
            lacking[event.number, event.attempt] += event.state_bytes
    committed = {(each.exchange, each.attempt) for each in entries(seen) if isinstance(each, Committed)}
    return [sent[key] / lacking[key] for key in sorted(lacking) if key in committed]


def slower_while_healing(seen: Seen) -> float:
    """The median wait for an exchange that heals beyond one that does not, over a median window; 0 if unknown."""
    healing = {each.number for each in seen.events if each.what == "healed"}
    plain, with_healing, windows = list[float](), list[float](), list[float]()
    for ran in seen.ran:
        trains = [each.at_s for each in _of(seen, ran) if each.what == "trains"]
        windows += [after - before for before, after in pairwise(trains)]
    begun = {(e.island, e.number, e.attempt): e.at_s for e in seen.events if e.what == "exchanges" and not e.rank}
    for event in seen.events:
        if event.what == "holds" and not event.rank:
            took_s = event.at_s - begun.get((event.island, event.number, event.attempt), event.at_s)
            (with_healing if event.number in healing else plain).append(took_s)
    if not (plain and with_healing and windows):
        return 0.0
    return (statistics.median(with_healing) - statistics.median(plain)) / statistics.median(windows)


def findings(seen: Seen, batch: int, micro_batch: int) -> Findings:
    """All findings; `batch` and `micro_batch` are sequences of a step and of a micro-batch."""
    terms = next((each.terms for each in entries(seen) if isinstance(each, Opened)), None)
    patience_s, rounds = (terms.patience_s, terms.rounds) if terms is not None else (0.0, 1)
    rows = Rows([each for each in entries(seen) if isinstance(each, Dealt)], rounds, batch, micro_batch)
    found = [
        Found(
            fault=fault,
            at_s=seen.done[number] - seen.first_s if number in seen.done else None,
            lost=lost_by(seen, number, rows) if number in seen.done else "",
            waited_s=waited_s(seen, number) if number in seen.done else None,
        )
        for number, fault in enumerate(seen.faults)
    ]
    num_lost, healing = steps_lost(seen), healings(seen)
    wrong = [f"never carried out, since its place was not reached: {e.fault.text}" for e in found if e.at_s is None]
    limit_s = patience_s + MARGIN_S
    wrong += [
        f"{each.fault.text}: the others waited {each.waited_s:.1f} s, and {limit_s:g} s are promised"
        for each in found
        if each.waited_s is not None and each.waited_s > limit_s and not each.fault.by_rehearsal
    ]
    if num_lost:
        wrong.append(f"islands without a fault have lost {counted(num_lost, 'step')}")
    if seen.num_left:
        wrong.append(f"{counted(seen.num_left, 'process')} outlived the island that had started them")
    for ratio in healing:
        if not 1 <= ratio <= MOST_HEALING:
            wrong.append(f"an island was healed by {ratio:.2f} times its state")
    for ran in seen.ran:
        if ran.code and not has_fault(seen, ran.island, ran.begin_s, ran.end_s):
            wrong.append(f"island {ran.island}, which had no fault, has failed: see {ran.output}")
    if not seen.is_finished:
        wrong.append("the run has not come to its end")
    return Findings(
        found=found,
        patience_s=patience_s,
        num_steps_lost=num_lost,
        num_left=seen.num_left,
        healing=healing,
        slower=slower_while_healing(seen),
        wrong=wrong,
    )


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as 0-3, 6, 8-9."""
    found = list[list[int]]()
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in found)
