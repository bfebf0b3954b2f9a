"""Storage of optimizer states: in full precision, in bf16, or in 8-bit blocks.

An update works on values in the dtype of the gradient (fp32, or fp64). From a state stored otherwise it reads a chunk
that fits into a CPU's cache, updates it, and writes it back rounded, so no whole state ever exists in fp32.

    Exact        the values themselves: `read` returns memory that the update changes in place
    Rounded      bf16, written with stochastic rounding (terrace.runtime.noise)
    Blocks       8-bit codes and a scale per block of the flat buffer (terrace.runtime.block_codes)

Chunks begin and end at blocks of the flat buffer, so each block is encoded once per update.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from terrace.plan.state_formats import BLOCK_STATES, STATE_BLOCK, STATE_SCALE_BYTES, num_state_blocks
from terrace.runtime.block_codes import decode, encode
from terrace.runtime.noise import Noise, round_to_bf16

# Elements of a chunk: on a CPU all tensors of one stay in a cache, on CUDA the temporary tensors stay small.
_CHUNK_NUMEL = {"cpu": 1 << 16}
_LARGE_CHUNK_NUMEL = 1 << 24


class State(Protocol):
    """One state of the elements of a rank's slice of a flat buffer."""

    @property
    def is_exact(self) -> bool:
        """Whether `read` returns the state itself."""

    @property
    def rests_below(self) -> bool:
        """Whether it is kept below the device (terrace.runtime.kept): a part is on it only while visited."""

    @property
    def is_coded(self) -> bool:
        """Whether `tensor` is a decoded copy, unless opened."""

    @property
    def nbytes(self) -> int:
        """Bytes of it on the device between updates."""

    @property
    def tensor(self) -> Tensor:
        """The state (n): its memory, or a copy if it `is_coded` and not open."""

    def visits(self, numel: int) -> Iterator[slice]:
        """The slices in which an update may read and write it, in order, for a state of `numel` elements."""

    def windows(self, numel: int) -> Iterator[slice]:
        """The slices of `numel` elements of which `tensor` has one at a time, while it is yielded."""

    def read(self, part: slice) -> Tensor:
        """Values of a slice, to be changed and passed to `write`."""

    def write(self, part: slice, values: Tensor, step: int) -> None:
        """Store the values of a slice after step number `step`, from 1."""

    def open(self) -> None:
        """Make `tensor` writable memory, which `close` stores."""

    def close(self) -> None: ...


class RowWise(Protocol):
    """A state of a table whose rows are updated one by one."""

    def read_rows(self, rows: Tensor, width: int) -> Tensor:
        """A copy of some rows (n, width)."""

    def write_rows(self, rows: Tensor, values: Tensor) -> None:
        """Store the values (n, width) of distinct rows."""


class _Resident:
    rests_below = False

    def visits(self, numel: int) -> Iterator[slice]:
        yield slice(0, numel)

    def windows(self, numel: int) -> Iterator[slice]:
        yield slice(0, numel)


