"""The loss in chunks is the loss of whole logits: value, gradients, memory that no vocabulary makes larger."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from terrace.cluster.cluster import Cluster
from terrace.launch.start import LocalPool, World
from terrace.model import loss_chunks
from terrace.model.config import ModelConfig, parse_model
from terrace.model.decoder import Head, token_loss
from terrace.runtime.batch import Batch
from terrace.runtime.engine import Engine
from terrace.runtime.head import chunked_head
from terrace.runtime.setup import Blocks, Training, Workload
from tests.support.adopted import Adopted
from tests.support.allocations import allocated, seeded
from tests.support.parity import ADAMW, Case, Outcome, check, exact, train
from tests.support.pipelines import ALONE, OUTER, pipelined
from tests.support.toy_tables import VOCAB
from tests.support.toys import MODELS, SEQUENCE, cluster_of, make_batch

HIDDEN = 16
TOLERANCE = 1e-12


def config(vocab: int) -> ModelConfig:
    sizes = {"vocab_size": vocab, "hidden_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": 2}
    return parse_model({"model_type": "llama", "intermediate_size": 8, "num_key_value_heads": 2, **sizes})


def head_of(vocab: int, dtype: torch.dtype = torch.float64) -> Head:
    head = Head(config(vocab), None, dtype=dtype)
    for parameter in head.parameters():
        parameter.data = torch.randn(parameter.shape, generator=seeded(1), dtype=torch.float64).to(dtype)
    return head


def labels_of(tokens: int, vocab: int, ignored: float) -> Tensor:
    labels = torch.randint(0, vocab, (1, tokens), generator=seeded(2))
    return labels.masked_fill(torch.rand(labels.shape, generator=seeded(3)) < ignored, -100)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows at a time of the tiny vocabularies here."""
    monkeypatch.setitem(loss_chunks.CHUNK_NUMEL, "cpu", 2 * VOCAB)


def whole(head: nn.Module, x: Tensor, labels: Tensor) -> list[Tensor]:
    """Loss and gradients of the input and the parameters, by autograd through all logits."""
    x = x.detach().requires_grad_()
    loss = token_loss(head(x), labels)
    torch.autograd.backward(loss)
    return [loss.detach(), *(each.grad for each in (x, *head.parameters()) if each.grad is not None)]


