"""What is kept below the device of one rank: its files or memory, and how the states of its flat buffers reach them."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import nan
from pathlib import Path
from tempfile import gettempdir
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from terrace.accelerator import HOST as HOST_DEVICE
from terrace.comm.collectives import DTYPES
from terrace.comm.ledger import Ledger, Meter
from terrace.comm.pace import UNPACED, Pace
from terrace.plan.boundaries import input_pieces, passing_bytes
from terrace.plan.keep import HOST, NUM_WAYS
from terrace.plan.kept import (
    grad_format,
    grad_pieces,
    param_pieces,
    pieces,
    ring_bytes,
    updated_bytes,
    whole_piece_bytes,
)
from terrace.plan.kept_rows import RowPages, row_pages, rows_at_once
from terrace.plan.pieces import Piece
from terrace.plan.state_bytes import rests_master
from terrace.plan.wire import FORMATS, MessageClass
from terrace.program.kept import Passing, passing
from terrace.program.program import Program
from terrace.runtime.clock import NO_CLOCK, Clock
from terrace.runtime.kept.boundaries import Boundaries
from terrace.runtime.kept.channel import Around, Channel, Paced, untimed
from terrace.runtime.kept.file import KeptFile, scratch
from terrace.runtime.kept.host import HostMemory
from terrace.runtime.kept.host_update import Cores, HostUpdate, LandedGradient, SharedGradient
from terrace.runtime.kept.ring import InPlace, Ring, Slot, make_slots
from terrace.runtime.kept.states import RESIDENT, Passage, Passages
from terrace.runtime.kept.whole import Whole

if TYPE_CHECKING:
    from terrace.runtime.kept.rows import KeptRows


class Below:
    """Nothing is kept below. `words` tell the user what is unusual; "" for nothing."""

    words = ""
    declared: Mapping[tuple[MessageClass, str], int] = MappingProxyType({})  # bytes that depend on batches
    boundaries = Boundaries()  # inputs of blocks

    def passages(self, block: int, flat: int) -> Passages:
        """The groups of a block's flat buffer number `flat` that are kept below."""
        return RESIDENT

    def rate(self, medium: str) -> float:
        """Measure the bytes per second that a medium reads while it writes as many; 0 if nothing is kept there."""
        return 0.0

    def page_rates(self, medium: str) -> tuple[float, float]:
        """Measure the pages of rows per second that a medium reads, and that it writes; nan without any there."""
        return nan, nan

    def update_rate(self, rate: float) -> float:
        """Bytes per second of updates on the host's cores, which reach `rate` without a pace."""
        return rate

    def staging(self, num_bytes: int, locked: bool) -> Tensor:
        """Memory for the copy of a checkpoint, uint8; `locked` if the state is on a device."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=locked)

    def on_piece(self, call: Callable[[], None]) -> None:
        """Set a function that is called at each piece of an update."""

    def trace(self, around: Around = untimed) -> None:
        """Wrap the work of the lanes in `around` from now on; by default in nothing."""

    def drain(self) -> None:
        """Wait until everything has its place."""

    def close(self) -> None:
        """Give all room back."""


class Kept(Below):
    """States of one rank that are kept on media below its device.

    Optimizer states pass a ring, in the order of `program`; parameters are read and written as wholes. They rest in a
    file in `folder`, or in the host's memory. Raises `ConfigError` if there is no room for them, or no memory for the
    buffers that they pass.
    """

    def __init__(
        self,
        program: Program,
        device: torch.device,
        folder: Path,
        ledger: Ledger,
        meter: Meter,
        clock: Clock,
        pace: Pace = UNPACED,
    ) -> None:
        model, plan = program.model, program.plan
        self._device = device
        self._keep, self._folder, self._plan, self._flats, self._clock = plan.keep, folder, plan, model.flats, clock
        blocks = [model.flats[block] for block in program.stage.held]
        sizes = defaultdict[str, list[int]](list)  # medium -> bytes of its pieces
        states = [
            (each, _numbered(sizes[plan.keep.optimizer], pieces(plan, each.group)))
            for each in passing(model, program.counts)
        ]
        wholes = [
            _Resting(medium, (state, block, number), found, _numbered(sizes[medium], found), DTYPES[dtype])
            for state, medium, pieces_of, dtype in (
                (PARAMS, plan.keep.params, param_pieces, plan.compute),
                (GRADS, plan.keep.grads, grad_pieces, grad_format(plan)),
            )
            for block in program.stage.held
            for number, flat in enumerate(model.flats[block])
            if (found := pieces_of(plan, flat))
        ]
        places = list[_Resting]()
        for number in range(program.most_inputs_below):
            found = input_pieces(plan, model.input_numel)
            numbers = _numbered(sizes[plan.keep.activations], found)
            places.append(_Resting(plan.keep.activations, (INPUTS, -1, number), found, numbers, DTYPES[plan.compute]))
        rows = {
            (block, number): pages
            for block in program.stage.held
            for number, flat in enumerate(model.flats[block])
            for pages in row_pages(plan, flat)
        }
        for pages in rows.values():
            sizes[pages.medium] += []  # rows have a file of their own, and the lanes of their medium
        self._memory = [HostMemory(sizes[HOST])] if HOST in sizes else []
        stores: dict[str, KeptFile | HostMemory] = {
            medium: self._memory[0] if medium == HOST else KeptFile(folder, each) for medium, each in sizes.items()
        }
        self.words = "; ".join(dict.fromkeys(filter(None, (store.words for store in stores.values()))))
        self._channels = {
            medium: Channel(Paced(store, medium, pace) if pace.is_limited else store, ledger, medium)
            for medium, store in stores.items()
        }
        self._rows = {key: self._rows_of(pages, pace) for key, pages in rows.items()}
        self._rings = dict[str, Ring]()  # that of optimizer states, or one that measures where parameters rest
        self._passages, self._wholes = defaultdict[_Flat, _Groups](dict), dict[tuple[str, int, int], Whole]()
        # On a CPU they have no rate of their own.
        self._cores = [Cores(pace if plan.keep.hands_over else UNPACED)] if plan.keep.updates_on_host else []
        meter.add("buffers", ring_bytes(plan, blocks))
        if places:
            meter.add("buffers", passing_bytes(plan, model.input_numel))
            self._bound(places, device)
        if states:
            self._pass(states, device)
        for medium, largest in whole_piece_bytes(plan, blocks).items():
            self._rest(
                medium, [each for each in wholes if each.medium == medium], make_slots(NUM_WAYS, largest, device)
            )

    def _rows_of(self, pages: RowPages, pace: Pace) -> "KeptRows":
        from terrace.runtime.kept.rows import RowsInMemory, RowsOnDisk  # few plans keep a table below

        given = (pages, self._channels[pages.medium], self._clock, pace, rows_at_once(self._plan, pages.width))
        return RowsInMemory(*given) if pages.medium == HOST else RowsOnDisk(*given, self._folder)

    def _pass(self, states: Sequence[tuple[Passing, range]], device: torch.device) -> None:
        medium, order = self._keep.optimizer, [number for _, numbers in states for number in numbers]
        channel = self._channels[medium]
        largest = max(channel.store.sizes[number] for number in order)
        ring: Ring | InPlace
        if self._keep.states_pass:
            where, clock = (HOST_DEVICE, NO_CLOCK) if self._cores else (device, self._clock)
            slots = make_slots(min(self._keep.ring, len(order)), largest, where)
            ring = self._rings[medium] = Ring(channel, order, slots, clock)
        else:
            ring = InPlace(channel, self._memory[0])
        for (block, flat, group), numbers in states:
            self._passages[block, flat][group.name] = Passage(ring, group, pieces(self._plan, group), numbers)

    def _bound(self, places: Sequence["_Resting"], device: torch.device) -> None:
        slots = make_slots(NUM_WAYS, max(piece.num_bytes for piece in places[0].pieces), device)
        self._rest(places[0].medium, places, slots)
        num_bytes = sum(piece.numel for piece in places[0].pieces) * FORMATS[self._plan.compute].element_bytes
        self.boundaries = Boundaries([self._wholes[each.key] for each in places], num_bytes)

    def _rest(self, medium: str, wholes: Sequence["_Resting"], slots: Sequence[Slot]) -> None:
        reads, writes = slots
        for each in wholes:
            channel = self._channels[medium]
            self._wholes[each.key] = Whole(channel, each.pieces, each.numbers, (reads, writes), each.dtype)
        if medium not in self._rings:
            order = [number for each in wholes for number in each.numbers]
            self._rings[medium] = Ring(self._channels[medium], order, slots[: len(order)], self._clock)

    def passages(self, block: int, flat: int) -> Passages:
        params, grads = ([*filter(None, [self._wholes.get((state, block, flat))])] for state in (PARAMS, GRADS))
        found = self._passages.get((block, flat), {})
        rests = rests_master(self._plan, self._flats[block][flat])
        num_bytes = updated_bytes(self._plan, self._flats[block][flat])
        on_host = [partial(self._on_host, grads, num_bytes) for _ in self._cores if found]
        rows = [self._rows[block, flat]] if (block, flat) in self._rows else []
        size = self._keep.piece
        return Passages(found, size, rests_master=rests, params=params, grads=grads, rows=rows, on_host=on_host)

    def _on_host(self, grads: Sequence[Whole], num_bytes: int, owned: Tensor) -> HostUpdate:
        (cores,), sums = self._cores, DTYPES[self._plan.sums]
        landed = [LandedGradient(each, self._memory[0], sums) for each in grads]
        return HostUpdate(cores, landed[0] if landed else SharedGradient(owned), num_bytes)

    @property
    def declared(self) -> Mapping[tuple[MessageClass, str], int]:  # type: ignore[override]
        return sum((rows.declared for rows in self._rows.values()), Counter[tuple[MessageClass, str]]())

    def rate(self, medium: str) -> float:
        if medium in self._rings:
            return self._rings[medium].rate()
        return max((rows.rate(self._device) for rows in self._rows.values() if rows.pages.medium == medium), default=0)

    def page_rates(self, medium: str) -> tuple[float, float]:
        found = (rows.page_rates() for rows in self._rows.values() if rows.pages.medium == medium)
        return next(found, (nan, nan))

    def update_rate(self, rate: float) -> float:
        return min((cores.rate(rate) for cores in self._cores), default=rate)

    def staging(self, num_bytes: int, locked: bool) -> Tensor:
        # In the page cache and behind it on the disk: such a copy is larger than the memory that states below save.
        if "disk" in self._channels:
            return torch.frombuffer(scratch(self._folder, num_bytes), dtype=torch.uint8)
        return super().staging(num_bytes, locked)

    def on_piece(self, call: Callable[[], None]) -> None:
        for channel in self._channels.values():
            channel.on_piece = call

    def trace(self, around: Around = untimed) -> None:
        lanes: list[Channel | Cores] = [*self._channels.values(), *self._cores]
        for each in lanes:
            each.around = around

    def drain(self) -> None:
        for ring in self._rings.values():
            ring.drain()
        for rows in self._rows.values():
            rows.drain()

    def close(self) -> None:
        for cores in self._cores:
            cores.close()
        for channel in self._channels.values():
            channel.close()
        for rows in self._rows.values():
            rows.close()


class _Resting(NamedTuple):
    """A tensor that is kept on a medium as a whole: its state, block and flat buffer, and its pieces there."""

    medium: str
    key: tuple[str, int, int]
    pieces: Sequence[Piece]
    numbers: range
    dtype: torch.dtype  # in which it is stored


NOTHING_BELOW = Below()
PARAMS, GRADS, INPUTS = "params", "grads", "activations"  # what is kept below as wholes
_Flat = tuple[int, int]  # block, number of the flat buffer
_Groups = dict[str, Passage]


def _numbered(sizes: list[int], found: Sequence[Piece]) -> range:
    """Add pieces behind those of `sizes`; returns their numbers."""
    sizes += [piece.num_bytes for piece in found]
    return range(len(sizes) - len(found), len(sizes))


def below_of(
    program: Program,
    device: torch.device,
    folder: Path | None,
    ledger: Ledger,
    meter: Meter,
    clock: Clock,
    pace: Pace = UNPACED,
) -> Below:
    """What is kept below a rank's device. `folder` is for files, by default the system's for temporary ones.

    `pace` limits reads and writes to the rates of their medium.
    """
    if not any(program.resting_bytes.values()):
        return NOTHING_BELOW
    return Kept(program, device, folder or Path(gettempdir()), ledger, meter, clock, pace)
