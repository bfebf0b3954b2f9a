"""Reads checkpoints: integrity checks, then any box of any parameter."""

import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
import torch
from torch import Tensor

from terrace.base.boxes import Box, from_text, numel, sizes, to_text, whole, within
from terrace.base.errors import CheckpointError
from terrace.base.foreign import check_file, read_file
from terrace.checkpoint.islands import HEARD, MARKS, NUMBERS, NUMBERS_BLOCK, TOLD, Islands, note, own_name
from terrace.checkpoint.layout import (
    FORMAT,
    FORMAT_2,
    LOSS_SCALE,
    MAX_STEPS,
    ROW_WISE,
    BlockLayout,
    Files,
    check_model,
    complete,
    decode,
    folder_name,
    is_checkpoint_name,
    is_intact,
    is_row_wise,
    row_wise_note,
    step_of,
    stored_note,
    tensor_name,
)
from terrace.checkpoint.parts import CHOICES, COUNTS, BoxValues, choices_of, held, parts_of, plain_values, slices_of
from terrace.checkpoint.reshard import MissingElements, reshard
from terrace.checkpoint.residuals import restore_residuals
from terrace.model.spec import BlockSpec
from terrace.plan.counts import num_choices
from terrace.plan.holdings import Slices
from terrace.runtime.loss_scale import LossScale
from terrace.runtime.norm import is_finite
from terrace.runtime.outer_numbers import OuterNumbers
from terrace.runtime.states import OUTER_MOMENTUM, UNTRAINED

if TYPE_CHECKING:
    from terrace.runtime.engine import Engine
    from terrace.runtime.flat_param import FlatParam
    from terrace.runtime.model_state import ModelState

_NUM_READERS = 8
_MOST_BYTES = 1 << 30  # of a manifest, which lists the pieces of every rank
_INSTEAD = "delete the folder to go on from the checkpoint before it"


