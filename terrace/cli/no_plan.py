"""Why no plan fits or none is found, in one line, and what would: another plan, fewer pins, or more nodes."""

from collections.abc import Sequence
from dataclasses import replace

from terrace.base.words import counted, seconds
from terrace.cli.output import on_a_terminal
from terrace.cli.task import software_words
from terrace.model.facts import layers_of
from terrace.plan.as_software import axes_of
from terrace.plan.plan import AXES
from terrace.planner.divisions import divisors
from terrace.planner.least_nodes import MAX_GROWTH, least_nodes
from terrace.planner.patience import OutOfTimeError, Patience
from terrace.planner.pins import Pins
from terrace.planner.search import Found, find
from terrace.planner.space import Space
from terrace.planner.task import MOST_SEQUENCES, Task
from terrace.planner.unsatisfied import unsatisfied
from terrace.planner.verdicts import lack
from terrace.report.plans import plan_words

# A guess at how long a user waits for the advice in an error. With all axes, one cluster size takes a second or two, so
# about ten sizes are searched.
LONGEST_S = 30.0


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
        f"{_freer_words(space, pinned, limit)}; a shorter --sequence needs less{more}"
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
    over += software_words(task.cluster)
    words = f"no plan with the {axes_words(axes)} satisfies {' and '.join(pinned)} with {batch}{over}"
    for name in AXES:
        # A pin on an axis that is not searched contradicts --axes; say so instead of blaming the batch.
        if name not in axes and space.pins.ranges.get(name, (1, 1))[0] > 1:
            return f"{words}: the {name} axis is pinned above 1 but not searched; add --axes {','.join(axes)},{name}"
    words += f": {unsatisfied(space) or 'drop a pin'}"
    return words if set(axes) >= {*_every_axis(task)} else f"{words}, or search more axes, as with --axes all"


def _every_axis(task: Task) -> tuple[str, ...]:
    return axes_of(task.cluster.device.software, AXES)


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


def fitting_words(task: Task, limit: int, plan_command: str = "") -> str:
    """The fastest plan that fits, in words, or else the fewest nodes. At most `limit` plans are simulated.

    `plan_command` is the command that writes such a plan.
    """
    space, patience = Space(task=task), _patience("the plan does not fit; looking for one that does")
    try:
        best = find(space, 1, limit, patience=patience)[0].best
    except OutOfTimeError:
        return f"whether another plan fits was not found out in {LONGEST_S:g} s of processor time: ask terrace plan"
    if not best:
        return f"no plan fits here; {nodes_words(space, limit, patience)}"
    written = f"; to have it written: {plan_command}" if plan_command else ""
    words = plan_words(task, best[0].candidate)
    return f"the fastest plan that fits takes {seconds(best[0].step_s)} a step: {words}{written}"


def _freer_words(space: Space, pinned: Sequence[str], limit: int) -> str:
    """Which pins of a failed search to drop so that some plan fits, or else the fewest nodes.

    `pinned` are the pins as the user wrote them.
    """
    task = space.task
    pins, axes = f"without {' and '.join(pinned)}", "with --axes all"
    freer = {pins: replace(space, pins=Pins())} if pinned else {}
    if not {*space.axes} >= {*_every_axis(task)}:
        freer[axes] = replace(space, axes=AXES)
        if pinned:
            freer[f"{pins} and {axes}"] = Space(task=task)
    patience, unknown = _patience(""), ""
    for words, each in freer.items():
        patience.words = f"no plan fits; looking for one {words}"
        try:
            best = find(each, 1, limit, patience=patience)[0].best
        except OutOfTimeError:
            unknown = f"whether one fits {words} was not found out in {LONGEST_S:g} s of processor time; "
            break
        if best:
            return f"{words} one fits: {plan_words(task, best[0].candidate)}"
    if task.islands.num > 1:  # further islands do not change the memory of one
        more = "make islands larger, with more members on the tiers inside"
        return f"{unknown}{more}" if unknown else f"no plan of an island does: {more}"
    return f"{unknown}{nodes_words(space, limit, patience)}"


def _patience(words: str) -> Patience:
    return Patience(limit_s=LONGEST_S, tell=on_a_terminal(), words=words)


def nodes_words(space: Space, limit: int, patience: Patience | None = None) -> str:
    """The smallest outermost tier with which some plan of the space fits, in words."""
    patience = _patience("") if patience is None else patience
    task, larger = space.task, least_nodes(space, limit=limit, patience=patience)
    if larger.estimate is None and not larger.out_of_time and tuple(space.axes) == ("data",):
        larger = least_nodes(space, limit=limit, grow_batch=True, patience=patience)
    stopped = f"--nodes {larger.at_least}, where the search stopped after {counted(limit, 'plan')}"
    if larger.task is not None and larger.estimate is not None:
        size, batch = larger.task.cluster.tiers[-1].size, larger.task.batch
        options = f"--nodes {size}{'' if batch == task.batch else f' --batch {batch}'}"
        words = plan_words(larger.task, larger.estimate.candidate)
        if larger.at_least == size:
            return f"{options}, the fewest with which one fits, has room for: {words}"
        return f"{options} has room for: {words}; fewer may do, from {stopped}"
    is_open = larger.at_least <= larger.last
    if larger.out_of_time:
        known = stopped if is_open else f"--nodes {larger.at_least}, not searched further in {LONGEST_S:g} s"
        return f"it takes at least {known}: try more, or fewer --axes"
    outermost = task.cluster.tiers[-1]
    looked_at_all = larger.last == MAX_GROWTH * outermost.size
    most = f"{MAX_GROWTH} times as many" if looked_at_all else f"{larger.last}"
    found_open = f", although one may fit from {stopped}" if is_open else ""
    return f"nor {'was one found ' if is_open else ''}with up to {most} members of {outermost.name!r}{found_open}"
