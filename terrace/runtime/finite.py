"""Finds where a step first computes inf or nan: reruns it up to its CLIP, checking every block's results.

A step whose sums are not finite is given up before its updates (terrace.runtime.step_sums). Parameters, residuals,
micro-batches and the random state are then as before it, so the second run computes the same, but for blocks that were
updated in the backward (`keep.order`). During that run, instance attributes of the runner override methods of its
class; other steps are unaffected.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from terrace.base.errors import TrainingError
from terrace.program.instruction import Instruction, Op
from terrace.program.program import Program
from terrace.runtime.batch import Batch
from terrace.runtime.comm import Comm
from terrace.runtime.model_state import ModelState
from terrace.runtime.norm import is_finite, squared_norm
from terrace.runtime.step_sums import GivenUp, StepResult

if TYPE_CHECKING:
    from terrace.runtime.step_runner import StepRunner

_FORWARD, _BACKWARD, _SUM = range(3)  # the order in which results of a micro-batch depend on each other

_AFTER_ALL = 1 << 40  # in place of a micro-batch

# micro-batch, phase, order in the phase, rank, words: the smallest is the first; a list, to be sent as JSON
Finding = list[Any]


class NonFiniteError(TrainingError):
    """A step with inf or nan, given up before any update behind CLIP. `result` is set on ranks that gave it up."""

    def __init__(self, text: str, result: StepResult | None = None) -> None:
        super().__init__(text)
        self.result = result


@dataclass(frozen=True)
class NotFinite:
    """A training step that this rank gave up, with its first finding."""

    result: StepResult
    first: Finding | None


@dataclass(kw_only=True)
class Visit:
    """Forward and backward of one micro-batch through one block on one rank.

    `loss` is the sum over the labels, in the last block only. `gradient_norm` is the norm of the gradient of the
    block's parameters from this micro-batch alone, not divided by tokens. `bad` names the first result that is not
    finite.
    """

    rank: int
    micro: int
    block: int
    loss: float | None = None
    gradient_norm: float = 0.0
    bad: str = ""


@dataclass(kw_only=True)
class Examination:
    """A rank's visits in the order of their forwards, and all results that were not finite."""

    visits: dict[tuple[int, int], Visit] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @property
    def first(self) -> Finding | None:
        return min(self.findings, default=None)


def examine(runner: "StepRunner", state: ModelState, batches: Sequence[Batch], program: Program) -> Examination:
    """Run a training step again up to its CLIP. Nothing is updated.

    The caller restores the random state of the first run. `batches` are the micro-batches after the engine's axes
    have split them. Every rank calls this.
    """
    found = _Watch(runner, state)
    runner.updates.gives_up = True
    try:
        with found.watching():
            runner.run(batches, 0.0, program)
    except GivenUp:
        pass
    finally:
        runner.updates.gives_up = False
    found.look_at_sums()
    return found.examination


def agree(comm: Comm, problem: NotFinite | None) -> None:
    """Raise `NonFiniteError` on every rank of the island if one has a problem. All of its ranks call this."""
    own = (
        None
        if problem is None
        else [problem.result.loss, problem.result.grad_norm, problem.first, comm.collectives.errors.not_finite()]
    )
    gathered = [each for each in comm.exchange_inside(own) if each is not None]
    if not gathered:
        return
    loss, norm, _, _ = gathered[0]
    first = min((first for _, _, first, _ in gathered if first is not None), default=None)
    messages = [each for _, _, _, rounding in gathered for each in rounding]
    if first is not None:
        what = words(first)
    elif messages:
        what = f"inf or nan in {messages[0]}"
    else:
        what = "all that blocks compute is finite, but the norm of their gradients is not"
    world = comm.program.model.world_layout
    where = f" on island {world.island_of(world.coordinates(comm.rank))}" if world.num_islands > 1 else ""
    done, fix = "nothing was updated", "lower the learning rate, or leave the batch out"
    if comm.program.plan.keep.layer_wise:
        done, fix = "blocks whose gradients are finite were updated", f"resume from the last checkpoint, and {fix}"
    raise NonFiniteError(
        f"loss {loss:.6g} and gradient norm {norm:.6g}{where}: {what}; {done}: {fix}",
        None if problem is None else problem.result,
    )


def words(finding: Finding) -> str:
    """A finding as part of a sentence: which result is not finite, on which rank, in which micro-batch."""
    micro, phase, _, rank, said = finding
    return f"{said}, on rank {rank}" + (f" in micro-batch {micro}" if phase != _SUM else "")


def _appending(name: str, found: list[tuple[str, Tensor]]) -> Callable[[Tensor], None]:
    return lambda gradient: found.append((name, gradient))


