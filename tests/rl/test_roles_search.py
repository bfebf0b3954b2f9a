"""The search for placements against the price of every one, and its findings."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from terrace.base.errors import PlanError
from terrace.cluster.cluster import Cluster
from terrace.model.config import ModelConfig
from terrace.rl.placement import search
from terrace.rl.placement.choices import Choices
from terrace.rl.placement.costs import Costs
from terrace.rl.placement.dataflow import Dataflow, Role, ppo
from terrace.rl.placement.generation import rows_of
from terrace.rl.placement.placement import PlacedRole, Pool, RolePlacement, price
from terrace.rl.placement.places import Places
from terrace.rl.placement.pools import first_ranks, partitions, pool_cluster, pool_sizes
from terrace.rl.placement.search import find, find_among
from tests.support.calls import check_calls, counted
from tests.support.dataflows import llama, nodes, ppo_flow, small
from tests.support.nightly import nightly


def cluster_of(inner: int, outer: int, memory_bytes: float) -> Cluster:
    whole = nodes(outer)
    device = replace(whole.device, memory_bytes=memory_bytes, headroom="0%")
    return replace(whole, device=device, tiers=(replace(whole.tiers[0], size=inner), whole.tiers[1]))


def random_case(seed: int, ahead: bool) -> tuple[Dataflow, Cluster]:
    """Three or four roles of two sizes on up to six devices, whose memory is scarce or not."""
    of = random.Random(seed)
    models = [llama(256, 4, 4, 768), llama(512, 6, 8, 1408)]
    actor, critic, reward = (of.choice(models) for _ in range(3))
    found = list(ppo(actor, of.choice([critic, None]), reward, standalone=of.random() < 0.3 or ahead))
    del found[4:]
    flow = Dataflow(
        roles=tuple(found),
        prompts=of.choice([12, 24]),
        samples=of.choice([1, 4]),
        prompt_tokens=of.choice([128, 512]),
        response_tokens=of.choice([128, 1024]),
        updates=of.choice([1, 2]),
        ahead=ahead,
    )
    return flow, cluster_of(2, of.choice([1, 2, 3]), of.choice([3.2e9, 4e9, 40e9]))


def every_placement(flow: Dataflow, cluster: Cluster, choices: Choices) -> Iterator[RolePlacement]:
    """Labels instead of partitions, products instead of allocations: no code of the search."""
    count, seen = len(flow.roles), set[tuple[int, ...]]()
    for labels in product(range(count), repeat=count):
        named = tuple(list(dict.fromkeys(labels)).index(label) for label in labels)
        if named in seen:
            continue
        seen.add(named)
        for sizes in product(pool_sizes(cluster), repeat=max(named) + 1):
            if sum(sizes) != cluster.world_size or first_ranks(cluster, sizes) is None:
                continue
            ways = [
                placed_ways(choices, role, pool_cluster(cluster, sizes[at]))
                for role, at in zip(flow.roles, named, strict=True)
            ]
            for each in product(*ways):
                members = [
                    [role for role, at in zip(each, named, strict=True) if at == pool] for pool in range(len(sizes))
                ]
                yield RolePlacement(
                    pools=tuple(Pool(devices=size, roles=tuple(own)) for size, own in zip(sizes, members, strict=True))
                )


def placed_ways(choices: Choices, role: Role, here: Cluster) -> list[PlacedRole]:
    plans = [cost.plan for cost in choices.of(role, here)] if role.trains or role.scores else [None]
    rows = rows_of(here, role.model) if role.generates else [0]
    return [PlacedRole(name=role.name, plan=plan, rows=each) for plan, each in product(plans, rows)]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("seed", [2, *nightly(0, 1, *range(3, 16))])
def test_the_search_finds_what_pricing_everything_finds(seed: int, ahead: bool) -> None:
    flow, cluster = random_case(seed, ahead)
    costs = Costs(flow)
    choices, least_s = Choices(costs), float("inf")
    for placement in every_placement(flow, cluster, choices):
        if ahead and any(len(pool.roles) > 1 and any(role.rows for role in pool.roles) for pool in placement.pools):
            continue  # a generator that draws ahead is alone
        report = price(flow, placement, cluster, costs)
        least_s = min(least_s, report.seconds if report.fits else least_s)
    if least_s == float("inf"):
        with pytest.raises(PlanError, match="no room"):
            find(flow, cluster)
        return
    found = find(flow, cluster)
    assert found.best[0].report.fits
    assert found.best[0].seconds == pytest.approx(least_s, rel=1e-9)
    seconds = [each.seconds for each in found.best]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("seed", [4, *nightly(*range(4), *range(5, 20))])
def test_bounds_of_roles_never_exceed_their_plans(seed: int) -> None:
    """Seconds of training and of scores, which frozen roles alone have, and bytes of states."""
    flow, cluster = random_case(seed, False)
    choices, tried = Choices(Costs(flow)), 0
    for role in (role for role in flow.roles if role.trains or role.scores):
        for here in (pool_cluster(cluster, size) for size in pool_sizes(cluster)):
            score_s, train_s = choices.least_seconds(role, here)
            assert (score_s > 0, train_s > 0) == (role.scores, role.trains)
            for cost in choices.of(role, here):
                assert score_s <= cost.score_s
                assert train_s <= cost.train_s
                assert choices.least_bytes(role) <= here.world_size * cost.held_bytes
                tried += 1
    assert tried > 0


@pytest.mark.parametrize(("scalar_head", "tied"), [(True, False), (False, True), (False, False)])
def test_a_bound_on_scores_is_below_every_plan_with_a_large_vocabulary(scalar_head: bool, tied: bool) -> None:
    model = replace(llama(2048, 8, 16, 5632), vocab_size=128256, scalar_head=scalar_head, tied_embeddings=tied)
    flow = Dataflow(
        roles=(*ppo(small()), Role(name="reward", model=model, scores=True)),
        prompts=64,
        prompt_tokens=256,
        response_tokens=256,
    )
    choices, role, here = Choices(Costs(flow)), flow.role("reward"), nodes(1)
    bound_s, best_s = choices.least_seconds(role, here)[0], min(cost.score_s for cost in choices.of(role, here))
    assert 0.3 * best_s < bound_s <= best_s


def test_partitions_are_all_ways_to_group() -> None:
    assert [len(list(partitions(count))) for count in range(1, 6)] == [1, 2, 5, 15, 52]  # Bell's numbers


@pytest.mark.parametrize(("num_nodes", "num_calls"), nightly((16, 2_035_400), (128, 11_040_000)))
def test_five_roles_on_128_devices_and_more_call_few_functions(num_nodes: int, num_calls: int) -> None:
    """About a second for 128 devices, and six for 1,024."""
    flow = five_roles(llama())
    with counted() as calls:
        found = find(flow, nodes(num_nodes))
    check_calls(calls.num, num_calls)
    assert found.best[0].report.fits
    assert {role.name for role in found.best[0].report.roles} == {role.name for role in flow.roles}


def five_roles(model: ModelConfig) -> Dataflow:
    return Dataflow(
        roles=ppo(model, model, model, model)[:5],
        prompts=1024,
        prompt_tokens=1024,
        response_tokens=1024,
        updates=8,
    )


def test_five_pools_on_many_devices_are_shared_out_without_trying_all() -> None:
    places = Places(five_roles(small()), nodes(16))
    found = find_among(places, [[(0,), (1,), (2,), (3,), (4,)]], 1)
    assert found.num_tried < 700  # in part or whole; 16 nodes have 1,365 whole ways
    assert sum(pool.devices for pool in found.best[0].placement.pools) == 128


def test_too_many_ways_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "MOST_TRIED", 3)
    with pytest.raises(PlanError, match=r"more than 3 placements that may be the fastest .*: search fewer devices"):
        find(ppo_flow(small()), nodes(1))


def test_what_has_no_room_is_one_line() -> None:
    with pytest.raises(PlanError, match=r"role 'actor' has no room on the 8 devices .* even alone"):
        find(ppo_flow(llama(8192, 80, 64, 28672)), nodes(1))
    tight = cluster_of(1, 2, 5e9)
    with pytest.raises(PlanError, match="have no room on the 2 devices"):
        find(ppo_flow(small()), tight)
