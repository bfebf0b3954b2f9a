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
from terrace.runtime.distilled import HIDDEN, IDS, LOG_PROBS, Blend, distilled
from terrace.runtime.hidden import OutputMatrix, reading
from terrace.runtime.objective import TokenObjective, cross_entropy
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


def test_the_most_probable_tokens_stand_for_a_teacher_that_leaves_the_rest_to_the_student() -> None:
    tokens, vocab, k = 12, 30, 5
    head, blend = head_of(vocab), Blend(weight=0.8, temperature=2.0)
    x, labels, hidden, matrix = drawn(tokens, vocab, torch.float64)
    log_p = torch.log_softmax(hidden.flatten(0, 1) @ matrix.t() / blend.temperature, -1)
    kept = log_p.topk(k)
    columns = {IDS: kept.indices.int().view(1, tokens, k), LOG_PROBS: kept.values.view(1, tokens, k)}
    found = run_in_chunks(head, x, Batch(labels, labels, columns=columns), blend, OutputMatrix())
    # All other tokens have the student's own proportions.
    log_q = torch.log_softmax(head(x).detach().flatten(0, 1) / blend.temperature, -1)
    others = log_q.scatter(-1, kept.indices, -torch.inf)
    rest = (1 - kept.values.exp().sum(-1, keepdim=True)).log()
    filled = (others - others.logsumexp(-1, keepdim=True) + rest).scatter(-1, kept.indices, kept.values)
    for mine, theirs in zip(found, whole(head, x, labels, filled, blend), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)
    exact = run_in_chunks(
        head,
        x,
        Batch(labels, labels, columns={HIDDEN: hidden}),
        blend,
        OutputMatrix(matrix, slice(0, vocab)),
    )
    assert found[0] < exact[0], "a lower bound"


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
