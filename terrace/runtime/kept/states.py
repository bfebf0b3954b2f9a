"""States that are kept below the device, as optimizers and checkpoints see them.

A group (terrace.plan.kept) passes through the ring piece by piece. While a piece is visited, each of its states has a
view of the slot's memory, in the format that it would have on the device; between visits there is nothing to read.
Checkpoints read and write whole states, between steps.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from terrace.plan.kept import Group, cuts, part_bytes
from terrace.plan.pieces import Piece
from terrace.plan.state_formats import BLOCK_STATES
from terrace.runtime.kept.host_update import HostUpdate
from terrace.runtime.kept.ring import InPlace, Ring, Slot
from terrace.runtime.kept.whole import Whole
from terrace.runtime.noise import Noise
from terrace.runtime.stored import State, Storage

if TYPE_CHECKING:
    from terrace.runtime.kept.rows import KeptRows

Make = Callable[[Tensor, slice], State]  # a state in memory (bytes) for some elements of a group
Changed = Callable[[slice, Tensor], None]  # called with elements of a group and their new values


def _unseen(part: slice, values: Tensor) -> None:
    """Nobody reads the new values but the next update."""


class Passage:
    """The pieces of a group on one rank, `numbers` in the file; `parts` are the elements in each."""

    def __init__(self, ring: Ring | InPlace, group: Group, pieces: Sequence[Piece], numbers: Sequence[int]) -> None:
        self.group, self._ring, self._pieces, self._numbers = group, ring, pieces, numbers
        self.parts: list[slice] = []
        self._states: list[KeptState] = []

    def begin(self, numel: int, size: int, start: int, num_decayed: int) -> None:
        """This rank owns `numel` elements of the group, from `start` on of its buffer; pieces have `size` elements."""
        self.parts = cuts(len(self._pieces), size, numel, self.group.formats, start, num_decayed)

    def state(self, dtype: torch.dtype, device: torch.device, make: Make, changed: Changed = _unseen) -> "KeptState":
        """The next of the group's states, in the order of its formats."""
        found = KeptState(self, len(self._states), dtype, device, make, changed)
        self._states.append(found)
        return found

    def visits(self) -> Iterator[slice]:
        """Pass the pieces through the device: while one is yielded, its part of every state can be read and written."""
        for number, piece, part in zip(self._numbers, self._pieces, self.parts, strict=True):
            slot = self._ring.take(number)
            for state in self._states:
                state.enter(self._memory(slot, piece, state.index), part)
            yield part
            for state in self._states:
                state.leave()
            self._ring.give(number, slot)

    def each(self, index: int, *, stores: bool) -> Iterator[tuple[Tensor, slice]]:
        """The memory of one state of each piece, and its elements; with `stores` it is written afterwards."""
        with self._ring.apart() as (slot, store):
            for number, piece, part in zip(self._numbers, self._pieces, self.parts, strict=True):
                if part.start == part.stop:
                    continue
                slot.fill(store, number)
                yield self._memory(slot, piece, index), part
                if stores:
                    slot.leave()
                    slot.store(store, number)

    def _memory(self, slot: Slot, piece: Piece, index: int) -> Tensor:
        sizes = part_bytes(self.group.formats, piece.numel)
        first = sum(sizes[:index])
        return slot.memory[first : first + sizes[index]]


class KeptState:
    """State number `index` of a group; `make` makes its form on the device, `changed` hears of new values."""

    rests_below, is_coded, nbytes = True, True, 0

    def __init__(
        self, passage: Passage, index: int, dtype: torch.dtype, device: torch.device, make: Make, changed: Changed
    ) -> None:
        self._passage, self.index, self._make, self._changed = passage, index, make, changed
        self._dtype, self._device = dtype, device
        self._here: list[tuple[State, int]] = []  # while a piece is visited: its part, and its first element
        self._opened: list[Tensor] = []

    @property
    def is_exact(self) -> bool:
        state, _ = self._here[-1]
        return state.is_exact

    @property
    def tensor(self) -> Tensor:
        return self._opened[0] if self._opened else self._read()

    def visits(self, numel: int) -> Iterator[slice]:
        return self._passage.visits()

    def windows(self, numel: int) -> Iterator[slice]:
        yield slice(0, numel)

    def enter(self, memory: Tensor, part: slice) -> None:
        """A piece is there."""
        self._here.append((self._make(memory, part), part.start))

    def leave(self) -> None:
        """The piece is no longer there."""
        self._here.pop()

    def read(self, part: slice) -> Tensor:
        state, first = self._here[-1]
        return state.read(slice(part.start - first, part.stop - first))

    def write(self, part: slice, values: Tensor, step: int) -> None:
        state, first = self._here[-1]
        here = slice(part.start - first, part.stop - first)
        state.write(here, values, step)
        if self._changed is not _unseen:
            self._changed(part, state.read(here))  # as stored: bf16 is rounded by random bits

    def open(self) -> None:
        self._opened = [self._read()]

    def close(self) -> None:
        self.store(self._opened.pop())

    def store(self, values: Tensor) -> None:
        for memory, part in self._passage.each(self.index, stores=True):
            state = self._make(memory, part)
            state.open()
            state.tensor.copy_(values[part])
            state.close()
        if len(values):
            self._changed(slice(0, len(values)), values)

    def _read(self) -> Tensor:
        numel = self._passage.parts[-1].stop
        found = torch.empty(numel, dtype=self._dtype, device=self._device)
        for memory, part in self._passage.each(self.index, stores=False):
            found[part] = self._make(memory, part).tensor
        return found


