"""Cost of attention to a document on the ranks of a ring, in seconds of one layer, forward and backward.

One ring rank attends to a whole document of L tokens, or G ranks form a ring (terrace.sequence.segments): 2G chunks of
c = ceil(L / 2G) tokens, two per rank, so that all G rounds have the same area. The keys of the next round are sent
while a round computes; gradients of keys return to their owner after the last round, which is exposed:

    pairs(L)      L^2 / 2 pairs of a query and a key; under a window W < L, W L - W^2 / 2
    area(L)       pairs(L) + h L / 2; with h keys a kernel reaches half of its rate, so a query costs h / 2 pairs more
    whole         (forwards + backward) pair_s area(L)
    round         t = pair_s (pairs(2Gc) / G^2 + h c) forward and `backward` t backward
    link i        x_i(bytes) = latency_i + (bytes + half_bytes_i) / rate_i, of the keys of 2c tokens
    ring          over `forwards` and backward, t + sum over rounds that cross tier i of max(t, x_i);  + x_outermost

The time of a rank is the sum over its documents. Not modelled: documents on one rank hide each other's messages, so the
sum is an overestimate for many documents.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from terrace.base.errors import ClusterError, did_you_mean
from terrace.cluster.cluster import Cluster, Tier
from terrace.plan.context import Heads
from terrace.plan.wire import FORMATS

FLASH_BACKWARD = 2.5  # five matmuls instead of two, since scores are recomputed (Dao 2307.08691)


@dataclass(frozen=True, kw_only=True)
class Link:
    """Send time model of one rank over a tier while all other ranks send as well."""

    bytes_per_s: float  # for large messages
    latency_s: float
    half_bytes: float = 0.0  # message size that reaches half the rate

    @staticmethod
    def of(tier: Tier) -> "Link":
        rate = tier.bandwidth_bytes_per_s * tier.efficiency
        return Link(bytes_per_s=rate, latency_s=tier.latency_s, half_bytes=tier.half_bytes)

    def seconds(self, num_bytes: float) -> float:
        return self.latency_s + (num_bytes + self.half_bytes) / self.bytes_per_s if num_bytes else 0.0


@dataclass(frozen=True, kw_only=True)
class WorkCost:
    """Seconds and bytes of one layer on one rank: one Ulysses rank with its share of the heads."""

    links: tuple[Link, ...]  # of the tiers, innermost first
    pair_s: float  # forward attention of a query and a key
    key_bytes: float  # keys and values of a token
    query_bytes: float  # queries, or output, of a token
    token_s: float = 0.0  # linear layers per local token, forwards and backward
    backward: float = FLASH_BACKWARD  # time of attention's backward over its forward
    window: int = 0  # 0: none
    other_windows: tuple[int, ...] = ()  # of other layers; costs use `window`
    forwards: float = 1.0  # forward passes per step, recomputation included; the mean over layers
    half_keys: float = 0.0  # keys with which a kernel reaches half of its rate (`Kernels.attention_half_keys`)

    @staticmethod
    def of(
        cluster: Cluster,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        ulysses: int = 1,
        window: int = 0,
        token_s: float = 0.0,
        compute: str = "bf16",
        forwards: float = 1.0,
    ) -> "WorkCost":
        """Cost of flash attention on a cluster, for a ring rank of `ulysses` ranks.

        Counts 4 FLOPs per pair and head element, at the share of the peak that attention reaches. Raises `ClusterError`
        if the device has no peak for `compute`.
        """
        peaks = cluster.device.peak_flops_per_s
        if compute not in peaks:
            known = did_you_mean(compute, peaks)
            raise ClusterError(f"device {cluster.device.name!r} has no peak_flops_per_s.{compute}: add it{known}")
        part = Heads(heads, kv_heads, head_dim).per_ulysses_rank(ulysses)
        flops = 4.0 * part.queries * head_dim
        item, kernels = FORMATS[compute].element_bytes, cluster.device.kernels
        share = kernels.attention_share(head_dim)
        return WorkCost(
            links=tuple(Link.of(tier) for tier in cluster.tiers),
            pair_s=flops / (peaks[compute] * share),
            key_bytes=2.0 * item * head_dim * part.keys,
            query_bytes=float(item * head_dim * part.queries),
            token_s=token_s,
            backward=FLASH_BACKWARD * share / kernels.attention_share(head_dim, backward=True),
            window=window,
            forwards=forwards,
            half_keys=kernels.attention_half_keys,
        )

    @cached_property
    def whole_pair_s(self) -> float:
        """Seconds of one (query, key) pair, forwards and backward."""
        return (self.forwards + self.backward) * self.pair_s

    def pairs(self, length: int) -> float:
        """Number of (query, key) pairs of a document."""
        if 0 < self.window < length:
            return self.window * (length - self.window / 2)
        return length * length / 2

    def area(self, length: int) -> float:
        """Pairs of a document, and those that its queries take as long as on a kernel with few keys."""
        return self.pairs(length) + self.half_keys * length / 2

    def whole_s(self, length: int) -> float:
        return self.whole_pair_s * self.area(length)

    def round_s(self, length: int, num_ring_ranks: int) -> float:
        """Forward seconds of a document in each round of a ring, on each of its ranks."""
        pairs = self.pairs(length) / num_ring_ranks**2
        return self.pair_s * (pairs + self.half_keys * length / (2 * num_ring_ranks))

    def computed_s(self, length: int, num_ring_ranks: int) -> float:
        """Seconds that a ring's document computes on each of its ranks, without messages."""
        if num_ring_ranks == 1:
            return self.whole_s(length)
        rounds_s = num_ring_ranks * self.round_s(ring_tokens(length, num_ring_ranks) * num_ring_ranks, num_ring_ranks)
        return (self.forwards + self.backward) * rounds_s

    def ring_s(self, length: int, degrees: tuple[int, ...]) -> float:
        num_ring_ranks = math.prod(degrees)
        if num_ring_ranks == 1:
            return self.whole_s(length)
        tokens = ring_tokens(length, num_ring_ranks)
        forward = self.round_s(tokens * num_ring_ranks, num_ring_ranks)
        backward = self.backward * forward
        total, return_s = self.forwards * forward + backward, 0.0
        plain = 1  # exchanges without gradients: the first one of the backward has none yet
        for link, number in zip(self.links, crossings(degrees), strict=True):
            if number:
                return_s = link.seconds(tokens * self.key_bytes)
                both_s = link.seconds(2 * tokens * self.key_bytes)  # keys, and gradients of the previous round
                total += self.forwards * number * max(forward, return_s)
                total += plain * max(backward, return_s) + (number - plain) * max(backward, both_s)
                plain = 0
        return total + return_s

    def key_messages(self, num_rounds: int, *, is_first: bool) -> float:
        """Messages of a ring rank's keys, or of their gradients, in `num_rounds` rounds, forwards and backward.

        The first round of the backward has no gradients to send yet.
        """
        return (self.forwards + 2) * num_rounds - is_first

    def move_s(self, tier: int, num_tokens: int) -> float:
        """Seconds to move tokens to the rank that attends to them and their outputs back, forwards and backward."""
        # Forward, queries, keys and values leave and outputs return; backward, their gradients go the opposite way.
        link = self.links[tier]
        to_attention = link.seconds(num_tokens * (self.query_bytes + self.key_bytes))
        return (self.forwards + 1) * (to_attention + link.seconds(num_tokens * self.query_bytes))


def ring_tokens(length: int, num_ring_ranks: int) -> int:
    """Maximum number of a document's tokens on one rank of a ring."""
    return length if num_ring_ranks == 1 else 2 * -(-length // (2 * num_ring_ranks))


def crossings(degrees: Sequence[int]) -> list[int]:
    """By tier, the number of rounds in which a ring crosses it; all members cross in the same round."""
    beyond, found = math.prod(degrees), []
    for degree in degrees:
        found.append(beyond - beyond // degree)
        beyond //= degree
    return found
