"""Tables and sentences on a placement of roles: an iteration by role and stage, memory by pool, alternatives."""

from collections.abc import Mapping

from terrace.base.words import counted, quantity, seconds
from terrace.cluster.cluster import Cluster
from terrace.plan.mesh import Mesh
from terrace.plan.plan import AXES, Plan
from terrace.program.report import judged
from terrace.report.table import Table
from terrace.report.tables import STEP_BAND
from terrace.rl.config import RlConfig
from terrace.rl.placement.dataflow import GENERATE, PREPARE, RESHARD, STAGES, TRAIN, Dataflow
from terrace.rl.placement.generation import Generation
from terrace.rl.placement.placement import IterationReport, PoolReport
from terrace.rl.placement.pools import pool_cluster
from terrace.rl.placing import ACTOR, ROLLOUT
from terrace.simulate.bands import widest_band

_OF_ROLES = (GENERATE, PREPARE, TRAIN)


def flow_words(flow: Dataflow) -> str:
    """A dataflow in two lines: its sizes, and its roles."""
    sizes = (
        f"{counted(flow.prompts, 'prompt')} of {counted(flow.prompt_tokens, 'token')} x "
        f"{counted(flow.samples, 'response')} of {counted(flow.response_tokens, 'token')} an iteration, learned in "
        f"{counted(flow.updates * flow.epochs, 'update')} of {flow.update_batch}"
    )
    return sizes + "\n" + "; ".join(f"{role.name} {role.does}" for role in flow.roles)


def roles_table(report: IterationReport, cluster: Cluster, title: str) -> Table:
    """One row per role: its ranks, plan, seconds by stage, and memory."""
    left = ("role", "ranks", "plan", "rows")
    headings = ("role", "ranks", "plan", "rows", *_OF_ROLES, "held", "at work")
    rows = []
    for role in report.roles:
        pool = report.pools[role.pool]
        rows.append(
            [
                role.name,
                _ranks(pool),
                "-" if role.plan is None else plan_words(pool_cluster(cluster, pool.devices), role.plan),
                str(role.rows) if role.rows else "",
                *(seconds(role.seconds[stage]) if stage in role.seconds else "" for stage in _OF_ROLES),
                quantity(role.held_bytes, "B"),
                quantity(role.working_bytes, "B"),
            ]
        )
    slowest = ["slowest pool", "", "", "", *(seconds(report.stages[stage]) for stage in _OF_ROLES), "", ""]
    return Table(title=title, headings=headings, left=left, rows=rows, total=slowest)


def pools_table(report: IterationReport) -> Table:
    """One row per pool: its roles, and the memory of its fullest rank."""
    headings = ("ranks", "roles", "held by all", "at work", "process, allocator", "needed", "of")
    rows = [
        [
            _ranks(pool),
            ", ".join(role.name for role in report.roles if role.pool == index),
            *(quantity(size, "B") for size in (pool.held_bytes, pool.working_bytes, pool.lost_bytes)),
            quantity(pool.needed_bytes, "B"),
            quantity(pool.capacity_bytes, "B"),
        ]
        for index, pool in enumerate(report.pools)
    ]
    return Table(title="memory of the fullest rank of a pool", headings=headings, left=("ranks", "roles"), rows=rows)


def iteration_words(report: IterationReport) -> str:
    """How the stages add up to an iteration, the slowest pool of each stage, the hand-over by tier, generation."""
    generate, prepare, train = (f"{stage} {seconds(report.stages[stage])}" for stage in _OF_ROLES)
    rest = f"{generate} + {prepare} + {train}"
    if report.dataflow.ahead:
        rest = f"the larger of {generate} and {prepare} + {train}"
    stages = f"{RESHARD} {seconds(report.stages[RESHARD])} + {rest}"
    # No published iteration states everything that it depends on, so there is no narrower band.
    band = widest_band("an iteration with generation")
    rate = quantity(report.tokens_per_s, "tokens/s")
    lines = [f"iteration {seconds(report.seconds)} {band} = {stages}; {rate}"]
    if len(report.pools) > 1:
        lines += [_waits(report, stage) for stage in _OF_ROLES]
    sent = [f"{quantity(size, 'B')} over {tier}" for tier, size in [*report.sent_bytes.items()][::-1] if size]
    if sent:
        lines.append(f"  the hand-over takes {seconds(report.stages[RESHARD])}: all ranks send {', '.join(sent)}")
    lines += [_generation(role.rows, role.generation) for role in report.roles if role.generation is not None]
    if any(pool.is_served for pool in report.pools):
        lines.append(
            "  servers are taken to have devices of this cluster, run.rows each, and the passes of Terrace's own engine"
        )
    lines += [
        f"ranks {_ranks(pool)} lack {quantity(pool.needed_bytes - pool.capacity_bytes, 'B')}: it has no room"
        for pool in report.pools
        if pool.needed_bytes > pool.capacity_bytes
    ]
    return "\n".join(lines)


