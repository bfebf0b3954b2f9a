"""Losses of token numbers: the numbers and their gradients, and steps that equal plain PyTorch under every plan."""

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from terrace.base.errors import ModelError
from terrace.cluster.cluster import Cluster
from terrace.launch.start import LocalPool, World
from terrace.model import loss_chunks
from terrace.model.decoder import Head, token_loss
from terrace.plan.plan import Plan
from terrace.runtime.batch import Batch
from terrace.runtime.engine import Engine
from terrace.runtime.objective import TokenObjective, cross_entropy
from terrace.runtime.setup import Blocks, Training, Workload
from terrace.runtime.tensor import loss
from terrace.runtime.token_numbers import OPERANDS, TokenNumbers, token_numbers
from tests.support.allocations import allocated, seeded
from tests.support.parity import (
    ADAMW,
    NUM_STEPS,
    Case,
    engine_of,
    exact,
    flatten,
    gathered,
    make_adamw,
    of_size,
    rows_of_all,
    trainable,
)
from tests.support.pipelines import ALONE, OUTER, pipelined
from tests.support.toy_tables import VOCAB
from tests.support.toys import MODELS, cluster_of, make_batch, run_blocks

ROWS = 8  # of a global batch
TOLERANCE = 1e-10
HIDDEN = 6


