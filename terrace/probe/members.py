"""Speeds of members that differ: of a cluster file with `[[tiers.members]]`, whose other constants are means over all.

A member's speed is that of its ranks' products, over the mean that the probed device stands for: constants are fitted
to mean seconds, so it is the harmonic mean of the rates.
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, harmonic_mean

from terrace.cluster.cluster import Tier
from terrace.cluster.members import Member


def with_speeds(tier: Tier, rates: Sequence[float]) -> Tier:
    """`tier`, the outermost, with the speeds of its members by the `rates` of all ranks; unchanged without rates.

    Its link was measured among all members, so they have no figures of their own.
    """
    if not rates:
        return tier
    inside, mean = len(rates) // tier.size, harmonic_mean(rates)
    speeds = (fmean(rates[first : first + inside]) / mean for first in range(0, len(rates), inside))
    return replace(tier, members=tuple(Member(speed=speed) for speed in speeds))
