"""The plan with the least regret over a fixed set of scenarios, and the term that a plan's advantage rests on.

A scenario is a cluster on which one figure is worse or better than described, by as much as such figures were found to
be off. The regret of a plan in a scenario is by how much its step is longer there than the shortest of the plans that
are compared; a plan's regret is the largest of all scenarios (Savage's minimax regret, 1951). Errors that all plans
share cancel in it.

The plans that are compared are those that a search has found anyway: its finalists, and the fastest plan of each
headroom (terrace.planner.headroom), which are what a full device asks for. Each is played again on every scenario, from
the programs that it has.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from terrace.cluster.cluster import Cluster
from terrace.cluster.device import Kernels
from terrace.planner.evaluate import Evaluator, step_of
from terrace.planner.ranking import TIE, Estimate
from terrace.planner.ties import FULL, Regret, Ties
from terrace.simulate.step import WAITS_ON_STAGES, predict_on

# Share by which the rate of a tier is off: nested groups on Frontier miss by up to 38 % (docs/validation.md), and
# a third less of NVLink's rate would be half of what is missed on tensor ranks of 2311.05610.
LINKS = 1 / 3
# Share by which kernels are slower: parts of a layer miss by up to 19 % (docs/validation.md, FSMoE).
KERNELS = 0.2
# Factor of launches, and of the inner size at which products reach half of their rate: guesses. The second makes small
# products slow, such as those of tensor ranks.
LAUNCHES = HALF_DEPTH = 2.0
# Share by which a step is longer on a full device, whose allocator frees and tries again. Rows of 2311.05610 with
# sequence parallelism whose larger micro-batch passes `FULL` of 80 GB: four of seven are slower than the model says
# for the smaller one, by 2.8 to 4.9 %.
FULL_LONGER = 0.05


class Scenario(NamedTuple):
    """A cluster as it may be; `full_longer`: share by which plans take longer that use more than `FULL` of a device."""

    name: str
    cluster: Cluster
    full_longer: float = 0.0


def scenarios(cluster: Cluster) -> tuple[Scenario, ...]:
    """As described, each tier with several members slow and fast, kernels slow, launches slow, full devices slow."""
    found = [Scenario("as described", cluster)]
    for index, tier in enumerate(cluster.tiers):
        if tier.size > 1:
            found += [
                Scenario(f"{tier.name} {name}", _with_rate(cluster, index, 1 + share))
                for name, share in (("slow", -LINKS), ("fast", LINKS))
            ]
    kernels = cluster.device.kernels
    launches = replace(kernels, launch_s=LAUNCHES * kernels.launch_s, host_layer_s=LAUNCHES * kernels.host_layer_s)
    return (
        *found,
        Scenario("kernels slow", _with_kernels(cluster, _slow(kernels))),
        Scenario("launches slow", _with_kernels(cluster, launches)),
        Scenario("full device slow", cluster, FULL_LONGER),
    )


def _with_rate(cluster: Cluster, index: int, factor: float) -> Cluster:
    tier = cluster.tiers[index]
    tier = replace(tier, bandwidth_bytes_per_s=factor * tier.bandwidth_bytes_per_s)
    return replace(cluster, tiers=(*cluster.tiers[:index], tier, *cluster.tiers[index + 1 :]))


def _with_kernels(cluster: Cluster, kernels: Kernels) -> Cluster:
    return replace(cluster, device=replace(cluster.device, kernels=kernels))


_SHARES = (
    "gemm",
    "gemm_fp8",
    "memory",
    "stream",
    "codec",
    "attention",
    "attention_backward",
    "flash2",
    "flash2_backward",
)


def _slow(kernels: Kernels) -> Kernels:
    slow: dict[str, Any] = {name: (1 - KERNELS) * getattr(kernels, name) for name in _SHARES}  # 0 stands for another's
    return replace(kernels, gemm_half_depth=HALF_DEPTH * kernels.gemm_half_depth, **slow)


def least_regret(evaluator: Evaluator, ties: Ties, others: Iterable[Estimate], cases: Sequence[Scenario]) -> Ties:
    """The finalists `ties` and `others`, the one with the least regret over `cases` first.

    Regrets that are equal to a thousandth keep their order, as steps do. One play for each plan and case; the first
    case is the task's own cluster.
    """
    plans = list(dict.fromkeys(each.candidate for each in (*ties.best, *others)))
    known = {each.candidate: each for each in (*others, *ties.best)}
    compared = [known[each] for each in plans]
    steps = [_steps_s(evaluator, each, cases) for each in compared]
    least = [min(column) for column in zip(*steps, strict=True)]
    found = []
    for row in steps:
        shares = [step_s / least_s - 1 for step_s, least_s in zip(row, least, strict=True)]
        worst = max(range(len(cases)), key=shares.__getitem__)
        found.append(Regret(shares[worst], cases[worst].name))
    order = sorted(range(len(compared)), key=lambda place: round(found[place].share / TIE))
    best = tuple(compared[place] for place in order)
    return ties._replace(best=best, regrets=tuple(found[place] for place in order))


def _steps_s(evaluator: Evaluator, estimate: Estimate, cases: Sequence[Scenario]) -> list[float]:
    task = evaluator.task
    plan = replace(evaluator.plan(estimate.candidate), **estimate.chosen)
    known = evaluator.predicted(step_of(task, plan))
    is_full = estimate.needed_bytes > FULL * task.cluster.device.memory_bytes
    found = []
    for case in cases:
        alike = case.cluster == task.cluster
        step_s = estimate.step_s if alike else predict_on(known, replace(known.step, cluster=case.cluster)).step_s
        found.append(step_s * (1 + case.full_longer * is_full))
    return found


class Doubt(NamedTuple):
    """The term that the advantage of a plan over another rests on; empty where there is none.

    Seconds of the term in both plans, by how much their difference is unsure, and by how much the steps differ.
    """

    term: str = ""
    own_s: float = 0.0
    other_s: float = 0.0
    unsure_s: float = 0.0
    advantage_s: float = 0.0


def doubt(first: Estimate, other: Estimate) -> Doubt:
    """The term whose difference between two plans is unsure by more than the steps differ, by most.

    Errors of a term are shared by both plans, so only the difference of its seconds counts: `LINKS` of a wait for
    messages, `KERNELS` of everything else, and of what a stage waits for others, which follows from their passes.
    """
    advantage_s = other.step_s - first.step_s
    own, others = _terms(first.time_s), _terms(other.time_s)
    if advantage_s <= TIE * first.step_s:  # no advantage
        return Doubt()
    found = Doubt()
    for term in sorted(own.keys() | others.keys()):
        share = LINKS if term.startswith("wait ") and term not in WAITS_ON_STAGES else KERNELS
        own_s, other_s = own.get(term, 0.0), others.get(term, 0.0)
        unsure_s = share * abs(other_s - own_s)
        if unsure_s > max(advantage_s, found.unsure_s):
            found = Doubt(term, own_s, other_s, unsure_s, advantage_s)
    return found


def _terms(time_s: Mapping[str, float]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, each_s in time_s.items():
        term = "passes" if name in ("forward", "backward") else name
        found[term] = found.get(term, 0.0) + each_s
    return found
