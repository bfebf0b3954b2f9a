"""The numbers that follow from a cluster and a plan: spans, slices, padded sizes.

Every flat buffer is cut hierarchically, the innermost tier first. With data degrees n_0, n_1, ... and
a rank at coordinates c_0, c_1, ..., the slice of a state placed on tier t starts at

    sum over i <= t of  c_i * P / (n_0 ... n_i)        and has  P / (n_0 ... n_t)  elements,

P being the padded size. So the slice of an outer tier lies inside the slice of every inner one and
all are contiguous: a reduce-scatter package first and then outward, or a gather from the outermost
tier inward, needs no permuting copy, and each outer link carries only what the inner tiers could not.
"""

import math
from dataclasses import dataclass

from terrace.cluster import Cluster
from terrace.plan.plan import Plan
from terrace.plan.wire import MessageClass

DEVICE = -1  # the index of the implicit innermost tier


@dataclass(frozen=True)
class Layout:
    """Data degrees per tier and the tier index of each state (`DEVICE` = replicated)."""

    tiers: tuple[str, ...]
    degrees: tuple[int, ...]
    params: int
    params_backward: int  # equals `params` when there is no secondary copy
    grads: int
    optimizer: int

    @staticmethod
    def of(cluster: Cluster, plan: Plan) -> "Layout":
        """Resolve tier names; raises `ClusterError` for an unknown one."""
        params = cluster.index(plan.params)
        return Layout(
            tiers=tuple(tier.name for tier in cluster.tiers),
            degrees=tuple(plan.degree(tier.name, "data", tier.size) for tier in cluster.tiers),
            params=params,
            params_backward=params if plan.params_backward is None else cluster.index(plan.params_backward),
            grads=cluster.index(plan.grads),
            optimizer=cluster.index(plan.optimizer),
        )

    @property
    def has_secondary(self) -> bool:
        """Whether a secondary copy of the parameters exists (ZeRO++'s hierarchical partition)."""
        return self.span(self.params_backward) != self.span(self.params)

    @property
    def outermost(self) -> int:
        """Index of the last tier."""
        return len(self.tiers) - 1

    @property
    def data_degree(self) -> int:
        """Number of ranks that work on different samples."""
        return self.span(self.outermost)

    def span(self, index: int) -> int:
        """Return over how many ranks a state placed on tier `index` is sharded."""
        return math.prod(self.degrees[: index + 1])

    def route(self, message: MessageClass) -> range:
        """Return the indexes of the tiers that a message class is there to cross, whatever their sizes."""
        return {
            MessageClass.GATHER: range(self.params + 1),
            MessageClass.GATHER_BACKWARD: range(self.params_backward + 1),
            MessageClass.REDUCE: range(self.grads + 1),
            MessageClass.SYNC: range(self.grads + 1, self.outermost + 1),
            MessageClass.REFRESH: range(self.params + 1, self.optimizer + 1),
            MessageClass.CONTROL: range(self.outermost + 1),
        }[message]

    def padded(self, numel: int) -> int:
        """Return `numel` rounded up so that every tier divides it; padding is part of the format."""
        return -(-numel // self.data_degree) * self.data_degree

    def slice(self, index: int, coordinates: tuple[int, ...], padded_numel: int) -> slice:
        """Return the slice of a flat buffer that a rank holds of a state placed on tier `index`."""
        start, length = 0, padded_numel
        for degree, here in zip(self.degrees[: index + 1], coordinates, strict=False):
            length //= degree
            start += here * length
        return slice(start, start + length)
