"""Waits of a layer for its context ranks in closed form: a check of block programs that reads none."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from terrace.cluster.cluster import Cluster
from terrace.plan.context_traffic import AttentionBytes
from terrace.simulate.inside import Rounds
from terrace.simulate.links import exchange_tiers, send_s, tier_penalty


class _Steps(NamedTuple):
    """The steps of a ring that cross a tier: with degrees g0, g1, ... of P ranks P/(g0 ... gi-1) - P/(g0 ... gi)."""

    tier: int
    num: int
    seconds: float
    penalty: float


def attention_waits(cluster: Cluster, attention: AttentionBytes, rounds: Rounds) -> tuple[float, float]:
    """Seconds by which messages make the attention of a layer longer, forward and backward."""
    first, later = rounds
    dealt_s = 0.0
    for num_bytes in (attention.inputs, attention.outputs):
        sends, inside = [], 1
        for tier, degree in enumerate(attention.ulysses):
            if degree > 1:
                sends.append((tier, (degree - 1) * inside * num_bytes))
            inside *= degree
        dealt_s += math.fsum(exchange_tiers(cluster, attention.ulysses, sends).values())
    left, steps = math.prod(attention.ring), []
    for tier, degree in enumerate(attention.ring):
        if degree > 1:
            seconds = send_s(cluster, tier, attention.keys)
            steps.append(_Steps(tier, left - left // degree, seconds, tier_penalty(cluster, tier)))
            left //= degree
    if not steps:
        return dealt_s, dealt_s
    inner, home = steps[0], steps[-1]
    forward_s, backward_s = _beside([inner], first[0]), _beside([inner], first[1])
    forward_s += (inner.num - 1) * _beside([inner], later[0])
    backward_s += home.seconds
    both_inner = sum(step.num for step in steps) - 1  # of rounds 1 ... R-2, beside which keys come and gradients leave
    for step in steps[1:]:
        forward_s += step.num * _beside([step], later[0])
        backward_s += 2 * step.num * _beside([step, inner], later[1])
        both_inner -= 2 * step.num
    backward_s += both_inner * _beside([inner, inner], later[1])
    if sum(step.num for step in steps) > 1:
        # Beside round 1 there are keys alone, which cross the next tier if the innermost has two places only, and
        # beside the last round gradients alone.
        second = steps[1] if len(steps) > 1 and attention.ring[inner.tier] == 2 else inner
        backward_s += _beside([second], later[1]) - _beside([second, inner], later[1]) + _beside([inner], later[1])
    return dealt_s + forward_s, dealt_s + backward_s


def _beside(steps: Sequence[_Steps], room_s: float) -> float:
    """Seconds that steps one after the other add to a round that takes `room_s`."""
    total_s, left_s = 0.0, room_s
    for step in steps:
        covered_s = min(step.seconds, left_s)
        total_s += step.seconds - covered_s + step.penalty * covered_s
        left_s -= covered_s
    return total_s
