"""What blocks pass on: activations, and gradients in return, within this rank and from and to other stages."""

import math
from collections import deque
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from terrace.comm import Between, Ticket
from terrace.comm.collectives import DTYPES
from terrace.plan import MessageClass
from terrace.program import Instruction, Program
from terrace.runtime.tensor import TensorAxis

Key = tuple[bool, int, int]  # (whether a gradient, block that made it, micro-batch)


@dataclass
class Pending:
    """Communication under way, and the instruction that issued it."""

    ticket: Ticket
    counter: int


class Passing:
    """The activations and gradients of one step that were made or are arriving, and were not taken yet."""

    def __init__(self, program: Program, between: Between, axis: TensorAxis | None, device: torch.device) -> None:
        self._program = program
        self._between = between
        self._axis = axis
        self._device = device
        self._made: dict[Key, Tensor] = {}
        self._arriving: dict[Key, tuple[Pending, Tensor]] = {}
        self._sent: deque[tuple[Pending, Tensor]] = deque()  # with what must stay until it is gone

    def put(self, key: Key, values: Tensor) -> None:
        """Keep what a block made."""
        self._made[key] = values

    def arriving(self, key: Key) -> Pending | None:
        """Return the message that brings `key`, if another stage made it."""
        return self._arriving[key][0] if key in self._arriving else None

    def take(self, key: Key) -> Tensor:
        """Hand over what was made, or what has arrived: its message must be over."""
        if key not in self._arriving:
            return self._made.pop(key)
        _, values = self._arriving.pop(key)
        edge = self._program.edge
        if edge.gathers is not None:
            assert self._axis is not None, "only ranks of a tensor axis have parts of an activation"
            values = self._axis.rows.all_gather(values)[: math.prod(edge.shape)]
        return values.view(edge.shape)

    def receive(self, now: Instruction, counter: int) -> None:
        """Post the receive of `now`."""
        size, dtype = self._program.edge.numel, DTYPES[self._program.plan.compute]
        values = torch.empty(size, dtype=dtype, device=self._device)
        pending = Pending(self._between.receive(values, now.peer), counter)
        self._arriving[now.backward, now.block, now.micro] = pending, values

    def send(self, now: Instruction, counter: int) -> None:
        """Send what `now` names, and let go of what has left meanwhile."""
        values = self._made.pop((now.backward, now.block, now.micro)).detach().contiguous().view(-1)
        edge = self._program.edge
        if edge.gathers is not None:
            assert self._axis is not None, "only ranks of a tensor axis have parts of an activation"
            padded = F.pad(values, (0, edge.gathers.numel - values.numel()))
            values = padded[self._axis.rows.place * edge.numel :][: edge.numel]
        self._sent.append((Pending(self._between.send(MessageClass.PIPELINE, values, now.peer), counter), values))
        while self._sent and self._sent[0][0].ticket.is_done:
            self._sent.popleft()[0].ticket.wait()  # raises what went wrong

    def leaving(self) -> Pending | None:
        """Return the oldest message that was not waited for, None when there is none left; the caller waits for it."""
        return self._sent.popleft()[0] if self._sent else None
