"""Micro-batch and unit of a plan that omits them: the fastest predicted within the memory of a device.

A data rank's share of the batch is fixed; the two numbers divide it. Larger micro-batches have larger products and
fewer gathers, and keep more activations; in a pipeline, filling and draining take longer. Sizes are tried in descending
order from the largest that fits, and for each size the units likewise, until two in a row are slower than the best
(`_least`): a step's seconds fall and then rise again as its micro-batches shrink. The rest of the plan is unchanged.
"""

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace

from terrace.base.errors import TerraceError
from terrace.plan.layout import Layout
from terrace.plan.validate import LONGEST_ROUNDED_UNIT
from terrace.planner.ranking import TIE
from terrace.program.schedules.registry import takes_unit
from terrace.program.stages import plan_schedule
from terrace.simulate.fullest import Job, fullest_stage
from terrace.simulate.step import Step, check_stages, predict_step, resolved
from terrace.simulate.work import Work

_MOST = 4096  # sequences in a micro-batch, and micro-batches in a unit, that are tried
_SLOWER = 2  # options in a row after which no smaller one is tried


def with_best_numbers(step: Step, free: Collection[str], *, multiple_of: int = 1) -> Step:
    """The step with the numbers in `free` chosen: "micro_batch", "unit" or both.

    A chosen micro-batch is a multiple of `multiple_of`, which divides the share of a data rank. The step is returned
    unchanged if no choice fits or can run. Raises `PlanError` for `stages` that cannot run with any choice.
    """
    check_stages(step)
    work, share = step.work, step.num_micros * step.plan.micro_batch
    assert isinstance(work, Work), "FLOPs of one micro-batch say nothing of another"
    # A given unit needs that many micro-batches, unless the share is smaller.
    least = 1 if "unit" in free else min(step.plan.unit, share // multiple_of)
    sizes: Sequence[int] = (step.plan.micro_batch,)
    if "micro_batch" in free:
        sizes = [size for size in _divisors(share, share // least) if size % multiple_of == 0]
    found = _least(sizes, lambda size: _of_size(step, work, size, share // size, "unit" in free))
    return step if found is None else found[1]


def _of_size(step: Step, work: Work, size: int, num_micros: int, free_unit: bool) -> tuple[float, Step] | None:
    step = replace(
        step, plan=replace(step.plan, micro_batch=size), num_micros=num_micros, work=replace(work, micro_batch=size)
    )
    units = _units(step) if free_unit else (step.plan.unit,)
    return _least(units, lambda unit: _of_unit(replace(step, plan=replace(step.plan, unit=unit))))


def _of_unit(step: Step) -> tuple[float, Step] | None:
    # Other omitted values affect memory too, but the numbers are chosen for the plan as given.
    known = resolved(step)
    job = Job(cluster=known.cluster, plan=known.plan, num_micros=known.num_micros, beside=known.beside)
    _, memory = fullest_stage(job, step.blocks, step.sequence)
    if sum(memory.values()) > step.cluster.device.usable_bytes:
        return None
    return predict_step(known).step_s, step


def _units(step: Step) -> Sequence[int]:
    # Only parameters that are sharded or below the device are gathered, and only sharded gradients reduced, once per
    # unit. In a pipeline the order determines visits, except for schedules that pass chunks in units.
    plan, layout = step.plan, Layout.of(step.cluster, step.plan)
    if layout.grads_below:
        return (step.num_micros,)
    if step.num_stages > 1:
        is_free = takes_unit(plan_schedule(plan)[0])
    else:
        is_free = max(layout.span(layout.params), layout.span(layout.grads)) > 1 or layout.params_below
    longest = _MOST if plan.compute == plan.sums else LONGEST_ROUNDED_UNIT
    return _divisors(step.num_micros, longest) if is_free else (1,)


def _divisors(number: int, most: int) -> list[int]:
    # Descending, none above `_MOST`.
    return [each for each in range(min(number, most, _MOST), 0, -1) if number % each == 0]


def _least(options: Sequence[int], price: Callable[[int], tuple[float, Step] | None]) -> tuple[float, Step] | None:
    # `options` are descending; of two that are practically equal the smaller needs less memory.
    best, least_s, slower = None, math.inf, 0
    for option in options:
        with suppress(TerraceError):  # a schedule takes other numbers, or the device has no rate for a dtype
            found = price(option)
            if found is None:
                continue
            slower += 1
            if found[0] <= least_s * (1 + TIE):
                best, least_s, slower = found, min(least_s, found[0]), 0
        if slower == _SLOWER:
            break
    return best
