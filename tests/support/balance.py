"""Costs, document lengths and context groups of balanced layouts."""

from hypothesis import strategies as st

from terrace.sequence.cost import Link, WorkCost


def cost_on(num_tiers: int, *, rate: float = 1e11, pair_s: float = 1e-10, window: int = 0) -> WorkCost:
    """A cost whose tiers are each ten times slower than the one inside."""
    links = tuple(Link(bytes_per_s=rate / 10**tier, latency_s=1e-6 * 3**tier) for tier in range(num_tiers))
    return WorkCost(links=links, pair_s=pair_s, key_bytes=4096.0, query_bytes=8192.0, window=window)


def on_all_tiers(ring_ranks: tuple[int, ...], degrees: tuple[int, ...]) -> tuple[int, ...]:
    """How many members a group has on each tier, which is how far its places differ there."""
    found = []
    for degree in degrees:
        found.append(len({ring_rank % degree for ring_rank in ring_ranks}))
        ring_ranks = tuple(sorted({ring_rank // degree for ring_rank in ring_ranks}))
    return tuple(found)


pools = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)
documents = st.lists(st.one_of(st.integers(1, 300), st.integers(1, 20000)), min_size=1, max_size=60)
