"""Split of blocks and orders of schedules, for ranking pipelines.

Blocks between look-ups and logits are split to minimise the slowest virtual stage. The last one also has the logits, so
it gets fewer blocks ("layers" here) if these are expensive, or none. Equal layers are split in closed form: if they do
not divide evenly, later stages get the extra ones, since they hold fewer activations. Look-ups take negligible time:
the first stage has only look-ups if there are two more virtual stages than layers.
"""

import math
from functools import lru_cache
from typing import NamedTuple

from terrace.base.errors import PlanError
from terrace.plan.stage import Pass
from terrace.program.schedules.orders import Orders, Placement, Waiting, looped, most_due, most_waiting, v_shaped
from terrace.program.schedules.registry import orders_for, schedule_names, takes_unit
from terrace.program.shares import share

SERIAL = "serial"  # the name of having no pipeline
MOST_PASSES = 200_000  # of micro-batches through virtual stages: orders that are played in tenths of a second
MOST_CHUNKS = 8  # beyond, the bubble is small and every further boundary is one more message


def share_layers(num_layers: int, num_virtual: int, logits_in_layers: float, ends: int) -> tuple[int, ...]:
    """Layers of each virtual stage.

    `logits_in_layers` is the cost of the logits in layers. `ends`: 0 if every virtual stage has a layer, 1 if the last
    may have only the logits, 2 if the first may also have only the look-ups. Raises `PlanError` if there are too few
    layers.
    """
    _check_virtual(num_layers, num_virtual, ends)
    return share_before(num_layers, num_virtual, last_layers(num_layers, num_virtual, logits_in_layers, ends))


