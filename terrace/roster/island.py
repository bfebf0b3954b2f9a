"""One rank of an island between two windows: it exchanges with its peers until the next window is dealt.

All ranks of an island call the methods at the same points. The first of them talks to the meeting place and tells the
others what to do; each exchanges its slices with the ranks of its number on the other islands.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from terrace.base.errors import TerraceError, TrainingError
from terrace.base.schema import load
from terrace.launch.seal import Seal
from terrace.roster.decisions import INITIAL_VALUE
from terrace.roster.entries import Attempted, Dealt, Terms
from terrace.roster.links import LinkError, Links, Listener, own_address
from terrace.roster.reporter import Reporter
from terrace.roster.side import Act

_POLL_S = 0.02
_AWAY_S = 0.2


class Kept(Protocol):
    """What a rank keeps for exchanges (terrace.roster.outer.RosterState)."""

    def digest(self) -> int:
        """Checksum of its anchors; the sum over ranks is equal on islands that hold the same."""

    def exchange(self, attempt: Attempted, own: str, links: Links) -> None:
        """Make the sums of an attempt, and change nothing else. Raises `LinkError`."""

    def apply(self, attempt: Attempted) -> None:
        """Take the outer step with these sums."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The ranks of an island: this one's number, and a gather of small plain values from all, in order."""

    rank: int
    gather: Callable[[Any], list[Any]]


ALONE = Ranks(rank=0, gather=lambda value: [value])


class _Making:
    """An attempt at an exchange, in a thread of its own, so that this rank can give it up while it waits for others."""

    def __init__(self, attempt: Attempted, run: Callable[[Links], None], links: Links) -> None:
        self.attempt, self.links = attempt, links
        self.outcome: dict[str, Any] = {}  # empty while it runs
        self._thread = threading.Thread(target=self._run, args=(run,), name="roster exchange", daemon=True)
        self._thread.start()

    def _run(self, run: Callable[[Links], None]) -> None:
        try:
            run(self.links)
            self.outcome = {"is_held": True, "blames": []}
        except LinkError as error:
            self.outcome = {"is_held": False, "blames": list(error.blames)}
        except Exception as error:  # raised by the first rank, in `_asked`
            self.outcome = {"is_held": False, "blames": [], "error": repr(error)}

    def leave(self) -> None:
        """Give up the attempt, and wait until its thread has ended."""
        self.links.close()
        self._thread.join()


