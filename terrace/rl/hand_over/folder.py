"""Hand-over to programs that read weights from a folder: one rank writes what all of them hold, a block at a time.

It is the hand-over to a single replica, the writer, with one block a round. So a slow tier is crossed once, bytes
follow from the program, and the writer never has more than a block and the tensors of a file. The folder is one of
Hugging Face, in the dtype of the working copies, with the values of forwards; it appears when it is whole.
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from terrace.base.errors import TerraceError, TrainingError
from terrace.comm.process_group import new_group
from terrace.model.config import ModelConfig
from terrace.model.hf.names import stored_bytes
from terrace.model.hf.written import write_pretrained
from terrace.plan.wire import FORMATS
from terrace.rl.hand_over.messages import BlockParts, Slices, held_boxes, play, within
from terrace.rl.hand_over.program import HandOverProgram, hand_over_program
from terrace.rl.hand_over.transition import WRITER, Transition
from terrace.rl.hand_over.verify import verify_hand_over

if TYPE_CHECKING:
    from terrace.runtime.engine import Engine


class FolderHandOver:
    """One rank's side of the hand-over of an engine. All ranks construct it and call `run` at the same points."""

    def __init__(
        self, engine: "Engine", model: ModelConfig, transition: Transition, timeout: timedelta = timedelta(minutes=10)
    ) -> None:
        """`transition` is that of `to_writer`, `timeout` that of a message."""
        self._engine, self._model, self._transition = engine, model, transition
        self.program: HandOverProgram = hand_over_program(engine.program.cluster, transition, engine.rank)
        verify_hand_over(self.program)
        tiers = sorted({each.tier for each in self.program.instructions})
        self._exchanges = {tier: within(new_group(None, timeout)) for tier in tiers}

    @property
    def planned_bytes(self) -> int:
        """Bytes that this rank sends, and those of the tensors that it writes."""
        item = FORMATS[self._engine.program.plan.compute].element_bytes
        written = stored_bytes(self._model, item) if self._engine.rank == WRITER else 0
        return sum(self.program.sent_bytes.values()) + written

    def run(self, folder: Path) -> int:
        """Write the current parameters to `folder`. Returns the bytes of the tensors that this rank wrote.

        Raises `TrainingError` on all ranks if the folder cannot be written.
        """
        engine = self._engine
        engine.settle()
        engine.drain()
        engine.runner.declared_bytes.update(self.program.sent_bytes)
        blocks = _Blocks(self)
        fault, written = None, 0
        if engine.rank == WRITER:
            try:
                write_pretrained(folder, self._model, blocks.value, engine.program.plan.compute)
                written = tensor_bytes(folder)
            except (OSError, TerraceError) as error:
                fault = str(error)
        # Whatever the writer did not ask for, or all of them on the other ranks, so that no rank waits for another.
        blocks.finish()
        fault = engine.comm.exchange(fault)[WRITER]
        if fault is not None:
            raise TrainingError(f"cannot hand weights over to servers: {fault}; free space, or name another --folder")
        return written

    def received(self, block: int) -> Slices:
        """Send this rank's part of a block, or receive the whole of it."""
        engine, program = self._engine, self.program
        parts = BlockParts.of(self._transition, block, engine.rank, held_boxes(engine, block), engine.comm.device)
        places = [place for place, each in enumerate(program.instructions) if each.blocks == (block,)]
        own = replace(
            program,
            instructions=tuple(program.instructions[place] for place in places),
            moves=tuple(program.moves[place] for place in places),
        )
        play(own, {block: parts}, self._exchanges, engine.comm.device, engine.comm.ledger, engine.comm.pacer)
        return parts.slices

    @property
    def names(self) -> Sequence[str]:
        return [spec.name for spec in self._engine.state.specs]


class _Blocks:
    """Blocks in order, each received once, of which only the newest is held."""

    def __init__(self, hand_over: FolderHandOver) -> None:
        self._hand_over, self._names, self._next = hand_over, hand_over.names, 0
        self._slices: Slices = {}

    def value(self, block: str, param: str) -> Tensor:
        while self._names[self._next - 1] != block or not self._next:
            self._receive()
        return self._slices[param].cpu()

    def finish(self) -> None:
        while self._next < len(self._names):
            self._receive()

    def _receive(self) -> None:
        self._slices = {}
        self._slices = self._hand_over.received(self._next)
        self._next += 1


def tensor_bytes(folder: Path) -> int:
    """Bytes of the tensors in a folder's safetensors files, without their headers."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            total += path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")
    return total
