"""Packed messages: the bits of a run whose messages are bf16, for every class that takes the format, whether messages
fit or not; their bytes.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from terrace.base.errors import PlanError
from terrace.cluster.cluster import Cluster
from terrace.launch.start import LocalPool
from terrace.plan.plan import Plan
from terrace.plan.validate import validate
from tests.support.nightly import nightly
from tests.support.parity import Case, exact, run
from tests.support.pipelines import Place, pipelined
from tests.support.toys import Rows, cluster_of

pytestmark = pytest.mark.timeout(360)

TWO, FOUR = cluster_of(2, 2), cluster_of(4)
CONTEXT = {"package": {"context": {"ulysses": 2}}, "node": {"context": {"ring": 2}}}
V_SHAPED = pipelined("ddp", Place((2, 2), {"node": {"pipeline": 2}}, 2), "zbv", stages=(2, 2, 2, 2))


def case_of(cluster: Cluster, plan: Plan, *classes: str, **more: Any) -> Case:
    """A case whose classes are packed on all tiers of a cluster."""
    tiers = [tier.name for tier in cluster.tiers if tier.size > 1]
    wire = {message: dict.fromkeys(tiers, "packed") for message in classes}
    return Case(replace(plan, wire=wire), **more)


PARAMS = case_of(TWO, exact("zero3", TWO), "gather", "gather_backward", num_micros=2)
REFRESH = case_of(TWO, exact("zero1", TWO), "refresh")
# Of four members, the order of a sum shows.
TENSOR = case_of(FOUR, exact("ddp", FOUR, mapping={"package": {"tensor": 4}}), "tensor", model="llama tied")
STAGES = Case(
    replace(V_SHAPED, wire={each: {"node": "packed"} for each in ("pipeline", "pipeline_backward")}),
    num_micros=4,
    model="deep llama tied",
)
ATTENTION = case_of(
    TWO, exact("zero2", TWO, mapping=CONTEXT), "context", model="llama tied", rows=Rows(sequence=8), num_micros=2
)
CASES = {
    "parameters": (TWO, PARAMS),
    "refresh": (TWO, REFRESH),
    "tensor": (FOUR, TENSOR),
    "stages": (TWO, STAGES),
    "context": (TWO, ATTENTION),
}


def in_bf16(case: Case) -> Case:
    wire = {message: dict.fromkeys(row, "bf16") for message, row in case.plan.wire.items()}
    return replace(case, plan=replace(case.plan, wire=wire))


@pytest.mark.parametrize(
    ("name", "sabotages"),
    [
        *((name, ("some_do_not_fit",)) for name in ("refresh", "stages")),
        *nightly(
            *((name, ("some_do_not_fit",)) for name in ("tensor", "context")),
            *((name, ("", "never_fits")) for name in CASES),
        ),
    ],
)
def test_bits_are_those_of_bf16_whether_messages_fit_or_not(
    pool: LocalPool, name: str, sabotages: tuple[str, ...]
) -> None:
    cluster, case = CASES[name]
    plain, *others = run(pool, cluster, [in_bf16(case), *(replace(case, sabotage=each) for each in sabotages)])
    for outcomes in others:
        for outcome, expected in zip(outcomes, plain, strict=True):
            assert not outcome.complaint, outcome.complaint
            assert outcome.losses == expected.losses
            assert outcome.norms == expected.norms
            assert torch.equal(outcome.parameters, expected.parameters)


@pytest.mark.parametrize("name", ["refresh", *nightly(*(name for name in CASES if name != "refresh"))])
def test_a_flipped_bit_shows(pool: LocalPool, name: str) -> None:
    cluster, case = CASES[name]
    plain, flipped = run(pool, cluster, [in_bf16(case), replace(case, sabotage="flipped_bit")])
    assert flipped[0].losses != plain[0].losses


@pytest.mark.parametrize(
    ("message", "carries"),
    [
        ("reduce", "sums or changes"),
        ("sync", "sums or changes"),
        ("dispatch", "rows that are sent batch by batch"),
    ],
)
def test_classes_that_are_not_packed_are_refused(message: str, carries: str) -> None:
    plan = replace(exact("zero3", TWO), wire={message: {"node": "packed"}})
    with pytest.raises(PlanError, match=f"wire.{message}.node = 'packed': a packed format is for.*{carries}"):
        validate(TWO, plan, [])
