"""Known systems as plans. Each preset is a function of the cluster, derived from another where it can be.

`node` is the tier with that name, or else the tier inside the outermost. On a cluster with fewer tiers than a scheme
has levels, levels coincide (three-level on one tier is ZeRO-3), which the printed table shows.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from terrace.base.errors import ConfigError, PlanError, did_you_mean
from terrace.base.schema import dump, load, merge
from terrace.cluster.cluster import Cluster
from terrace.plan.order_file import with_order
from terrace.plan.outer import OUTERS
from terrace.plan.plan import Plan

Preset = Callable[[Cluster], Plan]
PRESETS: dict[str, Preset] = {}


def _preset(name: str) -> Callable[[Preset], Preset]:
    def register(build: Preset) -> Preset:
        # A plan carries the name of its preset.
        PRESETS[name] = lambda cluster: replace(build(cluster), name=name)
        return build

    return register


def preset(name: str, cluster: Cluster) -> Plan:
    """The named preset for this cluster. Raises `PlanError` for an unknown name."""
    if name not in PRESETS:
        raise PlanError(f"no plan preset {name!r}{did_you_mean(name, PRESETS)}")
    return PRESETS[name](cluster)


def parse_plan(table: Mapping[str, Any], cluster: Cluster) -> Plan:
    """Build a plan from its table; `preset = "name"` supplies missing values, a file the order of a pipeline."""
    own = with_order(table)
    name = own.pop("preset", None)
    if name is not None and not isinstance(name, str):
        raise ConfigError(f"plan.preset = {name!r} must be the name of a preset{did_you_mean('', PRESETS)}")
    outer = _outer_table(own.pop("outer", None), cluster)
    if outer is not None:
        own["outer"] = outer
    # The table overrides the preset key by key, nested tables included.
    base = dump(_inside(name, cluster, outer)) if name is not None else {}
    return load(Plan, merge(base, own), "plan")


def _outer_table(given: Any, cluster: Cluster) -> Any:
    # `given` is a preset name, or a table that may name one; the tier defaults to the outermost.
    own = {"preset": given} if isinstance(given, str) else given
    if not isinstance(own, Mapping):
        return own
    own, last = dict(own), cluster.tiers[-1].name
    name = own.pop("preset", None)
    if name is None:
        return {"tier": last, **own}
    if not isinstance(name, str) or name not in OUTERS:
        raise PlanError(f"plan.outer = {name!r} is no preset of an outer loop{did_you_mean(str(name), OUTERS)}")
    return merge(dump(OUTERS[name](last)), own)


def _inside(name: str, cluster: Cluster, outer: Any) -> Plan:
    # Every island keeps all states, so presets see only the tiers inside islands.
    names = [tier.name for tier in cluster.tiers]
    tier = outer.get("tier") if isinstance(outer, Mapping) else None
    if tier not in names:
        return preset(name, cluster)
    inside = cluster.tiers[: names.index(tier)]
    if not inside and name != "ddp":
        raise PlanError(
            f"plan.preset = {name!r} places states over ranks, and on outer.tier = {tier!r}, the innermost, every rank "
            "is an island of its own: use preset 'ddp', or a tier further out"
        )
    return preset(name, replace(cluster, tiers=inside) if inside else cluster)


def command_plan(table: Mapping[str, Any], cluster: Cluster) -> Plan:
    """The plan of a command: `parse_plan` plus device-dependent dtypes if the table names none.

    A GPU that is faster in bf16 than in fp32 computes in bf16; a device that is slower in bf16 computes in fp32 and
    sends bf16.
    """
    plan, peaks = parse_plan(table, cluster), cluster.device.peak_flops_per_s
    is_faster = peaks.get("bf16", 0.0) > peaks.get("fp32", 0.0)
    if "compute" not in table and cluster.device.type == "cuda" and is_faster and plan.master != "fp64":
        return replace(plan, compute="bf16")
    if {"compute", "messages"} & table.keys() or cluster.device.bf16_slowdown <= 1:
        return plan
    return replace(plan, messages="bf16")


def _node(cluster: Cluster) -> str:
    names = [tier.name for tier in cluster.tiers]
    return "node" if "node" in names else names[max(0, len(names) - 2)]


@_preset("ddp")
def ddp(cluster: Cluster) -> Plan:
    """Everything replicated; gradients all-reduced once a step, tier by tier."""
    return Plan(params="device", grads="device", optimizer="device")


@_preset("zero1")
def zero1(cluster: Cluster) -> Plan:
    """ZeRO stage 1 (arXiv 1910.02054): shard optimizer states over all ranks."""
    return replace(ddp(cluster), optimizer=cluster.tiers[-1].name)


@_preset("zero2")
def zero2(cluster: Cluster) -> Plan:
    """ZeRO stage 2: shard gradients too."""
    return replace(zero1(cluster), grads=cluster.tiers[-1].name)


@_preset("zero3")
def zero3(cluster: Cluster) -> Plan:
    """ZeRO stage 3, or FSDP: shard parameters too."""
    return replace(zero2(cluster), params=cluster.tiers[-1].name)


@_preset("hsdp")
def hsdp(cluster: Cluster) -> Plan:
    """Hybrid sharding: shard everything inside the node and replicate across nodes; gradients cross once a step."""
    node = _node(cluster)
    return Plan(params=node, grads=node, optimizer=node)


@_preset("mics")
def mics(cluster: Cluster) -> Plan:
    """MiCS (arXiv 2205.00119): same placement as hsdp; every plan here uses its hierarchical collectives."""
    return hsdp(cluster)


@_preset("zero++")
def zero_plus_plus(cluster: Cluster) -> Plan:
    """ZeRO++ (arXiv 2306.10209): ZeRO-3, int8 gathers, a secondary copy on the node, int4 gradients.

    The secondary copy holds the int8-rounded parameters of a step's first gather and serves later gathers unchanged. So
    int8 is used only on tiers outside the node, and every pass of a step uses the same parameters. Without a tier
    outside the node there is no copy; every gather rounds the same way.
    """
    node, names = _node(cluster), [tier.name for tier in cluster.tiers]
    base = zero3(cluster)
    reduce = dict.fromkeys(names, "int4")
    # No tier outside the node: a secondary copy would equal the primary one.
    if base.params == node:
        int8 = dict.fromkeys(names, "int8")
        return replace(base, wire={"gather": int8, "gather_backward": int8, "reduce": reduce})
    outside = dict.fromkeys(names[cluster.index(node) + 1 :], "int8")
    return replace(base, params_backward=node, wire={"gather": outside, "reduce": reduce})


@_preset("three-level")
def three_level(cluster: Cluster) -> Plan:
    """3-level partitioning (arXiv 2501.04266): params innermost, grads on the node, optimizer everywhere."""
    return Plan(params=cluster.tiers[0].name, grads=_node(cluster), optimizer=cluster.tiers[-1].name)


@_preset("three-level-compressed")
def three_level_compressed(cluster: Cluster) -> Plan:
    """3-level partitioning with int4 gradients and int8 new weights on every tier but the innermost.

    On the innermost, fastest tier a codec would cost more time than it saves. Gradients that cross tiers outside the
    grads tier use error feedback.
    """
    base = three_level(cluster)
    placed = {state: cluster.index(getattr(base, state)) for state in ("params", "grads", "optimizer")}
    names = [tier.name for tier in cluster.tiers]
    wire = {
        "reduce": dict.fromkeys(names[1 : placed["grads"] + 1], "int4"),
        "sync": dict.fromkeys(names[placed["grads"] + 1 :], "int4+feedback"),
        "refresh": dict.fromkeys(names[placed["params"] + 1 : placed["optimizer"] + 1], "int8"),
    }
    # On a cluster with few tiers some rows are empty.
    return replace(base, wire={message: row for message, row in wire.items() if row})
