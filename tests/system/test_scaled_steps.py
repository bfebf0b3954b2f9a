"""Steps whose products are in 8-bit floats: against plain PyTorch over products in numpy, and over ranks.

A step of several ranks has the codes of one process that takes the same micro-batches one after the other: scales are
of a micro-batch, and under a tensor axis of a rank's part of an operand. Forwards of the first step are compared
tightly. Where an fp32 sum in another order moves a value over the edge between two codes, it moves by 6 %: with initial
values that differ by 1e-7 the reference itself differs by 1e-4 in the first norm and by 1e-3 in the second loss.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from terrace.base.errors import PlanError
from terrace.cluster.cluster import Cluster
from terrace.launch.start import LocalPool
from terrace.plan.plan import Plan
from terrace.plan.products import parse_products
from terrace.plan.validate import validate
from terrace.runtime.batch import Batch
from terrace.runtime.describe import describe
from terrace.runtime.scaled_linear import ScaledMatrix
from tests.support.nightly import nightly
from tests.support.parity import ADAMW, Case, Outcome, engine_of, exact, run, run_case
from tests.support.scaled_reference import NUM_STEPS, SGD, Scaled, trained
from tests.support.tiny_runs import MODEL, terrace, write_run
from tests.support.toys import MODELS, Rows, cluster_of, make_batch

pytestmark = pytest.mark.timeout(240)

FORMS = ["fp8", "fp8:row", "fp8+e4m3", "fp8:row+e4m3"]
ROWS = Rows(20)  # micro-batches of rows that 16 does not divide
FOUR = {"package": {"tensor": 4}}
TWO = {"package": {"tensor": 2}}
WORLD: Any = SimpleNamespace(rank=0, world_size=1)


def case(name: str, sizes: tuple[int, ...], products: str | None, micros: int, **more: Any) -> Case:
    model = more.pop("model", "llama of sixteens")
    plan = exact(name, cluster_of(*sizes), products=products, **more)
    return Case(
        replace(plan, compute="fp32", master="fp32"), micros, model, rows=ROWS, optimizer=SGD, num_steps=NUM_STEPS
    )


def alone(case: Case) -> Outcome:
    return run_case(WORLD, cluster_of(1), case)


def compare(found: Outcome, losses: list[float], norms: list[float]) -> None:
    close(found.losses[:1], losses[:1], 1e-6)
    close(found.norms[:1], norms[:1], 2e-4)
    close(found.losses, losses, 1e-2)


def close(found: list[float], wanted: list[float], tolerance: float) -> None:
    assert found == pytest.approx(wanted, rel=tolerance), (found, wanted)


@pytest.mark.parametrize("products", [*FORMS[::3], *nightly(*FORMS[1:3])])
def test_one_process_is_the_definition(products: str) -> None:
    """Loss and gradient norm of a model with biases."""
    form = parse_products(products)
    found = alone(case("ddp", (1,), products, 2))
    losses, norms, parameters = trained("llama of sixteens", 2, 1, ROWS, Scaled(form.by_row, form.gradients))
    compare(found, losses, norms)
    assert float((found.parameters - parameters).norm() / parameters.norm()) < 1e-3
    # As they must: another format, or none, is not near.
    other = trained("llama of sixteens", 2, 1, ROWS, Scaled(not form.by_row, form.gradients), steps=1)[1]
    assert abs(other[0] / norms[0] - 1) > 3e-4


@pytest.mark.parametrize("products", ["fp8:row+e4m3", *nightly("fp8")])
def test_experts_are_scaled_each_by_itself(products: str) -> None:
    """A mixture with a shared expert: each expert's products have scales of its own rows and matrix."""
    form = parse_products(products)
    found = alone(case("ddp", (1,), products, 2, model="mixture of sixteens"))
    losses, norms, parameters = trained("mixture of sixteens", 2, 1, ROWS, Scaled(form.by_row, form.gradients))
    compare(found, losses, norms)
    assert float((found.parameters - parameters).norm() / parameters.norm()) < 1e-3
    other = trained("mixture of sixteens", 2, 1, ROWS, Scaled(not form.by_row, form.gradients), steps=1)[1]
    assert abs(other[0] / norms[0] - 1) > 3e-4


