"""The context axis: the same numbers as one process, and the bytes that it declares."""

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from torch import nn

import terrace
from terrace.base.errors import TerraceError
from terrace.cluster.cluster import Cluster
from terrace.comm.group_p2p import GroupP2P
from terrace.launch.start import LocalPool, World
from terrace.model.decoder import DecoderLayer, token_loss
from terrace.plan.context import ContextGroup
from terrace.plan.layout import INSIDE
from terrace.plan.plan import Plan
from terrace.plan.wire import MessageClass
from terrace.runtime.batch import Batch
from terrace.runtime.clock import make_clock
from terrace.runtime.context.attention import attend
from terrace.runtime.context.device_layout import DeviceLayout
from terrace.runtime.context.peer_exchange import PeerComm
from terrace.runtime.in_block import InBlockComm
from terrace.runtime.linear import WeightGradients
from terrace.sequence.build import build_token_layout
from terrace.sequence.group_layout import GroupLayout
from terrace.sequence.segments import Segment
from tests.support.allocations import allocated
from tests.support.lanes import EagerLane
from tests.support.nightly import nightly
from tests.support.parity import (
    ADAMW,
    TOLERANCE,
    Case,
    Outcome,
    check,
    data_rows,
    deviation,
    engine_of,
    exact,
    flatten,
    reference,
    run,
)
from tests.support.token_layouts import dealt_out
from tests.support.toys import MODELS, Rows, cluster_of, make_batch

pytestmark = pytest.mark.timeout(360)

# Documents longer than what a rank holds, of one token, and short neighbours; rows that neither 2 r nor u divides;
# fewer tokens than ranks.
DOCUMENTS = ((5, 1, 17), (23,), (4, 4, 4, 11))
KINDS = (
    ("wide llama, 1 kv head", Rows(23, DOCUMENTS)),
    ("wide llama, 2 kv heads", Rows(37)),
    ("wide llama, 8 kv heads", Rows(5)),
    ("wide llama, window", Rows(23, DOCUMENTS)),
    ("wide gpt2", Rows(7)),
    ("wide qwen3, 2 kv heads", Rows(16)),
)


def context(cluster: Cluster, mapping: dict[str, Any], name: str = "zero3", **changes: object) -> Plan:
    return exact(name, cluster, mapping=mapping, **changes)


def forms(ulysses: int, ring: int) -> dict[str, Any]:
    return {"context": {"ulysses": ulysses, "ring": ring}}


def case(plan: Plan, kind: tuple[str, Rows], **more: Any) -> Case:
    return Case(plan, model=kind[0], rows=kind[1], batches=dealt_out if plan.balance == "cost" else data_rows, **more)


@pytest.mark.parametrize(("size", "kinds"), [(4, 1), *nightly((2, 2), (4, 2), (8, 1), (8, 2))])
def test_every_form_equals_one_process(pool: LocalPool, size: int, kinds: int) -> None:
    """Every form with one or two kinds of rows, of one or two sequences a micro-batch; every kind comes up."""
    cluster, cases = cluster_of(size), []
    degrees = [degree for degree in (1, 2, 4, 8) if degree <= size]
    for index, ulysses in enumerate(degrees, start=size):
        for more in (0, 1) if kinds == 2 else (index % 2,):
            plan = context(cluster, {"package": forms(ulysses, size // ulysses)}, micro_batch=1 + more)
            cases.append(case(plan, KINDS[(2 * index + more) % len(KINDS)]))
    check(pool, cluster, cases)


MAPPINGS: list[dict[str, Any]] = [
    {"package": forms(2, 1), "node": forms(1, 2)},
    {"package": forms(1, 2), "node": forms(1, 2), "system": forms(2, 1)},
    {"node": forms(1, 2), "system": forms(1, 2)},
    {"package": {"context": 2}, "system": forms(2, 1)},
]


@pytest.mark.nightly
def test_rings_over_tiers_beside_every_placement(pool: LocalPool) -> None:
    """With data ranks, several micro-batches, recomputation and frozen layers."""
    cluster, cases = cluster_of(2, 2, 2), []
    for index, (mapping, name) in enumerate(zip(MAPPINGS, ("three-level", "zero++", "zero2", "zero3"), strict=True)):
        again = ("block.[12]",) if index % 2 else ()
        kind = KINDS[index] if index < 3 else ("llama, frozen layer", Rows(9))
        plan = context(cluster, mapping, name, recompute=again)
        cases.append(case(plan, kind, num_micros=2, lane=("lazy", "thread")[index % 2]))
    check(pool, cluster, cases)


BESIDE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"package": {"tensor": 2}, "node": forms(2, 1)}, {}),
    ({"package": forms(1, 2), "node": {"tensor": {"columns": 2}}}, {"sequence_parallel": False}),
    ({"package": {"tensor": 2}, "node": forms(1, 2)}, {"tensor_chunks": 2, "recompute": ("block.2",)}),
    ({"package": forms(2, 1), "node": {"pipeline": 2}}, {"schedule": "1f1b"}),
    ({"package": forms(1, 2), "node": {"pipeline": 2}}, {"schedule": "zb-h1", "recompute": ("block.1",)}),
    ({"node": {"tensor": 2}}, {"balance": "cost"}),
    ({"node": {"pipeline": 2}}, {"balance": "cost", "schedule": "1f1b"}),
]


