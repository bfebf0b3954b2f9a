"""The tensor axis: the same numbers as one process, and the bytes that its formula declares."""

import math
from dataclasses import replace
from itertools import product
from threading import current_thread
from typing import Any

import pytest
import torch

from terrace.base.errors import ProgramError
from terrace.cluster.cluster import Cluster
from terrace.comm.collectives import Collectives
from terrace.launch.start import LocalPool, World
from terrace.model.config import ModelConfig, parse_model
from terrace.plan.plan import Plan
from terrace.plan.presets import preset
from terrace.plan.wire import MessageClass
from terrace.program.message import Transfer
from terrace.runtime.batch import Batch
from terrace.runtime.engine import Engine
from terrace.runtime.setup import Blocks, RankSetup, Workload
from tests.support.nightly import nightly
from tests.support.parity import Case, check, deviation, exact, reference, run
from tests.support.tensor_memory import kept_by_a_layer
from tests.support.toys import MODELS, SEQUENCE, cluster_of, make_batch

ROUNDED_AT_ALL = 1e-5  # fp32 alone, without rounded messages, stays below this

pytestmark = pytest.mark.timeout(360)


def tensor(cluster: Cluster, name: str, rows: dict[str, Any], **changes: object) -> Plan:
    return exact(name, cluster, mapping=rows, **changes)


@pytest.mark.parametrize(
    ("model", "splits"),
    [
        ("llama tied", True),
        ("gpt_neox", False),
        *nightly(("llama tied", False), ("gpt_neox", True)),
        *nightly(*product(("wide llama, 2 kv heads", "gpt2"), (True, False))),
    ],
)
def test_two_rows_equal_one_process(pool: LocalPool, model: str, splits: bool) -> None:
    plan = tensor(cluster_of(2), "ddp", {"package": {"tensor": 2}}, sequence_parallel=splits)
    check(pool, cluster_of(2), [Case(plan, num_micros=2, model=model)])