def whole_numbers(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of whole logits (..., V), by their definitions."""
    log_chances = logits.log_softmax(-1)
    counted = labels != -100
    chosen = log_chances.gather(-1, labels.masked_fill(~counted, 0).unsqueeze(-1)).squeeze(-1)
    entropies = -(log_chances.exp() * log_chances).sum(-1)
    return chosen.masked_fill(~counted, 0.0), entropies.masked_fill(~counted, 0.0)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 30),
    vocab=st.integers(2, 20),
    rows=st.integers(1, 35),
    ignored=st.sampled_from([0.0, 0.5, 1.0]),
    of_log_probs=st.sampled_from([0.0, 1.0]),
    of_entropies=st.sampled_from([0.0, 0.3]),
)
def test_any_chunk_gives_the_numbers_of_whole_logits(
    tokens: int, vocab: int, rows: int, ignored: float, of_log_probs: float, of_entropies: float
) -> None:
    hidden = torch.randn(1, tokens, HIDDEN, generator=seeded(1), dtype=torch.float64, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(vocab, HIDDEN, generator=seeded(2), dtype=torch.float64))
    labels = torch.randint(0, vocab, (1, tokens), generator=seeded(3))
    labels = labels.masked_fill(torch.rand(labels.shape, generator=seeded(4)) < ignored, -100)
    factors = torch.randn(2, 1, tokens, generator=seeded(5), dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(loss_chunks.CHUNK_NUMEL, "cpu", rows * vocab)
        found = token_numbers(hidden, weight, labels)
    assert found.entropies is not None
    wanted = whole_numbers(hidden @ weight.t(), labels)
    gradients = []
    for log_probs, entropies in ((found.log_probs, found.entropies), wanted):
        loss = of_log_probs * (factors[0] * log_probs).sum() + of_entropies * (factors[1] * entropies).sum()
        gradients.append(torch.autograd.grad(loss, (hidden, weight)))
    for mine, theirs in zip((found.log_probs, found.entropies, *gradients[0]), (*wanted, *gradients[1]), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_operands_of_a_part_are_no_more_than_is_counted(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that on a GPU, where parts are smaller by their number, a chunk takes the bytes of `chunk_bytes`."""
    rows, vocab = 64, 4096
    assert loss_chunks.part_rows(rows, vocab, "cuda", 8) == 8
    monkeypatch.setattr(loss_chunks, "CACHED_NUMEL", rows * vocab)  # all rows are one part
    copy_bytes = 1.02 * rows * vocab * 4
    hidden = torch.randn(1, rows, HIDDEN, dtype=dtype, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(vocab, HIDDEN, dtype=dtype))
    labels = torch.randint(0, vocab, (1, rows))
    logits_bytes = rows * vocab * dtype.itemsize
    forward, _, found = allocated(lambda: token_numbers(hidden, weight, labels))
    assert found.entropies is not None
    total = found.log_probs.sum() + found.entropies.sum()
    backward, _, _ = allocated(lambda: torch.autograd.backward(total))
    assert forward - logits_bytes <= OPERANDS * copy_bytes
    assert backward <= OPERANDS * copy_bytes
    assert max(forward - logits_bytes, backward) > (OPERANDS - 1) * copy_bytes, "fewer would do"
    # The same of a vocabulary over tensor ranks.
    logits, here, numbers = torch.randn(rows, vocab).to(dtype), torch.ones(rows, dtype=torch.bool), torch.zeros(3, rows)
    taken, _, _ = allocated(lambda: loss._take_numbers(logits, labels[0], here, numbers))
    turned, _, _ = allocated(lambda: loss._to_gradient(logits, labels[0], here, numbers[0], numbers[1], vocab))
    assert max(taken, turned) <= loss.OPERANDS * copy_bytes
    assert max(taken, turned) > 0.9 * copy_bytes * (loss.OPERANDS if dtype == torch.bfloat16 else 1)


def test_a_word_without_any_chance_makes_no_nan() -> None:
    weight = torch.nn.Parameter(torch.tensor([[1.0], [0.0], [-torch.inf]], dtype=torch.float64))
    hidden = torch.ones(1, 1, 1, dtype=torch.float64, requires_grad=True)
    found = token_numbers(hidden, weight, torch.tensor([[0]]))
    two = torch.tensor([1.0, 0.0], dtype=torch.float64).log_softmax(0)
    assert found.log_probs.item() == pytest.approx(two[0].item(), rel=1e-12)
    assert found.entropies is not None
    assert found.entropies.item() == pytest.approx(-(two.exp() * two).sum().item(), rel=1e-12)


def test_entropies_of_large_logits_in_fp32_do_not_cancel() -> None:
    logits = torch.randn(1, 4, 50, generator=seeded(1), dtype=torch.float64)
    _, wanted = whole_numbers(logits, torch.zeros(1, 4, dtype=torch.int64))
    # The same distributions, from logits around 1,000: the last hidden value is 1,000 and has a weight of 1.
    hidden = torch.cat([torch.eye(4), torch.full((4, 1), 1000.0)], 1)[None]
    weight = torch.nn.Parameter(torch.cat([logits[0].t().float(), torch.ones(50, 1)], 1))
    found = token_numbers(hidden, weight, torch.zeros(1, 4, dtype=torch.int64))
    assert found.entropies is not None
    # The logits themselves are rounded to 6e-5.
    torch.testing.assert_close(found.entropies.double(), wanted, rtol=0, atol=5e-4)


def test_weights_may_sum_to_less_than_one() -> None:
    tokens, labels = make_batch(0, 1)
    found = []
    for weight in (1.0, 1e-3):
        engine = engine_with(TokenObjective(cross_entropy))
        weights = torch.full(labels.shape, weight, dtype=torch.float64)
        found.append(engine.step([Batch(tokens, labels, weights=weights)], ADAMW.lr))
        engine.close()
    assert found[1].loss == pytest.approx(1e3 * found[0].loss, rel=1e-12)
    assert found[1].grad_norm == pytest.approx(1e3 * found[0].grad_norm, rel=1e-9)


def clipped(numbers: TokenNumbers, batch: Batch) -> Tensor:
    """A clipped policy loss with advantages and old log-probabilities of tokens, and an entropy where there is one."""
    ratio = (numbers.log_probs - batch.columns["old"]).exp()
    advantages = batch.columns["advantage"]
    gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    spread = 0.0 if numbers.entropies is None else 0.1 * (batch.columns["bonus"] * numbers.entropies).sum()
    return -(gain * (batch.labels != -100)).sum() - spread


def rollout(step: int, bonus: float) -> Batch:
    """A global batch with columns, and weights as of a mean over responses: 1 / tokens of the row."""
    inputs, labels = make_batch(step, ROWS)
    draw = seeded(100 + step)
    columns = {
        "advantage": torch.randn(labels.shape, generator=draw, dtype=torch.float64),
        "old": -3.0 + 0.2 * torch.randn(labels.shape, generator=draw, dtype=torch.float64),
        "bonus": torch.full(labels.shape, bonus, dtype=torch.float64),
    }
    counts = (labels != -100).sum(1, keepdim=True)
    weights = (1.0 / counts.clamp(min=1).double()).expand(labels.shape)
    return Batch(inputs, labels, columns=columns, weights=weights)


def cut(batch: Batch, rows: slice) -> Batch:
    columns = {name: column[rows] for name, column in batch.columns.items()}
    assert batch.weights is not None
    return Batch(batch.inputs[rows], batch.labels[rows], columns=columns, weights=batch.weights[rows])


@cache
def serial(model_name: str, bonus: float) -> tuple[list[float], list[float], Tensor, Tensor]:
    """Losses, norms, parameters and the log-probabilities after the last step, in plain PyTorch on whole batches."""
    model = MODELS[model_name]
    blocks = model.blocks(torch.float64)
    parameters = trainable(blocks)
    optimizer, losses, norms = make_adamw(parameters), [], []
    for step in range(NUM_STEPS):
        batch = rollout(step, bonus)
        optimizer.zero_grad()
        numbers = TokenNumbers(*whole_numbers(run_blocks(blocks, batch.inputs), batch.labels))
        num_responses = sum(bool((row != -100).any()) for row in batch.labels)
        loss = clipped(numbers, batch) / num_responses
        torch.autograd.backward(loss)
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, ADAMW.clip)))
        optimizer.step()
        losses.append(float(loss.detach()))
    batch = rollout(NUM_STEPS, bonus)
    with torch.no_grad():
        log_probs, _ = whole_numbers(run_blocks(blocks, batch.inputs), batch.labels)
    return losses, norms, flatten(blocks), log_probs


