"""Memory of one rank over a recorded step.

The buffers are the program's (terrace.program.buffers): a buffer is allocated when the first instruction of its span
starts and freed when the last one is done. Activations, if given, live from a block's forward on a micro-batch to its
backward. Full gradients peak no higher than in `Program.state_bytes`, where a reduction ends only when the program
waits for it.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from terrace.program.buffers import Lifetime
from terrace.program.instruction import PASSES, Op
from terrace.program.program import Program
from terrace.program.recording import Recording

_VARYING = ("gathered", "grads_full", "activations")


class Held(NamedTuple):
    """Activation bytes of a block for one micro-batch.

    `kept` lives from the forward to the backward (or its input-gradient half), `due` from there to the weight-gradient
    half; `on_top` and `halved_on_top` live while the backward, or its first half, runs.
    """

    kept: int
    due: int
    on_top: int
    halved_on_top: int


@dataclass(frozen=True, kw_only=True)
class MemoryCurve:
    """Memory over the step: a constant part, and categories that change at `times_s`.

    `varying_bytes[category][i]` holds from `times_s[i]` to the next entry; entries may be equal, and the first is 0.
    """

    constant_bytes: Mapping[str, int]
    times_s: tuple[float, ...]
    varying_bytes: Mapping[str, tuple[float, ...]]

    @property
    def total_bytes(self) -> list[float]:
        """Total bytes at each of `times_s`."""
        constant = sum(self.constant_bytes.values())
        return [constant + sum(parts) for parts in zip(*self.varying_bytes.values(), strict=True)]

    @property
    def peak(self) -> tuple[float, float]:
        """(Bytes, seconds) of the first maximum."""
        totals = self.total_bytes
        highest = max(range(len(totals)), key=totals.__getitem__)
        return totals[highest], self.times_s[highest]


def memory_curve(
    recording: Recording,
    activations: Sequence[Held] | None = None,
) -> MemoryCurve:
    """Memory of one rank over a recorded step; `activations` has each block's for one micro-batch.

    Raises `ValueError` unless there is one entry per block.
    """
    num_blocks = len(recording.program.blocks)
    if activations is not None and len(activations) != num_blocks:
        raise ValueError(f"activations of {len(activations)} blocks for a program of {num_blocks}")
    steps = _steps(recording, activations or [Held(0, 0, 0, 0)] * num_blocks)
    now: dict[str, float] = dict.fromkeys(_VARYING, 0)
    times_s, curve = [0.0], {category: [0.0] for category in _VARYING}
    for moment_s, _, category, change in steps:
        now[category] += change
        times_s.append(moment_s)
        for name in _VARYING:
            curve[name].append(now[name])
    # Sharded states and message buffers stay for the whole step.
    constant = {name: size for name, size in recording.report.memory_bytes.items() if name not in _VARYING}
    return MemoryCurve(
        constant_bytes=constant,
        times_s=tuple(times_s),
        varying_bytes={name: tuple(values) for name, values in curve.items()},
    )


_Step = tuple[float, int, str, float]  # moment, position in the program, category, change in bytes


def _steps(recording: Recording, activations: Sequence[Held]) -> list[_Step]:
    changes: dict[tuple[float, int, str, bool], float] = defaultdict(float)
    for category, span, num_bytes in _lives(recording.program, activations):
        if num_bytes:
            # Rises and falls are kept apart, so that a peak within one instruction is not cancelled.
            changes[recording.started_s[span.first], span.first, category, True] += num_bytes
            changes[recording.done_s[span.last], span.last, category, False] -= num_bytes
    steps = [(moment_s, position, category, change) for (moment_s, position, category, _), change in changes.items()]
    return sorted(steps, key=lambda step: step[:2])


def _lives(program: Program, activations: Sequence[Held]) -> Iterator[tuple[str, Lifetime, float]]:
    for buffer in program.buffers:
        if buffer.category in _VARYING:
            yield from ((buffer.category, span, buffer.num_bytes) for span in buffer.spans)
    begun: dict[tuple[int, int], int] = {}
    for position, instruction in enumerate(program.instructions):
        key = instruction.block, instruction.micro
        if instruction.op not in PASSES:
            continue
        held, now = activations[instruction.block], Lifetime(position, position, position + 1)
        if instruction.op is Op.FORWARD:
            begun[key] = position
        elif instruction.op is Op.BACKWARD_WEIGHT:
            yield "activations", now._replace(first=begun.pop(key)), held.due
        else:
            halved = instruction.op is Op.BACKWARD_INPUT
            yield "activations", now._replace(first=begun.pop(key)), held.kept
            yield "activations", now, held.halved_on_top if halved else held.on_top
            if halved:
                begun[key] = position
