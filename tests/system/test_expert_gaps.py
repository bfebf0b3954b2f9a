"""Gradients in the gaps between messages of experts: the bits of one message, sent in the order of the program."""

import threading
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from terrace.cluster.cluster import Cluster
from terrace.launch.start import LocalPool, World
from terrace.plan.plan import Plan
from terrace.program.block_program.steps import Gap, Send
from terrace.program.instruction import COLLECTIVES, PASSES
from terrace.program.message import Message
from terrace.program.program import Program
from tests.support.nightly import nightly
from tests.support.parity import Case, check, deviation, engine_of, exact, reference, run
from tests.support.toys import cluster_of

pytestmark = pytest.mark.timeout(360)

NODE: dict[str, Any] = {"experts": {"node": {"expert": 2}}}
PACKAGE: dict[str, Any] = {"experts": {"package": {"expert": 2}}}
BOTH: dict[str, Any] = {"experts": {"package": {"rows": 2}, "node": {"expert": 2}}}
INSIDE: dict[str, Any] = {"params": "package", "grads": "package", "optimizer": "package"}
TWO = {"forward": 1, "backward": 2}
PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "reduce": ("zero3", {**NODE, "expert_gaps": (0.1, 0.5, 0.4)}),
    "sync": ("ddp", {**BOTH, "expert_gaps": (0, 0, 0.25, 0.75), "expert_chunks": TWO}),
    "sync behind its reduce": ("ddp", {**INSIDE, **PACKAGE, "expert_gaps": (0.3, 0.3, 0.4)}),
    "both": ("ddp", {**INSIDE, **BOTH, "expert_gaps": (0.2, 0.3, 0.1, 0.4), "expert_chunks": TWO}),
    "units, recomputed": (
        "three-level",
        {**NODE, "unit": 2, "prefetch": 0, "recompute": ("block.[2-4]",), "expert_gaps": (0, 0.5, 0.5)},
    ),
    "stages": ("zero3", {**PACKAGE, "mapping": {"node": {"pipeline": 2}}, "expert_gaps": (0, 0.5, 0.5)}),
    "all behind": ("zero1", {**NODE, "expert_gaps": (0, 0, 1)}),
    "rows and stages": (
        "zero2",
        {
            "experts": {"package": {"rows": 2}},
            "mapping": {"node": {"pipeline": 2}},
            "schedule": "interleaved:2",
            "unit": 2,
            "expert_gaps": (0.5, 0.1, 0.1, 0.3),
            "expert_chunks": TWO,
        },
    ),
}


def plan_of(name: str, cluster: Cluster) -> Plan:
    placement, changes = PLANS[name]
    return exact(placement, cluster, **changes)


@pytest.mark.parametrize("name", nightly(*(name for name in PLANS if name != "rows and stages")))
def test_parts_have_the_bits_of_one_message(pool: LocalPool, name: str) -> None:
    cluster = cluster_of(2, 2)
    case = Case(plan_of(name, cluster), num_micros=4, model="deep experts")
    whole = replace(case, plan=replace(case.plan, expert_gaps=()))
    in_gaps, at_once = run(pool, cluster, [case, whole])
    assert not any(outcome.complaint for outcome in in_gaps), in_gaps[0].complaint
    assert max(deviation(in_gaps, reference(cluster, case)).values()) < 1e-10
    assert all(map(torch.equal, *([each.parameters for each in outcomes] for outcomes in (in_gaps, at_once))))


@pytest.mark.parametrize("name", nightly("rows and stages"))
def test_parts_train_as_one_process(pool: LocalPool, name: str) -> None:
    cluster = cluster_of(2, 2)
    plan = plan_of(name, cluster)
    cases = [Case(plan, 4, "deep experts", lane=lane) for lane in ("thread", "lazy")]
    check(pool, cluster, cases)


def ordered(world: World, cluster: Cluster, case: Case) -> tuple[bool, dict[str, tuple[int, int]]]:
    """Whether two steps were sent in the order of the program, and measured and declared memory."""
    engine = engine_of(world, cluster, case)
    sent, add = defaultdict[int, list[tuple[str, str]]](list), engine.comm.ledger.add

    def noted(message: Any, tier: str, num_bytes: int) -> None:
        sent[threading.get_ident()].append((message.value, tier))
        add(message, tier, num_bytes)

    engine.comm.ledger.add = noted  # type: ignore[method-assign]
    for step in range(2):
        engine.step(case.batches(engine, case, step), 1e-3)
    program, peak = engine.program, engine.comm.meter.peak()
    engine.close()
    expected = [2 * messages for messages in issued(program).values()]
    held = {name: (peak[name], program.state_bytes[name]) for name in ("feedback", "buffers", "grads_full")}
    return sorted(sent.values()) == sorted(expected), held


