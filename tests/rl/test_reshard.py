"""Parameters handed over among processes: every slice has the bits of the trained model, every byte is in the plan."""

from collections import Counter
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist

from terrace.base.errors import PlanError
from terrace.cluster.cluster import Cluster
from terrace.launch.start import LocalPool, World
from terrace.model.blocks import block_specs
from terrace.model.decoder import token_loss
from terrace.plan.keep import Keep
from terrace.plan.outer import Outer
from terrace.plan.plan import Plan
from terrace.plan.wire import FORMATS, MessageClass
from terrace.rl.hand_over.moves import crossing
from terrace.rl.hand_over.reshard import HandOver
from tests.support.generation import MODELS as LLAMAS
from tests.support.generation import make
from tests.support.nightly import nightly
from tests.support.parity import ADAMW, Case, engine_of, exact, wholes
from tests.support.pipelines import ALONE, OUTER, pipelined
from tests.support.toys import cluster_of

NUM_STEPS = 2  # the second hand-over finds what the first left
SIZES = (2, 2)
ROWS_INSIDE, ROWS_ON_BOTH = {"package": {"tensor": 2}}, {"package": {"tensor": 2}, "node": {"tensor": 2}}
WIDE = "wide llama, 2 kv heads"
THREE_LEVEL = replace(exact("three-level", cluster_of(*SIZES)), compute="fp32")
ON_HOST = Keep(optimizer="disk", update="host", piece=128, ring=3)
CASES = {
    "zero3": (SIZES, Case(exact("zero3", cluster_of(*SIZES)), model=WIDE)),
    "three levels, halves": (
        SIZES,
        Case(THREE_LEVEL, model=WIDE),
    ),
    "rows and shards": (SIZES, Case(exact("zero3", cluster_of(*SIZES), mapping=ROWS_INSIDE), model=WIDE)),
    "rows on both tiers": (SIZES, Case(exact("ddp", cluster_of(*SIZES), mapping=ROWS_ON_BOTH), model=WIDE)),
    "stages of shards": (SIZES, Case(pipelined("zero3", OUTER, "1f1b"), num_micros=3, model="deep llama tied")),
    "interleaved stages": ((4,), Case(pipelined("ddp", ALONE, "interleaved:2"), num_micros=4, model="deep gpt2")),
    "updates on the host": (SIZES, Case(exact("zero3", cluster_of(*SIZES), keep=ON_HOST), model=WIDE)),
    "a frozen table": (SIZES, Case(exact("zero3", cluster_of(*SIZES)), model="llama, frozen table")),
    "experts": (SIZES, Case(exact("zero3", cluster_of(*SIZES)), model="wide experts")),
}


def handed_over(
    world: World, cluster: Cluster, case: Case, rows: int, source: Literal["params", "optimizer"] = "params"
) -> tuple[list[str], Counter[str], dict[str, int]]:
    """Parameters that are not the slice of the trained ones; bytes of hand-overs that this rank sent, that all send."""
    engine = engine_of(world, cluster, case)
    hand_over = HandOver(engine, rows, source=source)
    for step in range(NUM_STEPS):
        engine.step(case.batches(engine, case, step), ADAMW.lr)
        found = hand_over.run()
    engine.check_bytes()
    sent = Counter[str]()
    for (message, tier), num_bytes in engine.comm.ledger.total().items():
        sent[tier] += num_bytes if message is MessageClass.RESHARD else 0
    engine.state.gather(engine.comm.collectives)
    trained, wrong = wholes(engine), list[str]()
    transition = hand_over.transition
    for block, slices in enumerate(found):
        need = transition.needs(block)[world.rank]
        assert slices.keys() == need.keys()
        for name, (box,) in need.items():
            wanted = trained[block][name][tuple(slice(*side) for side in box)]
            if not torch.equal(slices[name].double(), wanted):
                wrong.append(f"{block}.{name}")
    engine.close()
    totals = [crossing(transition.cells[first], transition.tiers) for first in transition.alike]
    size = FORMATS[case.plan.compute].element_bytes * NUM_STEPS
    tiers = [tier.name for tier in cluster.tiers]
    return wrong, sent, {tier: sum(own) * size for tier, own in zip(tiers, zip(*totals, strict=True), strict=True)}


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("zero3", 2),
        ("three levels, halves", 1),
        ("rows and shards", 2),
        ("rows on both tiers", 2),
        ("stages of shards", 1),
        *nightly(
            *(("zero3", rows) for rows in (1, 4)),
            ("three levels, halves", 2),
            *(("rows and shards", rows) for rows in (1, 4)),
            *(("rows on both tiers", rows) for rows in (1, 4)),
            *(("interleaved stages", rows) for rows in (1, 2)),
            *(("a frozen table", rows) for rows in (1, 2)),
            *(("experts", rows) for rows in (1, 2)),
        ),
    ],
)
def test_slices_have_the_bits_of_the_trained_model(pool: LocalPool, name: str, rows: int) -> None:
    sizes, case = CASES[name]
    cluster = cluster_of(*sizes)
    outcomes = pool.run(cluster.world_size, handed_over, cluster, case, rows, timeout_s=120.0)
    total = Counter[str]()
    for wrong, sent, _ in outcomes:
        assert not wrong
        total += sent
    for *_, declared in outcomes:
        assert total == Counter(declared)
    # With as many rows as in training, ranks have their slices.
    assert (sum(total.values()) == 0) == ((name, rows) == ("rows on both tiers", 4))


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("three levels, halves", 2),
        ("updates on the host", 2),
        *nightly(("zero3", 1), ("stages of shards", 2), ("a frozen table", 2)),
    ],
)
def test_masters_have_the_bits_of_the_working_copies(pool: LocalPool, name: str, rows: int) -> None:
    """Of which ranks hold less here: halves are summed as fp32, and their masters are fp64."""
    sizes, case = CASES[name]
    cluster = cluster_of(*sizes)
    outcomes = pool.run(cluster.world_size, handed_over, cluster, case, rows, "optimizer", timeout_s=120.0)
    assert not any(wrong for wrong, *_ in outcomes)
    assert sum((sent for _, sent, _ in outcomes), Counter[str]()) == Counter(outcomes[0][2])


