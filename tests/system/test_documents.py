"""Packed documents and sliding windows: the tokens that a token attends to, alone and under every plan."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from terrace.base.errors import ModelError
from terrace.cluster.cluster import Cluster
from terrace.launch.start import LocalPool, World
from terrace.model import attention
from terrace.model.attention import MaskPieces, attend, document_begins, whole_mask
from terrace.model.attention_plans import AttentionPlans
from terrace.runtime.batch import Batch
from terrace.runtime.engine import Engine
from terrace.runtime.setup import Blocks, Workload
from tests.support.nightly import nightly
from tests.support.parity import Case, Outcome, check, data_rows, deviation, exact, reference, run, train
from tests.support.toys import MODELS, Rows, cluster_of, run_blocks

Sizes = tuple[int, ...]

LENGTH, MICRO_BATCH = 12, 2
# A GPT-2 here has eight positions, so its rows are longer than any document may be.
GPT2_ROWS = Rows(LENGTH, ((5, 1, 6), (8, 4), (1, 1, 3, 7), (7, 5)))
ROWS = Rows(LENGTH, ((5, 1, 6), (12,), (1, 1, 3, 7), (7, 5), (12,), (12,), (4, 8), (4, 8)))

pytestmark = pytest.mark.timeout(360)


def rows_of(model: str) -> Rows:
    return GPT2_ROWS if "gpt2" in model else ROWS


def whole_batch(model: str, num_rows: int) -> tuple[Tensor, Tensor]:
    """Tokens and positions of the first step."""
    batch = rows_of(model).batch(0, num_rows)
    assert batch.positions is not None
    return batch.inputs, batch.positions


def short_pieces(size: int = 4) -> AbstractContextManager[object]:
    """Let tiny documents be pieces of their own."""
    return patch.object(attention, "_SHORT_PIECE", size)


def naive(query: Tensor, key: Tensor, value: Tensor, positions: Tensor, window: int) -> Tensor:
    """Token by token, from the definition."""
    out = torch.zeros_like(query)
    repeats = query.shape[1] // key.shape[1]
    for row, head, place in product(*(range(size) for size in query.shape[:3])):
        begin = place - int(positions[row, place])
        begin = max(begin, 0, place - window + 1 if window else 0)
        keys = key[row, head // repeats, begin : place + 1]
        scores = keys @ query[row, head, place] / math.sqrt(query.shape[3])
        out[row, head, place] = scores.softmax(0) @ value[row, head // repeats, begin : place + 1]
    return out


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def positions_of(rows: list[list[int]], sequence: int) -> Tensor:
    """Positions of rows with these documents, the last one of each cut off or filled up to the row's end."""
    found = []
    for sizes in rows:
        row = [place for size in [*sizes, sequence] for place in range(size)]
        found.append(row[:sequence])
    return torch.tensor(found)


ROW = st.lists(st.integers(1, 9), max_size=5)


@settings(deadline=None)
@given(st.lists(ROW, min_size=1, max_size=3), st.integers(1, 17), st.integers(0, 6), st.sampled_from([1, 3, 64]))
def test_pieces_and_mask_are_what_the_definition_says(
    rows: list[list[int]], sequence: int, window: int, short: int
) -> None:
    positions = positions_of(rows, sequence)
    query, key, value = (normal(len(rows), heads, sequence, 4, seed=heads) for heads in (4, 2, 1))
    value = value.expand(-1, 2, -1, -1)
    wanted = naive(query, key, value, positions, window)
    with short_pieces(short):
        plan = AttentionPlans(window).plan(positions, query)
    assert plan is None or isinstance(plan, MaskPieces)
    torch.testing.assert_close(attend(query, key, value, plan), wanted, atol=1e-12, rtol=0)
    mask = whole_mask(document_begins(positions), window, torch.float64)
    torch.testing.assert_close(attend(query, key, value, mask), wanted, atol=1e-12, rtol=0)
    if plan is not None:  # no piece is larger than it must be
        longest = max(size for row in positions.tolist() for size in _sizes(row))
        most = max(short, min(longest, max(window, short) if window else longest))
        assert max(piece.size for piece in plan.pieces) <= most


