"""Sums of a step: one rank's values before CLIP's message, and the figures computed from their total."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from terrace.comm.rounding import Origin, relative_errors
from terrace.program.exchange import OuterResult
from terrace.program.loads import Loads
from terrace.runtime.batch import Batch
from terrace.runtime.flat_param import FlatParam
from terrace.runtime.objective import Objective, ignored_label, num_counted

if TYPE_CHECKING:
    from terrace.plan.wire import MessageClass
    from terrace.runtime.routing.passages import Passages


@dataclass(frozen=True)
class StepSums:
    """Results of CLIP: mean loss and gradient norm over the valid tokens of the global batch.

    Under a plan with islands, CLIP sums over one island and its part of the batch. `figures` end with the squared
    error and the square of every lossy message class since the previous CLIP.
    """

    loss: Tensor
    grad_norm: Tensor
    num_tokens: Tensor
    figures: tuple[float, ...] = ()  # loss, norm, tokens, sums of routers and rounding, on the host
    counts: tuple[int, ...] = ()  # of experts' tokens and rows, on the host
    largest: tuple[float, ...] = ()  # scores of heads under QK-clip, on the host
    loss_scale: float = 1.0  # of the gradients, not of these figures

    @staticmethod
    def of(
        total: Tensor,
        num_of_routers: int = 0,
        loss_scale: float = 1.0,
        counts: Tensor | None = None,
        num_scores: int = 0,
    ) -> "StepSums":
        """Figures from `total`, summed over CLIP's ranks: squared norm, loss, tokens, router sums, rounding errors.

        Gradients are scaled by `loss_scale`, which is divided out of the norm. `counts`, and the largest scores, which
        are the last `num_scores` of `total`, come to the host with them.
        """
        total, largest = torch.split(total, [len(total) - num_scores, num_scores])
        # Losses and gradients are sums over tokens: one division by the global count makes them means.
        (squared, loss, count), rest = total[:3].unbind(), total[3:]
        of_routers, rounding = rest[:num_of_routers], rest[num_of_routers:]
        least = torch.where(count > 0, count, 1.0)  # weights may sum to less than 1
        loss, norm = loss / least, squared.sqrt() / least / loss_scale
        # The one transfer to the host of a step.
        parts = (
            torch.stack([loss, norm, count]),
            of_routers,
            rounding,
            largest,
            *(() if counts is None else (counts.double(),)),
        )
        numbers, first, last = torch.cat(parts).tolist(), len(total), len(total) + num_scores
        figures, scores, of_experts = (
            tuple(numbers[:first]),
            tuple(numbers[first:last]),
            tuple(map(int, numbers[last:])),
        )
        return StepSums(loss, norm, count, figures, of_experts, scores, loss_scale)

    @property
    def is_finite(self) -> bool:
        """Whether loss, norm and rounding errors are finite; in a block format only the last show inf and nan."""
        return all(map(math.isfinite, self.figures))

    def on_host(self) -> "StepSums":
        """The same loss, norm and tokens in memory of the host."""
        loss, norm, count = torch.tensor(self.figures[:3], dtype=torch.float64).unbind()
        return replace(self, loss=loss, grad_norm=norm, num_tokens=count)

    def scale(self, clip_norm: float) -> Tensor:
        """Factor that turns the summed, scaled gradient into a mean of norm at most `clip_norm`; 0 does not clip."""
        clip = (clip_norm / (self.grad_norm + 1e-6)).clamp(max=1.0) if clip_norm > 0 else 1.0
        return clip / torch.where(self.num_tokens > 0, self.num_tokens, 1.0) / self.loss_scale


def agreed_scale(squared_norm: float, num_tokens: float) -> Sequence[Tensor]:
    """The scale of a block's update without clipping, for the sums of AGREE; none if its gradient is not finite."""
    if not math.isfinite(squared_norm):
        return ()
    nothing, count = torch.zeros((), dtype=torch.float64), torch.tensor(num_tokens, dtype=torch.float64)
    return [StepSums(nothing, nothing, count).scale(0.0)]


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One step: mean loss over the valid tokens of the global batch, and its gradient norm before clipping.

    Under a plan with islands, loss, norm and tokens are those of this rank's island. If batches have `weights`,
    `num_tokens` is their rounded sum. `router_losses` contribute only their gradient, and are divided by the same
    number of tokens; `dropped` counts router choices beyond capacity, if there is one. `quantisation_error` is the
    relative error of each message class sent in a block format between the previous step's CLIP and this one's, so
    REFRESH's is the previous step's. `loads` are those of the routers on this rank's stage; None without routers, in
    an evaluation, and in a step that was given up. `outer` are the exchanges between islands that were applied. In
    fp16, `loss_scale` is the step's, and the step was `skipped`, without updates, if its gradients were not finite.
    """

    loss: float
    grad_norm: float
    num_tokens: int
    time_s: dict[str, float]
    quantisation_error: dict[str, float]
    router_losses: dict[str, float] = field(default_factory=dict)
    dropped: int | None = None
    loads: Loads | None = None
    outer: tuple[OuterResult, ...] = ()
    loss_scale: float | None = None
    skipped: bool = False


def step_result(
    sums: StepSums,
    passages: "Passages",
    rounding: "tuple[MessageClass, ...]",
    time_s: dict[str, float],
    loads: Loads | None,
    outer: Sequence[OuterResult],
) -> StepResult:
    """The result of a step; `rounding` are the message classes of its rounding errors."""
    names, balance = passages.names, passages.balance
    (loss, norm, count), rest = sums.figures[:3], sums.figures[3:]
    of_routers, errors = dict(zip(names, rest, strict=False)), list(rest[len(names) :])
    return StepResult(
        loss=loss,
        grad_norm=norm,
        num_tokens=round(count),
        time_s=time_s,
        quantisation_error=relative_errors(rounding, errors),
        router_losses={name: of_routers[name] / (count or 1.0) for name in balance.losses},  # weights may be small
        dropped=int(of_routers["dropped"]) if balance.capacity else None,
        loads=loads,
        outer=tuple(outer),
    )


class GivenUp(Exception):  # noqa: N818  (every rank expects it and raises its own error)
    """A step ended at its CLIP, without updates and with the same `sums` on every rank."""

    def __init__(self, sums: StepSums) -> None:
        super().__init__()
        self.sums = sums


def end_gradients(flats: Iterable[FlatParam], edges: Iterable[Origin], sums: StepSums, gives_up: bool) -> None:
    """After CLIP: commit the gradients, or raise `GivenUp` if `gives_up` or the sums are not finite.

    `edges` are the origins of the messages to other stages.
    """
    # All ranks have the same sums, so all decide the same; nothing has been updated yet.
    given_up = gives_up or not sums.is_finite
    for flat in flats:
        flat.gradient.end(undo=given_up)
    for origin in edges:
        (origin.undo if given_up else origin.keep)()
    if given_up:
        raise GivenUp(sums)


def own_sums(
    flats: Iterable[FlatParam],
    loss: Tensor,
    batches: Sequence[Batch],
    objective: Objective,
    of_routers: Tensor,
    *,
    counts_loss: bool,
) -> Tensor:
    """Squared gradient norm of `flats`; loss and valid tokens, unless another rank counts them; router sums. fp64."""
    ignored = ignored_label(objective)
    # Not `* 0`: zero times an infinite norm or loss is nan.
    nothing = torch.zeros_like(loss)
    # Each gradient element counts once: only the first of the ranks that replicate a slice adds its square.
    gradients = (flat.gradient for flat in flats if flat.is_first(flat.layout.optimizer))
    counted = [each for each in gradients if each.has_elements]
    squares = torch.stack([each.squared_norm for each in counted]).sum() if counted else nothing
    num_tokens = torch.stack([num_counted(batch, ignored) for batch in batches]).sum()
    return torch.cat([torch.stack([squares, *((loss, num_tokens) if counts_loss else (nothing, nothing))]), of_routers])
