"""Our orders beside those of torch.distributed.pipelining, read from its private generators.

By intention ours differ in three places: interleaved 1F1B refuses micro-batches that the stages do not divide, where
torch changes the size of its groups; 1F1B with fewer micro-batches than stages caps its warm-up, where torch's list
names micro-batches that do not exist; breadth-first runs backwards first in, first out, torch last in, first out.
"""

from types import SimpleNamespace
from typing import Any

import pytest

from terrace.program.schedules.csv_form import from_csv, to_csv
from terrace.program.schedules.orders import Orders
from terrace.program.schedules.registry import orders_for
from tests.support.schedules import AUTOMATIC, CHUNKED, NAMES, even_seconds

torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules", reason="torch is the oracle here")


def rows_of(name: str, stages: int, micros: int, chunks: int) -> list[list[str]]:
    """Return the cells of torch's schedule, one row a rank, without idle slots and reductions."""
    state = SimpleNamespace(
        pp_group_size=stages,
        num_stages=chunks * stages,
        n_local_stages=chunks,
        microbatches_per_round=stages,
        _stages=[None] * chunks,
        _num_stages=stages,
        _n_microbatches=micros,
    )
    kind = getattr(torch_schedules, name)
    rows: Any
    if chunks == 1:
        rows = kind._get_pipeline_order(state)
    else:
        rows = [kind._calculate_single_rank_operations(state, rank) for rank in range(stages)]
    cells = [[str(action) for action in rows[rank] if action is not None] for rank in range(stages)]
    return [[cell for cell in row if "REDUCE_GRAD" not in cell] for row in cells]


def cells_of(orders: Orders) -> list[list[str]]:
    return [row.split(",") for row in to_csv(orders).splitlines()]


@pytest.mark.parametrize(("stages", "micros"), [(1, 1), (2, 2), (4, 8), (5, 7)])
def test_gpipe(stages: int, micros: int) -> None:
    ours = orders_for("gpipe", num_stages=stages, num_micros=micros)
    assert cells_of(ours) == rows_of("ScheduleGPipe", stages, micros, 1)


def test_orders_with_messages_gathers_and_tasks_at_once_are_read() -> None:
    """The file of torch's own runtime: what it adds to an order is left out, and what it joins is taken apart."""
    ours = orders_for("interleaved", num_stages=2, num_chunks=2, num_micros=4)
    order: Any = {
        rank: [torch_schedules._Action.from_str(cell) for cell in row] for rank, row in enumerate(cells_of(ours))
    }
    with_gathers = {rank: torch_schedules._add_unshard_reshard(row) for rank, row in order.items()}
    whole: Any = torch_schedules._add_send_recv(with_gathers, stage_to_rank=lambda stage: stage % 2, num_stages=4)
    text = "\n".join(",".join(map(str, row)) for row in whole.values())
    assert all(word in text for word in ("UNSHARD", "RESHARD", "0SEND_F0", "1RECV_F0", "RECV_B"))
    assert from_csv(text).tasks == ours.tasks
    joined = to_csv(ours).replace("1F2,1B0", "(1F2;1B0)OVERLAP_F_B").replace("3B0", "3B0,,3REDUCE_GRAD")
    assert "OVERLAP" in joined
    assert from_csv(joined).tasks == ours.tasks


@pytest.mark.parametrize(("stages", "micros"), [(1, 1), (2, 2), (4, 8), (5, 7)])
def test_1f1b(stages: int, micros: int) -> None:
    theirs = rows_of("Schedule1F1B", stages, micros, 1)
    last = stages - 1
    if theirs[last][0] == f"{last}F1":  # that list, unlike what torch runs, counts forwards of the last rank from 1
        theirs[last] = [f"{last}F{int(cell.split('F')[1]) - 1}" if "F" in cell else cell for cell in theirs[last]]
    assert cells_of(orders_for("1f1b", num_stages=stages, num_micros=micros)) == theirs


@pytest.mark.parametrize(("stages", "chunks", "micros"), [(2, 2, 2), (4, 2, 8), (3, 3, 12), (4, 4, 4)])
def test_interleaved(stages: int, chunks: int, micros: int) -> None:
    ours = orders_for("interleaved", num_stages=stages, num_chunks=chunks, num_micros=micros)
    assert cells_of(ours) == rows_of("ScheduleInterleaved1F1B", stages, micros, chunks)


@pytest.mark.parametrize(("stages", "chunks", "micros"), [(2, 2, 3), (4, 2, 8), (3, 3, 5)])
def test_breadth_first_but_for_the_turn_of_backwards(stages: int, chunks: int, micros: int) -> None:
    ours = orders_for("breadth-first", num_stages=stages, num_chunks=chunks, num_micros=micros)
    half = chunks * micros
    for mine, theirs in zip(cells_of(ours), rows_of("ScheduleLoopedBFS", stages, micros, chunks), strict=True):
        passes = [theirs[first : first + micros] for first in range(half, 2 * half, micros)]
        assert mine == theirs[:half] + [cell for passed in passes for cell in reversed(passed)]


@pytest.mark.parametrize(("stages", "micros"), [(1, 1), (1, 4), (2, 3), (4, 2), (4, 5), (4, 12), (5, 9)])
def test_zbv(stages: int, micros: int) -> None:
    ours = orders_for("zbv", num_stages=stages, num_micros=micros)
    assert cells_of(ours) == rows_of("ScheduleZBVZeroBubble", stages, micros, 2)


@pytest.mark.parametrize("name", NAMES)
def test_torch_accepts_our_csv(name: str) -> None:
    """Its check of a schedule passes, and finds the same stage for every virtual stage."""
    numbers: dict[str, Any] = {"num_chunks": 2} if name in (*CHUNKED, "zbv") else {}
    numbers |= {"unit": 4} if name == "zeropp" else {}
    if name in AUTOMATIC:
        numbers = {"seconds": even_seconds(4, forward_s=1.0, input_s=1.0, weight_s=1.0), "weight_share": 0.4}
    numbers |= {"memory_limit": 5} if name == "zb-auto" else {}
    ours = orders_for(name, num_stages=4, num_micros=8, **numbers)
    action = torch_schedules._Action.from_str
    rows = {stage: [action(cell) for cell in row] for stage, row in enumerate(cells_of(ours))}
    found = torch_schedules._validate_schedule(rows, 4, ours.num_virtual, 8)
    assert found == {virtual: stage for virtual, (stage, _) in enumerate(ours.holders())}
