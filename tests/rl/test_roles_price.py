"""The price of an iteration: its stages, its roles one by one, memory of pools, and refusals."""

from collections import Counter
from dataclasses import replace

import pytest

from terrace.base.boxes import numel
from terrace.base.errors import PlanError, TerraceError
from terrace.model.block_operations import layer_operations
from terrace.planner.scaling import evaluate_plan
from terrace.rl.hand_over.moves import cells_of, moves_of
from terrace.rl.placement.between_pools import between_pools
from terrace.rl.placement.costs import Costs
from terrace.rl.placement.dataflow import Dataflow, Role, ppo
from terrace.rl.placement.placement import PlacedRole, Pool, RolePlacement, price
from terrace.rl.placement.pools import first_ranks, pool_cluster, pool_sizes
from terrace.simulate.footprint import work_of
from terrace.simulate.layers import seconds_of
from tests.support.dataflows import apart, llama, nodes, plan, ppo_flow, small, together

FLOW, TWO = ppo_flow(small()), nodes(2)


def test_a_stage_is_the_slowest_pool_and_a_pool_the_sum_of_its_roles() -> None:
    costs, own = Costs(FLOW), plan(place="node")
    whole, parted = price(FLOW, together(16, own), TWO, costs), price(FLOW, apart(8, 8, own), TWO, costs)
    of = {role.name: role.seconds for role in parted.roles}
    pools = (("actor", "reference"), ("critic", "reward"))
    for stage in ("generate", "prepare", "train"):
        sums = [sum(of[name].get(stage, 0.0) for name in names) for names in pools]
        assert parted.stages[stage] == pytest.approx(max(sums), rel=1e-12)
        alone = sum(role.seconds.get(stage, 0.0) for role in whole.roles)
        assert whole.stages[stage] == pytest.approx(alone, rel=1e-12)
    assert {name: set(seconds) for name, seconds in of.items()} == {
        "actor": {"generate", "train"},
        "reference": {"prepare"},
        "critic": {"prepare", "train"},
        "reward": {"prepare"},
    }
    assert whole.seconds == pytest.approx(sum(whole.stages.values()))
    assert whole.tokens_per_s == pytest.approx(64 * 512 / whole.seconds)


def test_training_is_the_predicted_step_of_every_update() -> None:
    flow, own = replace(FLOW, epochs=3), plan(tensor=2)
    costs = Costs(flow)
    role = flow.role("actor")
    expected = evaluate_plan(costs.task(role, TWO), own)
    found = costs.of(role, TWO, own)
    assert found.train_s == pytest.approx(3 * 4 * expected.step_s)
    tensors = (
        sum(expected.memory_bytes.values()) - expected.memory_bytes["context"] - expected.memory_bytes["allocator"]
    )
    assert found.held_bytes + found.working_bytes == tensors


def test_scores_are_forwards_of_all_responses() -> None:
    own = plan(micro_batch=2)
    role = FLOW.role("reference")
    work = work_of(TWO, own, layer_operations(role.model), FLOW.sequence)
    each = sum(seconds_of(TWO.device, work, block).forward_s for block in role.blocks)
    # 64 responses on 16 ranks, two at a time.
    assert Costs(FLOW).of(role, TWO, own).score_s == pytest.approx(2 * each, rel=1e-2)


def test_a_pool_holds_what_all_its_roles_hold_and_needs_room_for_one_at_work() -> None:
    found = price(FLOW, together(16, plan(place="node")), TWO)
    pool, roles = found.pools[0], found.roles
    assert pool.held_bytes == sum(role.held_bytes for role in roles)
    assert pool.working_bytes == max(role.working_bytes for role in roles)
    assert pool.needed_bytes > pool.held_bytes + pool.working_bytes  # the process and the allocator
    assert found.fits
    assert not price(ppo_flow(llama()), together(8, plan()), nodes(1)).fits


def test_frozen_roles_hold_their_parameters_alone() -> None:
    costs = Costs(FLOW)
    reference, actor = FLOW.role("reference"), FLOW.role("actor")
    numel_of = sum(param.numel for block in reference.blocks for param in block.params)
    assert costs.of(reference, TWO, plan()).held_bytes == 2 * numel_of
    # Working copy, gradients, masters and two moments.
    assert costs.of(actor, TWO, plan()).held_bytes >= (2 + 4 + 12) * numel_of


