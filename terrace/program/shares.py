"""Finds the best split of blocks into virtual stages, and estimates costs of blocks without known kernels.

Costs are the times of a block's passes if the model is known (terrace.simulate.step). Blocks that only declare
parameters are weighted by multiplications per token in a forward:

    the elements of a block's matrices that a token meets, tied ones included, and S H for causal attention over S
    tokens

(2 FLOPs per element, and 4 S H / 2 for scores and values). An embedding look-up costs nothing. The split minimises the
slowest virtual stage while every stage's model state fits its share of device memory; ties are broken by the sum of
squares, which evens out the other stages. If nothing fits, the program's verification reports the lack of memory.
"""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from terrace.model.params import ParamSpec
from terrace.model.spec import BlockSpec
from terrace.plan.dims import CUT_BY, hidden_size, is_table


class BlockCost(NamedTuple):
    """Multiplications per token of a block's forward: of weights, and of attention's scores and values."""

    products: int
    scores: int


def block_costs(blocks: Sequence[BlockSpec], sequence: int) -> list[BlockCost]:
    """The cost of every block."""
    hidden = hidden_size(blocks)
    return [_cost(blocks, index, sequence * hidden) for index in range(len(blocks))]


def virtual_costs(blocks: Sequence[BlockSpec], sequence: int) -> list[int]:
    """The weight of every block for `share`."""
    return [sum(cost) for cost in block_costs(blocks, sequence)]


def share(costs: Sequence[int], num_parts: int, sizes: Sequence[int] = (), room: float = math.inf) -> list[range]:
    """Split blocks into `num_parts` consecutive non-empty ranges with costs as even as possible.

    Each range has at most `room` of `sizes`, if that is possible. Worst case: quadratic in the number of blocks.
    """
    starts = [0, *accumulate(costs)]
    held = [0, *accumulate(sizes or [0] * len(costs))]
    # Memory cannot be kept at all: balance time alone, and let the memory check name the shortage.
    if _parts_needed(starts, held, starts[-1], room) > num_parts:
        room = math.inf
    # First the bottleneck is minimised; below, the sum of squares evens out the other parts.
    limit = _least_limit(starts, held, room, num_parts)
    best: list[float] = [0.0] + [math.inf] * len(costs)  # sum of squares of the parts that end at each block
    cuts: list[list[int]] = []
    for part in range(num_parts):
        ends, before = [math.inf] * (len(costs) + 1), [0] * (len(costs) + 1)
        # Leave at least one block for each part still to come.
        for stop in range(part + 1, len(costs) - (num_parts - part - 1) + 1):
            # Parts grow as start falls, so the first one over a limit ends the search.
            for start in range(stop - 1, part - 1, -1):
                size = starts[stop] - starts[start]
                if size > limit or held[stop] - held[start] > room:
                    break
                # Floats: only the comparison matters, and exact integers of this size are slow.
                found = best[start] + float(size) ** 2
                if found < ends[stop]:
                    ends[stop], before[stop] = found, start
        best = ends
        cuts.append(before)
    # Walk the recorded cuts back from the last block.
    parts, stop = [], len(costs)
    for before in reversed(cuts):
        parts.append(range(before[stop], stop))
        stop = before[stop]
    return parts[::-1]


def _least_limit(starts: Sequence[int], held: Sequence[int], room: float, num_parts: int) -> int:
    # Binary search: a larger limit never needs more parts.
    low, high = max(stop - start for start, stop in pairwise(starts)), starts[-1]
    while low < high:
        middle = (low + high) // 2
        if _parts_needed(starts, held, middle, room) <= num_parts:
            high = middle
        else:
            low = middle + 1
    return low


def _parts_needed(starts: Sequence[int], held: Sequence[int], limit: int, room: float) -> float:
    parts, begin = 1, 0
    for stop in range(1, len(starts)):
        # A single block over the limit cannot be placed by any cut.
        if held[stop] - held[stop - 1] > room:
            return math.inf
        if starts[stop] - starts[begin] > limit or held[stop] - held[begin] > room:
            parts, begin = parts + 1, stop - 1
    return parts


def _cost(blocks: Sequence[BlockSpec], index: int, scores: int) -> BlockCost:
    block = blocks[index]
    # Each element of a matrix is one multiplication per token.
    products = sum(block.active(param) for param in block.params if _is_product(param, index, len(blocks)))
    # A tied head multiplies by the table that it is tied to.
    for owner in block.tied_to:
        products += sum(param.numel for param in blocks[owner].params if is_table(param))
    # A layer is known by its row-cut dims (heads or the inner MLP size); embedding and head have none.
    attends = any(CUT_BY.get(name) == ("rows",) for param in block.params for name, _ in param.dims)
    return BlockCost(products, scores if attends else 0)


def _is_product(param: ParamSpec, index: int, num_blocks: int) -> bool:
    # The last block's table is the output matrix, which is a product; any other table is only indexed.
    looked_up = is_table(param) and index < num_blocks - 1
    return param.is_matrix and not looked_up and (not param.dims or param.dims[0][0] != "positions")
