"""Seconds of updates in a search, which assumes the states of AdamW."""

from terrace.plan.keep import HOST
from terrace.plan.state_formats import element_bytes
from terrace.plan.wire import FORMATS
from terrace.planner.task import Task
from terrace.simulate.layers import optimizer_s


def updated_s(task: Task, owned: float) -> float:
    """Seconds in which a rank updates `owned` parameters, on its device or its host, and passes their states."""
    item = FORMATS[task.compute].element_bytes
    if task.keep.hands_over:
        num_bytes = 2 * owned * (item + moment_bytes(task) + FORMATS[task.master].element_bytes)
        own_s = task.cluster.device.below[HOST].update_s(num_bytes)
    else:
        own_s = optimizer_s(task.cluster.device, owned, task.rounding_bytes) if owned else 0.0
    return max(own_s, _passing_s(task, owned, item))


def _passing_s(task: Task, owned: float, item: int) -> float:
    """Seconds in which states of `owned` parameters that are kept below pass through the device; 0 for none."""
    keep, below, passing_s = task.keep, task.cluster.device.below, 0.0
    if keep.states_pass:
        num_bytes = owned * (moment_bytes(task) + FORMATS[task.master].element_bytes * rests_master(task))
        passing_s = max(below[keep.optimizer].read_s(num_bytes), below[keep.optimizer].write_s(num_bytes))
    item = item if keep.hands_over else FORMATS[task.sums].element_bytes
    read_s = below[keep.grads].read_s(owned * item) if keep.grads_below else 0.0
    return passing_s + read_s if keep.grads == keep.optimizer else max(passing_s, read_s)


def moment_bytes(task: Task) -> float:
    """Bytes of moments a parameter."""
    return 2 * element_bytes(task.optimizer_states or task.sums)


def rests_master(task: Task) -> bool:
    """As terrace.plan.state_bytes.rests_master, for a master copy that is separate by its dtype."""
    is_apart = task.compute != task.master or task.keep.params_below or task.keep.updates_on_host
    return task.keep.optimizer_below and task.islands.num == 1 and is_apart