@pytest.mark.parametrize("half", [0, *nightly(1)], ids=["in turns", "the rest"])
def test_beside_tensor_and_pipeline_ranks(pool: LocalPool, half: int) -> None:
    cluster, cases = cluster_of(2, 2), []
    kinds = [KINDS[index] for index in (0, 4, 1, 3, 4, 0, 3)]
    for (mapping, changes), kind in zip(BESIDE, kinds, strict=True):
        plan = context(cluster, mapping, "zero2", **changes)
        cases.append(case(plan, kind, num_micros=2 if "schedule" in changes else 1))
    check(pool, cluster, cases[half::2])


@pytest.mark.parametrize("index", [1, *nightly(0, 2, 3)])
def test_documents_anywhere_equal_one_process(pool: LocalPool, index: int) -> None:
    """With balance = "cost" over data and context ranks: rings of several sizes, tokens held elsewhere, idle places."""
    cluster = cluster_of(2, 2, 2)
    mappings: list[dict[str, Any]] = [
        {},
        {"package": forms(2, 1), "node": forms(1, 2)},
        {"package": forms(2, 1)},
        {"node": forms(1, 2), "system": forms(2, 1)},
    ]
    plan = context(cluster, mappings[index], "zero2", balance="cost", recompute=("block.1",) if index % 2 else ())
    kind = (KINDS[(0, 3, 1, 5)[index]][0], Rows(23, DOCUMENTS))
    check(pool, cluster, [case(plan, kind, num_micros=2, lane=("thread", "lazy")[index % 2])])


class OwnAttention(nn.Module):
    """Attention of a user's own, with the parameters of the model's."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = other.query, other.key, other.value, other.output


def train_with_trainer(world: World, cluster: Cluster, case: Case) -> tuple[Outcome, str, bool]:
    """A run in a user's loop: its results, the error for unknown attention, and whether blocks are as before."""
    model = MODELS[case.model]
    blocks = model.blocks(torch.float64)
    layers = [block for block in blocks if isinstance(block, DecoderLayer)]
    plans = [layer.attention.plans for layer in layers]
    options: dict[str, Any] = {"plan": case.plan, "cluster": cluster, "loss": token_loss, "lr": ADAMW.lr}
    options |= {"declared": model.declared, "activation": (case.rows.sequence, 16), "say": lambda line: None}
    losses, norms = [], []
    with terrace.Trainer(dict(zip(NAMES, blocks, strict=True)), **options) as trainer:
        for step in range(case.num_steps):
            batch = case.rows.batch(step, case.plan.micro_batch)
            result = trainer.step(batch.inputs, batch.labels, batch.positions)
            losses.append(result.loss)
            norms.append(result.grad_norm)
        trainer.unload()
    restored = plans == [layer.attention.plans for layer in layers]
    outcome = Outcome(losses, norms, flatten(blocks))
    blocks[1].attention = OwnAttention(layers[0].attention)
    try:
        terrace.Trainer(dict(zip(NAMES, blocks, strict=True)), **options)
    except TerraceError as error:
        return outcome, str(error), restored
    return outcome, "", restored


