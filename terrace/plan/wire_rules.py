"""Rules for wire formats: which message class may use which format on which tier. Part of terrace.plan.validate."""

from dataclasses import replace
from itertools import pairwise

from terrace.base.errors import PlanError, did_you_mean
from terrace.base.words import counted
from terrace.cluster.cluster import Cluster
from terrace.plan.layout import Layout
from terrace.plan.plan import Plan
from terrace.plan.routes import all_reduced_tiers, crossed_tiers
from terrace.plan.wire import (
    BETWEEN_STAGES,
    CHANGES,
    CODES,
    FED_BACK,
    FORMATS,
    OF_PARAMETERS,
    PACKABLE,
    PLACEABLE,
    ROUTED_ROWS,
    ROUTES,
    MessageClass,
    by_boundary,
    parse_format,
)

_AXIS = (
    dict.fromkeys(BETWEEN_STAGES, "the pipeline axis")
    | {MessageClass.CONTEXT: "the context axis"}
    | dict.fromkeys(ROUTED_ROWS, "the table experts")
)


def check_wire(plan: Plan, layout: Layout) -> None:
    """Raise `PlanError` for a format that is invalid or has no effect; `layout` is unsettled (`Layout.written`)."""
    tiers = layout.tiers
    messages = [message.value for message in PLACEABLE]
    for message, row in plan.wire.items():
        if message not in messages:
            raise PlanError(f"wire names message class {message!r}{did_you_mean(message, messages)}")
        for tier, name in row.items():
            if tier not in tiers:
                raise PlanError(
                    f"wire.{message} names tier {tier!r}, which is not in the cluster{did_you_mean(tier, tiers)}"
                )
            names = by_boundary(name)
            if len(names) > 1:
                _check_boundaries(layout, MessageClass(message), tier, name)
            for each in names:
                check_format(plan, MessageClass(message), tier, each)
            _check_crosses(plan, layout, MessageClass(message), tier)
    for sums in CHANGES:
        _check_sparse_sums(plan, layout, sums)
    if plan.shares_scales:
        _check_codes(plan)


def _check_boundaries(layout: Layout, message: MessageClass, tier: str, text: str) -> None:
    assert layout.mesh is not None, "layouts of plans have a mesh"
    size, outermost = layout.mesh.group("pipeline")[-1], layout.tiers[-1]
    here = f"wire.{message.value}.{tier} = {text!r}"
    if message not in BETWEEN_STAGES:
        allowed = " and ".join(each.value for each in BETWEEN_STAGES)
        raise PlanError(f"{here}: only messages between stages ({allowed}) have formats by boundary; write one format")
    if tier != outermost or size == 1:
        raise PlanError(
            f"{here}: formats by boundary are for the members of the outermost tier {outermost!r}, where a pipeline "
            "crosses it; write one format"
        )
    if (number := len(by_boundary(text))) != size - 1:
        raise PlanError(
            f"{here} names {number} formats, and a pipeline over {size} members crosses "
            f"{counted(size - 1, 'boundary')}: name one for each, in the order of the stages"
        )


def _check_codes(plan: Plan) -> None:
    # One working copy serves every refresh and gather.
    for message in OF_PARAMETERS:
        for tier, name in plan.wire.get(message.value, {}).items():
            if name != CODES.name:
                shared, on = next(
                    (of.value, tier)
                    for of in OF_PARAMETERS
                    for tier, each in plan.wire.get(of.value, {}).items()
                    if each == CODES.name
                )
                raise PlanError(
                    f"wire.{message.value}.{tier} = {name!r} with wire.{shared}.{on} = 'fp8' and products = "
                    f"{plan.products!r}: matrices are held as the codes of their products, which travel as they are "
                    f"over all tiers; write 'fp8' or leave it out, or write 'fp8:128' for the {shared} to code blocks "
                    "of their own"
                )


