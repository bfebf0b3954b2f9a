"""Tables for the terminal: a plan as tiers x axes, and step reports, predicted and measured."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from rich.text import Text

from terrace.base.words import counted, quantity, seconds
from terrace.cluster.cluster import Cluster
from terrace.model.blocks import num_active_params, num_params
from terrace.model.config import ModelConfig
from terrace.model.facts import is_dense
from terrace.plan.gaps import shares_words
from terrace.plan.layout import Layout
from terrace.plan.mesh import Mesh
from terrace.plan.outer import Outer
from terrace.plan.plan import AXES, CONTEXT_AXES, Plan
from terrace.plan.products import products_words
from terrace.plan.wire import BY_BATCH, MessageClass
from terrace.program.report import StepReport, judged
from terrace.report.markup import meter
from terrace.report.palette import colour_key
from terrace.report.table import Markup, Table

STATES = ("params", "params_backward", "grads", "optimizer")
_CATEGORY_ORDER = ("forward", "backward", "clip", "update")
# Largest relative error of a good prediction of step time and memory; bytes must be equal.
STEP_BAND, MEMORY_BAND = 0.20, 0.10
_STATE_TITLE = "model state of one rank, each category at its own peak"


def model_size(model: ModelConfig) -> str:
    """Number of parameters, and of active parameters for a mixture of experts."""
    size = quantity(num_params(model), " parameters")
    return size if is_dense(model) else f"{size} ({quantity(num_active_params(model), '').strip()} active)"


def plan_table(cluster: Cluster, plan: Plan) -> Table:
    """The plan: a row per tier (outermost first), a column per axis, and the states placed on each tier.

    `params /2` on a tier means that parameters are sharded over the 2 ranks of the data and context axes within one
    group of that tier.
    """
    headings, rows = plan_rows(cluster, plan)
    return Table(title=plan_title(cluster, plan), headings=headings, left=("tier", "states placed here"), rows=rows)


def plan_title(cluster: Cluster, plan: Plan) -> str:
    return f"plan {plan.name} on cluster {cluster.name}: {counted(cluster.world_size, 'rank')}"


def plan_summary(cluster: Cluster, plan: Plan) -> str:
    """The plan in one line: its axes, and the number of ranks over which each state is sharded."""
    layout, mesh = Layout.of(cluster, plan), Mesh.of(cluster, plan)
    axes = [f"{axis} {mesh.total(axis)}" for axis in AXES if axis != "data" and mesh.total(axis) > 1]
    held: dict[str, list[str]] = {}
    for state in ("params", "grads", "optimizer"):
        where = getattr(layout, state)
        held.setdefault("whole" if where < 0 else f"/{layout.span(where)}", []).append(state)
    states = [f"{', '.join(names)} {share}" for share, names in held.items()]
    outer = [outer_words(plan.outer)] if plan.outer.has_islands else []
    outer += [f"{', '.join(plan.keep.on(medium))} on the {medium}" for medium in plan.keep.media]
    outer += ["updates on the host's cores"] if plan.keep.updates_on_host else []
    return f"{', '.join([plan_title(cluster, plan), *axes])}; {', '.join(states + outer)}"


def plan_rows(cluster: Cluster, plan: Plan) -> tuple[list[str], list[list[str]]]:
    """(headings, rows) of a plan's table."""
    layout = Layout.of(cluster, plan)
    mesh = Mesh.of(cluster, plan)
    # Leave out axes of degree 1.
    axes = [axis for axis in AXES if axis == "data" or mesh.total(axis) > 1]
    # The secondary copy has a row only in plans that keep one.
    placed = {state: getattr(layout, state) for state in STATES if state != "params_backward" or layout.has_secondary}
    rows = []
    for index in range(layout.outermost, -1, -1):
        tier = cluster.tiers[index]
        # The span, the number of ranks inside the tier, is the divisor of the state.
        states = [f"{state} /{layout.span(index)}" for state, where in placed.items() if where == index]
        if tier.name == plan.outer.tier:
            states.append(outer_words(plan.outer))
        link = f"{quantity(tier.bandwidth_bytes_per_s, 'B/s')}, {seconds(tier.latency_s)}"
        sharers = cluster.sharers(index)
        link += f", shared by {sharers}" if sharers > 1 else ""
        cells = (_degree_words(mesh, index, axis) for axis in axes)
        rows.append([tier.name, str(tier.size), *cells, link, ", ".join(states)])
    # A placement below the innermost tier is the device: every rank holds the whole state.
    kept = {state for medium in plan.keep.media for state in plan.keep.on(medium)}
    whole = ", ".join(state for state, where in placed.items() if where < 0 and state not in kept)
    rows.append(["device", "1", *("1" for _ in axes), "", f"{whole} (replicated)" if whole else ""])
    for name in plan.keep.media:
        medium = cluster.device.below[name]
        link = f"{quantity(medium.read_bytes_per_s, 'B/s')}" + f", shared by {medium.sharers}" * (medium.sharers > 1)
        rows.append([name, "", *("" for _ in axes), link, f"{', '.join(plan.keep.on(name))}, below every device"])
    return ["tier", "joins", *axes, "link", "states placed here"], rows


