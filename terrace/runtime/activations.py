"""Activations and activation gradients that pass between blocks, within a rank or between stages."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from terrace.base.errors import ModelError
from terrace.comm.collectives import DTYPES
from terrace.comm.rounding import Origin
from terrace.comm.stage_p2p import Arrival
from terrace.program.instruction import Instruction
from terrace.program.program import Program
from terrace.runtime.in_block import EdgeComm
from terrace.runtime.messages import Pending

if TYPE_CHECKING:
    from terrace.runtime.comm import Comm

Key = tuple[bool, int, int]  # (whether a gradient, block that made it, micro-batch)


@dataclass
class Kept:
    """What a block keeps for one micro-batch from its forward to its backward."""

    inputs: Tensor
    output: Tensor | None  # with its graph; None when the backward computes it, or does so again
    random_state: Tensor  # with which the backward runs the forward again; empty where it does not


class Activations:
    """Activations and gradients of one step, each held from when it is computed or received until a block takes it.

    On an edge between stages, `edges` splits an activation over the ranks of an axis, where one does. Messages use
    the wire format of their class on the tier between the two stages. `origins` are the blocks whose output or input
    gradient this rank sends.
    """

    def __init__(
        self, program: Program, comm: "Comm", origins: Mapping[int, Origin], edges: Sequence[EdgeComm]
    ) -> None:
        self._program, self._stages, self._collectives = program, comm.stages, comm.collectives
        self._origins, self._edges, self._device = origins, edges, comm.device
        self._made: dict[Key, Tensor] = {}
        self._arriving: dict[Key, tuple[Pending, Arrival]] = {}
        # With the values that must stay until they have left.
        self._leaving: deque[tuple[Pending, tuple[Tensor | None, ...]]] = deque()

    def put(self, key: Key, values: Tensor) -> None:
        self._made[key] = values

    def arriving(self, key: Key) -> Pending | None:
        """The pending receive of `key`, or None if this stage computes it."""
        return self._arriving[key][0] if key in self._arriving else None

    def take(self, key: Key) -> Tensor:
        """Remove and return the values of `key`. A receive of them must have completed."""
        # Made on this stage.
        if key not in self._arriving:
            return self._made.pop(key)
        pending, arrival = self._arriving.pop(key)
        backward, block, _ = key
        edge = self._program.model.edge_behind(block, backward=backward)
        hop = self._program.edge_hop(pending.instruction)
        dtype = DTYPES[self._program.plan.compute]
        if arrival.plain is None:
            values = self._collectives.read_rows(hop, arrival.message, dtype)[0]
        else:
            values = arrival.plain[0].to(dtype)
        if edge.gathers is not None:
            (cut,) = self._edges
            # Each row received one part; padding for equal parts is cut off again.
            values = cut.all_gather(values)[: math.prod(edge.shape)]
        return values.view(edge.shape)

    def receive(self, now: Instruction, counter: int) -> None:
        """Post the receive of a RECV."""
        # Allocated when the receive is posted, one task ahead of its use.
        hop = self._program.edge_hop(now)
        message = torch.empty(1, hop.part_bytes, dtype=torch.uint8, device=self._device)
        arrival = self._stages.receive_rows(message, hop, now.peer)
        self._arriving[now.backward, now.block, now.micro] = Pending(arrival, counter, now), arrival

    def send(self, now: Instruction, counter: int) -> None:
        """Start the message of a SEND, and drop the buffers of sends that have completed."""
        values = self._made.pop((now.backward, now.block, now.micro)).detach()
        edge = self._program.model.edge_behind(now.block, backward=now.backward)
        if tuple(values.shape) != edge.shape:
            raise ModelError(
                f"block {self._program.blocks[now.block].name} passes on {tuple(values.shape)}, but a stage receives "
                f"{edge.shape}, samples x activation=(sequence, hidden): a pipeline sends that shape alone"
            )
        values = values.contiguous().view(-1)
        if edge.gathers is not None:
            (cut,) = self._edges
            # All rows hold the same activation: each sends one equal part.
            padded = F.pad(values, (0, edge.gathers.numel - values.numel()))
            values = padded[cut.index * edge.numel :][: edge.numel]
        message_class = self._program.message(now).message_class
        hop, origin = self._program.edge_hop(now), self._origins[now.block]
        sent = self._collectives.code_rows(message_class, hop, values[None], origin)
        plain = self._collectives.plain_rows(hop, values[None], sent)
        ticket = self._stages.send(message_class, sent, now.peer, plain)
        self._leaving.append((Pending(ticket, counter, now), (sent, plain)))
        # Done sends are dropped on the way, so that few activations outlive their use.
        while self._leaving and self._leaving[0][0].ticket.is_done:
            self._leaving.popleft()[0].ticket.wait()  # raises the error of a failed send

    def leaving(self) -> Pending | None:
        """Remove and return the oldest send not yet waited for, or None. The caller waits for it."""
        return self._leaving.popleft()[0] if self._leaving else None
