"""What would make a step shorter: every small change of the plan or the cluster, simulated.

A change of the plan moves one thing: a placement by one tier, the prefetch distance, the unit, what is
recomputed, the wire format on one tier. A change of the cluster doubles one bandwidth or the device's FLOP/s,
or halves one latency. What is not a valid plan, or does not fit the device, is no candidate.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from terrace.base.errors import PlanError
from terrace.cluster import Cluster, Tier
from terrace.plan import Layout, Plan
from terrace.plan.layout import DEVICE
from terrace.plan.slices import whole_blocks
from terrace.plan.wire import PLACEABLE, MessageClass
from terrace.program import Program, build
from terrace.simulate.cost import Costs
from terrace.simulate.events import simulate

Price = Callable[[Program], Costs]
Fits = Callable[[Program], bool]


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change, and the step it leads to."""

    words: str  # such as 'params = "node"'
    kind: Literal["plan", "cluster"]
    note: str  # what else it changes; "" for nothing but time and memory of model states
    cluster: Cluster
    plan: Plan
    step_s: float = 0.0


def model_state_fits(program: Program) -> bool:
    """Return whether the model state alone fits the device."""
    needed = program.state_bytes
    return sum(needed.values()) <= program.cluster.device.memory_bytes


def changes(program: Program, price: Price, fits: Fits = model_state_fits) -> list[Change]:
    """Return every candidate with its predicted step, the shortest first; of equals the first tried.

    `price` gives the costs of a program, as it gave those of this one; `fits` says whether a program may run.
    The number of micro-batches stays, so that every candidate does the same work.
    """
    found: list[Change] = []
    seen, whole = [program.plan], whole_blocks(program.blocks)
    for change in (*_plan_changes(program), *_cluster_changes(program)):
        if change.kind == "plan":
            if change.plan in seen:
                continue
            seen.append(change.plan)
        try:
            changed = build(change.cluster, change.plan, whole, program.num_micros, program.sequence)
        except PlanError:
            continue
        if fits(changed):
            found.append(replace(change, step_s=simulate(changed, price(changed)).step_s))
    return sorted(found, key=lambda change: change.step_s)


def best_change(candidates: list[Change], step_s: float, kind: Literal["plan", "cluster"]) -> Change | None:
    """Return the change of a kind with the greatest gain over `step_s`; None where nothing gains 0.1 %."""
    best = next((change for change in candidates if change.kind == kind), None)
    return best if best is not None and best.step_s < 0.999 * step_s else None


def _plan_changes(program: Program) -> Iterator[Change]:
    cluster, plan = program.cluster, program.plan

    def change(words: str, changed: Plan, note: str = "") -> Change:
        return Change(words=words, kind="plan", note=note, cluster=cluster, plan=changed)

    for states in (("params",), ("grads",), ("optimizer",), ("params", "grads"), ("grads", "optimizer")):
        for outward in (False, True):
            moved = _moved(program.layout, plan, states, outward)
            if moved is not None:
                words = ", ".join(f'{state} = "{getattr(moved, state)}"' for state in states)
                yield change(words, _crossing(cluster, moved))
    copy = _next_tier(program.layout, program.layout.params, outward=False)
    if copy is not None and copy != DEVICE and not program.layout.has_secondary:
        tier = program.layout.tiers[copy]
        yield change(f'params_backward = "{tier}"', _crossing(cluster, replace(plan, params_backward=tier)))
    yield change(f"prefetch = {plan.prefetch + 1}", replace(plan, prefetch=plan.prefetch + 1))
    if 2 * plan.unit <= program.num_micros:
        yield change(f"unit = {2 * plan.unit}", replace(plan, unit=2 * plan.unit), "keeps more activations")
    if plan.recompute:
        yield change("recompute = []", replace(plan, recompute=()), "keeps more activations")
    for tier in program.layout.tiers:
        yield change(f"int8 on tier {tier}", _int8(program, tier), "rounds messages to 8 bits")


def _cluster_changes(program: Program) -> Iterator[Change]:
    crossed = [tier for tier, degree in enumerate(program.everyone.degrees) if degree > 1]
    return cluster_changes(program.cluster, program.plan, crossed)


def cluster_changes(cluster: Cluster, plan: Plan, crossed: Sequence[int]) -> Iterator[Change]:
    """Yield twice the FLOP/s, and twice the bandwidth and half the latency of the tiers that messages cross."""

    def change(words: str, changed: Cluster) -> Change:
        return Change(words=words, kind="cluster", note="", cluster=changed, plan=plan)

    device = cluster.device
    faster = {dtype: 2 * peak for dtype, peak in device.peak_flops_per_s.items()}
    yield change("FLOP/s of the device x 2", replace(cluster, device=replace(device, peak_flops_per_s=faster)))
    for index in crossed:
        tier = cluster.tiers[index]
        wider = replace(tier, bandwidth_bytes_per_s=2 * tier.bandwidth_bytes_per_s)
        yield change(f"bandwidth of tier {tier.name} x 2", _with_tier(cluster, index, wider))
        nearer = replace(tier, latency_s=tier.latency_s / 2)
        yield change(f"latency of tier {tier.name} / 2", _with_tier(cluster, index, nearer))


def _with_tier(cluster: Cluster, index: int, tier: Tier) -> Cluster:
    return replace(cluster, tiers=tuple(tier if i == index else old for i, old in enumerate(cluster.tiers)))


def _next_tier(layout: Layout, index: int, *, outward: bool) -> int | None:
    """Return the nearest tier index at which a state would be sharded over another number of ranks."""
    tried = range(index + 1, layout.outermost + 1) if outward else range(index - 1, DEVICE - 1, -1)
    return next((other for other in tried if layout.span(other) != layout.span(index)), None)


def _moved(layout: Layout, plan: Plan, states: tuple[str, ...], outward: bool) -> Plan | None:
    places = {state: _next_tier(layout, getattr(layout, state), outward=outward) for state in states}
    names: dict[str, Any] = {
        state: "device" if at == DEVICE else layout.tiers[at] for state, at in places.items() if at is not None
    }
    return replace(plan, **names) if len(names) == len(states) else None


def _crossing(cluster: Cluster, plan: Plan) -> Plan:
    """Drop the wire formats of messages that no longer cross their tier: they would be refused."""
    layout = Layout.of(cluster, plan)
    crossed = {message.value: [layout.tiers[tier] for tier in layout.route(message)] for message in PLACEABLE}
    crossed[MessageClass.TENSOR.value] = list(layout.tiers)  # where tensor ranks are does not change
    kept = {
        message: {tier: name for tier, name in row.items() if tier in crossed.get(message, ())}
        for message, row in plan.wire.items()
    }
    return replace(plan, wire={message: row for message, row in kept.items() if row})


def _int8(program: Program, tier: str) -> Plan:
    """Let every message that crosses a tier in a dtype cross it in int8."""
    plan, layout = program.plan, program.everyone
    index = layout.tiers.index(tier)
    wire = {message: dict(row) for message, row in plan.wire.items()}
    for message in PLACEABLE:
        crosses = index in layout.route(message) and layout.degrees[index] > 1
        if message is MessageClass.TENSOR:
            crosses = program.tensor.both.degrees[index] > 1
        if crosses and not plan.wire_format(message, tier).block:
            wire.setdefault(message.value, {})[tier] = "int8"
    return replace(plan, wire=wire)
