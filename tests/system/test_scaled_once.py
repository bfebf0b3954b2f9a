"""Operands that are quantised once, against layers that quantise both operands of every product: the same bits.

Losses, norms and parameters after steps, over kept and recomputed operations, backwards in two halves, tensor ranks and
experts; how often anything is quantised; and that no codes stay in memory.
"""

import gc
import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from terrace.cluster.cluster import Cluster
from terrace.launch.start import LocalPool, World
from terrace.plan.recompute import OPERATIONS
from tests.support.nightly import nightly
from tests.support.parity import Case, Outcome, engine_of, exact, run, run_case
from tests.support.scaled_apart import apart, counted
from tests.support.scaled_reference import SGD
from tests.support.toys import MODELS, Rows, cluster_of

pytestmark = pytest.mark.timeout(240)

WORLD: Any = SimpleNamespace(rank=0, world_size=1)
ROWS = Rows(20)


def case(name: str, sizes: tuple[int, ...], micros: int, **more: Any) -> Case:
    model = more.pop("model", "llama of sixteens")
    changes = {"products": "fp8", "compute": "bf16", "master": "fp32"} | more
    return Case(
        replace(exact(name, cluster_of(*sizes)), **changes), micros, model, rows=ROWS, optimizer=SGD, num_steps=2
    )


def both(world: World, cluster: Cluster, cases: Sequence[Case]) -> list[Outcome]:
    """Outcomes of every case, and again of every operand by itself."""
    found = []
    for each in cases:
        found.append(run_case(world, cluster, each))
        with apart():
            found.append(run_case(world, cluster, each))
    return found


def compare(outcomes: Sequence[Outcome], cases: Sequence[Case]) -> None:
    for index, each in enumerate(cases):
        once, by_itself = outcomes[2 * index : 2 * index + 2]
        assert (once.complaint, by_itself.complaint) == ("", ""), each.plan
        assert (once.losses, once.norms) == (by_itself.losses, by_itself.norms), each.plan
        assert torch.equal(once.parameters, by_itself.parameters), each.plan


EVERYTHING = ("block.*: " + ", ".join(OPERATIONS),)
ALONE = [
    case("ddp", (1,), 2),
    case("ddp", (1,), 2, products="fp8:row", compute="fp32"),
    case("ddp", (1,), 2, products="fp8+e4m3", recompute=("*",)),
    case("ddp", (1,), 2, recompute=EVERYTHING),
    case("ddp", (1,), 2, products="fp8:row+e4m3", recompute=EVERYTHING),
    case("ddp", (1,), 2, model="mixture of sixteens"),
    case("ddp", (1,), 2, model="mixture of sixteens", products="fp8:row", recompute=("block.*: attention",)),
]


@pytest.mark.parametrize(
    "each",
    [*ALONE[4:6], *nightly(*ALONE[:4], *ALONE[6:])],
    ids=lambda each: f"{each.model} {each.plan.products} {each.plan.recompute}",
)
def test_one_process(each: Case) -> None:
    compare(both(WORLD, cluster_of(1), [each]), [each])


PIPELINE: dict[str, Any] = {"model": "deep llama of sixteens", "mapping": {"node": {"pipeline": 2}}}
TENSOR: dict[str, Any] = {"mapping": {"package": {"tensor": 2}}}
GRIDS: dict[tuple[int, ...], list[Case]] = {
    (2,): [
        case("ddp", (2,), 2, **TENSOR),
        case("ddp", (2,), 2, products="fp8:row", recompute=("block.*: attention, mlp",), **TENSOR),
        case("ddp", (2,), 2, sequence_parallel=False, **TENSOR),
        case("ddp", (2,), 2, recompute=("*",), **TENSOR),
        case("zero3", (2,), 1, model="wide mixture of sixteens", experts={"package": {"expert": 2}}),
    ],
    (2, 2): [
        case("ddp", (2, 2), 2, products="fp8:row", schedule="zbv", **PIPELINE),
    ],
}
NIGHTLY = {
    (2, 2): [
        case("zero3", (2, 2), 4, schedule="zb-h1", **PIPELINE),
        case("ddp", (2, 2), 4, schedule="zb-h1", recompute=EVERYTHING, **PIPELINE),
        case("zero3", (2, 2), 2, mapping={"node": {"context": 2}}, products="fp8:row"),
        case("zero3", (2, 2), 1, model="wide mixture of sixteens", experts={"package": {"rows": 2}}),
    ]
}


@pytest.mark.parametrize(("sizes", "cases"), [*GRIDS.items(), *nightly(*NIGHTLY.items())], ids=["2", "4", "more"])
def test_ranks(pool: LocalPool, sizes: tuple[int, ...], cases: list[Case]) -> None:
    for outcomes in zip(*run(pool, cluster_of(*sizes), cases, both), strict=True):
        compare(outcomes, cases)


def test_every_operand_is_quantised_once() -> None:
    """Elements of a forward and a backward of one layer, by hand; none of a transposed operand with one scale."""
    hidden, inner, tokens, layers = 32, 96, 20, 2
    matrices = [param for param in MODELS["llama of sixteens"].declared[1].params if param.is_matrix]
    weights = sum(math.prod(param.shape) for param in matrices)
    results = tokens * sum(param.shape[0] for param in matrices)
    entered = tokens * (3 * hidden + inner)  # of query, key and value; of output; of gate and up; of down
    wanted = {
        ("fp8", ()): 2 * weights + entered + results,
        ("fp8:row", ()): 2 * weights + 2 * entered + 2 * results,
        ("fp8", ("*",)): 3 * weights + 2 * entered + results,
        ("fp8", ("block.*: mlp",)): 2 * weights + entered + results + tokens * inner,
        ("fp8", ("block.*: norms",)): 2 * weights + entered + results + tokens * 2 * hidden,
    }
    for (products, recompute), numel in wanted.items():
        each = replace(case("ddp", (1,), 1, products=products, recompute=recompute), num_steps=1)
        with counted() as found:
            run_case(WORLD, cluster_of(1), each)
        assert sum(found) == layers * numel, (products, recompute)


def codes_alive() -> set[int]:
    """Tensors of codes that anything in this process refers to, by `id`."""
    gc.collect()
    kinds = (torch.float8_e4m3fn, torch.float8_e5m2)
    tensors = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
    return {id(each) for each in tensors if each.dtype in kinds}


def test_no_codes_stay_after_a_step() -> None:
    """Neither of inputs nor of gradients, whether operations are recomputed or not."""
    before = codes_alive()
    for recompute in ((), EVERYTHING, ("*",)):
        each = case("ddp", (1,), 2, recompute=recompute)
        engine = engine_of(WORLD, cluster_of(1), each)
        for step in range(2):
            engine.step(each.batches(engine, each, step), each.optimizer.lr)
        engine.evaluate(each.batches(engine, each, 0))
        assert codes_alive() <= before, recompute
        engine.close()