EXPERT_TABLES: list[tuple[dict[str, Any], int]] = [({"package": {"expert": 2}}, 1), ({"package": {"rows": 2}}, 2)]


def test_expert_ranks_scale_what_they_have(pool: LocalPool) -> None:
    """With scales of rows a forward does not depend on whose rows a rank has. The two parts of a matrix that ranks cut
    have scales of their own, as those of tensor ranks. Gradients of weights are scaled over the rows of both ranks.
    """
    scaled = Scaled(True, "e4m3")
    cases = [
        case("zero3", (2,), "fp8:row+e4m3", 1, model="wide mixture of sixteens", experts=table)
        for table, _ in EXPERT_TABLES
    ]
    for (_, parts), outcomes in zip(EXPERT_TABLES, run(pool, cluster_of(2), cases), strict=True):
        losses, norms, _ = trained("wide mixture of sixteens", 2, 1, ROWS, scaled, stack_parts=parts)
        other = trained("wide mixture of sixteens", 2, 1, ROWS, scaled, stack_parts=3 - parts, steps=1)[0]
        assert abs(other[0] / losses[0] - 1) > 1e-4
        for outcome in outcomes:
            assert not outcome.complaint, outcome.complaint
            close(outcome.losses[:1], losses[:1], 1e-6)
            close(outcome.norms[:1], norms[:1], 1e-2)


GRIDS: dict[tuple[int, ...], list[Case]] = {
    (2,): [
        case("ddp", (2,), "fp8", 2),
        case("zero3", (2,), "fp8:row", 2),
        case("zero3", (2,), "fp8", 2, recompute=("*",), unit=2),
        case("zero2", (2,), "fp8:row+e4m3", 2, recompute=("block.*: attention, mlp, norms",)),
        case("zero3", (2,), "fp8", 2, model="mixture of sixteens", recompute=("*",)),
    ],
    (2, 2): [
        case("three-level", (2, 2), "fp8", 1),
        case(
            "zero3",
            (2, 2),
            "fp8:row",
            4,
            model="deep llama of sixteens",
            mapping={"node": {"pipeline": 2}},
            schedule="zb-h1",
        ),
        case(
            "ddp", (2, 2), "fp8", 4, model="deep llama of sixteens", mapping={"node": {"pipeline": 2}}, schedule="zbv"
        ),
    ],
}


@pytest.mark.parametrize(("sizes", "first"), [((2, 2), 1), *nightly(((2,), 0), ((2,), 1), ((2, 2), 0))], ids=str)
def test_ranks_are_one_process(pool: LocalPool, sizes: tuple[int, ...], first: int) -> None:
    """Forwards have the same bits, so losses of the first step; gradients are added in another order."""
    cluster, cases = cluster_of(*sizes), GRIDS[sizes][first::2]
    for each, outcomes in zip(cases, run(pool, cluster, cases), strict=True):
        data = cluster.world_size // (2 if each.plan.mapping else 1)
        plan = replace(exact("ddp", cluster_of(1)), compute="fp32", master="fp32", products=each.plan.products)
        wanted = alone(replace(each, plan=plan, num_micros=each.num_micros * data))
        for outcome in outcomes:
            assert not outcome.complaint, (each, outcome.complaint)
            compare(outcome, wanted.losses, wanted.norms)
            close(outcome.losses[:1], wanted.losses[:1], 1e-12)
            close(outcome.norms[:1], wanted.norms[:1], 1e-6)


@pytest.mark.parametrize(("products", "splits"), [("fp8", True), *nightly(("fp8:row", True), ("fp8:row+e4m3", False))])
def test_tensor_ranks_scale_their_parts(pool: LocalPool, products: str, splits: bool) -> None:
    """One process that multiplies the halves of every matrix apart, each with scales of its own."""
    each, form = case("ddp", (2,), products, 2, mapping=TWO, sequence_parallel=splits), parse_products(products)
    (outcomes,) = run(pool, cluster_of(2), [each])
    losses, norms, _ = trained("llama of sixteens", 2, 1, ROWS, Scaled(form.by_row, form.gradients), parts=2)
    whole = trained("llama of sixteens", 2, 1, ROWS, Scaled(form.by_row, form.gradients), steps=1)[1]
    assert abs(whole[0] / norms[0] - 1) > 1e-4
    for outcome in outcomes:
        assert not outcome.complaint, outcome.complaint
        compare(outcome, losses, norms)


