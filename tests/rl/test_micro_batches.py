"""A loss of a step does not depend on how its responses are split into micro-batches, and over ranks."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from terrace.rl.algorithms.aggregation import Aggregation
from terrace.rl.algorithms.importance import sequence_ratios, truncated
from terrace.rl.algorithms.losses import cispo, clipped_surrogate, gspo, kl_loss, reinforce, rloo, value_loss
from terrace.rl.values.ragged import Ragged
from terrace.rl.values.rows import Rows

NUM_PARAMETERS = 3
Loss = Callable[[Rows, Tensor, Tensor], Tensor]  # (rows, the policy's number at each token, weights) -> sum

LOSSES: dict[str, Loss] = {
    "reinforce": lambda rows, x, w: reinforce(x, values(rows, "advantages"), w),
    "clipped": lambda rows, x, w: clipped_surrogate(x, values(rows, "old"), values(rows, "advantages"), w, dual_clip=3),
    "gspo": lambda rows, x, w: gspo(
        x, values(rows, "old"), values(rows, "advantages"), w, rows.ragged("old").offsets, clip_low=0.2, clip_high=0.2
    ),
    "rloo": lambda rows, x, w: rloo(x, values(rows, "old"), values(rows, "advantages"), w, rows.ragged("old").offsets),
    "cispo": lambda rows, x, w: cispo(
        x, values(rows, "old"), values(rows, "advantages"), w, clip_low=1.0, clip_high=0.2
    ),
    "value": lambda rows, x, w: value_loss(x, values(rows, "old"), values(rows, "advantages"), w, clip=0.2),
    "k3": lambda rows, x, w: kl_loss(x, values(rows, "old"), w, "k3"),
    # Weights of whole responses, for rollouts of another engine.
    "weighted": lambda rows, x, w: reinforce(
        x,
        values(rows, "advantages"),
        w * truncated(sequence_ratios(rows.ragged("old"), rows.ragged("rollout")), 2).values,
    ),
}
AGGREGATIONS = [
    Aggregation("token-mean"),
    Aggregation("seq-mean-token-mean"),
    Aggregation("seq-mean-token-sum"),
    Aggregation("seq-mean-token-sum-norm", 7),
]


def values(rows: Rows, name: str) -> Tensor:
    return rows.ragged(name).values


def batch(lengths: list[int]) -> Rows:
    """Responses of these lengths; the policy's numbers of a token are linear in the parameters."""
    generator = torch.Generator().manual_seed(sum(lengths) + 31 * len(lengths))
    offsets = torch.tensor([0, *lengths]).cumsum(0)

    def column(*dims: int) -> Ragged:
        return Ragged(torch.randn(sum(lengths), *dims, generator=generator, dtype=torch.float64), offsets)

    names = ("old", "rollout", "advantages")
    return Rows({"features": column(NUM_PARAMETERS), **{name: column() for name in names}})


def of_step(loss: Loss, aggregation: Aggregation, micro_batches: list[Rows]) -> Tensor:
    """Mean loss of a step and its gradient: sums over micro-batches, divided once."""
    theta = torch.tensor([0.4, -0.7, 0.2], dtype=torch.float64, requires_grad=True)
    total, divisor, gradient = torch.zeros(()).double(), torch.zeros(()).double(), torch.zeros_like(theta)
    for rows in micro_batches:
        lengths = rows.ragged("old").lengths
        part = loss(rows, values(rows, "features") @ theta, aggregation.weights(lengths, torch.float64))
        total, divisor = total + part.detach(), divisor + aggregation.counts(lengths).sum()
        gradient = gradient + torch.autograd.grad(part, theta)[0]
    return torch.cat([total[None], gradient]) / divisor


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=10)
@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=7), data=st.data())
def test_any_split_has_the_same_loss_and_gradient(name: str, lengths: list[int], data: st.DataObject) -> None:
    lengths = [*lengths, 1]  # a step of empty responses alone has no mean over tokens
    rows, aggregation = batch(lengths), data.draw(st.sampled_from(AGGREGATIONS))
    order = data.draw(st.permutations(range(len(lengths))))
    cut = sorted(data.draw(st.lists(st.integers(0, len(lengths)), max_size=4)))
    sizes = [stop - start for start, stop in zip([0, *cut], [*cut, len(lengths)], strict=True)]
    split = of_step(LOSSES[name], aggregation, rows.take(order).split(sizes))
    torch.testing.assert_close(split, of_step(LOSSES[name], aggregation, [rows]), rtol=1e-10, atol=1e-10)


def test_a_mean_of_means_is_another_number() -> None:
    """The fault that the divisor is there to exclude: two responses of 1 and 4 tokens, one a micro-batch."""
    rows, aggregation = batch([1, 4]), AGGREGATIONS[0]
    parts = [of_step(LOSSES["clipped"], aggregation, [part]) for part in rows.split([1, 1])]
    whole = of_step(LOSSES["clipped"], aggregation, [rows])
    assert ((sum(parts) / 2) - whole).abs().max() > 1e-2
