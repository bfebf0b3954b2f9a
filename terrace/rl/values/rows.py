"""`Rows`: the batch type that roles exchange.

A row is a prompt, a response, or a pair of responses, depending on the columns. Nothing is padded, and shares may have
different sizes, so there are no filler rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from terrace.base.errors import DataError
from terrace.base.words import counted
from terrace.rl.values.ragged import Ragged, joined

Column = Tensor | Ragged | tuple[object, ...]

ROUTES = "routes"  # ragged: the experts of each token of prompt and response but the last (terrace.generation.routes)


@dataclass(frozen=True, eq=False)
class Rows:
    """Named columns of one length: a tensor (R, ...), a `Ragged` of R rows, or a tuple of R Python objects.

    Raises `DataError` without columns, for a column of another type, and for columns of different lengths.
    """

    columns: Mapping[str, Column]

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", dict(self.columns))
        if not self.columns:
            raise DataError("rows without columns have no length: give at least one column")
        lengths = {name: _length(name, column) for name, column in self.columns.items()}
        if len(set(lengths.values())) > 1:
            each = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise DataError(f"columns of differing lengths: {each}; all need the same number of rows")

    def __len__(self) -> int:
        return _length("", next(iter(self.columns.values())))

    def tensor(self, name: str) -> Tensor:
        """The column `name`, (R, ...); raises `DataError` if it is missing or not a tensor."""
        column = self._column(name)
        if not isinstance(column, Tensor):
            raise DataError(f"column {name!r} is a {_kind(column)}, not a tensor")
        return column

    def ragged(self, name: str) -> Ragged:
        """The column `name`; raises `DataError` if it is missing or not ragged."""
        column = self._column(name)
        if not isinstance(column, Ragged):
            raise DataError(f"column {name!r} is a {_kind(column)}, not a ragged column")
        return column

    def objects(self, name: str) -> tuple[object, ...]:
        """The column `name`; raises `DataError` if it is missing or not a tuple."""
        column = self._column(name)
        if not isinstance(column, tuple):
            raise DataError(f"column {name!r} is a {_kind(column)}, not a tuple of objects")
        return column

    def take(self, rows: Tensor | Sequence[int]) -> "Rows":
        """Select rows by index, in this order and with repetitions, or by a bool mask (R)."""
        index = torch.as_tensor(rows) if len(rows) else torch.zeros(0, dtype=torch.int64)
        if index.dtype == torch.bool and index.shape == (len(self),):
            index = index.nonzero().flatten()
        if index.dtype != torch.int64 or index.dim() != 1:
            raise DataError(
                f"rows to take of dtype {index.dtype} and shape {tuple(index.shape)}: must be int64 numbers of rows, "
                f"or bool for each of {counted(len(self), 'row')}"
            )
        outside = index[(index < 0) | (index >= len(self))].tolist()
        if outside:
            raise DataError(f"row {outside[0]} of {counted(len(self), 'row')}: numbers go from 0 to {len(self) - 1}")
        return Rows({name: _taken(column, index) for name, column in self.columns.items()})

    def split(self, sizes: Sequence[int]) -> list["Rows"]:
        """Split into consecutive views of `sizes` rows, which may be 0 and must add up to all rows."""
        if any(size < 0 for size in sizes) or sum(sizes) != len(self):
            raise DataError(
                f"sizes {list(sizes)} for {counted(len(self), 'row')}: must be 0 or more, and add up to {len(self)}"
            )
        ends = list(accumulate(sizes))
        return [self.part(end - size, end) for size, end in zip(sizes, ends, strict=True)]

    def part(self, start: int, stop: int) -> "Rows":
        """Rows `start` to `stop`, as views; both must be within range."""
        return Rows({name: _cut(column, start, stop) for name, column in self.columns.items()})

    def repeat(self, num: int) -> "Rows":
        """Repeat every row `num` times, with copies adjacent (`repeat_interleave`)."""
        if num < 1:
            raise DataError(f"rows repeated {num} times: must be 1 or more")
        return self.take(torch.arange(len(self)).repeat_interleave(num))

    def drop(self, *names: str) -> "Rows":
        """All columns but these; raises `DataError` for one that is missing."""
        for name in names:
            self._column(name)
        return Rows({name: column for name, column in self.columns.items() if name not in names})

    def __or__(self, other: "Rows") -> "Rows":
        """The columns of both, which need equal numbers of rows; raises `DataError` for a name that both have."""
        twice = sorted(self.columns.keys() & other.columns.keys())
        if twice:
            raise DataError(f"column {twice[0]!r} is in both: drop it from one of them")
        return Rows({**self.columns, **other.columns})

    def _column(self, name: str) -> Column:
        if name not in self.columns:
            raise DataError(f"no column {name!r}: there are {', '.join(self.columns)}")
        return self.columns[name]


def cat(parts: Sequence[Rows]) -> Rows:
    """Concatenate rows; raises `DataError` unless all parts have columns of the same names, types and dtypes.

    This includes parts without rows.
    """
    if not parts:
        raise DataError("no rows to join: give at least one part")
    first = parts[0].columns
    for part in parts[1:]:
        if part.columns.keys() != first.keys():
            raise DataError(f"columns {', '.join(part.columns)} beside {', '.join(first)}: must be the same")
    return Rows({name: _joined(name, [part.columns[name] for part in parts]) for name in first})


def emitted_of(rows: Rows) -> Ragged:
    """Which tokens of `responses` the policy drew: column `emitted`, or all of them where there is none."""
    if "emitted" in rows.columns:
        return rows.ragged("emitted")
    responses = rows.ragged("responses")
    return responses.with_values(torch.ones_like(responses.values, dtype=torch.bool))


def _length(name: str, column: object) -> int:
    if isinstance(column, Tensor) and not column.dim():
        raise DataError(f"column {name!r} is a tensor without dims: its first dim is the row")
    if isinstance(column, (Tensor, Ragged, tuple)):
        return len(column)
    raise DataError(f"column {name!r} is a {_kind(column)}: must be a tensor, a Ragged or a tuple")


def _kind(column: object) -> str:
    kinds = {Tensor: "tensor", Ragged: "Ragged", tuple: "tuple"}
    return next((kind for each, kind in kinds.items() if isinstance(column, each)), type(column).__name__)


def _taken(column: Column, index: Tensor) -> Column:
    if isinstance(column, Tensor):
        return column[index.to(column.device)]
    if isinstance(column, Ragged):
        return column.take(index.to(column.offsets.device))
    return tuple(column[row] for row in index.tolist())


def _cut(column: Column, start: int, stop: int) -> Column:
    if isinstance(column, Ragged):
        first, end = int(column.offsets[start]), int(column.offsets[stop])
        return Ragged(column.values[first:end], column.offsets[start : stop + 1] - first)
    return column[start:stop]


def _joined(name: str, columns: Sequence[Column]) -> Column:
    tensors = [column for column in columns if isinstance(column, Tensor)]
    ragged = [column for column in columns if isinstance(column, Ragged)]
    # torch.cat would silently promote dtypes.
    forms = {_kind(column): None for column in columns}
    if len(forms) == 1:
        forms = {f"{each.dtype} {tuple(each.shape[1:])} by row": None for each in tensors}
        forms |= {f"{each.values.dtype} {tuple(each.values.shape[1:])} by token": None for each in ragged}
    if len(forms) > 1:
        raise DataError(f"column {name!r} is {' in one part and '.join(forms)} in another: must be the same")
    if tensors:
        return torch.cat(tensors)
    if ragged:
        return joined(ragged)
    return tuple(each for column in columns if isinstance(column, tuple) for each in column)


def columns_read(rows: Rows, columns: Sequence[str]) -> Rows:
    """`rows` restricted to `columns`; unchanged if they have none of these."""
    kept = {name: column for name, column in rows.columns.items() if name in columns}
    return Rows(kept) if kept and len(kept) < len(rows.columns) else rows