class Checkpoint:
    def __init__(self, folder: Path, text: str = "") -> None:
        """Read the manifest, or parse `text` instead.

        Raises `CheckpointError` if it is missing, damaged or of another format.
        """
        self.folder, self.text = folder, text
        path = folder / "manifest.json"
        self._pieces: dict[tuple[str, str], list[tuple[Box, str]]] = defaultdict(list)  # -> (box, file), sorted
        try:
            manifest = decode(text or read_file(path, folder, _MOST_BYTES).decode("utf-8"))
            # Before any other key, since only known formats promise them.
            if manifest["format"] not in (FORMAT_2, FORMAT):
                raise CheckpointError(
                    f"{folder} has format {manifest['format']!r}, but this version of Terrace reads formats {FORMAT_2} "
                    f"and {FORMAT} only: resume it with the version that wrote it, or start a new run"
                )
            self.step, self.num_updates = _counts(manifest["step"], manifest["num_updates"])
            self.facts: dict[str, Any] = dict(manifest["facts"])
            self.feedback = str(manifest.get("feedback", ""))  # of terrace.checkpoint.residuals; "": it has none
            self.loss_scale = LossScale.parse(manifest.get(LOSS_SCALE, {}))
            self.stored = tuple(map(str, manifest.get("stored", ())))  # as `stored_as`; (): by an earlier version
            self.is_row_wise = bool(manifest.get(ROW_WISE))  # as `layout.is_row_wise`
            self.islands = Islands.parse(manifest.get("islands", {}))
            self.groups: dict[str, tuple[str, ...]] = {name: tuple(kinds) for name, kinds in manifest["groups"].items()}
            self.layout: dict[str, BlockLayout] = {
                block: {name: (group, list(shape)) for name, (group, shape) in layout.items()}
                for block, layout in manifest["layout"].items()
            }
            for group in sorted({group for layout in self.layout.values() for group, _ in layout.values()}):
                if not self.groups.get(group):
                    raise ValueError(f"groups has no kinds of state for {group!r}")
            self.files: Files = dict(manifest["files"])
            for file, entry in self.files.items():
                # A name with a folder in it would open files outside of the checkpoint.
                if os.path.basename(file) != file or file in ("", ".", ".."):
                    raise ValueError(f"files names {file!r}, which is not the name of a file in the folder")
                for block, boxes in entry["pieces"].items():
                    for name, texts in boxes.items():
                        self._pieces[block, name] += [(from_text(text), file) for text in texts]
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}; is {folder} a checkpoint?") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path} is damaged ({error}): {_INSTEAD}") from error
        # `latest` and the removal of old checkpoints go by the name.
        if is_checkpoint_name(folder.name) and step_of(folder) != self.step:
            raise CheckpointError(
                f"{folder} holds step {self.step}, so it was renamed: give it its name {folder_name(self.step)} back, "
                "or delete it"
            )
        # Sorted once, as `reshard` is fastest on sorted boxes.
        for pieces in self._pieces.values():
            pieces.sort()

    def verify(self) -> None:
        """Check the size and checksum of every file, and that pieces cover all parameters.

        Raises `CheckpointError` for the first problem.
        """
        # Reading and checksums let go of the interpreter lock.
        with ThreadPoolExecutor(_NUM_READERS) as readers:
            for _ in readers.map(self.verify_file, self.files):
                pass
        self.check_pieces()

    def check_pieces(self) -> None:
        """Check that pieces cover every element of all parameters once. Raises `CheckpointError`."""
        for block, name, shape in self._arrays():
            # `_copies` raises for missing elements, so only duplicates are left to check.
            if sum(numel(box) for box, *_ in self._copies(block, name, whole(shape))) != numel(whole(shape)):
                raise CheckpointError(f"{self.folder} has elements of {block}.{name} twice: {_INSTEAD}")

    def _arrays(self) -> Iterator[tuple[str, str, Sequence[int]]]:
        """(block, name, shape) of everything that pieces must cover."""
        islands = self.islands
        for block, layout in self.layout.items():
            for name, (group, shape) in layout.items():
                yield block, name, shape
                for island in islands.with_own_state if group not in UNTRAINED else ():
                    yield block, own_name(name, island), shape
        for name, numbers in islands.numbers.items():
            yield NUMBERS_BLOCK, name, numbers

    def verify_file(self, name: str) -> None:
        """Check the size and checksum of one file. Raises `CheckpointError`."""
        path, file = self.folder / name, self.files[name]
        if not path.is_file():
            raise CheckpointError(f"{path} is missing: {_INSTEAD}")
        try:
            # The size first: a truncated file needs no checksum.
            size = path.stat().st_size
            intact = size == file["num_bytes"] and is_intact(path, file)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
        if size != file["num_bytes"]:
            raise CheckpointError(
                f"{path} has {size} bytes instead of {file['num_bytes']}, so it is damaged: {_INSTEAD}"
            )
        if not intact:
            raise CheckpointError(f"{path} is damaged (its checksum differs): {_INSTEAD}")

    def fill(self, block: str, wanted: Sequence[BoxValues]) -> None:
        """Read boxes of one block's parameters into the values of `wanted`.

        Reads only overlapping elements, with one file open and one overlap in memory at a time. Raises
        `CheckpointError` for missing elements and unreadable files.
        """
        for index, kind, box, stored in self._stored(
            block, [(part.parameter, part.box, part.values) for part in wanted]
        ):
            part = wanted[index]
            part.values[kind][within(box, part.box)].copy_(stored)

    def has(self, block: str, name: str) -> bool:
        return bool(self._pieces.get((block, name)))

    def files_of(self, block: str, wanted: Iterable[BoxValues]) -> set[str]:
        """Names of the files that `fill` reads for these boxes."""
        return {file for part in wanted for _, file, _ in self._copies(block, part.parameter, part.box)}

    def read(self, block: str, kinds: Collection[str] | None = None) -> dict[str, dict[str, Tensor]]:
        """Whole parameters of a block: parameter -> kind -> tensor. All kinds by default.

        Raises `CheckpointError` as `fill` does.
        """
        wanted = [
            (name, whole(shape), [kind for kind in self.groups[group] if kinds is None or kind in kinds])
            for name, (group, shape) in self.layout[block].items()
        ]
        found: dict[str, dict[str, Tensor]] = {name: {} for name, _, _ in wanted}
        for index, kind, box, stored in self._stored(block, wanted):
            name, everything, _ = wanted[index]
            if kind not in found[name]:
                found[name][kind] = torch.empty(sizes(everything), dtype=stored.dtype)
            found[name][kind][within(box, everything)].copy_(stored)
        for name, everything, its_kinds in wanted:
            # Empty parameters have no piece in any file.
            if not numel(everything):
                found[name] = {kind: torch.empty(sizes(everything)) for kind in its_kinds}
        return found

    def parameters(self) -> Iterator[tuple[str, str, Tensor]]:
        """(block, parameter, master value) of the whole model, a block at a time; those held in codes are decoded."""
        # The first kind of each group is the parameter's value.
        first = {kinds[0] for kinds in self.groups.values()}
        for block, layout in self.layout.items():
            yield from ((block, name, value) for name, value in plain_values(layout, self.read(block, first)))

    def _stored(
        self, block: str, wanted: Sequence[tuple[str, Box, Collection[str]]]
    ) -> Iterator[tuple[int, str, Box, Tensor]]:
        # By file, so that each one is opened once.
        by_file: dict[str, list[tuple[int, Box, Box]]] = defaultdict(list)
        for index, (name, box, _) in enumerate(wanted):
            for piece, file_name, common in self._copies(block, name, box):
                by_file[file_name].append((index, piece, common))
        for file_name, copies in by_file.items():
            path = self.folder / file_name
            try:
                check_file(path, self.folder)
                with safetensors.safe_open(path, framework="pt") as file:
                    for index, piece, common in copies:
                        name, _, kinds = wanted[index]
                        for kind in kinds:
                            # A slice reads only its own part of the file.
                            stored = file.get_slice(tensor_name(block, name, piece, kind))
                            yield index, kind, common, stored[within(common, piece)]
            except (OSError, safetensors.SafetensorError) as error:
                raise CheckpointError(f"cannot read {block} of {path}: {error}") from error

    def _copies(self, block: str, name: str, box: Box) -> Iterator[tuple[Box, str, Box]]:
        pieces = self._pieces.get((block, name), [])
        try:
            copies = reshard([piece for piece, _ in pieces], [box])
        except MissingElements as error:
            raise CheckpointError(
                f"{self.folder} lacks elements [{to_text(error.box)}] of {block}.{name}: {_INSTEAD}"
            ) from None
        for copy in copies:
            yield *pieces[copy.source], copy.box


