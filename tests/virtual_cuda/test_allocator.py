"""The model of the caching allocator: figures of torch's own rules, and what holds for any requests."""

from itertools import pairwise
from random import Random

import pytest

from tests.virtual_cuda.allocator import MIB, Allocator, Block

KIB = 1 << 10


def sizes(allocator: Allocator) -> tuple[int, int]:
    return allocator.allocated, allocator.reserved


@pytest.mark.parametrize(
    ("request_bytes", "allocated", "reserved", "expandable"),
    [
        (1, 512, 2 * MIB, 2 * MIB),
        (513, 1024, 2 * MIB, 2 * MIB),
        (MIB, MIB, 2 * MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB, 20 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB, 20 * MIB),
        (30 * MIB, 30 * MIB, 30 * MIB, 40 * MIB),
    ],
)
def test_a_first_request(request_bytes: int, allocated: int, reserved: int, expandable: int) -> None:
    for is_expandable, wanted in ((False, reserved), (True, expandable)):
        allocator = Allocator(expandable=is_expandable)
        allocator.allocate(request_bytes, 0)
        assert sizes(allocator) == (allocated, wanted)


def test_a_small_rest_of_a_large_block_is_not_split_off() -> None:
    allocator = Allocator(expandable=False)
    block = allocator.allocate(12 * MIB, 0)
    allocator.free(block)
    assert allocator.allocate(11 * MIB + 512 * KIB, 0).size == 12 * MIB


def test_fragments_need_another_segment_unless_segments_grow() -> None:
    """Freed 12 MiB cannot serve 14: a segment that ends with them grows by what is missing, in pages of 20."""
    for expandable, wanted in ((False, 26 * MIB), (True, 20 * MIB)):
        allocator = Allocator(expandable=expandable)
        allocator.free(allocator.allocate(12 * MIB, 0))
        allocator.allocate(14 * MIB, 0)
        assert sizes(allocator) == (14 * MIB, wanted)


def test_streams_have_pools_of_their_own() -> None:
    allocator = Allocator()
    allocator.free(allocator.allocate(MIB, 0))
    allocator.allocate(MIB, 1)
    assert sizes(allocator) == (MIB, 4 * MIB)


def test_neighbours_are_joined() -> None:
    allocator = Allocator(expandable=False)
    blocks = [allocator.allocate(5 * MIB, 0) for _ in range(4)]
    for index in (0, 2, 1):
        allocator.free(blocks[index])
    assert allocator.allocate(15 * MIB, 0).address == blocks[0].address
    assert allocator.reserved == 20 * MIB


@pytest.mark.parametrize("expandable", [False, True])
def test_blocks_never_overlap(expandable: bool) -> None:
    random, allocator, held = Random(0), Allocator(expandable=expandable), list[Block]()
    for _ in range(3000):
        if held and random.random() < 0.48:
            allocator.free(held.pop(random.randrange(len(held))))
        else:
            held.append(allocator.allocate(int(2 ** random.uniform(0, 25)), random.randrange(2)))
    places = sorted((each.address, each.address + each.size) for each in held)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(places))
    assert allocator.allocated == sum(each.size for each in held)
    assert allocator.allocated <= allocator.reserved
    for each in held:
        allocator.free(each)
    assert allocator.allocated == 0
    free = [size for pool in allocator._pools.values() for size, _ in pool.free]
    assert sum(free) == allocator.reserved, "all is free, and in as few pieces as there are segments"
    if expandable:
        assert len(free) == len(allocator._pools)
