"""Sentences on the uncertainty of predictions: error bands, plans that tie, how much a search looked at."""

from collections.abc import Iterable, Sequence

from terrace.base.words import counted, filled, quantity, seconds
from terrace.cluster.cluster import Cluster
from terrace.plan.plan import Plan
from terrace.plan.search_limits import FINALISTS
from terrace.planner.ranking import Estimate
from terrace.planner.robust import FULL_LONGER, KERNELS, LINKS, doubt
from terrace.planner.search import Found
from terrace.planner.task import Task, plan_of
from terrace.planner.ties import FULL, Regret, Ties, crossing_bytes
from terrace.planner.verdicts import Point
from terrace.report.table import Table
from terrace.simulate.bands import Band, band_of, percent, tie_share


def plan_bands_words(task: Task, estimates: Sequence[Estimate]) -> str:
    """The bands of plans, which are numbered from 1."""
    bands = [band_of(task.cluster, plan_of(task, each.candidate)) for each in estimates]
    return _bands_words("plan", [str(number) for number, _ in enumerate(bands, start=1)], bands)


def scaling_bands_words(points: Sequence[Point], plan: Plan, tier: str) -> str:
    """The bands of a plan at the sizes of a scaling curve at which it runs."""
    ran = [point for point in points if point.estimate]
    return _bands_words(
        tier, [str(point.num_outermost) for point in ran], [band_of(point.task.cluster, plan) for point in ran]
    )


def widest_band(cluster: Cluster, plans: Iterable[Plan]) -> str:
    """The widest band of the plans' steps, with a leading comma, for a table title; "" without a plan."""
    bands = [band_of(cluster, plan) for plan in plans]
    return f", steps {max(bands, key=lambda band: band.share)}" if bands else ""


def _bands_words(what: str, names: Sequence[str], bands: Sequence[Band]) -> str:
    """One paragraph per band: the plans or sizes, the band, and its validated rows."""
    alike: dict[float, list[int]] = {}
    for place, band in enumerate(bands):
        alike.setdefault(band.share, []).append(place)
    lines = []
    for places in alike.values():
        of = f" of {what} {', '.join(names[place] for place in places)}" if len(alike) > 1 else ""
        band = bands[places[0]]
        lines.append(filled(f"step, tokens/s and MFU{of} {band}: {band.words}"))
    return "\n".join(lines)


def ties_words(ties: Ties, num_shown: int) -> str:
    if ties.regrets:
        return _regret_words(ties)
    off = f"predictions of two plans are off each other by up to {_tie()}"
    if ties.num_tied == 1:
        return "" if len(ties.best) == 1 else filled(f"no other plan ties with plan 1: {off}")
    fewest = ""
    if ties.tier is not None:
        sent = quantity(crossing_bytes(ties.best[0], ties.tier), "B")
        fewest = f"the fewest bytes across the slowest tier, {ties.tier} ({sent} a rank), then "
    shortest = "the shortest predicted step, too"
    if ties.fastest:
        of = f"that of plan {ties.fastest + 1}, " if ties.fastest < num_shown else ""
        shortest = f"the shortest predicted step is {of}{seconds(ties.best[ties.fastest].step_s)}"
        shortest += f", and plan 1 comes before it since it {ties.by}" if ties.by else ""
    if ties.may_be_more:
        tied = f"at least {ties.num_tied} plans tie"
    else:
        tied = f"plans 1 to {ties.num_tied} tie" if ties.num_tied <= num_shown else f"{ties.num_tied} plans tie"
    of = f"Of the {FINALISTS} that come first in the search plan 1" if ties.num_tied > FINALISTS else "Plan 1"
    return filled(
        f"{tied}: {off}. {of} has {fewest}the most memory left up to a fifth of a "
        f"device, then the fewest axes and keys that no preset has; {shortest}"
    )


def _regret_words(ties: Ties) -> str:
    """Why plan 1 is first under --robust."""
    regret = ties.regrets[0]
    first = "which has the shortest predicted step, too"
    if ties.fastest:
        first = f"where the shortest predicted step is that of plan {ties.fastest + 1}"
    return filled(
        f"regret: by how much a plan is slower than the fastest of these {len(ties.best)}, at most, if a tier is "
        f"{percent(LINKS)} slower or faster, kernels are {percent(KERNELS)} slower, launches take twice as long, or "
        f"devices more than {percent(FULL)} full are {percent(FULL_LONGER)} slower. Plan 1 has the least, "
        f"{_share(regret)} ({regret.scenario}), {first}"
    )


def add_regrets(table: Table, ties: Ties) -> None:
    """Adds the largest regret of each row's plan and its scenario to a table of plans; nothing without regrets."""
    if not ties.regrets:
        return
    place = table.headings.index("memory") + 1
    table.headings = [*table.headings[:place], "regret", *table.headings[place:]]
    for index, (row, regret) in enumerate(zip(table.rows, ties.regrets, strict=False)):
        table.rows[index] = [*row[:place], f"{_share(regret)}, {regret.scenario}", *row[place:]]


def doubt_words(ties: Ties, num_shown: int) -> str:
    """The term on which the advantage of plan 1 over the next fastest plan shown rests, if it is less sure; else ""."""
    first, *others = ties.best[:num_shown]
    if not others:
        return ""
    number, other = min(enumerate(others, start=2), key=lambda each: each[1].step_s)
    found = doubt(first, other)
    if not found.term:
        return ""
    return filled(
        f"plan 1 is {seconds(found.advantage_s)} faster than plan {number}, which rests on {found.term}: "
        f"{seconds(found.own_s)} of plan 1 and {seconds(found.other_s)} of plan {number}, whose "
        f"difference is unsure by {seconds(found.unsure_s)}"
    )


def _share(regret: Regret) -> str:
    return f"{100 * regret.share:.1f} %"


def is_tie(step_s: float, other_s: float) -> bool:
    """Whether two predicted steps of one task differ by no more than the predictions' relative error."""
    return max(step_s, other_s) <= (1 + tie_share()) * min(step_s, other_s)


def search_words(found: Found) -> str:
    words = (
        f"{counted(found.num_played, 'plan')} played, the cheapest of {found.num_shapes} shapes and micro-batches by a "
        "closed price"
    )
    if not found.is_complete:
        words += "; stopped at --limit: a larger one plays more"
    return filled(words)


def _tie() -> str:
    return f"{100 * tie_share():.1f} %"