class _Watch:
    def __init__(self, runner: "StepRunner", state: ModelState) -> None:
        self._runner, self._state = runner, state
        self._names = [spec.name for spec in state.specs]
        self.examination = Examination()

    @contextmanager
    def watching(self) -> Iterator[None]:
        passes, handlers = self._runner.passes, dict(self._runner.handlers)
        hidden: list[tuple[object, str, Callable[..., Any]]] = [
            (passes.calls, "run", self._after_forward(passes.calls.run)),
            (passes, "backward_input", self._around_backward(passes.backward_input, gives_input_gradient=True)),
            (passes, "backward_weight", self._around_backward(passes.backward_weight)),
        ]
        for owner, name, function in hidden:
            vars(owner)[name] = function
        self._runner.handlers |= {Op.BACKWARD_INPUT: passes.backward_input, Op.BACKWARD_WEIGHT: passes.backward_weight}
        try:
            yield
        finally:
            for owner, name, _ in hidden:
                del vars(owner)[name]
            self._runner.handlers = handlers

    def look_at_sums(self) -> None:
        """Check gradients summed over micro-batches and ranks, unless an earlier result was not finite."""
        if self.examination.findings:
            return
        for index, flats in self._state.flats.items():
            for flat in flats:
                if flat.spec.trainable and not is_finite(flat.gradient.finite_witness):
                    said = f"the gradient of block {flat.name!r}, summed over micro-batches and ranks, is not finite"
                    self.examination.findings.append([_AFTER_ALL, _SUM, -index, self._state.rank, said])

    def _after_forward(self, run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def forward(block: int, inputs: Tensor, micro: int) -> Tensor:
            output = run(block, inputs, micro)
            # A block that is recomputed runs a second time, in its backward.
            if (micro, block) not in self.examination.visits:
                is_last = block == len(self._names) - 1
                visit = self._visit(micro, block)
                visit.loss = float(output.detach()) if is_last else None
                if not is_finite(inputs):
                    self._bad(visit, _FORWARD, "the input")
                elif not is_finite(output):
                    self._bad(visit, _FORWARD, "the loss" if is_last else "the output", self._bad_parameter(block))
            return output

        return forward

    def _around_backward(self, run: Callable[..., None], *, gives_input_gradient: bool = False) -> Callable[..., None]:
        def backward(now: Instruction, **options: bool) -> None:
            passes, visit = self._runner.passes, self._visit(now.micro, now.block)
            step = passes.step
            kept = step.kept.get((now.block, now.micro))
            before = {name: view.clone() for name, view in self._gradients(now.block)}
            total, step.loss = step.loss, torch.zeros_like(step.loss)
            with self._unbuffered(now.block) as added:
                run(now, **options)
            # A head with a chunked loss computes it here, and has no forward.
            if gives_input_gradient and passes.chunked is not None and now.block == len(self._names) - 1:
                visit.loss = float(step.loss)
                if not math.isfinite(visit.loss):
                    self._bad(visit, _FORWARD, "the loss", self._bad_parameter(now.block))
            step.loss = total + step.loss
            squared = visit.gradient_norm**2
            for name, view in self._gradients(now.block):
                added.append((name, view - before[name] if name in before else view))
            for name, own in added:
                squared += float(squared_norm(own.flatten()))
                if not is_finite(own):
                    self._bad(visit, _BACKWARD, f"the gradient of parameter {name}")
            visit.gradient_norm = math.sqrt(squared)
            gradient = kept.inputs.grad if kept is not None and gives_input_gradient else None
            if gradient is not None and not is_finite(gradient):
                self._bad(visit, _BACKWARD, "the gradient of the input")

        return backward

    def _gradients(self, block: int) -> Iterator[tuple[str, Tensor]]:
        for index in self._runner.parameters.needed_by[block]:
            for flat in self._state.flats[index]:
                if flat.spec.trainable:
                    named = zip(flat.spec.params, flat.parameters, strict=True)
                    yield from (
                        (f"{flat.name}.{spec.name}", view)
                        for spec, parameter in named
                        if (view := flat.gradient.views.written(parameter)) is not None
                    )

    @contextmanager
    def _unbuffered(self, block: int) -> Iterator[list[tuple[str, Tensor]]]:
        """Collect gradients that backwards in this context add without a buffer: those of rows of a spread table."""
        found = list[tuple[str, Tensor]]()
        flats = [flat for index in self._runner.parameters.needed_by[block] for flat in self._state.flats[index]]
        before = [flat.gradient.observe for flat in flats]
        for flat in flats:
            flat.gradient.observe = _appending(f"{flat.name}.{flat.spec.params[0].name}", found)
        try:
            yield found
        finally:
            for flat, observe in zip(flats, before, strict=True):
                flat.gradient.observe = observe

    def _bad_parameter(self, block: int) -> str:
        for index in self._runner.parameters.needed_by[block]:
            for name, parameter in self._state.named_parameters(index):
                if parameter.untyped_storage().nbytes() and not is_finite(parameter):
                    return f", and so is its parameter {self._names[index]}.{name}"
        return ""

    def _visit(self, micro: int, block: int) -> Visit:
        key = micro, block
        if key not in self.examination.visits:
            self.examination.visits[key] = Visit(rank=self._state.rank, micro=micro, block=block)
        return self.examination.visits[key]

    def _bad(self, visit: Visit, phase: int, what: str, why: str = "") -> None:
        said = f"{what} of block {self._names[visit.block]!r} is not finite{why}"
        order = visit.block if phase == _FORWARD else -visit.block
        self.examination.findings.append([visit.micro, phase, order, visit.rank, said])
        visit.bad = visit.bad or what
