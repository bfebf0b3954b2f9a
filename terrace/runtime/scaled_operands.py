"""Operands of products in 8-bit floats. Each is quantised once for all products that use it.

    y  = x W^T     codes of x along features     once for all layers with the same input
    dW = dy^T x    codes of x along tokens       also once for them, and saved instead of x
    dx = dy W      codes of dy along features    and along tokens for dW, both from one quantisation

With one scale, the codes of a transposed matrix are its codes, transposed. With scales per row they differ, and are
computed from the same matrix. Either way a layer saves the codes along tokens, one byte per element, and not x
itself. If x will be filled again anyway (terrace.runtime.pages), a layer saves x, which costs no memory, and the
first weight gradient that reads it computes the codes for all.

Shape legend: N rows (all leading dims), I inputs and O outputs of a layer.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from terrace.runtime.pages import is_returning
from terrace.runtime.scaled_products import Codes, encode


class Operand:
    """A matrix (M, K) with its codes for products over K, `rows`, and over M, `columns`, each computed once.

    With a `scale` (1, 1) the matrix is already codes.
    """

    def __init__(self, matrix: Tensor, dtype: torch.dtype, by_row: bool, scale: Tensor | None = None) -> None:
        self._matrix, self._dtype, self._by_row, self._scale = matrix, dtype, by_row, scale

    @cached_property
    def rows(self) -> Codes:
        """Codes (M, K)."""
        if self._scale is not None:
            return Codes(self._matrix.contiguous(), self._scale)
        return encode(self._matrix, self._dtype, self._by_row)

    @cached_property
    def columns(self) -> Codes:
        """Codes (K, M), of the transposed matrix."""
        if self._by_row:
            return encode(self._matrix.t(), self._dtype, self._by_row)
        codes, scale = self.rows
        return Codes(codes.t().contiguous(), scale)


def operands_of(x: Tensor, counts: Sequence[int], dtype: torch.dtype, by_row: bool) -> list[Operand]:
    """x (..., K) as one operand, or, with `counts`, as consecutive groups of rows, one operand each."""
    rows = x.detach().reshape(-1, x.shape[-1])
    parts = torch.split(rows, list(counts)) if counts else (rows,)
    return [Operand(part, dtype, by_row) for part in parts]


class Entered:
    """The quantised input x (..., I) of layers; for stacks, `counts` are the rows of each matrix."""

    def __init__(self, x: Tensor, counts: tuple[int, ...], dtype: torch.dtype, by_row: bool) -> None:
        self.counts = counts
        self._operands = operands_of(x, counts, dtype, by_row)
        self.again = Again(counts, dtype, by_row) if is_returning(x) else None

    @property
    def rows(self) -> list[Codes]:
        """Codes (N, I) of the rows of each matrix."""
        return [each.rows for each in self._operands]

    def kept(self, x: Tensor) -> tuple[Tensor, ...]:
        """Tensors that a layer saves for its weight gradient: codes, for `columns_of`, or x itself."""
        if self.again is None:
            return tuple(tensor for each in self._operands for tensor in each.columns)
        self.again.num_readers += 1
        return (x,)


def columns_of(kept: Sequence[Tensor]) -> list[Codes]:
    """Codes (I, N) of the rows of each matrix, from the codes that `Entered.kept` returned."""
    return [Codes(*pair) for pair in zip(kept[::2], kept[1::2], strict=True)]


class Again:
    """Codes (I, N) of an input that is filled again: computed for the first weight gradient, dropped after the last."""

    def __init__(self, counts: tuple[int, ...], dtype: torch.dtype, by_row: bool) -> None:
        self.num_readers = 0
        self._form = counts, dtype, by_row
        self._found: list[Codes] = []
        self._num_left = 0

    def take(self, x: Tensor) -> list[Codes]:
        """The codes (I, N) of x (..., I), which is filled again. Each reader calls this once per backward."""
        if not self._num_left:
            self._found, self._num_left = [each.columns for each in operands_of(x, *self._form)], self.num_readers
        self._num_left -= 1
        found = self._found
        if not self._num_left:
            self._found = []
        return found


class LastEntered:
    """Cache of the last quantised input, because layers with the same input run one after the other.

    It is cleared when the tensor dies, when another is quantised, and at the end of a block (`Scaling.forget_after`),
    so no codes stay in memory.
    """

    def __init__(self) -> None:
        self._key: tuple[int, int, tuple[int, ...]] | None = None
        self._found: Entered | None = None
        self._tensor: ReferenceType[Tensor] | None = None

    def of(self, x: Tensor, counts: tuple[int, ...], make: Callable[[], Entered]) -> Entered:
        """The cached result for x at its current version, otherwise a new one from `make`."""
        if x.is_inference():  # it has no version
            return make()
        key = id(x), x._version, counts
        # No other tensor has this id while the reference is alive, since the end of the tensor clears the key.
        if self._found is None or self._key != key:
            self._key, self._found, self._tensor = key, make(), ref(x, self._forget)
        return self._found

    def forget(self) -> None:
        self._key = self._found = self._tensor = None

    def _forget(self, reference: ReferenceType[Tensor]) -> None:
        if reference is self._tensor:
            self.forget()
