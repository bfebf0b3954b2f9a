"""Outer optimizer state for a rank's slice of a flat buffer, and the outer step.

Per fragment of the model, with anchor a and momentum v equal on all islands, and island i's parameters x_i:

    start    d_i = ref_i - x_i ;  s_i = x_i
    mean     D = sum_i w_i d_i ,  w_i = valid tokens of i since its last start / those of all
    apply    D <- D / Lambda ;  v <- clip(beta v + D, -phi, phi) ;  u = D + beta v | v | D ;  a <- a - eta u
    merge    x_i <- a + keep (x_i - s_i) ;  ref_i <- a

The three forms of u are Nesterov momentum, momentum, and averaging (DiLoCo 2311.08105, CO2 2401.16265). Without a
delay x_i is still s_i when the mean arrives, so s_i is not kept. If the next exchange starts when this one is applied
(a delay of a whole cycle), it sends s_i - x_i from before the merge, and ref_i is s_i, which moves with x_i.

Lambda is the staleness gap penalty (after gap-aware 1909.10802): 1 + the mean over islands of |x_i - s_i| / |d_i|,
both from the previous exchange, because the current ones would have to cross the link while every rank waits.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from terrace.comm.collectives import Collectives
from terrace.comm.rounding import Origin
from terrace.plan.outer import Outer
from terrace.program.message import Transfer
from terrace.runtime.norm import squared_norm
from terrace.runtime.states import OUTER_MESSAGE, OUTER_MOMENTUM, OUTER_START

_DIGESTED = 1 << 20  # elements at a time
_DIGEST_RANGE = 1 << 36  # of a slice: sums over 2^16 ranks are exact in fp64

Piece = Callable[[int], slice]  # of a rank's slice, by tier


class OuterState:
    """Outer optimizer of one slice. `anchor`, `momentum` and `start` are like the gradient, (n,).

    `message` holds the change and then its mean. It is the gradient's memory, which is free between steps, or
    separate if a delay lets the exchange overlap with steps. `x` is the island's parameters in the master dtype.
    """

    def __init__(self, outer: Outer, x: Tensor, gradient: Tensor, origin: Origin) -> None:
        self.outer, self.x, self.origin = outer, x, origin
        self.anchor = x.to(gradient.dtype, copy=True)
        self.momentum = torch.zeros_like(gradient) if outer.optimizer != "average" else None
        self.start = self.anchor.clone() if outer.delay else None
        self.message = torch.zeros_like(gradient) if outer.delay else gradient
        self._has_change = False  # `message` has the change already

    @property
    def nbytes(self) -> int:
        """Bytes of all slices, without the gradient's memory."""
        return self.outer.num_slices * self.anchor.nbytes

    @property
    def shared(self) -> dict[str, Tensor]:
        """State that is equal on all islands, by kind, without the anchor."""
        return {} if self.momentum is None else {OUTER_MOMENTUM: self.momentum}

    @property
    def own(self) -> dict[str, Tensor]:
        """State of this island between steps, by kind, without its parameters."""
        return {} if self.start is None else {OUTER_START: self.start, OUTER_MESSAGE: self.message}

    def begin_again(self) -> None:
        """Reset to the anchor, as just after an exchange."""
        self.x.copy_(self.anchor)
        if self.start is not None:
            self.start.copy_(self.anchor)
            self.message.zero_()
        self.go_on()

    def go_on(self) -> None:
        """Continue from restored slices, between steps, with no change in `message`."""
        self._has_change = False

    def take(self) -> Tensor:
        """Write this island's change into `message`. Returns its squared norm, fp64."""
        if not self._has_change:
            ref = self.start if self.start is not None and self.outer.sends_last else self.anchor
            torch.sub(ref, self.x, out=self.message)
        if self.start is not None:
            self.start.copy_(self.x)
        self._has_change = False
        return squared_norm(self.message)

    def exchange(
        self, collectives: Collectives, transfer: Transfer, part: Piece, weight: Tensor, *, inner: int, outermost: int
    ) -> None:
        """Replace `message` by its weighted mean over islands, as every rank decodes it. Runs on a lane.

        `part(tier)` is this rank's share of the elements among the island's replicas, for tiers from `inner` (the
        island's) to `outermost`.
        """

        def piece(tier: int) -> Tensor:
            return self.message[part(tier)]

        own = piece(inner)
        own.mul_(weight.to(own.dtype))
        total = collectives.reduce(transfer, own, self.origin)
        piece(transfer.reduced_to(outermost)).copy_(total)
        collectives.gather(transfer, piece, self.origin)
        self.origin.keep()

    def apply(self, stretch: Tensor | None, *, waits: bool, moved: bool) -> Tensor:
        """Take the outer step. Returns squared norms (2), fp64, of x_i - s_i and of the mean.

        `stretch` is Lambda; `moved` says that x_i may differ from s_i. The working copy is stale afterwards.
        """
        outer, mean = self.outer, self.message
        norm = squared_norm(mean)  # before the penalty: it is compared with the norms of changes
        if stretch is not None:
            mean.div_(stretch.to(mean.dtype))
        self._step(mean)
        if self.start is None or waits:
            self.x.copy_(self.anchor)
            if self.start is not None:
                self.start.copy_(self.anchor)
            return torch.stack([torch.zeros_like(norm), norm])
        torch.sub(self.start, self.x, out=mean)  # what changed since the start, negated
        meanwhile = squared_norm(mean)
        torch.sub(self.anchor, mean, alpha=outer.keep, out=self.x)
        if outer.sends_last:
            self.start.copy_(self.x)
            # Without a step since its start there is no change, and the next start may be steps away.
            self._has_change = moved
        return torch.stack([meanwhile, norm])

    def _step(self, mean: Tensor) -> None:
        outer = self.outer
        if self.momentum is None:
            self.anchor.sub_(mean, alpha=outer.rate)
            return
        self.momentum.mul_(outer.beta).add_(mean)
        if outer.clip:
            self.momentum.clamp_(-outer.clip, outer.clip)
        if outer.optimizer == "nesterov":
            self.anchor.sub_(mean, alpha=outer.rate).sub_(self.momentum, alpha=outer.rate * outer.beta)
        else:
            self.anchor.sub_(self.momentum, alpha=outer.rate)

    def digest(self) -> Tensor:
        """Checksum of the anchor's bits, an fp64 integer that can be summed over ranks. Equal for equal slices."""
        bits = self.anchor.view(torch.int32)
        total = torch.zeros((), dtype=torch.int64, device=bits.device)
        for start in range(0, bits.numel(), _DIGESTED):
            part = bits[start : start + _DIGESTED].to(torch.int64)
            # Odd weights by place, so that a swap is seen; int64 wraps, which is exact.
            total += (part * torch.arange(2 * start + 1, 2 * (start + part.numel()), 2, device=bits.device)).sum()
        return total.remainder(_DIGEST_RANGE).double()