def factorings(total: int) -> list[tuple[int, int, int]]:
    """Every rows x columns x depth of `total` ranks."""
    return [
        (rows, columns, total // rows // columns)
        for rows in range(1, total + 1)
        for columns in range(1, total + 1)
        if total % (rows * columns) == 0
    ]


FAMILIES = ("wide llama, 1 kv head", "wide llama, 2 kv heads", "wide llama, 8 kv heads", "wide gpt2", "wide gpt_neox")


def factored(factoring: tuple[int, int, int], model: str, splits: bool, num_micros: int) -> Case:
    axes = dict(zip(("rows", "columns", "depth"), factoring, strict=True))
    cluster = cluster_of(math.prod(factoring))
    plan = tensor(cluster, "zero3", {"package": {"tensor": axes}}, sequence_parallel=splits)
    return Case(plan, num_micros=num_micros, model=model)


@pytest.mark.nightly
@pytest.mark.parametrize("model", FAMILIES)
def test_every_factoring_of_four_in_every_family(pool: LocalPool, model: str) -> None:
    """Neighbours in the list of families have the other form of a factoring."""
    first = FAMILIES.index(model)
    check(pool, cluster_of(4), [factored(one, model, (first + i) % 2 == 0, 2) for i, one in enumerate(factorings(4))])


def test_every_factoring_of_four_equals_one_process(pool: LocalPool) -> None:
    """Every factoring once and every family, in turns with sequence parallelism and without."""
    cases = [factored(one, FAMILIES[i % len(FAMILIES)], i % 2 == 0, 2) for i, one in enumerate(factorings(4))]
    check(pool, cluster_of(4), cases)


@pytest.mark.parametrize("some", [[(1, 4, 1), (2, 2, 1)], *nightly([(1, 1, 4), (4, 1, 1)])], ids=str)
def test_norms_of_heads_and_biases_of_some_are_cut_like_the_rest(
    pool: LocalPool, some: list[tuple[int, int, int]]
) -> None:
    """A norm of heads is held by all ranks, each with a part of its gradient; the output of Qwen has no bias."""
    models = ("wide qwen3, 2 kv heads", "wide qwen2, 1 kv head")
    cases = [factored(one, models[i], i == 0, 2) for i, one in enumerate(some)]
    check(pool, cluster_of(4), cases)


def test_some_factorings_of_eight_equal_one_process(pool: LocalPool) -> None:
    cases = [
        factored((2, 2, 2), "wide gpt_neox", True, 1),
        factored((8, 1, 1), "wide llama, 1 kv head", False, 1),
        factored((1, 2, 4), "wide gpt2", True, 1),
    ]
    check(pool, cluster_of(8), cases)


@pytest.mark.nightly
@pytest.mark.parametrize("splits", [True, False])
def test_every_factoring_of_eight_equals_one_process(pool: LocalPool, splits: bool) -> None:
    """Both forms of each, with two families each: every family comes up in both forms."""
    families = [FAMILIES[(2 * i + splits) % len(FAMILIES)] for i in range(len(factorings(8)))]
    assert {*families} == {*FAMILIES}
    check(pool, cluster_of(8), [factored(*pair, splits, 1) for pair in zip(factorings(8), families, strict=True)])


PLACEMENTS = ["ddp", "zero2", "zero3", "zero++", "three-level"]
MAPPINGS: list[dict[str, Any]] = [
    {"package": {"tensor": 2}},
    {"node": {"tensor": 2}},
    {"system": {"tensor": {"columns": 2}}},
    {"package": {"tensor": 2}, "node": {"tensor": 2}},
    {"package": {"tensor": {"columns": 2}}, "system": {"tensor": {"rows": 2}}},
]


def beside(name: str, rows: dict[str, Any], other_form: bool) -> Case:
    """A placement and a mapping; the other form has another family, recomputation, and one micro-batch."""
    cluster = cluster_of(2, 2, 2)
    if not other_form:
        return Case(tensor(cluster, name, rows), num_micros=2, model="wide llama, 2 kv heads")
    return Case(tensor(cluster, name, rows, recompute=("*",), sequence_parallel=False), model="wide gpt2")


def test_rows_and_columns_of_two_tiers_beside_shards(pool: LocalPool) -> None:
    check(pool, cluster_of(2, 2, 2), [beside("three-level", MAPPINGS[-1], other_form=False)])


@pytest.mark.nightly
@pytest.mark.parametrize("rows", MAPPINGS, ids=str)
def test_every_placement_with_every_mapping(pool: LocalPool, rows: dict[str, Any]) -> None:
    first = MAPPINGS.index(rows)
    cases = [beside(name, rows, other_form=index % 2 == 0) for index, name in enumerate(PLACEMENTS, start=first)]
    check(pool, cluster_of(2, 2, 2), cases)


@pytest.mark.parametrize("chunks", [3, *nightly(2, 100)])
def test_messages_in_parts_change_no_number(pool: LocalPool, chunks: int) -> None:
    """Six tokens on two rows and on four: parts that are not equal, and padding; every other case recomputes."""
    models, cases = ("wide llama, 1 kv head", "wide gpt_neox"), []
    for index, row in enumerate([{"package": {"tensor": 2}}, {"package": {"tensor": 2}, "node": {"tensor": 2}}]):
        again = ("block.1",) if (index + chunks) % 2 else ()
        plan = tensor(cluster_of(2, 2), "zero3", row, tensor_chunks=chunks, recompute=again)
        cases.append(Case(plan, num_micros=2, model=models[(index + chunks // 2) % 2]))
    check(pool, cluster_of(2, 2), cases)


KINDS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("wide gpt2", {"tensor": {"rows": 4}}, {"recompute": ("block.1",)}),
    ("wide llama, 1 kv head", {"tensor": {"rows": 2, "columns": 2}}, {"tensor_chunks": 3}),
    ("wide llama, 2 kv heads", {"tensor": {"rows": 2}, "data": 2}, {"sequence_parallel": False}),
]


@pytest.mark.parametrize(
    ("name", "bound", "kinds"),
    [("int8", 0.1, KINDS[:1]), *nightly(("int8", 0.1, KINDS[1:]), ("bf16", 0.01, KINDS))],
    ids=lambda value: len(value) if isinstance(value, list) else None,
)
def test_rounded_messages_keep_bytes_and_replicas(pool: LocalPool, name: str, bound: float, kinds: list[Any]) -> None:
    """Losses near 2.5 stay within `bound` of one process, which is exact; `train` compares the replicas of ranks."""
    cluster = cluster_of(4)
    rounds = replace(preset("zero2", cluster), wire={"tensor": {"package": name}})
    cases = []
    for model, row, changes in kinds:
        plan = replace(rounds, mapping={"package": row}, **changes)
        cases.append(Case(plan, num_micros=2, model=model))
    for case, outcomes in zip(cases, run(pool, cluster, cases), strict=True):
        found = deviation(outcomes, reference(cluster, case))
        assert ROUNDED_AT_ALL < found["loss"] < bound, (case, found)
        assert not any(outcome.complaint for outcome in outcomes), outcomes[0].complaint


def threads_of_messages(
    world: World, cluster: Cluster, plan: Plan, cases: list[tuple[str, str]]
) -> list[tuple[set[str], str]]:
    """The threads in which tensor messages run, and the ledger's error, for each (model, frozen blocks)."""
    _sending = Collectives._sending
    threads: set[str] = set()

    def noted(self: Collectives, transfer: Transfer, *rest: Any, **more: Any) -> Any:
        if transfer.message_class is MessageClass.TENSOR:
            threads.add(current_thread().name)
        return _sending(self, transfer, *rest, **more)

    def run(name: str, freeze: str) -> tuple[set[str], str]:
        threads.clear()
        model, complaint = MODELS[name], ""
        engine = Engine(
            Blocks(model.blocks(torch.float64), declared=model.declared, freeze=(freeze,)),
            Workload(cluster=cluster, plan=plan, num_micros=1, sequence=SEQUENCE),
            model.objective,
            setup=RankSetup(rank=world.rank),
        )
        engine.step([Batch(*make_batch(0, 1))], 1e-3)
        try:
            engine.check_bytes()
        except ProgramError as error:
            complaint = str(error)
        engine.close()
        return set(threads), complaint

    Collectives._sending = noted  # type: ignore[method-assign]
    try:
        return [run(*case) for case in cases]
    finally:
        Collectives._sending = _sending  # type: ignore[method-assign]


@pytest.mark.parametrize("splits", [True, *nightly(False)])
def test_what_does_not_train_sends_as_declared_and_in_order(pool: LocalPool, splits: bool) -> None:
    """Messages share memory and groups: one that ends a region must not run beside one that gathers its input again.

    An embedding that is frozen has no backward.
    """
    cluster = cluster_of(4)
    row = {"package": {"tensor": {"rows": 2, "columns": 2}}}
    plan = tensor(cluster, "ddp", row, sequence_parallel=splits)
    cases = [("wide llama, 2 kv heads", "*.weight"), ("wide gpt2", "block.0.weight"), ("wide gpt2", "*norm*")]
    found = pool.run(4, threads_of_messages, cluster, plan, cases, timeout_s=60.0)
    assert found == [[({"terrace-lane"}, "")] * len(cases)] * 4


def gpt(hidden: int) -> ModelConfig:
    table = {"model_type": "gpt2", "vocab_size": 64, "n_embd": hidden, "n_layer": 1, "n_head": 8, "n_positions": 512}
    return parse_model(table | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0})


@pytest.mark.parametrize(("t", "splits"), [(4, True), *nightly((4, False), (2, True), (2, False))])
def test_a_layer_keeps_what_korthikanti_publishes(pool: LocalPool, t: int, splits: bool) -> None:
    """2205.05198, Table 2, with selective recomputation, which has the bytes of a kernel that keeps no scores.

    The model has no dropout, so the masks of its two outputs, 2 s b h, are not there.
    """
    hidden, sequence, batch = 64, 192, 2
    cluster, model = cluster_of(t), gpt(hidden)
    sbh = sequence * batch * hidden
    whole = sbh * 32 / t if splits else sbh * 8 + sbh * 24 / t
    recomputed = 2 * sbh / t if splits else 2 * sbh  # the input is split, too
    for again, wanted in ((False, whole), (True, recomputed)):
        plan = tensor(cluster, "ddp", {"package": {"tensor": t}}, sequence_parallel=splits, micro_batch=batch)
        plan = replace(plan, compute="bf16", master="fp32", recompute=("layers.*",) if again else ())
        kept = pool.run(t, kept_by_a_layer, cluster, plan, model, sequence, timeout_s=60.0)
        generator = torch.get_rng_state().nbytes if again else 0  # kept with the input, for dropout
        assert max(kept) - generator == pytest.approx(wanted, rel=0.05), (splits, again)
