"""Post-mortem: finds the rank that stopped a step, from published heartbeats, by pure functions.

Each rank publishes a `Heartbeat` periodically. A post-mortem takes two readings of all of them, some intervals apart,
and names, in this order:

(a) a rank whose heartbeat stopped: its process is gone or frozen; (b) a rank that left because of its own error; (c)
the rank furthest behind that waits for no other, or else the ranks that are behind all others; (d) no rank, with the
positions of all.

A published position is up to one interval old. Positions of waiting ranks are exact, so a silent rank is reported as
stopped at or before the earliest instruction at which another rank waits for it.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Literal

State = Literal["computing", "waiting", "idle", "left", "failed", "dragged", "absent"]

# `dragged`: a rank that leaves because another one failed; it is never the culprit.
GONE = ("left", "failed", "dragged")
_MAX_PIECES = 8


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """Published state of one rank. `group` is the compressed list of the ranks it waits with.

    `low_s`, `typical_s` and `step_s` describe its last steps (terrace.launch.slow); 0 before they are known.
    """

    number: int
    step: int = 0
    counter: int = 0
    text: str = ""
    state: State = "absent"
    group: str = ""
    still_s: float = 0.0
    reason: str = ""
    place: str = ""
    low_s: float = 0.0
    typical_s: float = 0.0
    step_s: float = 0.0
    rank: int = -1

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @property
    def position(self) -> tuple[int, int]:
        return (self.step, self.counter)

    def where(self) -> str:
        return f"step {self.step}, instruction {self.counter} `{self.text}`"


@dataclass(frozen=True)
class Diagnosis:
    rule: Literal["silent", "failed", "behind", "nobody"]
    message: str


def decode(rank: int, raw: bytes | None) -> Heartbeat:
    """Parses the heartbeat of `rank`; number -1 if it never published one."""
    return Heartbeat(number=-1, rank=rank) if raw is None else replace(Heartbeat(**json.loads(raw)), rank=rank)


def compress(ranks: Iterable[int]) -> str:
    """Sorted ranks as ranges: `0-2, 4-7`."""
    runs: list[tuple[int, int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


@lru_cache(maxsize=4096)
def expand(text: str) -> frozenset[int]:
    """Inverse of `compress`."""
    ranks: set[int] = set()
    for piece in filter(None, text.split(", ")):
        first, _, last = piece.partition("-")
        ranks.update(range(int(first), int(last or first) + 1))
    return frozenset(ranks)


def in_words(ranks: Iterable[int]) -> str:
    """`rank 3` or `ranks 0-2, 4-7`, truncated after eight ranges."""
    chosen = sorted(set(ranks))
    pieces = compress(chosen).split(", ")
    text = ", ".join(pieces[:_MAX_PIECES])
    if len(pieces) > _MAX_PIECES:
        text += f" ... ({len(chosen)} in all)"
    return ("rank " if len(chosen) == 1 else "ranks ") + text


def diagnose(before: Sequence[Heartbeat], after: Sequence[Heartbeat], window_s: float) -> Diagnosis:
    """Names the rank that stopped the step, from two readings of every rank `window_s` apart."""
    # Among equal candidates the one that others wait for is the likelier cause.
    awaited = frozenset().union(*(expand(group) for group in {beat.group for beat in after}))
    silent = [new for old, new in zip(before, after, strict=True) if new.number == old.number and new.state not in GONE]
    if silent:
        culprit = min(silent, key=lambda beat: (beat.rank not in awaited, beat.position, beat.rank))
        return Diagnosis("silent", _silent(culprit, silent, after, window_s))
    failed = [beat for beat in after if beat.state == "failed"]
    if failed:
        # The earliest failure: the others may follow from it.
        culprit = min(failed, key=lambda beat: (beat.position, beat.rank))
        head = f"rank {culprit.rank} left at {culprit.where()} ({culprit.reason}{_at(culprit)})"
        return Diagnosis("failed", head + _others(culprit, failed) + _waiters(culprit, after))
    moved = {
        new.rank for old, new in zip(before, after, strict=True) if (old.position, old.text) != (new.position, new.text)
    }
    # A rank that waits for nobody holds up all that wait for it, least likely if it moved between the readings.
    free = [beat for beat in after if beat.state in ("computing", "idle", "left")]
    if free:
        culprit = min(free, key=lambda beat: (beat.rank in moved, beat.rank not in awaited, beat.position, beat.rank))
        same = [beat for beat in free if beat.position == culprit.position]
        return Diagnosis("behind", _free(culprit) + _others(culprit, same) + _waiters(culprit, after))
    return _all_waiting(after)


def _silent(culprit: Heartbeat, silent: list[Heartbeat], after: Sequence[Heartbeat], window_s: float) -> str:
    if culprit.state == "absent":
        head = f"rank {culprit.rank} never reached its first step (it published no heartbeat)"
        return head + _others(culprit, silent) + _waiters(culprit, after)
    fate = f"no heartbeat for {window_s:.1f} s: the process is gone or frozen{_at(culprit)}"
    awaiting = [beat for beat in after if beat.rank != culprit.rank and culprit.rank in expand(beat.group)]
    first = min(awaiting, key=lambda beat: beat.position, default=culprit)
    # The waiting rank's position is exact, while the silent rank's last heartbeat may be an interval old.
    if first.position > culprit.position:
        where = f"at or before {first.where()}"
        fate += f"; last heard at {culprit.where()}"
    else:
        where = f"at {culprit.where()}"
    head = f"rank {culprit.rank} stopped {where} ({fate})"
    return head + _others(culprit, silent) + _waiters(culprit, after)


def _free(culprit: Heartbeat) -> str:
    if culprit.state == "left":
        return f"rank {culprit.rank} had finished after {culprit.where()}{_at(culprit)}"
    doing = "outside a step" if culprit.state == "idle" else "computing, waiting for nobody"
    since = f" for {culprit.still_s:.1f} s" if culprit.still_s else ""
    return f"rank {culprit.rank} has not moved{since} from {culprit.where()} ({doing}{_at(culprit)})"


def _all_waiting(after: Sequence[Heartbeat]) -> Diagnosis:
    rows: dict[str, list[Heartbeat]] = {}
    for beat in sorted(after, key=lambda beat: (beat.position, beat.rank)):
        rows.setdefault(beat.where(), []).append(beat)
    first = next(iter(rows.values()))
    # All wait, so the cause is not visible; the rank furthest behind is the best hint.
    if first[0].state == "waiting" and first[0].position < max(beat.position for beat in after):
        head = f"rank {first[0].rank} is furthest behind, at {first[0].where()}, itself waiting for "
        head += in_words(expand(first[0].group) - {first[0].rank})
        return Diagnosis("behind", head + _others(first[0], first) + _waiters(first[0], after))
    pieces = [f"{in_words(beat.rank for beat in beats)} at {where}" for where, beats in rows.items()]
    if len(pieces) > _MAX_PIECES:
        pieces = [*pieces[:_MAX_PIECES], f"{len(pieces) - _MAX_PIECES} more positions"]
    return Diagnosis("nobody", "the step stopped and no rank stands out: " + "; ".join(pieces))


def _waiters(culprit: Heartbeat, after: Sequence[Heartbeat]) -> str:
    waiting = [beat for beat in after if beat.group and beat.rank != culprit.rank]
    # Other ranks wait for these in turn.
    direct = [beat for beat in waiting if culprit.rank in expand(beat.group)]
    if not direct:
        return "; no rank waits for it directly" + (f", {len(waiting)} wait for others" if waiting else "")
    first = min(direct, key=lambda beat: (beat.position, beat.rank))
    behind = len(waiting) - len(direct)
    rest = f", and {behind} more behind them" if behind else ""
    who = in_words(beat.rank for beat in direct)
    return f"; waiting for it: {who} (rank {first.rank} at {first.where()}){rest}"


def _others(culprit: Heartbeat, alike: Sequence[Heartbeat]) -> str:
    ranks = [beat.rank for beat in alike if beat.rank != culprit.rank]
    return f"; likewise {in_words(ranks)}" if ranks else ""


def _at(beat: Heartbeat) -> str:
    return f"; {beat.place}" if beat.place else ""
