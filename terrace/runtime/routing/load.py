"""Expert load of a stage: a rank's counts in a step, their sums over ranks, and the bias update computed from them.

The sums are integers, so they are bitwise equal under every plan, and so is the bias that they update:

    b_i += u sign(mean n - n_i)      n_i the tokens of expert i in the step   (2408.15664, algorithm 1)
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from terrace.base.errors import ProgramError
from terrace.comm.collectives import Collectives
from terrace.model.balance import BalanceConfig
from terrace.model.experts.mixture import Mixture, Tally
from terrace.plan.counts import OF_ROWS, counted, num_counts
from terrace.program.loads import Loads
from terrace.program.message import Transfer
from terrace.program.program import Program


class Load:
    """Counts the tokens of each expert in the mixtures of `modules` (by block) during training steps.

    `choices`, (E) by block, are set to the counts of the last step that was not given up.
    """

    def __init__(
        self,
        program: Program,
        modules: Mapping[int, nn.Module],
        balance: BalanceConfig,
        choices: Mapping[int, Tensor],
        device: torch.device,
    ) -> None:
        self._balance, self._choices = balance, choices
        blocks = self._blocks = counted(program.blocks, program.stage.own)
        self.layers = tuple(program.blocks[block].name for block in blocks)
        self._mixtures = [_mixture(modules[block]) for block in blocks]
        self.num_experts = self._mixtures[0].router.config.num_experts if blocks else 0
        self._width = self.num_experts + len(OF_ROWS)  # numbers of a mixture
        self.loads: Loads | None = None  # of the newest step that was not given up
        self._totals, self._num_counted = Counter[str](), 0  # of the figures, and of steps that have them
        self._num_ranks, self._num_rows = program.mesh.stack_degrees
        num = program.model.stage_layout.padded(num_counts(program.blocks[block] for block in blocks))
        self._numbers = torch.zeros(num, dtype=torch.int64, device=device)
        self._sums = self._numbers
        each = self._rows(self._numbers)
        self._tallies = {block: Tally(row) for block, row in zip(blocks, each, strict=True)}
        for block, mixture in zip(blocks, self._mixtures, strict=True):
            mixture.tally = self._tallies[block]

    @property
    def mean_figures(self) -> dict[str, float]:
        """The figures of `Loads`, averaged over the steps so far."""
        return {name: total / self._num_counted for name, total in self._totals.items()}

    def begin(self) -> None:
        self._numbers.zero_()

    @contextmanager
    def counting(self, block: int) -> Iterator[None]:
        """Context for the first forward of a block on a micro-batch."""
        with self._while(block, is_open=True):
            yield

    @contextmanager
    def paused(self, block: int) -> Iterator[None]:
        """Context for a nested forward of the block, which is not counted."""
        with self._while(block, is_open=False):
            yield

    @contextmanager
    def _while(self, block: int, *, is_open: bool) -> Iterator[None]:
        tally = self._tallies.get(block, Tally())
        before, tally.is_open = tally.is_open, is_open
        try:
            yield
        finally:
            tally.is_open = before

    def add_up(self, collectives: Collectives, transfer: Transfer) -> None:
        """Sum over the ranks of the stage. Runs on a lane."""
        self._sums = collectives.sum_counts(transfer, self._numbers)

    @property
    def sums(self) -> Tensor:
        """The counts of all ranks, int64: of each mixture tokens of its experts, then its rows."""
        return self._rows(self._sums).flatten()

    def settle(self, sums: Sequence[int]) -> None:
        """After CLIP, unless the step is given up: publish the loads and update the bias; `sums` are on the host.

        Raises `ProgramError`, on the stage concerned, if rows were lost.
        """
        if not self._blocks:
            return
        counts = self._rows(self._sums)[:, : self.num_experts]
        numbers = [sums[start : start + self._width] for start in range(0, len(sums), self._width)]
        of_experts = tuple(tuple(each[: self.num_experts]) for each in numbers)
        self.loads = Loads(layers=self.layers, counts=of_experts, num_ranks=self._num_ranks)
        self._totals.update(self.loads.figures)
        self._num_counted += bool(self.loads.figures)
        for layer, each, of_layer in zip(self.layers, of_experts, numbers, strict=True):
            due, (sent, received, multiplied) = self._num_rows * sum(each), of_layer[self.num_experts :]
            if sent != received or multiplied != due:
                raise ProgramError(
                    f"{layer}: in this step ranks sent {sent} rows to experts and received {received}, and experts "
                    f"multiplied {multiplied} of {due}; every row that is sent must be received and multiplied"
                )
        for block, row in zip(self._blocks, counts, strict=True):
            self._choices[block].copy_(row)
        if self._balance.bias:
            self._move(counts)

    def _move(self, counts: Tensor) -> None:
        for mixture, row in zip(self._mixtures, counts, strict=True):
            if mixture.router.bias is not None:
                ahead = (row.sum() - len(row) * row).sign()  # of mean n - n_i
                mixture.router.bias.detach().add_(ahead, alpha=self._balance.bias)

    def _rows(self, numbers: Tensor) -> Tensor:
        """The counts of each mixture, (L, E + 3)."""
        if not self._blocks:
            return numbers[:0].view(0, 0)
        return numbers[: len(self._blocks) * self._width].view(-1, self._width)


def _mixture(module: nn.Module) -> Mixture:
    (found,) = (each for each in module.modules() if isinstance(each, Mixture))
    return found
