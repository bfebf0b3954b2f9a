"""Tables and charts of a search: compared plans, changes, one plan's cost, scaling curves."""

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from terrace.base.printable import escape
from terrace.base.words import counted, longer, quantity, seconds
from terrace.plan.keep import DEVICE, PLACED
from terrace.plan.plan import AXES, Plan
from terrace.plan.recompute import WHOLE
from terrace.planner.divisions import division_notes
from terrace.planner.figures import hfu, mfu, tokens_per_s
from terrace.planner.ranking import Cost, Estimate
from terrace.planner.stages import SERIAL
from terrace.planner.task import Candidate, Task, plan_of
from terrace.planner.verdicts import Headroom, Point
from terrace.report.plot import BOTTOM, HEIGHT, LEFT, RIGHT, WIDTH, frame, round_ticks
from terrace.report.table import Table
from terrace.simulate.bands import Band
from terrace.simulate.footprint import CUDA_ALLOCATOR_FACTOR, CUDA_PAGES_BYTES
from terrace.simulate.hidden import HiddenMessages

if TYPE_CHECKING:
    from terrace.planner.advice import Change

_PLAN_WIDTH = 37  # characters of a plan's description, so that the table fits in 80 columns
_MUCH_HIDDEN = 0.05  # share of a step above which hidden messages are reported; predictions have as large an error


def plans_table(task: Task, estimates: Sequence[Estimate], title: str) -> Table:
    # A column that would say "data" in every row is left out.
    axes = ["axes"] if any(_axes_words(task, each.candidate) for each in estimates) else []
    left = [*axes, "params", "grads", "optimizer"]
    headings = ["", "step", "tokens/s", "MFU", "memory", *left, "micro-batch", "notes"]
    rows = []
    for rank, estimate in enumerate(estimates, start=1):
        plan = plan_of(task, estimate.candidate)
        rows.append(
            [
                str(rank),
                *_figures(task, estimate),
                *(_axes_words(task, estimate.candidate) or "data" for _ in axes),
                *(_place(plan, state) for state in PLACED),
                f"{estimate.candidate.micro_batch} x {estimate.num_micros}",
                _notes(task, estimate.candidate),
            ]
        )
    return Table(title=title, headings=headings, left=[*left, "notes"], rows=rows)


def hidden_words(found: HiddenMessages | None, at: str = "") -> str:
    """A sentence if the step would be much longer without hiding messages, else ""; `at` names a cluster size."""
    if found is None or found.exposed_s < (1.0 + _MUCH_HIDDEN) * found.step_s:
        return ""
    which = f"At {at} this" if at else "This"
    return (
        f"{which} plan hides {seconds(found.hidden_s)} of messages on tier {found.tier} behind computing: a step that "
        f"hid none of them would take {seconds(found.exposed_s)} instead of {seconds(found.step_s)}"
    )


def _figures(task: Task, estimate: Cost) -> list[str]:
    # Cells of step, tokens/s, MFU, memory.
    rate, size = tokens_per_s(task, estimate), estimate.needed_bytes
    return [seconds(estimate.step_s), quantity(rate, "").strip(), percent(mfu(task, estimate)), quantity(size, "B")]


def plan_words(task: Task, candidate: Candidate) -> str:
    """One-line summary of a candidate."""
    plan = plan_of(task, candidate)
    states = ", ".join(f"{state} {_place(plan, state)}" for state in PLACED)
    words = [_axes_words(task, candidate), states, f"micro-batch {candidate.micro_batch}", _notes(task, candidate)]
    return "; ".join(word for word in words if word)


def _place(plan: Plan, state: str) -> str:
    # The medium of a state that is kept below the device, after its tier if ranks share the state.
    tier, medium = getattr(plan, state), getattr(plan.keep, state)
    if medium == DEVICE:
        return str(tier)
    return str(medium) if tier == DEVICE else f"{tier}, {medium}"


def changes_table(changes: Sequence["Change"], step_s: float, heads: Sequence[str], title: str = "") -> Table:
    """Cost of every change against a step of `step_s`, or the reason why it does not run.

    `heads` are the headings of the change, its step in comparison, and the remark. The kind of a change is shown where
    there are several.
    """
    kinds = ["in the"] if len({change.kind for change in changes}) > 1 else []
    first, against, remark = heads
    found = Table(
        title=title, headings=[first, *kinds, "step", against, "memory", remark], left=[first, *kinds, remark]
    )
    above = ""
    for change in changes:
        start = [change.words, *(change.kind for _ in kinds)]
        if change.cost is None:
            # Consecutive rows often fail for the same reason, which is written once.
            found.add_row(*start, "-", "", "", "as above" if change.reason == above else change.reason)
            above = change.reason
            continue
        above = ""
        cells = seconds(change.step_s), longer(change.step_s, step_s), quantity(change.cost.needed_bytes, "B")
        found.add_row(*start, *cells, change.reason or change.note)
    return found


