"""The loss of a student in chunks is that of whole logits of both models; no vocabulary makes its memory larger."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from terrace.base.errors import ModelError
from terrace.model import loss_chunks
from terrace.model.config import parse_model
from terrace.model.decoder import Head
from terrace.runtime.batch import Batch
from terrace.runtime.distilled import HIDDEN, IDS, LOG_PROBS, Blend, distilled, of_top_tokens
from terrace.runtime.hidden import OutputMatrix, reading
from terrace.runtime.objective import TokenObjective, cross_entropy
from terrace.train.top_tokens import kept_tokens
from tests.support.adopted import Adopted
from tests.support.allocations import allocated, seeded

WIDTH, OF_TEACHER = 16, 24


def head_of(vocab: int, dtype: torch.dtype = torch.float64) -> Head:
    sizes = {"vocab_size": vocab, "hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = parse_model({"model_type": "llama", "intermediate_size": 8, "num_key_value_heads": 2, **sizes})
    head = Head(config, None, dtype=dtype)
    for parameter in head.parameters():
        parameter.data = 0.5 * torch.randn(parameter.shape, generator=seeded(1), dtype=dtype)
    return head


def drawn(tokens: int, vocab: int, dtype: torch.dtype, ignored: float = 0.2) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Input of the head, labels, the teacher's hidden states and its output matrix."""
    labels = torch.randint(0, vocab, (1, tokens), generator=seeded(2))
    labels = labels.masked_fill(torch.rand(labels.shape, generator=seeded(3)) < ignored, -100)
    shapes = ((1, tokens, WIDTH), (1, tokens, OF_TEACHER), (vocab, OF_TEACHER))
    x, hidden, matrix = (torch.randn(each, generator=seeded(4 + n), dtype=dtype) for n, each in enumerate(shapes))
    return x, labels, hidden, 0.3 * matrix


def run_in_chunks(head: Head, x: Tensor, batch: Batch, blend: Blend, matrix: OutputMatrix) -> list[Tensor]:
    """Loss, gradients of the input and the parameters."""
    adopted = Adopted.of(head)
    objective = distilled(blend)
    objective.matrix.take(matrix)
    run = objective.in_chunks(adopted.module)
    assert run is not None
    (flat,) = adopted.flats
    flat.gradient.views.open(torch.empty_like(flat.full))
    x = x.detach().requires_grad_()
    with adopted.weights.recorded_in(adopted.weights.queue(hold=False)):
        loss = run(x, batch, 1.0)
    return [loss, *(each.grad for each in (x, *adopted.module.parameters()) if each.grad is not None)]


def whole(head: Head, x: Tensor, labels: Tensor, log_p: Tensor, blend: Blend) -> list[Tensor]:
    """The same by autograd through whole logits, from the teacher's log-probabilities (N, V)."""
    x, counted = x.detach().requires_grad_(), labels.flatten() != -100
    logits = head(x).flatten(0, 1)[counted]
    hard = F.cross_entropy(logits, labels.flatten()[counted], reduction="sum")
    log_q = torch.log_softmax(logits / blend.temperature, -1)
    soft = F.kl_div(log_q, log_p[counted], reduction="sum", log_target=True)
    loss = (1 - blend.weight) * hard + blend.weight * blend.temperature**2 * soft
    return [loss.detach(), *torch.autograd.grad(loss, (x, *head.parameters()))]


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(1, 20),
    vocab=st.integers(2, 30),
    rows=st.integers(1, 25),
    weight=st.sampled_from([0.3, 1.0]),
    temperature=st.sampled_from([0.5, 1.0, 3.0]),
    cap=st.sampled_from([0.0, 2.0]),
)
def test_any_chunk_gives_the_loss_of_whole_logits(
    tokens: int, vocab: int, rows: int, weight: float, temperature: float, cap: float
) -> None:
    head, blend = head_of(vocab), Blend(weight=weight, temperature=temperature)
    head.cap = cap
    x, labels, hidden, matrix = drawn(tokens, vocab, torch.float64)
    logits = hidden.flatten(0, 1) @ matrix.t()
    logits = 1.5 * torch.tanh(logits / 1.5)
    if bool((labels == -100).all()):
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(loss_chunks.CHUNK_NUMEL, "cpu", rows * vocab)
        batch = Batch(labels, labels, columns={HIDDEN: hidden})
        found = run_in_chunks(head, x, batch, blend, OutputMatrix(matrix, slice(0, vocab), 1.5))
    wanted = whole(head, x, labels, torch.log_softmax(logits / temperature, -1), blend)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


