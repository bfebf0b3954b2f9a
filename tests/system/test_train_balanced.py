"""Losses of routers and gates: the numbers of one process that follows their definitions, under any plan."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch

from terrace.cluster.cluster import Cluster
from terrace.launch.start import LocalPool, World
from terrace.model.balance import BalanceConfig
from terrace.model.decoder import token_loss
from terrace.plan.wire import ROUTED
from terrace.runtime.routing.axis import ExpertAxis
from terrace.train.trainer import Trainer
from tests.support.nightly import nightly
from tests.support.parity import ADAMW, NO_BALANCE, NUM_STEPS, Case, check, engine_of, exact, serial
from tests.support.token_layouts import dealt_out
from tests.support.toys import MODELS, Rows, cluster_of

pytestmark = pytest.mark.timeout(360)

BOUNDED = BalanceConfig(sequence=0.3, capacity=0.9)
BOTH, Z = BalanceConfig(sequence=0.3, z=0.2), BalanceConfig(z=0.2)
ALL, STEP = BalanceConfig(sequence=0.3, step=0.4, z=0.2), BalanceConfig(step=0.4, z=0.2)
DOCUMENTS = Rows(23, ((5, 1, 17), (23,), (4, 4, 4, 11)))


HALVES = pytest.mark.parametrize("half", [0, *nightly(1)], ids=["in turns", "the rest"])


@pytest.mark.nightly
@HALVES
def test_losses_of_routers(pool: LocalPool, half: int) -> None:
    cluster = cluster_of(2, 2)
    spread = {"package": {"expert": 2}, "node": {"rows": 2}}
    ring, stages = {"node": {"context": {"ring": 2}}}, {"node": {"pipeline": 2}}
    rows, heads = {"package": {"tensor": 2}}, {"package": {"context": {"ulysses": 2}}}
    cases = [
        Case(exact("zero3", cluster, experts=spread), num_micros=2, model="experts in groups", balance=ALL),
        Case(
            exact("three-level", cluster, mapping=stages, schedule="zb-h1", recompute=("block.[1-5]",)),
            num_micros=3,
            model="deep experts",
            rows=DOCUMENTS,
            balance=ALL,
        ),
        Case(exact("zero2", cluster, mapping=ring, micro_batch=2), model="wide mixture", rows=Rows(7), balance=ALL),
        Case(
            exact("zero3", cluster, mapping={**ring, **heads}, micro_batch=2, recompute=("block.[12]",)),
            num_micros=2,
            model="wide mixture",
            rows=DOCUMENTS,
            balance=ALL,
        ),
        *(
            Case(
                exact("zero3", cluster, mapping=rows, experts={"node": {"expert": 2}}, **changes),
                model="wide experts",
                rows=DOCUMENTS,
                balance=ALL,
            )
            for changes in ({"recompute": ("*",)}, {"sequence_parallel": False, "micro_batch": 2})
        ),
        Case(
            exact("zero3", cluster, balance="cost"),
            model="wide mixture, window",
            rows=DOCUMENTS,
            batches=dealt_out,
            balance=STEP,
        ),
    ]
    check(pool, cluster, cases[half::2])


@pytest.mark.parametrize("everyday", [True, *nightly(False)], ids=["a capacity and a choice of experts", "the rest"])
def test_gates(pool: LocalPool, everyday: bool) -> None:
    """Noise goes by the place in the run; where experts choose or have a capacity, tokens are left to nobody."""
    cluster = cluster_of(2, 2)
    spread = {"package": {"expert": 2}, "node": {"rows": 2}}
    rows, both = {"package": {"rows": 2}}, {"package": {"expert": 2}, "node": {"expert": 2}}
    ring, stages = {"node": {"context": {"ring": 2}}}, {"node": {"pipeline": 2}}
    cases = [
        Case(exact("zero3", cluster, experts=both), num_micros=2, model="experts, noisy"),
        Case(exact("zero2", cluster, mapping=ring, experts=rows), model="experts, noisy", rows=Rows(7)),
        Case(
            exact("three-level", cluster, mapping=stages, schedule="1f1b", unit=2, recompute=("*",)),
            num_micros=4,
            model="deep experts, noisy",
        ),
        Case(exact("zero3", cluster, experts=spread), num_micros=2, model="experts, cosine", balance=BOTH),
        Case(exact("zero3", cluster, experts=spread), num_micros=2, model="experts choose", balance=Z),
        Case(exact("zero1", cluster, experts=rows, micro_batch=2), model="experts choose"),
        Case(exact("zero3", cluster, experts=spread), num_micros=2, model="experts in groups", balance=BOUNDED),
        Case(exact("zero1", cluster, mapping=stages, recompute=("*",)), 4, "deep experts", balance=BOUNDED),
        Case(
            exact("zero2", cluster, mapping=stages, schedule="zb-h1", experts={"package": {"expert": 2}}),
            num_micros=2,
            model="deep experts choose",
        ),
    ]
    check(pool, cluster, [case for number, case in enumerate(cases) if (number in (6, 8)) == everyday])


def sent_of_experts(world: World, cluster: Cluster, cases: Sequence[Case]) -> list[list[dict[Any, int]]]:
    """By class and tier, the bytes of messages of experts: predicted, declared by the batches, sent."""
    found = []
    for case in cases:
        engine, predicted = engine_of(world, cluster, case), Counter[Any]()
        engine.step(case.batches(engine, case, 0), 1e-3)
        for message in chain(*map(engine.program.messages_inside, engine.program.instructions)):
            if message.message_class in ROUTED:
                predicted.update({(message.message_class, engine.program.layout.tiers[t]): n for t, n in message.sends})
        engine.check_bytes()
        (axis,) = (axis for axis in engine.axes if isinstance(axis, ExpertAxis))
        sent = {key: num for key, num in engine.comm.ledger.total().items() if key[0] in ROUTED}
        found.append([dict(+predicted), dict(+Counter(axis.declared)), sent])
        engine.close()
    return found


@HALVES
def test_even_routing_sends_what_is_predicted(pool: LocalPool, half: int) -> None:
    """Over one tier and two, with rows, recomputed: one number on every rank, whatever the labels."""
    cluster = cluster_of(2, 2)
    tables = (
        {"package": {"expert": 2}, "node": {"expert": 2}},
        {"package": {"rows": 2}, "node": {"expert": 2}},
        {"package": {"rows": 2}, "node": {"rows": 2}},
    )
    plans = [exact("zero3", cluster, experts=table, micro_batch=4, recompute=("block.1",)) for table in tables]
    # Tensor rows deal with parts of the tokens; rows are of as many bytes as their formats say.
    split = exact("zero3", cluster, mapping={"package": {"tensor": 2}}, experts=tables[0], micro_batch=8)
    wire = {"dispatch": {"package": "fp8", "node": "fp8"}, "combine": {"node": "int8:16"}}
    plans += [split, replace(split, wire=wire, sequence_parallel=False)]
    plans.append(replace(plans[0], expert_chunks={"forward": 3}))
    cases = [Case(plan, num_micros=2, model="experts, even") for plan in plans[half::2]]
    for of_rank in pool.run(cluster.world_size, sent_of_experts, cluster, cases):
        for predicted, declared, sent in of_rank:
            assert predicted == declared == sent
            assert {message for message, _ in sent} == set(ROUTED)


def trained_alone(model: str, balance: BalanceConfig | None, seed: int, *, predict: bool) -> list[float]:
    """Losses of a trainer on one rank, with those of routers, as a run in this process has them."""
    found = list[float]()
    with Trainer(
        MODELS[model].blocks(torch.float64),
        plan={"preset": "ddp", "compute": "fp64", "master": "fp64"},
        cluster=cluster_of(1),
        loss=token_loss,
        lr=ADAMW.lr,
        optimizer={name: getattr(ADAMW, name) for name in ("beta1", "beta2", "eps", "weight_decay", "clip")},
        num_micros=2,
        declared=MODELS[model].declared,
        predict=predict,
        balance=balance,
        seed=seed,
    ) as trainer:
        for step in range(NUM_STEPS):
            batch = Rows().batch(step, 4)
            result = trainer.step(batch.inputs, batch.labels)
            found += [result.loss, *result.router_losses.values()]
    return found


def test_a_trainer_says_where_tokens_stand() -> None:
    """Batch after batch, as the rows of a run are counted; another seed draws other noise."""
    found = trained_alone("experts, noisy", None, 0, predict=False)
    assert found == pytest.approx(serial("experts, noisy", 4).losses, abs=1e-10, rel=0)
    assert found != trained_alone("experts, noisy", None, 1, predict=False)


def test_a_trainer_balances_routers() -> None:
    """Also where the first step runs each block once more to time it, which counts no token."""
    balance = replace(ALL, bias=0.05)
    found = trained_alone("experts in groups", balance, 0, predict=True)
    assert found == pytest.approx(serial("experts in groups", 4, balance=balance).losses, abs=1e-10, rel=0)


GRID = {
    "everywhere": {"package": {"expert": 2}, "node": {"expert": 2}, "system": {"expert": 2}},
    "rows inside": {"package": {"rows": 2}, "system": {"expert": 2}},
    "rows outside": {"package": {"expert": 2}, "node": {"rows": 2}},
    "held by all": {},
}


@pytest.mark.nightly
@pytest.mark.parametrize("table", GRID)
@pytest.mark.parametrize("placement", ["ddp", "zero1", "zero3", "three-level"])
def test_every_gate_and_balance(pool: LocalPool, table: str, placement: str) -> None:
    """Beside each other on eight ranks, whole and in stages."""
    cluster, experts = cluster_of(2, 2, 2), GRID[table]
    plan = exact(placement, cluster, experts=experts)
    cases = [
        Case(plan, num_micros=2, model=model, balance=balance)
        for model, balance in (
            ("experts, noisy", NO_BALANCE),
            ("experts, cosine", ALL),
            ("experts choose", Z),
            ("experts", BOUNDED),
            ("experts in groups", BalanceConfig(sequence=0.3, z=0.2, capacity=1.25)),
            ("all experts", BOTH),
            ("one of many experts", BOUNDED),
        )
    ]
    if "node" not in experts:
        plan = exact(
            placement,
            cluster,
            experts=experts,
            mapping={"node": {"pipeline": 2}},
            recompute=("block.[2-5]",),
            schedule="zb-h1",
        )
        cases += [Case(plan, 4, model) for model in ("deep experts, noisy", "deep experts choose")]
        cases.append(Case(plan, 4, "deep experts", balance=BOUNDED))
    check(pool, cluster, cases)
