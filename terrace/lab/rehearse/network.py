"""Builds the networks of a `Wiring` on this machine, reads their counters, and removes them.

Everything is in namespaces named after this process: one for bridges and links, one per rank. The machine's own
network is not touched.
"""

import json
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from terrace.base.errors import ClusterError
from terrace.lab.rehearse import script
from terrace.lab.rehearse.counters import Counts
from terrace.lab.rehearse.names import Owner, existing, of_owner, this_process
from terrace.lab.rehearse.tools import call, find
from terrace.lab.rehearse.wiring import Wiring


@dataclass(frozen=True)
class Network:
    """A network that is up. Made by `network` only."""

    wiring: Wiring  # as built: without delays when the kernel cannot add any
    owner: Owner
    lost_delays: tuple[str, ...]  # tiers whose latency the kernel could not add

    def inside(self, rank: int, command: Sequence[str]) -> list[str]:
        return [find("ip"), "netns", "exec", self.owner.rank(rank), *command]

    def counts(self) -> Counts:
        """Bytes over every link so far."""
        shown = call(["ip", "-json", "-stats", "-netns", self.owner.fabric, "link", "show"])
        links: list[dict[str, Any]] = json.loads(shown)
        return Counts.of({link["ifname"]: (_bytes(link, "rx"), _bytes(link, "tx")) for link in links}, self.wiring)


@contextmanager
def network(wiring: Wiring) -> Iterator[Network]:
    """Build the network, yield it, and remove it in any case. Raises `ClusterError` with the kernel's reason."""
    owner = this_process()
    if of_owner(existing(), owner):
        raise ClusterError("this process already has a rehearsal: end it before the next")
    try:
        call(["ip", "-batch", "-"], f"netns add {owner.fabric}\n")
        built, lost = _without_delays(wiring) if _delayed(wiring) and not _has_netem(owner) else (wiring, ())
        _build(built, owner)
        yield Network(built, owner, lost)
    finally:
        with undisturbed():
            remove(of_owner(existing(), owner))


def remove(namespaces: Sequence[str]) -> None:
    """Remove namespaces by name; the kernel removes their links with the last process in them."""
    if namespaces:
        call(["ip", "-force", "-batch", "-"], "".join(f"netns delete {name}\n" for name in namespaces))


def _build(wiring: Wiring, owner: Owner) -> None:
    ranks = {rank: owner.rank(rank) for rank in wiring.ranks}
    call(["ip", "-batch", "-"], "".join(f"netns add {name}\n" for name in ranks.values()))
    call(["ip", "-netns", owner.fabric, "-batch", "-"], script.fabric_links(wiring, ranks))
    _limit(owner.fabric, script.fabric_limits(wiring))
    for rank, namespace in ranks.items():
        call(["ip", "-netns", namespace, "-batch", "-"], script.rank_links(wiring, rank))
        _limit(namespace, script.rank_limits(wiring, rank))


def _delayed(wiring: Wiring) -> tuple[str, ...]:
    return tuple(net.tier.name for net in wiring.nets if net.ports[0].delay_s)


def _has_netem(owner: Owner) -> bool:
    # Tested on the fabric's loopback, which nothing else uses.
    words = ["tc", "-netns", owner.fabric, "qdisc"]
    try:
        call([*words, "add", "dev", "lo", "root", "netem", "delay", "1ms"])
    except ClusterError:
        return False
    call([*words, "delete", "dev", "lo", "root"])
    return True


def _without_delays(wiring: Wiring) -> tuple[Wiring, tuple[str, ...]]:
    nets = tuple(replace(net, ports=tuple(replace(port, delay_s=0.0) for port in net.ports)) for net in wiring.nets)
    return replace(wiring, nets=nets), _delayed(wiring)


def _limit(namespace: str, batch: str) -> None:
    if batch:
        call(["tc", "-netns", namespace, "-batch", "-"], batch)


def _bytes(link: dict[str, Any], direction: str) -> int:
    return int(link["stats64"][direction]["bytes"])


@contextmanager
def undisturbed() -> Iterator[None]:
    """Block SIGINT, SIGTERM and SIGHUP within the block; does nothing outside the main thread.

    Children started inside inherit the blocked signals unless they unblock them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