TENSOR_PIPELINE = {
    "4 rows": ({"package": {"tensor": 2}, "node": {"tensor": 2}}, ""),
    "2 rows, 2 stages": ({"package": {"tensor": 2}, "node": {"pipeline": 2}}, "1f1b"),
}


# Sizes that four ranks divide: padding is in no slice.
EVEN = replace(LLAMAS["llama"], vocab_size=16, num_kv_heads=4, intermediate_size=16)


def lent(world: World, cluster: Cluster, case: Case, rows: int) -> tuple[list[int], list[int], int, int, bool]:
    """Bytes of parameters while slices are made, block by block: those there are, the blocks' own; then at the end, and
    those of the slices; whether training goes on as without a hand-over."""
    engines = [
        engine_of(world, cluster, case, make(EVEN), declared=block_specs(EVEN), objective=token_loss) for _ in range(2)
    ]
    engine, hand_over, plain = engines[0], HandOver(engines[0], rows), engines[1]
    slices_bytes, there, own = 0, list[int](), list[int]()

    def held_bytes() -> int:
        return sum(flat.shard.untyped_storage().nbytes() for flat in engine.state)

    split = hand_over._parts

    def watched(block: int) -> Any:
        nonlocal slices_bytes
        parts = split(block)
        slices_bytes += sum(value.untyped_storage().nbytes() for value in parts.slices.values())
        there.append(slices_bytes + held_bytes())
        own.append(sum(flat.shard.nbytes for flat in engine.state.flats.get(block, ())))
        return parts

    hand_over._parts = watched  # type: ignore[method-assign]
    for step in range(NUM_STEPS):
        for each in engines:
            each.step(case.batches(each, case, step), ADAMW.lr)
        if step == 0:
            hand_over.run(lend=True)
            at_end = slices_bytes + held_bytes()
    same = [torch.equal(one.shard, other.shard) for one, other in zip(engine.state, plain.state, strict=True)]
    for each in engines:
        each.check_bytes()
        each.close()
    return there, own, at_end, slices_bytes, all(same)


@pytest.mark.parametrize(
    ("name", "rows"), [("2 rows, 2 stages", 2), *nightly(*(("2 rows, 2 stages", 1), ("4 rows", 2), ("4 rows", 4)))]
)
def test_a_rank_that_lends_has_its_slices_alone(pool: LocalPool, name: str, rows: int) -> None:
    """HybridFlow's peak of parameters on tensor x pipeline ranks, M / g, in bytes of memory that is there."""
    mapping, schedule = TENSOR_PIPELINE[name]
    plan = exact("ddp", cluster_of(*SIZES), mapping=mapping, **({"schedule": schedule} if schedule else {}))
    case = Case(plan, num_micros=2)
    for there, own, at_end, slices_bytes, same in pool.run(4, lent, cluster_of(*SIZES), case, rows, timeout_s=120.0):
        assert at_end == slices_bytes
        assert same
        for block, num_bytes in enumerate(there):
            # Slices of this block and those before, working copies of this one and those behind.
            assert num_bytes <= slices_bytes + max(own)
            assert block or num_bytes >= sum(own)
        assert there[-1] == slices_bytes + own[-1]


def test_what_a_slice_does_not_hold_is_not_lent(pool: LocalPool) -> None:
    case = Case(exact("zero3", cluster_of(*SIZES)))
    for _, own, at_end, slices_bytes, same in pool.run(4, lent, cluster_of(*SIZES), case, 2, timeout_s=120.0):
        assert slices_bytes < at_end <= slices_bytes + sum(own)
        assert same


