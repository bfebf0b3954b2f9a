"""States of rows that are kept below the device, as optimizers and checkpoints see them (terrace.runtime.stored)."""

from collections.abc import Iterator
from itertools import count

import torch
from torch import Tensor

from terrace.runtime.kept.rows import KeptRows
from terrace.runtime.stored import Storage


class RowState:
    """State number `index` of the records, as optimizers and checkpoints see it (terrace.runtime.stored)."""

    is_exact, is_coded, rests_below, nbytes = True, True, True, 0

    def __init__(self, rows: KeptRows, index: int, device: torch.device) -> None:
        self._rows, self._index, self._device, self._opened = rows, index, device, list[Tensor]()

    @property
    def tensor(self) -> Tensor:
        """The values (n) of all rows that are visited, a copy unless the state is open."""
        if self._opened:
            return self._opened[0]
        return torch.cat([self._rows.read(self._index, numbers).flatten() for numbers in self._visited()])

    def windows(self, numel: int) -> Iterator[slice]:
        return self._rows.visits()

    def read_rows(self, rows: Tensor, width: int) -> Tensor:
        return self._rows.read(self._index, rows)

    def write_rows(self, rows: Tensor, values: Tensor) -> None:
        self._rows.write(self._index, rows, values)

    def visits(self, numel: int) -> Iterator[slice]:
        raise AssertionError("rows are updated by their numbers")

    def read(self, part: slice) -> Tensor:
        raise AssertionError("rows are updated by their numbers")

    def write(self, part: slice, values: Tensor, step: int) -> None:
        raise AssertionError("rows are updated by their numbers")

    def open(self) -> None:
        """Hold the values in memory until `close`."""
        self._opened = [self.tensor]

    def close(self) -> None:
        """Store the values."""
        values = self._opened.pop().view(-1, self._rows.pages.width)
        for numbers in self._visited():
            self._rows.write(self._index, numbers, values[: len(numbers)])
            self._rows.changed()
            values = values[len(numbers) :]

    def _visited(self) -> Iterator[Tensor]:
        for window in self._rows.windows:
            numbers = torch.arange(window.start, window.stop)
            self._rows.bring(numbers)
            yield numbers if self._device.type == "cpu" else numbers.to(self._device)


class RowStorage(Storage):
    """The states of `rows`, parameters first."""

    def __init__(self, rows: KeptRows, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self._rows, self._numbers = rows, count()

    def parameters(self, values: Tensor, start: int) -> RowState:
        return RowState(self._rows, next(self._numbers), values.device)

    def zeros(self, name: str, numel: int, start: int, device: torch.device, *, signed: bool = True) -> RowState:
        return RowState(self._rows, next(self._numbers), device)