def trained(
    world: World, cluster: Cluster, plan: Plan, num_micros: int, model_name: str, bonus: float
) -> tuple[list[float], list[float], Tensor, dict[int, Tensor]]:
    """The same on this rank of a plan; log-probabilities by row of the global batch."""
    blocks = MODELS[model_name].blocks(torch.float64)
    case = Case(plan, num_micros=num_micros, model=model_name)
    engine = engine_of(world, cluster, case, blocks, objective=TokenObjective(clipped))
    layout, size = engine.program.layout, ROWS // (engine.program.layout.data_degree * num_micros)
    firsts = [size * (micro * layout.data_degree + layout.data_rank(world.rank)) for micro in range(num_micros)]

    def own(step: int) -> list[Batch]:
        return [cut(rollout(step, bonus), slice(first, first + size)) for first in firsts]

    results = [engine.step(own(step), ADAMW.lr) for step in range(NUM_STEPS)]
    scores = engine.score(own(NUM_STEPS))
    engine.check_bytes()
    rows = {first + row: x for first, each in zip(firsts, scores, strict=False) for row, x in enumerate(each.log_probs)}
    parameters = gathered(engine, blocks)
    engine.close()
    return [result.loss for result in results], [result.grad_norm for result in results], parameters, rows


TENSOR = {"package": {"tensor": 2}}
CASES = [
    ((1,), of_size(exact("ddp", cluster_of(1)), 4), 2, "llama tied"),
    ((2, 2), of_size(exact("zero3", cluster_of(2, 2)), 1), 2, "llama tied"),
    ((2, 2), of_size(exact("ddp", cluster_of(2, 2), recompute=("*",), unit=2), 1), 2, "gpt2"),
    ((2, 2), of_size(pipelined("zero2", OUTER, "zb-h1"), 1), 4, "llama tied"),
    ((4,), of_size(pipelined("ddp", ALONE, "1f1b", unit=2), 2), 4, "gpt2"),
    ((2, 2), of_size(exact("zero3", cluster_of(2, 2), mapping=TENSOR), 2), 2, "llama tied"),
]


