"""A change of a plan or a cluster, with the resulting step (found by terrace.simulate.small_changes)."""

from dataclasses import dataclass
from typing import Literal

from terrace.cluster.cluster import Cluster
from terrace.plan.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of a plan or a cluster, with the resulting step."""

    words: str  # such as 'params = "node"'
    kind: Literal["plan", "cluster"]
    note: str  # side effects; "" for nothing but time and memory of model states
    cluster: Cluster
    plan: Plan
    step_s: float = 0.0


def best_change(candidates: list[Change], step_s: float, kind: Literal["plan", "cluster"]) -> Change | None:
    """The change of this kind with the largest gain over `step_s`; None if none gains 0.1 %."""
    best = next((change for change in candidates if change.kind == kind), None)
    return best if best is not None and best.step_s < 0.999 * step_s else None