def split_table(values: Mapping[str, float], title: str, unit: str, whole: float | None = None) -> Table:
    """Amounts by category, in seconds (`unit` "s") or bytes ("B"), with their share of the sum or of `whole`."""
    total = sum(values.values())

    def row(name: str, value: float) -> tuple[str, str, str]:
        amount = seconds(value) if unit == "s" else quantity(value, unit)
        return name, amount, percent(value / (whole or total))

    # The largest first: it is the one to reduce.
    rows = [row(*item) for item in sorted(values.items(), key=lambda item: -item[1])]
    headings = ("category", "amount", "share")
    return Table(title=title, headings=headings, left=("category",), rows=rows, total=row("total", total))


def reserve_words() -> str:
    """What the `allocator` of a device's memory is."""
    share, pages = percent(CUDA_ALLOCATOR_FACTOR - 1), quantity(CUDA_PAGES_BYTES, "B")
    return (
        f"allocator is what it reserves beyond tensors: {share} of them, for gaps between tensors of many sizes, "
        f"and at least {pages}, the ends of the segments of two streams"
    )


def headrooms_table(task: Task, found: Sequence[Headroom], title: str) -> Table:
    """The fastest plan for each memory headroom, compared with the one for the smallest headroom."""
    headings = ("headroom", "step", "slower", "memory", "plan")
    table = Table(title=title, headings=headings, left=("plan",))
    above: Estimate | None = None
    for each in found:
        best = each.best
        if best is None:
            table.add_row(each.headroom, "-", "-", "-", "none" if each.is_complete else "none found before --limit")
        elif best is above:
            table.add_row(each.headroom, "", "", "", "the same")
        else:
            slower = f"{100 * (best.step_s / found[0].best.step_s - 1):.1f} %" if found[0].best else ""
            words = plan_words(task, best.candidate) + ("" if each.is_complete else "; the search stopped at --limit")
            words = textwrap.fill(words, _PLAN_WIDTH, break_on_hyphens=False)
            table.add_row(each.headroom, seconds(best.step_s), slower, quantity(best.needed_bytes, "B"), words)
        above = best
    return table


def scaling_table(points: Sequence[Point], title: str, tier: str, price: float | None, *, full: bool = False) -> Table:
    """Scaling curve as a table; efficiency is tokens/s per device relative to the first size that runs.

    With `full` there is also a column of MFU that counts the full square of attention.
    """
    squared = ["MFU, full square"] if full else []
    headings = [tier, "devices", "batch", "step", "tokens/s", "efficiency", "MFU", *squared, "memory"]
    headings += ["per million tokens"] if price is not None else []
    found = Table(title=title, headings=headings)
    # The smallest sizes may lack the memory, so efficiency is relative to the first that runs.
    first = next((point.per_device for point in points if point.estimate), 0.0)
    for point in points:
        start = [str(point.num_outermost), str(point.task.cluster.world_size), str(point.task.batch)]
        estimate = point.estimate
        if estimate is None:
            found.add_row(*start, *("-" for _ in headings[3:]))
            continue
        step, rate, used, memory = _figures(point.task, estimate)
        cells = [step, rate, percent(point.per_device / first), used]
        cells += [percent(mfu(point.task, estimate, full=True))] if full else []
        cells.append(memory)
        cells += [f"{point.cost_per_million(price):.4g}"] if price is not None else []
        found.add_row(*start, *cells)
    return found


def missing_words(points: Sequence[Point], tier: str) -> str:
    """Why a plan does not run at some sizes of a scaling curve: one line per kind of reason, with an example."""
    kinds: dict[str, list[Point]] = {}
    for point in points:
        if not point.estimate:
            # Reasons of one kind differ only in their numbers.
            kinds.setdefault(re.sub(r"\d[\d.,]*", "", point.reason), []).append(point)
    lines = []
    for same in kinds.values():
        sizes = ", ".join(str(point.num_outermost) for point in same)
        first = f" (at {same[0].num_outermost})" if len(same) > 1 else ""
        lines.append(f"not at {tier} {sizes}: {same[0].reason}{first}")
    return "\n".join(textwrap.fill(line, 80, subsequent_indent="  ", break_on_hyphens=False) for line in lines)


def numbers_words(points: Sequence[Point], tier: str) -> str:
    """A paragraph with micro-batch, unit and recomputation at each size of a scaling curve that runs."""
    sizes: dict[str, list[str]] = {}
    for point in points:
        if point.plan is not None:
            sizes.setdefault(_numbers(point.plan), []).append(str(point.num_outermost))
    each = "; ".join(f"{words} at {tier} {', '.join(at)}" for words, at in sizes.items())
    return textwrap.fill(each, 80, subsequent_indent="  ", break_on_hyphens=False)


