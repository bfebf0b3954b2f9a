"""Checks and times a user's blocks during their first step.

In the first micro-batch each block is checked, and run once more for timing. The loss is compared with the losses of
its two halves, since it must be a sum over samples. After the first step all hooks are removed.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from terrace.accelerator import random_state
from terrace.base.errors import ModelError, TrainingError
from terrace.comm.collectives import DTYPES
from terrace.model.decoder import Head
from terrace.plan.members import member_of
from terrace.program.lowering import build_stages
from terrace.program.report import StepReport
from terrace.program.stages import blocks_by_stage
from terrace.runtime.clock import wait_for
from terrace.runtime.engine import Engine
from terrace.runtime.objective import ignored_label
from terrace.runtime.random_state import restored
from terrace.runtime.routing.load import Load
from terrace.simulate.members import predict_member
from terrace.simulate.step import Prediction, Step
from terrace.train.calibrate import measure, played_once

Loss = Callable[[Tensor, Tensor], Tensor]

# A mean gives half of what its two halves give; a sum differs from theirs by rounding, in bf16 by a percent or so.
_SUM_TOLERANCE = 0.1
_PRODUCT = 192  # side of the matrices whose product tells a rank's FLOP/s


@dataclass
class FirstStep:
    """Checks and times blocks during the first micro-batch; `seconds` holds forward seconds by block."""

    names: Sequence[str]
    device: torch.device
    times: bool = True  # False under a tensor axis, whose blocks would send messages when run again
    seconds: dict[int, float] = field(default_factory=dict)

    @contextmanager
    def watching(self, engine: Engine) -> Iterator[None]:
        """Watches the blocks of `engine` while the body runs. Raises `ModelError` for a block that cannot be
        trained.
        """
        modules = engine.state.modules
        handles = [self._watch(index, modules[index], engine.load) for index in engine.program.stage.own]
        # Running statistics would differ between ranks, so any changed buffer is refused.
        before = {index: _buffers(modules[index]) for index in engine.program.stage.own}
        try:
            yield
        finally:
            # Removed even on an error: the blocks belong to the user.
            for handle in handles:
                handle.remove()
        for index, buffers in before.items():
            for name, mark in _buffers(modules[index]).items():
                if buffers.get(name) != mark:
                    raise ModelError(
                        f"block {self.names[index]} changes its buffer {name!r} in a forward: ranks would drift apart, "
                        "and no checkpoint has it; use a module without running statistics, such as GroupNorm or "
                        "LayerNorm for BatchNorm"
                    )

    def _watch(self, index: int, block: nn.Module, load: Load) -> RemovableHandle:
        def look(module: nn.Module, inputs: tuple[Any, ...], output: object) -> None:
            # A module may serve as several blocks, and running it again calls this hook.
            if index in self.seconds:
                return
            self._check(index, output)
            self.seconds[index] = 0.0
            if self.times:
                with load.paused(index):
                    self.seconds[index] = self._time(block, inputs)

        # The runtime runs the head of a decoder part by part, when it has its loss to itself, but its norm as it is.
        return (block.norm if isinstance(block, Head) else block).register_forward_hook(look)

    def _check(self, index: int, output: object) -> None:
        name, is_last = self.names[index], index == len(self.names) - 1
        if not isinstance(output, Tensor):
            raise ModelError(
                f"block {name} returns a {type(output).__name__}: what passes from a block to the next is one tensor, "
                "so wrap the module in one that returns it"
            )
        if not (is_last or output.is_floating_point()):
            raise ModelError(
                f"block {name} returns {output.dtype}: what passes between blocks needs a gradient, so it must be "
                "floating point; join the block with the one after it"
            )

    def _time(self, module: nn.Module, inputs: tuple[Any, ...]) -> float:
        # The random state is restored, so that timing does not change dropout in the step.
        with torch.no_grad(), restored(random_state(self.device), self.device):
            wait_for(self.device)
            begin = time.perf_counter()
            module.forward(*inputs)
            wait_for(self.device)
            return time.perf_counter() - begin


class CheckedLoss:
    """A user's loss function, checked on its first call."""

    def __init__(self, loss: Loss, check_sum: bool) -> None:
        self._loss = loss
        self.ignore_index = ignored_label(loss)
        self._check_sum = check_sum
        self._is_checked = False

    def __call__(self, output: Tensor, labels: Tensor) -> Tensor:
        """Raises `TrainingError` if the first value is not a sum over samples."""
        loss = self._loss(output, labels)
        if not self._is_checked:
            self._is_checked = True
            self._check(loss, output, labels)
        return loss

    def _check(self, loss: object, output: Tensor, labels: Tensor) -> None:
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise TrainingError(f"loss(output, labels) returns {found}: return one number, the SUM of the losses")
        num = labels.shape[0] if labels.dim() else 0
        if not self._check_sum or num < 2 or output.dim() == 0 or output.shape[0] != num:
            return
        with torch.no_grad():
            # A mean over samples fails here: the means of two halves add up to twice the whole.
            whole = float(loss.detach())
            halves = [float(self._loss(output[part], labels[part])) for part in (slice(num // 2), slice(num // 2, num))]
        if abs(sum(halves) - whole) > _SUM_TOLERANCE * max(abs(whole), *map(abs, halves)):
            raise TrainingError(
                f"loss(output, labels) is not a sum: {num} samples give {whole:.4g}, two halves {halves[0]:.4g} "
                f"and {halves[1]:.4g}. The losses of a step are added up over micro-batches and ranks and divided "
                f'once, by the number of labels that are not {self.ignore_index}; use reduction="sum". For a loss that '
                "is no sum over samples, give Trainer check_loss=False"
            )


def _buffers(module: nn.Module) -> dict[str, tuple[int, int]]:
    # Identity and version counter together reveal a replaced and an updated buffer.
    return {name: (id(buffer), buffer._version) for name, buffer in module.named_buffers()}


def predict(engine: Engine, seconds: Mapping[int, float], progress: Callable[[str], None]) -> StepReport:
    """Predicts this rank's step from the forward seconds of its blocks. Every rank calls this.

    Measures the links first; `progress` receives messages. A backward costs twice the forward, or as much as the
    forward if no weight is trained.
    """
    program = engine.program
    side = torch.ones(_PRODUCT, _PRODUCT, dtype=DTYPES[program.plan.compute], device=engine.device)
    cluster = measure(engine, lambda: side @ side, 2 * _PRODUCT**3, progress)
    measured: dict[int, list[float]] = defaultdict(list)
    # Ranks of one stage time the same blocks, so their mean is used: of the seconds at the mean speed of all members.
    speeds = [member.speed for member in cluster.tiers[-1].members]
    for rank, own in enumerate(engine.comm.exchange(list(seconds.items()))):
        speed = speeds[member_of(cluster, rank)] if speeds else 1.0
        for block, block_s in own:
            measured[block].append(speed * block_s)
    # Equivalent FLOPs: a block need not consist of matrix products.
    peak = cluster.device.peak_flops_per_s[program.plan.compute]
    flops = [peak * sum(measured[block]) / len(measured[block]) for block in range(len(engine.state.specs))]

    def play() -> Prediction:
        plan = program.plan
        if program.stage.num_stages > 1:  # as the engine shared the blocks, before anything was measured
            built = build_stages(program.cluster, plan, engine.state.specs, program.num_micros, program.model.sequence)
            plan = replace(plan, stages=blocks_by_stage([each.stage for each in built]))
        step = Step(
            cluster=cluster,
            plan=plan,
            blocks=tuple(engine.state.specs),
            num_micros=program.num_micros,
            sequence=program.model.sequence,
            work=tuple(flops),
        )
        return predict_member(step)

    return played_once(engine, play)[program.stage.index]
