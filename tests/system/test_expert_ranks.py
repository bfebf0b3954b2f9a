"""Experts on several ranks: the same numbers as one process, and the bytes that each batch declares."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from terrace.cluster.cluster import Cluster
from terrace.launch.start import LocalPool, World
from terrace.model.balance import BalanceConfig
from terrace.model.spec import freeze
from terrace.plan.plan import Plan
from terrace.program.instruction import Instruction, Op
from terrace.runtime.batch import Batch
from terrace.runtime.engine import Engine
from terrace.runtime.setup import Blocks, RankSetup, Workload
from tests.support.in_block import complaint, record_in_block
from tests.support.nightly import nightly
from tests.support.parity import Case, check, deviation, engine_of, exact, reference, run
from tests.support.toys import MODELS, SEQUENCE, cluster_of

pytestmark = pytest.mark.timeout(360)

MOVED = BalanceConfig(bias=0.05)  # in large steps, so that other experts are chosen
Table = Mapping[str, Mapping[str, int]]


def spread(cluster: Cluster, name: str, experts: Table, **changes: Any) -> Plan:
    return exact(name, cluster, experts=experts, **changes)


@pytest.mark.parametrize(
    "models",
    [("mixture, shared expert", "one of many experts"), *nightly((("experts", "experts in groups", "all experts"),))],
    ids=len,
)
def test_two_ranks_hold_different_experts(pool: LocalPool, models: tuple[str, ...]) -> None:
    cluster, table = cluster_of(2), {"package": {"expert": 2}}
    cases = [Case(spread(cluster, "zero3", table), num_micros=2, model=model) for model in models]
    check(pool, cluster, cases)


def test_a_rank_routes_no_token(pool: LocalPool) -> None:
    """All labels of the third row are ignored, so in the second micro-batch the first rank has nothing to send."""
    cluster, table = cluster_of(2), {"package": {"expert": 2}}
    models = [f"one scaled expert, {gate}" for gate in ("sigmoid", "softmax")]
    check(pool, cluster, [Case(spread(cluster, "zero3", table), num_micros=2, model=model) for model in models])


EIGHT: dict[str, Table] = {
    "everywhere": {"package": {"expert": 2}, "node": {"expert": 2}, "system": {"expert": 2}},
    "rows inside": {"package": {"rows": 2}, "system": {"expert": 2}},
    "rows twice": {"package": {"rows": 2}, "node": {"rows": 2}, "system": {"expert": 2}},
}


def test_a_factoring_of_eight(pool: LocalPool) -> None:
    """All others are in tests/system/test_expert_grid.py."""
    cluster = cluster_of(2, 2, 2)
    plan = spread(cluster, "three-level", EIGHT["rows twice"])
    check(pool, cluster, [Case(plan, num_micros=2, model="experts in groups", balance=MOVED)])


BESIDE: dict[str, dict[str, Any]] = {
    "stages": {"mapping": {"system": {"pipeline": 2}}, "experts": {"package": {"expert": 2}, "node": {"rows": 2}}},
    "zbv": {"mapping": {"node": {"pipeline": 2}}, "schedule": "zbv", "experts": {"system": {"expert": 2}}},
    "recomputed": {
        "recompute": ("block.[2-5]",),
        "unit": 2,
        "experts": {"package": {"expert": 2}, "system": {"expert": 2}},
    },
}


@pytest.mark.parametrize("name", ["stages", *nightly("zbv", "recomputed")])
def test_beside_other_axes(pool: LocalPool, name: str) -> None:
    """Attention is spread in one way and experts in another; neither limits the other."""
    cluster = cluster_of(2, 2, 2)
    plan = exact("three-level", cluster, **BESIDE[name])
    check(pool, cluster, [Case(plan, num_micros=2, model="deep experts")])


# Schedule, blocks of each virtual stage of four, a model, chunks of experts, and further changes of the plan.
WITHOUT_A_LAYER: list[tuple[str, tuple[int, ...], str, Table, dict[str, Any]]] = [
    ("interleaved:2", (1, 1, 1, 1), "mixture tied", {"node": {"expert": 2}}, {"expert_chunks": {"forward": 2}}),
    ("zbv", (1, 1, 1, 1), "experts, noisy", {"node": {"rows": 2}}, {}),
    ("zb-h1", (3, 1), "mixture tied", {"node": {"expert": 2}}, {"expert_chunks": {"forward": 2, "backward": 2}}),
    ("1f1b", (1, 3), "mixture, grouped", {"node": {"expert": 2}}, {"unit": 2, "recompute": ("block.[12]",)}),
    ("zeropp:2", (1, 1, 1, 1), "mixture, shared expert", {"node": {"expert": 2}}, {"unit": 2}),
    ("breadth-first:2", (1, 1, 1, 1), "mixture, grouped", {}, {}),
]


@pytest.mark.parametrize("index", [0, *nightly(*range(1, 6))])
def test_virtual_stages_without_a_layer(pool: LocalPool, index: int) -> None:
    """The embedding alone on the first virtual stage, the head alone on the last, beside experts on several ranks."""
    cluster = cluster_of(2, 2)
    schedule, stages, model, table, changes = WITHOUT_A_LAYER[index]
    plan = exact(
        ("zero3", "zero2")[index % 2],
        cluster,
        mapping={"package": {"pipeline": 2}},
        schedule=schedule,
        stages=stages,
        experts=table,
        **changes,
    )
    check(pool, cluster, [Case(plan, num_micros=4, model=model)])


# Largest deviation of a loss near 2.5, and of a gradient norm, from the lossless ones within two steps.
ROUNDED = {"fp64": 0.0, "fp32": 1e-6, "bf16": 0.01, "int8:16": 0.02, "fp8:32": 0.05, "int4:16": 0.15}


@pytest.mark.parametrize("formats", [("fp64", "int4:16"), *nightly((("fp32", "bf16", "int8:16", "fp8:32"),))], ids=len)
def test_rows_in_every_format(pool: LocalPool, formats: tuple[str, ...]) -> None:
    """Bytes are as the formats say; the dtype of the computation changes no bit."""
    cluster = cluster_of(2)
    plain = Case(spread(cluster, "zero3", {"package": {"expert": 2}}), num_micros=2, model="experts")
    wires = [{message: {"package": name} for message in ("dispatch", "combine")} for name in formats]
    cases = [replace(plain, plan=replace(plain.plan, wire=wire)) for wire in wires]
    lossless, *rounded = run(pool, cluster, [plain, *cases])
    wanted = reference(cluster, plain)
    for bound, outcomes in zip(map(ROUNDED.__getitem__, formats), rounded, strict=True):
        assert not any(outcome.complaint for outcome in outcomes), outcomes[0].complaint
        found = deviation(outcomes, wanted)
        if bound == 0.0:
            assert all(map(torch.equal, *([each.parameters for each in both] for both in (outcomes, lossless))))
            continue
        assert 0 < found["loss"] < bound, (bound, found)
        assert 0 < found["norm"] < bound * max(wanted.norms), (bound, found)


def rounding(world: World, cluster: Cluster, case: Case) -> dict[str, float]:
    """The relative rounding error of each class in a step."""
    engine = engine_of(world, cluster, case)
    found = engine.step(case.batches(engine, case, 0), 1e-3).quantisation_error
    engine.close()
    return found


def test_the_rounding_of_rows_is_measured(pool: LocalPool) -> None:
    cluster, wire = cluster_of(2), {"dispatch": {"package": "fp8:32"}, "combine": {"package": "int8:16"}}
    plan = replace(spread(cluster, "zero3", {"package": {"expert": 2}}), wire=wire)
    first, other = pool.run(2, rounding, cluster, Case(plan, model="experts"), timeout_s=60.0)
    assert first == other
    assert first.keys() == wire.keys()
    assert 0.01 < first["dispatch"] < 0.05
    assert 0.001 < first["combine"] < 0.01


# Chunks of a forward and of a backward; 64 are more than a rank has tokens.
CHUNKS = ["4 2", *nightly("2 2", "1 4", "4 4", "2 1", "64 64")]


@pytest.mark.parametrize("chunks", CHUNKS)
def test_tokens_in_chunks(pool: LocalPool, chunks: str) -> None:
    cluster, number = cluster_of(2), dict(zip(("forward", "backward"), map(int, chunks.split()), strict=True))
    models = ("mixture, shared expert", "one of many experts")
    plan = spread(cluster, "zero3", {"package": {"expert": 2}}, expert_chunks=number)
    check(pool, cluster, [Case(plan, num_micros=2, model=model) for model in models])


@pytest.mark.parametrize("name", nightly("rows inside", "everywhere", "rows twice"))
def test_chunks_over_several_tiers(pool: LocalPool, name: str) -> None:
    """And in halves of backwards, whose weight gradients wait for the other half; and in blocks that run twice."""
    cluster, number = cluster_of(2, 2, 2), {"forward": 2, "backward": 4}
    cases = [Case(spread(cluster, "three-level", EIGHT[name], expert_chunks=number), num_micros=2, model="experts")]
    for other in ("zbv", "recomputed"):
        plan = exact("three-level", cluster, **BESIDE[other], expert_chunks=number)
        cases.append(Case(plan, num_micros=4, model="deep experts"))
    check(pool, cluster, cases)


def test_the_order_of_chunks_changes_no_bit(pool: LocalPool) -> None:
    """One chunk ahead on the inner tier, and all of them."""
    cluster, table = cluster_of(2, 2), {"package": {"expert": 2}, "node": {"expert": 2}}
    numbers = [{"forward": 4, "backward": 4, "ahead": ahead} for ahead in (1, 3)]
    plans = [spread(cluster, "zero3", table, expert_chunks=each) for each in numbers]
    one, every = run(pool, cluster, [Case(plan, num_micros=2, model="experts") for plan in plans])
    for outcomes in (one, every):
        assert not any(outcome.complaint for outcome in outcomes), outcomes[0].complaint
    assert [each.losses for each in one] == [each.losses for each in every]
    assert [each.norms for each in one] == [each.norms for each in every]
    assert all(map(torch.equal, *([each.parameters for each in both] for both in (one, every))))


FAULTS = ("lost_row", "wrong_expert_scale", "missed_norm", "wrong_count", "frozen_bias")


@pytest.mark.parametrize("faults", [FAULTS[:1], *nightly((FAULTS[1:],))], ids=len)
def test_faults_are_noticed(pool: LocalPool, faults: tuple[str, ...]) -> None:
    """A lost row, gradients of experts that are scaled or left out of the norm, a token counted for another expert, a
    bias that stays.
    """
    cluster = cluster_of(2)
    plan = spread(cluster, "zero3", {"package": {"expert": 2}})
    sound = Case(plan, 2, "experts in groups", balance=MOVED)
    cases = [replace(sound, sabotage=fault) for fault in faults]
    for case, outcomes in zip(cases, run(pool, cluster, cases), strict=True):
        assert max(deviation(outcomes, reference(cluster, case)).values()) > 1e-6, case.sabotage


def frozen_first(world: World, cluster: Cluster, frozen: tuple[str, ...], recompute: tuple[str, ...]) -> list[str]:
    """Messages of a decoder's layers in two steps, against their programs; the first layer reads no gradient."""
    model = MODELS["experts"]
    specs = freeze(model.declared[1:-1], frozen)
    plan = spread(cluster, "zero3", {"package": {"expert": 2}}, recompute=recompute)
    engine = Engine(
        Blocks(model.blocks(torch.float64)[1:-1], names=[spec.name for spec in specs], declared=specs, freeze=frozen),
        Workload(cluster=cluster, plan=plan, num_micros=1, sequence=SEQUENCE),
        lambda output, labels: output.square().sum(),
        setup=RankSetup(rank=world.rank),
    )
    recording = record_in_block(engine)
    labels = torch.zeros(plan.micro_batch, SEQUENCE, dtype=torch.int64)
    inputs = torch.randn(plan.micro_batch, SEQUENCE, 8, generator=torch.Generator().manual_seed(world.rank)).double()
    for _ in range(2):
        engine.step([Batch(inputs, labels)], 1e-3)
    engine.check_bytes()
    backward = engine.program.messages_inside(Instruction(Op.BACKWARD, 0, 0))
    engine.close()
    classes = {message.message_class.value for message in backward}
    return [complaint(engine.program, recording, 2), *sorted(classes)]


@pytest.mark.parametrize(
    ("frozen", "recompute", "sent"),
    [
        (("layers.0.*",), (), []),
        (("layers.0.*",), ("layers.0",), []),  # nor does its forward run again
        (("layers.0.mlp.*",), (), ["combine", "dispatch"]),
    ],
)
def test_a_frozen_first_block_sends_no_gradients(
    pool: LocalPool, frozen: tuple[str, ...], recompute: tuple[str, ...], sent: list[str]
) -> None:
    for said, *classes in pool.run(2, frozen_first, cluster_of(2), frozen, recompute):
        assert (said, classes) == ("", sent)
