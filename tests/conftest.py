"""What holds for the whole suite.

Property tests draw the same examples in every run of the same files, nearly: Hypothesis also draws numbers that it
finds in the modules loaded so far. `pytest --hypothesis-profile=explore` draws new ones. They have no deadline of
their own: on a busy machine any would be missed now and then.

`make test` runs three files at a time, each whole, since its tests share what they set up. Eight ranks that exchange
small messages wait more than they compute, so two files that use the pool of eight ranks run at a time, and one of the
others, as long as there are any. The rest of each grid of cases is marked `nightly`; `make test-all` runs everything.
"""

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from terrace.base.collection import keep_all

if TYPE_CHECKING:
    from terrace.launch.start import LocalPool

settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("explore", derandomize=False, deadline=None)
settings.load_profile("fixed")

for _number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    # A suite in the background of a script, or under nohup, begins with some ignored, and its children would ignore
    # them, too: tests that send signals would wait for nothing.
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as `make test`; on small tensors threads wait for one another
os.environ.pop("COLUMNS", None)  # a worker of pytest-xdist gets one of 80, and tables follow it


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep what is collected, which stays to the end, out of the garbage collector's sight.

    Looking through it as it comes would be a third of the collection. Tests that measure memory collect garbage first,
    hundreds of times, and took a second each to look through all tests and modules.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        keep_all()
        gc.enable()


def pytest_unconfigure() -> None:
    """Let the interpreter take down what was kept, or libraries in C++ complain of leaks."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def pool() -> "Iterator[LocalPool]":
    """Eight processes (for each worker of pytest) that stay for all tests; those of a call that fails are replaced."""
    from terrace.launch.fork_server import start_fork_server
    from terrace.launch.start import LocalPool

    start_fork_server("tests.support.warm")  # one server for these and for the commands that tests run
    with LocalPool(8) as pool:
        yield pool


def pytest_sessionstart(session: pytest.Session) -> None:
    """Each worker of pytest-xdist starts its fork server, and imports the test files from another place in their order.

    A test that starts ranks first would give the server less to import, and each later command would import the rest.
    All workers import all files, and the first to come to one leaves its bytecode, with rewritten assertions, to the
    others. In one order they would come at the same time, and each would compile everything.
    """
    from terrace.launch.fork_server import start_fork_server

    worker = getattr(session.config, "workerinput", None)
    if worker is None:
        return
    start_fork_server("tests.support.warm")
    gc.disable()  # see `pytest_collection`
    paths = sorted(Path(__file__).parent.rglob("test_*.py"))
    first = len(paths) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    for path in paths[first:] + paths[:first]:
        if str(path.parent) not in sys.path:  # as pytest does
            sys.path.insert(0, str(path.parent))
        with suppress(Exception, pytest.skip.Exception):  # collection tells it
            import_module(path.stem)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """As `--dist loadfile`, but that the last worker has files which do not use the pool first, the others those."""
    from xdist.scheduler import LoadFileScheduling

    @cache
    def uses_pool(path: str) -> bool:
        return "pool: LocalPool" in (config.rootpath / path).read_text(encoding="utf-8")

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
        def _assign_work_unit(self, node: Any) -> None:
            is_last = node is max(self.nodes, key=lambda each: each.gateway.id)
            wanted = next((path for path in self.workqueue if uses_pool(path) != is_last), None)
            if wanted is not None:
                self.workqueue.move_to_end(wanted, last=False)
            super()._assign_work_unit(node)

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None
