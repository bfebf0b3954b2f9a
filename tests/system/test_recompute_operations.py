"""Operations that are recomputed alone: the same bits as without, under every axis that takes them."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch

from terrace.base.errors import PlanError
from terrace.cluster.cluster import Cluster
from terrace.launch.start import LocalPool, World
from terrace.model.block_operations import layer_operations
from terrace.model.blocks import block_specs
from terrace.model.config import parse_model
from terrace.plan.recompute import recomputed_parts
from terrace.runtime import replay
from terrace.runtime.engine import Engine
from terrace.runtime.setup import Blocks, Workload
from terrace.simulate.activations import activations_of, recomputing
from terrace.simulate.footprint import work_of
from tests.support.nightly import nightly
from tests.support.parity import Case, Outcome, exact, run_case
from tests.support.tensor_memory import kept_by_a_layer
from tests.support.toys import MODELS, Rows, cluster_of

pytestmark = pytest.mark.timeout(360)

ALL = ("block.*: attention, mlp, norms",)
SOME = ("block.* every 2: attention", "block.1: mlp, norms")
ATTENTION = ("block.*: attention",)
UNDER_TENSOR = ("block.*: attention, mlp",)
PACKED = Rows(12, ((5, 1, 6), (12,), (1, 1, 3, 7), (7, 5)))


def case(recompute: tuple[str, ...], sizes: tuple[int, ...], name: str, model: str, micros: int, **more: Any) -> Case:
    rows = more.pop("rows", Rows())
    return Case(exact(name, cluster_of(*sizes), recompute=recompute, **more), micros, model, rows=rows)


# A case, and the operations that its ranks run again in a step, all together.
CASES: dict[tuple[int, ...], list[tuple[Case, int]]] = {
    (2,): [
        (case(ALL, (2,), "zero3", "llama tied", 2), 2 * 2 * 2 * 4),
        (case(SOME, (2,), "ddp", "gpt2", 1), 2 * (1 + 3)),
        (case(ALL, (2,), "zero2", "gpt_neox", 2, unit=2), 2 * 2 * 2 * 4),
        (case(ALL, (2,), "zero3", "wide llama, window", 1, rows=PACKED), 2 * 2 * 4),
        (case(ALL, (2,), "ddp", "llama, frozen layer", 1), 2 * 2 * 4),
        (
            case(UNDER_TENSOR, (2,), "ddp", "wide llama, 2 kv heads", 2, mapping={"package": {"tensor": 2}}),
            2 * 2 * 2 * 2,
        ),
        (
            case(
                UNDER_TENSOR, (2,), "ddp", "wide gpt2", 1, mapping={"package": {"tensor": 2}}, sequence_parallel=False
            ),
            2 * 2 * 2,
        ),
        (
            case(
                UNDER_TENSOR, (2,), "ddp", "wide qwen3, 2 kv heads", 1, mapping={"package": {"tensor": {"columns": 2}}}
            ),
            2 * 2 * 2,
        ),
        (case(("block.* first 1: attention",), (2,), "zero3", "mixture tied", 1), 2),
        (case(ATTENTION, (2,), "zero3", "experts", 2, experts={"package": {"expert": 2}}), 2 * 2 * 2),
    ],
    (2, 2): [
        (
            case(ALL, (2, 2), "zero2", "deep llama tied", 4, mapping={"node": {"pipeline": 2}}, schedule=schedule),
            2 * 6 * 4 * 4,
        )
        for schedule in ("1f1b", "zb-h1", "zbv")
    ]
    + [
        (
            case(
                UNDER_TENSOR,
                (2, 2),
                "ddp",
                "deep gpt2",
                4,
                mapping={"package": {"tensor": 2}, "node": {"pipeline": 2}},
                schedule="zb-h1",
            ),
            2 * 6 * 4 * 2,
        ),
    ],
}


def train_both(world: World, cluster: Cluster, cases: Sequence[Case]) -> list[tuple[Outcome, Outcome, int]]:
    """Train every case as it is and with everything kept, and count the operations that were run again in a step."""
    found = []
    for each in cases:
        kept = run_case(world, cluster, replace(each, plan=replace(each.plan, recompute=())))
        again = 0
        run = replay._Replay.again

        def counted(self: replay._Replay, run: Any = run) -> None:
            nonlocal again
            again += 1
            run(self)

        with patch.object(replay._Replay, "again", counted):
            found.append((run_case(world, cluster, each), kept, again // each.num_steps))
    return found


@pytest.mark.parametrize(
    ("compute", "first"), [("fp64", 1), *nightly(*product(("fp64",), (0, 2, 3)), *product(("fp32",), range(4)))]
)
@pytest.mark.parametrize("sizes", CASES, ids=str)
def test_the_bits_of_what_is_kept(pool: LocalPool, sizes: tuple[int, ...], compute: str, first: int) -> None:
    """Losses, norms and parameters after three steps; each operation once in a backward, and no message more."""
    rows = CASES[sizes][first::4]
    plans = [replace(each.plan, compute=compute, master=compute) for each, _ in rows]  # type: ignore[arg-type]
    cases = [replace(each, plan=plan) for (each, _), plan in zip(rows, plans, strict=True)]
    cluster = cluster_of(*sizes)
    by_rank = pool.run(cluster.world_size, train_both, cluster, cases, timeout_s=300.0)
    for each, (_, number), outcomes in zip(cases, rows, zip(*by_rank, strict=True), strict=True):
        for again, kept, _ in outcomes:
            assert (again.losses, again.norms) == (kept.losses, kept.norms), each
            assert again.parameters.equal(kept.parameters), each
            assert not again.complaint, each
        assert sum(counted for *_, counted in outcomes) == number, each


SIZES = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 8}
LLAMA = parse_model(SIZES | {"model_type": "llama", "intermediate_size": 160, "num_key_value_heads": 4})


# The profiler does not always see what the thread of messages allocates and frees; a wrong formula is wrong each time.
TRIES = 3


@pytest.mark.parametrize("splits", [False, True], ids=["sequences whole", "sequence parallelism"])
def test_a_layer_of_tensor_ranks_keeps_the_predicted_bytes(pool: LocalPool, splits: bool) -> None:
    """After a forward of the engine, on every rank; a dropped operation is 4 % and more of a layer."""
    cluster, sequence = cluster_of(2), 96
    for recompute in (("layers.*: attention",), ("layers.*: mlp",)):
        plan = exact("ddp", cluster, mapping={"package": {"tensor": 2}}, sequence_parallel=splits, micro_batch=2)
        plan = replace(plan, compute="fp32", master="fp32", recompute=recompute)
        blocks = block_specs(LLAMA)
        work = recomputing(
            work_of(cluster, plan, layer_operations(LLAMA), sequence),
            recomputed_parts(recompute, blocks)[1],
        )
        wanted = pytest.approx([activations_of(work, blocks[1], "cpu").kept_bytes] * 2, rel=0.03)
        for _ in range(TRIES):
            kept = pool.run(2, kept_by_a_layer, cluster, plan, LLAMA, sequence, timeout_s=60.0)
            if kept == wanted:
                break
        assert kept == wanted, recompute


def test_blocks_of_ones_own_have_no_operations() -> None:
    model = MODELS["toy"]
    with pytest.raises(PlanError, match=r"no decoder layer matches 'block\.\*'"):
        Engine(
            Blocks(model.blocks(torch.float64)),
            Workload(cluster=cluster_of(1), plan=exact("ddp", cluster_of(1), recompute=ALL), num_micros=1),
            model.objective,
        )
