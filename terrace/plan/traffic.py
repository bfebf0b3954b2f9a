"""Closed formulas for the bytes a rank sends in a step, per (message class, tier).

A gather or a reduce-scatter of a piece that has P / span(i-1) elements on tier i makes every rank send
its own P / span(i) elements (n_i - 1) times, directly or along a ring (terrace.plan.hops). An all-reduce is
a reduce-scatter followed by a gather. Per block, with P trainable padded elements:

    gather, gather_backward   tiers params .. 0            once per residency
    reduce                    tiers 0 .. grads             once per unit of micro-batches
    sync                      tiers grads+1 .. optimizer   once a step (reduce-scatter), and
                              tiers optimizer+1 .. last    once a step (all-reduce)
    refresh                   tiers optimizer .. params+1  once a step

Frozen parameters are gathered and nothing else. What the tensor axis shares is counted with the ranks that share it;
what its ranks send inside a block is in terrace.plan.tensor_traffic. Summed over all ranks, the bytes between N nodes
are 2 (N - 1) S a step for three-level placement, S being the bytes of all parameters.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import chain

from terrace.cluster import Cluster
from terrace.model.spec import BlockSpec
from terrace.plan.flats import FlatSpec, block_flats, everyone
from terrace.plan.grid import Grid
from terrace.plan.hops import block_hops, control_numbers
from terrace.plan.plan import Plan
from terrace.plan.residency import recomputed, residencies, units
from terrace.plan.tensor_traffic import Tensor, block_messages
from terrace.plan.wire import CONTROL_NUMBER_BYTES, MessageClass

Bytes = dict[tuple[MessageClass, str], int]


def step_bytes(cluster: Cluster, plan: Plan, blocks: Sequence[BlockSpec], num_micros: int, sequence: int = 0) -> Bytes:
    """Return what one rank sends in one step of `num_micros` micro-batches of sequences of `sequence` tokens.

    `blocks` is what one tensor rank holds. Entries are only there where something is sent. Raises `ClusterError` for
    an unknown tier.
    """
    layout = everyone(cluster, plan)
    flats = block_flats(cluster, plan, blocks)
    total: Bytes = defaultdict(int)

    def add(message: MessageClass, flat: FlatSpec, times: int = 1, source: int | None = None) -> None:
        for hop in chain(*block_hops(flat.layout, plan, message, flat.padded, source)):
            total[message, layout.tiers[hop.tier]] += times * hop.sent_bytes

    for (index, for_backward, opening), times in gather_counts(blocks, num_micros, plan).items():
        message = MessageClass.GATHER_BACKWARD if for_backward else MessageClass.GATHER
        source = layout.params if opening else layout.params_backward
        for flat in flats[index]:
            add(message, flat, times, source)
    num_units = len(units(num_micros, plan.unit))
    for flat in chain(*flats):
        if flat.trainable:
            add(MessageClass.REDUCE, flat, times=num_units)
            add(MessageClass.SYNC, flat)
            add(MessageClass.REFRESH, flat)
    for name, degree in zip(layout.tiers, layout.degrees, strict=True):
        if degree > 1:
            total[MessageClass.CONTROL, name] += (degree - 1) * control_numbers(layout, plan) * CONTROL_NUMBER_BYTES
    tensor = Tensor.of(Grid.of(cluster, plan), layout.tiers, plan, sequence)
    again = recomputed(plan, blocks)
    for index in range(len(blocks)):
        forward, backward = block_messages(tensor, blocks, index)
        for inside in [*forward, *(forward if index in again else []), *backward]:
            for tier, num_bytes in tensor.sends(inside):
                total[MessageClass.TENSOR, layout.tiers[tier]] += num_micros * num_bytes
    return dict(total)


def gather_counts(blocks: Sequence[BlockSpec], num_micros: int, plan: Plan) -> dict[tuple[int, bool, bool], int]:
    """Return how often (block, whether for a backward, whether the step's first) is gathered in a step.

    Whether a visit needs a gather depends on how far back the last visit of its block lies, which is the same in every
    unit but the first: so of many units three are gone through, and the third stands for the rest.
    """
    num_units = len(units(num_micros, plan.unit))

    def count(length: int) -> Counter[tuple[int, bool, bool]]:
        stays = residencies(blocks, length, 1, plan.prefetch)
        return Counter((stay.block, stay.backward, stay.opening) for stay in stays)

    if num_units <= 3:
        return count(num_units)
    two, three = count(2), count(3)
    return {key: times + (num_units - 3) * (times - two[key]) for key, times in three.items()}
