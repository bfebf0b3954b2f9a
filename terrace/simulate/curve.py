"""Memory of one rank over a recorded step.

The buffers are the program's (terrace.program.buffers): a buffer is allocated when the first instruction of its span
starts and freed when the last one is done; activations, if given, are as in terrace.simulate.held_activations. Full
gradients peak no higher than in `Program.state_bytes`, where a reduction ends only when the program waits for it.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from terrace.program.recording import Recording
from terrace.simulate.held_activations import Held, activation_changes

_VARYING = ("gathered", "grads_full", "activations")


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


NO_MEMORY = MemoryCurve(constant_bytes={}, times_s=(), varying_bytes={})


def memory_curve(recording: Recording, activations: Sequence[Held] | None = None) -> MemoryCurve:
    """Memory of one rank over a recorded step; `activations` has each block's for one micro-batch.

    Raises `ValueError` unless there is one entry per block.
    """
    num_blocks = len(recording.program.blocks)
    if activations is not None and len(activations) != num_blocks:
        raise ValueError(f"activations of {len(activations)} blocks for a program of {num_blocks}")
    steps = _steps(recording, activations or ())
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


def measured_curve(recording: Recording) -> MemoryCurve:
    """Model state of one rank over a measured step, from its samples; activations are not among them."""
    samples = recording.memory
    names = dict.fromkeys(name for sample in samples for name in sample.states_bytes)
    return MemoryCurve(
        constant_bytes={},
        times_s=tuple(sample.moment_s for sample in samples),
        varying_bytes={name: tuple(sample.states_bytes.get(name, 0) for sample in samples) for name in names},
    )


_Step = tuple[float, int, str, float]  # moment, position in the program, category, change in bytes


def _steps(recording: Recording, activations: Sequence[Held]) -> list[_Step]:
    program = recording.program
    changes: dict[tuple[float, int, str, bool], float] = defaultdict(float)

    def change(category: str, position: int, at_end: bool, num_bytes: float) -> None:
        if num_bytes:
            moment_s = (recording.done_s if at_end else recording.started_s)[position]
            # The start and the end of an instruction are kept apart, so that a peak within it is not cancelled.
            changes[moment_s, position, category, at_end] += num_bytes

    for buffer in program.buffers:
        if buffer.category in _VARYING:
            for span in buffer.spans:
                change(buffer.category, span.first, False, buffer.num_bytes)
                change(buffer.category, span.last, True, -buffer.num_bytes)
    if activations:
        for each in activation_changes(program.instructions, activations):
            change("activations", *each)
    steps = [(moment_s, position, category, by) for (moment_s, position, category, _), by in changes.items()]
    return sorted(steps, key=lambda step: step[:2])
