"""Where inputs that are kept below the device leave it in a program and come back (terrace.plan.boundaries).

An EVICT follows the forward of its block. The write runs beside the forwards behind it, and the next EVICT waits for
it, so one input at a time is leaving. A FETCH comes one pass ahead of its backward; that of the first block of a
backward task comes one task ahead, as a RECV does, but not before its EVICT.

    EVICT b1 m0                                          FETCH b2 m0   FETCH b1 m0
    F b1 m0       F b2 m0   EVICT b2 m0   F b3 m0   ...  B b3 m0       B b2 m0       B b1 m0
"""

from collections.abc import Collection, Iterable, Sequence

from terrace.plan.stage import Pass, Stage
from terrace.program.instruction import HALVES, Instruction, Op


def with_boundaries(passes: Sequence[Instruction], leaving: Collection[int]) -> list[tuple[Instruction, ...]]:
    """Each pass of a task with the FETCH before it, for the pass behind it, and the EVICT after it."""
    found = list[tuple[Instruction, ...]]()
    for now, behind in zip(passes, (*passes[1:], None), strict=True):
        own: tuple[Instruction, ...] = (now,)
        if now.op is Op.FORWARD and now.block in leaving:
            own = (*own, Instruction(Op.EVICT, now.block, now.micro))
        if behind is not None and behind.op in HALVES and behind.block in leaving:
            own = (Instruction(Op.FETCH, behind.block, behind.micro), *own)
        found.append(own)
    return found


def fetched_ahead(stage: Stage, leaving: Collection[int]) -> dict[int, list[tuple[int, int]]]:
    """Index of a task -> (block, micro-batch) of the inputs that are fetched before it, for a later task."""
    found = dict[int, list[tuple[int, int]]]()
    task, before = 0, (Pass.BACKWARD, -1, -1)  # pass, chunk and micro-batch of the task before
    for pass_, chunk, micros in stage.groups if leaving else ():
        first = stage.chunks[chunk][-1]
        for micro in micros:
            if pass_ in (Pass.BACKWARD, Pass.BACKWARD_INPUT) and first in leaving:
                evicts = before == (Pass.FORWARD, chunk, micro)
                found.setdefault(task if evicts else max(0, task - 1), []).append((first, micro))
            before = (pass_, chunk, micro)
            task += 1
    return found


def most_below(instructions: Iterable[Instruction]) -> int:
    """Most inputs that are below the device at a time, or on the way to it or from it."""
    now = most = 0
    evicted = set[int]()
    for op, block, *_ in instructions:
        if op is Op.EVICT:
            evicted.add(block)
            now += 1
            most = max(most, now)
        elif op in HALVES and block in evicted:
            now -= 1
    return most
