"""The sums of a step: one rank's part before CLIP's message, and the figures that the total gives."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from terrace.model.decoder import IGNORE_INDEX
from terrace.runtime.batch import Batch
from terrace.runtime.flat_param import FlatParam
from terrace.runtime.norm import squared_norm


@dataclass(frozen=True)
class StepSums:
    """The results of CLIP: mean loss and gradient norm over the valid tokens of the global batch.

    Under a plan with islands, CLIP sums over one island, and these are of its part of the batch. `rounding` holds
    squared error and square of every lossy message class since the previous CLIP.
    """

    loss: Tensor
    grad_norm: Tensor
    num_tokens: Tensor
    rounding: Tensor

    @staticmethod
    def of(total: Tensor) -> "StepSums":
        """The figures of `total`: squared norm, loss and tokens of the ranks of CLIP, then rounding errors."""
        # Losses and gradients are sums over tokens: one division by the global count makes them means.
        (squared, loss, count), rounding = total[:3].unbind(), total[3:]
        count = count.clamp(min=1.0)
        return StepSums(loss / count, squared.sqrt() / count, count, rounding)

    def scale(self, clip_norm: float) -> Tensor:
        """Factor that makes the summed gradient a mean whose norm is at most `clip_norm`; 0 does not clip."""
        clip = (clip_norm / (self.grad_norm + 1e-6)).clamp(max=1.0) if clip_norm > 0 else 1.0
        return clip / self.num_tokens


def own_sums(flats: Iterable[FlatParam], loss: Tensor, batches: Sequence[Batch], *, counts_loss: bool) -> Tensor:
    """Squared gradient norm of `flats`, then `loss` and valid tokens unless another rank counts them, (3,) fp64."""
    # Not `* 0`: zero times an infinite norm or loss is nan.
    nothing = torch.zeros_like(loss)
    # Each gradient element counts once: only the first of the ranks that replicate a slice adds its square.
    counted = [flat.owned for flat in flats if flat.owned.numel() and flat.is_first(flat.layout.optimizer)]
    squares = torch.stack([squared_norm(part) for part in counted]).sum() if counted else nothing
    num_tokens = torch.stack([(batch.labels != IGNORE_INDEX).sum() for batch in batches]).sum().double()
    return torch.stack([squares, *((loss, num_tokens) if counts_loss else (nothing, nothing))])
