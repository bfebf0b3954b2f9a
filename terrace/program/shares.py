"""Finds the best split of blocks into virtual stages, and estimates costs of blocks without known kernels.

Costs are the times of a block's passes if the model is known (terrace.simulate.step). Blocks that only declare
parameters are weighted by multiplications per token in a forward:

    the elements of a block's matrices that a token meets, tied ones included, and S H for causal attention over S
    tokens

(2 FLOPs per element, and 4 S H / 2 for scores and values). An embedding look-up costs nothing. The split minimises the
slowest virtual stage while every stage's model state fits its share of device memory; ties are broken by the sum of
squares, which evens out the other stages, and then in favour of later stages with more blocks: the first backwards
start sooner, and later stages hold fewer activations. If nothing fits, the program's verification reports the lack of
memory.
"""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from terrace.model.params import ParamSpec
from terrace.model.spec import BlockSpec, Computes
from terrace.plan.dims import CUT_BY, hidden_size, is_table

_EQUAL = 1 + 1e-12  # between sums of the same squares that were added in another order


class BlockCost(NamedTuple):
    """Multiplications per token of a block's forward: of weights, and of attention's scores and values."""

    products: int
    scores: int


def block_costs(blocks: Sequence[BlockSpec], sequence: int) -> list[BlockCost]:
    hidden = hidden_size(blocks)
    return [_cost(blocks, index, sequence * hidden) for index in range(len(blocks))]


def virtual_costs(blocks: Sequence[BlockSpec], sequence: int) -> list[int]:
    return [sum(cost) for cost in block_costs(blocks, sequence)]


def share(costs: Sequence[int], num_parts: int, sizes: Sequence[int] = (), room: float = math.inf) -> list[range]:
    """Split blocks into `num_parts` consecutive non-empty ranges with costs as even as possible.

    Each range has at most `room` of `sizes`, if that is possible. Worst case: quadratic in the number of blocks.
    """
    starts = [0, *accumulate(costs)]
    held = [0, *accumulate(sizes or [0] * len(costs))]
    # Memory cannot be kept at all: balance time alone, and let the memory check name the shortage.
    if _parts_needed(starts, held, starts[-1], room)[0] > num_parts:
        room = math.inf
    # First the bottleneck is minimised; below, the sum of squares evens out the other parts.
    limit = _least_limit(starts, held, room, num_parts)
    possible = [_last_parts(starts, held, stop, limit, room) for stop in range(len(costs) + 1)]
    best: list[float] = [0.0] + [math.inf] * len(costs)  # sum of squares of the parts that end at each block
    cuts: list[list[int]] = []
    for part in range(num_parts):
        ends, before = [math.inf] * (len(costs) + 1), [0] * (len(costs) + 1)
        # Leave at least one block for each part still to come.
        for stop in range(part + 1, len(costs) - (num_parts - part - 1) + 1):
            least, at = math.inf, 0
            for start, square in possible[stop]:
                if start < part:
                    break
                found = best[start] + square
                # Of equal sums the last one tried has the longest last part.
                if found <= _EQUAL * least:
                    least, at = found if found < least else least, start
            ends[stop], before[stop] = least, at
        best = ends
        cuts.append(before)
    # Walk the recorded cuts back from the last block.
    parts, stop = [], len(costs)
    for before in reversed(cuts):
        parts.append(range(before[stop], stop))
        stop = before[stop]
    return parts[::-1]


