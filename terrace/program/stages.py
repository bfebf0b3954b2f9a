"""Builds the pipeline stages of a plan: the blocks of each, and the schedule's orders as groups."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from terrace.base.errors import PlanError, ProgramError
from terrace.model.spec import BlockSpec
from terrace.plan.order_file import CSV, schedule_words
from terrace.plan.plan import Plan
from terrace.plan.stage import Group, Pass, Stage
from terrace.plan.wire import BETWEEN, BETWEEN_STAGES, by_boundary
from terrace.program.schedules.csv_form import from_csv
from terrace.program.schedules.orders import Orders, StageTask
from terrace.program.schedules.registry import in_rounds, orders_for, schedule_names, takes
from terrace.program.schedules.seconds import TaskSeconds
from terrace.program.shares import block_costs, share, virtual_costs

DEFAULT_SCHEDULE = "1f1b"
_PASSES = tuple(Pass)  # by number: orders may hold plain integers
_WEIGHT_SHARE = 32 / 34  # M_W / M_B of a layer without the scores of attention (Qi et al. 2401.10241, Table 1)


def make_stages(
    plan: Plan,
    blocks: Sequence[BlockSpec],
    num_stages: int,
    num_micros: int,
    sequence: int,
    sizes: Sequence[int] = (),
    memory_bytes: float = math.inf,
) -> tuple[Stage, ...]:
    """The stages of a pipeline, which together run each block of the model exactly once.

    `sizes` is the model-state bytes of every block on a rank; if the plan does not set `stages`, each stage gets at
    most `memory_bytes` of them where possible. Raises `PlanError` for more virtual stages than blocks, and for numbers
    that the schedule does not support.
    """
    orders = plan_orders(plan, blocks, num_stages, num_micros, sequence, sizes, memory_bytes)
    # Chunks of a stage share its device, so each gets an equal part of the memory.
    chunks = _cut(plan, blocks, orders.num_virtual, sequence, sizes, memory_bytes / orders.num_chunks)
    holders = [stage for stage, _ in orders.holders()]
    runs_on = {block: holders[virtual] for virtual, chunk in enumerate(chunks) for block in chunk}
    ties = _ties(blocks, runs_on)
    alone: dict[StageTask, Group] = {}  # groups of one task, which stages share
    stages = [_stage(plan, orders, stage, chunks, holders, ties, alone) for stage in range(num_stages)]
    _check_boundaries(plan, stages)
    # All stages learn all pairs: process groups are made collectively, in one order on every rank.
    pairs = {
        (min(stage.index, peer), max(stage.index, peer))
        for stage in stages
        for peer in (*stage.onward, *stage.back, *dict(stage.ties).values())
        if peer is not None
    }
    return tuple(replace(stage, pairs=tuple(sorted(pairs))) for stage in stages)


def _check_boundaries(plan: Plan, stages: Sequence[Stage]) -> None:
    """Raise `PlanError` for formats by boundary where the schedule sends from the last member to the first."""
    for message in BETWEEN_STAGES:
        for tier, text in plan.wire.get(message.value, {}).items():
            inside = len(stages) // (len(by_boundary(text)) + 1)
            peers = ((each.index, peer) for each in stages for peer in (*each.onward, *each.back) if peer is not None)
            if BETWEEN in text and any(abs(one // inside - other // inside) > 1 for one, other in peers):
                raise PlanError(
                    f"wire.{message.value}.{tier} = {text!r} has formats by boundary, and schedule "
                    f"{schedule_words(plan.schedule)} also sends from the last member to the first: write one format, "
                    "or a schedule of one chunk, 1f1b"
                )


def plan_orders(
    plan: Plan,
    blocks: Sequence[BlockSpec],
    num_stages: int,
    num_micros: int,
    sequence: int,
    sizes: Sequence[int] = (),
    memory_bytes: float = math.inf,
) -> Orders:
    """The orders of a plan's schedule. Raises `PlanError` for numbers that it does not support."""
    # The number after the colon means chunks or a memory limit, as the schedule takes it.
    name, number = plan_schedule(plan)
    if name == CSV:
        return _fitting(read_order(number), num_stages, num_micros)
    wanted = takes(name)
    numbers: dict[str, object] = {"num_stages": num_stages, "num_micros": num_micros}
    if "num_chunks" in wanted:
        numbers["num_chunks"] = _chunks(plan, number)
    elif "memory_limit" in wanted:
        numbers["memory_limit"] = _limit(plan, number)
    elif number is not None and number != "1":
        raise PlanError(f"schedule = {plan.schedule!r}: {name} has one chunk a stage; write {name!r}")
    if "unit" in wanted:
        numbers["unit"] = plan.unit
    # Automatic schedules need task times, which depend on how blocks are cut; the plan's cut is made first.
    if "seconds" in wanted:
        bounds = _cut(plan, blocks, num_stages, sequence, sizes, memory_bytes)
        numbers |= {"seconds": _seconds(blocks, bounds, sequence), "weight_share": _WEIGHT_SHARE}
    try:
        return orders_for(name, **numbers)
    except PlanError as error:
        raise PlanError(
            f"schedule = {plan.schedule or name!r} with {num_stages} stages: {error} (num_chunks is the number after "
            "the colon, num_micros is train.batch / plan.micro_batch / data ranks)"
        ) from error


