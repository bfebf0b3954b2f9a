"""Process groups that a call of a pool makes end with it: gloo threads of a kept group wake up 100 times a second."""

import sys
from datetime import timedelta
from pathlib import Path

import pytest

from terrace.comm.process_group import new_group
from terrace.launch.start import LocalPool
from terrace.launch.world import World

LIMIT = timedelta(seconds=60)


def makes_groups(world: World) -> int:
    """Make groups as an engine does: an object holds them and refers to itself."""
    holder: dict[str, object] = {"groups": [new_group(None, LIMIT) for _ in range(3)]}
    holder["itself"] = holder
    return num_threads(world)


def num_threads(world: World) -> int:
    """All threads of this process: those of gloo have names of their own in some versions of torch only."""
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
def test_threads_of_groups_end_with_their_call(pool: LocalPool) -> None:
    before = pool.run(2, num_threads, timeout_s=60.0)
    during = pool.run(2, makes_groups, timeout_s=60.0)
    after = pool.run(2, num_threads, timeout_s=60.0)
    assert all(many > few + 3 for few, many in zip(before, during, strict=True))
    assert all(late <= early for early, late in zip(before, after, strict=True))
