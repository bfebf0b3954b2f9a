"""The state of the outer loop for a rank's slice of a flat buffer, and the outer step on it.

Per fragment of the model, with anchor a and momentum v that all islands share, and island i's parameters x_i:

    start    d_i = ref_i - x_i ;  s_i = x_i
    mean     D = sum_i w_i d_i ,  w_i = valid tokens of i since its last start / those of all
    apply    D <- D / Lambda ;  v <- clip(beta v + D, -phi, phi) ;  u = D + beta v | v | D ;  a <- a - eta u
    merge    x_i <- a + keep (x_i - s_i) ;  ref_i <- a

u is of Nesterov's momentum, of momentum, of an average (DiLoCo 2311.08105, CO2 2401.16265). Without a delay x_i is s_i
when the mean arrives, and nothing of it is kept. Where the next exchange starts as this one is applied (a delay of a
whole cycle), it sends s_i - x_i from before the merge, and ref_i is s_i, which moves with x_i.

Lambda is the staleness gap penalty (after gap-aware 1909.10802): 1 + the mean over islands of |x_i - s_i| / |d_i|, both
of the exchange before. The present ones would have to cross the link while everybody waits.
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
    """The outer loop of one slice: `anchor`, `momentum` and `start` like the gradient, (n,) each.

    `message` is the memory of the change and of its mean: the gradient's, free between steps, unless a delay lets the
    exchange run beside them. `x` is the island's parameters in the master dtype.
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
        """Bytes of all slices, without the gradient's."""
        return self.outer.num_slices * self.anchor.nbytes

    @property
    def shared(self) -> dict[str, Tensor]:
        """State that all islands have alike, without the anchor, by kind."""
        return {} if self.momentum is None else {OUTER_MOMENTUM: self.momentum}

    @property
    def own(self) -> dict[str, Tensor]:
        """State of this island between steps, without its parameters, by kind."""
        return {} if self.start is None else {OUTER_START: self.start, OUTER_MESSAGE: self.message}

    def begin_again(self) -> None:
        """From the anchor, as if the last exchange were just over."""
        self.x.copy_(self.anchor)
        if self.start is not None:
            self.start.copy_(self.anchor)
            self.message.zero_()
        self.go_on()

    def go_on(self) -> None:
        """From the slices as they are, between steps: no change is in `message`."""
        self._has_change = False

    def take(self) -> Tensor:
        """Put this island's change into `message`; its squared norm, fp64."""
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
        """`message` becomes the weighted mean over islands, as every member decodes it. Runs on a lane.

        `part` gives the elements that replicas inside an island share out, by tier: from `inner`, the island's, to the
        `outermost`.
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
        """Take the outer step; squared norms (2), fp64, of x_i - s_i and of the mean. The working copy is then stale.

        `stretch` is Lambda; `moved` says that x_i may differ from s_i.
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
        """A number of the anchor's bits, fp64: equal on ranks with the same slice, and so summed over islands."""
        bits = self.anchor.view(torch.int32)
        total = torch.zeros((), dtype=torch.int64, device=bits.device)
        for start in range(0, bits.numel(), _DIGESTED):
            part = bits[start : start + _DIGESTED].to(torch.int64)
            # Odd weights by place, so that a swap is seen; int64 wraps, which is exact.
            total += (part * torch.arange(2 * start + 1, 2 * (start + part.numel()), 2, device=bits.device)).sum()
        return total.remainder(_DIGEST_RANGE).double()