def _numbers(plan: Plan) -> str:
    parts = [f"micro-batch {plan.micro_batch}", f"unit {plan.unit}" if plan.unit > 1 else ""]
    parts.append(f"recompute {' '.join(plan.recompute)}" if plan.recompute else "")
    return ", ".join(filter(None, parts))


def scaling_svg(curves: Mapping[str, Sequence[Point]], title: str) -> str:
    """Efficiency over devices as SVG, one curve per kind of scaling."""
    lines = {}
    for name, points in curves.items():
        ran = [point for point in points if point.estimate]
        if ran:
            first = ran[0].per_device
            lines[name] = [(point.task.cluster.world_size, 100 * point.per_device / first) for point in ran]
    return curves_svg(lines, title=title, x_label="devices", y_label="% of the smallest size's tokens/s per device")


def figures_words(task: Task, estimate: Estimate, band: Band, *, full: bool = False) -> str:
    """MFU and HFU with their formulas, one line each; with `full` also for the full square of attention."""
    lines = [
        f"MFU {percent(mfu(task, estimate))} ({band}) = 3 x forward FLOPs (causal) / (step x devices x peak)",
        f"HFU {percent(hfu(task, estimate))} ({band}) = the same with forwards that run again",
    ]
    if full:
        square = f"MFU {percent(mfu(task, estimate, full=True))}, HFU {percent(hfu(task, estimate, full=True))}"
        lines.append(f"with attention's full square: {square} ({band})")
    return "\n".join(lines)


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _axes_words(task: Task, candidate: Candidate) -> str:
    degrees = {axis: candidate.mesh.total(axis) for axis in AXES}
    if degrees["data"] == task.cluster.world_size:
        return ""
    columns = candidate.mesh.total("columns")
    factors = {"tensor": f" ({degrees['tensor'] // columns} x {columns})"} if columns > 1 else {}
    return ", ".join(f"{name} {degree}{factors.get(name, '')}" for name, degree in degrees.items() if degree > 1)


def again_words(task: Task, candidate: Candidate) -> str:
    """The recomputation of a candidate: `layers`, `mlp of 8 layers`, `8 layers, mlp of the others`."""
    again, first = task.recomputations.values[candidate.recompute], candidate.first
    if again.parts == WHOLE:
        words = counted(first, "layer") if first else "layers"
    else:
        words = ", ".join(again.parts) + (f" of {counted(first, 'layer')}" if first else "")
    return f"{words}; {', '.join(again.others)} of the others" if first and again.others else words


def _notes(task: Task, candidate: Candidate) -> str:
    notes = [f"{again_words(task, candidate)} run again"] if candidate.recompute else []
    if candidate.unit > 1:
        notes.append(f"units of {candidate.unit}")
    if candidate.placement.backward >= 0:
        notes.append(f"second copy on {task.cluster.tiers[candidate.placement.backward].name}")
    if candidate.schedule != SERIAL:
        notes.append(candidate.schedule + (f", {candidate.chunks} chunks" if candidate.chunks > 1 else ""))
    notes += division_notes(candidate.mesh, [tier.name for tier in task.cluster.tiers])
    return ", ".join(notes)


_TOP = 56
_COLOURS = ("#1d4ed8", "#dc2626", "#15803d", "#a16207")


def curves_svg(curves: Mapping[str, Sequence[tuple[int, float]]], *, title: str, x_label: str, y_label: str) -> str:
    """Named curves of (x, y) as SVG; x is spaced by doublings, y starts at 0."""
    points = [point for curve in curves.values() for point in curve]
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    high = 1.05 * max(y for _, y in points)
    # A single x has no width: avoid the division by zero.
    doublings = math.log2(last / first) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + math.log2(x / first) / doublings * (WIDTH - LEFT - RIGHT)
        return across, _TOP + (high - y) / high * (HEIGHT - _TOP - BOTTOM)

    parts = frame(title, x_label, {tick: place(first, tick)[1] for tick in round_ticks(0, high)})
    parts.append(f'<text x="{LEFT}" y="42" fill="#52525b">{escape(y_label)}</text>')
    for x in sorted({x for x, _ in points}):
        across = place(x, 0)[0]
        parts.append(f'<text x="{across:.1f}" y="{HEIGHT - 24}" text-anchor="middle" fill="#52525b">{x}</text>')
    for index, (name, curve) in enumerate(curves.items()):
        colour, dots = _COLOURS[index % len(_COLOURS)], [place(x, y) for x, y in curve]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in dots)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in dots]
        label = f'<text x="{WIDTH - RIGHT}" y="{22 + 16 * index}" text-anchor="end" fill="{colour}">'
        parts.append(f"{label}{escape(name)}</text>")
    return "\n".join([*parts, "</svg>\n"])
