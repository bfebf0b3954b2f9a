"""Two engines on the same ranks, such as colocated roles: their messages travel in the same process groups."""

import time

import pytest

from terrace.cluster.cluster import Cluster
from terrace.comm.lane import DONE, Ticket
from terrace.launch.start import LocalPool, World
from terrace.program.instruction import Op
from terrace.runtime.engine import Engine
from terrace.runtime.messages import Pending, Work
from tests.support.parity import Case, data_rows, engine_of, exact
from tests.support.toys import cluster_of

pytestmark = pytest.mark.timeout(120)
Results = list[tuple[float, float]]


def refreshes_late(engine: Engine) -> None:
    """Let every REFRESH of this rank begin later than those of others."""
    messages = engine.runner.messages
    submit = messages.submit

    def late(work: Work, after: Ticket = DONE) -> Pending:
        def waits() -> None:
            time.sleep(0.1)
            work()

        return submit(waits if messages.now.op is Op.REFRESH else work, after)

    vars(messages)["submit"] = late


def by_turns(world: World, cluster: Cluster, case: Case) -> list[Results]:
    """Losses and gradient norms of two engines, the second with half the learning rate, that step by turns."""
    engines = [engine_of(world, cluster, case) for _ in range(2)]
    if world.rank == 0:
        refreshes_late(engines[0])
    found: list[Results] = [[], []]
    for step in range(case.num_steps):
        for number, engine in enumerate(engines):
            result = engine.step(data_rows(engine, case, step), 1e-2 / (1 + number))
            found[number].append((result.loss, result.grad_norm))
    for engine in engines:
        engine.check_bytes()
        engine.close()
    return found


def alone(world: World, cluster: Cluster, case: Case) -> list[Results]:
    """The same, one engine after the other."""
    found = []
    for number in range(2):
        engine = engine_of(world, cluster, case)
        results = [engine.step(data_rows(engine, case, step), 1e-2 / (1 + number)) for step in range(case.num_steps)]
        found.append([(result.loss, result.grad_norm) for result in results])
        engine.close()
    return found


def test_an_engine_waits_for_the_messages_of_the_one_before(pool: LocalPool) -> None:
    cluster = cluster_of(2)
    case = Case(exact("zero2", cluster), num_steps=3)
    wanted = pool.run(2, alone, cluster, case, timeout_s=60.0)
    assert pool.run(2, by_turns, cluster, case, timeout_s=60.0) == wanted
    assert wanted[0][0] != wanted[0][1]
