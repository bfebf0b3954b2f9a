"""ZB-V (Qi et al. 2401.10241, section 6): two chunks a stage in the shape of a V, no bubble at the memory of 1F1B.

The first stage holds both ends of the model, so a micro-batch returns to it right after its forward, and its
backward starts and ends there. The order is the handcrafted one for T_F = T_B = T_W.
"""

from collections.abc import Sequence

from terrace.base.errors import PlanError
from terrace.plan.stage import Pass
from terrace.program.schedules.orders import Orders, StageTask, build, positive, tasks_of, v_shaped
from terrace.program.schedules.registry import schedule

_KINDS = [(pass_, chunk) for chunk in (0, 1) for pass_ in (Pass.FORWARD, Pass.BACKWARD_INPUT, Pass.BACKWARD_WEIGHT)]
_F0, _I0, _W0, _F1, _I1, _W1 = range(6)


@schedule("zbv")
def zbv(num_stages: int, num_micros: int, num_chunks: int = 2) -> Orders:
    """The V schedule; fewer than 2 num_stages - 1 micro-batches leave gaps in the order of that many.

    Invariants: no stage keeps more than 2 num_stages chunk activations (num_stages of whole stages, as 1F1B);
    with equal stages, T_F = T_B = T_W, free messages and at least 2 num_stages - 1 micro-batches no stage idles
    between its first task and its last. Raises `PlanError` for another number of chunks than 2.
    """
    positive(num_stages=num_stages, num_micros=num_micros)
    if num_chunks != 2:
        raise PlanError(f"num_chunks = {num_chunks}: 'zbv' folds the model once over the stages; write num_chunks = 2")
    tasks = [tasks_of(pass_, chunk, num_micros) for pass_, chunk in _KINDS]
    rows = [_row(num_stages, num_micros, stage, tasks) for stage in range(num_stages)]
    return build("zbv", v_shaped(num_stages), num_micros, rows, 2)


def _row(num_stages: int, num_micros: int, stage: int, tasks: Sequence[Sequence[StageTask]]) -> list[StageTask]:
    # Shorter steps run the pattern of the shortest full one, with the missing micro-batches left out.
    planned = max(num_micros, 2 * num_stages - 1)
    behind = num_stages - stage  # stages from here to the fold, this one counted
    started = num_stages + behind - 1  # forwards of chunk 0 when the steady phase begins
    # Warm-up down the V, up the V, steady phase, and the two halves of the drain.
    pattern = [
        *[_F0] * (2 * behind - 1),
        *[_F1, _F0] * stage,
        *[_F1, _I1, _W1] * behind,
        *[_F0, _I0, _W0, _F1, _I1, _W1] * (planned - started),
        *[_I0, _W0, _F1, _I1, _W1] * (behind - 1),
        *[_I0, _I1] * stage,
        *[_I0, _W0] * behind,
        *[_W1] * stage,
        *[_W0] * stage,
    ]
    # Micro-batches pass every (pass, chunk) first in, first out; those that the step has not are left out.
    passing = [iter(of_kind) for of_kind in tasks]
    row = [next(passing[kind], None) for kind in pattern]
    return [task for task in row if task is not None]
