"""Choices of whole sequences, told among the ranks that share them: their ranks, bytes and seconds."""

from dataclasses import replace
from typing import Any

import pytest

from terrace.model.balance import BalanceConfig
from terrace.model.block_operations import layer_operations
from terrace.model.blocks import block_specs
from terrace.plan.balance_rules import with_exchanged_choices
from terrace.plan.presets import preset
from terrace.plan.wire import MessageClass
from terrace.program.instruction import Instruction, Op
from terrace.program.lowering import build
from terrace.simulate.footprint import work_of
from terrace.simulate.step import Step, predict_step
from tests.support.byte_formula import step_bytes
from tests.support.mixtures import PLAIN, mixture
from tests.support.totals import verify
from tests.support.toys import cluster_of

SEQUENCE, MICRO_BATCH, NUM_MICROS = 64, 2, 3
MODEL = mixture(PLAIN, layers=3, dense_layers=(1,))
SEQUENCE_LOSS = BalanceConfig(sequence=1e-3)

# Ranks among which a table of MICRO_BATCH x 8 numbers of 4 bytes is gathered, over package and node.
SHARING: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "rows": ({"package": {"tensor": 2}}, {"package": 1}),
    "ring": ({"node": {"context": {"ring": 2}}}, {"node": 1}),
    "Ulysses and ring": (
        {"package": {"context": {"ulysses": 2}}, "node": {"context": {"ring": 2}}},
        {"package": 1, "node": 2},
    ),
    "rows and ring": ({"package": {"tensor": 2}, "node": {"context": {"ring": 2}}}, {"package": 1, "node": 2}),
    "data": ({}, {}),
}


@pytest.mark.parametrize("name", SHARING)
@pytest.mark.parametrize("recompute", [(), ("layers.*",)])
def test_bytes_of_choices(name: str, recompute: tuple[str, ...]) -> None:
    """Once in every forward that counts, of each of the two layers with experts; a recomputed one sends none."""
    mapping, tables = SHARING[name]
    cluster = cluster_of(2, 2)
    plan = replace(preset("zero3", cluster), mapping=mapping, micro_batch=MICRO_BATCH, recompute=recompute)
    blocks = with_exchanged_choices(SEQUENCE_LOSS, block_specs(MODEL))
    program = build(cluster, plan, blocks, NUM_MICROS, SEQUENCE)
    verify(program)
    each = MICRO_BATCH * 8 * 4
    wanted = {tier: 2 * NUM_MICROS * number * each for tier, number in tables.items()}
    declared = step_bytes(cluster, plan, program.blocks, NUM_MICROS, SEQUENCE)
    for found in (program.sent_bytes, declared):
        assert {tier: sent for (message, tier), sent in found.items() if message is MessageClass.CHOICES} == wanted
    sends = [
        [message.message_class for message in program.messages_inside(Instruction(op, 1, 0))].count(
            MessageClass.CHOICES
        )
        for op in (Op.FORWARD, Op.BACKWARD)
    ]
    assert sends == [bool(wanted), 0]
    # Without the loss nothing is told.
    quiet = build(
        cluster, plan, with_exchanged_choices(BalanceConfig(step=1.0), block_specs(MODEL)), NUM_MICROS, SEQUENCE
    )
    assert not any(message is MessageClass.CHOICES for message, _ in quiet.sent_bytes)


def test_the_wait_for_choices_is_priced() -> None:
    cluster = cluster_of(2, 2)
    plan = replace(preset("zero3", cluster), mapping={"node": {"context": {"ring": 2}}}, micro_batch=MICRO_BATCH)
    times = [
        predict_step(
            Step(
                cluster=cluster,
                plan=plan,
                blocks=with_exchanged_choices(balance, block_specs(MODEL)),
                num_micros=NUM_MICROS,
                sequence=SEQUENCE,
                work=work_of(cluster, plan, layer_operations(MODEL), SEQUENCE),
            )
        ).times_s[0]
        for balance in (SEQUENCE_LOSS, None)
    ]
    assert "wait choices" not in times[1]
    assert times[0]["wait choices"] >= 2 * NUM_MICROS * cluster.tiers[1].latency_s
