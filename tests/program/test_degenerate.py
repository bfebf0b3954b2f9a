"""Degenerate placements are free: a state on a tier where a rank has no peers is there already."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from terrace.model.spec import BlockSpec
from terrace.plan.layout import DEVICE
from terrace.plan.plan import Plan
from terrace.plan.presets import PRESETS, preset
from terrace.program.instruction import Instruction, Op
from terrace.program.lowering import build
from terrace.program.program import Program
from terrace.simulate.cost import step_costs
from terrace.simulate.events import simulate
from tests.support.programs import BLOCKS
from tests.support.state_formula import model_state_bytes
from tests.support.totals import verify
from tests.support.toys import MODELS, cluster_of

GATHERS = {Op.GATHER, Op.FREE}
PLACED = Plan(params="device", grads="device", optimizer="device")


def program_of(sizes: tuple[int, ...], plan: Plan, blocks: Sequence[BlockSpec] = BLOCKS) -> Program:
    program = build(cluster_of(*sizes), plan, blocks, 2, sequence=4)
    verify(program)
    return program


def ops(program: Program) -> set[Op]:
    return {instruction.op for instruction in program.instructions}


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("name", PRESETS)
def test_one_rank_has_the_same_program_under_every_preset(name: str, compute: str) -> None:
    cluster = cluster_of(1, 1, 1)
    plan = replace(preset(name, cluster), compute=compute)  # type: ignore[arg-type]
    alone = replace(PLACED, compute=compute)  # type: ignore[arg-type]
    program, plain = program_of((1, 1, 1), plan), program_of((1, 1, 1), alone)
    assert not ops(program) & GATHERS
    assert tuple(program.instructions) == tuple(plain.instructions)
    assert not any(message.sends or message.hops for message in program.messages)
    assert program.state_bytes == plain.state_bytes == model_state_bytes(cluster, plan, BLOCKS, 2)
    flops = [1e9] * len(BLOCKS)
    time_s = simulate(program, step_costs(program, flops)).time_s
    assert time_s == simulate(plain, step_costs(plain, flops)).time_s
    assert not any(category.startswith("wait") for category, seconds in time_s.items() if seconds)


@pytest.mark.parametrize("name", PRESETS)
def test_a_tier_of_one_member_changes_nothing(name: str) -> None:
    # The preset of three tiers, and the same placements on the two tiers that have peers.
    for sizes, kept in (((1, 2, 2), (0, 0, 1)), ((2, 1, 2), (0, 0, 1)), ((2, 2, 1), (0, 1, 1))):
        cluster, inner = cluster_of(*sizes), [size for size in sizes if size > 1]
        plan, smaller = preset(name, cluster), cluster_of(*inner)
        names = {"device": "device"}
        for tier, place, size in zip(cluster.tiers, kept, sizes, strict=True):
            first = size == 1 and tier is cluster.tiers[0]
            names[tier.name] = "device" if first else smaller.tiers[place].name
        wire = {
            message: {names[tier]: form for tier, form in row.items() if cluster.tiers[cluster.index(tier)].size > 1}
            for message, row in plan.wire.items()
        }
        moved = {
            state: names[getattr(plan, state)]
            for state in ("params", "grads", "optimizer", "params_backward")
            if getattr(plan, state) is not None
        }
        if moved.get("params_backward") in ("device", moved["params"]):
            continue
        small = replace(plan, **moved, wire={message: row for message, row in wire.items() if row})  # type: ignore[arg-type]
        found, wanted = program_of(sizes, plan), program_of(tuple(inner), small)
        assert tuple(found.instructions) == tuple(wanted.instructions), (name, sizes)
        assert found.state_bytes == wanted.state_bytes
        assert sum(found.sent_bytes.values()) == sum(wanted.sent_bytes.values())


def test_parameters_on_a_package_of_one_are_never_gathered() -> None:
    program = program_of((1, 4), preset("three-level", cluster_of(1, 4)))
    assert not ops(program) & GATHERS
    assert program.layout.params == DEVICE
    assert program.layout.optimizer == 1
    assert program.state_bytes["gathered"] == 0


def test_a_whole_secondary_copy_is_gathered_once_a_step() -> None:
    plan = preset("zero++", cluster_of(1, 1, 4))
    program = program_of((1, 1, 4), plan)
    gathers = [each for each in program.instructions if each.op is Op.GATHER]
    assert gathers == [Instruction(Op.GATHER, block) for block in (0, 1, 2, 3)]
    assert Op.FREE not in ops(program)
    assert program.state_bytes["gathered"] == 0
    assert program.state_bytes["secondary"] == 4 * sum(flat.padded for flats in program.model.flats for flat in flats)
    assert program.state_bytes == model_state_bytes(program.cluster, program.plan, BLOCKS, 2)


def test_a_tensor_axis_leaves_only_what_its_ranks_share_to_be_gathered() -> None:
    # Over the tensor axis the matrices are cut, and no other rank has a part of a rank's slice.
    tier = cluster_of(2, 2).tiers[0].name
    plan = Plan(params=tier, grads=tier, optimizer=tier, mapping={tier: {"tensor": 2}})
    program = program_of((2, 2), plan, MODELS["llama tied"].declared)
    gathered = {each.block for each in program.instructions if each.op is Op.GATHER}
    assert 0 not in gathered, "the embedding has no norm"
    assert gathered == set(range(1, len(program.blocks)))
    for block in gathered:
        flats = program.model.flats[block]
        carried = {transfer.flat for transfer in program.message(Instruction(Op.GATHER, block)).transfers}
        for number, flat in enumerate(flats):
            assert (number in carried) == all("norm" in param.name for param in flat.params)
    assert 0 < program.state_bytes["gathered"] < program.state_bytes["params"] / 10
