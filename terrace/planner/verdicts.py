"""Whether a plan can be trained and fits, in words; points of a scaling curve, plans that leave memory free."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from terrace.base.errors import PlanError
from terrace.cluster.cluster import Cluster, Device
from terrace.model.spec import BlockSpec
from terrace.plan.plan import Plan
from terrace.plan.validate import validate
from terrace.planner.ranking import Cost, Estimate
from terrace.planner.task import Task


def lack(task: Task, estimate: Cost) -> str:
    """Text on a plan's missing memory and its largest categories."""
    return lack_words(task.cluster.device, estimate.memory_bytes)


def lack_words(device: Device, memory_bytes: Mapping[str, int]) -> str:
    """`lack` for a rank's memory by category."""
    largest = sorted(memory_bytes.items(), key=lambda item: -item[1])[:2]
    most = ", ".join(f"{name} {size_words(size)}" for name, size in largest)
    needed = sum(memory_bytes.values())
    missing = needed - device.usable_bytes
    return f"needs {size_words(needed)} of {device.room_words}, {size_words(missing)} too much; most are {most}"


def size_words(num_bytes: float) -> str:
    """Bytes in GB, or in TB where GB would take four digits."""
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes < 999.5e9 else f"{num_bytes / 1e12:.3g} TB"


@dataclass(frozen=True, kw_only=True)
class Point:
    """One size of the cluster with its task and plan; without an estimate, `reason` says why."""

    num_outermost: int
    task: Task
    estimate: Cost | None = None
    plan: Plan | None = None
    reason: str = ""

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all devices; 0 without an estimate."""
        return self.task.batch * self.task.sequence / self.estimate.step_s if self.estimate else 0.0

    @property
    def per_device(self) -> float:
        return self.tokens_per_s / self.task.cluster.world_size

    def cost_per_million(self, price_per_hour: float) -> float:
        """Price of a million tokens at a price per device-hour."""
        return price_per_hour / 3600 * 1e6 / self.per_device


@dataclass(frozen=True, kw_only=True)
class Headroom:
    """The fastest plan that leaves a headroom ("5%") of a device's memory free; None if no plan is known to.

    `is_complete`: its search ended before its limit.
    """

    headroom: str
    best: Estimate | None
    is_complete: bool = True


def refusal(cluster: Cluster, plan: Plan, blocks: Sequence[BlockSpec]) -> str:
    """Reason why a plan cannot be trained; "" if it can."""
    try:
        validate(cluster, plan, blocks)
    except PlanError as error:
        return str(error)
    return ""