def share_apart(costs: Sequence[Sequence[int]], sizes: Sequence[int] = (), room: float = math.inf) -> list[range]:
    """As `share`, where a block costs `costs[part][block]` in each part: the longest part is as short as can be."""
    num_parts, num_blocks = len(costs), len(costs[0])
    held = [0, *accumulate(sizes or [0] * num_blocks)]
    starts = [[0, *accumulate(part)] for part in costs]
    # Longest part, then the sum of squares, of the first parts up to each block.
    best: list[tuple[float, float]] = [(0.0, 0.0)] + [(math.inf, math.inf)] * num_blocks
    cuts: list[list[int]] = []
    for part in range(num_parts):
        ends, before = [(math.inf, math.inf)] * (num_blocks + 1), [0] * (num_blocks + 1)
        for stop in range(part + 1, num_blocks - (num_parts - part - 1) + 1):
            for start in range(part, stop):
                own = starts[part][stop] - starts[part][start]
                found = max(best[start][0], own), best[start][1] + own * own
                if held[stop] - held[start] <= room and found < ends[stop]:
                    ends[stop], before[stop] = found, start
        best = ends
        cuts.append(before)
    if best[-1][0] == math.inf:  # as in `share`
        return share_apart(costs)
    parts, stop = [], num_blocks
    for before in reversed(cuts):
        parts.append(range(before[stop], stop))
        stop = before[stop]
    return parts[::-1]


def _last_parts(
    starts: Sequence[int], held: Sequence[int], stop: int, limit: int, room: float
) -> list[tuple[int, float]]:
    """(Start, square of the cost) of each possible part that ends at `stop`, the shortest first."""
    found = []
    # Parts grow as start falls, so the first one over a limit ends the search.
    for start in range(stop - 1, -1, -1):
        size = starts[stop] - starts[start]
        if size > limit or held[stop] - held[start] > room:
            break
        # Floats: only the comparison matters, and exact integers of this size are slow.
        found.append((start, float(size) ** 2))
    return found


def _least_limit(starts: Sequence[int], held: Sequence[int], room: float, num_parts: int) -> int:
    # Binary search: a larger limit never needs more parts. The least limit is the sum of some part, so both ends
    # move to such a sum: the upper to the largest part of the split, the lower to the least with one block more.
    low = max([max([stop - start for start, stop in pairwise(starts)]), -(-starts[-1] // num_parts)])
    high = starts[-1]
    while low < high:
        middle = (low + high) // 2
        parts, largest, following = _parts_needed(starts, held, middle, room)
        if parts <= num_parts:
            high = max(low, largest)
        else:
            low = following
    return low


def _parts_needed(starts: Sequence[int], held: Sequence[int], limit: int, room: float) -> tuple[float, int, int]:
    """(Parts of at most `limit` and `room`, cost of the largest, least limit beyond `limit` that cuts another way)."""
    parts, begin, largest, following = 1, 0, 0, starts[-1]
    for stop in range(1, len(starts)):
        # A single block over the limit cannot be placed by any cut.
        if held[stop] - held[stop - 1] > room:
            return math.inf, largest, following
        cost = starts[stop] - starts[begin]
        if cost > limit or held[stop] - held[begin] > room:
            if cost > limit:
                following = min(following, cost)
            parts, begin = parts + 1, stop - 1
            cost = starts[stop] - starts[begin]
        largest = max(largest, cost)
    return parts, largest, following


def _cost(blocks: Sequence[BlockSpec], index: int, scores: int) -> BlockCost:
    block = blocks[index]
    # Each element of a matrix is one multiplication per token.
    products = sum(block.active(param) for param in block.params if _is_product(param, index, len(blocks)))
    # A tied head multiplies by the table that it is tied to; a layer that reads ahead looks up in it.
    for owner in () if block.operations.reads_ahead else block.tied_to:
        products += sum(param.numel for param in blocks[owner].params if is_table(param))
    if block.computes is Computes.LOGITS:
        products *= block.operations.widths[0]
    # A layer is known by its row-cut dims (heads or the inner MLP size); embedding and head have none.
    attends = any(CUT_BY.get(name) == ("rows",) for param in block.params for name, _ in param.dims)
    return BlockCost(products, scores if attends else 0)


def _is_product(param: ParamSpec, index: int, num_blocks: int) -> bool:
    # The last block's table is the output matrix, which is a product; any other table is only indexed.
    looked_up = is_table(param) and index < num_blocks - 1
    return param.is_matrix and not looked_up and (not param.dims or param.dims[0][0] != "positions")
