"""Messages between stages: the rounds in which pairs of them meet, and that none waits for ever."""

from collections import defaultdict, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from terrace.model.blocks import block_specs
from terrace.model.config import parse_model
from terrace.plan.edges import rounds_of
from terrace.plan.plan import Plan
from terrace.program.instruction import PASSES, Op
from terrace.program.lowering import build_stages
from terrace.program.program import Program
from tests.support.nightly import in_turns
from tests.support.toys import cluster_of

TIED = {
    "model_type": "llama", "hidden_size": 8, "num_hidden_layers": 6, "num_attention_heads": 2, "intermediate_size": 8,
    "vocab_size": 16, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
PAIRS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(lambda pair: pair[0] < pair[1]), unique=True, max_size=20
).map(sorted)


@given(PAIRS)
def test_every_pair_meets_once_and_no_stage_twice_in_a_round(pairs: list[tuple[int, int]]) -> None:
    rounds = rounds_of(pairs)
    assert sorted(pair for group in rounds for pair in group) == pairs
    for group in rounds:
        stages = [stage for pair in group for stage in pair]
        assert len(set(stages)) == len(stages)


def test_all_stages_know_the_same_pairs() -> None:
    blocks, cluster = block_specs(parse_model(TIED)), cluster_of(2, 2)
    line, ring = ((0, 1), (1, 2), (2, 3)), ((0, 1), (0, 3), (1, 2), (2, 3))
    for schedule, wanted in (("1f1b", ring), ("zbv", line), ("interleaved:2", ring)):
        plan = Plan(
            params="device",
            grads="device",
            optimizer="device",
            schedule=schedule,
            mapping={"package": {"pipeline": 2}, "node": {"pipeline": 2}},
        )
        programs = build_stages(cluster, plan, blocks, 4, 8)
        assert {program.stage.pairs for program in programs} == {wanted}
        assert len(rounds_of(wanted)) == 2


def ends_when_carried_in_turn(programs: list[Program]) -> bool:
    """Play stages whose messages are carried one after the other for each pair and direction, sender and receiver
    together: a pass waits for its inputs, and later instructions are issued only then.
    """
    place, queues, there = [0] * len(programs), defaultdict(deque), set()  # type: ignore[var-annotated]
    moved = True
    while moved:
        moved = False
        for stage, program in enumerate(programs):
            while place[stage] < len(program.instructions):
                now = program.instructions[place[stage]]
                backward = now.op is not Op.FORWARD
                read = (stage, backward, now.block + (1 if backward else -1), now.micro)
                if now.op in PASSES and now.op is not Op.BACKWARD_WEIGHT:
                    edge = program.stage.chunks, now.block
                    if comes_from_outside(*edge, backward, len(program.blocks)) and read not in there:
                        break
                elif now.op is Op.RECV:
                    queues[now.peer, stage, "in"].append((stage, now.backward, now.block, now.micro))
                elif now.op is Op.SEND:
                    queues[stage, now.peer, "out"].append((now.peer, now.backward, now.block, now.micro))
                place[stage] += 1
                moved = True
        for sender, receiver, side in list(queues):
            sent, received = queues[sender, receiver, "out"], queues[sender, receiver, "in"]
            while side == "out" and sent and received and sent[0] == received[0]:
                there.add(sent.popleft())
                received.popleft()
                moved = True
    return all(end == len(program.instructions) for end, program in zip(place, programs, strict=True))


def comes_from_outside(chunks: tuple[range, ...], block: int, backward: bool, num_blocks: int) -> bool:
    """Whether another stage makes the input of a pass."""
    source = block + 1 if backward else block - 1
    return 0 <= source < num_blocks and not any(source in chunk for chunk in chunks)


@pytest.mark.parametrize(("num_stages", "num_micros"), in_turns(3, [2, 4, 8], [1, 3, 4, 8, 16]))
def test_no_order_waits_where_a_group_carries_one_message_after_the_other(num_stages: int, num_micros: int) -> None:
    """As NCCL does; were all that goes to higher stages one group, zb-2p on 8 stages would wait in a circle."""
    blocks, cluster = block_specs(parse_model(TIED | {"num_hidden_layers": 14})), cluster_of(num_stages)
    tried = 0
    for schedule in ("gpipe", "1f1b", "interleaved:2", "zb-h1", "zb-h2", "zb-1p", "zb-2p", "zb-auto:3", "zbv",
                     "breadth-first:2", "zeropp:2"):  # fmt: skip
        for unit in (1, 2):
            if schedule.startswith("interleaved") and num_micros % num_stages:
                continue
            mapping = {"package": {"pipeline": num_stages}}
            plan = Plan(
                params="device", grads="device", optimizer="device", mapping=mapping, schedule=schedule, unit=unit
            )
            assert ends_when_carried_in_turn(build_stages(cluster, plan, blocks, num_micros, 8)), schedule
            tried += 1
    assert tried > 19
