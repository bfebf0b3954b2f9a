"""Memory of one rank over a recorded step.

What is held throughout is the formula's (terrace.plan.memory). Gathered blocks are counted from the moment
their GATHER is issued to their FREE; a full gradient from the first backward that adds to it to the end of its
REDUCE; activations, where the caller knows them, from a block's forward on a micro-batch to its backward. So
gathered blocks peak as the formula says, and full gradients at most as high: it assumes the slowest lane.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from terrace.plan.memory import accumulates_in_place
from terrace.plan.wire import FORMATS
from terrace.program import Op
from terrace.simulate.recording import Recording

_VARYING = ("gathered", "grads_full", "activations")


@dataclass(frozen=True, kw_only=True)
class MemoryCurve:
    """Bytes over the step: a constant part, and categories that change at `times_s`.

    `varying_bytes[category][i]` holds from `times_s[i]` to the next; times may be equal, and the first is 0.
    """

    constant_bytes: Mapping[str, int]
    times_s: tuple[float, ...]
    varying_bytes: Mapping[str, tuple[float, ...]]

    @property
    def total_bytes(self) -> list[float]:
        """The sum of everything from each of `times_s` on."""
        constant = sum(self.constant_bytes.values())
        return [constant + sum(parts) for parts in zip(*self.varying_bytes.values(), strict=True)]

    @property
    def peak(self) -> tuple[float, float]:
        """(bytes, seconds) of the highest point; of equals the first."""
        totals = self.total_bytes
        highest = max(range(len(totals)), key=totals.__getitem__)
        return totals[highest], self.times_s[highest]


def memory_curve(
    recording: Recording,
    activation_bytes: Sequence[float] | None = None,
    working_bytes: Sequence[float] | None = None,
) -> MemoryCurve:
    """Return the memory of a recorded step.

    `activation_bytes` holds, for every block, what one micro-batch keeps from its forward to its backward;
    `working_bytes` what its backward needs on top while it runs, such as recomputed activations. Raises
    `ValueError` when their number is not that of the blocks.
    """
    num_blocks = len(recording.program.blocks)
    for given in (activation_bytes, working_bytes):
        if given is not None and len(given) != num_blocks:
            raise ValueError(f"bytes of {len(given)} blocks for a program of {num_blocks}")
    steps = [*_gathered(recording), *_gradients(recording)]
    steps += _activations(recording, activation_bytes or [0] * num_blocks, working_bytes or [0] * num_blocks)
    steps.sort(key=lambda step: step[:2])  # at one moment in program order
    now: dict[str, float] = dict.fromkeys(_VARYING, 0)
    times_s, curve = [0.0], {category: [0.0] for category in _VARYING}
    for moment_s, _, category, change in steps:
        now[category] += change
        times_s.append(moment_s)
        for name in _VARYING:
            curve[name].append(now[name])
    constant = {name: size for name, size in recording.report.memory_bytes.items() if name not in _VARYING}
    return MemoryCurve(
        constant_bytes=constant,
        times_s=tuple(times_s),
        varying_bytes={name: tuple(values) for name, values in curve.items()},
    )


_Step = tuple[float, int, str, float]  # moment, position in the program, category, change in bytes


def _gathered(recording: Recording) -> list[_Step]:
    program = recording.program
    item = FORMATS[program.plan.compute].element_bytes
    whole = [sum(flat.padded for flat in parts) * item for parts in program.flats]
    sign = {Op.GATHER: 1, Op.FREE: -1}
    return [
        (recording.started_s[position], position, "gathered", sign[instruction.op] * whole[instruction.block])
        for position, instruction in enumerate(program.instructions)
        if instruction.op in sign
    ]


def _gradients(recording: Recording) -> list[_Step]:
    program = recording.program
    plan, item = program.plan, FORMATS[program.plan.compute].element_bytes
    buffered = [
        [flat for flat in parts if flat.trainable and not accumulates_in_place(plan, flat.layout)]
        for parts in program.flats
    ]
    trainable = [sum(flat.padded for flat in parts) * item for parts in buffered]
    if not any(trainable):
        return []
    held: set[int] = set()
    steps: list[_Step] = []
    for position, instruction in enumerate(program.instructions):
        block = instruction.block
        if instruction.op is Op.BACKWARD:
            opened = {block, *program.blocks[block].borrows} - held
            held |= opened
            size = sum(trainable[index] for index in opened)
            steps.append((recording.started_s[position], position, "grads_full", size))
        elif instruction.op is Op.REDUCE:
            held.discard(block)
            steps.append((recording.done_s[position], position, "grads_full", -trainable[block]))
    return steps


def _activations(recording: Recording, kept: Sequence[float], working: Sequence[float]) -> list[_Step]:
    steps: list[_Step] = []
    for position, instruction in enumerate(recording.program.instructions):
        block, started_s, done_s = instruction.block, recording.started_s[position], recording.done_s[position]
        if instruction.op is Op.FORWARD:
            steps.append((started_s, position, "activations", kept[block]))
        elif instruction.op is Op.BACKWARD:
            steps.append((started_s, position, "activations", working[block]))
            steps.append((done_s, position, "activations", -kept[block] - working[block]))
    return [step for step in steps if step[3]]
