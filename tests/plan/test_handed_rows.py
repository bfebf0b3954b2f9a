"""Rows between two plans: every rank that reads has its rows, each from the nearest rank that holds it."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from terrace.data.batches import rows_of_rank
from terrace.plan.handed_rows import Held, row_moves, sent_bytes
from terrace.plan.layout import Layout
from terrace.plan.presets import preset
from tests.support.toys import cluster_of

CLUSTER, ROWS = cluster_of(2, 2, 2), 16
MAPPINGS: tuple[Mapping[str, Mapping[str, Any]], ...] = (
    {},
    {"package": {"tensor": 2}},
    {"node": {"pipeline": 2}},
    {"system": {"pipeline": 2}},
    {"package": {"tensor": 2}, "system": {"pipeline": 2}},
)


def held_by(mapping: Mapping[str, Mapping[str, Any]], micro_batch: int) -> Held:
    plan = replace(preset("zero3", CLUSTER), mapping=mapping, micro_batch=micro_batch)
    return Held(CLUSTER, plan, ROWS)


@pytest.mark.parametrize(("one", "other"), list(product(MAPPINGS, MAPPINGS)))
def test_every_reader_has_its_rows_from_the_nearest_holder(
    one: Mapping[str, Mapping[str, Any]], other: Mapping[str, Mapping[str, Any]]
) -> None:
    held, read = held_by(one, 2), held_by(other, 1)
    moves = row_moves(held, read)
    for rank in range(CLUSTER.world_size):
        # The batches of a run deal rows likewise.
        layout = Layout.of(CLUSTER, read.plan)
        dealt = rows_of_rank(ROWS, layout.data_rank(rank), layout.data_degree, 1).tolist()
        assert list(read.rows(rank)) == (dealt if read.is_last(rank) else [])
        arrived = [row for move in moves if move.target == rank for row in move.rows]
        own = set(read.rows(rank)) & set(held.rows(rank))
        assert sorted([*own, *arrived]) == sorted(read.rows(rank))
    for move in moves:
        assert set(move.rows) <= set(held.rows(move.source))
        for row in move.rows:
            # Tiers of 2: two ranks differ on the outermost tier whose bit differs.
            apart = [(rank ^ move.target).bit_length() - 1 for rank in held.holders[row]]
            assert move.tier == min(apart) == (move.source ^ move.target).bit_length() - 1
    total = sum(sum(sent_bytes(CLUSTER, moves, rank, 10).values()) for rank in range(CLUSTER.world_size))
    assert total == 10 * sum(len(move.rows) for move in moves)
