"""Layout of a role: which share of a call's rows each rank gets, and from which ranks results are collected.

Pure functions of a plan's mesh; nothing is communicated. Ranks that work on the same rows (of the tensor, context and
pipeline axes) get the same share, and one of them returns its result: the first of the stage that holds the logits.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from terrace.base.errors import ConfigError, PlanError
from terrace.cluster.cluster import Cluster
from terrace.plan.mesh import CONTEXT, TENSOR, Mesh
from terrace.plan.plan import Plan
from terrace.program.stages import stages_of
from terrace.rl.calls.call import Call

_NO_SHARE = -1


@dataclass(frozen=True)
class RoleLayout:
    """Share of each rank of a role by axis ("data", and "replica" if the role generates).

    `shares[axis][rank]` is the rank's share index, -1 for a rank in no replica; `answering[axis][share]` is the rank
    whose result is collected.
    """

    num_ranks: int
    shares: Mapping[str, tuple[int, ...]]
    answering: Mapping[str, tuple[int, ...]]

    @staticmethod
    def alike(num_ranks: int) -> "RoleLayout":
        """Independent ranks: each has its own share on both axes."""
        ranks = tuple(range(num_ranks))
        return RoleLayout(
            num_ranks, dict.fromkeys(("data", "replica"), ranks), dict.fromkeys(("data", "replica"), ranks)
        )

    @staticmethod
    def of(cluster: Cluster, plan: Plan, replicas: Sequence[Sequence[int]] = ()) -> "RoleLayout":
        """The layout of a role that trains or scores under `plan` and generates on `replicas` (the ranks of each).

        Raises `PlanError` for `balance = "cost"`, which splits rows over ranks, and for a rank that is in two replicas
        or outside of the cluster.
        """
        if plan.balance == "cost":
            raise PlanError('plan.balance = "cost" parts rows among ranks, and roles need them whole: write "tokens"')
        mesh, world = Mesh.of(cluster, plan), cluster.world_size
        data = tuple(mesh.group_rank(rank, ("data",)) for rank in range(world))
        logits = _stage_of_logits(plan, mesh.total("pipeline"))
        heads = [
            rank
            for rank in range(world)
            if mesh.group_rank(rank, (*TENSOR, *CONTEXT)) == 0 and mesh.stage(rank) == logits
        ]
        answering = tuple(sorted(heads, key=data.__getitem__))
        shares, sources = {"data": data}, {"data": answering}
        if replicas:
            shares["replica"] = _replica_of(replicas, world)
            sources["replica"] = tuple(ranks[0] for ranks in replicas)
        return RoleLayout(world, shares, sources)

    def num_shares(self, split: str | None) -> int:
        """Number of shares of rows, 1 if all ranks get all rows. Raises `ConfigError` if the layout lacks the axis."""
        return 1 if split is None else len(self._of(self.answering, split))

    def sources(self, call: Call) -> tuple[int, ...]:
        """The ranks whose results are collected, in the order in which they are concatenated."""
        if call.take == "first":
            return self._of(self.answering, "data")[:1]
        if call.take == "all":
            return tuple(range(self.num_ranks))
        return self._of(self.answering, call.axis)

    def bounds(self, call: Call, tokens: Sequence[int], groups: Sequence[int] = ()) -> list[tuple[int, int]]:
        """(start, stop) of each rank's rows: consecutive shares, balanced by tokens, or by rows if the call says so.

        `tokens` is the token count of each row, `groups` its group, for a call with `keeps_groups`. Ranks in no replica
        get (0, 0); shares are empty where there are fewer rows than shares.
        """
        if call.split is None:
            return [(0, len(tokens))] * self.num_ranks
        costs = tokens if call.balance == "tokens" else [0] * len(tokens)
        firsts = list(range(len(costs)))
        if call.keeps_groups and groups:
            firsts = [row for row in firsts if row == 0 or groups[row] != groups[row - 1]]
        units = list(pairwise([*firsts, len(costs)]))
        # Every row has a fixed cost of 1, even without tokens. `even_shares` adds it once per unit.
        costs = [sum(costs[first:stop]) + stop - first - 1 for first, stop in units]
        shares = accumulate(even_shares(costs, self.num_shares(call.split)), initial=0)
        row_ends = [*firsts, len(tokens)]
        ends = [row_ends[unit] for unit in shares]
        own = self._of(self.shares, call.split)
        return [(0, 0) if share == _NO_SHARE else (ends[share], ends[share + 1]) for share in own]

    def _of(self, table: Mapping[str, tuple[int, ...]], axis: str) -> tuple[int, ...]:
        if axis not in table:
            raise ConfigError(f"a call over {axis!r}, and the role's layout has {', '.join(table)}: give it replicas")
        return table[axis]


def even_shares(tokens: Sequence[int], num_shares: int) -> list[int]:
    """Number of rows of each of `num_shares` consecutive shares, with the fewest possible tokens in the largest share.

    Within that limit, each share is as near as possible to the mean of the remaining tokens. A share is empty only if
    there are fewer rows than shares.
    """
    # Every row has a fixed cost of 1, even without tokens.
    ends = list(accumulate((1 + each for each in tokens), initial=0))
    limit = _least_limit(ends, num_shares)
    # The earliest end of each share that lets the later shares stay within the limit.
    earliest = [len(tokens)]
    for _ in range(num_shares - 1):
        earliest.append(bisect_left(ends, ends[earliest[-1]] - limit))
    sizes, start = list[int](), 0
    for left, least in zip(range(num_shares, 0, -1), reversed(earliest), strict=True):
        most = bisect_right(ends, ends[start] + limit) - 1
        even = ends[start] + (ends[-1] - ends[start]) / left
        near = bisect_left(ends, even)
        if near > start and even - ends[near - 1] < ends[min(near, len(tokens))] - even:
            near -= 1
        # At least one row for this share and for each later one, if there are enough rows.
        near = max(start + 1, min(near, len(tokens) - left + 1))
        stop = min(len(tokens), max(least, min(most, near)))
        sizes.append(stop - start)
        start = stop
    return sizes


def _least_limit(ends: Sequence[int], num_shares: int) -> int:
    low, high = math.ceil(ends[-1] / num_shares), ends[-1]
    while low < high:
        limit, start = (low + high) // 2, 0
        for _ in range(num_shares):
            start = bisect_right(ends, ends[start] + limit) - 1
        low, high = (low, limit) if start == len(ends) - 1 else (limit + 1, high)
    return low


def _stage_of_logits(plan: Plan, num_stages: int) -> int:
    # The last chunk may be on another stage than the last: the chunks of a V schedule end on the first.
    return stages_of(plan, (), num_stages, 0)[-1]


def _replica_of(replicas: Sequence[Sequence[int]], world: int) -> tuple[int, ...]:
    found = [_NO_SHARE] * world
    for index, ranks in enumerate(replicas):
        for rank in ranks:
            if not 0 <= rank < world or found[rank] != _NO_SHARE:
                raise PlanError(
                    f"replica {index} has rank {rank}: replicas are of different ranks, from 0 to {world - 1}"
                )
            found[rank] = index
    return tuple(found)
