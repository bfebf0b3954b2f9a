"""Why `terrace plan` found nothing, in one line with the fix."""

from collections.abc import Sequence

from terrace.base.words import counted
from terrace.cli.remedy import freer_words
from terrace.cluster.cluster import Cluster
from terrace.model.facts import layers_of
from terrace.plan.plan import AXES
from terrace.planner.search import Found
from terrace.planner.space import Space, divisors
from terrace.planner.task import MOST_SEQUENCES, Task
from terrace.planner.unsatisfied import unsatisfied
from terrace.planner.verdicts import lack
from terrace.report.plans import plan_words


def nothing_words(space: Space, found: Found, pinned: Sequence[str], limit: int) -> str:
    """The error where a search found no plan that fits; `pinned` are the pins as they were written, `limit` that of
    the search.
    """
    task, axes = space.task, space.axes
    # The search is of one island, the user's options are of all.
    batch, ranks = task.whole_batch, _whole_cluster(task).world_size
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
    more, of = "", "" if task.islands is None else " of an island"
    if not found.proved:
        more += f"; the search stopped at --limit {limit}: with a larger one it may find a plan that fits"
    return (
        f"no plan fits; the nearest{of} ({plan_words(task, nearest.candidate)}) {lack(task, nearest)}; "
        f"{freer_words(space, pinned, limit)}; a shorter --sequence needs less{more}"
    )


def _no_shape(space: Space, pinned: Sequence[str]) -> str:
    task, axes = space.task, space.axes
    batch, islands = counted(task.whole_batch, "sequence"), ""
    if task.islands is not None:
        islands = counted(task.whole_batch // task.batch, "island")
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


def _whole_cluster(task: Task) -> Cluster:
    return task.cluster if task.islands is None else task.islands.cluster


def _sizes_that_divide(task: Task) -> str:
    cluster = _whole_cluster(task)
    size = cluster.tiers[-1].size
    inner = cluster.world_size // size
    # With that many ranks each gets a whole number of sequences.
    fitting = divisors(task.whole_batch // inner) if task.whole_batch % inner == 0 else ()
    least = 1 if task.islands is None else 2  # one member would be no islands
    below, above = ([each for each in fitting if least <= each < size], [each for each in fitting if each > size])
    near = [*below[-1:], *above[:1]]
    return f"--nodes {' or '.join(str(each) for each in near)}, " if near else ""


def axes_words(names: Sequence[str]) -> str:
    """`data axis`, `data, tensor axes`."""
    return f"{', '.join(names)} {'axis' if len(names) == 1 else 'axes'}"