def test_heads_of_keys_that_are_repeated_change_nothing() -> None:
    """As elsewhere than on a CPU, where no fused kernel takes grouped heads and a mask."""
    query, key, value = (normal(2, heads, 9, 4, seed=heads) for heads in (6, 3, 3))
    mask = whole_mask(document_begins(positions_of([[4], [1, 5]], 9)), 3, torch.float64)
    before = attend(query, key, value, mask)
    with patch.object(attention, "_takes_groups_under_a_mask", return_value=False) as asked:
        torch.testing.assert_close(attend(query, key, value, mask), before, atol=1e-12, rtol=0)
    assert asked.called


def _sizes(row: list[int]) -> list[int]:
    begins = [place for place, position in enumerate(row) if position == 0]
    return [end - begin for begin, end in zip(begins, [*begins[1:], len(row)], strict=True)]


def test_a_document_a_row_is_attended_to_by_the_causal_kernel() -> None:
    query = normal(2, 2, 8, 4)
    whole = positions_of([[], []], 8)
    for window in (0, 8, 20):
        assert AttentionPlans(window).plan(None, query) is AttentionPlans(window).plan(whole, query) is None
    assert AttentionPlans(0).plan(whole + 5, query) is None  # a row in the middle of a document
    assert AttentionPlans(7).plan(None, query) is not None


def test_a_plan_is_made_once_a_micro_batch_and_goes_with_it() -> None:
    blocks = MODELS["deep llama tied"].blocks(torch.float64)
    tokens, positions = whole_batch("llama", 2)
    with patch.object(attention, "cut", wraps=attention.cut) as made:
        for _ in range(2):  # the second stands for a recomputation
            before = run_blocks(blocks, tokens, positions)
        assert made.call_count == 1
        run_blocks(blocks, tokens, positions.clone())
        assert made.call_count == 2
        positions[0] = torch.arange(LENGTH)
        assert not torch.allclose(run_blocks(blocks, tokens, positions), before)
        assert made.call_count == 3
    plans: Any = blocks[1].attention
    assert len(plans.plans._packed._made) == 1  # that of the copy went with it


def test_every_family_reads_a_document_as_if_it_were_alone() -> None:
    for name in ("llama tied", "gpt2", "gpt_neox", "wide llama, window"):
        blocks = MODELS[name].blocks(torch.float64)
        tokens, positions = whole_batch(name, 4)
        packed = run_blocks(blocks, tokens, positions)
        for row in range(4):
            sizes = _sizes(positions[row].tolist())
            alone = [run_blocks(blocks, part[None])[0] for part in torch.split(tokens[row], sizes)]
            torch.testing.assert_close(packed[row], torch.cat(alone), atol=1e-12, rtol=0)


def test_positions_that_cannot_be_are_refused() -> None:
    blocks = MODELS["gpt2"].blocks(torch.float64)
    tokens = torch.zeros(1, 12, dtype=torch.int64)
    with pytest.raises(ModelError, match="sequence of 9 tokens needs as many positions; the model has 8"):
        run_blocks(blocks, tokens, positions_of([[9]], 12))
    with pytest.raises(ModelError, match="position -1 is negative"):
        run_blocks(blocks, tokens, torch.full((1, 12), -1))
    with pytest.raises(ModelError, match=r"positions \(1, 3\)"):
        run_blocks(MODELS["gpt_neox"].blocks(torch.float64), tokens, torch.zeros(1, 3, dtype=torch.int64))


