"""The group layout of `balance = "cost"`: attention runs where it costs least, and local tokens are equal everywhere.

Pure and deterministic: every rank computes the same layout from the document lengths of a micro-step, on the host,
before the step.
"""

import math
from collections.abc import Sequence

from terrace.base.errors import PlanError
from terrace.sequence.assign import assign, sure_capacity
from terrace.sequence.cost import WorkCost
from terrace.sequence.group_layout import GroupLayout
from terrace.sequence.local_tokens import deal_local_tokens

CAPACITY = 3  # most even shares of tokens that a ring rank attends to; see `most_attended`


def balanced_group_layout(
    lengths: Sequence[int], ring_degrees: Sequence[int], ulysses: int, num_local_tokens: int, cost: WorkCost
) -> GroupLayout:
    """Layout of documents of these lengths, one after the other, on a context group.

    Every member holds `num_local_tokens` (terrace.plan.context.local_tokens); `cost` prices one Ulysses rank. Raises
    `PlanError` when there are more tokens than rows for them.
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


def ring_rank_capacity(lengths: Sequence[int], num_ring_ranks: int, even_share: int) -> int:
    """Tokens that a ring rank may attend to, for documents of these lengths; it holds `even_share` of them."""
    return max(min(CAPACITY, num_ring_ranks) * even_share, sure_capacity(lengths, num_ring_ranks))


def most_attended(num_ring_ranks: int, even_share: int) -> int:
    """Upper bound of `ring_rank_capacity` over all documents."""
    # Fewer documents than ring ranks can be longer than an even share, which bounds the second term of `sure_capacity`.
    return max(min(CAPACITY, num_ring_ranks) * even_share, 2 * even_share + 2 * (num_ring_ranks - 1))