def failing(
    world: World, cluster: Cluster, case: Case, source: Literal["params", "optimizer"]
) -> tuple[int, int, list[bool]]:
    """Flat buffers with a refresh under way before a hand-over that lends, and as it makes slices; whether training
    goes on as without it, though it fails at the last block."""
    plain = engine_of(world, cluster, case)
    for step in range(NUM_STEPS):
        plain.step(case.batches(plain, case, step), ADAMW.lr)
    plain.drain()  # refreshes of two engines at once would meet in the groups of the world
    engine = engine_of(world, cluster, case)
    hand_over = HandOver(engine, 1, source=source)
    last, split, under_way = len(hand_over.transition.alike) - 1, hand_over._parts, list[int]()

    def fails(block: int) -> Any:
        under_way.append(len(engine.runner.parameters.refreshes))
        if block == last:
            raise RuntimeError("no memory")
        return split(block)

    hand_over._parts = fails  # type: ignore[method-assign]
    for step in range(NUM_STEPS):
        engine.step(case.batches(engine, case, step), ADAMW.lr)
        if step == 0:
            before = len(engine.runner.parameters.refreshes)
            with pytest.raises(RuntimeError, match="no memory"):
                hand_over.run(lend=True)
            assert any(not flat.shard.untyped_storage().nbytes() for flat in engine.state)
    engine.drain()
    same = [torch.equal(one.shard, other.shard) for one, other in zip(engine.state, plain.state, strict=True)]
    for each in (engine, plain):
        each.close()
    return before, max(under_way), same


@pytest.mark.parametrize("source", ["params", "optimizer"])
def test_what_is_lent_comes_back_after_a_failure_and_no_refresh_writes_to_it(pool: LocalPool, source: str) -> None:
    cluster = cluster_of(2)
    case = Case(exact("zero2", cluster), model=WIDE)
    for before, under_way, same in pool.run(2, failing, cluster, case, source, timeout_s=120.0):
        assert before
        assert not under_way
        assert all(same)


def joined(world: World, cluster: Cluster, case: Case) -> tuple[list[torch.device], int]:
    """Devices that the groups of a hand-over get as it is made on NCCL, and the number of its groups."""
    engine, devices, make = engine_of(world, cluster, case), list[torch.device](), dist.new_group

    def new_group(*, device_id: torch.device, **options: Any) -> dist.ProcessGroup:
        devices.append(device_id)
        made: dist.ProcessGroup = make(**options)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend", lambda *_: "nccl")
        patch.setattr(torch.accelerator, "current_device_index", lambda: world.rank)
        patch.setattr(dist, "new_group", new_group)
        hand_over = HandOver(engine, 1)
    engine.close()
    return devices, len(hand_over._groups)


def test_on_nccl_the_communicator_of_a_hand_over_is_made_with_its_group(pool: LocalPool) -> None:
    """Not all ranks have messages in its first call, in which all would have to take part."""
    cluster = cluster_of(2)
    case = Case(exact("zero3", cluster), model=WIDE)
    found = pool.run(2, joined, cluster, case, timeout_s=120.0)
    assert found == [([torch.device("cuda", rank)], 1) for rank in range(2)]


def refused(
    world: World, cluster: Cluster, case: Case, rows: int, source: Literal["params", "optimizer"] = "params"
) -> str:
    engine = engine_of(world, cluster, case)
    try:
        HandOver(engine, rows, source=source)
    except PlanError as error:
        return str(error)
    finally:
        engine.close()
    return "no error"


INSIDE = Plan(params="package", grads="package", optimizer="package", compute="fp64", master="fp64")
ISLANDS = replace(
    INSIDE,
    outer=Outer(tier="node", every=2),
)


@pytest.mark.parametrize(
    ("case", "rows", "said"),
    [
        (CASES["a frozen table"][1], 3, "tensor rows = 3 do not divide"),
        (Case(ISLANDS, model=WIDE), 4, "replicas of 4 tensor rows reach over islands of 2 ranks"),
        (Case(ISLANDS, model=WIDE), 2, "no error"),
    ],
)
def test_rows_that_nobody_can_have_are_refused(pool: LocalPool, case: Case, rows: int, said: str) -> None:
    cluster = cluster_of(*SIZES)
    found = pool.run(cluster.world_size, refused, cluster, case, rows, timeout_s=120.0)
    assert all(said in each for each in found), found


def test_masters_that_a_refresh_rounds_are_refused(pool: LocalPool) -> None:
    plan = replace(exact("zero2", cluster_of(*SIZES)), wire={"refresh": {"node": "fp32"}})
    case = Case(plan, model=WIDE)
    found = pool.run(4, refused, cluster_of(*SIZES), case, 2, "optimizer", timeout_s=120.0)
    assert all("refreshes travel as fp32 over node and parameters are fp64" in each for each in found), found
