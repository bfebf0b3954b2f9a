"""A recomputed forward has the choices of the first one, for any scores."""

from dataclasses import replace

import pytest
import torch

from terrace.model.balance import BalanceConfig
from terrace.model.experts.config import ExpertsConfig
from terrace.model.experts.gating import Gating, Kept, Passage
from terrace.model.experts.mixture import Router
from tests.support.mixtures import GROUPED, PLAIN, mixture

CASES = {
    "softmax": (PLAIN, BalanceConfig(sequence=0.1, z=0.1)),
    "sigmoid in groups": (GROUPED, BalanceConfig(step=0.1)),
    "noisy": (replace(PLAIN, gate="noisy"), BalanceConfig()),
    "capacity": (PLAIN, BalanceConfig(capacity=1.0)),
    "experts choose": (replace(PLAIN, gate="expert_choice", normalized=False), BalanceConfig()),
    "even": (replace(PLAIN, route="even"), BalanceConfig()),
}


def router_of(experts: ExpertsConfig, gating: Gating) -> Router:
    torch.manual_seed(0)
    found = Router(mixture(experts, hidden_size=8), dtype=torch.float64)
    for parameter in found.parameters():
        torch.nn.init.normal_(parameter)
    found.gating = gating
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_second_forward_chooses_as_the_first(name: str) -> None:
    """With other tokens, of which nearly all would choose other experts; weights follow the new scores."""
    experts, balance = CASES[name]
    gating = Gating(balance)
    gating.trains, gating.choices = True, {0: torch.arange(experts.num_experts)}
    passage = Passage(None, torch.tensor([0] * 9 + [1] * 7), 2, torch.arange(16))
    router, (x, other) = router_of(experts, gating), torch.randn(2, 16, 8, dtype=torch.float64)
    gating.kept = Kept()
    first = router(x, passage)
    again = router(other, passage)
    assert torch.equal(again.experts, first.experts)
    assert gating.kept.experts is not None
    assert gating.kept.experts.dtype == torch.int32
    repeated = router(x, passage)
    assert torch.equal(repeated.weights, first.weights)
    assert bool((again.weights[again.experts < 0] == 0).all())
    gating.kept = None
    free = router(other, passage)
    if name != "even":
        assert not torch.equal(free.experts, first.experts)
    assert not torch.equal(again.weights, first.weights)


def test_what_a_capacity_drops_is_dropped_again_and_counted() -> None:
    """The losses of a second forward, whose backward counts, see choices before any was dropped."""
    gating = Gating(BalanceConfig(capacity=1.0, sequence=0.5))
    gating.trains, passage = True, Passage(None, torch.zeros(16, dtype=torch.int64), 1)
    router, x = router_of(PLAIN, gating), torch.randn(16, 8, dtype=torch.float64, requires_grad=True)
    sums = []
    for kept in (None, Kept()):
        gating.kept = kept
        if kept is not None:
            router(x, passage)
        gating.sums.zero_()
        choice = router(x, passage)
        torch.autograd.backward(choice.weights.sum())
        sums.append(gating.sums.clone())
    assert int((choice.experts < 0).sum()) > 0
    assert torch.equal(*sums)
