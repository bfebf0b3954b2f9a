"""Advantages, computed on the controller: pure functions of the rewards of an iteration's whole batch.

Columns hold only valid tokens: those that the sampler emitted, its end of sequence included. `Ragged.kept` has removed
observation tokens, so a token's successor is the next one that the policy chose, and values and advantages carry across
the gap. Nothing here looks for an end of sequence. A truncated response ends like any other: its last token is not
bootstrapped with a value, and penalising truncation is up to the reward.

Advantages per response have shape (R); `Ragged.spread` copies them to tokens. GSPO and CISPO use those of GRPO.

Shape legend: N tokens, R responses.
"""

import torch
from torch import Tensor

from terrace.base.errors import ConfigError, DataError
from terrace.rl.values.ragged import Ragged, check_rows, check_shapes

# Added to a standard deviation, as in verl: small against rewards of order 1.
_EPS = 1e-6
# Added to a variance, as in TRL and verl.
_VARIANCE_EPS = 1e-8


def gae(rewards: Ragged, values: Ragged, *, gamma: float, lam: float) -> tuple[Ragged, Ragged]:
    """Advantages and returns of tokens, from token rewards r and values V (Schulman et al., 1506.02438, eq. 16).

        delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lam A_{t+1}        return_t = A_t + V_t

    V and A are 0 after the last token. PPO whitens the advantages afterwards, but not the returns.
    """
    check_rows(rewards=rewards, values=values)
    following = torch.where(_num_following(values) > 0, values.values.roll(-1), 0)
    deltas = rewards.values + gamma * following - values.values
    advantages = rewards_to_go(rewards.with_values(deltas), gamma * lam)
    return advantages, values.with_values(advantages.values + values.values)


def rewards_to_go(rewards: Ragged, gamma: float) -> Ragged:
    """Sum of `gamma`^(s - t) r_s over s >= t within the row, for token rewards r."""
    sums, following = rewards.values, _num_following(rewards)
    longest = int(rewards.lengths.max()) if len(rewards) else 0
    # By doubling: after k iterations each token holds the sum over itself and the next 2^k - 1. A loop over positions
    # would take as many iterations as the longest response has tokens.
    reach = 1
    while reach < longest:
        sums = sums + gamma**reach * torch.where(following >= reach, sums.roll(-reach), 0)
        reach *= 2
    return rewards.with_values(sums)


def whiten(advantages: Ragged) -> Ragged:
    """(A - mean) / std over all valid tokens of the batch, with the unbiased (n - 1) std.

    A single token becomes 0, as equal advantages do.
    """
    values = advantages.values
    if not len(values):
        return advantages
    wide = values.double()
    centred = wide - wide.mean()
    variance = centred.square().sum() / max(1, len(values) - 1)
    return advantages.with_values((centred * (variance + _VARIANCE_EPS).rsqrt()).to(values.dtype))


def grpo(rewards: Tensor, groups: Tensor) -> Tensor:
    """(R_i - mean) / (std + 1e-6) over the group, with the unbiased (n - 1) std (Shao et al., 2402.03300).

    `rewards` (R); `groups` (R) identifies the prompt of each response by any integers in any order. The advantage of a
    group of one is 0. (verl uses the reward itself there, with no baseline.)
    """
    centred, index, sizes = _centred(rewards, groups)
    squares = torch.zeros_like(sizes).index_add(0, index, centred.square())
    deviation = (squares / (sizes - 1).clamp(min=1)).sqrt()
    return (centred / (deviation[index] + _EPS)).to(rewards.dtype)


def dr_grpo(rewards: Tensor, groups: Tensor) -> Tensor:
    """R_i - mean of the group: GRPO without the bias of dividing by the std (Liu et al., 2503.20783).

    Shapes as for `grpo`. The paper's other change is the aggregation over a constant length.
    """
    return _centred(rewards, groups)[0].to(rewards.dtype)


