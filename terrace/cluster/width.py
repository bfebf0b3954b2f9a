"""Cost of many members: latency by algorithm, and the share of the fabric's rate that they reach.

A gather or reduction along a ring of n members takes n - 1 sequential steps. Other algorithms (`Tree`) take about log n
steps but reach a smaller share of the bandwidth, so libraries use them for small messages among many members. A fabric
with full rate for few members may be slower for many (`share`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

Point = tuple[int, float]  # (number of members, share of the rate that messages among them reach)


@dataclass(frozen=True, kw_only=True)
class Tree:
    """An algorithm whose latency among n members is step_s ceil(log2 n) + member_s n."""

    share: float  # of the rate of a ring
    step_s: float
    member_s: float = 0.0

    def latency_s(self, degree: int) -> float:
        """Latency in seconds of a gather or reduction among `degree` members."""
        return self.step_s * math.ceil(math.log2(degree)) + self.member_s * degree


def share(points: Sequence[Point], degree: int) -> float:
    """Share of the rate among `degree` members, interpolated linearly in log `degree`; constant beyond the ends."""
    if not points or degree <= points[0][0]:
        return points[0][1] if points else 1.0
    for (few, above), (many, below) in pairwise(points):
        if degree <= many:
            return above + (below - above) * math.log(degree / few) / math.log(many / few)
    return points[-1][1]


def wrong_width(tier: str, tree: Tree | None, contention: Sequence[Point], longest_s: float) -> str:
    """What is wrong with these constants; "" if they are valid."""
    if tree is not None:
        if not 0 < tree.share <= 1:
            return f"tiers.{tier}.tree.share = {tree.share} must lie above 0, and at most at 1"
        for name, value in (("step_s", tree.step_s), ("member_s", tree.member_s)):
            if not 0 <= value <= longest_s:
                return f"tiers.{tier}.tree.{name} = {value}: give zero or a positive number up to {longest_s:g}"
    before = (0, 1.0)
    for point in contention:
        if point[0] <= before[0] or not 0 < point[1] <= before[1]:
            return (
                f"tiers.{tier}.contention has {list(point)} behind {list(before)}: give pairs of members and the share "
                "of the rate among so many, more members in each and a share above 0 that never grows"
            )
        before = point
    return ""
