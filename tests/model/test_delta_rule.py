"""The gated delta rule, token by token, and the convolutions before it."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from terrace.model.delta_rule import gated_delta_rule, short_convolution
from tests.support.allocations import seeded

RUNS, LENGTH, GROUPS, SHARING, KEY, VALUE = 2, 150, 2, 3, 5, 4
HEADS = GROUPS * SHARING
NOWHERE = torch.zeros(RUNS, LENGTH, dtype=torch.bool)
ZERO = torch.zeros(RUNS, GROUPS, SHARING, KEY, VALUE, dtype=torch.float64)


def inputs(channels: int = 1, shift: float = 0.0) -> list[Tensor]:
    keys, values, numbers = (RUNS, LENGTH, GROUPS, KEY), (RUNS, LENGTH, HEADS, VALUE), (RUNS, LENGTH, HEADS)
    decays, bias = (RUNS, LENGTH, HEADS * channels), (HEADS * channels,)
    shapes: list[tuple[int, ...]] = [keys, keys, values, decays, numbers, (HEADS,), bias]
    generator = seeded(0)
    found = [torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in shapes]
    found[-2] += shift
    return [each.requires_grad_() for each in found]


def documents() -> Tensor:
    """Beginnings anywhere, at the begin and at the end of a chunk, and at the first token."""
    begins = torch.rand(RUNS, LENGTH, generator=seeded(1)) < 0.03
    begins[0, 64] = begins[1, 63] = begins[1, 0] = True
    return begins


def token_by_token(given: list[Tensor], begins: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and the last state: S = a S, then S = S + b k (v - S^T k)^T and o = S^T q (2412.06464, equation 10).

    With a decay for each element of a key, its rows have theirs (2510.26692, equation 1).
    """
    query, key, value, decay, beta, log_decay, bias = given
    query, key = (
        (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(SHARING, 2)
        for each in (query, key)
    )
    rate = log_decay.exp()[:, None] * torch.unflatten(F.softplus(decay + bias), -1, (HEADS, -1))  # one number, or K
    kept, strength = torch.exp(-rate), beta.sigmoid()
    whole, found = state.flatten(1, 2), []
    for token in range(LENGTH):
        whole = whole * (kept[:, token] * ~begins[:, token : token + 1, None])[..., None]
        new = strength[:, token, :, None] * (value[:, token] - (whole * key[:, token, :, :, None]).sum(-2))
        whole = whole + key[:, token, :, :, None] * new[:, :, None]
        found.append((whole * query[:, token, :, :, None]).sum(-2) / KEY**0.5)
    return torch.stack(found, 1), whole.view_as(state)


@pytest.mark.parametrize(("channels", "shift"), [(1, 0.0), (KEY, 0.0), (KEY, 4.0)])
def test_chunks_are_the_recurrence_token_by_token(channels: int, shift: float) -> None:
    """Outputs and all gradients, in rows of three chunks, with and without documents.

    Shifted, decays of a chunk reach exp(-5000), of which there is no inverse.
    """
    for begins in (None, documents()):
        given = inputs(channels, shift)
        found = gated_delta_rule(given, begins)
        wanted, _ = token_by_token(given, NOWHERE if begins is None else begins, ZERO)
        torch.testing.assert_close(found, wanted, atol=1e-12, rtol=0)
        weights = torch.randn(found.shape, dtype=torch.float64, generator=seeded(2))
        grads = [torch.autograd.grad((each * weights).sum(), given) for each in (found, wanted)]
        for own, other in zip(*grads, strict=True):
            torch.testing.assert_close(own, other, atol=1e-11, rtol=0)


class Before:
    """Half a row before the runs: what the exchange between two ranks gives the second of them."""

    def __init__(self, state: Tensor, grad: Tensor) -> None:
        self.state, self.grad = state, grad
        self.maps: list[Tensor] = []

    def before(self, maps: Tensor) -> Tensor:
        self.maps.append(maps)
        return self.state

    def after(self, maps: Tensor) -> Tensor:
        self.maps.append(maps)
        return self.grad


@pytest.mark.parametrize("channels", [1, KEY])
def test_a_run_maps_the_state_before_it(channels: int) -> None:
    """S' = M S + B, and the gradient comes back by M^T G + H: the same for two states, by finite maps."""
    given, begins = inputs(channels), documents()
    state, grad = torch.randn(2, *ZERO.shape, dtype=torch.float64, generator=seeded(3))
    there = Before(state, grad)
    found = gated_delta_rule(given, begins, there)
    weights = torch.randn(found.shape, dtype=torch.float64, generator=seeded(2))
    own = torch.autograd.grad((found * weights).sum(), given)
    (forward, backward), size = there.maps, KEY
    # The same by autograd through the recurrence, from this state, with this gradient of the state after it.
    state = state.clone().requires_grad_()
    outputs, last = token_by_token(given, begins, state)
    torch.testing.assert_close(last, forward[..., :size] @ state + forward[..., size:], atol=1e-12, rtol=0)
    loss = (outputs * weights).sum()
    (of_state,) = torch.autograd.grad(loss, state, retain_graph=True)
    torch.testing.assert_close(backward[..., size:], of_state, atol=1e-11, rtol=0)
    wanted = torch.autograd.grad(loss + (last * grad).sum(), given)
    for one, other in zip(own, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=0)


def test_convolutions_stay_within_documents() -> None:
    """Every document by itself, by torch's convolution; with the tokens before a run as if they were there."""
    x = torch.randn(1, 30, 6, dtype=torch.float64, generator=seeded(0)).requires_grad_()
    weight = torch.randn(6, 1, 4, dtype=torch.float64, generator=seeded(1)).requires_grad_()
    bounds = [0, 1, 3, 11, 30]
    ages = torch.cat([torch.arange(end - begin) for begin, end in pairwise(bounds)])[None]
    halo = x.new_empty(1, 0, 6)
    found = short_convolution(x, weight, halo, ages.to(torch.int8))
    parts = [
        F.silu(F.conv1d(F.pad(x[:, begin:end].mT, (3, 0)), weight, groups=6)).mT for begin, end in pairwise(bounds)
    ]
    wanted = torch.cat(parts, 1)
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=0)
    grads = [torch.autograd.grad(each.square().sum(), (x, weight)) for each in (found, wanted)]
    for own, other in zip(*grads, strict=True):
        torch.testing.assert_close(own, other, atol=1e-12, rtol=0)
    late = short_convolution(x[:, 20:], weight, x[:, 17:20], None)
    torch.testing.assert_close(late, found[:, 20:], atol=1e-12, rtol=0)
    (of_halo,) = torch.autograd.grad(late.square().sum(), x)
    assert of_halo[:, 17:20].abs().min() > 0
    assert not of_halo[:, :17].any()
