"""The hand-over to another pool, in closed form: that of `terrace.rl.hand_over.moves` from a source with even shards.

From the outermost tier between the pools inward, each unit inside a tier receives once all elements that its members
need, evenly distributed. With n ranks of the target in a unit inside tier t, in replicas of `rows` ranks, each of them
then has M / max(n, rows) of a model of M bytes, and on each tier it receives the difference to the next outer tier.
Blocks are sent sequentially.
"""

import math

from terrace.cluster.cluster import Cluster
from terrace.plan.wire import FORMATS
from terrace.rl.hand_over.seconds import HandOverCost
from terrace.rl.placement.dataflow import Dataflow
from terrace.simulate.links import exchange_tiers

_Span = tuple[int, int]  # first rank, number of ranks


def between_pools(cluster: Cluster, source: _Span, target: _Span, rows: int, dataflow: Dataflow) -> HandOverCost:
    blocks = dataflow.source.blocks
    item = FORMATS[dataflow.compute].element_bytes
    model_bytes = item * sum(param.numel for block in blocks for param in block.params)
    ranks = (source[0], target[0], sum(source) - 1, sum(target) - 1)
    between = next(
        tier for tier in range(len(cluster.tiers)) if len({rank // cluster.ranks_within(tier) for rank in ranks}) == 1
    )
    seconds, has, sent = 0.0, 0.0, dict.fromkeys((tier.name for tier in cluster.tiers), 0)
    for tier in range(between, -1, -1):
        together = min(target[1], cluster.ranks_within(tier - 1))
        needs = model_bytes / max(together, rows)
        received, has = needs - has, needs
        if received <= 0:
            continue
        sent[cluster.tiers[tier].name] = round(received * target[1])
        # Over the first tier the ranks of the source send, on inner tiers the ranks that have received.
        slowest = max(received, received * target[1] / source[1]) if tier == between else received
        degrees = [each.size for each in cluster.tiers]
        each_s = exchange_tiers(cluster, degrees, [(tier, math.ceil(slowest / len(blocks)))])
        seconds += len(blocks) * sum(each_s.values())
    return HandOverCost(seconds=seconds, sent_bytes=sent, received_bytes=round(has))