@pytest.mark.parametrize("small", [pytest.param(False, marks=pytest.mark.nightly), True])
@pytest.mark.parametrize(("sizes", "plan", "num_micros", "model"), CASES)
def test_steps_and_scores_equal_plain_torch(
    pool: LocalPool, sizes: Sequence[int], plan: Plan, num_micros: int, model: str, small: bool
) -> None:
    cluster, bonus = cluster_of(*sizes), 0.0 if plan.mapping == TENSOR else 1.0
    losses, norms, parameters, log_probs = serial(model, bonus)
    run = trained_in_small_chunks if small else trained
    found = pool.run(cluster.world_size, run, cluster, plan, num_micros, model, bonus, timeout_s=120.0)
    scored = rows_of_all(found, losses, norms, parameters)
    assert sorted(scored) == list(range(ROWS))
    torch.testing.assert_close(torch.stack([scored[row] for row in range(ROWS)]), log_probs, rtol=0, atol=TOLERANCE)


def trained_in_small_chunks(world: World, *arguments: object) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(loss_chunks.CHUNK_NUMEL, "cpu", 2 * VOCAB)
        return trained(world, *arguments)  # type: ignore[arg-type]


def engine_with(objective: object) -> Engine:
    model, cluster = MODELS["llama tied"], cluster_of(1)
    return Engine(
        Blocks(model.blocks(torch.float64)),
        Workload(cluster=cluster, plan=exact("ddp", cluster), num_micros=1),
        objective,  # type: ignore[arg-type]
        Training(optimizer=ADAMW),
    )


def test_cross_entropy_of_numbers_is_the_token_loss() -> None:
    tokens, labels = make_batch(0, 1)
    found = []
    for objective in (token_loss, TokenObjective(cross_entropy)):
        engine = engine_with(objective)
        found.append(engine.step([Batch(tokens, labels)], ADAMW.lr))
        engine.close()
    plain, numbers = found
    assert numbers.loss == pytest.approx(plain.loss, abs=1e-12)
    assert numbers.grad_norm == pytest.approx(plain.grad_norm, abs=1e-12)
    assert numbers.num_tokens == plain.num_tokens


def test_logits_are_never_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("whole logits")

    engine = engine_with(TokenObjective(cross_entropy))
    monkeypatch.setattr(Head, "forward", refuse)
    tokens, labels = make_batch(0, 1)
    engine.step([Batch(tokens, labels)], ADAMW.lr)
    (scores,) = engine.score([Batch(tokens, labels)])
    assert scores.log_probs.shape == labels.shape
    engine.close()


def test_what_cannot_be_is_refused() -> None:
    tokens, labels = make_batch(0, 1)
    engine = engine_with(token_loss)
    with pytest.raises(ModelError, match="give it a TokenObjective"):
        engine.score([Batch(tokens, labels)])
    engine.close()
    engine = engine_with(TokenObjective(clipped))
    with pytest.raises(ModelError, match=r"column advantage of a batch is \(1, 3\)"):
        engine.step([Batch(tokens, labels, columns={"advantage": torch.zeros(1, 3)})], ADAMW.lr)
    engine.close()
    cluster = cluster_of(1)
    engine = Engine(
        Blocks([torch.nn.Linear(2, 2)]),
        Workload(cluster=cluster, plan=exact("ddp", cluster), num_micros=1),
        TokenObjective(cross_entropy),
        Training(optimizer=ADAMW),
    )
    with pytest.raises(ModelError, match="not Linear"):
        engine.step([Batch(torch.zeros(1, 2).double(), torch.zeros(1, 2).long())], ADAMW.lr)
    engine.close()