def read_order(rows: str | None) -> Orders:
    """The orders in a plan's `schedule` after "csv:". Raises `PlanError` for rows that are no order."""
    try:
        return from_csv(rows or "")
    except ProgramError as error:
        raise PlanError(f"schedule = {CSV!r}: {error}") from error


def _fitting(orders: Orders, num_stages: int, num_micros: int) -> Orders:
    if (orders.num_stages, orders.num_micros) != (num_stages, num_micros):
        raise PlanError(
            f"schedule = {CSV!r}: its order is of {orders.num_stages} stages and {orders.num_micros} micro-batches, "
            f"and the step has {num_stages} and {num_micros}: write an order of these, or change the pipeline of "
            "plan.mapping, train.batch or plan.micro_batch"
        )
    return orders


def parse_schedule(text: str) -> tuple[str, str | None]:
    """(Name, number or None) of a schedule such as "1f1b" or "interleaved:3"; of an order by hand, "csv" and its rows.

    Raises `PlanError` if it is unknown.
    """
    name, colon, number = text.partition(":")
    if name == CSV:
        return name, number
    if name not in schedule_names():
        takes(name)  # raises, and says which name may be meant
    return name, number if colon else None


def plan_schedule(plan: Plan) -> tuple[str, str | None]:
    """(Name, number or None) of a plan's schedule, or of the default if it is None."""
    return parse_schedule(DEFAULT_SCHEDULE if plan.schedule is None else plan.schedule)


def num_virtual(plan: Plan, num_stages: int) -> int:
    """Number of virtual stages of a plan's schedule on `num_stages` stages. Raises `PlanError` if it is unknown."""
    name, number = plan_schedule(plan)
    if name == CSV:
        return read_order(number).num_virtual
    return num_stages * (_chunks(plan, number) if "num_chunks" in takes(name) else _own_chunks(name))


def stages_of(plan: Plan, blocks: Sequence[BlockSpec], num_stages: int, sequence: int) -> list[int]:
    """The stage of every virtual stage under a plan's schedule, in model order."""
    name, rows = plan_schedule(plan)
    if name != CSV and num_virtual(plan, num_stages) == num_stages:
        return list(range(num_stages))
    # A step of a few micro-batches has the placement of all.
    num_micros = read_order(rows).num_micros if name == CSV else num_stages * plan.unit
    orders = plan_orders(plan, blocks, num_stages, num_micros, sequence)
    return [stage for stage, _ in orders.holders()]


def blocks_by_stage(stages: Sequence[Stage]) -> tuple[int, ...]:
    """Number of blocks of every virtual stage, in model order, as `plan.stages` has them."""
    chunks = sorted((chunk for stage in stages for chunk in stage.chunks), key=lambda chunk: chunk.start)
    return tuple(map(len, chunks))


def period(plan: Plan, num_stages: int) -> int:
    """Number of micro-batches after which a plan's order and reductions repeat."""
    if num_stages == 1:
        return plan.unit
    name, rows = plan_schedule(plan)
    if name == CSV:
        return read_order(rows).num_micros
    return math.lcm(plan.unit, num_stages) if in_rounds(name) else plan.unit


@cache
def _own_chunks(name: str) -> int:
    if takes(name) - {"num_stages", "num_micros"}:
        return 1
    # A tiny instance tells how many chunks its placement has.
    return orders_for(name, num_stages=2, num_micros=4).num_chunks


def check_virtual(virtual: int, num_blocks: int) -> None:
    """Raise `PlanError` if there are more virtual stages than blocks."""
    if virtual > num_blocks:
        raise PlanError(
            f"{virtual} virtual stages (stages x chunks) of a model of {num_blocks} blocks: each needs at least one, "
            f"since an empty one would only pass activations on; use at most {num_blocks}"
        )


def check_blocks(plan: Plan, virtual: int, num_blocks: int) -> None:
    """Raise `PlanError` unless `plan.stages` assigns every block to one virtual stage."""
    if len(plan.stages) != virtual or sum(plan.stages) != num_blocks or min(plan.stages) < 1:
        raise PlanError(
            f"stages = {list(plan.stages)}: give the number of blocks of each of the {virtual} virtual stages, at "
            f"least 1 each, {num_blocks} together (embedding and head are blocks), or leave it out"
        )


