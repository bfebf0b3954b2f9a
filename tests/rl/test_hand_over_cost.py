"""Predicted seconds and bytes of a hand-over, against links worked out by hand and against other ways to do it."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from terrace.cluster.cluster import Cluster, Tier
from terrace.plan.plan import Plan
from terrace.rl.hand_over.moves import crossing
from terrace.rl.hand_over.program import hand_over_programs
from terrace.rl.hand_over.seconds import HandOverCost, predict_hand_over
from terrace.rl.hand_over.transition import Transition
from terrace.simulate.links import exchange_tiers
from tests.support.hand_overs import mlp, transition_of
from tests.support.nightly import nightly
from tests.support.toys import cluster_of

FAST, SLOW = 1000.0, 10.0  # bytes/s
LATENCY_S = 0.5


def links(*sizes: int) -> Cluster:
    """A cluster whose innermost tier is fast and the others slow."""
    cluster = cluster_of(*sizes)
    tiers = tuple(
        Tier(name=tier.name, size=tier.size, bandwidth_bytes_per_s=SLOW if index else FAST, latency_s=LATENCY_S)
        for index, tier in enumerate(cluster.tiers)
    )
    return replace(cluster, tiers=tiers)


def plan_of(state: str, **mapping: dict[str, int]) -> Plan:
    return Plan(params=state, grads=state, optimizer=state, mapping=mapping)


def test_a_tier_takes_its_latency_and_the_bytes_of_a_rank() -> None:
    """Two blocks of 48 elements in shards of a quarter, to whole replicas, over a slow tier and a fast one."""
    cluster, blocks = links(2, 2), [mlp(8)] * 2
    cost = predict_hand_over(cluster, transition_of(cluster, plan_of("node"), blocks, rows=1))
    # The slow tier brings every rank a quarter, and the fast one half, of the first block while the slow one has the
    # second.
    slow_s, fast_s = (LATENCY_S + each + cluster.device.kernels.launch_s for each in (48 / SLOW, 96 / FAST))
    assert cost.seconds == pytest.approx(2 * slow_s + fast_s)
    assert cost.sent_bytes == {"package": 2 * 4 * 96, "node": 2 * 4 * 48}
    assert cost.received_bytes == 2 * (48 + 96)


def test_stages_send_their_blocks_at_the_same_time() -> None:
    """Two stages of two ranks each have every other block of 192 bytes, and every rank needs all."""
    cluster = links(2, 2)
    plan = plan_of("device", node={"pipeline": 2})
    transition = transition_of(cluster, plan, [mlp(8)] * 4, 1)
    assert transition.rounds == ((0, 1), (2, 3))
    # Each rank sends half of its block to the other stage, and half of the other's block beside it.
    slow_s, fast_s = (LATENCY_S + each + cluster.device.kernels.launch_s for each in (96 / SLOW, 96 / FAST))
    assert predict_hand_over(cluster, transition).seconds == pytest.approx(2 * slow_s + fast_s)


def test_a_rank_waits_for_those_that_it_exchanges_with() -> None:
    """One of three ranks has all of a block, of which the others need half each: one message, then the next block."""
    cluster, block = links(3), mlp(6)
    parts = {param.name: [tuple((0, size) for size in param.shape)] for param in block.params}
    half = {name: [((0, 3), box[0][1])] if name == "mlp.up" else [(box[0][0], (0, 3))] for name, box in parts.items()}
    plain = transition_of(cluster, plan_of("device"), [block] * 2, 1)
    transition = replace(
        plain, holds={0: [parts, {}, {}]}, slices={0: [{}, half, half]}, replicas=((0, 1, 2),), rounds=((0,), (1,))
    )
    cost = predict_hand_over(cluster, transition)
    # Both halves leave the first rank one after the other, so the link of a receiver is half idle.
    both_s = LATENCY_S + 2 * 72 / FAST + cluster.device.kernels.launch_s
    assert cost.seconds == pytest.approx(2 * both_s)
    assert (cost.received_bytes, cost.sent_bytes) == (2 * 72, {"package": 2 * 144})


def test_slices_that_ranks_have_cost_nothing() -> None:
    cluster = links(2, 2)
    cost = predict_hand_over(cluster, transition_of(cluster, plan_of("device", package={"tensor": 2}), [mlp(8)], 2))
    assert cost.seconds == cost.received_bytes == 0
    assert cost.sent_bytes == {"package": 0, "node": 0}


@pytest.mark.parametrize("state", ["package", "node"])
def test_bytes_are_those_of_the_cells(state: str) -> None:
    cluster = links(4, 2)
    transition = transition_of(cluster, plan_of(state), [mlp(12, norm=True)] * 3, rows=2)
    cost = predict_hand_over(cluster, transition)
    elements = [3 * each for each in crossing(transition.cells[0], transition.tiers)]
    assert list(cost.sent_bytes.values()) == [4 * each for each in elements]


def test_neighbours_and_whole_models_cost_more() -> None:
    """HybridFlow's three ways on 2 x 4 tensor ranks: its grouping, neighbours as replicas, everybody gathers all."""
    cluster, blocks = links(4, 2), [mlp(32)] * 4
    plan = plan_of("device", package={"tensor": 4})
    strided = transition_of(cluster, plan, blocks, rows=2)
    neighbours = replace(strided, replicas=tuple((first, first + 1) for first in range(0, 8, 2)))
    ways = (strided, neighbours, transition_of(cluster, plan, blocks, rows=1))
    costs = [predict_hand_over(cluster, way) for way in ways]
    model_bytes = 4 * 4 * 2 * 32 * 3
    # The rank of neighbours that has nothing of its slice receives all of it.
    assert [cost.received_bytes for cost in costs] == [model_bytes // 4, model_bytes // 2, 3 * model_bytes // 4]
    assert costs[0].seconds < costs[1].seconds < costs[2].seconds
    assert all(cost.sent_bytes["node"] == 0 for cost in costs)


def played_by_every_rank(cluster: Cluster, transition: Transition) -> HandOverCost:
    """The cost from the definition: all programs side by side, every rank with its own times."""
    programs = hand_over_programs(cluster, transition)
    free, done = dict[tuple[int, int], float](), dict[tuple[int, tuple[int, ...]], float]()
    received = [0] * len(programs)
    for position, (blocks, tier) in enumerate(programs[0].instructions):
        ends = {program.rank: program.ends(position) for program in programs if program.moves[position]}
        ready = {rank: max(free.get((rank, tier), 0.0), done.get((rank, blocks), 0.0)) for rank in ends}
        after = {}
        for rank, (leaving, coming) in ends.items():
            most = max(sum(leaving.values()), sum(coming.values()))
            seconds = exchange_tiers(cluster, transition.tiers, [(tier, most)])
            after[rank] = max(ready[each] for each in (rank, *leaving, *coming)) + sum(seconds.values())
            received[rank] += sum(coming.values())
        for rank, (leaving, coming) in ends.items():
            free[rank, tier] = done[rank, blocks] = max(after[each] for each in (rank, *leaving, *coming))
    totals = Counter[str]()
    for program in programs:
        for (_, name), num_bytes in program.sent_bytes.items():
            totals[name] += num_bytes
    sent = {tier.name: totals[tier.name] for tier in cluster.tiers}
    return HandOverCost(seconds=max(done.values(), default=0.0), sent_bytes=sent, received_bytes=max(received))


@pytest.mark.parametrize("seed", [*range(12), *nightly(*range(12, 100))])
def test_one_rank_of_each_group_costs_what_all_ranks_do(seed: int) -> None:
    """Drawn pools: tensor ranks, stages, states on any tier, replicas, blocks that do not divide evenly."""
    of = random.Random(seed)
    sizes = of.choice([(2, 2), (4, 2), (2, 4), (2, 3), (4, 3), (2, 2, 2), (2, 2, 3)])
    cluster = links(*sizes)
    tensor, stages = of.choice([1, 2, sizes[0]]), of.choice([1, sizes[-1]])
    mapping = {"package": {"tensor": tensor, "data": sizes[0] // tensor}} if tensor > 1 else {}
    mapping |= {cluster.tiers[-1].name: {"pipeline": stages}} if stages > 1 else {}
    state = of.choice(["device", *(tier.name for tier in cluster.tiers)])
    kinds = [mlp(of.choice([12, 24]), norm=of.random() < 0.5) for _ in range(2)]
    blocks = [of.choice(kinds) for _ in range(max(stages, of.choice([2, 5])))]
    transition = transition_of(cluster, plan_of(state, **mapping), blocks, of.choice([1, 2]))
    found, expected = predict_hand_over(cluster, transition), played_by_every_rank(cluster, transition)
    assert found.seconds == pytest.approx(expected.seconds, rel=1e-12, abs=0)
    assert (found.sent_bytes, found.received_bytes) == (expected.sent_bytes, expected.received_bytes)