NAMES = ("embedding", "layers.0", "layers.1", "head")


def test_in_a_loop_of_ones_own(pool: LocalPool) -> None:
    cluster = cluster_of(4)
    plan = context(cluster, {"package": forms(2, 2)}, micro_batch=2)
    one = case(plan, KINDS[3])
    for outcome, refused, restored in pool.run(4, train_with_trainer, cluster, one, timeout_s=60.0):
        assert max(deviation([outcome], reference(cluster, one)).values()) < TOLERANCE
        assert refused.startswith("block 'layers.0' is a DecoderLayer, whose attention is not declared"), refused
        assert restored


def too_long(world: World, cluster: Cluster, plan: Plan) -> str:
    """The error of a rank for a row that is longer than the learned positions."""
    blocks = MODELS["wide gpt2"].blocks(torch.float64)
    engine = engine_of(world, cluster, Case(plan, model="wide gpt2", rows=Rows(10)), blocks)
    tokens, labels = make_batch(0, 1, 10)
    try:
        engine.step([Batch(tokens, labels)], 1e-3)
    except TerraceError as error:
        return str(error)
    finally:
        engine.close()
    return ""


def test_no_rank_waits_for_one_that_has_a_position_beyond(pool: LocalPool) -> None:
    cluster = cluster_of(2)
    said = pool.run(2, too_long, cluster, context(cluster, {"package": forms(1, 2)}), timeout_s=60.0)
    assert said == ["a sequence of 10 tokens needs as many positions; the model has 8"] * 2


def test_a_fault_shows(pool: LocalPool) -> None:
    cluster = cluster_of(2)
    plan = context(cluster, {"package": forms(1, 2)})
    cases = [case(plan, KINDS[1], sabotage=fault) for fault in ("wrong_position", "dropped_pair")]
    for one, outcomes in zip(cases, run(pool, cluster, cases), strict=True):
        distance = deviation(outcomes, reference(cluster, one))
        distance.pop("loads", None)  # it may choose the same experts
        assert min(distance.values()) > 1e-4, distance
        assert not any(outcome.complaint for outcome in outcomes)


class NobodyThere:
    """Has everything that is received be zero."""

    def exchange(
        self, message: MessageClass, sends: object, receives: Sequence[tuple[int, torch.Tensor]], again: bool = False
    ) -> None:
        for _, values in receives:
            values.zero_()


def peak_of_a_ring(num_ring_ranks: int) -> int:
    """The bytes that attention takes at its peak, forward and backward, on a rank of a ring of so many places."""
    segment = Segment(0, num_ring_ranks * 64, tuple(range(num_ring_ranks)), (num_ring_ranks,))
    held = tuple(segment.shard(place) for place in segment.ring_ranks)
    everyone = GroupLayout(segments=(segment,), documents=(), local_runs=held, ulysses=1, num_local_tokens=64)
    made = build_token_layout(everyone, 1)
    group = ContextGroup(members=segment.ring_ranks, ulysses=1, ring_degrees=(num_ring_ranks,), sizes=(num_ring_ranks,))
    cpu = torch.device("cpu")
    in_block = InBlockComm({INSIDE: EagerLane()}, make_clock(cpu), WeightGradients())
    layout = DeviceLayout(made, PeerComm(group, 1, cast(GroupP2P, NobodyThere()), in_block), cpu)
    parts = [torch.zeros(1, 64, 2, 16).transpose(1, 2).requires_grad_() for _ in range(3)]

    def run() -> None:
        output = attend(parts[0], parts[1], parts[2], layout)
        torch.autograd.backward(output, torch.ones_like(output))

    run()  # what a layout makes once, and the gradients, are there afterwards
    return allocated(run)[0]


def test_memory_does_not_grow_with_the_rounds_of_a_ring() -> None:
    assert peak_of_a_ring(16) <= 1.05 * peak_of_a_ring(4)