@pytest.mark.parametrize("recompute", [("*",), ("block.*: attention, mlp, norms",)])
@pytest.mark.parametrize("compute", ["bf16", *nightly("fp32")])
def test_what_is_recomputed_has_the_same_bits(recompute: tuple[str, ...], compute: Any) -> None:
    base = case("ddp", (1,), "fp8", 2)
    kept, again = (
        alone(replace(base, plan=replace(base.plan, compute=compute, recompute=each))) for each in ((), recompute)
    )
    assert (kept.losses, kept.norms) == (again.losses, again.norms)
    assert torch.equal(kept.parameters, again.parameters)


def adam() -> Case:
    plain = case("ddp", (1,), "fp8:row", 2)
    return replace(plain, plan=replace(plain.plan, compute="bf16"), optimizer=ADAMW)


def test_narrow_states_go_with_them() -> None:
    """The first forward has the bits of the plan without them, and every later loss is near."""
    plain = adam()
    wanted, unscaled = alone(plain), alone(replace(plain, plan=replace(plain.plan, products=None)))
    assert wanted.losses[0] != unscaled.losses[0]
    narrow = replace(plain, plan=replace(plain.plan, master="bf16", optimizer_states="int8"))
    found = alone(narrow)
    assert found.losses[0] == wanted.losses[0]
    close(found.losses, wanted.losses, 2e-2)


@pytest.mark.nightly  # compiling takes seconds
def test_compiled_parts_go_with_them() -> None:
    found, wanted = alone(replace(adam(), compiled=True)), alone(adam())
    close(found.losses, wanted.losses, 1e-2)


def test_layers_alone_and_evaluations_too() -> None:
    """Embedding, norms and head stay as they are; a loss is the same in an evaluation."""
    engine = engine_of(WORLD, cluster_of(1), case("ddp", (1,), "fp8", 1))
    scaled = {
        f"{index}.{name}"
        for index, module in engine.state.modules.items()
        for name, parameter in module.named_parameters()
        if isinstance(parameter, ScaledMatrix)
    }
    of_layers = {
        f"{index}.{name}.weight"
        for index, module in engine.state.modules.items()
        for name, child in module.named_modules()
        if isinstance(child, nn.Linear)
    }
    assert scaled == of_layers
    assert len(scaled) == 2 * 7
    batch = Batch(*make_batch(0, 1, 20))
    loss = engine.evaluate([batch]).loss
    assert engine.step([batch], SGD.lr).loss == loss
    plain = engine_of(WORLD, cluster_of(1), case("ddp", (1,), None, 1))
    assert plain.evaluate([batch]).loss != loss
    for each in (engine, plain):
        each.close()


@pytest.mark.nightly  # it learns for a while
def test_what_is_learned_stays() -> None:
    """Four batches by heart in 8 bits and without; over seeds and 1,000 steps see bench/products_learning.py."""
    found = {}
    for products in (None, *FORMS):
        each = replace(case("ddp", (1,), products, 2), optimizer=ADAMW)
        engine = engine_of(WORLD, cluster_of(1), each)
        batches = [each.batches(engine, each, step) for step in range(4)]
        losses = [engine.step(batches[step % 4], ADAMW.lr).loss for step in range(100)]
        found[products] = sum(losses[:40]) / 40
        assert sum(losses[-8:]) / 8 < 0.2 < 3.0 < losses[0], products
        engine.close()
    for products, loss in found.items():
        assert loss == pytest.approx(found[None], rel=0.15), (products, found)


