"""Plans that may be best for a role on a pool, and bounds on their seconds and bytes without any plan.

A trained role has the planner's best plan, and the best plans in less and less memory, which leave room for other
roles. A role that only scores has its parameters cut over tensor ranks of the innermost tier, or sharded over a tier.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from operator import le
from typing import TypeVar

from terrace.base.errors import PlanError
from terrace.cluster.cluster import Cluster
from terrace.model.block_operations import layer_operations
from terrace.model.spec import BlockSpec, Computes
from terrace.plan.plan import Plan, sums_of
from terrace.plan.wire import FORMATS
from terrace.planner.estimate import Estimator
from terrace.planner.evaluate import Evaluator, step_of
from terrace.planner.search import Search
from terrace.planner.space import Space
from terrace.planner.task import plan_of
from terrace.rl.placement.costs import Cost, Costs, tensors_bytes
from terrace.rl.placement.dataflow import Dataflow, Role
from terrace.simulate.step import resolved

AXES = ("data", "tensor", "pipeline")  # of roles: rows of a batch stay whole
SCORED_TOKENS = 8192  # of a micro-batch that is scored: a guess, beyond which products hardly get faster
_LIMIT = 40  # plans that a search for one role may simulate
_LEANER = (0.6, 0.8, 0.9)  # memory of the next plan of a role that trains over that of the one before, tried in order
_LITTLE = 0.2  # of a device's memory, below which no plan is looked for: there is little to free

_Any = TypeVar("_Any")


class Choices:
    """Plans of the roles of a dataflow, cached per role and pool."""

    def __init__(self, costs: Costs) -> None:
        self.costs, self.dataflow = costs, costs.dataflow
        self._found: dict[tuple[object, ...], tuple[Cost, ...]] = {}
        self._least_step_s: dict[tuple[object, ...], float] = {}
        self._least_flops: dict[str, int] = {}  # by role
        self._least_bytes: dict[str, float] = {}
        self._evaluators: dict[tuple[object, ...], Evaluator] = {}
        self._estimators: dict[tuple[object, ...], Estimator] = {}

    def of(self, role: Role, cluster: Cluster) -> tuple[Cost, ...]:
        """Costs of the plans that may be best for a role on a pool; empty if nothing fits."""
        key = (*self.costs.key(role), cluster)
        if key not in self._found:
            plans = self._training_plans(role, cluster) if role.trains else scoring_plans(self.dataflow, role, cluster)
            costs = [self.costs.of(role, cluster, plan) for plan in plans]
            fitting = [cost for cost in costs if cost.held_bytes + cost.working_bytes <= tensors_bytes(cluster)]
            self._found[key] = tuple(undominated(fitting, lambda cost: cost.ways))
        return self._found[key]

    def least_seconds(self, role: Role, cluster: Cluster) -> tuple[float, float]:
        """Lower bounds on seconds of scoring and of training, over all plans of the role."""
        flow, device = self.dataflow, cluster.device
        rate = cluster.world_size * device.peak_flops_per_s[flow.compute] * device.kernels.gemm
        if role.name not in self._least_flops:
            self._least_flops[role.name] = sum(_least_flops(block, flow.tokens) for block in role.blocks)
        forward_s = self._least_flops[role.name] / rate
        train_s = flow.epochs * flow.updates * self._least_step(role, cluster) if role.trains else 0.0
        return forward_s if role.scores else 0.0, train_s

    def least_bytes(self, role: Role) -> float:
        """Lower bound on a role's bytes over all devices: each of its states once."""
        if role.name not in self._least_bytes:
            self._least_bytes[role.name] = self._states_bytes(role)
        return self._least_bytes[role.name]

    def _states_bytes(self, role: Role) -> float:
        compute = FORMATS[self.dataflow.compute].element_bytes
        master = FORMATS[self.dataflow.masters].element_bytes
        # Gradient, two moments, and a master of another dtype.
        gradient = FORMATS[sums_of(self.dataflow.masters)].element_bytes
        states = gradient + master * (3 if master != compute else 2) if role.trains else 0
        numel = sum(param.numel for block in role.blocks for param in block.params)
        return numel * (compute + states) if role.trains or role.scores else 0.0

    def _least_step(self, role: Role, cluster: Cluster) -> float:
        key = (*self.costs.key(role), cluster)
        if key not in self._least_step_s:
            try:
                self._least_step_s[key] = self._least_s(role, cluster)
            except PlanError:
                self._least_step_s[key] = float("inf")
        return self._least_step_s[key]

    def _least_s(self, role: Role, cluster: Cluster) -> float:
        task, outermost, device = self.costs.task(role, cluster), cluster.tiers[-1], cluster.device
        # A block takes as long on any number of nodes, but for experts, nodes that are joined without a switch, and the
        # pace, which a copied device has not yet.
        if not (task.divides_stacks or outermost.direct or outermost.links):
            outermost = replace(outermost, size=1)
        key = (*self.costs.key(role), replace(device), cluster.tiers[:-1], outermost)
        if key not in self._estimators:
            self._estimators[key] = Estimator(task)
        estimator = self._estimators[key]
        # Of more devices the slowest is slower, which stretches no more than all of a step.
        slower = min(1.0, estimator.task.cluster.device.pace / device.pace)
        return slower * self._search_with(Evaluator(task, estimator), device.usable_bytes).least_s()

    def _search(self, role: Role, cluster: Cluster, capacity_bytes: float) -> Search:
        key = (*self.costs.key(role), cluster)
        if key not in self._evaluators:
            self._evaluators[key] = Evaluator(self.costs.task(role, cluster))
        return self._search_with(self._evaluators[key], capacity_bytes)

    def _search_with(self, evaluator: Evaluator, capacity_bytes: float) -> Search:
        return Search(Space(task=evaluator.task, axes=AXES), evaluator, capacity_bytes)

    def _training_plans(self, role: Role, cluster: Cluster) -> list[Plan]:
        found, capacity = list[Plan](), cluster.device.usable_bytes
        shares = list(_LEANER)
        while capacity > _LITTLE * cluster.device.usable_bytes:
            search = self._search(role, cluster, capacity)
            best = search.run(1, _LIMIT).best
            if best:
                plan = plan_of(search.space.task, best[0].candidate, role.name)
                # Resolved, including stages and chunks.
                found.append(resolved(step_of(search.space.task, plan)).plan)
                needed, shares = best[0].needed_bytes, list(_LEANER)
            # If nothing fits in this memory, try a smaller reduction.
            if not found or not shares:
                break
            capacity = shares.pop(0) * needed
        return found


