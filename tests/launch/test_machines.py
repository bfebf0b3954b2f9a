"""Ranks of a machine are neighbours, tiers of a machine lie on one, and all ranks run the same code."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from terrace.base.errors import ConfigError
from terrace.launch.machines import (
    Facts,
    arrange,
    check_same_code,
    check_tiers,
    files_digest,
    machine_map,
    names_of,
    other_configurations,
)

SAME = Facts("a", versions={"torch": "2.13", "Terrace's files": "0123"}, sections={"train": "1", "data": "2"})
TIERS = [("package", 2), ("node", 2), ("system", 2)]


@pytest.mark.parametrize("seed", range(20))
def test_a_machines_ranks_become_neighbours_in_their_order(seed: int) -> None:
    generator = random.Random(seed)
    hosts = [f"h{generator.randrange(1 + seed % 5)}" for _ in range(generator.randint(1, 24))]
    new = arrange(hosts)
    assert sorted(new) == list(range(len(hosts)))
    assert new[0] == 0
    placed = [hosts[new.index(rank)] for rank in range(len(hosts))]
    changes = sum(a != b for a, b in pairwise(placed))
    assert changes == len(set(hosts)) - 1
    for host in set(hosts):
        own = [new[rank] for rank, other in enumerate(hosts) if other == host]
        assert own == sorted(own)


def test_cyclic_ranks_are_put_in_order() -> None:
    assert arrange(["a", "b", "a", "b"]) == [0, 2, 1, 3]
    assert arrange(["a", "a", "b", "b"]) == [0, 1, 2, 3]
    assert machine_map(["a", "a", "b", "b"], [0, 2, 1, 3]) == (
        "2 machines: ranks 0-1 on a (started as 0, 2), 2-3 on b (started as 1, 3)"
    )
    assert machine_map([f"h{i // 8}" for i in range(96)]).endswith(", ..., 88-95 on h11")


def test_ranks_of_a_numa_node_become_neighbours() -> None:
    assert arrange(["a"] * 4, [1, 0, 1, 0]) == [0, 2, 1, 3]
    assert arrange(["a", "b", "a", "b"], [0, 1, 1, 0]) == [0, 2, 1, 3]
    assert arrange(["a"] * 4, [-1] * 4) == [0, 1, 2, 3]


def test_machines_are_told_apart_by_their_kernels() -> None:
    """Two images of one name are two machines; two containers of one machine are one."""
    named = [Facts("localhost", "x"), Facts("localhost", "y"), Facts("localhost", "x")]
    assert names_of(named) == (["localhost", "localhost (2)", "localhost"], ["localhost", "localhost (2)", "localhost"])
    pods = [Facts("pod-0", "x"), Facts("pod-1", "x"), Facts("pod-2", "y")]
    assert names_of(pods) == (["pod-0", "pod-1", "pod-2"], ["pod-0", "pod-0", "pod-2"])
    assert names_of([Facts("a"), Facts("b"), Facts("a")])[1] == ["a", "b", "a"]


def test_a_tier_of_a_machine_lies_on_one_machine() -> None:
    check_tiers(["a"] * 8, TIERS)  # a single machine may stand for any cluster
    check_tiers(["a"] * 4 + ["b"] * 4, TIERS)
    check_tiers(["a"] * 8 + ["b"] * 8, [("node", 4), ("system", 4)])
    check_tiers(["a", "b"], [("wide", 2)])  # no tier is said to be a machine
    with pytest.raises(ConfigError, match=r"'node' joins 4 ranks .* ranks 0 to 3 are on a and b"):
        check_tiers(["a", "a", "b", "b", "c", "c", "d", "d"], TIERS)
    with pytest.raises(ConfigError, match=r"'package' joins 2 .* ranks 2 to 3 are on a and b"):
        check_tiers(["a"] * 3 + ["b"] * 5, TIERS)
    with pytest.raises(ConfigError, match="'tray'"):
        check_tiers(["a", "b"] * 4, [("tray", 2), ("rack", 4)])


def test_other_code_on_a_rank_is_named() -> None:
    check_same_code([SAME] * 3)
    other = replace(SAME, host="b", versions={**SAME.versions, "torch": "2.12"})
    with pytest.raises(ConfigError, match=r"ranks 1, 3 on b would run torch 2.12, and rank 0 on a runs 2.13"):
        check_same_code([SAME, other, SAME, other])
    with pytest.raises(ConfigError, match="Terrace's files none"):
        check_same_code([SAME, replace(SAME, versions={"torch": "2.13"})])
    assert len(files_digest()) == 12
    assert files_digest() == files_digest()


def test_two_ranks_on_one_device_are_named() -> None:
    devices = [replace(SAME, device="GPU-1"), replace(SAME, device="GPU-2"), replace(SAME, device="GPU-1")]
    check_same_code([*devices[:2], replace(devices[2], host="b")])
    with pytest.raises(ConfigError, match="rank 0 and rank 2 on a would share the device GPU-1"):
        check_same_code(devices)


def test_other_configurations_are_said() -> None:
    other = replace(SAME, sections={"train": "9", "data": "2", "lora": "3"})
    assert other_configurations([SAME, SAME]) == []
    assert other_configurations([SAME, other, SAME, other]) == [
        "ranks 1, 3 started with other values in [lora], [train]; rank 0's are used"
    ]