def check_format(plan: Plan, message: MessageClass, tier: str, name: str) -> None:
    """Raise `PlanError` if a message class cannot use the format `name`, whether or not it crosses `tier`."""
    try:
        wire = parse_format(name)
    except PlanError as error:
        raise PlanError(f"wire.{message.value}.{tier}: {error}") from error
    widest = plan.sums if message in CHANGES else plan.compute
    if wire.mantissa_bits > FORMATS[widest].mantissa_bits:
        raise PlanError(
            f"wire.{message.value}.{tier} = {name!r} is wider than the {widest} values it would carry: "
            f"use {widest!r} or leave it out"
        )
    if wire.kept_of and message not in FED_BACK:
        carried = "parameters" if message in ROUTES else "activations"
        raise PlanError(
            f"wire.{message.value}.{tier} = {name!r}: a sparse format is for gradients and for changes of islands, and "
            f"{message.value} carries {carried}, of which all but one of {wire.kept_of} would become zero; write "
            "'int4' or a wider one"
        )
    if wire.packed and message not in PACKABLE:
        carries = "rows that are sent batch by batch" if message in ROUTED_ROWS else "sums or changes, in fp32 or wider"
        raise PlanError(
            f"wire.{message.value}.{tier} = {name!r}: a packed format is for parameters and activations, and "
            f"{message.value} carries {carries}; write 'bf16', or 'int8' to round"
        )
    if wire.feedback and message not in FED_BACK:
        carried = "parameters" if message in ROUTES else "activations"
        raise PlanError(
            f"wire.{message.value}.{tier} = {name!r}: error feedback is for gradients and for changes of islands, and "
            f"{message.value} carries "
            f"{carried}, whose errors do not add up over steps; write {name.removesuffix('+feedback')!r}"
        )


def crossing(cluster: Cluster, plan: Plan) -> Plan:
    """The plan without wire formats for tiers that a message class does not cross, which `check_wire` refuses."""
    layout = Layout.written(cluster, plan)
    crossed = {message.value: [layout.tiers[tier] for tier in crossed_tiers(layout, message)] for message in PLACEABLE}
    kept = {
        message: {tier: name for tier, name in row.items() if tier in crossed.get(message, ())}
        for message, row in plan.wire.items()
    }
    return replace(plan, wire={message: row for message, row in kept.items() if row})


def _check_sparse_sums(plan: Plan, layout: Layout, message: MessageClass) -> None:
    route, reduced = ROUTES[message], all_reduced_tiers(layout, message)
    formats = {tier: plan.wire_format(message, layout.tiers[tier]) for tier in layout.route(message)}
    for tier, wire in formats.items():
        gathered = route.gathering is not None and tier > layout.tier_of(route.gathering[1])
        if wire.kept_of and gathered and tier not in reduced and layout.degrees[tier] > 1:
            raise PlanError(
                f"wire.{message.value}.{layout.tiers[tier]} = {wire.name!r}: over this tier a mean is only passed on, "
                f"of which all but one of {wire.kept_of} elements would become zero; write 'int4' or a wider one"
            )
    for (inner, before), (outer, wire) in pairwise((tier, formats[tier]) for tier in reduced):
        if before.kept_of and wire != before:
            raise PlanError(
                f"wire.{message.value}.{layout.tiers[inner]} = {before.name!r}: every rank adds up sparse messages "
                f"itself, so they travel on as they are over {layout.tiers[outer]!r}, which has {wire.name!r}; give "
                f"both {before.name!r}, or {layout.tiers[inner]!r} a format that is not sparse"
            )


def _check_crosses(plan: Plan, layout: Layout, message: MessageClass, tier: str) -> None:
    index = layout.tiers.index(tier)
    if message is MessageClass.CONTEXT and plan.balance == "cost":
        raise PlanError(
            f'wire.context.{tier} with balance = "cost": rows go to other ranks in every batch, and their messages '
            'have no formats yet; write balance = "tokens", or leave the format out'
        )
    if index in crossed_tiers(layout, message):
        return
    if message not in ROUTES:
        axis = _AXIS.get(message, "the tensor axis")
        raise PlanError(f"wire.{message.value}.{tier} has no effect: {axis} has no ranks on {tier!r}; leave it out")
    if message is MessageClass.OUTER and not plan.outer.has_islands:
        raise PlanError(
            f"wire.outer.{tier} has no effect: all ranks are one island; give the plan a table outer, or leave it out"
        )
    # Name the classes that do cross the tier, in case one of them was meant.
    crossing = [other.value for other in PLACEABLE if index in layout.route(other)]
    raise PlanError(
        f"wire.{message.value}.{tier} has no effect: under params = {plan.params!r}, grads = {plan.grads!r}, "
        f"optimizer = {plan.optimizer!r} no {message.value} message crosses {tier!r}; "
        + (f"what does is {', '.join(crossing)}" if crossing else "nothing does: leave it out")
    )
