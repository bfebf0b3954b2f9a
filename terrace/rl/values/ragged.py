"""Rows of different lengths, concatenated in one tensor without padding.

Shape legend: N tokens, R rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from terrace.base.errors import DataError
from terrace.runtime.shapes import check_shapes as check_shapes


@dataclass(frozen=True, eq=False)
class Ragged:
    """Row i is `values[offsets[i] : offsets[i + 1]]`: `values` (N, ...), `offsets` (R + 1), int64, from 0 to N.

    Both are on one device. Raises `DataError` for offsets that do not ascend from 0 to N.
    """

    values: Tensor
    offsets: Tensor

    def __post_init__(self) -> None:
        if self.offsets.dtype != torch.int64 or self.offsets.dim() != 1 or not len(self.offsets):
            raise DataError(
                f"offsets of dtype {self.offsets.dtype} and shape {tuple(self.offsets.shape)}: must be int64 and 1-D, "
                "one more than there are rows"
            )
        ends = self.offsets.tolist()
        num_tokens = len(self.values) if self.values.dim() else -1
        if ends[0] != 0 or ends[-1] != num_tokens or ends != sorted(ends):
            raise DataError(
                f"offsets from {ends[0]} to {ends[-1]} over values of shape {tuple(self.values.shape)}: must ascend "
                "from 0 to the number of values"
            )

    @staticmethod
    def of(rows: Sequence[Tensor]) -> "Ragged":
        """Concatenate one tensor (T_i, ...) per row; at least one, since it determines the dtype."""
        if not rows:
            raise DataError("no rows to join: give at least one tensor, if need be an empty one")
        lengths = torch.tensor([len(row) for row in rows], device=rows[0].device)
        return Ragged(torch.cat(list(rows)), offsets_of(lengths))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Tensor:
        """Number of tokens of each row, int64 (R)."""
        return self.offsets.diff()

    def rows(self) -> list[Tensor]:
        """The rows as views, (T_i, ...) each."""
        return [self.values[start:stop] for start, stop in pairwise(self.offsets.tolist())]

    def with_values(self, values: Tensor) -> "Ragged":
        return Ragged(values, self.offsets)

    def lists(self) -> list[list[Any]]:
        """The rows as lists of Python numbers."""
        numbers = self.values.tolist()
        return [numbers[start:stop] for start, stop in pairwise(self.offsets.tolist())]

    def sums(self) -> Tensor:
        """Sum of each row, (R, ...); 0 for an empty one."""
        return row_sums(self.values, self.offsets)

    def spread(self, numbers: Tensor) -> "Ragged":
        """Copy each row's number, from `numbers` (R), to all its tokens."""
        check_shapes(numbers=numbers, lengths=self.lengths)
        return self.with_values(numbers[row_of_each(self.offsets)])

    def kept(self, mask: "Ragged") -> "Ragged":
        """Keep the tokens where the bool `mask` is true; rows may become empty but are not removed.

        Used to remove tokens that the sampler did not emit, such as tool output between two turns, before advantages
        and losses are computed.
        """
        if mask.values.dtype != torch.bool or not torch.equal(mask.offsets, self.offsets):
            raise DataError(
                f"a mask of dtype {mask.values.dtype} for lengths {mask.lengths.tolist()} of a column with lengths "
                f"{self.lengths.tolist()}: must be bool, with the same lengths"
            )
        return Ragged(self.values[mask.values], offsets_of(row_sums(mask.values.long(), mask.offsets)))

    def take(self, rows: Tensor) -> "Ragged":
        """Select rows by index, int64 (K), in this order; indices may repeat."""
        lengths = self.lengths[rows]
        offsets = offsets_of(lengths)
        # Source index minus target index, by token.
        shift = (self.offsets[:-1][rows] - offsets[:-1]).repeat_interleave(lengths)
        return Ragged(self.values[torch.arange(len(shift), device=shift.device) + shift], offsets)


def joined(parts: Sequence[Ragged]) -> Ragged:
    lengths = torch.cat([part.lengths for part in parts])
    return Ragged(torch.cat([part.values for part in parts]), offsets_of(lengths))


def offsets_of(lengths: Tensor) -> Tensor:
    """Offsets (R + 1) of rows of `lengths` (R)."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def row_of_each(offsets: Tensor) -> Tensor:
    """Row index of each token, int64 (N)."""
    return torch.arange(len(offsets) - 1, device=offsets.device).repeat_interleave(offsets.diff())


def row_sums(values: Tensor, offsets: Tensor) -> Tensor:
    """Sum of `values` (N, ...) over each row, (R, ...), differentiable; 0 for an empty row."""
    sums = values.new_zeros(len(offsets) - 1, *values.shape[1:])
    return sums.index_add(0, row_of_each(offsets), values)


def check_rows(**columns: Ragged) -> None:
    """Raise `DataError` unless all columns have values of one shape and equal row lengths."""
    check_shapes(**{name: column.values for name, column in columns.items()})
    first, *others = columns
    for name in others:
        if not torch.equal(columns[name].offsets, columns[first].offsets):
            raise DataError(
                f"{name} of lengths {columns[name].lengths.tolist()} beside {first} of lengths "
                f"{columns[first].lengths.tolist()}: must be the same"
            )
