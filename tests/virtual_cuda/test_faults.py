"""Faults of the code for GPUs: put in one at a time, each is noticed by the right message."""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from terrace.launch.start import LocalPool, World
from tests.support.nightly import nightly
from tests.support.toys import cluster_of
from tests.virtual_cuda.faults import DAMAGES, PLANS, damaged
from tests.virtual_cuda.findings import Kind
from tests.virtual_cuda.rank import Rehearsed, numbers, resumed, run
from tests.virtual_cuda.rules import faults_of

pytestmark = pytest.mark.timeout(360)

LIMIT_S = 4.0  # of a message that never comes
ENDS_A_RUN = {Kind.ORDER, Kind.STUCK}  # ranks wait for each other, so a fault has its world to itself
EVERY_DAY = [name for index, name in enumerate(DAMAGES) if index % 6 == 0]
TOGETHER = [name for name in DAMAGES if DAMAGES[name].noticed not in ENDS_A_RUN]


def rehearse(world: World, names: Sequence[str], folder: Path) -> list[Rehearsed]:
    """Run the plan of each fault on this rank, with the fault; of no fault for a plan's own name."""
    found = []
    for name in names:
        damage = DAMAGES.get(name)
        planned = PLANS[damage.plan if damage is not None else name]
        with ExitStack() as stack:
            if damage is not None:
                stack.enter_context(damaged(damage))
            limit_s = LIMIT_S if damage is not None and damage.noticed in ENDS_A_RUN else 60.0
            work = partial(resumed, folder=folder / name) if planned is PLANS["saved"] else numbers
            found.append(run(world, cluster_of(*planned.sizes), planned.case, None, "late", limit_s, work))
    return found


def rehearsed_by_rank(pool: LocalPool, names: Sequence[str], folder: Path) -> Iterator[tuple[str, Sequence[Rehearsed]]]:
    """What the ranks of each fault have found, those on as many ranks in one call."""
    sizes = {name: math.prod(PLANS[DAMAGES[name].plan if name in DAMAGES else name].sizes) for name in names}
    for size in sorted({*sizes.values()}):
        some = [name for name in names if sizes[name] == size]
        yield from zip(some, zip(*pool.run(size, rehearse, some, folder, timeout_s=300.0), strict=True), strict=True)


def check(pool: LocalPool, names: Sequence[str], folder: Path) -> None:
    """Each fault is reported, by a message that names the line of the fault where there is one."""
    missed = {}
    for name, outcomes in rehearsed_by_rank(pool, names, folder):
        wanted = DAMAGES[name].noticed
        words = [fault for each in outcomes for fault in each.faults]
        words += [str(fault) for fault in faults_of([each.log for each in outcomes])]
        if isinstance(wanted, Kind):
            seen = any(each.startswith(wanted.value) for each in words)
        else:
            reason, _, function = wanted.partition(": ")
            waits = [place for each in outcomes for why, place in each.waits if why == reason]
            seen = any(place.split(" < ")[0].endswith(f" {function}") for place in waits)
        if not seen:
            missed[name] = (words[:3], [each.error[-600:] for each in outcomes], outcomes[0].waits)
    assert not missed, missed


def test_there_are_forty_faults() -> None:
    assert len(DAMAGES) >= 40


@pytest.mark.nightly
def test_plans_of_the_faults_have_none_themselves(pool: LocalPool, tmp_path: Path) -> None:
    for name, outcomes in rehearsed_by_rank(pool, [*PLANS], tmp_path):
        assert not [each.error for each in outcomes if each.error], (name, outcomes[0].error)
        assert not [each.faults for each in outcomes if each.faults], (name, outcomes[0].faults)
        assert not faults_of([each.log for each in outcomes]), name


@pytest.mark.parametrize("part", ["every day", *nightly("the rest")])
def test_a_fault_is_noticed(pool: LocalPool, part: str, tmp_path: Path) -> None:
    check(pool, [name for name in TOGETHER if (name in EVERY_DAY) == (part == "every day")], tmp_path)


@pytest.mark.parametrize("name", [name for name in DAMAGES if name not in TOGETHER])
def test_a_fault_that_ends_a_run_is_noticed(pool: LocalPool, name: str, tmp_path: Path) -> None:
    check(pool, [name], tmp_path)
