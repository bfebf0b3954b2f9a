"""QK-clip: losses, norms and parameters of one plain process that has whole score matrices, under every axis."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bench.common import engine_with
from terrace.base.errors import PlanError
from terrace.launch.start import LocalPool
from terrace.model.attention import PerMicroBatch, PlannedAttention
from terrace.model.attention_plans import AttentionPlans
from terrace.plan.plan import Plan
from terrace.plan.presets import preset
from terrace.plan.score_clip import MOST_SCORES
from terrace.plan.validate import validate
from terrace.plan.wire import MessageClass
from terrace.program.lowering import build
from terrace.runtime.batch import Batch
from terrace.runtime.describe import describe
from terrace.runtime.scores import MeasuredPlans, Scores
from terrace.runtime.settings import OptimizerConfig
from terrace.simulate.activations import activations_of
from terrace.simulate.cost import step_costs
from terrace.simulate.footprint import work_of
from tests.support.nightly import nightly
from tests.support.optimizer_reference import NUM_STEPS, train
from tests.support.parity import TOLERANCE, Case, Outcome, case_words, deviation, exact, num_rows, run
from tests.support.pipelines import ALONE, OUTER, pipelined
from tests.support.plain_decoder import clip, logits_of
from tests.support.toys import MODELS, cluster_of, make_batch

Sizes = tuple[int, ...]
MUON = OptimizerConfig(name="muon", lr=3e-3, adamw_lr=1e-3, qk_clip=0.3)
ADAMW = OptimizerConfig(lr=3e-3, qk_clip=0.3)
SGD = OptimizerConfig(name="sgd", lr=3e-2, momentum=0.9, qk_clip=0.2)
GALORE = OptimizerConfig(name="galore", lr=3e-3, rank=3, check_every=2, qk_clip=0.2)


@cache
def reference(model: str, batch: int, optimizer: OptimizerConfig) -> tuple[Outcome, list[int]]:
    """A plain run, and how many heads were scaled in each step."""
    config, scores, numbers = MODELS[model].config, list[list[Tensor]](), list[int]()
    assert config is not None

    def tables(blocks: Sequence[nn.Module]) -> list[dict[str, nn.Parameter]]:
        return [dict(block.named_parameters()) for block in blocks]

    def forward(blocks: Sequence[nn.Module], tokens: Tensor) -> Tensor:
        logits, found = logits_of(tables(blocks), tokens, config)
        scores.append(found)
        return logits

    def after(blocks: Sequence[nn.Module]) -> None:
        numbers.append(clip(tables(blocks), scores[-1], optimizer.qk_clip, config))

    return train(model, batch, replace(optimizer, qk_clip=0.0), forward, after), numbers


ROWS = {"package": {"tensor": 2}}


def context(ulysses: int, ring: int) -> dict[str, Any]:
    return {"context": {"ulysses": ulysses, "ring": ring}}


def zero(name: str, sizes: Sizes, **changes: Any) -> Plan:
    return exact(name, cluster_of(*sizes), **changes)


CASES: list[tuple[Sizes, Case]] = [
    ((1,), Case(zero("ddp", (1,), recompute=("block.1",)), num_micros=2, model="dense latent", optimizer=MUON)),
    ((2, 2), Case(zero("zero3", (2, 2), mapping=ROWS), model="wide llama, 8 kv heads", optimizer=MUON)),
    ((2, 2), Case(pipelined("zero1", OUTER, "1f1b"), num_micros=2, model="deep llama tied", optimizer=MUON)),
    (
        (2, 2),
        Case(
            zero("zero1", (2, 2), mapping={"package": context(2, 1), "node": context(1, 2)}),
            model="wide llama, 2 kv heads",
            optimizer=ADAMW,
        ),
    ),
]
BY_NIGHT: list[tuple[Sizes, Case]] = [
    (
        (2, 2),
        Case(
            zero("zero2", (2, 2), mapping={"package": ROWS["package"], "node": context(2, 1)}, recompute=("*",)),
            model="wide llama, 8 kv heads",
            optimizer=MUON,
        ),
    ),
    ((2,), Case(zero("zero3", (2,), mapping={"package": context(1, 2)}), model="dense latent", optimizer=MUON)),
    ((2, 2), Case(zero("zero1", (2, 2), mapping=ROWS), model="wide llama, 1 kv head", optimizer=MUON)),
    ((2, 2), Case(zero("zero3", (2, 2), mapping=ROWS), model="dense latent", optimizer=ADAMW)),
    ((2, 2, 2), Case(zero("three-level", (2, 2, 2)), num_micros=2, model="llama tied", optimizer=SGD)),
    ((4,), Case(pipelined("ddp", ALONE, "zb-h1"), num_micros=4, model="deep llama tied", optimizer=MUON)),
    ((3,), Case(zero("zero2", (3,)), num_micros=2, model="llama tied", optimizer=GALORE)),
]


@pytest.mark.parametrize("row", [*CASES, *nightly(*((row,) for row in BY_NIGHT))], ids=case_words)
def test_every_plan_equals_one_process_with_whole_scores(pool: LocalPool, row: tuple[Sizes, Case]) -> None:
    (sizes, case) = row
    cluster = cluster_of(*sizes)
    case = replace(case, num_steps=NUM_STEPS)
    (outcomes,) = run(pool, cluster, [case])
    wanted, numbers = reference(case.model, num_rows(cluster, case), case.optimizer)
    assert all(numbers), "every step scales some heads"
    found = deviation(outcomes, wanted)
    assert max(found.values()) < TOLERANCE, found
    assert not any(outcome.complaint for outcome in outcomes), outcomes[0].complaint


DOCUMENTS = torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7, 8]])


@pytest.mark.parametrize("most", [1, 40, 1 << 20], ids=["query by query", "a few queries", "at once"])
@pytest.mark.parametrize("positions", [None, DOCUMENTS], ids=["whole rows", "documents"])
@pytest.mark.parametrize("window", [0, 3])
def test_the_largest_score_is_that_of_the_whole_matrix(
    window: int, positions: Tensor | None, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MOST_SCORES, "cpu", most)
    torch.manual_seed(window)
    query, key = torch.randn(2, 4, 9, 5).double(), torch.randn(2, 2, 9, 5).double()
    scores = Scores(torch.zeros(4).double())
    scores.is_open = True
    MeasuredPlans(AttentionPlans(window), window, scores, PerMicroBatch()).plan(positions, query).attend(  # type: ignore[union-attr]
        query, key, key
    )
    unseen = torch.ones(9, 9).triu(1) + (torch.ones(9, 9).tril(-window) if window else 0) > 0
    if positions is not None:
        number = (positions == 0).cumsum(1)
        unseen = unseen | (number[:, :, None] != number[:, None])[:, None]
    whole = query @ key.repeat_interleave(2, 1).transpose(2, 3) / 5**0.5
    wanted = whole.masked_fill(unseen, -torch.inf).amax((0, 2, 3)).clamp(min=0)
    torch.testing.assert_close(scores.largest, wanted, rtol=1e-14, atol=0)


def test_after_a_clip_no_score_of_the_same_tokens_exceeds_the_limit() -> None:
    """At a rate of 0 the second step measures the scaled matrices of the first layer, the third those of all."""
    found = []
    for limit in (0.3, 1e6):
        optimizer = replace(ADAMW, lr=0.0, qk_clip=limit)
        model = MODELS["dense latent"]
        blocks, rows = model.blocks(torch.float64), make_batch(0, 2)
        engine = engine_with(
            blocks,
            cluster=cluster_of(1),
            plan=zero("ddp", (1,), update=optimizer.update, micro_batch=2),
            num_micros=1,
            optimizer=optimizer,
            objective=model.objective,
            declared=model.declared,
        )
        for _ in range(3):
            engine.step([Batch(*rows)], 0.0)
            found.append(engine.runner.scores.largest.clone())
        layers = [each for block in blocks for each in block.modules() if isinstance(each, PlannedAttention)]
        assert all(isinstance(each.plans, MeasuredPlans) for each in layers)
        engine.close()
        assert len(layers) == 2
        assert all(isinstance(each.plans, AttentionPlans) for each in layers)
    assert float(found[-1].max()) > 0.3
    torch.testing.assert_close(found[1][:4], found[0][:4].clamp(max=0.3))
    assert float(found[2].max()) <= 0.3 * (1 + 1e-12)


def test_a_narrow_master_takes_the_scaling_in_the_mean() -> None:
    """A factor nearer to 1 than half a rounding step of bf16 moves as many parameters as makes the mean right."""
    plan = replace(preset("ddp", cluster_of(1)), compute="bf16", master="bf16", update=ADAMW.update)
    model = MODELS["wide llama, 8 kv heads"]
    engine = engine_with(
        model.blocks(torch.bfloat16),
        cluster=cluster_of(1),
        plan=plan,
        num_micros=1,
        optimizer=ADAMW,
        objective=model.objective,
        declared=model.declared,
    )
    (flat,) = engine.state.trainable(1)
    flat.optimizer.master.fill_(1.0)
    engine.runner.scores.settle([ADAMW.qk_clip / 0.998] * 16)
    engine.runner.scores.scale(1, [flat])
    (begin,) = (start for param, start, _ in flat.spec.extents if param.name == "attention.query.weight")
    mean = float(flat.optimizer.master[begin : begin + 256].double().mean())
    engine.close()
    assert abs(mean - 0.998**0.5) < 4e-4


@pytest.mark.parametrize("mapping", [{}, {"package": context(1, 2)}], ids=["data", "ring"])
def test_seconds_memory_and_bytes_are_predicted(mapping: dict[str, Any]) -> None:
    """Forwards take longer, recomputation does not; a part of the scores is in the peak; CLIP has a number a head."""
    specs, cluster = MODELS["wide llama, 8 kv heads"].declared, cluster_of(2)
    costs, sent, peaks, heads = [], [], [], 16
    for update in ("muon", "muon+qk_clip"):
        plan = zero("zero1", (2,), mapping=mapping, update=update, recompute=("layers.0",))
        program = build(cluster, plan, specs, 1, 512)
        work = work_of(cluster, plan, specs[1].operations, 512)
        costs.append(step_costs(program, work))
        sent.append(program.sent_bytes[MessageClass.CONTROL, "package"])
        peaks.append(activations_of(work, specs[1], "cuda").forward_peak_bytes)
    plain, clipped = costs
    assert all(0 < plain.forward_s[block] < clipped.forward_s[block] for block in (1, 2))
    assert clipped.recompute_s(1) == pytest.approx(plain.recompute_s(1), rel=1e-12)
    assert sent[1] - sent[0] == 8 * heads
    assert peaks[1] > peaks[0]


REFUSED = {
    "linear": "block.1 has a query norm behind the product",
    "toy": "block.1 has no softmax attention",
    "wide qwen3, 2 kv heads": "block.1 has a query norm behind the product",
    "llama, frozen layer": "does not train attention.query.weight",
}


@pytest.mark.parametrize("model", REFUSED)
def test_refused_in_one_line(model: str) -> None:
    specs = MODELS[model].declared or describe(MODELS[model].blocks(torch.float64), "abcde")
    with pytest.raises(PlanError, match=r"optimizer\.qk_clip: ") as error:
        validate(cluster_of(1), zero("ddp", (1,), update="adamw+qk_clip"), specs)
    assert REFUSED[model].removeprefix("block.1") in str(error.value)
    assert "\n" not in str(error.value)
