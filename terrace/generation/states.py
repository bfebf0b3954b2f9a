"""States of linear layers during generation: memory of fixed size for each sequence, whatever its length.

The scheduler gives every running sequence a slot (terrace.generation.scheduler). A slot has, for every linear layer,
the state of each head and the last inputs of the convolutions. Spans of a step that have equally many tokens and are
next to each other run together: the decoding sequences are one part, each chunk of a prompt another. A span that begins
at position 0 begins with a state of zeros.

Shape legend: R spans of L tokens, N value heads with states of (K, V), P taps and F features of the convolutions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from terrace.model.operations import Delta
from terrace.plan.dims import state_shapes

_LEAST = 8  # slots of the first allocation; later ones double them


@dataclass(frozen=True)
class _Part:
    memory: Sequence[Tensor]  # of one layer: tails (slots, P - 1, F), states (slots, N, K, V)
    rows: slice  # of the step's tokens
    slots: Tensor  # (R)
    goes_on: Tensor  # (R), 0 for spans that begin at position 0

    def cut(self, x: Tensor) -> Tensor:
        rows = x[0, self.rows]
        return rows.view(len(self.slots), -1, *rows.shape[1:])

    def load(self) -> tuple[Tensor, Tensor]:
        tails, states = (each.index_select(0, self.slots) for each in self.memory)
        return tails * self.goes_on.to(tails.dtype).view(-1, 1, 1), states * self.goes_on.view(-1, 1, 1, 1)

    def store(self, tails: Tensor, states: Tensor) -> None:
        for kept, new in zip(self.memory, (tails, states), strict=True):
            kept.index_copy_(0, self.slots, new)


class StateLayer:
    def __init__(self, pool: "StatePool", layer: int) -> None:
        self._pool, self._layer = pool, layer

    @property
    def parts(self) -> Sequence[_Part]:
        return [_Part(self._pool.memory[self._layer], *each) for each in self._pool.spans]


class StatePool:
    """Slots of all linear layers, `deltas`, on one of `rows` tensor ranks, in at least fp32 but for the tails."""

    def __init__(self, deltas: Sequence[Delta], rows: int, device: torch.device, dtype: torch.dtype) -> None:
        self._shapes = [state_shapes(each, rows) for each in deltas]
        self._device, self._dtypes = device, (dtype, torch.promote_types(dtype, torch.float32))
        self.memory = [self._empty(0, each) for each in self._shapes]
        self.spans: list[tuple[slice, Tensor, Tensor]] = []

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for layer in self.memory for each in layer)

    def prepare(self, spans: Sequence[tuple[int, int, int]]) -> None:
        """Set the spans (slot, first position, end) of the next step, in the order of their tokens."""
        if not self.memory:
            return
        self._grow(1 + max((slot for slot, _, _ in spans), default=-1))
        self.spans, begin = [], 0
        for length, group in groupby(spans, key=lambda span: span[2] - span[1]):
            each = list(group)
            rows = slice(begin, begin + length * len(each))
            slots = torch.tensor([slot for slot, _, _ in each], device=self._device)
            goes_on = torch.tensor([float(first > 0) for _, first, _ in each], device=self._device)
            self.spans.append((rows, slots, goes_on.to(self._dtypes[1])))
            begin = rows.stop

    def copy(self, source: int, target: int) -> None:
        """Copy a slot, for a sequence that goes on in two ways."""
        self._grow(target + 1)
        for layer in self.memory:
            for each in layer:
                each[target] = each[source]

    def _grow(self, num_slots: int) -> None:
        for index, layer in enumerate(self.memory):
            if num_slots > len(layer[0]):
                larger = self._empty(max(_LEAST, num_slots, 2 * len(layer[0])), self._shapes[index])
                for new, old in zip(larger, layer, strict=True):
                    new[: len(old)] = old
                self.memory[index] = larger

    def _empty(self, num_slots: int, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        # Zeros: what a fresh span loads is multiplied by 0, which must not meet inf or nan.
        return [
            torch.zeros(num_slots, *shape, device=self._device, dtype=dtype)
            for shape, dtype in zip(shapes, self._dtypes, strict=True)
        ]
