"""Rows as one block of bytes and a description: how they lie in memory that processes share.

Only numbers are in the block; the objects of a column are in the description.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from terrace.rl.values.ragged import Ragged
from terrace.rl.values.rows import Column, Rows

_ALIGNMENT = 64  # bytes: a cache line, and no less than any dtype needs


@dataclass(frozen=True)
class _Stored:
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # byte


@dataclass(frozen=True)
class _Objects:
    each: tuple[object, ...]
    before: int = 0  # rows before and after these, whose objects are not here
    after: int = 0


@dataclass(frozen=True)
class Packing:
    """The layout of `num_bytes`: tensors of each column (of a `Ragged` values and offsets), or its objects."""

    num_bytes: int
    columns: dict[str, tuple[_Stored, ...] | _Objects]

    @staticmethod
    def of(rows: Rows) -> "Packing":
        """The packing of rows, in the order of their columns."""
        tensors = _tensors(rows)
        sizes = (-(-each.numel() * each.element_size() // _ALIGNMENT) * _ALIGNMENT for each in tensors)
        *starts, num_bytes = accumulate(sizes, initial=0)
        stored = (_Stored(each.dtype, tuple(each.shape), at) for each, at in zip(tensors, starts, strict=True))
        columns = {
            name: _Objects(column) if isinstance(column, tuple) else tuple(next(stored) for _ in _parts(column))
            for name, column in rows.columns.items()
        }
        return Packing(num_bytes, columns)

    def part(self, start: int, stop: int, names: Sequence[str] = ()) -> "Packing":
        """The packing of the same block for who reads rows `start` to `stop` alone: with no others' objects.

        Without the columns that are not among `names`, unless none is.
        """
        kept = {name: stored for name, stored in self.columns.items() if name in names} or self.columns
        columns = {
            name: _Objects(stored.each[start:stop], start, len(stored.each) - stop)
            if isinstance(stored, _Objects)
            else stored
            for name, stored in kept.items()
        }
        return Packing(self.num_bytes, columns)

    def write(self, rows: Rows, memory: Any) -> None:
        """Copy the tensors of rows, from whatever device, into a buffer of `num_bytes`."""
        stored = (each for column in self.columns.values() if isinstance(column, tuple) for each in column)
        for tensor, each in zip(_tensors(rows), stored, strict=True):
            _at(memory, each).copy_(tensor)

    def read(self, memory: Any) -> Rows:
        """Rows whose tensors are views of a buffer, which they keep."""
        return Rows({name: _column(memory, stored) for name, stored in self.columns.items()})


def _tensors(rows: Rows) -> list[Tensor]:
    return [each for column in rows.columns.values() for each in _parts(column)]


def _parts(column: Column) -> tuple[Tensor, ...]:
    if isinstance(column, Ragged):
        return column.values.detach(), column.offsets
    return (column.detach(),) if isinstance(column, Tensor) else ()


def _column(memory: Any, stored: tuple[_Stored, ...] | _Objects) -> Column:
    if isinstance(stored, _Objects):
        return (None,) * stored.before + stored.each + (None,) * stored.after
    tensors = [_at(memory, each) for each in stored]
    return tensors[0] if len(tensors) == 1 else Ragged(tensors[0], tensors[1])


def _at(memory: Any, stored: _Stored) -> Tensor:
    count = math.prod(stored.shape)
    if not count:  # torch reads no memory of 0 bytes
        return torch.zeros(stored.shape, dtype=stored.dtype)
    return torch.frombuffer(memory, dtype=stored.dtype, count=count, offset=stored.start).view(stored.shape)
