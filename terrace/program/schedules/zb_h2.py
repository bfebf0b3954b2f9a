"""ZB-H2 (Qi et al. 2401.10241, section 2.2): no bubble for T_F = T_B = T_W, at twice the memory of 1F1B."""

from collections.abc import Sequence

from terrace.program.schedules.orders import Orders, StageTask, split_orders
from terrace.program.schedules.registry import schedule


@schedule("zb-h2")
def zb_h2(num_stages: int, num_micros: int) -> Orders:
    """A warm-up that fills the bubble before the first I with forwards, then I, W and F in turn.

    Stage r starts with 2(num_stages - r) - 1 forwards and lets 2r weight gradients wait, the rest run last.

    Invariants: let a micro-batch's activation be M_B, with M_W of it held until W: stage r keeps at most (2(num_stages
    - r) - 1) M_B + 2r M_W, so no stage more than (2 num_stages - 1) M_B, when M_W <= M_B. With equal stages and T_F =
    T_B = T_W, free messages and 2 num_stages - 1 micro-batches or more, no stage idles between its first task and its
    last.
    """
    return split_orders("zb-h2", num_stages, num_micros, _row)


def _row(
    num_stages: int,
    stage: int,
    forwards: Sequence[StageTask],
    inputs: Sequence[StageTask],
    weights: Sequence[StageTask],
) -> list[StageTask]:
    num_micros = len(forwards)
    num_warmup, done = min(2 * (num_stages - stage) - 1, num_micros), 0
    row = list(forwards[:num_warmup])
    for micro in range(num_micros):
        row.append(inputs[micro])
        # Later stages hold back more W: their gaps come later.
        if micro + 1 - done > 2 * stage:
            row.append(weights[done])
            done += 1
        row += forwards[num_warmup + micro : num_warmup + micro + 1]
    return row + list(weights[done:])
