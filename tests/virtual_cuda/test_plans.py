"""Plans on the virtual device: the bits of the CPU, and no fault."""

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

import pytest

from terrace.launch.start import LocalPool
from tests.support.nightly import nightly
from tests.virtual_cuda.plans import NIGHTLY, ROOMS, Planned, saved
from tests.virtual_cuda.rank import check, check_resumed

pytestmark = pytest.mark.timeout(360)


@pytest.mark.parametrize("room", [*ROOMS, *nightly(*NIGHTLY)])
def test_plans_have_the_bits_of_the_cpu(pool: LocalPool, room: str) -> None:
    each_has_the_bits_of_the_cpu(pool, (planned for planned in (ROOMS | NIGHTLY)[room]() if not planned.by_night))


@pytest.mark.nightly
def test_the_other_plans_have_the_bits_of_the_cpu(pool: LocalPool) -> None:
    each_has_the_bits_of_the_cpu(pool, (planned for room in ROOMS.values() for planned in room() if planned.by_night))


def each_has_the_bits_of_the_cpu(pool: LocalPool, plans: Iterable[Planned]) -> None:
    for _, found in groupby(sorted(plans, key=_sizes), _sizes):
        check(pool, list(found))


def test_there_are_a_hundred_plans() -> None:
    assert sum(len(list(room())) for room in ROOMS.values()) >= 100


# A plan for each use of an event: lanes, messages of stages, exchanges that are late.
EVENTS = (("placements", 0), ("pipelines", 2), ("islands", 2), *nightly(("wires", 3)))


@pytest.mark.parametrize(("room", "index"), EVENTS)
def test_an_event_that_is_over_at_once_changes_nothing(pool: LocalPool, room: str, index: int) -> None:
    check(pool, [list(ROOMS[room]())[index]], completes="early")


@pytest.mark.parametrize("by_night", [False, *nightly(True)])
def test_checkpoints_are_the_cpus(pool: LocalPool, tmp_path: Path, by_night: bool) -> None:
    check_resumed(pool, [planned for planned in saved() if planned.by_night == by_night], tmp_path)


def _sizes(planned: Planned) -> tuple[int, ...]:
    return planned.sizes
