"""Closed formulas for the bytes a rank sends in a step, per (message class, tier).

A gather or a reduce-scatter of a piece that has P / span(i-1) elements on tier i makes every rank send
its own P / span(i) elements (n_i - 1) times, directly or along a ring. An all-reduce is a
reduce-scatter followed by a gather. Per block, with P trainable padded elements:

    gather, gather_backward   tiers params .. 0            once per residency
    reduce                    tiers 0 .. grads             once per micro-batch
    sync                      tiers grads+1 .. optimizer   once a step (reduce-scatter), and
                              tiers optimizer+1 .. last    once a step (all-reduce)
    refresh                   tiers optimizer .. params+1  once a step

Frozen parameters are gathered and nothing else. Summed over all ranks, the bytes between N nodes are
2 (N - 1) S a step for three-level placement, S being the bytes of all parameters.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from terrace.cluster import Cluster
from terrace.model.spec import BlockSpec
from terrace.plan.layout import Layout
from terrace.plan.plan import Plan
from terrace.plan.residency import residencies
from terrace.plan.wire import CONTROL_BYTES, MessageClass

Bytes = dict[tuple[MessageClass, str], int]


def step_bytes(cluster: Cluster, plan: Plan, blocks: Sequence[BlockSpec], num_micros: int) -> Bytes:
    """Return what one rank sends in one step of `num_micros` micro-batches.

    Entries are only there where something is sent. Raises `ClusterError` for an unknown tier.
    """
    layout = Layout.of(cluster, plan)
    total: Bytes = defaultdict(int)
    for message, numel, tiers in _collectives(layout, plan, blocks, num_micros):
        for tier in tiers:
            copies = layout.degrees[tier] - 1
            if copies and numel:
                size = plan.wire_format(message, layout.tiers[tier]).message_bytes(numel // layout.span(tier))
                total[message, layout.tiers[tier]] += copies * size
    for name, degree in zip(layout.tiers, layout.degrees, strict=True):
        if degree > 1:
            total[MessageClass.CONTROL, name] += (degree - 1) * CONTROL_BYTES
    return dict(total)


def _collectives(
    layout: Layout, plan: Plan, blocks: Sequence[BlockSpec], num_micros: int
) -> Iterator[tuple[MessageClass, int, range]]:
    """Yield (message class, padded elements, tiers crossed) of every gather and reduce-scatter of a step."""
    for stay in residencies(blocks, num_micros, plan.prefetch):
        message = MessageClass.GATHER_BACKWARD if stay.backward else MessageClass.GATHER
        source = layout.params if stay.opening else layout.params_backward
        for numel in (blocks[stay.block].num_trainable, blocks[stay.block].num_frozen):
            yield message, layout.padded(numel), range(source + 1)
    for block in blocks:
        numel = layout.padded(block.num_trainable)
        for _ in range(num_micros):
            yield MessageClass.REDUCE, numel, layout.route(MessageClass.REDUCE)
        yield MessageClass.SYNC, numel, layout.route(MessageClass.SYNC)
        # Over the tiers outside the optimizer's, replicas all-reduce: what went there comes back.
        yield MessageClass.SYNC, numel, range(layout.optimizer + 1, layout.outermost + 1)
        yield MessageClass.REFRESH, numel, layout.route(MessageClass.REFRESH)