def gpus(*, fp8: bool) -> Cluster:
    cluster = cluster_of(4)
    peaks = {"bf16": 1e15, "fp32": 1e14} | ({"fp8": 2e15} if fp8 else {})
    return replace(cluster, device=replace(cluster.device, name="card", backend="cuda", peak_flops_per_s=peaks))


REFUSED = [
    ("fp9", {}, "products = 'fp9' is no format of products"),
    ("fp8:row+e5m2", {}, "products = 'fp8:row+e5m2' is no format"),
    ("fp8", {"compute": "fp64", "master": "fp64"}, "products of 8 bits are added up in fp32"),
    ("fp8", {"tensor_chunks": 2, "mapping": {"package": {"tensor": 4}}}, "with tensor_chunks = 2"),
]


@pytest.mark.parametrize(("products", "changes", "words"), REFUSED)
def test_plans_that_are_refused(products: str, changes: dict[str, Any], words: str) -> None:
    plan = Plan(params="device", grads="device", optimizer="device", products=products, **changes)
    with pytest.raises(PlanError, match=re.escape(words)):
        validate(cluster_of(4), plan, MODELS["wide llama, 8 kv heads"].declared)


MODELS_REFUSED = [
    ("llama tied", {}, r"layers\.0\.attention\.query\.weight is 8 x 8, and dims must be multiples of 16"),
    ("llama of sixteens", FOUR, "2 heads, which tensor rows = 4 do not divide"),
    ("wide llama, 8 kv heads", TWO, "is 8 x 16 on a rank"),
    ("mixture tied", {}, r"layers\.0\.attention\.query\.weight is 8 x 8"),
    ("thin mixture of sixteens", {}, r"layers\.0\.mlp\.gate\.weight is 8 x 32, and dims must be multiples of 16"),
    ("toy", {}, "block.1.up.weight is 12 x 6"),
]


@pytest.mark.parametrize(("model", "mapping", "words"), MODELS_REFUSED)
def test_models_that_are_refused(model: str, mapping: Any, words: str) -> None:
    plan = Plan(params="device", grads="device", optimizer="device", products="fp8", mapping=mapping)
    toy = MODELS[model].build()
    blocks = MODELS[model].declared or describe(toy, [f"block.{index}" for index in range(len(toy))])
    with pytest.raises(PlanError, match=words):
        validate(cluster_of(*(4,) if mapping == FOUR else (2,)), plan, blocks)


def test_devices_that_are_refused() -> None:
    plan = Plan(params="device", grads="device", optimizer="device", products="fp8")
    blocks = MODELS["llama of sixteens"].declared
    validate(gpus(fp8=True), plan, blocks)
    validate(cluster_of(4), plan, blocks)  # a CPU emulates
    with pytest.raises(PlanError, match=r"device 'card' has no peak_flops_per_s\.fp8"):
        validate(gpus(fp8=False), plan, blocks)


def test_frozen_matrices_are_refused() -> None:
    config = MODELS["llama of sixteens"]
    plan = Plan(params="device", grads="device", optimizer="device", products="fp8")
    first = config.declared[1]
    frozen = replace(first, params=tuple(replace(param, trainable=False) for param in first.params))
    with pytest.raises(PlanError, match=r"query\.weight is frozen, as under adapters"):
        validate(cluster_of(4), plan, (config.declared[0], frozen, *config.declared[2:]))


def test_a_run_says_that_it_emulates(tmp_path: Path) -> None:
    """And refuses, in a line and before any rank starts, a model whose dims 16 does not divide."""
    run = write_run(tmp_path, 2, plan="zero3", steps=2)
    words = ("train", "--config", run, "--plan.products", "fp8:row")
    refused = terrace(*words, cwd=tmp_path)
    assert refused.returncode == 2
    assert "layers.0.attention.key.weight is 8 x 16, and dims must be multiples of 16" in refused.stderr
    (tmp_path / "config.json").write_text(json.dumps(MODEL | {"hidden_size": 32}))
    done = terrace(*words, "--folder", "run", "--verbose", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "warning: plan.products = 'fp8:row' is emulated on a CPU" in done.stdout
    assert "products of layers in fp8:row" in done.stdout