def rloo(rewards: Tensor, groups: Tensor) -> Tensor:
    """R_i minus the mean of the group's other rewards, G / (G - 1) (R_i - mean) (Ahmadian et al., 2402.14740).

    Shapes as for `grpo`. `rewards` already include the KL penalty (`kl.penalised`). The advantage of a group of one is
    0.
    """
    centred, index, sizes = _centred(rewards, groups)
    return (centred * (sizes / (sizes - 1).clamp(min=1))[index]).to(rewards.dtype)


def reinforce_pp(rewards: Ragged, *, gamma: float) -> Ragged:
    """Discounted token rewards to go, whitened over the batch (REINFORCE++, Hu et al., 2501.03262).

    `rewards` already include the KL penalty (`terrace.rl.algorithms.kl.token_rewards`).
    """
    return whiten(rewards_to_go(rewards, gamma))


def reinforce_pp_baseline(rewards: Tensor, groups: Tensor, tokens: Ragged) -> Ragged:
    """Rewards (R) minus their group's mean, copied to the responses' `tokens` and whitened over the batch (2501.03262).

    Groups give only the mean; the std is the batch's. The KL penalty belongs in the loss (k2).
    """
    return whiten(tokens.spread(dr_grpo(rewards, groups)))


def remax(rewards: Ragged, greedy: Tensor) -> Ragged:
    """Token rewards to go, minus the reward (R) of the greedy response to the same prompt (Li et al., 2310.10505)."""
    return rewards.with_values(rewards_to_go(rewards, 1.0).values - rewards.spread(greedy).values)


def is_degenerate(rewards: Tensor, groups: Tensor) -> Tensor:
    """Whether all rewards of a response's group are equal, bool (R), so that its advantages are 0.

    DAPO (Yu et al., 2503.14476, eq. 11) drops these groups and samples others until the batch is full. A group of one
    counts as degenerate.
    """
    sizes, index = _numbered(rewards, groups)
    low, high = _extremes(rewards, index, len(sizes))
    return (low == high)[index]


def overlong_penalty(lengths: Tensor, *, max_length: int, window: int) -> Tensor:
    """DAPO's length penalty, to be added to the reward (2503.14476, eq. 13): from 0 to -1, fp64 (R).

    0 up to `max_length` - `window` tokens, then linear down to -1 at `max_length` and beyond.
    """
    if not 0 < window <= max_length:
        raise ConfigError(f"window of {window} tokens before a length of {max_length}: must be from 1 to the length")
    return ((max_length - window - lengths.double()) / window).clamp(-1, 0)


def _num_following(ragged: Ragged) -> Tensor:
    # Number of tokens after each token in its row, (N).
    ends = ragged.spread(ragged.offsets[1:]).values
    return ends - 1 - torch.arange(len(ends), device=ends.device)


def _numbered(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    # Group sizes (G), and each row's group index (R).
    check_shapes(rewards=rewards, groups=groups)
    if not rewards.is_floating_point():
        raise DataError(f"rewards of dtype {rewards.dtype}: must be floating, since advantages are fractions of them")
    if groups.is_floating_point():
        raise DataError(f"groups of dtype {groups.dtype}: must be integers, equal for responses to one prompt")
    _, index, sizes = torch.unique(groups, return_inverse=True, return_counts=True)
    return sizes, index


def _extremes(rewards: Tensor, index: Tensor, num: int) -> tuple[Tensor, Tensor]:
    # Minimum and maximum reward of each group, (G) each.
    low, high = (
        rewards.new_zeros(num).scatter_reduce(0, index, rewards, how, include_self=False) for how in ("amin", "amax")
    )
    return low, high


def _centred(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # Rewards minus their group's mean, fp64 (R); group index (R); group sizes, fp64 (G).
    sizes, index = _numbered(rewards, groups)
    # Subtracting the minimum first makes a group of equal rewards exactly 0. Otherwise a rounding error of the mean,
    # divided by a std that is rounding error too, could be an advantage of any size.
    wide = rewards.double() - _extremes(rewards, index, len(sizes))[0].double()[index]
    sums = wide.new_zeros(len(sizes)).index_add(0, index, wide)
    return wide - (sums / sizes)[index], index, sizes.double()
