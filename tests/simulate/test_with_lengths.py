"""A step on documents of known lengths: whole rows are the step without lengths, shorter documents a shorter one."""

from dataclasses import replace

import pytest

from terrace.cluster.presets import load_cluster
from terrace.model.block_operations import layer_operations
from terrace.model.blocks import block_specs
from terrace.model.config import parse_model
from terrace.plan.plan import Plan
from terrace.plan.presets import preset
from terrace.plan.wire import MessageClass
from terrace.planner.by_cost import by_cost
from terrace.planner.evaluate import step_of
from terrace.planner.ranking import Estimate
from terrace.planner.task import Task
from terrace.sequence.lengths import NO_LENGTHS, Lengths, read_lengths
from terrace.simulate.footprint import work_of
from terrace.simulate.step import Step, predict_step
from terrace.simulate.with_lengths import with_lengths

SEQUENCE = 65536
CLUSTER = load_cluster("dgx-h100").resized(2)
MODEL = parse_model(
    {
        "model_type": "llama",
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": 1024,
        "max_position_embeddings": SEQUENCE,
    }
)
RING = {"node": {"context": {"ring": 8}}}


def step(plan: Plan) -> Step:
    micros = 32 // (16 if not plan.mapping else 2)
    work = work_of(CLUSTER, plan, layer_operations(MODEL), SEQUENCE)
    blocks = block_specs(MODEL)
    return Step(cluster=CLUSTER, plan=plan, blocks=blocks, num_micros=micros, sequence=SEQUENCE, work=work)


@pytest.mark.parametrize("mapping", [{}, RING])
def test_documents_of_whole_rows_have_the_step_of_whole_rows(mapping: dict[str, dict[str, dict[str, int]]]) -> None:
    base = step(replace(preset("zero3", CLUSTER), mapping=mapping))
    assert with_lengths(base, NO_LENGTHS) is base
    # The kernel for documents is another one, so one document of a row is compared with the same kernel.
    base = replace(base, work=replace(base.work, documents=True))  # type: ignore[type-var]
    whole, documents = predict_step(base), predict_step(with_lengths(base, Lengths((SEQUENCE,), "rows")))
    assert documents.step_s == pytest.approx(whole.step_s, rel=1e-9)
    assert documents.sent_bytes == whole.sent_bytes
    shorter = predict_step(with_lengths(base, Lengths((SEQUENCE // 8,), "eighths")))
    assert shorter.step_s < whole.step_s
    assert shorter.sent_bytes == whole.sent_bytes


@pytest.mark.parametrize("mapping", [{}, RING])
def test_dealt_documents_send_what_is_expected_and_not_declared(
    mapping: dict[str, dict[str, dict[str, int]]],
) -> None:
    even = replace(preset("zero3", CLUSTER), mapping=mapping)
    lengths = read_lengths("github", SEQUENCE)
    found = {
        balance: predict_step(with_lengths(step(replace(even, balance=balance)), lengths))
        for balance in ("tokens", "cost")
    }
    compute = {name: each.times_s[0]["backward"] for name, each in found.items()}
    assert compute["cost"] < compute["tokens"]
    assert found["cost"].times_s[0]["wait context"] > 0
    key = MessageClass.CONTEXT, "node"
    assert found["cost"].expected_bytes[0][key] > 0
    assert key not in found["cost"].sent_bytes[0]


def test_measured_flops_follow_the_lengths() -> None:
    flops = tuple(float(block.forward_flops(1, SEQUENCE)) for block in block_specs(MODEL))
    base = replace(step(preset("zero3", CLUSTER)), work=flops)
    halves = with_lengths(base, Lengths((SEQUENCE // 2,), "halves")).work
    assert isinstance(halves, tuple)
    core = 4 * SEQUENCE**2 * 1024  # of a layer's full square
    assert [one - other for one, other in zip(flops, halves, strict=True)] == pytest.approx([0, core / 2, core / 2, 0])


@pytest.mark.parametrize(("name", "gains"), [("one-huge", True), ("rows", False)])
def test_the_search_says_why_it_deals_by_cost_or_not(name: str, gains: bool) -> None:
    lengths = Lengths((SEQUENCE,), name) if name == "rows" else Lengths((SEQUENCE, *[64] * 512), name)
    task = Task(model=MODEL, cluster=CLUSTER, batch=32, sequence=SEQUENCE, lengths=lengths)
    plan = replace(preset("zero3", CLUSTER), compute="bf16")
    predicted = predict_step(step_of(task, plan))
    estimate = Estimate(
        candidate=None,  # type: ignore[arg-type]
        num_micros=2,
        step_s=predicted.step_s,
        time_s=predicted.times_s[0],
        memory_bytes={},
        sent_bytes={},
        stages=(),
        chosen={},
    )
    deal, words = by_cost(task, [(plan, estimate)])
    assert (deal is not None) is gains
    assert ("deals the documents" if gains else "is left out, as it gains nothing") in words
    assert deal is None or (deal.plan.balance == "cost" and deal.estimate.step_s < predicted.step_s)