def in_chunks(head: nn.Module, x: Tensor, labels: Tensor, num_times: int = 1) -> list[Tensor]:
    """The same as the runtime computes it, from a backward that holds its weight gradients."""
    adopted = Adopted.of(head)
    run = chunked_head(adopted.module, token_loss)
    assert run is not None
    x = x.detach().requires_grad_()
    flat = next(flat for flat in adopted.flats if flat.parameters[0].requires_grad)
    flat.gradient.views.open(torch.full_like(flat.full, torch.nan))
    for _ in range(num_times):
        x.grad = None
        queue = adopted.weights.queue(hold=True)
        with adopted.weights.recorded_in(queue):
            loss = run(x, labels)
        assert not len(queue), "nothing of the size of the logits is held"
    return [loss, *(each.grad for each in (x, *adopted.module.parameters()) if each.grad is not None)]


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 40),
    vocab=st.integers(2, 30),
    rows=st.integers(1, 45),
    ignored=st.sampled_from([0.0, 0.5, 1.0]),
    frozen=st.booleans(),
)
def test_any_chunk_gives_the_same_numbers(tokens: int, vocab: int, rows: int, ignored: float, frozen: bool) -> None:
    head = head_of(vocab)
    head.weight.requires_grad = not frozen
    x, labels = (
        torch.randn(1, tokens, HIDDEN, generator=seeded(4), dtype=torch.float64),
        labels_of(tokens, vocab, ignored),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(loss_chunks.CHUNK_NUMEL, "cpu", rows * vocab)
        found = in_chunks(head, x, labels)
    for mine, theirs in zip(found, whole(head, x, labels), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=TOLERANCE, atol=TOLERANCE)


def test_a_second_micro_batch_is_added() -> None:
    head, labels = head_of(VOCAB), labels_of(9, VOCAB, 0.2)
    x = torch.randn(1, 9, HIDDEN, generator=seeded(4), dtype=torch.float64)
    once, twice = in_chunks(head, x, labels), in_chunks(head, x, labels, num_times=2)
    for mine, theirs in zip(twice[2:], once[2:], strict=True):
        torch.testing.assert_close(mine, 2 * theirs, rtol=TOLERANCE, atol=TOLERANCE)


def test_many_chunks_in_bf16_round_the_weight_gradient_once(small_chunks: None) -> None:
    head, labels = head_of(VOCAB, torch.bfloat16), labels_of(600, VOCAB, 0.2)
    x = torch.randn(1, 600, HIDDEN, generator=seeded(4)).bfloat16()
    found, exactly = in_chunks(head, x, labels), whole(head.double(), x.double(), labels)
    assert found[0].dtype is torch.float32
    assert found[0].double() == pytest.approx(exactly[0].item(), rel=0.02)
    wanted = exactly[2]
    error = float((found[2].double() - wanted).norm() / wanted.norm())
    assert error < 0.01, error  # 300 additions in bf16 would lose several times as much


def test_a_large_logit_overflows_nothing() -> None:
    head = head_of(VOCAB, torch.float32)
    x = torch.full((1, 2, HIDDEN), 1e4)
    head.weight.data.mul_(1e4)
    loss, gradient, *_ = in_chunks(head, x, labels_of(2, VOCAB, 0.0))
    assert loss.isfinite()
    assert gradient.isfinite().all()


def test_another_loss_or_head_is_left_to_autograd() -> None:
    class Wider(Head):
        pass

    head = head_of(VOCAB)
    assert chunked_head(head, lambda output, labels: output.sum()) is None
    assert chunked_head(Wider(config(VOCAB), head.weight), token_loss) is None


CASES = [
    ((2, 2), Case(exact("zero3", cluster_of(2, 2)), num_micros=2, model="llama tied")),
    ((2, 2), Case(exact("ddp", cluster_of(2, 2), recompute=("*",)), model="llama, frozen table")),
    ((2, 2), Case(pipelined("zero2", OUTER, "zb-h1"), num_micros=4, model="llama tied")),
    ((4,), Case(pipelined("ddp", ALONE, "1f1b", unit=2), num_micros=4, model="gpt2")),
    ((2, 2), Case(exact("zero3", cluster_of(2, 2), mapping={"package": {"tensor": 2}}), model="llama tied")),
    ((2, 2), Case(exact("ddp", cluster_of(2, 2), mapping={"package": {"tensor": 2}}, recompute=("*",)), model="gpt2")),
]


def train_in_small_chunks(world: World, cluster: Cluster, cases: Sequence[Case]) -> list[Outcome]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(loss_chunks.CHUNK_NUMEL, "cpu", 2 * VOCAB)
        return train(world, cluster, cases)


@pytest.mark.parametrize(("sizes", "case"), CASES)
def test_plans_train_the_same_in_several_chunks(pool: LocalPool, sizes: tuple[int, ...], case: Case) -> None:
    check(pool, cluster_of(*sizes), [case], train_in_small_chunks)


def peak_bytes(vocab: int, tokens: int) -> int:
    head = head_of(vocab, torch.float32)
    adopted = Adopted.of(head)
    run = chunked_head(adopted.module, token_loss)
    assert run is not None
    (flat,) = adopted.flats
    flat.gradient.views.open(torch.empty_like(flat.full))
    x = torch.randn(1, tokens, HIDDEN, generator=seeded(4)).requires_grad_()
    with adopted.weights.recorded_in(adopted.weights.queue(hold=False)):
        peak, _, _ = allocated(lambda: run(x, labels_of(tokens, vocab, 0.0)))
    return peak


def test_memory_does_not_grow_with_the_vocabulary() -> None:
    """Parameters and their gradients are there before: the same memory is allocated, row by row."""
    small, large = peak_bytes(4096, 2048), peak_bytes(32768, 2048)
    assert abs(large - small) < 0.05 * small
    assert large < 2048 * 32768 * 4 / 5, "logits are never there whole"


def test_a_step_takes_the_loss_in_its_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engine and executor use the chunked form: whole logits are never asked for."""
    model, cluster = MODELS["llama tied"], cluster_of(1)
    plan = exact("ddp", cluster)
    engine = Engine(
        Blocks(model.blocks(torch.float64)),
        Workload(cluster=cluster, plan=plan, num_micros=1),
        model.objective,
        Training(optimizer=ADAMW),
    )

    def refuse(*_: object) -> None:
        raise AssertionError("whole logits")

    monkeypatch.setattr(Head, "forward", refuse)
    tokens, labels = make_batch(0, 1)
    assert engine.step([Batch(tokens, labels)], ADAMW.lr).num_tokens == SEQUENCE - 3
    engine.close()
