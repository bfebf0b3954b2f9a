"""Steps of attention under the context axis: R rounds of a ring over P places, with Ulysses exchanges at both ends.

    forward    into                       queries, keys and values, dealt out to the parts of the place   waited for
               keys of round s + 1                                                          behind round s
               back                       outputs                                                         waited for
    backward   into                       gradients of the outputs                                        waited for
               keys of round s + 1, and, from s = 2 on, gradients of the keys of s - 1      behind round s
               return_gradients           gradients of the last round's keys                              waited for
               back                       gradients of queries, keys and values                           waited for

Held-back weight gradients run while `into` and `return_gradients` of a backward travel, unless they ran before. Under a
tensor axis they did, so none of their seconds are counted as hiding these messages.

A step of the ring goes over the outermost tier that is due (terrace.sequence.segments).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod

from terrace.plan.in_block_messages import ContextLeg, ContextMessage
from terrace.plan.wire import MessageClass
from terrace.program.block_program.steps import Await, BlockStep, Compute, ComputeKind, Moment, Send, Steps


@lru_cache(maxsize=4096)
def attention_steps(ulysses: int, ring: tuple[int, ...]) -> tuple[Steps, Steps]:
    """Steps of the forward and of the backward of a layer's attention, for ring degrees by tier, innermost first."""
    if ulysses * prod(ring) == 1:
        return (), ()
    return tuple(_forward(ulysses, ring)), tuple(_backward(ulysses, ring))


def _forward(ulysses: int, ring: Sequence[int]) -> Iterator[BlockStep]:
    tiers = ring_step_tiers(ring)
    yield from _dealt(ulysses, ContextLeg.INTO, backward=False)
    for step in range(len(tiers) + 1):
        piece = Compute(ComputeKind.ROUND, step)
        # The slice is empty in the last round, which has no next keys to fetch.
        keys = [Send((ContextMessage(ContextLeg.KEYS, tier=tier),), piece) for tier in tiers[step : step + 1]]
        yield from keys
        yield piece
        yield from map(Await, keys)
    yield from _dealt(ulysses, ContextLeg.BACK, backward=False)


def _backward(ulysses: int, ring: Sequence[int]) -> Iterator[BlockStep]:
    tiers = ring_step_tiers(ring)
    yield from _dealt(ulysses, ContextLeg.INTO, backward=True, meanwhile=(Compute(ComputeKind.WEIGHT_GRADIENTS),))
    returning: list[Send] = []  # gradients of the round before
    for step in range(len(tiers) + 1):
        piece = Compute(ComputeKind.ROUND_GRADIENTS, step)
        keys = [
            Send((ContextMessage(ContextLeg.KEYS, tier=tier, backward=True),), piece) for tier in tiers[step : step + 1]
        ]
        yield from keys
        yield piece
        yield from map(Await, returning)
        returning = []
        if 0 < step < len(tiers):  # gradients of this round's keys follow the keys, beside the next round
            gradients = ContextMessage(ContextLeg.GRADIENTS, tier=tiers[step], backward=True)
            returning = [Send((gradients,), Compute(ComputeKind.ROUND_GRADIENTS, step + 1))]
        # After the last round no computing is left to hide the final gradients.
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
    """The tier that each step of a ring goes over: an outer tier's turn comes when the tiers inside are through."""
    tiers: list[int] = []
    for tier, degree in enumerate(degrees):
        # Mixed-radix counting: one outer step for every full round of the tiers inside.
        tiers = [*tiers, tier] * (degree - 1) + tiers
    return tiers


@lru_cache(maxsize=4096)
def attention_moments(ulysses: int, ring: tuple[int, ...]) -> tuple[tuple[Moment, ...], tuple[Moment, ...]]:
    """Moments of a forward and of a backward, counted without going through the steps of rings of thousands of ranks.

    Tests compare them with the moments of `attention_steps`.
    """
    tiers = ring_step_tiers(ring)
    passes = []
    for backward in (False, True):
        moments = []
        ends = [(leg, -1) for leg in (ContextLeg.INTO, ContextLeg.BACK) if ulysses > 1]
        ends += [(ContextLeg.RETURN_GRADIENTS, max(tiers))] if backward and tiers else []
        # The exchanges at both ends have no computing behind them, so they are one moment.
        if ends:
            moments.append(_moment(None, ends, 1, backward))
        # Rounds, by the tier over which keys leave, and by the tier over which gradients do (-1: none).
        gradients = [-1, -1, *tiers[1:]] if backward else [-1] * (len(tiers) + 1)
        # Equal rounds are counted, not listed: a ring of thousands has few distinct ones.
        rounds = Counter(zip([*tiers[1:], -1], gradients[1:], strict=True)) if tiers else Counter[tuple[int, int]]()
        kind = ComputeKind.ROUND_GRADIENTS if backward else ComputeKind.ROUND
        # Held-back weight gradients hide the last message of the ring.
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
