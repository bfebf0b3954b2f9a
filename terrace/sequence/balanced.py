"""The spread of `balance = "cost"`: documents go where attention to them costs least, tokens are held evenly.

Pure and deterministic: every rank computes the same from the lengths of the documents of a micro-step, on the host,
before the step.
"""

import math
from collections.abc import Sequence

from terrace.base.errors import PlanError
from terrace.sequence.assign import assign, sure_capacity
from terrace.sequence.cost import WorkCost
from terrace.sequence.held import held_tokens
from terrace.sequence.layout import Layout

CAPACITY = 3  # even shares of the rows that a place may attend to, if there are as many; see `most_attended`


def balanced_layout(
    lengths: Sequence[int], place_degrees: Sequence[int], ulysses: int, num_held: int, cost: WorkCost
) -> Layout:
    """Return the layout of documents of these lengths, one after the other, on a pool.

    `num_held` is what every member holds (terrace.plan.context.local_tokens), `cost` that of a part of a place. Raises
    `PlanError` when there are more tokens than rows for them.
    """
    num_places = math.prod(place_degrees)
    if sum(lengths) > num_places * ulysses * num_held:
        raise PlanError(
            f"{sum(lengths)} tokens do not fit on {num_places * ulysses} ranks that hold {num_held} each: "
            "lower the tokens of a micro-batch"
        )
    found = assign(lengths, place_degrees, cost, place_capacity(lengths, num_places, ulysses * num_held))
    return Layout(
        segments=found.segments,
        documents=(),
        held=held_tokens(found.segments, place_degrees, ulysses, num_held),
        ulysses=ulysses,
        num_held=num_held,
        window=cost.window,
    )


def place_capacity(lengths: Sequence[int], num_places: int, even_share: int) -> int:
    """Return how many tokens of documents of these lengths a place may attend to; `even_share` is what it holds."""
    return max(min(CAPACITY, num_places) * even_share, sure_capacity(lengths, num_places))


def most_attended(num_places: int, even_share: int) -> int:
    """Return what no `place_capacity` is above, whatever the documents.

    Of the tokens that the places hold, fewer documents than places are longer than an even share.
    """
    return max(min(CAPACITY, num_places) * even_share, 2 * even_share + 2 * (num_places - 1))