class Island:
    """One rank of the island `name`. `where` is the address of the meeting place, `terms` are those of the run.

    `facts` are compared between islands, by name; a checksum of the initial values is added to them. `applied` is
    called on every rank after an exchange has changed its parameters, `say` with lines for the user. `lost_s` is how
    long the island waits for a meeting place that does not answer.
    """

    def __init__(
        self,
        name: str,
        where: tuple[str, int],
        seal: Seal,
        terms: Terms,
        facts: dict[str, str],
        kept: Kept,
        *,
        ranks: Ranks = ALONE,
        applied: Callable[[Attempted], None] = lambda attempt: None,
        lost_s: float = 600.0,
        say: Callable[[str], None] = lambda words: None,
    ) -> None:
        self._kept, self._ranks, self._seal, self._terms = kept, ranks, seal, terms
        self._applied, self._say = applied, say
        self._listener = Listener(seal, ranks.rank, own_address(*where))
        self._makings: list[_Making] = []  # the newest attempt, if there is one
        self.sent_bytes = 0  # to other islands
        of_all = ranks.gather({"name": name, "address": self._listener.address, "digest": kept.digest()})
        self.name = str(of_all[0]["name"])
        self._reporters: list[Reporter] = []  # on the first rank
        if ranks.rank == 0:
            addresses = tuple(str(each["address"]) for each in of_all)
            facts = {**facts, INITIAL_VALUE: f"{sum(each['digest'] for each in of_all)}"}
            self._reporters = [Reporter(self.name, where, seal, terms, facts, addresses, lost_s=lost_s, say=say)]

    @property
    def token(self) -> str:
        """What the log calls this process, if this is the first rank; "" on the others."""
        return "".join(reporter.token for reporter in self._reporters)

    def join(self) -> Dealt | None:
        """Join the roster, and wait for the first window. Raises `ConfigError` if the roster refuses this island."""
        self._on_first(self._begun)
        return self.meet(has_window=False)

    def meet(self, tokens: int = 0, *, has_window: bool = True, leaves: bool = False) -> Dealt | None:
        """Exchange until the next window is dealt to this island. Returns None if the run is finished or it leaves.

        `tokens` are those of the window that it has trained. Raises `HangError` if the meeting place does not answer.
        """
        for reporter in self._reporters:
            reporter.ready(tokens, has_window=has_window, leaves=leaves)
        while True:
            order = self._ordered()
            match Act(order["act"]):
                case Act.EXCHANGE:
                    self._begin(load(Attempted, order["attempt"], "the attempt"), order["addresses"])
                case Act.APPLY:
                    self._apply()
                    if leaves:
                        self._on_first(self._left)
                        return None
                case Act.TRAIN:
                    return load(Dealt, order["deal"], "the deal")
                case Act.BEGIN_AGAIN if leaves:
                    return None
                case Act.BEGIN_AGAIN:
                    self._say("the roster counted this island as lost: it drops the steps in hand, and joins again")
                    self._leave()
                case Act.END:
                    return None
                case Act.LATE if has_window:
                    raise TrainingError(
                        "the roster has finished the run without this island, whose parameters are older: use the "
                        "checkpoint of another island"
                    )
                case Act.LATE:
                    return None
                case Act.WAIT:
                    time.sleep(_POLL_S)

    def close(self) -> None:
        self._leave()
        for reporter in self._reporters:
            reporter.close()
        self._listener.close()

    def _on_first(self, talk: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Call `talk` on the first rank. Returns its result on all ranks. Its error ends them all."""
        found: dict[str, Any] = {}
        problems: list[TerraceError] = []
        if self._ranks.rank == 0:
            try:
                found = talk()
            except TerraceError as error:
                problems.append(error)
        (is_wrong, found), *_ = self._ranks.gather([bool(problems), found])
        for problem in problems:
            raise problem
        if is_wrong:
            raise SystemExit(1)
        return dict(found)

    def _begun(self) -> dict[str, Any]:
        for reporter in self._reporters:
            reporter.begin()
        return {}

    def _left(self) -> dict[str, Any]:
        # A last report says that the exchange is applied. The meeting place may have ended already.
        for reporter in self._reporters:
            reporter.ask_within(_AWAY_S)
        return {}

    def _ordered(self) -> dict[str, Any]:
        """The next act, on all ranks, after the first has reported how the attempt ended on each of them."""
        own = dict(self._makings[0].outcome) if self._makings else {}
        of_all = self._ranks.gather(own)
        return self._on_first(lambda: self._asked(of_all))

    def _asked(self, of_all: list[dict[str, Any]]) -> dict[str, Any]:
        (reporter,) = self._reporters
        if self._makings and all(of_all):
            for each in of_all:
                if "error" in each:
                    raise TrainingError(f"an exchange of the roster failed: {each['error']}")
            blames = sorted({name for each in of_all for name in each["blames"]})
            reporter.ended(self._makings[0].attempt.key, tuple(blames), is_held=all(each["is_held"] for each in of_all))
        act = reporter.ask()
        side = reporter.side
        return {
            "act": act.value,
            "attempt": asdict(side.trying) if act is Act.EXCHANGE and side.trying else {},
            "addresses": {name: list(each) for name, each in reporter.addresses.items()},
            "deal": asdict(side.deal) if act is Act.TRAIN and side.deal else {},
        }

    def _begin(self, attempt: Attempted, addresses: dict[str, list[str]]) -> None:
        self._leave()
        there = {name: each[self._ranks.rank] for name, each in addresses.items() if name != self.name}

        def run(links: Links) -> None:
            try:
                links.open(attempt.key, self.name, there)
                self._kept.exchange(attempt, self.name, links)
            finally:
                self.sent_bytes += links.sent_bytes

        links = Links(self._listener, self._seal, self._ranks.rank, self._terms.patience_s)
        self._makings = [_Making(attempt, run, links)]

    def _leave(self) -> None:
        for making in self._makings:
            making.leave()
        self._makings = []

    def _apply(self) -> None:
        attempt = self._makings[0].attempt
        self._leave()
        self._kept.apply(attempt)
        self._applied(attempt)