def scoring_plans(flow: Dataflow, role: Role, cluster: Cluster) -> list[Plan]:
    inner, heads = cluster.tiers[0], layer_operations(role.model).core.kv_heads
    sizes = [size for size in range(1, inner.size + 1) if inner.size % size == 0 and heads % size == 0]
    # Cut parameters need no sharding: a rank holds as much either way.
    ways = [(size, "device") for size in sizes]
    ways += [(1, tier.name) for tier in cluster.tiers if tier.size > 1]
    plans = []
    for tensor, place in ways:
        rows = -(-flow.sequences * tensor // cluster.world_size)
        plans.append(
            Plan(
                name=role.name,
                params=place,
                grads=place,
                optimizer=place,
                mapping={inner.name: {"tensor": tensor, "data": inner.size // tensor}} if tensor > 1 else {},
                compute=flow.compute,
                master=flow.masters,
                messages=flow.messages,
                micro_batch=max(1, min(rows, SCORED_TOKENS // flow.sequence)),
            )
        )
    return plans


def _least_flops(block: BlockSpec, tokens: int) -> int:
    # A look-up is no product, and scalar heads are memory-bound. Logits may borrow their matrix.
    if block.computes in (Computes.LOOK_UP, Computes.VALUES):
        return 0
    if block.computes is Computes.LOGITS:
        return block.forward_flops(tokens, 1)
    return 2 * tokens * sum(inputs * outputs for inputs, outputs in block.matrices)


def undominated(found: Iterable[_Any], ways: Callable[[_Any], tuple[float, ...]]) -> list[_Any]:
    """Items that no other item matches or beats in all `ways`, in ascending order of their ways; of equals the
    first.
    """
    kept = list[tuple[tuple[float, ...], _Any]]()
    for mine, each in sorted(((ways(each), each) for each in found), key=lambda pair: pair[0]):
        if not any(all(map(le, other, mine)) for other, _ in kept):
            kept.append((mine, each))
    return [each for _, each in kept]
