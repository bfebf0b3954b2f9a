"""Rounding errors of messages: fed back into the next message, and measured.

Error feedback (arXiv 1901.09847): a rank that sends x over some hop keeps the residual

    r <- (x + r) - decoded(x + r)          and sends          encoded(x + r)

so that over many steps the sum of the decoded messages follows the sum of the exact ones.

The relative error of a message class in a step is sqrt(sum of squared errors / sum of squares), over the messages of
all ranks. It is measured on a sample of the message to a rank's first peer, a different part each time, because
decoding whole messages would double their cost.
"""

import math
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from terrace.accelerator import has_streams
from terrace.comm.ledger import Meter
from terrace.plan.wire import MessageClass

_SAMPLE_NUMEL = 4096
_AFTER_A_STEP = (MessageClass.REFRESH, MessageClass.OUTER)  # classes that may be under way when a step has ended

_Key = tuple[MessageClass, str, int]  # message class, origin, tier
Hop = tuple[MessageClass, int, str]  # message class, tier, leg


class Origin:
    """Source of messages: a block's name, for error messages, and the residuals of its gradients.

    `keep` commits residuals, and `undo` restores those of the last `keep`, for a step that is given up. So each
    residual is stored twice.
    """

    def __init__(self, name: str, device: torch.device, meter: Meter) -> None:
        self.name = name
        self._device = device
        self._meter = meter
        self.residuals: dict[Hop, Tensor] = {}  # [rows, numel], fp32, of each hop that has sent
        self._before: dict[Hop, Tensor] = {}  # at the last `keep`, of those in `_changed`
        self._changed: set[Hop] = set()
        # A category of every report, as in the formula.
        meter.add("feedback", 0)

    def residual(self, message: MessageClass, tier: int, leg: str, rows: int, numel: int) -> Tensor:
        """Residual [rows, numel], fp32, of one hop; initially zero."""
        key = (message, tier, leg)
        if key not in self.residuals:
            self._add(key, torch.zeros(rows, numel, dtype=torch.float32, device=self._device))
        # Once a step: later micro-batches of the step add to what the first one left.
        if key not in self._changed:
            self._before[key].copy_(self.residuals[key])
            self._changed.add(key)
        return self.residuals[key]

    def restore(self, hop: Hop, values: Tensor) -> None:
        if hop in self.residuals:
            self.residuals[hop].copy_(values)
        else:
            self._add(hop, values.to(self._device, torch.float32, copy=True))

    def forget(self) -> None:
        self._changed.clear()
        for values in self.residuals.values():
            values.zero_()

    def _add(self, hop: Hop, values: Tensor) -> None:
        self.residuals[hop], self._before[hop] = values, torch.empty_like(values)
        self._meter.add("feedback", 2 * values.nbytes)

    def keep(self) -> None:
        """Commit the residuals. No lane may be running messages of this origin, here and in `undo`."""
        self._changed.clear()

    def undo(self) -> None:
        for key in self._changed:
            self.residuals[key].copy_(self._before[key])
        self._changed.clear()


class ErrorLog:
    """Squared errors and squares of sampled messages since the last `take`, by message class, origin and tier.

    Each key is written by one lane only. `take` requires idle lanes, except for messages that may be in flight after
    a step: their sums stay until a later `take` finds them complete.
    """

    def __init__(self, messages: tuple[MessageClass, ...], device: torch.device) -> None:
        self.messages = messages
        self._device = device
        self._lock = threading.Lock()  # a lane may add to the sums of a message under way while they are taken
        self._sums: dict[_Key, Tensor] = {}
        self._made: dict[_Key, torch.Event] = {}  # on a device: recorded once a message's sums are computed
        self._last: dict[_Key, Tensor] = {}
        self._visits: dict[tuple[_Key, str], int] = defaultdict(int)
        self._is_aside = False

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Context whose messages are not measured, except those of a step that are still in flight."""
        self._is_aside = True
        try:
            yield
        finally:
            self._is_aside = False

    def sample(self, key: _Key, leg: str, numel: int, block: int) -> slice:
        """The part of a message of `numel` elements to measure. It starts at a codec block."""
        visit = self._visits[key, leg]
        self._visits[key, leg] += self._counts(key)
        # Each visit measures the next part, so that over the steps all of a message is sampled.
        places = max(1, -(-numel // _SAMPLE_NUMEL))
        start = visit % places * _SAMPLE_NUMEL // block * block
        return slice(start, min(numel, start + _SAMPLE_NUMEL))

    def add(self, key: _Key, sums: Tensor) -> None:
        """Add [squared error, square] of a sample, fp64. Ignores classes other than `messages`."""
        if key[0] not in self.messages or not self._counts(key):
            return
        # On the device: a copy to the host would make the lane wait.
        with self._lock:
            self._sums[key] = self._sums[key] + sums if key in self._sums else sums
            if has_streams(sums.device) and key[0] in _AFTER_A_STEP:
                event = self._made[key] = torch.Event(sums.device)
                event.record(torch.accelerator.current_stream(sums.device))

    def take(self) -> Tensor:
        """Return [squared error, square] of every lossy class, concatenated, fp64, and reset the sums."""
        total = torch.zeros(len(self.messages), 2, dtype=torch.float64, device=self._device)
        if self._is_aside:
            return total.view(-1)
        with self._lock:
            late = {key for key, event in self._made.items() if not event.query()}
            # Kept for the error message: the total says that a value is not finite, the parts say whose.
            self._last = {key: sums for key, sums in self._sums.items() if key not in late}
            self._sums = {key: self._sums[key] for key in late}
            self._made = {key: self._made[key] for key in late}
        for (message, _, _), sums in self._last.items():
            total[self.messages.index(message)] += sums
        return total.view(-1)

    def _counts(self, key: _Key) -> bool:
        return not self._is_aside or key[0] in _AFTER_A_STEP

    def not_finite(self) -> list[str]:
        """Names of messages with inf or nan in the last `take`."""
        return [
            f"{message.value} of block {origin!r}"
            for (message, origin, _), sums in self._last.items()
            if not bool(torch.isfinite(sums).all())
        ]


def relative_errors(messages: tuple[MessageClass, ...], totals: list[float]) -> dict[str, float]:
    """Relative error of each message class in use, from `ErrorLog.take` summed over all ranks."""
    found = {}
    for message, squared, square in zip(messages, totals[::2], totals[1::2], strict=True):
        if square != 0.0:
            found[message.value] = math.sqrt(squared / square)
    return found
