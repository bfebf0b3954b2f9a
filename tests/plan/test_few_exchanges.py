"""The notice of runs with too few exchanges for an outer momentum or a sparse format."""

from dataclasses import replace

import pytest

from terrace.plan.few_exchanges import few_exchanges
from terrace.plan.outer import Outer
from terrace.plan.plan import Plan
from terrace.plan.presets import preset
from tests.support.toys import cluster_of

CLUSTER = cluster_of(2, 2)


def islands(**changes: object) -> Plan:
    return replace(preset("ddp", CLUSTER), outer=Outer(tier="node", every=50, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("steps", [4950, 4951])
def test_a_momentum_wants_ten_times_what_it_remembers(steps: int) -> None:
    said = few_exchanges(CLUSTER, islands(momentum=0.9), steps)
    if steps == 4951:  # the last exchange is at the end of the run
        assert said == ""
    else:
        assert said.startswith(f"few exchanges in {steps} steps (one exchange every 50): outer.momentum = 0.9 ")
        assert "remembers 10 exchanges of a block, and the run has 99. " in said


def test_an_average_remembers_nothing() -> None:
    assert few_exchanges(CLUSTER, islands(optimizer="average"), 1) == ""
    assert few_exchanges(CLUSTER, preset("ddp", CLUSTER), 1) == ""


def test_a_sparse_format_wants_ten_times_one_over_its_density() -> None:
    plan = replace(islands(optimizer="average"), wire={"outer": {"node": "topk:64+feedback"}})
    assert few_exchanges(CLUSTER, plan, 50 * 640) == ""
    said = few_exchanges(CLUSTER, plan, 50 * 639)
    assert "wire.outer = 'topk:64+feedback' sends an element every 64 messages in the mean, and the run has 639" in said
    every_step = replace(preset("ddp", CLUSTER), wire={"sync": {"node": "topk+feedback"}})
    assert few_exchanges(CLUSTER, every_step, 320) == ""
    assert "and the run has 319 of a block" in few_exchanges(CLUSTER, every_step, 319)
    # A tier without peers sends nothing.
    assert few_exchanges(cluster_of(2, 1), every_step, 319) == ""
