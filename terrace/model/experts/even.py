"""Even routing for benchmarks: a fixed table of choices with exactly balanced loads. Needs no torch.

The tokens of a micro-batch on a rank are divided into groups of E. Token r of a group uses the experts (b + r) mod E
for k offsets b of the group. All experts therefore have the same load in every group, and every unit of E/q adjacent
experts gets the same number of tokens. The offsets are pseudorandom, so that a token's experts are spread over about as
many units as under random even routing.

Shape legend: T tokens, a multiple of E experts; k experts of a token.
"""

from functools import cache

_MASK = 2**64 - 1


@cache
def drawn(group: int, num_experts: int, per_token: int) -> tuple[int, ...]:
    """The k offsets of a group, ascending."""
    return tuple(sorted(sorted(range(num_experts), key=lambda expert: _hashed(group, expert))[:per_token]))


@cache
def rows_to_units(num_tokens: int, num_experts: int, per_token: int, num_units: int) -> int:
    """Number of (token, unit) pairs in which the unit, one of `num_units`, has an expert of the token."""
    assert num_tokens % num_experts == 0, "tokens are dealt with E at a time"
    size, total = num_experts // num_units, 0
    for group in range(num_tokens // num_experts):
        # Tokens r of the group that use the first unit; every other unit has as many.
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
