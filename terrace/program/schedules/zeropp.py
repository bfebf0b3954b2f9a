"""ZeroPP (2402.03791): micro-batches in units, so that sharded parameters are gathered once per unit and direction.

All micro-batches of a unit pass chunk 0, then chunk 1, and so on, then back, so that the parameters of only one chunk
are needed at a time. The forward of a unit starts when all I of the previous unit are done, so that the activations of
little more than one unit are kept.

Weight gradients may run any time later; their positions here are our choice, from counting idle slots with
T_F = T_B = T_W. If a unit has at least as many micro-batches as there are stages, stage r of P idles 2(P - 1 - r) slots
between the forward and the backward of a unit, and 2r slots before the forward of the next. So it defers as many W as
fit the first gap, and fills that gap with W of the previous unit. The rest run right after the I of their chunk, while
its parameters are gathered:

    F(0) .. F(V-1)   W put off from the last unit   I(V-1) W(V-1) .. I(0) W(0), except W put off

If one chunk of a short unit has too few W for the gap, the last chunks run all their I first. With fewer micro-batches
per unit than stages, every stage idles between its chunks: this saves activations, not time.
"""

from collections.abc import Iterator, Sequence

from terrace.plan.stage import Pass
from terrace.program.schedules.orders import Orders, StageTask, build, looped, positive, tasks_of
from terrace.program.schedules.registry import schedule


@schedule("zeropp")
def zeropp(num_stages: int, num_chunks: int, num_micros: int, unit: int) -> Orders:
    """Units of `unit` micro-batches in sequence, with split backwards; the last unit may hold fewer.

    Invariants: in every unit a stage runs its F chunk by chunk, ascending, its I descending; so without W it gathers a
    chunk at most twice a unit. Let the activation of a chunk and micro-batch be M_B, with M_W of it held until W: stage
    r keeps at most unit num_chunks M_B + min(unit num_chunks, 2(num_stages - 1 - r)) M_W. With equal stages, T_F = T_B
    = T_W, free messages, units of num_stages micro-batches or more and unit num_chunks >= 2(num_stages - 1), stage r
    idles 2(num_stages - 1 - r) slots of one chunk in its span, for any number of units.
    """
    positive(num_stages=num_stages, num_chunks=num_chunks, num_micros=num_micros, unit=unit)
    tasks = {pass_: [tasks_of(pass_, chunk, num_micros) for chunk in range(num_chunks)] for pass_ in Pass}
    # Idle slots of stage 0 between the forward and the backward of a unit.
    gap = 2 * (num_stages - 1)
    held = min(num_chunks, -(-gap // unit))  # chunks whose W may be put off
    rows = []
    for stage in range(num_stages):
        late: list[StageTask] = []
        row: list[StageTask] = []
        for first in range(0, num_micros, unit):
            micros = slice(first, first + unit)
            row += [task for chunk in range(num_chunks) for task in tasks[Pass.FORWARD][chunk][micros]]
            row += late
            back = list(_backward(tasks[Pass.BACKWARD_INPUT], tasks[Pass.BACKWARD_WEIGHT], micros, held))
            # The tail of the backward moves into the gap of the next unit.
            kept = len(back) - min(gap - 2 * stage, held * len(range(num_micros)[micros]))
            row, late = row + back[:kept], back[kept:]
        rows.append(row + late)
    return build("zeropp", looped(num_stages, num_chunks), num_micros, rows, num_chunks)


def _backward(
    inputs: Sequence[Sequence[StageTask]], weights: Sequence[Sequence[StageTask]], micros: slice, held: int
) -> Iterator[StageTask]:
    """I and W alternate by chunk; the first `held` chunks run all their I first."""
    for chunk in reversed(range(held, len(inputs))):
        yield from inputs[chunk][micros]
        yield from weights[chunk][micros]
    for half in (inputs, weights):
        for chunk in reversed(range(held)):
            yield from half[chunk][micros]
