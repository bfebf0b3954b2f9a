"""The group layout of `balance = "cost"`: attention is assigned by cost, and all ranks hold equally many local tokens.

Pure and deterministic: every rank computes the same layout on the host, before the step, from the document lengths of
a micro-step.
"""

import math
from collections.abc import Sequence

from terrace.base.errors import PlanError
from terrace.sequence.assign import assign
from terrace.sequence.capacity import ring_rank_capacity
from terrace.sequence.cost import WorkCost
from terrace.sequence.group_layout import GroupLayout
from terrace.sequence.local_tokens import deal_local_tokens


def balanced_group_layout(
    lengths: Sequence[int], ring_degrees: Sequence[int], ulysses: int, num_local_tokens: int, cost: WorkCost
) -> GroupLayout:
    """Layout of the concatenated documents on a context group.

    Every member holds `num_local_tokens` (terrace.plan.context.local_tokens); `cost` is that of one Ulysses rank.
    Raises `PlanError` if the tokens do not fit.
    """
    num_ring_ranks = math.prod(ring_degrees)
    if sum(lengths) > num_ring_ranks * ulysses * num_local_tokens:
        raise PlanError(
            f"{sum(lengths)} tokens do not fit on {num_ring_ranks * ulysses} ranks that hold {num_local_tokens} each: "
            "lower the tokens of a micro-batch"
        )
    found = assign(lengths, ring_degrees, cost, ring_rank_capacity(lengths, num_ring_ranks, ulysses * num_local_tokens))
    return GroupLayout(
        segments=found.segments,
        documents=(),
        local_runs=deal_local_tokens(found.segments, ring_degrees, ulysses, num_local_tokens),
        ulysses=ulysses,
        num_local_tokens=num_local_tokens,
        window=cost.window,
    )
