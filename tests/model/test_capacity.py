"""The capacity of experts, and even choices, worked out by hand."""

from dataclasses import replace
from math import comb

import pytest
import torch

from terrace.base.errors import ConfigError
from terrace.model.balance import BalanceConfig
from terrace.model.experts.config import ExpertsConfig
from terrace.model.experts.even import drawn, rows_to_units
from terrace.model.experts.gates import Choice, even
from terrace.model.experts.gating import Gating, Passage, bounded, capacities
from terrace.model.experts.mixture import Mixture
from tests.support.mixtures import GROUPED, PLAIN, mixture

FOUR = ExpertsConfig(num_experts=4, per_token=2, intermediate_size=4)


def test_the_least_weight_is_dropped_first() -> None:
    """C = ceil(k S / E) = 2 in the sequence of 4 tokens, 1 in the one of 2."""
    experts = torch.tensor([[0, 1], [0, 2], [0, 1], [0, 3], [0, 1], [1, 0]])
    weights = torch.tensor([[0.5, 0.5], [0.7, 0.3], [0.5, 0.5], [0.9, 0.1], [0.6, 0.4], [0.5, 0.5]])
    choice, dropped = bounded(Choice(experts, weights), torch.tensor([0, 0, 0, 0, 1, 1]), 2, 1.0, FOUR)
    # Expert 0 keeps 0.9 and 0.7; in the other sequence 0.6 of it, and of expert 1 the 0.5.
    assert choice.experts.tolist() == [[-1, 1], [0, 2], [-1, 1], [0, 3], [0, -1], [1, -1]]
    assert choice.weights.tolist() == [
        pytest.approx(each) for each in ([0, 0.5], [0.7, 0.3], [0, 0.5], [0.9, 0.1], [0.6, 0], [0.5, 0])
    ]
    assert int(dropped) == 4
    assert not choice.is_whole


def test_of_equal_weights_the_later_token_is_dropped() -> None:
    weights = torch.full((4, 1), 0.25)
    config = replace(FOUR, per_token=1)
    choice, _ = bounded(Choice(torch.zeros(4, 1).long(), weights), torch.zeros(4).long(), 1, 2.0, config)
    assert choice.experts.flatten().tolist() == [0, 0, -1, -1]


@pytest.mark.parametrize(
    ("factor", "length", "expected"),
    [(1.0, 8, 4), (1.25, 8, 5), (1.1, 20, 11), (1.1, 21, 12), (0.01, 4, 1), (9.0, 0, 0), (1e300, 8, 8), (1e-300, 8, 1)],
)
def test_capacities(factor: float, length: int, expected: int) -> None:
    """1.1 x 2 x 20 / 4 is 11, although the product of floats is larger."""
    assert capacities(torch.tensor([length]), factor, FOUR).tolist() == [expected]


def test_a_layer_drops_in_training_alone() -> None:
    torch.manual_seed(0)
    module = Mixture(mixture(PLAIN, hidden_size=8), dtype=torch.float64)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x, gating = torch.randn(2, 16, 8, dtype=torch.float64), Gating(BalanceConfig(capacity=1.0))
    whole = module(x)
    module.router.gating = gating
    gating.passage = Passage.of_rows(torch.Size((2, 16)), x.device)
    assert torch.equal(module(x), whole)
    gating.trains = True
    torch.autograd.backward(module(x).sum())
    counts = torch.stack([torch.bincount(each.flatten(), minlength=8) for each in _chosen(module, x).chunk(2)])
    dropped = (counts - 4).clamp(min=0).sum()
    assert int(dropped) > 0
    assert gating.sums.tolist() == [0.0, 0.0, 0.0, float(dropped)]
    assert not torch.equal(module(x), whole)


def _chosen(module: Mixture, x: torch.Tensor) -> torch.Tensor:
    gating, module.router.gating = module.router.gating, None
    tokens = x.flatten(0, 1)
    choice: Choice = module.router(tokens, Passage.of_rows(torch.Size((1, len(tokens))), x.device))
    module.router.gating = gating
    return choice.experts


@pytest.mark.parametrize("value", [-1.0, float("inf")])
def test_capacities_are_numbers(value: float) -> None:
    with pytest.raises(ConfigError, match=r"balance.capacity = .* must be zero or a positive number"):
        BalanceConfig(capacity=value)


@pytest.mark.parametrize(("num_experts", "per_token"), [(8, 2), (12, 5), (6, 6), (128, 8)])
def test_even_choices_reach_every_unit_alike(num_experts: int, per_token: int) -> None:
    config = ExpertsConfig(num_experts=num_experts, per_token=per_token, intermediate_size=4, route="even")
    num_tokens = 3 * num_experts
    scores = torch.rand(num_tokens, num_experts)
    choice = even.instead(Choice(torch.zeros(num_tokens, per_token).long(), scores[:, :per_token], scores), config)
    assert choice.experts.shape == (num_tokens, per_token)
    assert torch.bincount(choice.experts.flatten()).tolist() == [3 * per_token] * num_experts
    assert all(len(set(each)) == per_token for each in choice.experts.tolist())
    chosen = scores.gather(1, choice.experts)
    assert torch.allclose(choice.weights, chosen / chosen.sum(1, keepdim=True))
    for num_units in (each for each in range(1, num_experts + 1) if num_experts % each == 0):
        units = [set(each) for each in (choice.experts // (num_experts // num_units)).tolist()]
        of_unit = [sum(unit in each for each in units) for unit in range(num_units)]
        assert of_unit == [of_unit[0]] * num_units
        assert sum(of_unit) == rows_to_units(num_tokens, num_experts, per_token, num_units)


@pytest.mark.parametrize(("num_experts", "per_token", "num_units"), [(8, 2, 4), (64, 8, 2), (128, 8, 16)])
def test_even_choices_are_near_the_mean_of_even_routing(num_experts: int, per_token: int, num_units: int) -> None:
    size = num_experts // num_units
    mean = num_units * (1 - comb(num_experts - size, per_token) / comb(num_experts, per_token))
    found = rows_to_units(64 * num_experts, num_experts, per_token, num_units) / (64 * num_experts)
    assert found == pytest.approx(mean, rel=0.06)
    assert len({drawn(group, num_experts, per_token) for group in range(64)}) > 1


def test_even_choices_leave_a_gates_weights() -> None:
    """A gate with groups and a bias, whose scores weigh the experts of the table."""
    config = replace(GROUPED, route="even")
    torch.manual_seed(0)
    module = Mixture(mixture(config, hidden_size=8))
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    choice = module.router(torch.randn(8, 8), Passage.of_rows(torch.Size((1, 8)), torch.device("cpu")))
    assert torch.bincount(choice.experts.flatten()).tolist() == [3] * 8
    assert choice.weights.sum(1).tolist() == pytest.approx([1.5] * 8)
