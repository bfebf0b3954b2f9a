"""Members of the outermost tier with different numbers of micro-batches in a step (`Plan.shares`).

A member that is twice as fast gets twice as many micro-batches, so that all are done at the same time. Losses and
gradients are sums, divided by the tokens of the whole batch (or, in exchanges of islands, weighted by the tokens of
each), so the result is that of the same batch under equal shares.

Members then run programs of different lengths, so only messages that every program has equally often may cross the
tier between them: those once a step, or once a unit if all have as many units.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from terrace.base.errors import PlanError
from terrace.base.words import counted
from terrace.cluster.cluster import Cluster
from terrace.cluster.members import Member, slowest_link
from terrace.plan.layout import Layout
from terrace.plan.mesh import ORDER, Mesh
from terrace.plan.plan import Plan
from terrace.plan.stage import count_units
from terrace.plan.wire import BETWEEN, BETWEEN_STAGES, FORMATS, by_boundary, parse_format

Formats = Mapping[str, Sequence[str]]  # message class between stages -> format of each boundary between members
_NARROWER = ("fp32", "bf16", "int8")  # without a state of their own; fp8 is as long as int8, and rounds more


def member_of(cluster: Cluster, rank: int) -> int:
    return cluster.coordinates(rank)[-1]


def num_micros_of(cluster: Cluster, plan: Plan, rank: int, num_micros: int) -> int:
    """Micro-batches of a step on `rank`; `num_micros` without shares."""
    return plan.shares[member_of(cluster, rank)] if plan.shares else num_micros


def most_micros(plan: Plan, num_micros: int = 1) -> int:
    """The largest number of micro-batches on a rank; `num_micros` without shares."""
    return max(plan.shares, default=num_micros)


def count_micros(plan: Plan, layout: Layout, num_micros: int) -> int:
    """Micro-batches of a step on all data ranks, each of which has `num_micros` without shares."""
    if not plan.shares:
        return layout.data_degree * num_micros
    return sum(plan.shares) * ranks_of_member(plan, layout)


def micros_before(plan: Plan, layout: Layout, data_rank: int, num_micros: int) -> int:
    """Micro-batches of the data ranks before `data_rank`; arguments as in `count_micros`."""
    if not plan.shares:
        return data_rank * num_micros
    ranks = ranks_of_member(plan, layout)
    member, place = divmod(data_rank, ranks)
    return sum(plan.shares[:member]) * ranks + plan.shares[member] * place


def ranks_of_member(plan: Plan, layout: Layout) -> int:
    """Data ranks of each member of the outermost tier, for a plan with shares."""
    return layout.data_degree // len(plan.shares)


def tokens_over_own(cluster: Cluster, plan: Plan, layout: Layout, rank: int) -> float:
    """Tokens of all islands over those of the island of `rank`; 1 without islands."""
    if not plan.shares or layout.num_islands == 1:
        return float(layout.num_islands)
    mean = sum(plan.shares) / len(plan.shares)
    return layout.num_islands * mean / num_micros_of(cluster, plan, rank, 1)


def shares_words(shares: tuple[int, ...]) -> str:
    """Shares in words: `5 + 3`, or `5 + 3 x 4` for four members of three."""
    runs: list[tuple[int, int]] = []
    for share in shares:
        same = bool(runs) and runs[-1][0] == share
        runs[-1:] = [(share, runs[-1][1] + 1)] if same else [*runs[-1:], (share, 1)]
    return " + ".join(f"{share} x {times}" if times > 1 else f"{share}" for share, times in runs)


def member_cases(cluster: Cluster, plan: Plan, num_micros: int) -> list[tuple[Cluster, int]]:
    """Of each member of the outermost tier: the cluster if all were like it, and the micro-batches of a rank.

    `num_micros` is the number without shares.
    """
    clusters = [alike for alike, count in cluster.alike for _ in range(count)]
    _check_number(cluster, plan)
    return list(zip(clusters, plan.shares or (num_micros,) * len(clusters), strict=True))


def longest_cases(cluster: Cluster, plan: Plan, num_micros: int) -> list[tuple[Cluster, int]]:
    """Of `member_cases`, for each kind of member that with most micro-batches: one of them has the longest step."""
    if not plan.shares:  # fast path: nearly all plans
        return [(alike, num_micros) for alike, _ in cluster.alike]
    most: dict[Cluster, int] = {}
    for alike, share in member_cases(cluster, plan, num_micros):
        most[alike] = max(share, most.get(alike, 0))
    return list(most.items())


def stage_clusters(cluster: Cluster, plan: Plan) -> list[Cluster]:
    """Of each stage of a pipeline: the cluster if all members were like the stage's.

    Empty unless members differ and the pipeline is the only axis across their tier, so that a stage has one member.
    """
    if len(cluster.alike) == 1:
        return []
    mesh = Mesh.of(cluster, plan)
    if mesh.group("pipeline")[-1] != cluster.tiers[-1].size:
        return []
    members = [alike for alike, count in cluster.alike for _ in range(count)]
    return [members[member] for member in plan.order or range(len(members)) for _ in range(mesh.stages_inside)]


def boundary_links(cluster: Cluster, plan: Plan) -> list[tuple[float, float]]:
    """(Bandwidth, latency) of each boundary between two members of such a pipeline; the slower end counts.

    The last is that of the last member with the first, which some schedules cross.
    """
    tier = cluster.tiers[-1]
    members = [each for each in tier.members or (Member(count=tier.size),) for _ in range(each.count)]
    placed = [members[member] for member in plan.order or range(len(members))]
    ends = zip(placed, [*placed[1:], placed[0]], strict=True)
    return [slowest_link(pair, tier.bandwidth_bytes_per_s, tier.latency_s) for pair in ends]


def written_formats(
    wire: Mapping[str, Mapping[str, str]], compute: str, cluster: Cluster
) -> dict[str, tuple[str, ...]]:
    """What a table `wire` says of the boundaries between the members of a pipeline; `compute` where it says nothing."""
    tier = cluster.tiers[-1]
    found = {}
    for message in BETWEEN_STAGES:
        names = by_boundary(wire.get(message.value, {}).get(tier.name, compute))
        found[message.value] = names if len(names) > 1 else names * (tier.size - 1)
    return found


def boundary_formats(cluster: Cluster, plan: Plan) -> dict[str, tuple[str, ...]]:
    """The format of each boundary between members, by message class; empty without a pipeline across their tier."""
    size = cluster.tiers[-1].size
    if size == 1 or Mesh.of(cluster, plan).group("pipeline")[-1] != size:
        return {}
    return written_formats(plan.wire, plan.compute, cluster)


def with_formats(plan: Plan, cluster: Cluster, formats: Formats) -> Plan:
    """The plan with these formats by boundary; the default of every boundary where a class has none."""
    tier = cluster.tiers[-1].name
    found = {message: dict(row) for message, row in plan.wire.items()}
    for message in BETWEEN_STAGES:
        row = found.setdefault(message.value, {})
        row.pop(tier, None)
        names = formats.get(message.value, ())
        if set(names) - {plan.compute}:  # the default
            row[tier] = names[0] if len(set(names)) == 1 else f"{BETWEEN} ".join(names)
    return replace(plan, wire={message: row for message, row in found.items() if row})


def formats_to_follow(cluster: Cluster, plan: Plan) -> dict[str, list[tuple[str, ...]]]:
    """By message class and boundary: the plan's format and those that a run may take in its place, widest first.

    None is wider, so all fit the memory that was counted for the plan's.
    """
    return {
        message: [
            (name, *(each for each in _NARROWER if FORMATS[each].bits < parse_format(name).bits)) for name in names
        ]
        for message, names in boundary_formats(cluster, plan).items()
    }


def check_new_formats(cluster: Cluster, plan: Plan, key: str) -> None:
    """Raise `PlanError` unless a run may take other formats between members while it goes on, as `key` asks for."""
    for message, boundaries in formats_to_follow(cluster, plan).items():
        here = f"wire.{message}.{cluster.tiers[-1].name}"
        for name, *_ in boundaries:
            wire = parse_format(name)
            if wire.feedback or wire.packed:
                what = "keeps residuals of its own" if wire.feedback else "is lossless, and what follows may not be"
                raise PlanError(f"{key} chooses formats anew, and {here} = {name!r} {what}: leave one of them out")
    if all(len(names) == 1 for boundaries in formats_to_follow(cluster, plan).values() for names in boundaries):
        raise PlanError(
            f"{key} has no effect: every boundary has a format that no other of {', '.join(_NARROWER)} is narrower "
            f"than: leave {key} out"
        )
    if plan.outer.has_islands:
        raise PlanError(f"{key} is not implemented for a pipeline of members beside islands: leave one of them out")


def check_order(cluster: Cluster, plan: Plan) -> None:
    """Raise `PlanError` for an `order` that is no permutation of members, or has no pipeline across them."""
    if not plan.order:
        return
    tier, here = cluster.tiers[-1], f"order = {list(plan.order)}"
    if sorted(plan.order) != list(range(tier.size)):
        raise PlanError(
            f"{here} is no permutation of the {counted(tier.size, 'member')} of tier {tier.name!r}: name each of 0 to "
            f"{tier.size - 1} once, the member with the first stages first"
        )
    if tier.size == 1 or Mesh.of(cluster, plan).group("pipeline")[-1] != tier.size:
        raise PlanError(
            f"{here} has no effect: it says which member of tier {tier.name!r} has which stages, and the pipeline is "
            f"not the only axis across that tier; leave it out, or write mapping.{tier.name}.pipeline = {tier.size}"
        )


def check_shares(cluster: Cluster, plan: Plan, layout: Layout) -> None:
    """Raise `PlanError` for shares of members that are not there, or that talk more often than once a step.

    `layout` is settled.
    """
    if not plan.shares:
        return
    here = f"shares = {list(plan.shares)}"
    _check_number(cluster, plan)
    if min(plan.shares) < 1:
        raise PlanError(
            f"{here}: member {plan.shares.index(min(plan.shares))} would have no micro-batch, and all members take "
            "part in a step: give it 1 or more, or take it out of the cluster"
        )
    _check_axes(cluster, plan, here)
    if plan.balance == "cost":
        raise PlanError(
            f'{here} deals micro-batches to members, and balance = "cost" deals documents to all ranks: leave one of '
            "them out"
        )
    _check_units(cluster, plan, layout, here)


def check_new_shares(cluster: Cluster, plan: Plan, layout: Layout, key: str) -> None:
    """Raise `PlanError` unless a run may deal other shares while it goes on, as `key` asks for. `layout` is settled."""
    tier = cluster.tiers[-1]
    if not plan.shares:
        raise PlanError(
            f"{key} deals micro-batches anew among the members of the outermost tier {tier.name!r}, and the plan has "
            f"no shares: give it plan.shares, such as {[1] * tier.size} times the micro-batches of a rank, or leave "
            f"{key} out"
        )
    if tier.size == 1:
        raise PlanError(f"{key}: tier {tier.name!r} has 1 member, which has all micro-batches: leave it out")
    if sum(plan.shares) == tier.size:
        raise PlanError(
            f"{key}: shares = {list(plan.shares)} are one micro-batch a member, and there are no others: write larger "
            f"shares of smaller micro-batches, raise the batch, or leave {key} out"
        )
    if often := _often(cluster, plan, layout):
        state, words = often
        raise PlanError(
            f"{key}: {words}, so members need equally many units, whatever their speeds: place {state} inside "
            f"{tier.name!r}, or leave {key} out"
        )
    for state, is_below in (("grads", plan.keep.grads_below), ("activations", plan.keep.activations_below)):
        if is_below:
            raise PlanError(
                f"{key}: keep.{state} = {getattr(plan.keep, state)!r} reserves its memory for the first shares: leave "
                "one of them out"
            )


def with_shared_size(plan: Plan, layout: Layout, batch: int) -> Plan:
    """The plan with the micro-batch at which its shares add up to `batch` sequences; unchanged if there is none."""
    size, rest = divmod(batch, max(1, sum(plan.shares) * ranks_of_member(plan, layout)))
    return plan if rest or size < 1 else replace(plan, micro_batch=size)


def num_shared_micros(plan: Plan, layout: Layout, batch: int) -> int:
    """The largest of a plan's shares. Raises `PlanError` unless they add up to a batch of `batch` sequences."""
    ranks = ranks_of_member(plan, layout)
    if ranks < 1:
        raise PlanError(
            f"shares = {list(plan.shares)} are of {counted(len(plan.shares), 'member')}, and the plan has "
            f"{counted(layout.data_degree, 'data rank')}: give the number of micro-batches of each member"
        )
    members = len(plan.shares) if layout.mesh is None else layout.mesh.group("data")[-1]
    if 1 < members != len(plan.shares):
        raise _wrong_number(plan, layout.tiers[-1], members)
    dealt = sum(plan.shares) * ranks * plan.micro_batch
    if dealt != batch:
        wanted, rest = divmod(batch, ranks * plan.micro_batch)
        fix = f"give shares that add up to {wanted}" if wanted >= len(plan.shares) and not rest else "change the batch"
        raise PlanError(
            f"shares = {list(plan.shares)} are {sum(plan.shares)} micro-batches of micro_batch = {plan.micro_batch} on "
            f"each of {ranks} data ranks of a member, together {dealt} sequences, and batch = {batch}: {fix}, or write "
            f"batch = {dealt}"
        )
    return max(plan.shares)


