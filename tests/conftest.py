"""What holds for the whole suite.

Property tests draw the same examples in every run, so that a change is judged by what it changes.
`pytest --hypothesis-profile=explore` draws new ones. They have no deadline of their own: on a busy machine any would
be missed now and then.

`make test` runs two files at a time: half of the suite starts ranks and mostly waits for them, the other half computes
in one process. Files stay whole, since their tests share what they set up; those with the most tests go first, which
compute beside the ranks of the others.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from terrace.launch.start import LocalPool

settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("explore", derandomize=False, deadline=None)
settings.load_profile("fixed")


@pytest.fixture(scope="session")
def pool() -> "Iterator[LocalPool]":
    """Eight processes (for each worker of pytest) that stay for all tests; those of a call that fails are replaced."""
    from terrace.launch.start import LocalPool, _start_forkserver

    _start_forkserver("tests.support.warm")  # one server for these and for the commands that tests run
    with LocalPool(8) as pool:
        yield pool