class Doubled(nn.Module):
    """A block that has not heard of documents."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x * self.weight


class Shifted(Doubled):
    """One that has."""

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        return x * self.weight if positions is None else (x + positions) * self.weight


def test_blocks_of_any_kind_get_positions_only_when_there_are_some() -> None:
    batch = torch.ones(1, 3), torch.zeros(1, 3, dtype=torch.int64)
    positions = torch.tensor([[0, 1, 0]])

    def engine(block: nn.Module) -> Engine:
        cluster = cluster_of(1)
        return Engine(
            Blocks([block]), Workload(cluster=cluster, plan=exact("ddp", cluster), num_micros=1), lambda y, _: y.sum()
        )

    assert engine(Doubled()).step([Batch(*batch)], 0.0).loss == 2.0
    assert engine(Shifted()).step([Batch(*batch)], 0.0).loss == 1.0
    assert engine(Shifted()).step([Batch(*batch, positions)], 0.0).loss == pytest.approx(4 / 3)
    with pytest.raises(ModelError, match=r"Doubled\.forward takes no positions"):
        engine(Doubled()).step([Batch(*batch, positions)], 0.0)
    with pytest.raises(ModelError, match=r"positions \(1, 2\)"):
        engine(Shifted()).step([Batch(*batch, positions[:, :2])], 0.0)


def case(name: str, sizes: Sizes, model: str, num_micros: int, mapping: dict[str, Any], **more: object) -> Case:
    plan = exact(name, cluster_of(*sizes), micro_batch=MICRO_BATCH, mapping=mapping, **more)
    return Case(plan, num_micros, model, rows=rows_of(model))


STAGES: dict[str, Any] = {"package": {"pipeline": 2}}
CASES: dict[Sizes, list[Case]] = {
    (2,): [
        case("ddp", (2,), "gpt2", 2, {}),
        case("zero3", (2,), "llama tied", 2, {}, recompute=("*",)),
        case("ddp", (2,), "wide llama, 2 kv heads", 2, {"package": {"tensor": 2}}),
        case("ddp", (2,), "wide gpt2", 2, {"package": {"tensor": 2}}, sequence_parallel=False),
        case("ddp", (2,), "wide gpt2", 1, {"package": {"tensor": 2}}, recompute=("*",)),
        case("ddp", (2,), "wide llama, window", 2, {"package": {"tensor": 2}}),
    ],
    (2, 2): [
        case("three-level", (2, 2), "wide llama, window", 2, {}, unit=2, recompute=("block.1",)),
        case("zero3", (2, 2), "llama tied", 3, STAGES, schedule="1f1b", recompute=("block.[02]",)),
        case("ddp", (2, 2), "deep gpt2", 4, STAGES, schedule="zbv"),
        case("zero2", (2, 2), "wide llama, window", 2, STAGES, schedule="zb-h1", recompute=("*",)),
    ],
}


def train_packed(world: World, cluster: Cluster, cases: Sequence[Case]) -> list[Outcome]:
    with short_pieces():
        return train(world, cluster, cases)


@pytest.mark.parametrize(("sizes", "first"), [((2, 2), 0), *nightly(((2, 2), 1), ((2,), 0), ((2,), 1))], ids=str)
def test_packed_documents_train_as_every_document_alone(pool: LocalPool, sizes: Sizes, first: int) -> None:
    check(pool, cluster_of(*sizes), CASES[sizes][first::2], train_packed)


def unmasked_rows(engine: Engine, case: Case, step: int) -> list[Batch]:
    return [Batch(batch.inputs, batch.labels) for batch in data_rows(engine, case, step)]


def test_the_comparison_sees_a_mask_that_is_left_away(pool: LocalPool) -> None:
    """Without positions a token sees other documents, which nothing in the reference can."""
    one, cluster = CASES[(2,)][1], cluster_of(2)
    (outcomes,) = run(pool, cluster, [replace(one, batches=unmasked_rows)], train_packed)
    found = deviation(outcomes, reference(cluster, one))
    found.pop("loads", None)  # it may choose the same experts
    assert min(found.values()) > 1e-4, found