class KeptStorage(Storage):
    """Storage of the states of one group that are kept below.

    `parameters` are kept below only if the group has them: then `changed` hears of their new values.
    """

    def __init__(
        self, dtype: torch.dtype, states: str | None, noise: Noise | None, passage: Passage, changed: Changed | None
    ) -> None:
        super().__init__(dtype, states, noise)
        self._passage, self._of_master = passage, changed

    def parameters(self, values: Tensor, start: int) -> State:
        if self._of_master is None:
            return super().parameters(values, start)
        dtype, plain = values.dtype, super().parameters

        def make(memory: Tensor, part: slice) -> State:
            return plain(memory[: (part.stop - part.start) * dtype.itemsize].view(dtype), start + part.start)

        state = self._passage.state(dtype, values.device, make, self._of_master)
        state.store(values)
        return state

    def zeros(self, name: str, numel: int, start: int, device: torch.device, *, signed: bool = True) -> State:
        # A piece that was never written is zero.
        def make(memory: Tensor, part: slice) -> State:
            return self.over(memory, name, part.stop - part.start, start + part.start, signed=signed)

        return self._passage.state(_DTYPES.get(self._states or "", self._dtype), device, make)


_DTYPES = {"bf16": torch.bfloat16, BLOCK_STATES: torch.float32}  # of a whole state; of others that of updates


class Passages:
    """The groups of one flat buffer that are kept below the device, by name; pieces have `size` elements.

    `params` and `grads` hold the working copy and the accumulated gradient if these are kept below, `rows` those of a
    spread table with all their states; else none. If the host's cores update, `on_host` has the function that makes the
    update of a slice from its gradient (n).
    """

    def __init__(
        self,
        groups: Mapping[str, Passage],
        size: int,
        *,
        rests_master: bool,
        params: Sequence[Whole] = (),
        grads: Sequence[Whole] = (),
        rows: "Sequence[KeptRows]" = (),
        on_host: Sequence[Callable[[Tensor], HostUpdate]] = (),
    ) -> None:
        self.rests_master, self.params, self.grads, self.on_host = rests_master, params, grads, on_host
        self.rows = rows
        self._groups, self._size = groups, size

    def storage(
        self, dtype: torch.dtype, states: str | None, noise: Noise | None, rounds: Changed, start: int
    ) -> Storage:
        """Storage of the slice that begins at element `start` of the buffer; `rounds` sets its working copy."""
        return Slice(dtype, states, noise, self, rounds, start) if self._groups else Storage(dtype, states, noise)

    def begin(self, name: str, numel: int, start: int, num_decayed: int) -> Passage | None:
        """The group `name`, of which this rank owns `numel` elements from `start` on; None if it is on the device."""
        found = self._groups.get(name)
        if found is not None:
            found.begin(numel, self._size, start, num_decayed)
        return found

    def has(self, name: str) -> bool:
        return name in self._groups


class Slice(Storage):
    """Storage of a slice some of whose states are kept below.

    A master copy that is kept below is rounded into the working copy whenever it changes.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        states: str | None,
        noise: Noise | None,
        passages: Passages,
        rounds: Changed,
        start: int,
    ) -> None:
        super().__init__(dtype, states, noise)
        self._passages, self._rounds, self._start = passages, rounds, start

    def group(self, name: str, numel: int, start: int, num_decayed: int = 0) -> Storage:
        passage = self._passages.begin(name, numel, start, num_decayed)
        if passage is None:
            return Storage(self._dtype, self._states, self._noise)
        first = start - self._start

        def rounds(part: slice, values: Tensor) -> None:
            self._rounds(slice(first + part.start, first + part.stop), values)

        changed = rounds if self._passages.rests_master else None
        return KeptStorage(self._dtype, self._states, self._noise, passage, changed)

    def passes(self, name: str) -> bool:
        return self._passages.has(name)


RESIDENT = Passages({}, 0, rests_master=False)  # of a flat buffer whose states are all on the device