def outer_words(outer: Outer) -> str:
    parts = f"{outer.fragments} fragments" if outer.fragments > 1 else ""
    late = f"{counted(outer.delay, 'step')} late" if outer.delay else ""
    words = [f"islands exchange every {counted(outer.every, 'step')}", parts, late, outer.optimizer]
    return ", ".join(filter(None, words))


def _degree_words(mesh: Mesh, tier: int, axis: str) -> str:
    degree = mesh.group(axis)[tier]
    if axis != "context" or degree == 1:
        return str(degree)
    forms = {form: mesh.group(form)[tier] for form in CONTEXT_AXES}
    return " x ".join(f"{number} {form}" for form, number in forms.items() if number > 1)


def wire_words(plan: Plan) -> str:
    named = [f"{message} {name} on {tier}" for message, row in plan.wire.items() for tier, name in row.items()]
    states = "" if plan.messages is None else f", parameters and gradients in {plan.messages}"
    but = f", but {', '.join(named)}" if named else ""
    return f"messages travel in {plan.compute}{states}{but}{shares_words(plan)}{products_words(plan)}"


def bytes_table(predicted: Mapping[tuple[MessageClass, str], int], tiers: Sequence[str]) -> Table:
    """Bytes that one rank sends per step, by message class (rows) and tier (columns)."""
    tiers = with_media(predicted, tiers)
    names = [message for message in MessageClass if any((message, tier) in predicted for tier in tiers)]
    return sent_table(predicted, names, tiers)


def with_media(sent: Mapping[tuple[Any, str], int], tiers: Sequence[str]) -> list[str]:
    """The tiers, then the media below the device that states pass."""
    return [*tiers, *dict.fromkeys(where for _, where in sent if where not in tiers)]


def sent_table(sent: Mapping[tuple[Any, str], int], messages: Iterable[str], tiers: Sequence[str]) -> Table:
    """Bytes that one rank sends per step, by message (rows) and tier (columns)."""
    totals = (sum(size for (_, where), size in sent.items() if where == tier) for tier in tiers)
    return Table(
        title="bytes one rank sends in a step",
        headings=["message", *tiers],
        left=("message",),
        rows=sent_rows(sent, messages, tiers),
        total=["total", *map(bytes_words, totals)],
    )


def sent_rows(sent: Mapping[tuple[Any, str], int], messages: Iterable[str], tiers: Sequence[str]) -> list[list[str]]:
    return [[message, *(bytes_words(sent.get((message, tier))) for tier in tiers)] for message in messages]


def bytes_words(size: float | None) -> str:
    return quantity(size, "B") if size else "-"


