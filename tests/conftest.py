"""What holds for the whole suite.

Property tests draw the same examples in every run of the same files, nearly: Hypothesis also draws numbers that it
finds in the modules loaded so far. `pytest --hypothesis-profile=explore` draws new ones. They have no deadline of
their own: on a busy machine any would be missed now and then.

`make test` runs three files at a time (tests/support/workers.py). The rest of each grid of cases is marked `nightly`,
in its file or in tests/support/by_night.py, and a property test draws the first 25 of its examples; `make test-all`
runs everything.
"""

import atexit
import gc
import os
import signal
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import is_hypothesis_test, settings

from terrace.base.collection import keep_all
from tests.support.by_night import mark_by_night
from tests.support.workers import pytest_addoption, pytest_runtestloop  # noqa: F401  # hooks

if TYPE_CHECKING:
    from terrace.launch.start import LocalPool

settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("explore", derandomize=False, deadline=None)
settings.load_profile("fixed")
_EXAMPLES_BY_DAY = 25
_SETTINGS = "_hypothesis_internal_use_settings"  # Hypothesis has no other way to change them after the decorator

for _number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    # A suite in the background of a script, or under nohup, begins with some ignored, and its children would ignore
    # them, too: tests that send signals would wait for nothing.
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as `make test`; on small tensors threads wait for one another
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # an id of the hub, or a path that could be one, asks no network
os.environ.pop("COLUMNS", None)  # tables follow it


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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave to the night what is listed for it, before marks select tests."""
    is_part = any("::" in word for word in config.args) or config.getoption("lf", False)  # --lf: tests that failed
    mark_by_night(items, whole=not is_part)
    if config.option.markexpr == "not nightly":
        for item in items:
            if isinstance(item, pytest.Function) and is_hypothesis_test(item.obj):
                own = getattr(item.obj, _SETTINGS)
                setattr(item.obj, _SETTINGS, settings(own, max_examples=min(own.max_examples, _EXAMPLES_BY_DAY)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test that leaves another handler of SIGTERM: children that later tests fork would not end by it."""
    ended = yield
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        pytest.fail(f"{item.nodeid} left a handler of SIGTERM: install it in the process that it is for")
    return ended


# The interpreter takes down what was kept, or libraries in C++ complain of leaks; pytest, which collects garbage a few
# times as it ends, need not look through it.
atexit.register(gc.unfreeze)


@pytest.fixture(scope="session")
def pool() -> "Iterator[LocalPool]":
    """Eight processes (for each worker of pytest) that stay for all tests; those of a call that fails are replaced."""
    from terrace.launch.fork_server import start_fork_server
    from terrace.launch.start import LocalPool

    start_fork_server("tests.support.warm")  # one server for these and for the commands that tests run
    with LocalPool(8) as pool:
        yield pool
