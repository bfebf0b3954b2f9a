"""Where nothing fits, the fewest members of the outermost tier with which some plan does: as searching every size."""

import math
import re
from dataclasses import replace
from itertools import count

import pytest

from terrace.cli import no_plan
from terrace.cli.no_plan import nodes_words, nothing_words
from terrace.cli.output import on_a_terminal
from terrace.planner.least_nodes import LeastNodes, least_nodes
from terrace.planner.patience import Patience
from terrace.planner.pins import Pins
from terrace.planner.search import Search, find
from terrace.planner.space import Space
from terrace.planner.task import Task
from tests.support.exhaustive import exhaustive
from tests.support.nightly import nightly
from tests.support.planner_cases import CLUSTERS, MIXED, evaluator_of, gpt, sized, small_task
from tests.support.planning import Planning, here

__all__ = ["here"]

DEEP = gpt(24, 2304, 24)


@pytest.mark.parametrize(
    ("task", "axes"),
    [
        (small_task(CLUSTERS["dgx 2x3"], batch=6), ("data", "tensor")),
        *nightly(
            (small_task(CLUSTERS["dgx 2x3"], batch=12), ("data", "tensor", "pipeline")),
            (small_task(CLUSTERS["frontier 2x1x2"]), ("data", "context")),
        ),
        (replace(small_task(CLUSTERS["dgx 2x3"], batch=6), model=MIXED), ("data",)),
    ],
)
def test_whether_a_plan_fits_is_told_as_trying_everything_tells(task: Task, axes: tuple[str, ...]) -> None:
    space, evaluator = Space(task=task, axes=axes), evaluator_of(task)
    least = min(each.needed_bytes for each in exhaustive(space, math.inf))
    for capacity, fits in ((least, True), (least - 1, False)):
        found = Search(space, evaluator, capacity).run(count=1, limit=10**6)
        assert found.is_complete
        assert bool(found.best) == fits


@pytest.mark.parametrize(
    ("axes", "pins", "memory_bytes"),
    [
        (("data",), Pins(), 7e9),
        (("data", "tensor", "pipeline"), Pins({"pipeline": (3, 3)}), 7e9),
        *nightly(
            (("data", "tensor", "pipeline"), Pins({"recompute": (0, 0)}), 4.5e9),
            (("data", "tensor", "pipeline"), Pins(), 4e9),
        ),
    ],
)
def test_the_fewest_members_are_those_that_searching_every_size_finds(
    axes: tuple[str, ...], pins: Pins, memory_bytes: float
) -> None:
    cluster = sized("dgx-a100", 4, 1, memory_bytes=memory_bytes)
    space = Space(task=Task(model=DEEP, cluster=cluster, batch=96, sequence=512), axes=axes, pins=pins)
    found = least_nodes(space, limit=400)
    task, estimate = found.task, found.estimate
    assert task is not None
    assert estimate is not None
    size = task.cluster.tiers[-1].size
    assert size > 2
    assert (found.at_least, found.last, found.out_of_time) == (size, size - 1, False)
    assert estimate.needed_bytes <= memory_bytes
    for fewer in range(1, size):
        smaller = replace(space, task=replace(space.task, cluster=cluster.resized(fewer)))
        assert not find(smaller, count=1, limit=10**4)[0].best
    assert find(replace(space, task=task), count=1)[0].best[0].needed_bytes <= memory_bytes


def test_sizes_that_a_limit_leaves_open_are_not_ruled_out() -> None:
    """Three members are the fewest; a search that looks at nothing shows nothing of any size."""
    cluster = sized("dgx-a100", 4, 1, memory_bytes=7e9)
    space = Space(task=Task(model=DEEP, cluster=cluster, batch=96, sequence=512), axes=("data",))
    ticks = count()
    late = Patience(limit_s=6, clock=ticks.__next__)
    assert nodes_words(space, 1, late).startswith("it takes at least --nodes 2")
    assert nodes_words(space, 400).startswith("--nodes 3, the fewest with which one fits, has room for: ")
    assert nodes_words(space, 0).startswith(
        "nor was one found with up to 64 times as many members of 'system', although "
    )


def test_the_members_that_are_advised_fit_and_fewer_do_not(here: Planning) -> None:
    tight = ("--axes", "data", "--cluster.device.memory_bytes", "1.611e9", "--headroom", "0%")
    error = here.refused("plan", "--nodes", "1", *tight, batch=480)
    nodes = int(re.findall(r"--nodes (\d+), the fewest with which one fits", error)[0])
    assert nodes > 2
    assert here.say("plan", "--nodes", str(nodes), *tight, batch=480)[0] == 0
    here.refused("plan", "--nodes", str(nodes - 1), *tight, batch=480)


def test_members_that_help_nothing_are_not_advised(here: Planning) -> None:
    error = here.refused("plan", "--nodes", "1", "--cluster.device.memory_bytes", "1.5e9")
    assert "nor with up to 64 times as many members of 'system'" in error


def test_a_search_of_sizes_ends_by_the_clock_and_says_how_far_it_came() -> None:
    cluster = sized("dgx-a100", 4, 1, memory_bytes=7e9)
    space = Space(task=Task(model=DEEP, cluster=cluster, batch=96, sequence=512), axes=("data",))
    whole, ticks, told = least_nodes(space, limit=400), count(), list[str]()
    fewest = whole.at_least

    def within(limit_s: float) -> LeastNodes:
        return least_nodes(space, limit=400, patience=Patience(limit_s=limit_s, tell=told.append, clock=ticks.__next__))

    # A second a look. The longer, the further; never beyond the fewest that fit.
    found = [within(limit_s) for limit_s in (0, 3, 6, 10**9)]
    sizes = [each.at_least for each in found[:-1] if each.out_of_time]
    assert len(sizes) >= 1
    assert sizes == sorted(sizes)
    assert 1 < sizes[0] <= sizes[-1] <= fewest
    assert found[-1] == whole
    assert told[0].startswith(f"no plan fits; looking for the fewest members of system: {sizes[0]} (")


def test_the_error_of_a_search_without_time_names_what_is_known(
    here: Planning, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(no_plan, "LONGEST_S", 0.0)
    tight = ("--nodes", "1", "--cluster.device.memory_bytes", "1.611e9", "--headroom", "0%")
    error = here.refused("plan", *tight, "--axes", "data", batch=480)
    assert "whether one fits with --axes all was not found out in 0 s of processor time" in error
    least = int(re.findall(r"it takes at least --nodes (\d+), not searched further in 0 s", error)[0])
    assert least > 1


def test_progress_of_a_search_is_shown_on_a_terminal_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_terminal()("words")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    on_a_terminal()("x" * 500)
    shown = capsys.readouterr().err
    assert shown.startswith("\rxxx")
    assert len(shown) < 500


def test_a_search_that_stopped_early_does_not_say_that_nothing_fits_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    # Advice on pins and nodes takes seconds, and says nothing of it.
    monkeypatch.setattr("terrace.cli.no_plan._freer_words", lambda *_: "")
    space = Space(task=small_task(sized("dgx-a100", 4, 2, memory_bytes=1.55e9)), axes=("data",))
    found, _ = find(space)
    assert not found.best
    assert found.is_complete
    assert "--limit" not in nothing_words(space, found, [], 7)
    said = nothing_words(space, replace(found, is_complete=False), [], 7)
    assert "the search stopped at --limit 7: with a larger one it may find a plan that fits" in said
