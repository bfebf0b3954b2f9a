"""ZB-H1 (Qi et al. 2401.10241, section 2.1): 1F1B with split backwards, at the memory of 1F1B."""

from collections.abc import Sequence

from terrace.program.schedules.orders import Orders, StageTask, split_orders
from terrace.program.schedules.registry import schedule


@schedule("zb-h1")
def zb_h1(num_stages: int, num_micros: int) -> Orders:
    """The order of 1F1B in F and I, with W delayed.

    Stage r lets r weight gradients wait while forwards remain, then runs one after each I, the rest last.

    Invariants: F and I stand as F and B do in 1F1B. Let a micro-batch's activation be M_B, with M_W of it held until W:
    stage r keeps at most (num_stages - r) M_B + r M_W, so no stage more than num_stages M_B. With equal stages, free
    messages, T_W <= T_F, T_B and 2 num_stages micro-batches or more the longest span is num_micros (T_F + T_B + T_W) +
    (num_stages - 1)(T_F + T_B - T_W).
    """
    return split_orders("zb-h1", num_stages, num_micros, _row)


def _row(
    num_stages: int,
    stage: int,
    forwards: Sequence[StageTask],
    inputs: Sequence[StageTask],
    weights: Sequence[StageTask],
) -> list[StageTask]:
    num_micros = len(forwards)
    num_warmup, done = min(num_stages - 1 - stage, num_micros), 0
    row = list(forwards[:num_warmup])
    for micro in range(num_micros):
        # Without forwards left, W fills the gaps between the I.
        steady = num_warmup + micro < num_micros
        # The slice is empty once all forwards have run.
        row += [*forwards[num_warmup + micro : num_warmup + micro + 1], inputs[micro]]
        if not steady or micro + 1 - done > stage:
            row.append(weights[done])
            done += 1
    return row + list(weights[done:])