def test_kept_tokens_give_the_gradient_of_their_weighted_sum() -> None:
    """The most probable tokens count by their probabilities, the drawn ones share what is left."""
    tokens, vocab, k = 12, 30, 9
    head, blend = head_of(vocab), Blend(weight=0.8, temperature=2.0)
    x, labels, hidden, matrix = drawn(tokens, vocab, torch.float64)
    given = OutputMatrix(matrix, slice(0, vocab))
    ids, log_probs = kept_tokens(
        hidden, given, blend.temperature, k, torch.rand(1, tokens, generator=seeded(9)).double()
    )
    log_p = torch.log_softmax(hidden.flatten(0, 1) @ matrix.t() / blend.temperature, -1)
    assert torch.equal(ids[0, :, :7].long(), log_p.topk(7).indices)
    assert not bool((ids[0, :, 7:, None] == ids[0, :, None, :7]).any()), "drawn from the others"
    log_probs = log_p.gather(-1, ids[0].long()).view_as(log_probs)
    batch = Batch(labels, labels, columns={IDS: ids, LOG_PROBS: log_probs})
    found = run_in_chunks(head, x, batch, blend, OutputMatrix())
    x = x.detach().requires_grad_()
    logits, loss = head(x).flatten(0, 1), torch.zeros(()).double()
    for row, label in enumerate(labels.flatten().tolist()):
        if label == -100:
            continue
        log_q = torch.log_softmax(logits[row] / blend.temperature, -1)
        chances = [float(log_p[row, token].exp()) for token in ids[0, row, :7].tolist()]
        chances += [(1 - sum(chances)) / 2] * 2
        for token, chance in zip(ids[0, row].tolist(), chances, strict=True):
            loss = loss + 0.8 * 2.0**2 * chance * (log_p[row, token] - log_q[token])
        loss = loss - 0.2 * torch.log_softmax(logits[row], -1)[label]
    wanted = [loss.detach(), *torch.autograd.grad(loss, (x, *head.parameters()))]
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("k", [1, 3, 12])
def test_kept_tokens_have_the_whole_divergence_as_their_mean(k: int) -> None:
    """Over all places of the first draw, for the loss and its gradient; at a high temperature, too."""
    tokens, vocab, places, t = 6, 40, 4000, 3.0
    _, _, hidden, matrix = drawn(tokens, vocab, torch.float64, ignored=0.0)
    given = OutputMatrix(matrix, slice(0, vocab))
    log_q = torch.log_softmax(torch.randn(tokens, vocab, generator=seeded(8)).double(), -1)
    log_p = torch.log_softmax(hidden.flatten(0, 1) @ matrix.t() / t, -1)
    offsets = ((torch.arange(places).double() + 0.5) / places).repeat_interleave(tokens).view(places, tokens)
    ids, log_probs = kept_tokens(hidden.expand(places, -1, -1), given, t, k, offsets)
    targets = of_top_tokens(ids.flatten(0, 1), log_probs.flatten(0, 1).double())
    known, p = targets(torch.arange(places * tokens), log_q.repeat(places, 1))
    assert p.sum(-1).sub(1).abs().max() < 1e-6
    torch.testing.assert_close(p.view(places, tokens, vocab).mean(0), log_p.exp(), rtol=0, atol=2.0 / places)
    divergences = (p * (known - log_q.repeat(places, 1))).sum(-1).view(places, tokens).mean(0)
    torch.testing.assert_close(divergences, (log_p.exp() * (log_p - log_q)).sum(-1), rtol=1e-3, atol=1e-3)


def peak_bytes(vocab: int, tokens: int) -> int:
    """The peak of the loss and its backward, beside parameters, their gradients and the teacher's matrix."""
    head = head_of(vocab, torch.float32)
    x, labels, hidden, matrix = drawn(tokens, vocab, torch.float32)
    adopted, objective = Adopted.of(head), distilled(Blend(weight=0.5, temperature=2.0))
    objective.matrix.take(OutputMatrix(matrix, slice(0, vocab)))
    run = objective.in_chunks(adopted.module)
    assert run is not None
    (flat,) = adopted.flats
    flat.gradient.views.open(torch.empty_like(flat.full))
    x.requires_grad_()
    batch = Batch(labels, labels, columns={HIDDEN: hidden})
    with adopted.weights.recorded_in(adopted.weights.queue(hold=False)):
        peak, _, _ = allocated(lambda: run(x, batch, 1.0))
    return peak


def test_memory_does_not_grow_with_the_vocabulary() -> None:
    small, large = peak_bytes(8192, 1024), peak_bytes(32768, 1024)
    assert abs(large - small) < 0.01 * small, (small, large)
    assert large < 2 * 1024 * 32768 * 4 / 4, "logits are never there whole"


def test_only_a_reader_has_hidden_states() -> None:
    with pytest.raises(ModelError, match="give it hidden_reader"):
        reading(TokenObjective(cross_entropy), reads_matrix=True, copies=False)