def memory_table(predicted: Mapping[str, int], room: str) -> Table:
    """Model state of one rank, each category at its own peak; `room` is the memory available to a plan, in words."""
    return Table(
        title=f"{_STATE_TITLE}; no activations; a plan may take {room}",
        headings=("category", "predicted"),
        left=("category",),
        rows=[(category, quantity(size, "B")) for category, size in predicted.items() if size],
        total=("total", quantity(sum(predicted.values()), "B")),
    )


def time_table(predicted: StepReport) -> Table:
    """Predicted seconds of a step by category, and their shares; on a page with bars."""
    longest, step_s = max(predicted.time_s.values(), default=0.0) or 1.0, predicted.step_s or 1.0
    table = Table(
        title="seconds of a step, predicted from the cluster's own figures",
        headings=("category", "predicted", "of the step", ""),
        left=("category", ""),
        total=("step", seconds(predicted.step_s), "", Markup()),
    )
    for name in time_categories(predicted.time_s):
        spent_s = predicted.time_s[name]
        bar = meter([(f"--c-{colour_key(name)}", spent_s)], longest)
        table.add_row(name, seconds(spent_s), f"{100 * spent_s / step_s:.1f} %", bar)
    return table


def comparison_tables(predicted: StepReport, measured: StepReport) -> list[Table]:
    """Predicted and measured bytes (which must be equal), memory and time."""
    return [
        _compare_bytes(predicted, measured),
        _compare(_STATE_TITLE, "total", predicted.memory_bytes, measured.memory_bytes, _size),
        _compare("seconds of a step (mean)", "step", predicted.time_s, measured.time_s, seconds),
    ]


def _size(value: float) -> str:
    return quantity(value, "B")


def band_words(stages: Sequence[tuple[StepReport, StepReport]], why_not: str = "") -> str:
    """The relative error of step time and memory on the worst of `stages`, each (predicted, measured), and whether it
    is within its band; with several stages also whether their bytes are equal.

    `why_not` (terrace.program.report) is the reason for giving no verdict on times, if any. Memory is always judged.
    """
    sentences = []
    told = [(predicted, _as_told(predicted, measured)) for predicted, measured in stages]
    # Mentioned only if something was left out.
    parts = any(found is not measured for (_, measured), (_, found) in zip(stages, told, strict=True))
    left_out = ", messages in attention left out," if parts else ""
    of_time = f"step time{left_out}", STEP_BAND, attrgetter("step_s"), why_not
    for name, band, size, open_for in (of_time, ("model state", MEMORY_BAND, _state_bytes, "")):
        sizes = [(size(predicted), size(found)) for predicted, found in told]
        # Relative to the measured value.
        errors = [(expected - found) / found if expected > 0 and found > 0 else 0.0 for expected, found in sizes]
        worst = max(range(len(stages)), key=lambda stage: abs(errors[stage]))
        if sizes[worst][0] > 0 and sizes[worst][1] > 0:
            # With several stages, name the worst one.
            where = f" at most (stage {worst})" if len(stages) > 1 else ""
            sentences.append(f"predicted {name} {judged(errors[worst], band, open_for, where)}")
    if len(stages) > 1:
        differ = [
            str(stage) for stage, (predicted, measured) in enumerate(stages) if not equal_bytes(predicted, measured)
        ]
        sentences.append(f"bytes DIFFERENT on stage {', '.join(differ)}" if differ else "bytes equal on every stage")
    return (";\n" if len(stages) > 1 else "; ").join(sentences)


def largest_miss(stages: Sequence[tuple[StepReport, StepReport]]) -> str:
    """The category with the largest error among the stages whose step time is outside its band; "" if there is none."""
    told = [(predicted, _as_told(predicted, measured)) for predicted, measured in stages]
    outside = [
        (predicted, found)
        for predicted, found in told
        if predicted.step_s > 0 and found.step_s > 0 and abs(predicted.step_s - found.step_s) > STEP_BAND * found.step_s
    ]
    if not outside:
        return ""
    misses = [
        (abs(expected - spent), name, expected, spent)
        for predicted, found in outside
        for name in {**predicted.time_s, **found.time_s}
        for expected, spent in [(predicted.time_s.get(name, 0.0), found.time_s.get(name, 0.0))]
    ]
    _, name, expected, spent = max(misses)
    return f"most is missed of {name!r}: {seconds(expected)} predicted, {seconds(spent)} measured"


