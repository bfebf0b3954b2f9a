"""Messages of context ranks: the closed formula equals the layouts of a micro-batch, and the published table."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from terrace.base.errors import PlanError
from terrace.cli.main import main
from terrace.cluster.cluster import Cluster
from terrace.model.blocks import block_specs
from terrace.model.config import parse_model
from terrace.model.spec import BlockSpec
from terrace.plan.context import ContextGroup, attention_heads, local_tokens
from terrace.plan.context_traffic import NO_ATTENTION, AttentionBytes, ContextTraffic
from terrace.plan.in_block_messages import ContextLeg, ContextMessage
from terrace.plan.mesh import Mesh
from terrace.plan.plan import Plan
from terrace.plan.presets import preset
from terrace.plan.slices import slice_blocks
from terrace.plan.wire import MessageClass, parse_format
from terrace.program.block_program.attention import attention_steps
from terrace.program.block_program.steps import Send, Steps, messages_of
from terrace.program.instruction import Op
from terrace.program.lowering import build, build_stages
from terrace.program.program import Program
from terrace.program.text import program_text
from terrace.report.inside import ASSIGNED, attention_table
from terrace.sequence.static import static_token_layout
from terrace.sequence.token_layout import Exchange, num_rows
from terrace.sequence.traffic import sent_bytes
from tests.support.byte_formula import attention_totals, step_bytes
from tests.support.tiny_runs import write_run
from tests.support.totals import verify
from tests.support.toys import cluster_of

LAYER, ITEM = 1, 8  # a block that attends; bytes of an fp64


def llama(heads: int = 8, kv_heads: int = 8, size: int = 2, layers: int = 2) -> Any:
    """Return a small model with so many heads of a size."""
    return parse_model(
        {
            "model_type": "llama",
            "vocab_size": 32,
            "hidden_size": heads * size,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "intermediate_size": 16,
        }
    )


def planned(cluster: Cluster, mapping: dict[str, Any], **changes: Any) -> Plan:
    return replace(preset("zero3", cluster), mapping=mapping, compute="fp64", master="fp64", **changes)


def by_leg(attention: AttentionBytes) -> list[Counter[tuple[ContextLeg, int]]]:
    """Bytes of a forward and of a backward, by leg and tier; they add up to the closed formula."""
    found = []
    for steps, total in zip(attention_steps(attention.parts, attention.ring), attention_totals(attention), strict=True):
        sent: Counter[tuple[ContextLeg, int]] = Counter()
        for message in messages_of(steps):
            assert isinstance(message, ContextMessage)
            for tier, num_bytes in attention.sends(message):
                sent[message.leg, tier] += num_bytes
        by_tier = Counter[int]()
        for (_, tier), num_bytes in sent.items():
            by_tier[tier] += num_bytes
        assert by_tier == total
        found.append(sent)
    return found


def attention_of(plan: Plan, mesh: Mesh, sequence: int, blocks: Sequence[BlockSpec]) -> AttentionBytes:
    return ContextTraffic(plan, mesh, sequence, TIERS).attention(blocks[LAYER])


TIERS = ("package", "node", "system")


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from((1, 2)), st.sampled_from((1, 2, 3))), min_size=1, max_size=3),
    st.sampled_from((1, 2, 4, 8)),
    st.integers(1, 30),
    st.integers(1, 3),
    st.data(),
)
def test_the_formula_is_what_every_spread_sends(
    degrees: list[tuple[int, int]], kv_heads: int, sequence: int, micro_batch: int, data: st.DataObject
) -> None:
    cluster = cluster_of(*(math.prod(each) for each in degrees))
    mapping = {
        tier: {"context": {"ulysses": ulysses, "ring": ring}}
        for tier, (ulysses, ring) in zip(TIERS, degrees, strict=False)
    }
    plan = planned(cluster, mapping, micro_batch=micro_batch)
    mesh, blocks = Mesh.of(cluster, plan), block_specs(llama(8, kv_heads))
    if math.prod(math.prod(each) for each in degrees) == 1:
        assert ContextTraffic(plan, mesh, sequence, TIERS).attention(blocks[LAYER]) == NO_ATTENTION
        return
    forward, backward = by_leg(attention_of(plan, mesh, sequence, blocks))
    member = data.draw(st.integers(0, cluster.world_size - 1))
    group = ContextGroup.of(cluster, plan, 0)
    token_layout = static_token_layout(
        plan, mesh, sequence, 0, list(range(0, micro_batch * sequence, sequence)), member
    )
    assert token_layout.num_local_tokens == local_tokens(plan, mesh, sequence)
    queries, keys = 8 // group.ulysses * 2 * ITEM, 2 * max(kv_heads // group.ulysses, 1) * 2 * ITEM

    def rows(*exchanges: Exchange) -> Counter[int]:
        sent: Counter[int] = Counter()
        for exchange in exchanges:
            for peer, runs in exchange.sends:
                if peer != member:
                    sent[group.tier(member, peer)] += num_rows(runs)
        return sent

    back = Exchange(token_layout.into.receives, token_layout.into.sends)
    brought = [round_.exchange for round_ in token_layout.rounds]
    homes = [round_.return_gradients for round_ in token_layout.rounds]
    expected = (
        (forward, ContextLeg.INTO, rows(token_layout.into), queries + keys),
        (forward, ContextLeg.KEYS, rows(*brought), keys),
        (forward, ContextLeg.BACK, rows(back), queries),
        (backward, ContextLeg.INTO, rows(token_layout.into), queries),
        (backward, ContextLeg.KEYS, rows(*brought), keys),
        (backward, ContextLeg.GRADIENTS, rows(*brought[2:]), keys),
        (backward, ContextLeg.RETURN_GRADIENTS, rows(*homes), keys),
        (backward, ContextLeg.BACK, rows(back), queries + keys),
    )
    for found, leg, wanted, row_bytes in expected:
        here = {tier: num_bytes for (other, tier), num_bytes in found.items() if other is leg}
        assert here == {tier: num * row_bytes for tier, num in wanted.items()}, leg


def test_formats_of_tiers_in_the_formula_are_those_of_every_spread() -> None:
    """Rows of 8 and of 4 elements: 2 bytes of scale and as many of codes, in 16 bytes."""
    cluster = cluster_of(2, 2, 2)
    wires = {"package": "bf16", "node": "int8", "system": "fp8:16"}
    mapping = {
        "package": {"context": {"ulysses": 2}},
        "node": {"context": {"ring": 2}},
        "system": {"context": {"ulysses": 2}},
    }
    plan = planned(cluster, mapping, wire={"context": wires})
    mesh, blocks = Mesh.of(cluster, plan), block_specs(llama(8, 4))
    attention = attention_of(plan, mesh, 16, blocks)
    heads, group = attention_heads(blocks[LAYER], 1), ContextGroup.of(cluster, plan, 0)
    assert heads is not None
    formats = [parse_format(wires[tier]) for tier in TIERS]
    token_layout = static_token_layout(plan, mesh, 16, 0, [0], 3)
    sent = sent_bytes(token_layout, group, heads, formats)
    by_leg(attention)
    for total, found in zip(attention_totals(attention), (sent.forward, sent.backward), strict=True):
        assert [total.get(tier, 0) for tier in range(3)] == list(found)
    plain = attention_totals(attention_of(replace(plan, wire={}), mesh, 16, blocks))
    assert attention_totals(attention)[0][0] * 4 == plain[0][0]
    held = local_tokens(plan, mesh, 16)
    assert attention_totals(attention)[0][2] == 2 * held * 16 * (1 + 2 + 1)


# 2405.07719, table 2: elements of activations that a rank sends for a layer, forward and backward, of b rows of L
# tokens of size d on N ranks, without the factors (N-1)/N: 8/N b L d of Ulysses, 4 b L d of a ring.
B, L, D = 2, 48, 16


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_bytes_are_those_of_the_published_table(num_ranks: int, kv_heads: int) -> None:
    cluster = cluster_of(num_ranks)
    left = (num_ranks - 1) / num_ranks

    def sent(form: str) -> Counter[ContextLeg]:
        plan = planned(cluster, {"package": {"context": {form: num_ranks}}}, micro_batch=B)
        found: Counter[ContextLeg] = Counter()
        blocks = block_specs(llama(8, kv_heads))
        for sends in by_leg(attention_of(plan, Mesh.of(cluster, plan), L, blocks)):
            for (leg, _), num_bytes in sends.items():
                found[leg] += num_bytes
        return found

    ring = sent("ring")
    grouped = kv_heads / 8
    kept_apart = ring[ContextLeg.KEYS] // 2  # keys that the backward fetches again, so that none but its own is kept
    assert ring.total() - kept_apart == pytest.approx(4 * B * L * D * left * ITEM * grouped)
    assert kept_apart == pytest.approx(2 * B * L * D * left * ITEM * grouped)
    if kv_heads == 8:
        assert sent("ulysses").total() == pytest.approx(8 / num_ranks * B * L * D * left * ITEM)


def test_usp_crosses_the_outer_tier_with_keys_alone_and_the_reverse_with_everything() -> None:
    """Ulysses inside and the ring across, 8 ranks on 2 nodes: 3 b L d / 4 go across; in reverse 2 b L d / 8 + ..."""
    cluster = cluster_of(4, 2)
    blocks = block_specs(llama(8, 8))

    def sent(inside: str, across: str) -> list[int]:
        plan = planned(cluster, {"package": {"context": {inside: 4}}, "node": {"context": {across: 2}}}, micro_batch=B)
        found = Counter[int]()
        for sends in by_leg(attention_of(plan, Mesh.of(cluster, plan), L, blocks)):
            for (_, tier), num_bytes in sends.items():
                found[tier] += num_bytes
        return [found[tier] // ITEM for tier in range(2)]

    whole = B * L * D
    # Ring of 2: a place has half of the tokens; each of its 4 parts a quarter of the heads; keys twice, gradients once.
    assert sent("ulysses", "ring") == [8 * whole // 8 * 3 // 4, 3 * 2 * whole // 2 // 4]
    # Ulysses of 2 across: of 8 tensors of the tokens that a rank has, half of the heads.
    assert sent("ring", "ulysses") == [(3 * 3) * 2 * whole // 4 // 2, 8 * whole // 8 // 2]


CASES: list[tuple[tuple[int, ...], dict[str, Any], dict[str, Any]]] = [
    ((4, 2), {"package": {"context": {"ulysses": 2, "ring": 2}}}, {}),
    ((4, 2), {"package": {"context": 4}, "node": {"data": 2}}, {"recompute": ("layers.*",), "micro_batch": 2}),
    ((2, 2), {"package": {"tensor": 2}, "node": {"context": {"ulysses": 2}}}, {"sequence_parallel": False}),
    ((4, 2), {"package": {"tensor": 2, "context": 2}, "node": {"context": {"ulysses": 2}}}, {}),
    ((4, 2), {"package": {"context": {"ulysses": 2, "ring": 2}}, "node": {"pipeline": 2}}, {"schedule": "1f1b"}),
    ((2, 2), {"package": {"tensor": 2}, "node": {"context": 2}}, {"balance": "cost"}),
    ((2, 2, 2), {"package": {"tensor": 2}, "node": {"context": 2}, "system": {"pipeline": 2}}, {"schedule": "zb-h1"}),
]


def programs(sizes: tuple[int, ...], mapping: dict[str, Any], changes: dict[str, Any]) -> list[Program]:
    cluster = cluster_of(*sizes)
    return build_stages(cluster, planned(cluster, mapping, **changes), block_specs(llama(4, 2)), 2, 13)


@pytest.mark.parametrize(("sizes", "mapping", "changes"), CASES)
def test_programs_send_what_the_plan_declares(
    sizes: tuple[int, ...], mapping: dict[str, Any], changes: dict[str, Any]
) -> None:
    for program in programs(sizes, mapping, changes):
        verify(program)
        stage = program.stage if program.stage.num_stages > 1 else None
        declared = step_bytes(program.cluster, program.plan, program.blocks, 2, 13, stage)
        attends = {tier for message, tier in declared if message is MessageClass.CONTEXT}
        assert bool(attends) == (program.plan.balance == "tokens")
        # What blocks run on is one row of the tokens that a rank holds, for the other axes too.
        assert program.model.tensor.shape == (1, local_tokens(program.plan, program.mesh, 13))
        if stage is not None:
            edge, tensor = program.model.edge, program.model.tensor
            assert math.prod(edge.shape) % tensor.shape[1] == 0 or tensor.splits_tokens


def test_without_the_length_of_a_sequence_there_is_no_program() -> None:
    cluster = cluster_of(2)
    with pytest.raises(PlanError, match="a plan with a context axis needs the length of a sequence"):
        build(cluster, planned(cluster, {"package": {"context": 2}}), block_specs(llama()), 1)


def test_messages_are_in_order_and_say_behind_which_round_they_travel() -> None:
    cluster = cluster_of(2, 2)
    plan = planned(cluster, {"package": {"context": 2}, "node": {"context": 2}})
    attention = attention_of(plan, Mesh.of(cluster, plan), 8, block_specs(llama()))

    def told(steps: Steps) -> list[tuple[str, int, int | None]]:
        sends = [step for step in steps if isinstance(step, Send)]
        rounds = [None if each.behind is None else each.behind.number for each in sends]
        messages = [message for message in messages_of(steps) if isinstance(message, ContextMessage)]
        return [(each.leg.value, each.tier, number) for each, number in zip(messages, rounds, strict=True)]

    forward, backward = map(told, attention_steps(attention.parts, attention.ring))
    assert forward == [("keys", 0, 0), ("keys", 1, 1), ("keys", 0, 2)]
    assert backward == [
        ("keys", 0, 0),
        ("keys", 1, 1),
        ("gradients", 1, 2),
        ("keys", 0, 2),
        ("gradients", 0, 3),
        ("home", 1, None),
    ]


def test_explain_shows_the_ring_of_a_layer() -> None:
    (program,) = programs((4, 2), {"package": {"context": {"ulysses": 2, "ring": 2}}}, {"recompute": ("layers.1",)})
    console = Console(width=140)
    with console.capture() as caught:
        console.print(attention_table(program))
    lines = [" ".join(line.split()) for line in caught.get().splitlines()]
    assert "layers.0 forward queries, keys and values 256 B on package waited for" in lines
    assert "next round's keys and values 256 B on package round 0" in lines
    assert "gradients of the last round's 256 B on package waited for" in lines
    assert "backward what the forward sends, again" in lines
    text = program_text(program)
    assert (
        text.count("attends over package")
        == sum(each.op in (Op.FORWARD, Op.BACKWARD) for each in program.instructions) - 8
    )


def test_explain_prints_what_a_batch_does_not_decide(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(write_run(tmp_path, 2, 2))
    words = ["simulate", "--view", "program", "--config", config, "--lines", "2"]
    mapping = ["--plan.mapping.package", "{context = {ulysses = 2}}", "--plan.mapping.node", "{context = 2}"]
    assert main([*words, *mapping]) == 0
    said = capsys.readouterr().out
    assert "attention over the context axis" in said
    assert "\n context " in said  # of the bytes of a step
    assert main([*words, *mapping, "--plan.balance", "cost"]) == 0
    said = capsys.readouterr().out
    assert " ".join(ASSIGNED.split()) in " ".join(said.split())
    assert "\n context " not in said
    assert main(["simulate", "--config", config, *mapping, "--plan.balance", "cost"]) == 0
    assert " ".join(ASSIGNED.split()) in " ".join(capsys.readouterr().out.split())


def test_slices_send_what_their_heads_say() -> None:
    """A tensor rank with whole key-value heads, of which it uses one, sends that one."""
    cluster = cluster_of(4, 2)
    plan = planned(cluster, {"package": {"tensor": 4}, "node": {"context": 2}})
    mesh = Mesh.of(cluster, plan)
    blocks = block_specs(llama(8, 2))
    whole, cut = (attention_of(plan, mesh, 8, each) for each in (blocks, slice_blocks(blocks, mesh)))
    assert whole == cut
    keys = ContextMessage(ContextLeg.KEYS, tier=1)
    assert whole.sends(keys) == ((1, 2 * 4 * 2 * ITEM),)  # keys and values of 4 tokens, one head of 2
