"""Serialises rows to one block of bytes and a description of its layout, for memory that processes share.

The block holds only tensors; Python objects are part of the description.
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

_ALIGNMENT = 64  # bytes: a cache line, which suffices for every dtype


@dataclass(frozen=True)
class _Stored:
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # byte


@dataclass(frozen=True)
class _Objects:
    each: tuple[object, ...]
    before: int = 0  # number of rows before and after `each`, whose objects are left out
    after: int = 0


@dataclass(frozen=True)
class Packing:
    """Layout of a block of `num_bytes`: each column's tensors (values and offsets of a `Ragged`), or its objects."""

    num_bytes: int
    columns: dict[str, tuple[_Stored, ...] | _Objects]

    @staticmethod
    def of(rows: Rows) -> "Packing":
        """The layout for `rows`, in the order of their columns."""
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
        """A layout of the same block for a reader of rows `start` to `stop`, without the objects of other rows.

        Only columns in `names` are kept; all are if none is in `names`.
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
        """Copy the tensors of rows, from any device, into a buffer of `num_bytes`."""
        stored = (each for column in self.columns.values() if isinstance(column, tuple) for each in column)
        for tensor, each in zip(_tensors(rows), stored, strict=True):
            _at(memory, each).copy_(tensor)

    def read(self, memory: Any) -> Rows:
        """Rows whose tensors are views of `memory`, which they keep alive."""
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