class Exact(_Resident):
    is_exact, is_coded = True, False

    def __init__(self, values: Tensor) -> None:
        self.tensor = values

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def read(self, part: slice) -> Tensor:
        return self.tensor[part]

    def write(self, part: slice, values: Tensor, step: int) -> None:
        """Does nothing: `read` returned the state itself."""

    def read_rows(self, rows: Tensor, width: int) -> Tensor:
        """A copy of some rows (n, width) of a table."""
        return self.tensor[: self.tensor.numel() // width * width].view(-1, width).index_select(0, rows)

    def write_rows(self, rows: Tensor, values: Tensor) -> None:
        """Store the values (n, width) of distinct rows."""
        width = values.shape[1]
        self.tensor[: self.tensor.numel() // width * width].view(-1, width).index_copy_(0, rows, values)

    def open(self) -> None: ...

    def close(self) -> None: ...


class Rounded(_Resident):
    """A bf16 state of the elements from `start` on of the buffer of `noise`."""

    is_exact, is_coded = False, False

    def __init__(self, values: Tensor, name: str, start: int, noise: Noise, dtype: torch.dtype) -> None:
        self.tensor, self._name, self._start, self._noise, self._dtype = values, name, start, noise, dtype

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def read(self, part: slice) -> Tensor:
        return self.tensor[part].to(self._dtype)

    def write(self, part: slice, values: Tensor, step: int) -> None:
        first, last = self._start + part.start, self._start + part.stop
        bits = self._noise.bits(self._name, step, first, last, values.device)
        round_to_bf16(values.to(torch.float32), bits, self.tensor[part])

    def open(self) -> None: ...

    def close(self) -> None: ...


class Blocks(_Resident):
    """A state in blocks of 8-bit codes, for elements of a flat buffer from `start` on.

    `codes` (n) are int8 if its values may be negative, otherwise uint8; `scales` has `num_state_blocks(n)` elements.
    """

    is_exact, is_coded = False, True

    def __init__(self, codes: Tensor, scales: Tensor, start: int, dtype: torch.dtype) -> None:
        self._codes, self._scales = codes, scales
        self._lead, self._signed, self._dtype = start % STATE_BLOCK, codes.dtype == torch.int8, dtype
        self._opened: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        return self._codes.nbytes + self._scales.nbytes

    @property
    def tensor(self) -> Tensor:
        return self._opened[0] if self._opened else self._decoded(slice(0, len(self._codes))).clone()

    def read(self, part: slice) -> Tensor:
        return self._decoded(part).to(self._dtype)

    def write(self, part: slice, values: Tensor, step: int) -> None:
        blocks, lead, padded = self._place(part)
        buffer = torch.zeros(padded, dtype=torch.float32, device=values.device)
        buffer[lead : lead + len(values)] = values
        encode(buffer, lead, self._signed, self._codes[part], self._scales[blocks])

    def open(self) -> None:
        self._opened = [self.tensor]

    def close(self) -> None:
        values = self._opened.pop()
        self.write(slice(0, len(values)), values, 0)

    def _decoded(self, part: slice) -> Tensor:
        blocks, lead, padded = self._place(part)
        buffer = torch.empty(padded, dtype=torch.float32, device=self._codes.device)
        decode(self._codes[part], self._scales[blocks], lead, self._signed, buffer)
        return buffer[lead : lead + part.stop - part.start]

    def _place(self, part: slice) -> tuple[slice, int, int]:
        """The blocks of a slice, the elements of their first that precede it, and the elements of all these blocks."""
        first, last = self._lead + part.start, self._lead + part.stop
        if first == last:  # a rank may have no element of a state
            return slice(0, 0), 0, 0
        begin, end = first // STATE_BLOCK, -(-last // STATE_BLOCK)
        return slice(begin, end), first - begin * STATE_BLOCK, (end - begin) * STATE_BLOCK


class Storage:
    """How the states of a flat buffer's slice are stored: in format `states` of the plan, with `noise` for bf16.

    `dtype` is the dtype of updates.
    """

    def __init__(self, dtype: torch.dtype, states: str | None = None, noise: Noise | None = None) -> None:
        self._dtype, self._states, self._noise = dtype, states, noise

    def group(self, name: str, numel: int, start: int, num_decayed: int = 0) -> "Storage":
        """The storage of the states that one instruction changes together: `numel` elements from `start` on.

        The first `num_decayed` of them take weight decay.
        """
        return self

    def passes(self, name: str) -> bool:
        """Whether a group passes through the device in every step, also where this rank has no element of it."""
        return False

    def parameters(self, values: Tensor, start: int) -> State:
        """The state of the parameters that are updated: `values`, from element `start` of the buffer on."""
        return Exact(values) if values.dtype == self._dtype else self._rounded(values, "master", start)

    def zeros(self, name: str, numel: int, start: int, device: torch.device, *, signed: bool = True) -> State:
        """A new state of `numel` elements from element `start` of the buffer on; `signed` if it may be negative."""
        if self._states is None:
            return Exact(torch.zeros(numel, dtype=self._dtype, device=device))
        if self._states == BLOCK_STATES:
            codes = torch.zeros(numel, dtype=torch.int8 if signed else torch.uint8, device=device)
            scales = torch.zeros(num_state_blocks(numel), dtype=torch.float32, device=device)
            return Blocks(codes, scales, start, self._dtype)
        return self._rounded(torch.zeros(numel, dtype=torch.bfloat16, device=device), name, start)

    def over(self, memory: Tensor, name: str, numel: int, start: int, *, signed: bool = True) -> State:
        """A state as of `zeros` in `memory`, uint8 at a multiple of 64 bytes."""
        if self._states is None:
            return Exact(memory[: numel * self._dtype.itemsize].view(self._dtype))
        if self._states == BLOCK_STATES:
            # Scales first, which are aligned to their size.
            first = STATE_SCALE_BYTES * num_state_blocks(numel)
            codes = memory[first : first + numel].view(torch.int8 if signed else torch.uint8)
            return Blocks(codes, memory[:first].view(torch.float32), start, self._dtype)
        return self._rounded(memory[: 2 * numel].view(torch.bfloat16), name, start)

    def _rounded(self, values: Tensor, name: str, start: int) -> State:
        assert self._noise is not None, "rounding takes random bits"
        return Rounded(values, name, start, self._noise, self._dtype)


def passing(states: Sequence[State], numel: int) -> Iterator[slice]:
    """The slices in which states that are changed together are there to be read and written, in order."""
    yield from next((state for state in states if state.rests_below), states[0]).visits(numel)


def chunks(states: Sequence[State], numel: int, start: int, device: torch.device) -> Iterator[slice]:
    """The slices in which an update processes its states, for a slice of the flat buffer that begins at `start`."""
    for piece in passing(states, numel):
        if all(state.is_exact for state in states):
            yield piece
            continue
        size = _CHUNK_NUMEL.get(device.type, _LARGE_CHUNK_NUMEL)
        first = piece.start
        while first < piece.stop:
            # The next place in the buffer at which a chunk ends, which is the end of a block.
            last = min(piece.stop, ((start + first) // size + 1) * size - start)
            yield slice(first, last)
            first = last


@contextmanager
def opened(states: Sequence[State]) -> Iterator[None]:
    """Make the tensors of states writable for a `with` block, and store them at its end."""
    for state in states:
        state.open()
    try:
        yield
    finally:
        for state in states:
            state.close()
