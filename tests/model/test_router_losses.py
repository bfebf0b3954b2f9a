"""Losses of routers on one device, against numbers worked out by hand and finite differences."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from terrace.base.errors import ConfigError
from terrace.model.balance import FIGURES, BalanceConfig
from terrace.model.experts.gating import Gating, Passage
from terrace.model.experts.losses import add_losses, choices_by_sequence, loads_of, share_loss, z_loss
from terrace.model.experts.mixture import Mixture
from terrace.runtime.batch import places_of, shares_of
from tests.support.mixtures import PLAIN, mixture


def sequence_loss(scores: Tensor, experts: Tensor, sequences: Tensor, num_sequences: int) -> Tensor:
    """The loss of tokens with a weight of 1."""
    choices = choices_by_sequence(experts, sequences, num_sequences, scores.shape[1])
    return share_loss(scores, loads_of(choices, scores.dtype)[sequences])


def test_the_sequence_loss_by_hand() -> None:
    """Two sequences of 2 and 1 tokens, 3 experts of which a token passes 2."""
    scores = torch.tensor([[4.0, 3.0, 1.0], [1.0, 2.0, 5.0], [1.0, 1.0, 2.0]])
    experts = torch.tensor([[0, 1], [2, 1], [2, 0]])
    # First: choices 1, 2, 1 of k S = 4, so f = 3/4, 6/4, 3/4; shares of both tokens sum to 5/8, 5/8, 6/8.
    first = 3 / 4 * 5 / 8 + 6 / 4 * 5 / 8 + 3 / 4 * 6 / 8
    # Second: choices 1, 0, 1 of k S = 2, so f = 3/2, 0, 3/2; shares 1/4, 1/4, 2/4.
    second = 3 / 2 * 1 / 4 + 3 / 2 * 2 / 4
    found = sequence_loss(scores, experts, torch.tensor([0, 0, 1]), 2)
    assert float(found) == pytest.approx(first + second)
    # A sequence without a token adds nothing.
    assert float(sequence_loss(scores, experts, torch.tensor([0, 0, 2]), 3)) == pytest.approx(first + second)


def test_sigmoids_that_underflow_have_a_sequence_loss() -> None:
    scores = torch.full((3, 4), -200.0).sigmoid()
    found = sequence_loss(scores, torch.tensor([[0], [1], [2]]), torch.zeros(3, dtype=torch.int64), 1)
    assert float(found) == 0.0


def test_even_choices_have_the_least_sequence_loss() -> None:
    """alpha a token where choices and scores are even (2412.19437, below equation 20)."""
    experts = torch.tensor([[0], [1], [2], [3]])
    even = sequence_loss(torch.ones(4, 4), experts, torch.zeros(4, dtype=torch.int64), 1)
    assert float(even) == pytest.approx(4.0)
    alike = torch.tensor([[8.0, 1.0, 1.0, 1.0]]).expand(4, 4)
    assert float(sequence_loss(alike, experts * 0, torch.zeros(4, dtype=torch.int64), 1)) > 4.0


def test_the_z_loss_by_hand() -> None:
    logits = torch.tensor([[0.0, 0.0], [math.log(3.0), math.log(5.0)]])
    assert float(z_loss(logits)) == pytest.approx(math.log(2) ** 2 + math.log(8) ** 2)
    weighed = z_loss(logits, torch.tensor([0.5, 2.0], dtype=torch.float64))
    assert float(weighed) == pytest.approx(math.log(2) ** 2 / 2 + 2 * math.log(8) ** 2)


def test_the_step_loss_by_hand() -> None:
    """f_i = E n_i / sum n of the choices before; without any the loss and its gradient are 0."""
    scores = torch.tensor([[4.0, 3.0, 1.0], [1.0, 2.0, 5.0]], requires_grad=True)
    loads = loads_of(torch.tensor([3, 1, 0]), torch.float32)
    assert loads.tolist() == pytest.approx([9 / 4, 3 / 4, 0])
    weights = torch.tensor([1.0, 0.5])
    expected = 9 / 4 * (4 / 8 + 1 / 8 / 2) + 3 / 4 * (3 / 8 + 2 / 8 / 2)
    assert float(share_loss(scores.detach(), loads, weights)) == pytest.approx(expected)
    first = share_loss(scores, loads_of(torch.zeros(3, dtype=torch.int64), torch.float32))
    torch.autograd.backward(first)
    assert float(first.detach()) == 0
    assert scores.grad is not None
    assert not scores.grad.any()


def test_shares() -> None:
    """Labels of a document over its tokens: masked prompts take part, with the weight of the labels."""
    labels = torch.tensor([[-100, -100, 7, 7], [-100, 7, -100, 7]])
    assert shares_of(labels).tolist() == [[0.5] * 4, [0.5] * 4]
    positions = torch.tensor([[0, 0, 1, 2], [0, 1, 2, 0]])
    assert shares_of(labels, positions).tolist() == [
        [0, pytest.approx(2 / 3), pytest.approx(2 / 3), pytest.approx(2 / 3)],
        [pytest.approx(1 / 3), pytest.approx(1 / 3), pytest.approx(1 / 3), 1],
    ]
    assert shares_of(labels.clamp(min=0), ignored=0).equal(shares_of(labels))


def test_counts_do_not_wait_for_the_device() -> None:
    """No shape follows from values, which tensors without values would refuse."""
    labels = torch.empty(2, 4, dtype=torch.int64, device="meta")
    assert shares_of(labels, labels).shape == (2, 4)
    assert choices_by_sequence(labels, labels[:, 0], 3, 5).shape == (3, 5)


def test_losses_act_by_their_gradient_and_are_counted_once() -> None:
    x, sums = torch.tensor([2.0, 3.0], requires_grad=True), torch.zeros(2, dtype=torch.float64)

    def passed() -> Tensor:
        return add_losses(x * 10, torch.stack([(x**2).sum(), x.prod()]), sums)

    with torch.no_grad():  # the forward of a recomputed block
        passed()
    weights = passed()
    assert weights.tolist() == [20.0, 30.0]
    assert sums.tolist() == [0.0, 0.0]
    torch.autograd.backward(weights.sum())
    assert x.grad is not None
    assert x.grad.tolist() == [10 + 4 + 3, 10 + 6 + 2]
    assert sums.tolist() == [13.0, 6.0]


def mixture_with(gating: Gating) -> Mixture:
    torch.manual_seed(0)
    found = Mixture(mixture(replace(PLAIN, shared_size=6), hidden_size=8), device="cpu", dtype=torch.float64)
    for parameter in found.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    found.router.gating = gating
    gating.trains = True
    return found


@pytest.mark.parametrize(
    "balance",
    [BalanceConfig(sequence=0.7), BalanceConfig(z=0.3), BalanceConfig(step=0.9), BalanceConfig(sequence=0.7, z=0.3)],
)
def test_gradients_of_losses_equal_finite_differences(balance: BalanceConfig) -> None:
    gating = Gating(balance)
    gating.choices = {0: torch.tensor([3, 0, 5, 1, 1, 2, 0, 0])}
    module = mixture_with(gating)
    weights = torch.tensor([1.0, 1.0, 1.0, 0.5, 0.5, 0.5], dtype=torch.float64)
    gating.passage = Passage(None, torch.tensor([0, 0, 0, 1, 1, 1]), 2, weights=weights)
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)

    def loss_of(inputs: Tensor) -> float:
        gating.sums.zero_()
        output = module(inputs)
        torch.autograd.backward(output.sum())
        return float(output.detach().sum() + gating.sums.sum())

    loss_of(x)
    assert x.grad is not None
    gradient, step = x.grad.clone(), 1e-6
    for index in ((0, 0, 0), (0, 2, 5), (1, 1, 3)):
        ends = []
        for shift in (step, -step):
            moved = x.detach().clone()
            moved[index] += shift
            ends.append(loss_of(moved.requires_grad_()))
        assert float(gradient[index]) == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=1e-6)


def test_tokens_that_take_no_part_meet_the_shared_expert_alone() -> None:
    gating = Gating(BalanceConfig(z=1.0))
    module = mixture_with(gating)
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    gating.passage = Passage(torch.tensor([1, 2, 4]), torch.tensor([0, 0, 0]), 1)
    output = module(x)
    torch.autograd.backward(output.sum())
    with torch.no_grad():
        expected = z_loss(x[0, [1, 2, 4]] @ module.router.weight.t())
    assert float(gating.sums[FIGURES.index("z")]) == pytest.approx(float(expected))
    gating.passage = None
    whole = module(x)
    assert module.shared is not None
    assert torch.equal(output[0, [0, 3]], module.shared(x)[0, [0, 3]])
    assert torch.allclose(output[0, [1, 2, 4]], whole[0, [1, 2, 4]], rtol=0, atol=1e-14)


def test_no_token_takes_part() -> None:
    gating = Gating(BalanceConfig(sequence=1.0, z=1.0))
    module = mixture_with(gating)
    gating.passage = Passage(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), 1)
    torch.autograd.backward(module(torch.randn(1, 3, 8, dtype=torch.float64)).sum())
    assert gating.sums.tolist() == [0.0] * len(FIGURES)


@pytest.mark.parametrize(
    ("labels", "positions", "found"),
    [
        ([[7, -100], [-100, -100]], None, [[6, 7], [-1, -1]]),
        (
            [[7, -100, 7, -100], [-100, -100, 7, -100]],
            [[0, 0, 1, 2], [0, 1, 0, 0]],
            [[12, 13, 14, 15], [-1, -1, 18, -1]],
        ),
    ],
)
def test_places(labels: list[list[int]], positions: list[list[int]] | None, found: list[list[int]]) -> None:
    """Documents without a label and padding have none; a prompt before labels has."""
    given = () if positions is None else (torch.tensor(positions),)
    assert places_of(torch.tensor([3, 4]), torch.tensor(labels), *given).tolist() == found


@pytest.mark.parametrize("value", [-1.0, 1e300, math.inf, math.nan])
@pytest.mark.parametrize("of", [lambda value: BalanceConfig(z=value), lambda value: BalanceConfig(sequence=value)])
def test_factors_are_numbers(value: float, of: Callable[[float], BalanceConfig]) -> None:
    with pytest.raises(ConfigError, match=r"balance.(z|sequence) = .* must be zero or a positive number"):
        of(value)
