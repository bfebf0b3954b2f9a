"""Parameters handed over where gathers round them: what generates has the bits that forwards compute with."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from terrace.base.errors import PlanError
from terrace.cluster.cluster import Cluster
from terrace.launch.start import LocalPool, World
from terrace.plan.plan import Plan
from terrace.plan.wire import MessageClass
from terrace.rl.hand_over.reshard import HandOver
from tests.support.parity import ADAMW, Case, engine_of, exact, wholes
from tests.support.pipelines import OUTER, pipelined
from tests.support.toys import cluster_of

SIZES = (2, 2)
WIDE = "wide llama, 2 kv heads"
ROWS = {"package": {"tensor": 2}}


def rounding(plan: Plan, formats: Sequence[str]) -> Plan:
    """A plan in fp32 that sends bf16, and gathers parameters in `formats`, one a tier from the innermost on."""
    row = {tier: each for tier, each in zip(("package", "node"), formats, strict=False) if each}
    return replace(plan, compute="fp32", master="fp32", messages="bf16", wire={"gather": row} if row else {})


def preset(name: str, **changes: Any) -> Plan:
    return exact(name, cluster_of(*SIZES), **changes)


CASES = {
    "zero1, refreshed in bf16": Case(rounding(preset("zero1"), ()), model=WIDE),
    "zero3, bf16": Case(rounding(preset("zero3"), ()), model=WIDE),
    "zero3, int8": Case(rounding(preset("zero3"), ("int8", "int8")), model=WIDE),
    "zero3, fp8 on the outer tier": Case(rounding(preset("zero3"), ("", "fp8")), model=WIDE),
    # In blocks across the parts of two ranks.
    "zero3, int8 on the inner tier": Case(rounding(preset("zero3"), ("int8", "")), model=WIDE),
    "zero3, int8 in fp8": Case(rounding(preset("zero3"), ("fp8", "int8")), model=WIDE),
    "three-level, int8": Case(rounding(preset("three-level"), ("int8",)), model=WIDE),
    "rows and shards, fp8": Case(rounding(preset("zero3", mapping=ROWS), ("", "fp8")), model=WIDE),
    "stages of shards, int8": Case(
        rounding(pipelined("zero3", OUTER, "1f1b"), ("int8",)), num_micros=3, model="deep llama tied"
    ),
}


def handed_over(world: World, cluster: Cluster, case: Case, num_steps: int, lend: bool) -> tuple[list[str], bool]:
    """Slices that are not those of forwards after so many steps, and whether any parameter is not its master's."""
    engine = engine_of(world, cluster, case)
    hand_over = HandOver(engine, 1)
    for step in range(num_steps):
        hand_over.run(lend=lend)
        engine.step(case.batches(engine, case, step), ADAMW.lr)
    found = hand_over.run(lend=lend)
    found = [{name: value.clone() for name, value in slices.items()} for slices in found]
    engine.check_bytes()
    engine.state.gather(engine.comm.collectives)
    forward, wrong = wholes(engine), list[str]()
    for block, slices in enumerate(found):
        for name, (box,) in hand_over.transition.needs(block)[world.rank].items():
            wanted = forward[block][name][tuple(slice(*side) for side in box)]
            if not torch.equal(slices[name].double(), wanted):
                wrong.append(f"{block}.{name}")
    masters = [flat.optimizer.master for flat in engine.state if flat.spec.trainable]
    rounded = [master.to(torch.bfloat16).to(master.dtype) for master in masters]
    is_rounded = all(torch.equal(one, other) for one, other in zip(masters, rounded, strict=True))
    engine.close()
    return wrong, is_rounded


@pytest.mark.parametrize("name", CASES)
def test_slices_have_the_values_of_forwards(pool: LocalPool, name: str) -> None:
    """Before the first step, and after one between two hand-overs that lend; masters keep what was rounded away."""
    for num_steps, lend in ((0, False), (1, True)):
        outcomes = pool.run(4, handed_over, cluster_of(*SIZES), CASES[name], num_steps, lend, timeout_s=120.0)
        assert not [wrong for wrong, _ in outcomes if wrong], (num_steps, lend)
        assert not any(is_rounded for _, is_rounded in outcomes)


def masters_refused(world: World, cluster: Cluster, case: Case) -> str:
    engine = engine_of(world, cluster, case)
    try:
        HandOver(engine, 1, source="optimizer")
    except PlanError as error:
        return str(error)
    finally:
        engine.close()
    return ""


def test_masters_that_gathers_code_in_blocks_are_refused(pool: LocalPool) -> None:
    plan = replace(rounding(preset("zero3"), ("int8",)), messages=None)
    outcomes = pool.run(4, masters_refused, cluster_of(*SIZES), Case(plan, model=WIDE), timeout_s=120.0)
    assert all(f"{MessageClass.GATHER.value}s travel as int8 over package, in blocks" in said for said in outcomes)