def against_words(best: IterationReport, other: IterationReport) -> str:
    """Another grouping of roles compared with the best: how much longer it takes, and in which stages."""
    more = {stage: other.stages[stage] - best.stages[stage] for stage in STAGES}
    stages = [f"{stage} {'+' if value > 0 else '-'}{seconds(abs(value))}" for stage, value in more.items() if value]
    longer = 100 * (other.seconds / best.seconds - 1)
    return f"{groups_words(other)}: {seconds(other.seconds)}, {longer:+.1f} %: {', '.join(stages) or 'as long'}"


def measured_words(report: IterationReport, measured: Mapping[str, float], why_not: str = "") -> str:
    """Predicted and measured seconds of every stage and of the step, and whether the step is within its band.

    `why_not` (terrace.program.report) is the reason for giving no verdict, if any.
    """
    lines = ["predicted beside measured:"]
    for stage in STAGES:
        lines.append(f"    {stage:14s} {seconds(report.stages[stage]):>10s} {seconds(measured[stage]):>10s}")
    whole_s = measured["step"]
    lines.append(f"    {'step':14s} {seconds(report.seconds):>10s} {seconds(whole_s):>10s}")
    lines.append(f"predicted step time {judged((report.seconds - whole_s) / whole_s, STEP_BAND, why_not)}")
    return "\n".join(lines)


def groups_words(report: IterationReport) -> str:
    groups = [[role.name for role in report.roles if role.pool == index] for index in range(len(report.pools))]
    return " | ".join(f"{pool.devices}: {', '.join(names)}" for pool, names in zip(report.pools, groups, strict=True))


def plan_words(cluster: Cluster, plan: Plan) -> str:
    """Degrees of a plan's axes, placement of its states, and micro-batch."""
    mesh = Mesh.of(cluster, plan)
    axes = " x ".join(f"{axis} {mesh.total(axis)}" for axis in AXES if mesh.total(axis) > 1) or "1 rank"
    states = dict.fromkeys((plan.params, plan.grads, plan.optimizer))
    again = ", recomputed" if plan.recompute else ""
    return f"{axes}, {'/'.join(states)}, micro-batch {plan.micro_batch}{again}"


def _ranks(pool: PoolReport) -> str:
    if pool.is_served:
        return "servers"
    last = pool.first + pool.devices - 1
    return str(pool.first) if last == pool.first else f"{pool.first}-{last}"


def _waits(report: IterationReport, stage: str) -> str:
    sums = [
        sum(role.seconds.get(stage, 0.0) for role in report.roles if role.pool == index)
        for index in range(len(report.pools))
    ]
    slowest = max(range(len(sums)), key=sums.__getitem__)
    others = [
        f"{_ranks(pool)} in {seconds(own)}" if own else f"{_ranks(pool)} idle"
        for index, (pool, own) in enumerate(zip(report.pools, sums, strict=True))
        if index != slowest
    ]
    return (
        f"  {stage} ends with ranks {_ranks(report.pools[slowest])} after {seconds(sums[slowest])}; {', '.join(others)}"
    )


def _generation(rows: int, found: Generation) -> str:
    running = "all" if found.running == found.sequences else f"{found.running} of"
    return (
        f"  a replica of {counted(rows, 'rank')} has {running} {counted(found.sequences, 'response')} at a time: "
        f"prompts {seconds(found.prefill_s)}, responses {seconds(found.decode_s)}; "
        f"weights {quantity(found.weights_bytes, 'B')}, caches {quantity(found.cache_bytes, 'B')} a rank"
    )


def generators(config: RlConfig) -> str:
    """The replicas that generate, or the servers."""
    rows = config.run.rows
    if config.rollout.is_served:
        return f"{counted(len(config.rollout.urls), 'server')} ({config.rollout.server})"
    drawing = config.places[ROLLOUT if config.is_apart else ACTOR].cluster.world_size
    return f"{counted(drawing // rows, 'replica')} of {counted(rows, 'rank')}"


def unrepeatable(config: RlConfig) -> str:
    """A line on what servers cannot promise; "" without them."""
    if not config.rollout.is_served:
        return ""
    return (
        "\nwhat a server draws depends on the requests that run beside it: a run that is repeated or goes on has other "
        "responses"
    )