def issued(program: Program) -> Mapping[int, list[tuple[str, str]]]:
    """Class and tier of every message on each lane, by the plain rule."""
    lanes, held = defaultdict[int, list[tuple[str, str]]](list), list[tuple[Message, ...]]()

    def send(message: Message) -> None:
        lanes[message.lane] += [(message.message_class.value, program.layout.tiers[tier]) for tier, _ in message.sends]

    for instruction in program.instructions:
        if instruction.op in COLLECTIVES:
            message = program.message(instruction)
            if instruction.in_gaps:
                held.append(message.parts)
            if message.sends:
                send(message.parts[0] if instruction.in_gaps else message)
        elif instruction.op in PASSES:
            steps = program.model.block_program(instruction.block).steps(instruction.op)
            for step in steps:
                for inside in step.messages if isinstance(step, Send) else ():
                    send(program.model.message_inside(inside, instruction.block))
                if isinstance(step, Gap):
                    for parts in held:
                        if step.number < len(parts):
                            send(parts[step.number])
            if any(isinstance(step, Gap) for step in steps):
                held.clear()
    assert not held
    return lanes


@pytest.mark.parametrize("name", ["both", *nightly("reduce")])
def test_lanes_keep_the_order_of_the_program(pool: LocalPool, name: str) -> None:
    """A REDUCE and a SYNC in gaps, on two lanes, between dispatches and combines; gathers in between overtake them."""
    cluster = cluster_of(2, 2)
    case = Case(plan_of(name, cluster), num_micros=2, model="deep experts")
    for in_order, held in pool.run(4, ordered, cluster, case, timeout_s=60.0):
        assert in_order
        assert all(measured == declared for measured, declared in held.values()), held


@pytest.mark.nightly
def test_parts_in_a_format_with_feedback(pool: LocalPool) -> None:
    """Bytes and residuals add up to those of one message; replicas keep the same values."""
    cluster = cluster_of(2, 2)
    wire = {"reduce": {"package": "int8:16"}, "sync": {"node": "int8:16+feedback"}}
    plan = replace(plan_of("both", cluster), wire=wire, experts={"node": {"expert": 2}}, expert_gaps=(0, 0.4, 0.1, 0.5))
    case = Case(plan, num_micros=2, model="deep experts")
    cases = [case, replace(case, plan=replace(plan, expert_gaps=()))]
    for outcomes in run(pool, cluster, cases):
        assert not any(outcome.complaint for outcome in outcomes), outcomes[0].complaint
        found = deviation(outcomes, reference(cluster, case))
        assert 0 < found["loss"] < 0.02
    (_, held), *_ = pool.run(4, ordered, cluster, case, timeout_s=60.0)
    (_, whole), *_ = pool.run(4, ordered, cluster, cases[1], timeout_s=60.0)
    assert held["feedback"][0] == held["feedback"][1] == whole["feedback"][0] > 0
    assert held["buffers"][0] == held["buffers"][1]


@pytest.mark.nightly
def test_sparse_sums_of_a_part_are_whole(pool: LocalPool) -> None:
    """A part has 8 blocks of 4096 elements at least, so here all are in one: the bits of a message that is not cut."""
    cluster = cluster_of(2, 2)
    plan = replace(plan_of("sync behind its reduce", cluster), wire={"sync": {"node": "topk:32+feedback"}})
    cases = [Case(each, num_micros=4, model="deep experts") for each in (plan, replace(plan, expert_gaps=()))]
    in_gaps, at_once = run(pool, cluster, cases)
    assert not any(outcome.complaint for outcome in in_gaps), in_gaps[0].complaint
    assert all(map(torch.equal, *([each.parameters for each in outcomes] for outcomes in (in_gaps, at_once))))


def test_a_lost_part_is_noticed(pool: LocalPool) -> None:
    cluster = cluster_of(2, 2)
    case = Case(plan_of("reduce", cluster), num_micros=2, model="deep experts", sabotage="lost_part")
    (outcomes,) = run(pool, cluster, [case])
    assert max(deviation(outcomes, reference(cluster, case)).values()) > 1e-6
