"""Goodput on a cluster whose parts fail: columns of tables of plans, a table of ways to survive, lines on spares."""

from collections.abc import Sequence

from terrace.base.words import counted, filled, seconds
from terrace.planner.outlook import DISK, ISLANDS, Outlook, Way
from terrace.report.plans import percent
from terrace.report.table import Table
from terrace.report.training_cost import duration

_HEADINGS = ("goodput", "save every")
_BEHIND = "memory"  # the column after which they stand


def add_columns(table: Table, outlooks: Sequence[Outlook | None]) -> None:
    """Adds the goodput and the save interval of each row to a table; None stands for a row without a step."""
    place = list(table.headings).index(_BEHIND) + 1
    table.headings = [*table.headings[:place], *_HEADINGS, *table.headings[place:]]
    for index, each in enumerate(outlooks):
        row = table.rows[index]
        cells = ["-", "-"] if each is None else [percent(each.ways[0].goodput), _steps(each.ways[0])]
        table.rows[index] = [*row[:place], *cells, *row[place:]]


def ways_table(outlook: Outlook) -> Table:
    """The ways to survive failures: goodput, the interval to set, the seconds of a save."""
    rows = []
    for way in outlook.ways:
        saves = ("-", "-", "-")
        if way.num_steps:
            interval = f"{_steps(way)}, {duration(way.num_steps * outlook.step_s)}"
            saves = (interval, seconds(way.save.stall_s), seconds(way.save.write_s))
        rows.append((way.name, percent(way.goodput), *saves))
    return Table(
        title=f"goodput: something fails every {duration(outlook.job.mean_s)}",
        headings=("way", "goodput", "save every", "a save stalls", "counts after"),
        left=("way",),
        rows=rows,
    )


def ways_words(outlook: Outlook) -> str:
    """Lines on the key that sets the interval, on spares, and on how islands come and go."""
    disk, tier = outlook.ways[0], outlook.cluster.tiers[-1]
    lines = [
        _interval_words(disk, "" if outlook.has_islands else ', or "auto", which measures the stall')
        if disk.goodput > 0
        else f"{DISK}: nothing ever ends, since parts fail too often for a step, a save and a restart",
        _spares_words(outlook),
    ]
    if any(way.name == ISLANDS for way in outlook.ways):
        lines.append(
            f"{ISLANDS}: each of the {tier.size} members of tier {tier.name} is a job of its own (terrace train "
            "--meet); the row counts the time of members that go on without each other"
        )
    return filled("\n".join(lines))


def _interval_words(disk: Way, other: str) -> str:
    longer = percent(1 / disk.goodput - 1)
    return f"{DISK}: train.checkpoint_every = {disk.num_steps}{other}; a training takes {longer} longer than its steps"


def _spares_words(outlook: Outlook) -> str:
    failures, most = outlook.cluster.failures, f"{counted(outlook.best_spares, 'spare')} would bring most per machine"
    if failures.spares is None:
        return f"a machine always stands by; where one that fails is repaired in {failures.repair_hours:g} h, {most}"
    adds = 1 / (outlook.num_machines + failures.spares)
    return (
        f"with {counted(failures.spares, 'spare')} {percent(outlook.waiting(failures.spares))} of the time waits for a "
        f"machine that is repaired in {failures.repair_hours:g} h; one more spare is worth "
        f"{100 * outlook.next_spare:.2f} % of goodput and adds {100 * adds:.2f} % of machines; {most}"
    )


def _steps(way: Way) -> str:
    return counted(way.num_steps, "step")
