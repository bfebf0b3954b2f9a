"""Seconds of the messages of the context axis, and what hides them: the one place that says so.

In the attention of a layer on one micro-batch (terrace.runtime.context does it), R rounds of a ring over P places:

    forward    into                  queries, keys and values, dealt out to the parts of the place       waited for
               keys of round s + 1                                                           beside round s
               back                  outputs                                                             waited for
    backward   into                  gradients of the outputs                                            waited for
               keys of round s + 1, and, from s = 2 on, gradients of the keys of s - 1       beside round s
               home                  gradients of the last round's keys                                  waited for
               back                  gradients of queries, keys and values                               waited for

A layer that is recomputed does its forward once more. What runs beside a round takes nothing beyond it, but slows it by
the overlap penalty of the tier; what is longer than its round is waited for. A step of the ring goes over the outermost
tier whose turn it is (terrace.sequence.segments), so with ring degrees g0, g1, ... of the tiers P/(g0 ... gi-1) -
P/(g0 ... gi) steps cross tier i, the first and the last of all steps the innermost. Messages of one moment follow one
another.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from terrace.cluster import Cluster
from terrace.plan.context_traffic import ContextLeg
from terrace.plan.mesh import CONTEXT
from terrace.plan.wire import FORMATS, MessageClass
from terrace.program import Instruction, Op, Program
from terrace.simulate.links import all_to_all_tiers, send_s, tier_penalty
from terrace.simulate.work import Work

WAIT_CONTEXT = f"wait {MessageClass.CONTEXT.value}"  # the category of their seconds, of a clock as of a prediction

Rounds = tuple[tuple[float, float], tuple[float, float]]  # (forward, backward) s of the first and of later rounds

NO_ROUNDS: Rounds = ((0.0, 0.0), (0.0, 0.0))


@dataclass(frozen=True)
class Exchanges:
    """What a rank of the context axis sends in the attention of a layer on one micro-batch.

    `ulysses` and `ring` are degrees by tier, innermost first. `inputs_bytes` (queries, keys, values) and
    `outputs_bytes` are what it deals out to the parts of its place, itself included; `keys_bytes` the keys and values
    of a round, and as many gradients.
    """

    ulysses: tuple[int, ...]
    ring: tuple[int, ...]
    inputs_bytes: int
    outputs_bytes: int
    keys_bytes: int


class Passes(NamedTuple):
    """Seconds of a forward and of a backward without recomputation."""

    forward_s: float
    backward_s: float


def exchanges_in(program: Program, block: int) -> Exchanges | None:
    """Return what a block sends for a micro-batch; None where its attention stays on the rank.

    With `balance = "cost"` it depends on the batch, and nothing is known of it (terrace.plan.context_traffic).
    """
    messages = program.attention(Instruction(Op.FORWARD, block))
    if not messages:
        return None
    sizes = {message.leg: sum(size for _, size in message.sends) for message in messages}
    ulysses, ring = (program.mesh.group(form) for form in CONTEXT)
    parts = math.prod(ulysses)

    def dealt(leg: ContextLeg) -> int:
        return sizes[leg] // (parts - 1) * parts if parts > 1 else 0

    return Exchanges(ulysses, ring, dealt(ContextLeg.INTO), dealt(ContextLeg.BACK), sizes.get(ContextLeg.KEYS, 0))


def exchanges_of(work: Work, ulysses: Sequence[int], ring: Sequence[int]) -> Exchanges:
    """Return the exchanges of a micro-batch; the degrees by tier multiply to those of `work`."""
    head_bytes = work.attended * work.model.head_dim * FORMATS[work.compute].element_bytes
    queries, keys = head_bytes * work.attended_heads, head_bytes * 2 * work.attended_kv_heads
    dealt = work.ulysses > 1
    return Exchanges(
        tuple(ulysses),
        tuple(ring),
        inputs_bytes=queries + keys if dealt else 0,
        outputs_bytes=queries if dealt else 0,
        keys_bytes=keys if work.ring > 1 else 0,
    )


def context_waits(cluster: Cluster, exchanges: Exchanges, rounds: Rounds, *, hides: bool = True) -> Passes:
    """Return the seconds by which messages make the attention of a layer longer.

    `hides` False: software that waits for every one of them.
    """
    first, later = rounds if hides else NO_ROUNDS
    dealt_s = math.fsum(
        seconds
        for num_bytes in (exchanges.inputs_bytes, exchanges.outputs_bytes)
        for seconds in all_to_all_tiers(cluster, exchanges.ulysses, num_bytes).values()
    )
    steps = _steps(cluster, exchanges)
    if not steps:
        return Passes(dealt_s, dealt_s)
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
        second = steps[1] if len(steps) > 1 and exchanges.ring[inner.tier] == 2 else inner
        backward_s += _beside([second], later[1]) - _beside([second, inner], later[1]) + _beside([inner], later[1])
    return Passes(dealt_s + forward_s, dealt_s + backward_s)


def tier_seconds(cluster: Cluster, exchanges: Exchanges) -> tuple[Mapping[int, float], Mapping[int, float]]:
    """Return the seconds of all messages of a forward and of a backward, hidden or not, by tier index."""
    forward: dict[int, float] = defaultdict(float)
    for num_bytes in (exchanges.inputs_bytes, exchanges.outputs_bytes):
        for tier, seconds in all_to_all_tiers(cluster, exchanges.ulysses, num_bytes).items():
            forward[tier] += seconds
    backward = forward.copy()
    steps = _steps(cluster, exchanges)
    for step in steps:
        forward[step.tier] += step.num * step.seconds
        backward[step.tier] += (2 * step.num - (step is steps[0]) + (step is steps[-1])) * step.seconds
    return forward, backward


class _Step(NamedTuple):
    """The steps of a ring that cross a tier: seconds of each."""

    tier: int
    num: int
    seconds: float
    penalty: float


def _steps(cluster: Cluster, exchanges: Exchanges) -> list[_Step]:
    left, found = math.prod(exchanges.ring), []
    for tier, degree in enumerate(exchanges.ring):
        if degree > 1:
            seconds = send_s(cluster, tier, exchanges.keys_bytes)
            found.append(_Step(tier, left - left // degree, seconds, tier_penalty(cluster, tier)))
            left //= degree
    return found


def _beside(steps: Sequence[_Step], room_s: float) -> float:
    """Return what steps one after the other add to a round that takes `room_s`."""
    total_s, left_s = 0.0, room_s
    for step in steps:
        covered_s = min(step.seconds, left_s)
        total_s += step.seconds - covered_s + step.penalty * covered_s
        left_s -= covered_s
    return total_s
