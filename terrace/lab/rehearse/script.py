"""The `ip` and `tc` commands that build a `Wiring`, one batch per namespace. Pure text: nothing is run here.

Frames are jumbo, so that headers are below 1 % of an interface's count. Each rank has a static neighbour entry for
every other rank, so that no ARP is counted. IPv6 address generation is off, so that interfaces are silent until a rank
sends.
"""

import math
from collections.abc import Callable, Iterator
from functools import wraps
from typing import ParamSpec

from terrace.lab.rehearse.wiring import FASTEST_BYTES_PER_S, TierNet, Wiring

P = ParamSpec("P")
HOME = "terrace0"  # holds a rank's address; a bridge without ports, since some kernels lack dummy devices

MTU_BYTES = 9000
# Maximum bytes in flight on one connection. Without it senders fill the queue of a slow link, which delays every small
# message behind it and finally drops frames; with it nothing is lost, as on a fabric with credits. A delayed link gets
# more, to cover a round trip.
_WINDOW_BYTES = 256 * 1024
_CONGESTION = "cubic"  # the same on every machine, whatever its default
# Burst of a limited link: enough to cover a late timer, and at least a few frames.
_BURST_S = 5e-4
_SMALLEST_BURST_BYTES = 32 * 1024
_LARGEST_BURST_BYTES = 1024 * 1024
# Queue at a limited link: the windows of more connections than exist, so that nothing is dropped.
_QUEUE_BYTES = 64 * 1024 * 1024
_QUEUE_FRAMES = 100_000


def burst_bytes(rate_bytes_per_s: float) -> int:
    return int(min(max(rate_bytes_per_s * _BURST_S, _SMALLEST_BURST_BYTES), _LARGEST_BURST_BYTES))


def window_bytes(net: TierNet) -> int:
    """Bytes in flight allowed on one connection over this tier."""
    rate, delay_s = min(net.rate_bytes_per_s, FASTEST_BYTES_PER_S), net.ports[0].delay_s
    return _WINDOW_BYTES + int(2 * delay_s * rate)


def _batch(commands: Callable[P, Iterator[str]]) -> Callable[P, str]:
    # The commands as a batch, one per line.
    @wraps(commands)
    def text(*arguments: P.args, **named: P.kwargs) -> str:
        return "".join(f"{line}\n" for line in commands(*arguments, **named))

    return text


@_batch
def fabric_links(wiring: Wiring, namespaces: dict[int, str]) -> Iterator[str]:
    """`ip` batch of the fabric: bridges, uplinks, and ports with their other end in a rank's namespace."""
    veth = f"mtu {MTU_BYTES} type veth peer name"
    for net in wiring.nets:
        for bridge in net.bridges:
            yield f"link add name {bridge} mtu {MTU_BYTES} type bridge forward_delay 0 mcast_snooping 0"
            yield from _up(bridge)
        for uplink in net.uplinks:
            yield f"link add name {uplink.lower} {veth} {uplink.upper} mtu {MTU_BYTES}"
            yield from _up(uplink.lower, f"master {uplink.lower_bridge}")
            yield from _up(uplink.upper, f"master {uplink.upper_bridge}")
        for port in net.ports:
            there = f"mtu {MTU_BYTES} address {wiring.mac(port.rank, net.index)} netns {namespaces[port.rank]}"
            yield f"link add name {port.name} {veth} {port.interface} {there}"
            yield from _up(port.name, f"master {port.bridge}")


@_batch
def fabric_limits(wiring: Wiring) -> Iterator[str]:
    """`tc` batch of the fabric: uplinks in both directions, and traffic towards each rank."""
    for net in wiring.nets:
        for uplink in net.uplinks:
            if uplink.rate_bytes_per_s < math.inf:
                yield _limited(uplink.lower, uplink.rate_bytes_per_s)
                yield _limited(uplink.upper, uplink.rate_bytes_per_s)
        for port in net.ports:
            if port.rate_bytes_per_s < math.inf:
                yield _limited(port.name, port.rate_bytes_per_s)


@_batch
def rank_links(wiring: Wiring, rank: int) -> Iterator[str]:
    """`ip` batch of a rank's namespace: its address, its interfaces, a route to every other rank."""
    address = wiring.address(rank)
    yield "link set dev lo up"
    yield f"link add name {HOME} type bridge"
    yield from _up(HOME)
    yield f"address add {address}/32 dev {HOME}"
    for net in wiring.nets:
        yield from _up(net.interface)
    for other in wiring.ranks:
        index = wiring.between(rank, other)
        if index >= 0:
            there = wiring.address(other)
            window = window_bytes(wiring.net(index))
            yield f"route add {there}/32 dev t{index} scope link src {address} window {window} congctl {_CONGESTION}"
            yield f"neigh add {there} lladdr {wiring.mac(other, index)} dev t{index} nud permanent"


@_batch
def rank_limits(wiring: Wiring, rank: int) -> Iterator[str]:
    """`tc` batch of a rank's namespace: its outgoing traffic."""
    for net in wiring.nets:
        port = net.ports[rank]
        if port.delay_s:
            rate = f" rate {_bits(port.rate_bytes_per_s)}" if port.rate_bytes_per_s < math.inf else ""
            delay = f"delay {port.delay_s * 1e6:.0f}us"
            # netem limits the rate too: on some kernels a tbf below netem stalls, since it splits frames that netem
            # counts whole.
            yield f"qdisc add dev {port.interface} root netem {delay}{rate} limit {_QUEUE_FRAMES}"
        elif port.rate_bytes_per_s < math.inf:
            yield _limited(port.interface, port.rate_bytes_per_s)


def _up(interface: str, more: str = "") -> Iterator[str]:
    yield f"link set dev {interface} addrgenmode none"  # before it is up, when it would announce itself
    yield f"link set dev {interface} {more} up"


def _limited(interface: str, rate_bytes_per_s: float) -> str:
    burst, rate = burst_bytes(rate_bytes_per_s), _bits(rate_bytes_per_s)
    return f"qdisc add dev {interface} root tbf rate {rate} burst {burst}b limit {_QUEUE_BYTES}b"


def _bits(rate_bytes_per_s: float) -> str:
    return f"{round(rate_bytes_per_s * 8)}bit"