def _counts(step: object, num_updates: object) -> tuple[int, int]:
    # Exact types: a bool or text would pass `int`.
    if type(step) is not int or not 0 <= step < MAX_STEPS:
        raise ValueError(f"step = {step!r} is not a number of steps")
    if type(num_updates) is not int or not 0 <= num_updates <= step:
        raise ValueError(f"num_updates = {num_updates!r} is not possible after {step} steps")
    return step, num_updates


def newest_whole(run_folder: Path, before: int | None = None) -> tuple[Checkpoint, list[str]]:
    """The newest intact checkpoint of a run, verified, and the damage of each newer one.

    With `before`, only checkpoints from which step `before` (from 1) can still be run. Raises `CheckpointError`, with
    the damage of each, if none is intact.
    """
    wrong: list[str] = []
    found = [path for path in complete(run_folder / "checkpoints") if before is None or step_of(path) < before]
    for folder in reversed(found):
        try:
            checkpoint = Checkpoint(folder)
            checkpoint.verify()
        except CheckpointError as error:
            # The advice is to take an earlier checkpoint, which is about to happen.
            wrong.append(str(error).removesuffix(f": {_INSTEAD}"))
        else:
            return checkpoint, wrong
    if not wrong:
        raise CheckpointError(f"{run_folder} has no complete checkpoint to resume from")
    raise CheckpointError(f"{run_folder} has no checkpoint that is whole: {'; '.join(wrong)}; start a new run")


def resume(engine: "Engine", checkpoint: Checkpoint) -> str:
    """Load a checkpoint into an engine, and return the note of `restore`. Every rank calls this.

    Raises `CheckpointError` on every rank if any rank cannot read its part, or finds inf or nan in it.
    """
    said, problem = "", None
    engine.drain()  # messages in flight would overwrite the state that is read
    try:
        said = restore(engine.state, checkpoint)
    except CheckpointError as error:
        problem = str(error)
    lacks_loads = (
        engine.passages.balance.step
        and checkpoint.step
        # Of the whole model: the stage of the rank that prints the note may have no mixture.
        and lacks_choices(checkpoint, engine.program.blocks)
    )
    if lacks_loads:
        said = "; ".join(filter(None, (said, f"balance.step begins anew, since {checkpoint.folder.name} has no loads")))
    # Every rank learns of it, so that none waits for a rank that has raised.
    told = [each for each in engine.comm.exchange(problem) if each is not None]
    if told:
        raise CheckpointError(told[0])
    engine.refresh()
    return said


def lacks_choices(checkpoint: Checkpoint, blocks: Iterable[BlockSpec]) -> bool:
    return any(num_choices(block) and not checkpoint.has(block.name, CHOICES) for block in blocks)


