"""`pytest --workers 3`: tests are collected once, and processes forked from that one run them, a file at a time.

Collecting takes as long as some hundred tests, since all test files, torch, transformers and ray are imported. Workers
that each collected for themselves, and fork servers and ranks that imported the same again, would do so 30 times.
The tests of a file stay together, in their order, since they share what they set up. Eight ranks that exchange small
messages wait more than they compute, so all workers but the last take files that use the pool of eight ranks first, and
the last one the others.
"""

import os
import warnings
from collections import deque
from dataclasses import dataclass
from itertools import groupby
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from typing import Any

import pytest

from terrace.launch.fork_server import start_fork_server

_ENDS_S = 20.0  # that a worker may take to end its pool
Unit = tuple[int, ...]  # the numbers of a file's tests


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--workers`."""
    parser.addoption("--workers", type=int, default=0, help="run files in as many processes, forked after collection")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Deals the files out to the workers, if any are wanted, and reports what they say."""
    number = session.config.getoption("workers")
    if number < 1 or session.config.option.collectonly or session.testsfailed:
        return None
    dealer = Dealer(session)
    try:
        dealer.run(number)
    finally:
        dealer.end()
    return True


@dataclass
class _Worker:
    """A forked process, whether it takes files with ranks first, and the tests that it has yet to finish."""

    process: ForkProcess
    link: Any
    ranks_first: bool
    todo: Unit = ()


class Dealer:
    """Gives files to the workers that ask for them."""

    def __init__(self, session: pytest.Session) -> None:
        self.session, self.hooks = session, session.config.hook
        by_file = groupby(range(len(session.items)), key=lambda number: session.items[number].path)
        self.units = deque(tuple(numbers) for _, numbers in by_file)
        self.workers: list[_Worker] = []

    def run(self, number: int) -> None:
        """Run all tests; raises as pytest's own loop does when it is to stop."""
        reporter = self.session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.showfspath = False  # several files at a time
        for index in range(number):
            self.start(ranks_first=index + 1 < number)
        while self.workers:
            for link in wait([worker.link for worker in self.workers]):
                self.hear(next(worker for worker in self.workers if worker.link is link))
            if self.session.shouldfail:
                raise self.session.Failed(self.session.shouldfail)
            if self.session.shouldstop:
                raise self.session.Interrupted(self.session.shouldstop)

    def end(self) -> None:
        """End the workers that are left, also those in which a test has blocked signals."""
        for worker in self.workers:
            worker.link.close()
            worker.process.terminate()
        for worker in self.workers:
            worker.process.join(_ENDS_S)
            worker.process.kill()

    def start(self, ranks_first: bool) -> None:
        """Fork a worker."""
        here, there = get_context("fork").Pipe()
        ours = [here, *(worker.link for worker in self.workers)]
        process = get_context("fork").Process(target=_work, args=(self.session, there, ours))
        process.start()
        there.close()
        self.workers.append(_Worker(process, here, ranks_first))

    def next_unit(self, ranks_first: bool) -> Unit:
        """Take a file out of the queue, none if it is empty."""
        if not self.units:
            return ()
        wanted = next((unit for unit in self.units if self.has_ranks(unit) == ranks_first), self.units[0])
        self.units.remove(wanted)
        return wanted

    def has_ranks(self, unit: Unit) -> bool:
        """Whether some test of a file uses the pool."""
        return any("pool" in getattr(self.session.items[number], "fixturenames", ()) for number in unit)

    def hear(self, worker: _Worker) -> None:
        """Take what a worker says: that it wants a file, how a test went, or by its silence that it is no more."""
        try:
            kind, said = worker.link.recv()
        except EOFError:
            return self.lose(worker)
        if kind == "wants":
            unit = self.next_unit(worker.ranks_first)
            worker.todo += unit
            worker.link.send(unit)
        elif kind == "runs":
            worker.todo = worker.todo[worker.todo.index(said) :]
        elif kind == "ends":
            worker.todo = ()
        elif kind == "passed":
            item = self.session.items[worker.todo[0]]
            for when, times in said:
                self.report(pytest.TestReport(item.nodeid, item.location, {}, "passed", None, when, **times))
        elif kind == "report":
            self.report(self.hooks.pytest_report_from_serializable(config=self.session.config, data=said))
        elif kind == "warning":
            self.hooks.pytest_warning_recorded.call_historic(kwargs=said)
        return None

    def report(self, report: pytest.TestReport) -> None:
        """Tell pytest how a phase of a test went."""
        self.hooks.pytest_runtest_logreport(report=report)
        if report.when == "teardown":
            self.hooks.pytest_runtest_logfinish(nodeid=report.nodeid, location=report.location)

    def lose(self, worker: _Worker) -> None:
        """A worker has ended: in order, or in the middle of a test, which has failed; another takes up the rest."""
        self.workers.remove(worker)
        worker.link.close()
        worker.process.join()
        if not worker.todo:
            if worker.process.exitcode:
                self.session.shouldfail = f"a worker ended with exit code {worker.process.exitcode}"
            return
        item, rest = self.session.items[worker.todo[0]], worker.todo[1:]
        end = f"the worker ended with exit code {worker.process.exitcode} during this test"
        for when, outcome in (("call", "failed"), ("teardown", "passed")):
            self.report(pytest.TestReport(item.nodeid, item.location, {}, outcome, end, when))  # type: ignore[arg-type]
        if rest:
            self.units.appendleft(rest)
        self.start(worker.ranks_first)


class _Teller:
    """The plugin of a worker that passes on what its own session learns.

    Phases that passed and printed nothing are told at the end of their test, by their times alone: thirty thousand
    whole reports took twice as long as all that pytest itself does around a test.
    """

    def __init__(self, config: pytest.Config, link: Any) -> None:
        self.config, self.link = config, link
        self.passed: list[tuple[str, dict[str, float]]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        quiet = report.passed and not report.sections and not report.user_properties
        if quiet:
            times = {"duration": report.duration, "start": report.start, "stop": report.stop}
            self.passed.append((report.when, times))
        if self.passed and (not quiet or report.when == "teardown"):
            self.link.send(("passed", self.passed))
            self.passed = []
        if not quiet:
            data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
            self.link.send(("report", data))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: object
    ) -> None:
        kind, text = warning_message.category, str(warning_message.message)
        message = warnings.WarningMessage(text, kind, warning_message.filename, warning_message.lineno)
        said = {"warning_message": message, "when": when, "nodeid": nodeid, "location": location}
        self.link.send(("warning", said))


def _work(session: pytest.Session, link: Any, others: list[Any]) -> None:
    """Run files until there are none, in a process of its own."""
    for other in others:
        other.close()
    _begin(session.config, link)

    def next_unit() -> Unit:
        link.send(("wants", None))
        unit: Unit = link.recv()
        return unit

    try:
        unit = next_unit()
        while unit and not session.shouldfail and not session.shouldstop:
            following: Unit = ()
            for place, number in enumerate(unit):
                last = place + 1 == len(unit)
                if last:  # fixtures that the next file needs as well stay
                    following = next_unit()
                link.send(("runs", number))
                after = (following or (None,))[0] if last else unit[place + 1]
                item, next_item = session.items[number], None if after is None else session.items[after]
                session.config.hook.pytest_runtest_protocol(item=item, nextitem=next_item)
            unit = following
        link.send(("ends", None))
    finally:
        session._setupstate.teardown_exact(None)


def _begin(config: pytest.Config, link: Any) -> None:
    """Make this process a worker: with captured output of its own, silent, and with a fork server forked from it."""
    from tests.support.warm import fork_servers

    manager = config.pluginmanager
    capture: Any = manager.get_plugin("capturemanager")
    if capture is not None:  # its files are the parent's
        capture.stop_global_capturing()
        capture.start_global_capturing()
    reporter: Any = manager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter._tw._file = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # stays
    manager.register(_Teller(config, link))
    fork_servers()
    start_fork_server("tests.support.warm")
