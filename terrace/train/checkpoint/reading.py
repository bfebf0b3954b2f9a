"""Reading a checkpoint: checks first, then any range of any flat buffer."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from terrace.base.errors import CheckpointError
from terrace.runtime.engine import Engine
from terrace.runtime.flat import Flat
from terrace.runtime.shard import Shard
from terrace.train.checkpoint.layout import (
    FORMAT,
    FROZEN,
    KINDS,
    TRAINABLE,
    BlockLayout,
    check_model,
    decode,
    file_sha256,
)

_INSTEAD = "delete the folder to go on from the checkpoint before it"


@dataclass(frozen=True)
class _Piece:
    """The range [start, stop) of one flat buffer of a block, in one file."""

    file: str
    start: int
    stop: int


class Checkpoint:
    """A checkpoint on disk, opened for reading."""

    def __init__(self, folder: Path) -> None:
        """Read the manifest; raises `CheckpointError` when it is missing, damaged or of another format."""
        self.folder = folder
        path = folder / "manifest.json"
        self._pieces: dict[tuple[str, str], list[_Piece]] = defaultdict(list)  # (group, block) -> sorted
        try:
            manifest = decode(path.read_text(encoding="utf-8"))
            if manifest["format"] != FORMAT:
                raise CheckpointError(f"{folder} has format {manifest['format']!r}, this version reads {FORMAT}")
            self.step = int(manifest["step"])
            self.num_updates = int(manifest["num_updates"])
            self.facts: dict[str, Any] = dict(manifest["facts"])
            self.layout: dict[str, BlockLayout] = dict(manifest["layout"])
            self.files: dict[str, dict[str, Any]] = dict(manifest["files"])
            for name, file in self.files.items():
                for group in KINDS:
                    for block, start, stop in file[group]:
                        self._pieces[group, block].append(_Piece(name, start, stop))
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}; is {folder} a checkpoint?") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{path} is damaged ({error}): {_INSTEAD}") from error
        for pieces in self._pieces.values():
            pieces.sort(key=lambda piece: piece.start)

    def verify(self) -> None:
        """Hold every file against its size and checksum; raises `CheckpointError` naming the first bad one."""
        for name, file in self.files.items():
            path = self.folder / name
            if not path.is_file():
                raise CheckpointError(f"{path} is missing: {_INSTEAD}")
            try:
                size, sha256 = path.stat().st_size, file_sha256(path)
            except OSError as error:
                raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
            if size != file["num_bytes"]:
                raise CheckpointError(
                    f"{path} has {size} bytes instead of {file['num_bytes']}, so it is damaged: {_INSTEAD}"
                )
            if sha256 != file["sha256"]:
                raise CheckpointError(f"{path} is damaged (its checksum differs): {_INSTEAD}")
        for block, groups in self.layout.items():
            for group, extents in groups.items():
                self._find(group, block, 0, extents[-1][3] if extents else 0)

    def read(self, block: str, kind: str, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of one kind of one flat buffer, put together from its pieces.

        Raises `CheckpointError` for elements that are not there and files that cannot be read.
        """
        group = FROZEN if kind in KINDS[FROZEN] else TRAINABLE
        parts = []
        with ExitStack() as stack:
            for piece, first, last in self._find(group, block, start, stop):
                path = self.folder / piece.file
                try:
                    file = stack.enter_context(safetensors.safe_open(path, framework="pt"))
                    parts.append(file.get_slice(f"{block}/{kind}")[first - piece.start : last - piece.start])
                except (OSError, safetensors.SafetensorError) as error:
                    raise CheckpointError(f"cannot read {block}/{kind} of {path}: {error}") from error
        return torch.cat(parts) if parts else torch.empty(0)

    def parameters(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield (block, parameter, master value) of the whole model, one block in memory at a time."""
        for block, groups in self.layout.items():
            for group, extents in groups.items():
                if extents:
                    flat = self.read(block, KINDS[group][0], 0, extents[-1][3])
                    for name, shape, start, stop in extents:
                        yield block, name, flat[start:stop].view(shape)

    def _find(self, group: str, block: str, start: int, stop: int) -> list[tuple[_Piece, int, int]]:
        """Return the pieces that make up [start, stop), with the range taken from each."""
        found, at = [], start
        for piece in self._pieces[group, block]:
            if piece.start <= at < min(stop, piece.stop):
                found.append((piece, at, min(stop, piece.stop)))
                at = min(stop, piece.stop)
        if at < stop:
            raise CheckpointError(
                f"{self.folder} lacks elements {at} to {stop} of the {group} parameters of {block}: {_INSTEAD}"
            )
        return found


def restore(engine: Engine, checkpoint: Checkpoint) -> None:
    """Load parameters and optimizer state into the engine. Every rank calls this.

    Raises `CheckpointError` when the checkpoint is of another model or cannot be read. Call
    `checkpoint.verify()` on one rank before: here only what is read is looked at.
    """
    check_model(checkpoint.folder, checkpoint.layout, [state.spec for state in engine.states])
    with torch.no_grad():
        for shard in (shard for state in engine.states for shard in state.shards):
            _restore_shard(shard, checkpoint)
        engine.refresh_all()


def clipped(flat: Flat, tier: int) -> tuple[int, int]:
    """Return the range of this rank's slice of a state on `tier`, without the padding."""
    part = flat.part(tier)
    return min(part.start, flat.numel), min(part.stop, flat.numel)


def _restore_shard(state: Shard, checkpoint: Checkpoint) -> None:
    layout, name = state.layout, state.name
    if state.trainable is not None and state.optimizer is not None:
        start, stop = clipped(state.trainable, layout.optimizer)
        targets = (state.optimizer.master, state.optimizer.exp_avg, state.optimizer.exp_avg_sq)
        for kind, target in zip(KINDS[TRAINABLE], targets, strict=True):
            target.zero_()
            target[: stop - start].copy_(checkpoint.read(name, kind, start, stop))
        state.optimizer.num_steps = checkpoint.num_updates
    if state.fixed is not None:
        start, stop = clipped(state.fixed, layout.params)
        state.fixed.shard[: stop - start].copy_(checkpoint.read(name, KINDS[FROZEN][0], start, stop))