def restore(state: "ModelState", checkpoint: Checkpoint) -> str:
    """Load this rank's parameters, optimizer state and error-feedback residuals.

    Every rank calls this, and `Engine.refresh` afterwards: the checkpoint holds master values, so working copies are
    stale until then. Returns a note if residuals start at zero, islands start from the anchor, storage formats change,
    or the rows of a table that an update changes do, else "".

    Raises `CheckpointError` if the checkpoint is of another model or unreadable. Call `checkpoint.verify()` on one
    rank first: this checks only the elements it reads.
    """
    check_model(checkpoint.folder, checkpoint.layout, state.specs, state.settings)
    # Without its updates the optimizer would correct the bias of a mean that has none.
    num_steps = checkpoint.step - checkpoint.loss_scale.skipped
    if checkpoint.num_updates == 0 < num_steps and any(spec.num_trainable for spec in state.specs):
        raise CheckpointError(f"{checkpoint.folder} is after {checkpoint.step} steps with 0 updates: {_INSTEAD}")
    slices, islands = slices_of(state.program.mesh, state.rank), Islands.of(state.program)
    goes_on = checkpoint.islands.goes_on(islands)
    said = note(checkpoint.folder.name, checkpoint.islands, islands) if checkpoint.step else ""
    state.loss_scale.take(checkpoint.loss_scale)
    stored = stored_note(checkpoint.folder.name, checkpoint.stored, state.program.plan) if checkpoint.step else ""
    row_wise = is_row_wise(state.program.plan, state.specs)
    rows = row_wise_note(checkpoint.folder.name, checkpoint.is_row_wise, row_wise) if checkpoint.step else ""
    with torch.no_grad():
        for flat in state:
            restore_flat(flat, checkpoint, slices, goes_on=goes_on)
        _restore_numbers(state.outer_numbers, checkpoint, goes_on=goes_on)
        for block, part in choices_of(state.program, state.choices):
            if checkpoint.has(block, CHOICES):
                checkpoint.fill(block, [part])
            else:  # of an earlier version: as in the first step
                part.values[COUNTS].zero_()
        residuals = restore_residuals(state, checkpoint.folder, checkpoint.feedback)
    return "; ".join(filter(None, (said, stored, rows, residuals)))


def not_finite(where: Path, name: str, kind: str = "") -> CheckpointError:
    """The error for a tensor with inf or nan; `kind` is its kind of state, unless it is the parameter's value."""
    what = f"the state {kind!r} of {name}" if kind not in ("", "master", "frozen") else name
    return CheckpointError(f"{where}: {what} holds inf or nan: use a checkpoint or weights from before")


def restore_flat(flat: "FlatParam", checkpoint: Checkpoint, slices: Slices, *, goes_on: bool = False) -> None:
    """Load a flat parameter's state. `slices` gives the rank's slice of each parameter. Padding is zeroed.

    With `goes_on` the island's own state is loaded too; otherwise an island starts from the anchor.
    """
    for window in flat.windows():
        with window:
            # Padding is not stored, and must not keep the values it was initialised with.
            for each in held(flat):
                for values in each.values.values():
                    values.zero_()
            parts = wanted_parts(flat, checkpoint, slices, goes_on=goes_on)
            checkpoint.fill(flat.name, parts)
            for part in parts:
                for kind, values in part.values.items():
                    if not is_finite(values):
                        raise not_finite(checkpoint.folder, f"{flat.name}.{part.parameter}", kind)
    if flat.spec.trainable:
        flat.optimizer.num_steps = checkpoint.num_updates
    for outer in flat.outer_states:
        (outer.go_on if goes_on else outer.begin_again)()


def wanted_parts(
    flat: "FlatParam", checkpoint: Checkpoint, slices: Slices, *, goes_on: bool = False
) -> list[BoxValues]:
    """The parts of a flat parameter that a rank reads from a checkpoint; `goes_on` as for `restore_flat`."""
    parts = [part for _, part in parts_of([flat], slices, own=goes_on)]
    if not checkpoint.islands.momentum:
        for part in parts:
            part.values.pop(OUTER_MOMENTUM, None)
    return parts


def _restore_numbers(numbers: OuterNumbers, checkpoint: Checkpoint, *, goes_on: bool) -> None:
    numbers.begin_again(checkpoint.step)
    if not goes_on:
        return
    shapes, same = checkpoint.islands.numbers, {HEARD: numbers.heard, MARKS: numbers.marks}
    wanted = [BoxValues(parameter=name, box=whole(shapes[name]), values={NUMBERS: each}) for name, each in same.items()]
    island, rest = (numbers.island, numbers.island + 1), whole(shapes[TOLD][2:])
    # Sums over the ranks of an island: another number of ranks shares them out.
    rows = [
        BoxValues(
            parameter=TOLD,
            box=(island, (row, row + 1), *rest),
            values={NUMBERS: torch.zeros_like(numbers.own_figures)[None, None]},
        )
        for row in range(numbers.island_rank, checkpoint.islands.ranks, numbers.num_ranks)
    ]
    checkpoint.fill(NUMBERS_BLOCK, [*wanted, *rows])
    for each in rows:
        numbers.own_figures += each.values[NUMBERS][0, 0]
