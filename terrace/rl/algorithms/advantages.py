"""Advantages, on the controller: pure functions of rewards over the whole batch of an iteration.

Columns hold valid tokens alone, those that the sampler emitted, its end of sequence included. Observation tokens in
between have left through `Ragged.kept`, so a token's successor is the next one that the policy chose: values and
advantages carry across the tokens between. Nothing here looks for an end of sequence. A response that was cut at its
longest ends as any other: no value is added behind its last token, and the price of a cut is the reward's to say.

Advantages of responses are (R); `Ragged.spread` puts them on tokens. GSPO and CISPO use those of GRPO.

Shape legend: N tokens, R responses.
"""

import torch
from torch import Tensor

from terrace.base.errors import ConfigError, DataError
from terrace.rl.values.ragged import Ragged, check_rows, check_shapes

# Added to a deviation, as verl does: small against rewards of order 1.
_EPS = 1e-6
# Added to a variance, as TRL and verl do.
_VARIANCE_EPS = 1e-8


def gae(rewards: Ragged, values: Ragged, *, gamma: float, lam: float) -> tuple[Ragged, Ragged]:
    """Advantages and returns of tokens, from token rewards r and values V (Schulman et al., 1506.02438, eq. 16).

        delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lam A_{t+1}        return_t = A_t + V_t

    V and A are 0 behind the last token. PPO whitens the advantages afterwards, and never the returns.
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
    # By doubling: after k turns a token has the sum over itself and the 2^k - 1 behind it. A loop over tokens would
    # take as many turns as the longest response has tokens.
    reach = 1
    while reach < longest:
        sums = sums + gamma**reach * torch.where(following >= reach, sums.roll(-reach), 0)
        reach *= 2
    return rewards.with_values(sums)


def whiten(advantages: Ragged) -> Ragged:
    """Advantages less their mean, over their standard deviation (of n - 1), of all valid tokens of the batch.

    A single token has no deviation: it becomes 0, as equal tokens do.
    """
    values = advantages.values
    if not len(values):
        return advantages
    wide = values.double()
    centred = wide - wide.mean()
    variance = centred.square().sum() / max(1, len(values) - 1)
    return advantages.with_values((centred * (variance + _VARIANCE_EPS).rsqrt()).to(values.dtype))


def grpo(rewards: Tensor, groups: Tensor) -> Tensor:
    """(R_i - mean) / (std + 1e-6), of the group and with the deviation of n - 1 (Shao et al., 2402.03300).

    `rewards` (R), `groups` (R) the prompt of each response, any integers in any order. A group of one has nothing to be
    compared with: its advantage is 0. (verl then takes the reward itself, with no baseline.)
    """
    centred, index, sizes = _centred(rewards, groups)
    squares = torch.zeros_like(sizes).index_add(0, index, centred.square())
    deviation = (squares / (sizes - 1).clamp(min=1)).sqrt()
    return (centred / (deviation[index] + _EPS)).to(rewards.dtype)


def dr_grpo(rewards: Tensor, groups: Tensor) -> Tensor:
    """R_i - mean of the group: GRPO without the bias of its deviation (Liu et al., 2503.20783).

    Shapes as for `grpo`. The paper's other half is the aggregation over a constant length.
    """
    return _centred(rewards, groups)[0].to(rewards.dtype)


def rloo(rewards: Tensor, groups: Tensor) -> Tensor:
    """R_i less the mean of the others of the group, G / (G - 1) (R_i - mean) (Ahmadian et al., 2402.14740).

    Shapes as for `grpo`. The penalty for KL belongs into the rewards before (`kl.penalised`). A group of one
    has no others: its advantage is 0.
    """
    centred, index, sizes = _centred(rewards, groups)
    return (centred * (sizes / (sizes - 1).clamp(min=1))[index]).to(rewards.dtype)


def reinforce_pp(rewards: Ragged, *, gamma: float) -> Ragged:
    """Discounted token rewards to go, whitened over the batch (REINFORCE++, Hu et al., 2501.03262).

    Token rewards have the penalty for KL in them (`terrace.rl.algorithms.kl.token_rewards`).
    """
    return whiten(rewards_to_go(rewards, gamma))


def reinforce_pp_baseline(rewards: Tensor, groups: Tensor, tokens: Ragged) -> Ragged:
    """Rewards (R) less the mean of their group, on each of their `tokens`, whitened over the batch (2501.03262).

    A group counts here only by its mean; the deviation is that of the batch. KL belongs into the loss (k2).
    """
    return whiten(tokens.spread(dr_grpo(rewards, groups)))


def remax(rewards: Ragged, greedy: Tensor) -> Ragged:
    """Token rewards to go less the reward of the greedy response (R) to the same prompt (Li et al., 2310.10505)."""
    return rewards.with_values(rewards_to_go(rewards, 1.0).values - rewards.spread(greedy).values)


def is_degenerate(rewards: Tensor, groups: Tensor) -> Tensor:
    """Whether all rewards of a response's group are equal, bool (R): nothing is learned from it.

    DAPO (Yu et al., 2503.14476, eq. 11) drops these groups and samples others until the batch is full. A group of one
    is one of them.
    """
    sizes, index = _numbered(rewards, groups)
    low, high = _extremes(rewards, index, len(sizes))
    return (low == high)[index]


def overlong_penalty(lengths: Tensor, *, max_length: int, window: int) -> Tensor:
    """Penalty of DAPO for a long response, added to its reward (2503.14476, eq. 13): from 0 to -1, fp64 (R).

    0 up to `max_length` - `window` tokens, then down in a straight line, -1 from `max_length` on.
    """
    if not 0 < window <= max_length:
        raise ConfigError(f"window of {window} tokens before a length of {max_length}: must be from 1 to the length")
    return ((max_length - window - lengths.double()) / window).clamp(-1, 0)


def _num_following(ragged: Ragged) -> Tensor:
    # Tokens behind each token in its row, (N).
    ends = ragged.spread(ragged.offsets[1:]).values
    return ends - 1 - torch.arange(len(ends), device=ends.device)


def _numbered(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    # Sizes of the groups (G), and the number of each row's group (R).
    check_shapes(rewards=rewards, groups=groups)
    if not rewards.is_floating_point():
        raise DataError(f"rewards of dtype {rewards.dtype}: must be floating, since advantages are fractions of them")
    if groups.is_floating_point():
        raise DataError(f"groups of dtype {groups.dtype}: must be integers, equal for responses to one prompt")
    _, index, sizes = torch.unique(groups, return_inverse=True, return_counts=True)
    return sizes, index


def _extremes(rewards: Tensor, index: Tensor, num: int) -> tuple[Tensor, Tensor]:
    # Least and greatest reward of each group, (G) each.
    low, high = (
        rewards.new_zeros(num).scatter_reduce(0, index, rewards, how, include_self=False) for how in ("amin", "amax")
    )
    return low, high


def _centred(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # Rewards less the mean of their group, fp64 (R), the group's number (R), and the sizes of groups, fp64 (G).
    sizes, index = _numbered(rewards, groups)
    # From the least reward up: a group of equal rewards has then exactly 0. Rounding of the mean, over a deviation that
    # is nothing but rounding as well, would be an advantage of any size.
    wide = rewards.double() - _extremes(rewards, index, len(sizes))[0].double()[index]
    sums = wide.new_zeros(len(sizes)).index_add(0, index, wide)
    return wide - (sums / sizes)[index], index, sizes.double()
