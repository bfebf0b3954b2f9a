"""Rules for a plan's outer loop."""

import math
from collections.abc import Sequence

from terrace.base.errors import PlanError, did_you_mean
from terrace.cluster.cluster import Cluster
from terrace.model.spec import BlockSpec
from terrace.plan.layout import Layout
from terrace.plan.mesh import ORDER, Mesh
from terrace.plan.outer import Outer
from terrace.plan.plan import Plan


def check_outer(cluster: Cluster, plan: Plan, blocks: Sequence[BlockSpec]) -> None:
    """Raise `PlanError` for an outer loop that cannot run, or for one of its options without effect."""
    outer = plan.outer
    if not outer.has_islands:
        return
    _check_islands(cluster, plan, outer)
    _check_cycle(outer, [index for index, block in enumerate(blocks) if block.num_trainable])
    check_outer_step(outer)


def check_outer_tier(cluster: Cluster, outer: Outer) -> None:
    """Raise `PlanError` if `outer.tier` is not in the cluster."""
    names = [tier.name for tier in cluster.tiers]
    if outer.has_islands and outer.tier not in names:
        raise PlanError(f"outer.tier = {outer.tier!r} is not in the cluster{did_you_mean(outer.tier, names)}")


def _check_islands(cluster: Cluster, plan: Plan, outer: Outer) -> None:
    layout, mesh = Layout.written(cluster, plan), Mesh.of(cluster, plan)
    here = f"outer.tier = {outer.tier!r}"
    for axis in ORDER:
        own = mesh.of_stacks(axis == "expert")
        crossed = [layout.tiers[tier] for tier in layout.outside if axis != "data" and own.group(axis)[tier] > 1]
        if crossed:
            raise PlanError(
                f"the {axis} axis crosses tier {crossed[0]!r}, and {here}: its ranks talk every step, islands do not; "
                "give that tier and those outside to the data axis alone"
            )
    if layout.num_islands == 1:
        raise PlanError(
            f"{here}: it and the tiers outside have one member, so there is one island; {_with_members(cluster)}"
        )
    inside = layout.tiers[layout.island] if layout.island >= 0 else "device"
    for state in ("params", "grads", "optimizer"):
        if getattr(layout, state) > layout.island:
            raise PlanError(
                f"{state} = {getattr(plan, state)!r} does not lie inside {here}: every island keeps all states; place "
                f"them on {inside!r} or further in"
            )


def _with_members(cluster: Cluster) -> str:
    # The outermost tier with several members. If it is the innermost, every rank is an island, which only ddp supports.
    found = [tier.name for tier in cluster.tiers if tier.size > 1]
    if not found:
        return "leave outer out"
    preset = "--plan ddp " if found[-1] == cluster.tiers[0].name else ""
    return (
        "leave outer out, or name a tier with several members, as "
        f"{preset}--plan.outer.preset NAME --plan.outer.tier {found[-1]} does"
    )


def _check_cycle(outer: Outer, trained: Sequence[int]) -> None:
    num_blocks = len(trained)
    if outer.every < 1:
        raise PlanError(f"outer.every = {outer.every}: islands exchange every so many steps; use 1 or more")
    if not 1 <= outer.fragments <= num_blocks:
        raise PlanError(
            f"outer.fragments = {outer.fragments}: the {num_blocks} blocks that train take turns, so use 1 to "
            f"{num_blocks}"
        )
    empty = set(range(outer.fragments)) - {outer.fragment(index) for index in trained}
    if empty:
        raise PlanError(
            f"outer.fragments = {outer.fragments}: no block that trains is in fragment {min(empty)}, and block b is in "
            "fragment b mod fragments; use another number"
        )
    if outer.every % outer.fragments:
        below = outer.every // outer.fragments * outer.fragments
        near = f"{below} or {below + outer.fragments}" if below else f"{outer.fragments}"
        raise PlanError(
            f"outer.every = {outer.every} is no multiple of outer.fragments = {outer.fragments}, whose turns are "
            f"equally far apart: use {near}"
        )
    if not 0 <= outer.delay <= outer.every:
        raise PlanError(
            f"outer.delay = {outer.delay}: an exchange is applied before the next one of its blocks, so use 0 to "
            f"outer.every = {outer.every}"
        )


def check_outer_step(outer: Outer) -> None:
    """Raise `PlanError` for outer step options that are out of range or have no effect."""
    ranges = (
        ("lr", outer.rate, 0.0, math.inf),
        ("momentum", outer.beta, 0.0, 1.0),
        ("clip", outer.clip, 0.0, math.inf),
    )
    for name, value, least, most in ranges:
        if not (least <= value < most) or (name == "lr" and not value):
            words = {"lr": "above 0", "momentum": "from 0 to below 1", "clip": "0 for none, or above"}[name]
            raise PlanError(f"outer.{name} = {value}: it is {words}")
    if not 0.0 <= outer.keep <= 1.0:
        raise PlanError(f"outer.keep = {outer.keep}: the part of its changes that an island keeps is from 0 to 1")
    if outer.optimizer == "average" and (outer.momentum or outer.clip):
        name = "momentum" if outer.momentum else "clip"
        raise PlanError(f"outer.{name} has no effect: optimizer 'average' has no momentum; leave it out")
    if not outer.delay and (outer.keep != 1.0 or outer.penalty):
        name = "keep" if outer.keep != 1.0 else "penalty"
        raise PlanError(
            f"outer.{name} has no effect without a delay: nothing changes while an exchange is waited for; give "
            "outer.delay, or leave it out"
        )
