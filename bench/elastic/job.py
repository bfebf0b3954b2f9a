"""What both contestants train: the same small decoder, rows, inner optimizer and pace. A row is of the seed's order.

A micro-batch takes at least `Job.micro_s`, of which computing is a part: an island is a device of that speed, whatever
else the cores do.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from bench.common import decoder
from bench.learning import tokens
from terrace.data.batches import Batches, micros_of_rank
from terrace.model.config import ModelConfig
from terrace.model.decoder import build_blocks, token_loss
from terrace.model.init import initialise

HIDDEN, LAYERS, SEQUENCE, ROWS = 64, 2, 64, 2
LR, OUTER_LR, OUTER_MOMENTUM = 2e-3, 0.7, 0.9
_HELD_OUT, _EVALUATED = 0.02, 96  # of the text; rows of it


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run. `rounds` is the number of micro-batches of a step of all islands; a window is `every` steps.

    A killed island is there again `restart_s` later; one is killed every `fault_s` seconds (0: none), with
    `in_exchange` as soon as it exchanges. `notice_s` is how long a dead process is waited for.
    """

    contestant: str
    folder: str
    seed: int
    seconds: float
    islands: int = 3
    rounds: int = 6
    every: int = 18
    micro_s: float = 0.25
    fault_s: float = 20.0
    restart_s: float = 8.0
    in_exchange: bool = False
    notice_s: float = 2.5

    @property
    def tokens_a_round(self) -> int:
        return ROWS * SEQUENCE

    @property
    def config(self) -> ModelConfig:
        return decoder(HIDDEN, LAYERS)

    def batches(self) -> Batches:
        return Batches(tokens(), SEQUENCE, self.rounds * ROWS, self.seed, _HELD_OUT)


class Model:
    """The decoder with all its parameters in one flat buffer, (numel,), and its inner optimizer."""

    def __init__(self, job: Job) -> None:
        self._job, self._batches = job, job.batches()
        blocks = build_blocks(job.config)
        initialise(blocks, job.config, seed=job.seed, dtype=torch.float32)
        self.module = nn.Sequential(*blocks)
        parameters = list(self.module.parameters())
        self.flat = torch.cat([each.detach().reshape(-1) for each in parameters])
        begin = 0
        for each in parameters:
            each.data = self.flat[begin : begin + each.numel()].view_as(each)
            begin += each.numel()
        self.optimizer = torch.optim.AdamW(parameters, lr=LR)

    def step(self, number: int, place: int, degree: int, shares: Sequence[int] = ()) -> None:
        """One step on the micro-batches of island `place` of `degree`."""
        rows = self._batches.micro_batches(number, place, degree, ROWS, tuple(shares))
        num = len(micros_of_rank(self._job.rounds, place, degree, tuple(shares)))
        for inputs, labels, *_ in rows:
            end_s = time.monotonic() + self._job.micro_s
            loss = self._loss(torch.from_numpy(inputs), torch.from_numpy(labels)) / num
            loss.backward()  # type: ignore[no-untyped-call]
            time.sleep(max(0.0, end_s - time.monotonic()))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        total: Tensor = token_loss(self.module(inputs), labels)
        return total / labels.numel()

    @torch.no_grad()
    def held_out(self, values: Tensor) -> float:
        """Mean loss of held-out rows under these parameters."""
        self.flat.copy_(values)
        inputs, labels, *_ = self._batches.holdout(np.arange(_EVALUATED))
        return float(self._loss(torch.from_numpy(inputs), torch.from_numpy(labels)))


def anchor_file(folder: Path, number: int) -> Path:
    """The parameters after an exchange."""
    return folder / f"anchor-{number:05d}.pt"
