"""A forward of another model beside the steps of a run: on the same ranks, under a plan of its own.

The other model is a second engine without anything to train. Before a step it runs its forward on the rows of the step,
which its plan may divide otherwise than the run's; its last hidden states are then sent to the ranks that read them
(terrace.plan.handed_rows): those of the run's last stage. Ranks that hold what they read send nothing.

Shape legend: B rows of a micro-batch, S tokens of a row, H hidden size of the other model.
"""

import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from terrace.comm.collectives import DTYPES
from terrace.comm.process_group import new_group
from terrace.model.operations import Loss
from terrace.plan.handed_rows import Held, row_moves, sent_bytes
from terrace.plan.wire import MessageClass
from terrace.program.program import Program
from terrace.program.report import StepReport
from terrace.runtime.batch import Batch
from terrace.runtime.hidden import OutputMatrix

if TYPE_CHECKING:
    from terrace.runtime.engine import Engine

NAME = "teacher"  # category of seconds and bytes held, until a second kind of model runs beside a step


class ForwardBeside:
    """Runs `engine` beside the steps of `program`, whose ranks read its hidden states. Every rank calls all methods.

    The engine's objective is a `HiddenReader`. Its program and `program` must divide the same number of rows, and the
    ranks of the last stage of `program` must be on the last stage of the engine's.
    """

    def __init__(self, engine: "Engine", program: Program, timeout: timedelta) -> None:
        self.engine, rank = engine, engine.rank
        own, cluster = engine.program, program.cluster
        num_rows = program.layout.data_degree * program.plan.micro_batch * program.num_micros
        held, read = Held(cluster, own.plan, num_rows), Held(cluster, program.plan, num_rows)
        moves = row_moves(held, read)
        self._held, self._read, self._size = held.rows(rank), read.rows(rank), program.plan.micro_batch
        self._all_moves, self._cluster = moves, cluster
        self._sends = [move for move in moves if move.source == rank]
        self._receives = [move for move in moves if move.target == rank]
        # A group of its own, made by all ranks where any of them sends.
        self._group = new_group(None, timeout) if moves else None
        self.num_runs, self._seconds, self._held_bytes = 0, 0.0, 0

    def run(self, batches: Sequence[Batch]) -> tuple[list[Tensor], OutputMatrix]:
        """Hidden states (B, S, H) of the micro-batches of the run, and the rows of the output matrix on this rank.

        `batches` are the engine's micro-batches of the step. Both results are empty before the run's last stage.
        """
        begin_s = time.perf_counter()
        found, matrix = self.engine.hidden(batches, reads_matrix=bool(self._read))
        self.engine.drain()
        hidden = self._handed(found)
        self.num_runs += 1
        self._seconds += time.perf_counter() - begin_s
        self._held_bytes = sum(each.nbytes for each in hidden) + matrix.weight.nbytes
        return hidden, matrix

    def _handed(self, found: list[Tensor]) -> list[Tensor]:
        """Exchange rows. Returns those that this rank reads, by micro-batch."""
        if not self._all_moves and self._held == self._read:
            rows = torch.cat(found) if found and len(found[0]) != self._size else None
            return found if rows is None else list(torch.split(rows, self._size))
        whole = torch.cat(found) if found else None
        place = {row: index for index, row in enumerate(self._held)}
        sends, receives, tiers = [], [], Counter[str]()
        for move in self._sends:
            assert whole is not None, "ranks that send hold rows"
            values = whole[[place[row] for row in move.rows]]
            sends.append((move.target, values))
            tiers[self._cluster.tiers[move.tier].name] += values.nbytes
        shape, dtype = self._shape_of(whole)
        for move in self._receives:
            receives.append((move.source, torch.empty(len(move.rows), *shape, dtype=dtype, device=self.engine.device)))
        self._exchange(sends, receives, tiers)
        if not self._read:
            return []
        # Own rows first, then those that arrived, in the order in which they are read.
        parts = [*([] if whole is None else [whole]), *(values for _, values in receives)]
        order = [*self._held, *(row for move in self._receives for row in move.rows)]
        at = {row: index for index, row in enumerate(order)}
        rows = torch.cat(parts)[[at[row] for row in self._read]]
        return list(torch.split(rows, self._size))

    def _shape_of(self, whole: Tensor | None) -> tuple[tuple[int, ...], torch.dtype]:
        if whole is not None:
            return tuple(whole.shape[1:]), whole.dtype
        # A rank before the engine's last stage holds nothing.
        program = self.engine.program
        (loss,) = program.blocks[-1].operations.of(Loss)
        return (program.model.sequence, loss.source.features.numel), DTYPES[program.plan.compute]

    def _exchange(
        self, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]], tiers: Counter[str]
    ) -> None:
        engine = self.engine
        for tier, num_bytes in tiers.items():
            engine.comm.ledger.add(MessageClass.HIDDEN, tier, num_bytes)
            engine.runner.declared_bytes[MessageClass.HIDDEN, tier] += num_bytes
        if not sends and not receives:
            return
        begin_s = engine.comm.pacer.begin()
        # All at once: one after the other, two ranks could each wait for the other's receive.
        operations = [dist.P2POp(dist.irecv, values, source, self._group) for source, values in receives]
        operations += [dist.P2POp(dist.isend, values, target, self._group) for target, values in sends]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        for tier, num_bytes in tiers.items():
            engine.comm.pacer.sent(tier, num_bytes, 1, begin_s)

    def declared(self, row_bytes: int) -> dict[str, int]:
        """Bytes of hidden states that this rank sends before a step, by tier, for rows of `row_bytes`."""
        return sent_bytes(self._cluster, self._all_moves, self.engine.rank, row_bytes)

    def report(self) -> StepReport:
        """Seconds and bytes before a step, means over all so far, and the peak of bytes held."""
        runs, engine = max(1, self.num_runs), self.engine
        held = sum(engine.comm.meter.peak().values()) + self._held_bytes
        return StepReport(
            time_s={NAME: self._seconds / runs},
            sent_bytes={key: round(size / runs) for key, size in engine.comm.ledger.total().items()},
            memory_bytes={NAME: held},
        )

    def close(self) -> None:
        """Check the bytes that were sent, and stop the engine's lanes. Raises `ProgramError` if bytes differ."""
        self.engine.check_bytes()
        self.engine.close()
