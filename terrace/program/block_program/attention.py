"""Steps of attention under the context axis: the rounds of a ring, with Ulysses exchanges at both ends.

    forward    into                  queries, keys and values, to the Ulysses ranks           exposed
               keys of round s + 1                                                            behind round s
               back                  outputs                                                  exposed
    backward   into                  gradients of the outputs                                 exposed
               keys of round s + 1, and, from s = 2 on, gradients of the keys of s - 1        behind round s
               return_gradients      gradients of the last round's keys                       exposed
               back                  gradients of queries, keys and values                    exposed

Deferred weight gradients run during `into` and `return_gradients` of a backward, unless they have already run. Under a
tensor axis they have, so these messages are not counted as hidden.

A linear layer passes a state instead, in a scan over the tiers that nothing hides:

    forward    the tokens before its runs, then maps of states, each over one tier after the other, innermost first
    backward   maps of gradients, then gradients of these tokens

Each ring step crosses the outermost tier that is due (terrace.sequence.segments).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod

from terrace.plan.context_traffic import SCANNED, AttentionBytes
from terrace.plan.in_block_messages import ContextLeg, ContextMessage
from terrace.plan.wire import MessageClass
from terrace.program.block_program.steps import Await, BlockStep, Compute, ComputeKind, Moment, Send, Steps


def steps_of(sent: AttentionBytes) -> tuple[Steps, Steps]:
    """(Forward steps, backward steps) of a layer's attention, or of a linear layer, with these messages."""
    return _scan_steps(sent.ring) if sent.state else attention_steps(sent.parts, sent.ring)


@lru_cache(maxsize=4096)
def _scan_steps(ring: tuple[int, ...]) -> tuple[Steps, Steps]:
    tiers = [tier for tier, degree in enumerate(ring) if degree > 1]
    passes = []
    for backward in (False, True):
        sends = [Send((ContextMessage(leg, tier, backward),)) for leg in SCANNED for tier in tiers]
        if backward:
            sends = sends[len(tiers) :] + sends[: len(tiers)]
        passes.append(tuple(step for send in sends for step in (send, Await(send))))
    return passes[0], passes[1]


@lru_cache(maxsize=4096)
def attention_steps(ulysses: int, ring: tuple[int, ...]) -> tuple[Steps, Steps]:
    """(Forward steps, backward steps) of a layer's attention; `ring` are degrees by tier, innermost first."""
    if ulysses * prod(ring) == 1:
        return (), ()
    return tuple(_forward(ulysses, ring)), tuple(_backward(ulysses, ring))


def _forward(ulysses: int, ring: Sequence[int]) -> Iterator[BlockStep]:
    tiers = ring_step_tiers(ring)
    yield from _dealt(ulysses, ContextLeg.INTO, backward=False)
    for step in range(len(tiers) + 1):
        piece = Compute(ComputeKind.ROUND, step)
        # Empty in the last round, which fetches no more keys.
        keys = [Send((ContextMessage(ContextLeg.KEYS, tier=tier),), piece) for tier in tiers[step : step + 1]]
        yield from keys
        yield piece
        yield from map(Await, keys)
    yield from _dealt(ulysses, ContextLeg.BACK, backward=False)


def _backward(ulysses: int, ring: Sequence[int]) -> Iterator[BlockStep]:
    tiers = ring_step_tiers(ring)
    yield from _dealt(ulysses, ContextLeg.INTO, backward=True, meanwhile=(Compute(ComputeKind.WEIGHT_GRADIENTS),))
    returning: list[Send] = []  # gradients of the previous round
    for step in range(len(tiers) + 1):
        piece = Compute(ComputeKind.ROUND_GRADIENTS, step)
        keys = [
            Send((ContextMessage(ContextLeg.KEYS, tier=tier, backward=True),), piece) for tier in tiers[step : step + 1]
        ]
        yield from keys
        yield piece
        yield from map(Await, returning)
        returning = []
        if 0 < step < len(tiers):  # gradients of this round's keys are sent during the next round
            gradients = ContextMessage(ContextLeg.GRADIENTS, tier=tiers[step], backward=True)
            returning = [Send((gradients,), Compute(ComputeKind.ROUND_GRADIENTS, step + 1))]
        # After the last round no compute is left to hide the final gradients.
        elif step:
            returning = [Send((ContextMessage(ContextLeg.RETURN_GRADIENTS, tier=max(tiers), backward=True),))]
        yield from returning
        yield from map(Await, keys)
    if tiers:
        yield Compute(ComputeKind.WEIGHT_GRADIENTS)
        yield from map(Await, returning)
    yield from _dealt(ulysses, ContextLeg.BACK, backward=True)


def _dealt(ulysses: int, leg: ContextLeg, *, backward: bool, meanwhile: Steps = ()) -> Steps:
    if ulysses == 1:
        return ()
    send = Send((ContextMessage(leg, backward=backward),))
    return send, *meanwhile, Await(send)


def ring_step_tiers(degrees: Sequence[int]) -> list[int]:
    """The tier that each ring step crosses; an outer tier is crossed after a full round over the inner tiers."""
    tiers: list[int] = []
    for tier, degree in enumerate(degrees):
        # Mixed-radix counting: one outer step per full round of the inner tiers.
        tiers = [*tiers, tier] * (degree - 1) + tiers
    return tiers


@lru_cache(maxsize=4096)
def attention_moments(ulysses: int, ring: tuple[int, ...]) -> tuple[tuple[Moment, ...], tuple[Moment, ...]]:
    """Moments of a forward and of a backward, without building the steps of a ring of thousands of ranks.

    Tests compare them with the moments of `attention_steps`.
    """
    tiers = ring_step_tiers(ring)
    passes = []
    for backward in (False, True):
        moments = []
        ends = [(leg, -1) for leg in (ContextLeg.INTO, ContextLeg.BACK) if ulysses > 1]
        ends += [(ContextLeg.RETURN_GRADIENTS, max(tiers))] if backward and tiers else []
        # No compute hides the exchanges at both ends, so they are one moment.
        if ends:
            moments.append(_moment(None, ends, 1, backward))
        # Rounds keyed by (tier that keys cross, tier that gradients cross); -1: none.
        gradients = [-1, -1, *tiers[1:]] if backward else [-1] * (len(tiers) + 1)
        # Equal rounds are counted, not listed: a ring of thousands has few distinct ones.
        rounds = Counter(zip([*tiers[1:], -1], gradients[1:], strict=True)) if tiers else Counter[tuple[int, int]]()
        kind = ComputeKind.ROUND_GRADIENTS if backward else ComputeKind.ROUND
        # Deferred weight gradients hide the last message of the ring.
        if tiers:
            # The first round differs: no gradients travel during it yet.
            moments.append(_moment(Compute(kind, 0), [(ContextLeg.KEYS, tiers[0])], 1, backward))
        for (keys, returned), times in rounds.items():
            legs = [(ContextLeg.GRADIENTS, returned), (ContextLeg.KEYS, keys)]
            sent = [(leg, tier) for leg, tier in legs if tier >= 0]
            if sent:
                moments.append(_moment(Compute(kind, 1), sent, times, backward))
        passes.append(tuple(moments))
    return passes[0], passes[1]


def _moment(behind: Compute | None, sent: Sequence[tuple[ContextLeg, int]], times: int, backward: bool) -> Moment:
    messages = tuple((ContextMessage(leg, tier=tier, backward=backward), 1) for leg, tier in sent)
    return Moment(MessageClass.CONTEXT, behind, messages, times)
