"""Limits on the tokens that a ring rank attends to under `balance = "cost"`."""

from collections.abc import Sequence

CAPACITY = 3  # even shares of tokens that a ring rank may attend to; see `most_attended`


def ring_rank_capacity(lengths: Sequence[int], num_ring_ranks: int, even_share: int) -> int:
    """Tokens that a ring rank may attend to, for documents of these lengths; it holds `even_share` tokens."""
    return max(min(CAPACITY, num_ring_ranks) * even_share, sure_capacity(lengths, num_ring_ranks))


def most_attended(num_ring_ranks: int, even_share: int) -> int:
    """Upper bound of `ring_rank_capacity` over all documents."""
    # Fewer documents than ring ranks can be longer than an even share, which bounds the second term of `sure_capacity`.
    return max(min(CAPACITY, num_ring_ranks) * even_share, 2 * even_share + 2 * (num_ring_ranks - 1))


def sure_capacity(lengths: Sequence[int], num_ring_ranks: int) -> int:
    """A capacity with which these documents always fit, about two even shares of the tokens.

    Let s be an even share and n the number of documents longer than s. Those become rings over all ranks and add at
    most their length over the number of ranks, plus 2, to each. Every other document goes to the rank with the fewest
    tokens, which has at most s + 2n tokens before it and at most s more after.
    """
    share = -(-sum(lengths) // num_ring_ranks)
    return 2 * share + 2 * sum(length > share for length in lengths)
