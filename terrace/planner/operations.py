"""`--recompute`: the operations of layers that a search recomputes where it would recompute whole layers."""

from collections.abc import Sequence

from terrace.base.errors import PlanError, did_you_mean
from terrace.model.spec import BlockSpec
from terrace.plan.recompute import OPERATIONS
from terrace.planner.task import Task
from terrace.simulate.layers import operation_seconds
from terrace.simulate.masks import work_in
from terrace.simulate.work import Work

# What an axis that a search may use refuses (terrace.plan.recompute_rules).
_REFUSED = {"attention": "context", "norms": "tensor"}


def parse_operations(text: str | None, task: Task, axes: Sequence[str]) -> tuple[str, ...]:
    """Operations joined by commas, or `layers` for whole layers, which is the default and no operation.

    Raises `PlanError` for an operation that some plan of the search could not recompute by itself.
    """
    if text in (None, "layers"):
        return ()
    named = [word.strip() for word in str(text).split(",")]
    for name in named:
        if name not in OPERATIONS:
            known = f"; known are {', '.join(OPERATIONS)}, and layers alone{did_you_mean(name, OPERATIONS)}"
            raise PlanError(f"--recompute {text!r} names {name!r}{known}")
        if _REFUSED.get(name) in axes:
            raise PlanError(
                f"--recompute {text!r}: {name} cannot be recomputed alone with ranks on the {_REFUSED[name]} axis, and "
                f"--axes lets plans have them; leave the axis or {name} out"
            )
    if not all(block.attends for block in task.blocks if not block.at_an_end):
        raise PlanError(f"--recompute {text!r}: only decoder layers have operations; leave it out")
    mixture = next((block.name for block in task.blocks if block.has_stacks), None)
    if mixture is not None and set(named) - {"attention"}:
        raise PlanError(
            f"--recompute {text!r}: {mixture} is a mixture of experts, of which attention alone can be named"
        )
    return tuple(name for name in OPERATIONS if name in named)


def operations_s(task: Task, block: BlockSpec, work: Work) -> float:
    """Seconds of what plans of the task recompute of a block, if that is operations; these send no messages."""
    device = task.cluster.device
    operations = task.operations if block.attends else ()
    return operation_seconds(device, work_in(work, block, device.backend), operations)