def _check_number(cluster: Cluster, plan: Plan) -> None:
    tier = cluster.tiers[-1]
    if plan.shares and len(plan.shares) != tier.size:
        raise _wrong_number(plan, tier.name, tier.size)


def _wrong_number(plan: Plan, tier: str, members: int) -> PlanError:
    return PlanError(
        f"shares = {list(plan.shares)}: the outermost tier {tier!r} has {counted(members, 'member')}: give the number "
        "of micro-batches of each"
    )


def _check_axes(cluster: Cluster, plan: Plan, here: str) -> None:
    tier, mesh = cluster.tiers[-1].name, Mesh.of(cluster, plan)
    factorings = {axis: mesh.of_stacks(axis == "expert") for axis in ORDER if axis != "data"}
    crossing = [axis for axis, own in factorings.items() if own.group(axis)[-1] > 1]
    if mesh.tables is not None and mesh.tables.group("expert")[-1] > 1:
        crossing.append("vocabulary")
    if crossing:
        raise PlanError(
            f"{here}: the {crossing[0]} axis crosses tier {tier!r} with messages in every micro-batch, of which "
            "members would have different numbers: give that tier to the data axis alone, or leave shares out"
        )


def _check_units(cluster: Cluster, plan: Plan, layout: Layout, here: str) -> None:
    # Members with equally many units send equally many messages.
    if len({count_units(share, plan.unit) for share in plan.shares}) > 1 and (often := _often(cluster, plan, layout)):
        state, words = often
        raise PlanError(
            f"{here}: {words}, and members would have different numbers of units: place {state} inside "
            f"{cluster.tiers[-1].name!r}, or write unit = {max(plan.shares)}"
        )


def _often(cluster: Cluster, plan: Plan, layout: Layout) -> tuple[str, str] | None:
    """The state that crosses the outermost tier for every unit, and words on it."""
    tier = cluster.tiers[-1].name
    # The first gather of a step writes a secondary copy, which serves the others.
    gathered = layout.params == layout.outermost and not layout.has_secondary
    often = {"grads": layout.grads == layout.outermost, "params": gathered}
    for state, crosses in often.items():
        if crosses:
            what = "reduced" if state == "grads" else "gathered"
            return state, (
                f"{state} = {getattr(plan, state)!r} are {what} across tier {tier!r} for every unit of "
                f"{counted(plan.unit, 'micro-batch')}"
            )
    return None
