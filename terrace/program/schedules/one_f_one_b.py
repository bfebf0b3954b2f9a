"""1F1B (PipeDream-Flush, Narayanan et al. 2006.09503; 2104.04473, section 2.2.1)."""

from collections.abc import Sequence

from terrace.plan.stage import Pass
from terrace.program.schedules.orders import Orders, StageTask, build, looped, positive, tasks_of
from terrace.program.schedules.registry import schedule


@schedule("1f1b")
def one_f_one_b(num_stages: int, num_micros: int) -> Orders:
    """One F per later stage, then F and B in turn, then the remaining B.

    Invariants: stage r keeps the activations of at most min(num_micros, num_stages - r) micro-batches; with equal
    stages and free messages the makespan equals GPipe's.
    """
    positive(num_stages=num_stages, num_micros=num_micros)
    forwards, backwards = tasks_of(Pass.FORWARD, 0, num_micros), tasks_of(Pass.BACKWARD, 0, num_micros)
    rows = [alternate(forwards, backwards, num_stages - 1 - stage) for stage in range(num_stages)]
    return build("1f1b", looped(num_stages, 1), num_micros, rows)


def alternate(forwards: Sequence[StageTask], backwards: Sequence[StageTask], num_warmup: int) -> list[StageTask]:
    """`num_warmup` forwards (or all), then one forward and one backward in turn, then the remaining backwards."""
    num_warmup = min(num_warmup, len(forwards))
    row = list(forwards[:num_warmup])
    # Ends with the last forward: fewer forwards than backwards are left.
    for forward, backward in zip(forwards[num_warmup:], backwards, strict=False):
        row += (forward, backward)
    return row + list(backwards[len(forwards) - num_warmup :])