def _chunks(plan: Plan, number: str | None) -> int:
    if number is None:
        return 2
    if not number.isdecimal() or not 0 < int(number) < 1000:
        raise PlanError(f"schedule = {plan.schedule!r}: {number!r} is no number of chunks a stage; write 1 or more")
    return int(number)


def _limit(plan: Plan, number: str | None) -> float:
    try:
        limit = float(number or "")
    except ValueError:
        limit = 0.0
    if not 1 <= limit < 1e6:
        raise PlanError(
            f"schedule = {plan.schedule!r} needs the micro-batches whose activations a stage may keep, 1 or more: "
            "write 'zb-auto:4' for four"
        )
    return limit


def _cut(
    plan: Plan, blocks: Sequence[BlockSpec], virtual: int, sequence: int, sizes: Sequence[int], room: float
) -> list[range]:
    check_virtual(virtual, len(blocks))
    if not plan.stages:
        return share(virtual_costs(blocks, sequence), virtual, sizes, room)
    check_blocks(plan, virtual, len(blocks))
    stops = [sum(plan.stages[: index + 1]) for index in range(virtual)]
    return [range(stop - num, stop) for stop, num in zip(stops, plan.stages, strict=True)]


def _seconds(blocks: Sequence[BlockSpec], chunks: Sequence[range], sequence: int) -> TaskSeconds:
    """Relative task times of every virtual stage, in multiplications per token; messages take no time."""
    costs = block_costs(blocks, sequence)
    products = tuple(sum(costs[block].products for block in chunk) for chunk in chunks)
    scores = tuple(sum(costs[block].scores for block in chunk) for chunk in chunks)
    forward = tuple(product + score for product, score in zip(products, scores, strict=True))
    # Scores have no weights: both gradients of their two products belong to the input half.
    inputs = tuple(product + 2 * score for product, score in zip(products, scores, strict=True))
    whole = tuple(first + second for first, second in zip(inputs, products, strict=True))
    return TaskSeconds(
        forward_s=forward, backward_s=whole, input_s=inputs, weight_s=products, edge_s=(0.0,) * (len(chunks) - 1)
    )


def _ties(blocks: Sequence[BlockSpec], runs_on: dict[int, int]) -> dict[int, tuple[int, int]]:
    """Block -> (owner's stage, copy's stage), for every block that a block of another stage is tied to."""
    ties: dict[int, tuple[int, int]] = {}
    for index, block in enumerate(blocks):
        for owner in block.tied_to:
            pair = runs_on[owner], runs_on[index]
            if pair[0] == pair[1]:
                continue
            # TIE is one exchange between two stages; a third holder would need a reduction.
            if ties.setdefault(owner, pair) != pair:
                raise PlanError(
                    f"blocks of two other stages are tied to {blocks[owner].name}: let `stages` put them on one"
                )
    return ties


def _stage(
    plan: Plan,
    orders: Orders,
    stage: int,
    chunks: Sequence[range],
    holders: Sequence[int],
    ties: dict[int, tuple[int, int]],
    alone: dict[StageTask, Group],
) -> Stage:
    row, last = orders.placement[stage], orders.num_virtual - 1

    def neighbour(virtual: int) -> int | None:
        return holders[virtual] if 0 <= virtual <= last and holders[virtual] != stage else None

    return Stage(
        index=stage,
        num_stages=orders.num_stages,
        num_micros=orders.num_micros,
        chunks=tuple(chunks[virtual] for virtual in row),
        groups=tuple(_groups(orders, stage, plan.unit, alone)),
        onward=tuple(neighbour(virtual + 1) for virtual in row),
        back=tuple(neighbour(virtual - 1) for virtual in row),
        ties=tuple(
            (block, other) for block, pair in ties.items() for here, other in (pair, pair[::-1]) if here == stage
        ),
        copies=tuple(block for block, (_, there) in ties.items() if there == stage),
    )


def _groups(orders: Orders, stage: int, unit: int, alone: dict[StageTask, Group]) -> list[Group]:
    if unit == 1:  # no two tasks of a pass and a chunk are of one micro-batch
        for task in orders.tasks[stage]:
            if task not in alone:
                pass_, chunk, micro = task
                alone[task] = Group(_PASSES[pass_], chunk, (micro,))
        return [alone[task] for task in orders.tasks[stage]]
    joined: list[tuple[int, int, list[int]]] = []
    for pass_, chunk, micro in orders.tasks[stage]:
        # A group must not cross a unit: gradients are reduced between units.
        if joined and joined[-1][:2] == (pass_, chunk) and joined[-1][2][-1] // unit == micro // unit:
            joined[-1][2].append(micro)
        else:
            joined.append((pass_, chunk, [micro]))
    return [Group(_PASSES[pass_], chunk, tuple(micros)) for pass_, chunk, micros in joined]
