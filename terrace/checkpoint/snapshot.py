"""Consistent copy of the state that a rank writes, in the layout of its file: pieces, then residuals.

Copying runs at memory speed; training continues while the file is written from the copy. The copy has the size of the
rank's file and exists for the whole run: in main memory, page-locked if the state is on a device. Where states are
kept on a disk, since they may be larger than memory, so is the copy (terrace.runtime.kept.below).

The file has the safetensors format: the length of the header in 8 bytes, the header in JSON, the tensors without gaps.
"""

import json
import os
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from terrace.accelerator import has_streams
from terrace.base.boxes import to_text
from terrace.checkpoint.layout import LOSS_SCALE, tensor_name
from terrace.checkpoint.parts import BoxValues, is_in_blocks, parts_of
from terrace.checkpoint.residuals import named_residuals
from terrace.comm.rounding import Origin
from terrace.plan.holdings import Slices
from terrace.runtime.flat_param import FlatParam
from terrace.runtime.kept.below import NOTHING_BELOW
from terrace.runtime.loss_scale import LossScale

_DTYPES = {torch.int64: "I64", torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_DTYPES |= {torch.uint8: "U8"}
_WRITE_BYTES = 8 << 20  # a call: large enough that calls cost nothing
_ALIGNED = 8  # where the tensors begin in a file
_UNSCALED = LossScale.one()
Staging = Callable[[int, bool], Tensor]  # (bytes, whether they are page-locked) -> memory of a copy


class Snapshot:
    """The content of one rank's file: pieces that no earlier rank holds.

    `slices` gives the rank's slice of each parameter, `beside` additional parts with their blocks, `edges` the
    origins of messages to other stages. Tensors must keep their storage, because every `take` copies from them.
    States in 8-bit blocks are decoded in each `take`.
    """

    def __init__(
        self,
        flats: Iterable[FlatParam],
        slices: Slices,
        beside: Iterable[tuple[str, BoxValues]] = (),
        edges: Iterable[Origin] = (),
        loss_scale: LossScale = _UNSCALED,
        staging: Staging = NOTHING_BELOW.staging,
    ) -> None:
        self.pieces: dict[str, dict[str, list[str]]] = {}  # block -> parameter -> boxes
        # Updates made by the optimizers when the copy was taken; 0 if all parameters are frozen.
        self.num_updates, self._make_staging = 0, staging
        self._loss_scale, self.loss_scale = loss_scale, dict[str, Any]()  # its table then; empty where it stays 1
        self._flats, self._edges, self._pieces = list(flats), list(edges), list[tuple[str, Tensor]]()
        self._slices, self._in_blocks = slices, [flat for flat in self._flats if is_in_blocks(flat)]
        for flat in self._flats:
            for block, part in parts_of([flat], slices, first=True):
                self._add(block, part, flat in self._in_blocks)
        for block, part in beside:
            self._add(block, part, False)
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._lay_out([])

    def _add(self, block: str, part: BoxValues, in_blocks: bool) -> None:
        self.pieces.setdefault(block, {}).setdefault(part.parameter, []).append(to_text(part.box))
        for kind, values in part.values.items():
            # What is decoded for each copy has a place here, but no memory between copies.
            live = values.detach().to("meta") if in_blocks else values.detach()
            self._pieces.append((tensor_name(block, part.parameter, part.box, kind), live))

    def lay_out(self) -> None:
        """Add residuals that messages have created since to the layout of the file."""
        # The first message of a hop makes its residual, which then stays where it is.
        residuals = list(named_residuals(self._flats, self._edges))
        if len(residuals) != self._num_residuals:
            self._lay_out(residuals)

    def _lay_out(self, residuals: list[tuple[str, Tensor]]) -> None:
        # Widest elements first, so that each tensor is aligned to its own size.
        live = sorted([*self._pieces, *residuals], key=lambda named: -named[1].element_size())
        self._num_residuals, self._live = len(residuals), live
        self.header = _header(live)
        self.num_bytes = sum(values.nbytes for _, values in live)
        stored = (*(values for _, values in live), *(flat.full for flat in self._in_blocks))
        self._on_device = any(has_streams(values.device) for values in stored)
        self.release()

    def take(self) -> None:
        """Copy the current state. Returns when the copy is complete."""
        self.lay_out()
        if len(self._staging) < self.num_bytes:
            # One buffer in the order of the file, so writing needs no serialisation.
            self._staging = self._make_staging(self.num_bytes, self._on_device)
        self.take_into(self._staging)

    def take_into(self, staging: Tensor) -> None:
        """As `take`, into `staging`, `num_bytes` long: the file without its header, in the layout of `lay_out`."""
        self.num_updates = max((flat.optimizer.num_steps for flat in self._flats), default=0)
        table = self._loss_scale.table
        self.loss_scale = {LOSS_SCALE: table} if table else {}
        start, decoded = 0, dict[str, Tensor]()
        for name, values in self._live:
            place = staging[start : start + values.nbytes].view(values.dtype).view(values.shape)
            if values.is_meta:
                decoded[name] = place
            else:
                place.copy_(values, non_blocking=True)
            start += values.nbytes
        for flat in self._in_blocks:  # one decoded at a time
            for block, part in parts_of([flat], self._slices, first=True):
                for kind, values in part.values.items():
                    place = decoded[tensor_name(block, part.parameter, part.box, kind)]
                    place.copy_(values, non_blocking=True)
        # Training may change the state right after this call.
        if self._on_device:
            torch.accelerator.synchronize()

    def release(self) -> None:
        """Free the memory of the copy until the next `take`."""
        self._staging = torch.empty(0, dtype=torch.uint8)

    def write(self, path: Path) -> dict[str, Any]:
        """Write the copy and sync it. Returns the file's entry in the manifest. Raises `OSError`.

        A second thread computes the checksum. Safe in any thread, but not concurrently with `take`.
        """
        assert len(self._staging) == self.num_bytes, "write follows take"
        buffer: Any = self._staging.numpy()
        data = memoryview(buffer)
        with ThreadPoolExecutor(1, "checksum") as hasher, path.open("wb", buffering=0) as file:
            # `crc32` and `write` both release the interpreter lock, so they run in parallel.
            checksum = hasher.submit(zlib.crc32, data, zlib.crc32(self.header))
            write_all(file, memoryview(self.header))
            for start in range(0, len(data), _WRITE_BYTES):
                write_all(file, data[start : start + _WRITE_BYTES])
            # The checkpoint is renamed into place only once all its parts survive a crash.
            os.fsync(file.fileno())
            return {
                "num_bytes": len(self.header) + len(data),
                "crc32": f"{checksum.result():08x}",
                "pieces": self.pieces,
            }


def write_all(file: FileIO, data: memoryview) -> None:
    """Write all of `data`. One call on an unbuffered file may write only a part."""
    while data:
        data = data[file.write(data) or 0 :]


def _header(tensors: Iterable[tuple[str, Tensor]]) -> bytes:
    entries, start = {}, 0
    for name, values in tensors:
        stop = start + values.nbytes
        entries[name] = {"dtype": _DTYPES[values.dtype], "shape": list(values.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    # Safetensors allows trailing spaces in the header; they align the tensors.
    text += b" " * (-len(text) % _ALIGNED)
    return len(text).to_bytes(8, "little") + text