@pytest.mark.parametrize(("rows", "target"), [(1, 8), (2, 8), (8, 8), (2, 16), (4, 4)])
def test_a_hand_over_between_pools_counts_what_its_moves_would(rows: int, target: int) -> None:
    """A source that holds all evenly, a model that is a line of elements: moves of `terrace.rl.hand_over.moves`."""
    cluster, source = nodes(4), 8 if target == 16 else 16
    flow = replace(FLOW, roles=ppo(small(), standalone=True))
    sizes = (source, target)
    firsts = first_ranks(cluster, sizes)
    assert firsts is not None
    size = 5040 * 16
    holds = [dict[str, list[tuple[tuple[int, int], ...]]]() for _ in range(32)]
    needs = [dict[str, list[tuple[tuple[int, int], ...]]]() for _ in range(32)]
    for index in range(source):
        holds[firsts[0] + index]["all"] = [((index * size // source, (index + 1) * size // source),)]
    for index in range(target):
        row = index % rows
        needs[firsts[1] + index]["all"] = [((row * size // rows, (row + 1) * size // rows),)]
    expected = Counter[int]()
    for move in moves_of(cells_of(holds, needs), (8, 4)):
        expected[move.tier] += numel(move.box)
    found = between_pools(cluster, (firsts[0], source), (firsts[1], target), rows, flow)
    total = 2 * sum(param.numel for block in flow.source.blocks for param in block.params)
    names = [tier.name for tier in cluster.tiers]
    for tier, name in enumerate(names):
        assert found.sent_bytes[name] / total == pytest.approx(expected[tier] / size, rel=1e-3)
    assert found.received_bytes == pytest.approx(total / rows, rel=1e-6)


def test_a_rollout_on_its_own_pool_gets_the_parameters_of_the_actor() -> None:
    flow, own = ppo_flow(small(), standalone=True), plan()
    pools = [
        Pool(devices=8, roles=(PlacedRole(name="rollout", rows=2),)),
        Pool(
            devices=8,
            roles=tuple(PlacedRole(name=name, plan=own) for name in ("actor", "reference", "critic", "reward")),
        ),
    ]
    found = price(flow, RolePlacement(pools=tuple(pools)), TWO)
    total = 2 * sum(param.numel for block in flow.source.blocks for param in block.params)
    assert found.sent_bytes["system"] == pytest.approx(total, rel=1e-6)
    assert found.stages["reshard"] > total / 8 / TWO.tiers[1].bandwidth_bytes_per_s
    assert set(found.roles[0].seconds) == {"generate"}


def test_pools_are_even_parts_of_a_tier() -> None:
    assert pool_sizes(nodes(3)) == (1, 2, 4, 8, 16, 24)
    assert [tier.size for tier in pool_cluster(nodes(3), 4).tiers] == [4, 1]
    assert [tier.size for tier in pool_cluster(nodes(3), 16).tiers] == [8, 2]
    assert first_ranks(nodes(3), (4, 16, 4)) == (16, 0, 20)


def _pool(devices: int, *roles: PlacedRole) -> RolePlacement:
    return RolePlacement(pools=(Pool(devices=devices, roles=roles),))


def _without_rows() -> RolePlacement:
    actor, *others = together(8, plan()).pools[0].roles
    return _pool(8, replace(actor, rows=0), *others)


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        (_pool(8, *together(8, plan()).pools[0].roles[:3]), "role 'reward' is on 0 pools"),
        (_pool(8, *together(8, plan()).pools[0].roles, PlacedRole(name="judge")), "no role 'judge'"),
        (together(6, plan()), "use 4, or 8"),
        (apart(16, 8, plan()), "do not lie side by side"),
        (together(8, plan(), rows=3), "rows = 3 do not divide the 8 devices"),
        (_without_rows(), "generates, so it needs rows"),
        (_pool(8, *(replace(role, plan=None) for role in together(8, plan()).pools[0].roles)), "needs a plan"),
    ],
)
def test_a_placement_that_cannot_be_is_one_line(placement: RolePlacement, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        price(FLOW, placement, TWO)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompts": 0}, "prompts = 0"),
        ({"updates": 5}, "updates = 5 do not divide the 64 responses"),
        ({"roles": (*FLOW.roles, FLOW.roles[1])}, "2 roles are called 'reference'"),
        ({"roles": FLOW.roles[1:]}, "one role of a dataflow generates, and here none"),
        ({"roles": (*FLOW.roles, Role(name="idle", model=small()))}, "role 'idle' does nothing"),
        ({"roles": (Role(name="rollout", model=small(), generates=True),)}, "needs `follows`"),
        (
            {"roles": (Role(name="rollout", model=small(), generates=True, follows="critic"), *FLOW.roles[1:])},
            "follows 'critic', which does not train a model like its own",
        ),
    ],
)
def test_a_dataflow_that_cannot_be_is_one_line(change: dict[str, object], words: str) -> None:
    fields = {"roles": FLOW.roles, "prompts": 64, "prompt_tokens": 256, "response_tokens": 256} | change
    with pytest.raises(TerraceError, match=words):
        Dataflow(**fields)  # type: ignore[arg-type]