def last_layers(num_layers: int, num_virtual: int, logits_in_layers: float, ends: int) -> int:
    """Layers of the last virtual stage, which determine all others; arguments as in `share_layers`.

    Decreases with the cost of the logits.
    """
    if num_virtual == 1:
        return num_layers
    fewest = 0 if ends else 1
    others = num_virtual - 1
    even = int((num_layers - others * logits_in_layers) / num_virtual)  # where logits and layers would balance exactly
    most = num_layers - others
    last, least = 0, math.inf
    # Rounding may shift the balance by a few layers, so the counts around it are compared; among equals the last.
    for count in range(max(fewest, min(most, even - 1)), max(fewest, min(most, even + 3)) + 1):
        slowest, before = count + logits_in_layers, -((count - num_layers) // others)
        if before > slowest:
            slowest = before
        elif slowest > least:
            break  # from here on the last stage is the slowest
        if slowest <= least:
            last, least = count, slowest
    return last


def longest_stage(
    num_layers: int, num_stages: int, chunks: int, logits_in_layers: float, ends: int, *, in_rounds: bool
) -> float:
    """Layers that the longest stage takes the time of, if the layers are shared as in `share_layers`.

    If looped chunks pass all stages `in_rounds`, each of these takes as long as its longest chunk.
    """
    others = num_stages * chunks - 1
    last = last_layers(num_layers, others + 1, logits_in_layers, ends)
    few, more = divmod(num_layers - last, others)
    with_last, longest = last + logits_in_layers, few + (more > 0)
    if chunks == 1:
        return max(longest, with_last)
    if not in_rounds:
        return max((chunks - 1) * few + with_last, (num_layers + logits_in_layers) / num_stages)
    # The later virtual stages have a layer more, and the last round the logits.
    long_rounds = max(0, chunks - 1 - (others - more) // num_stages) if more else 0
    return (chunks - 1) * few + long_rounds + max(longest, with_last)


@lru_cache(maxsize=65536)
def share_before(num_layers: int, num_virtual: int, last: int) -> tuple[int, ...]:
    """Layers of each virtual stage if the last has `last`."""
    if num_virtual == 1:
        return (last,)
    others = num_virtual - 1
    few, more = divmod(num_layers - last, others)
    return (*([few] * (others - more)), *([few + 1] * more), last)


@lru_cache(maxsize=65536)
def share_differing(costs: tuple[int, ...], num_virtual: int, ends: int) -> tuple[int, ...]:
    """Layers of each virtual stage, for layers that differ in cost.

    `costs` are those of look-ups, of each layer, and of logits. `ends` and errors as for `share_layers`.
    """
    first, *layers, last = costs
    _check_virtual(len(layers), num_virtual, ends)
    if num_virtual == len(layers) + 2:
        return (0, *[1] * len(layers), 0)
    layers[0] += first
    if not ends:
        layers[-1] += last
        return tuple(map(len, share(layers, num_virtual)))
    # Logits are on the last virtual stage, with layers or alone.
    *before, beside = map(len, share((*layers, last), num_virtual))
    return (*before, beside - 1)


def _check_virtual(num_layers: int, num_virtual: int, ends: int) -> None:
    if num_virtual > num_layers + ends:
        alone = ("", ", and one for the logits alone", ", and one each for look-ups and logits alone")[ends]
        raise PlanError(f"{num_virtual} virtual stages of {num_layers} layers: use at most one a layer{alone}")


# Searched only if pinned: GPipe is as fast as 1F1B and needs more memory, and every unit of ZeroPP has its own orders,
# which would make each search several times as long.
ONLY_PINNED = ("gpipe", "zeropp")


class Trait(NamedTuple):
    """Traits of a schedule: accepted chunk counts, split backward, placement of chunks."""

    chunks: tuple[int, ...]
    split: bool
    looped: bool  # chunk c of stage r is virtual stage c p + r
    grouped: bool  # as many micro-batches as there are stages pass a chunk before any passes the next one
    folded: bool  # the stages are passed to and fro, in the shape of a V


@lru_cache(maxsize=1)
def traits() -> dict[str, Trait]:
    """Traits of every registered schedule, derived from small orders."""
    found = {}
    for name in schedule_names():
        accepted: list[Orders] = []
        numbers = {"num_stages": 2, "num_micros": 8} | ({"unit": 4} if takes_unit(name) else {})
        for chunks in range(1, MOST_CHUNKS + 1):
            # A schedule of one chunk accepts the number 1.
            try:
                accepted.append(orders_for(name, num_chunks=chunks, **numbers))
            except PlanError:
                continue
        if accepted:
            # With one chunk, a schedule that accepts several is 1F1B or GPipe under another name.
            split = any(task.pass_ is Pass.BACKWARD_INPUT for row in accepted[0].tasks for task in row)
            all_chunks = tuple(orders.num_chunks for orders in accepted)
            is_looped = all(orders.placement == looped(2, orders.num_chunks) for orders in accepted)
            is_folded = all(orders.placement == v_shaped(2) for orders in accepted)
            is_grouped = is_looped and any(task.chunk for task in accepted[-1].tasks[0][:3])
            chunks_taken = all_chunks[1:] if len(all_chunks) > 1 else all_chunks
            found[name] = Trait(chunks_taken, split, is_looped, is_grouped, is_folded)
    return found


def passes_rounds(schedule: str, num_stages: int, num_chunks: int, num_micros: int) -> bool:
    """Whether the stages wait for the longest chunk of each round of looped chunks.

    They do not where more micro-batches than there are stages pass a chunk one after the other: a stage with a shorter
    chunk then begins the next one without a wait.
    """
    trait = traits()[schedule]
    return num_chunks > 1 and trait.looped and (trait.grouped or num_micros <= num_stages)


def has_halves(schedule: str) -> bool:
    return schedule != SERIAL and traits()[schedule].split


def placement_of(schedule: str, num_stages: int, num_chunks: int) -> Placement:
    return v_shaped(num_stages) if traits()[schedule].folded else looped(num_stages, num_chunks)


@lru_cache(maxsize=256)
def pipeline(schedule: str, num_stages: int, num_chunks: int, num_micros: int, unit: int = 1) -> tuple[Orders, Waiting]:
    """Orders of a schedule, and peak micro-batches in flight by stage and chunk.

    Raises `PlanError` for numbers that the schedule cannot run, and for more than `MOST_PASSES` passes.
    """
    if num_stages * num_chunks * num_micros > MOST_PASSES:
        raise PlanError(
            f"{num_micros} micro-batches through {num_stages * num_chunks} virtual stages are more than the "
            f"{MOST_PASSES:,} passes of a pipeline that is searched: use larger micro-batches"
        )
    numbers = {"unit": unit} if takes_unit(schedule) or unit > 1 else {}
    orders = orders_for(schedule, num_stages=num_stages, num_micros=num_micros, num_chunks=num_chunks, **numbers)
    return orders, most_waiting(orders)


@lru_cache(maxsize=65536)
def held(
    schedule: str, num_stages: int, num_chunks: int, num_micros: int, unit: int = 1
) -> tuple[Placement, Waiting, Waiting]:
    """Placement, micro-batches in flight and those between the halves of their backward (`most_due`) of `pipeline`.

    Without the orders, these are small enough to cache many.
    """
    orders, waiting = pipeline(schedule, num_stages, num_chunks, num_micros, unit)
    return orders.placement, waiting, most_due(orders)
