"""Why `terrace plan` found nothing, in one line with a fix."""

from collections.abc import Sequence

from terrace.base.words import counted
from terrace.cli.remedy import freer_words
from terrace.model.facts import layers_of
from terrace.plan.plan import AXES
from terrace.planner.divisions import divisors
from terrace.planner.search import Found
from terrace.planner.space import Space
from terrace.planner.task import MOST_SEQUENCES, Task
from terrace.planner.unsatisfied import unsatisfied
from terrace.planner.verdicts import lack
from terrace.report.plans import plan_words


def nothing_words(space: Space, found: Found, pinned: Sequence[str], limit: int) -> str:
    """The error for a search that found no fitting plan. `pinned` are the pins as the user wrote them, `limit` is the
    search's limit.
    """
    task, axes = space.task, space.axes
    # The search covers one island, the user's options all of them.
    batch, ranks = task.whole_batch, task.whole_cluster.world_size
    # On the data axis alone the error can name numbers that work.
    if found.nearest is None and tuple(axes) == ("data",) and batch % ranks:
        below = batch // ranks * ranks
        near = " or ".join(str(each) for each in (below, below + ranks) if 0 < each <= MOST_SEQUENCES)
        return (
            f"--batch {batch} does not divide over the {ranks} ranks of the data axis: use "
            f"{f'--batch {near}, ' if near else ''}{_sizes_that_divide(task)}or --axes all"
        )
    if found.nearest is None:
        return _no_shape(space, pinned)
    nearest = found.nearest
    more, of = "", " of an island" * (task.islands.num > 1)
    if not found.is_complete:
        more += f"; the search stopped at --limit {limit}: with a larger one it may find a plan that fits"
    return (
        f"no plan fits; the nearest{of} ({plan_words(task, nearest.candidate)}) {lack(task, nearest)}; "
        f"{freer_words(space, pinned, limit)}; a shorter --sequence needs less{more}"
    )


def _no_shape(space: Space, pinned: Sequence[str]) -> str:
    task, axes = space.task, space.axes
    batch, islands = counted(task.whole_batch, "sequence"), ""
    if task.islands.num > 1:
        islands = counted(task.islands.num, "island")
    if not pinned:
        ranks = counted(task.cluster.world_size, "rank")
        return (
            f"{batch} of {counted(task.sequence, 'token')} and "
            f"{counted(layers_of(task.model), 'layer')} do not divide over "
            f"{f'{islands} of ' if islands else ''}{ranks} by the {axes_words(axes)}: use another --batch or another "
            "--nodes"
        )
    over = f" on {islands}" if islands else ""
    words = f"no plan with the {axes_words(axes)} satisfies {' and '.join(pinned)} with {batch}{over}"
    for name in AXES:
        # A pin on an axis that is not searched contradicts --axes; say so instead of blaming the batch.
        if name not in axes and space.pins.ranges.get(name, (1, 1))[0] > 1:
            return f"{words}: the {name} axis is pinned above 1 but not searched; add --axes {','.join(axes)},{name}"
    words += f": {unsatisfied(space) or 'drop a pin'}"
    return words if set(axes) == set(AXES) else f"{words}, or search more axes, as with --axes all"


def _sizes_that_divide(task: Task) -> str:
    cluster = task.whole_cluster
    size = cluster.tiers[-1].size
    inner = cluster.world_size // size
    # With that many ranks each gets a whole number of sequences.
    fitting = divisors(task.whole_batch // inner) if task.whole_batch % inner == 0 else ()
    least = min(2, task.islands.num)  # one member would be no islands
    below, above = ([each for each in fitting if least <= each < size], [each for each in fitting if each > size])
    near = [*below[-1:], *above[:1]]
    return f"--nodes {' or '.join(str(each) for each in near)}, " if near else ""


def axes_words(names: Sequence[str]) -> str:
    """`data axis`, or `data, tensor axes`."""
    return f"{', '.join(names)} {'axis' if len(names) == 1 else 'axes'}"