def equal_bytes(predicted: StepReport, measured: StepReport) -> bool:
    """Whether measured bytes equal the predicted ones, per message class and tier."""
    # A message that was sent but not predicted counts as different.
    keys = predicted.sent_bytes.keys() | measured.sent_bytes.keys()
    by_batch = _by_batch(predicted)
    return all(
        predicted.sent_bytes.get(key, 0) == measured.sent_bytes.get(key, 0) for key in keys if key[0] not in by_batch
    )


def _by_batch(predicted: StepReport) -> set[MessageClass]:
    # Message classes whose bytes depend on the batch: routed ones, rows below the device, and CONTEXT with balance =
    # "cost". The run itself checks them against each batch.
    return {MessageClass.CONTEXT, *BY_BATCH} - {message for message, _ in predicted.sent_bytes}


def _as_told(predicted: StepReport, measured: StepReport) -> StepReport:
    # Remove waits for messages that are not predicted from the measured step.
    waits = {f"wait {message.value}" for message in _by_batch(predicted)} & measured.time_s.keys()
    waits -= predicted.time_s.keys()
    if not waits:
        return measured
    return replace(measured, time_s={name: spent for name, spent in measured.time_s.items() if name not in waits})


def _state_bytes(report: StepReport) -> float:
    return sum(report.memory_bytes.values())


def _compare_bytes(predicted: StepReport, measured: StepReport) -> Table:
    headings = ("message", "tier", "predicted", "measured", "")
    table = Table(title="bytes one rank sends in a step", headings=headings, left=("message", "tier", ""))
    for message, tier in sorted(predicted.sent_bytes.keys() | measured.sent_bytes.keys()):
        expected = predicted.sent_bytes.get((message, tier), 0)
        found = measured.sent_bytes.get((message, tier), 0)
        # There is no prediction; the run has checked these bytes against its batches.
        if message in _by_batch(predicted):
            table.add_row(message.value, tier, "-", f"{found:,}", "as its batches say")
            continue
        verdict = Text("equal") if expected == found else Text("DIFFERENT", style="bold red")
        table.add_row(message.value, tier, f"{expected:,}", f"{found:,}", verdict)
    return table


def _compare(
    title: str, total: str, predicted: Mapping[str, float], measured: Mapping[str, float], show: Callable[[float], str]
) -> Table:
    # The union, since a category that is missing on one side is an error, too.
    pairs = {name: (predicted.get(name, 0), measured.get(name, 0)) for name in {**predicted, **measured}}

    def row(name: str, expected: float, found: float) -> tuple[str, ...]:
        # No error where one side lacks the category.
        error = f"{100 * (expected - found) / found:+.0f} %" if expected and found else ""
        return name, show(expected), show(found), error

    expected, found = (sum(values) for values in zip(*pairs.values(), strict=True)) if pairs else (0, 0)
    return Table(
        title=title,
        headings=("category", "predicted", "measured", "error"),
        left=("category",),
        rows=[row(name, *pairs[name]) for name in time_categories(pairs) if any(pairs[name])],
        total=row(total, expected, found),
    )


def time_categories(values: Mapping[str, object]) -> list[str]:
    """Names in display order: computation, then waits, then the rest in their own order."""
    known = [name for name in _CATEGORY_ORDER if name in values]
    waits = sorted(name for name in values if name.startswith("wait "))
    return [*known, *waits, *(name for name in values if name not in known and name not in waits)]


def utilisation(share: float) -> str:
    """MFU or HFU as text; marks values above 1, which mean that the device's peak is wrong."""
    return f"{100 * share:.1f} %{' (the peak is wrong)' * (share > 1)}"
