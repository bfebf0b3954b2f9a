"""Losses of routers: the numbers of one process that follows their definitions, under any plan."""

import pytest

from terrace.launch.start import LocalPool
from terrace.model.experts.balance import BalanceConfig
from tests.support.parity import Case, check, exact
from tests.support.token_layouts import dealt_out
from tests.support.toys import Rows, cluster_of

pytestmark = pytest.mark.timeout(360)

BOTH, Z = BalanceConfig(sequence=0.3, z=0.2), BalanceConfig(z=0.2)
DOCUMENTS = Rows(23, ((5, 1, 17), (23,), (4, 4, 4, 11)))


def test_losses_of_routers(pool: LocalPool) -> None:
    cluster = cluster_of(2, 2)
    spread = {"package": {"expert": 2}, "node": {"rows": 2}}
    ring, stages = {"node": {"context": {"ring": 2}}}, {"node": {"pipeline": 2}}
    rows = {"package": {"tensor": 2}}
    cases = [
        Case(exact("zero3", cluster, experts=spread), num_micros=2, model="experts in groups", balance=BOTH),
        Case(
            exact("three-level", cluster, mapping=stages, schedule="zb-h1", recompute=("block.[1-5]",)),
            num_micros=3,
            model="deep experts",
            rows=DOCUMENTS,
            balance=BOTH,
        ),
        Case(exact("zero2", cluster, mapping=ring, micro_batch=2), model="wide mixture", rows=Rows(7), balance=Z),
        *(
            Case(
                exact("zero3", cluster, mapping=rows, experts={"node": {"expert": 2}}, sequence_parallel=splits),
                model="wide experts",
                rows=DOCUMENTS,
                balance=Z,
            )
            for splits in (True, False)
        ),
        Case(
            exact("zero3", cluster, balance="cost"),
            model="wide mixture, window",
            rows=DOCUMENTS,
            batches=dealt_out,
            balance=Z,
        ),
    ]
    check(pool, cluster, cases)
