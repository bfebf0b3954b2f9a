"""Even choices for measuring: a fixed table, under which every rank sends as the plan's formula says. No torch.

The tokens of a micro-batch on a rank are dealt with E at a time. Token r of a group of E passes the experts b + r,
modulo E, for the k numbers b that the group has drawn. So all experts have the same load in every group, and so has
every unit of E/q neighbouring experts: how many tokens have one of its experts does not depend on the unit. The
numbers b are drawn as if at random, so that about as many units have an expert of a token as under even routing.

Shape legend: T tokens, a multiple of E experts; k experts of a token.
"""

from functools import cache

_MASK = 2**64 - 1


@cache
def drawn(group: int, num_experts: int, per_token: int) -> tuple[int, ...]:
    """The k numbers of a group, ascending."""
    return tuple(sorted(sorted(range(num_experts), key=lambda expert: _hashed(group, expert))[:per_token]))


@cache
def rows_to_units(num_tokens: int, num_experts: int, per_token: int, num_units: int) -> int:
    """Over T tokens, the sum of the numbers of units, of `num_units` equal ones, that have an expert of a token."""
    assert num_tokens % num_experts == 0, "tokens are dealt with E at a time"
    size, total = num_experts // num_units, 0
    for group in range(num_tokens // num_experts):
        # The shifts at which some number falls on the first unit; as many fall on each other one.
        first = {
            (place - number) % num_experts for number in drawn(group, num_experts, per_token) for place in range(size)
        }
        total += num_units * len(first)
    return total


def _hashed(group: int, expert: int) -> int:
    bits = (group * 0x9E3779B97F4A7C15 + expert * 0xD1B54A32D192ED03 + 1) & _MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = ((bits ^ (bits >> shift)) * factor) & _MASK
    return bits ^ (bits >> 31)
