"""GPipe (Huang et al. 1811.06965): all forwards, then all backwards."""

from terrace.plan.stage import Pass
from terrace.program.schedules.orders import Orders, build, looped, positive, tasks_of
from terrace.program.schedules.registry import schedule


@schedule("gpipe")
def gpipe(num_stages: int, num_micros: int) -> Orders:
    """F of every micro-batch, then B of every one, first in first out.

    Invariants: every stage keeps the activations of all `num_micros` micro-batches; with equal stages and free
    messages the makespan is (num_micros + num_stages - 1)(forward + backward).
    """
    positive(num_stages=num_stages, num_micros=num_micros)
    order = [*tasks_of(Pass.FORWARD, 0, num_micros), *tasks_of(Pass.BACKWARD, 0, num_micros)]
    return build("gpipe", looped(num_stages, 1), num_micros, [order] * num_stages)
