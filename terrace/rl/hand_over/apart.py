"""Hand-over to another pool of ranks: one world trains and sends, another receives and generates.

Both sides plan the same transition (terrace.rl.hand_over.transition, `Apart`) and run its program over gloo groups that
span both worlds, one per tier. Parameters cross a slow tier once, and generating ranks pass them on to each other.
Training ranks keep their parameters: nothing is lent.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch.distributed import ProcessGroupGloo
from torch.distributed.distributed_c10d import PrefixStore, Store

from terrace.comm.ledger import Ledger
from terrace.plan.wire import MessageClass
from terrace.rl.hand_over.messages import BlockParts, Exchange, Slices, between, held_boxes, play
from terrace.rl.hand_over.program import HandOverProgram, hand_over_program
from terrace.rl.hand_over.transition import Apart, Transition
from terrace.rl.hand_over.verify import verify_hand_over

if TYPE_CHECKING:
    from terrace.runtime.engine import Engine


class HandOverApart:
    """One rank's side of the hand-over: it sends if it has an `engine`, otherwise it receives.

    `rank` is the rank in its own pool. All ranks of both pools construct it at the same time (they rendezvous at
    `store`) and call `run` at the same points. Slices are allocated on `device`; messages go through the host, over
    gloo.
    """

    def __init__(
        self,
        transition: Transition,
        apart: Apart,
        num_senders: int,
        rank: int,
        store: Store,
        device: torch.device,
        engine: "Engine | None" = None,
        timeout: timedelta = timedelta(minutes=10),
    ) -> None:
        self.transition, self._engine, self._device = transition, engine, device
        own = (apart.source if engine is not None else apart.first) + rank
        self.program: HandOverProgram = hand_over_program(apart.cluster, transition, own)
        verify_hand_over(self.program)
        members = [*range(apart.source, apart.source + num_senders)]
        members += range(apart.first, apart.first + apart.target.world_size)
        places = {member: place for place, member in enumerate(members)}
        self._exchanges: dict[int, Exchange] = {}
        for tier in sorted({each.tier for each in self.program.instructions}):
            of_tier = PrefixStore(f"tier/{tier}", store)
            group = ProcessGroupGloo(of_tier, places[own], len(members), timeout=timeout)
            self._exchanges[tier] = between(group, places)
        self.ledger = Ledger() if engine is None else engine.comm.ledger

    @property
    def sent_bytes(self) -> dict[tuple[MessageClass, str], int]:
        return self.program.sent_bytes

    def run(self) -> list[Slices]:
        """Send the current parameters, or receive and return this rank's slices of every block."""
        engine = self._engine
        if engine is not None:
            engine.settle()
            engine.drain()
            engine.runner.declared_bytes.update(self.sent_bytes)
        parts = [self._parts(block) for block in range(len(self.transition.alike))]
        play(self.program, parts, self._exchanges, self._device, self.ledger, by_host=True)
        return [own.slices for own in parts]

    def _parts(self, block: int) -> BlockParts:
        own = [] if self._engine is None else held_boxes(self._engine, block)
        return BlockParts.of(self.transition, block, self.program.rank, own, self._device)


def local_replica(transition: Transition, apart: Apart, rank: int) -> Sequence[int]:
    """The ranks, in the generating pool and in slice order, of the replica that `rank` of that pool belongs to."""
    found = next(replica for replica in transition.replicas if apart.first + rank in replica)
    return [each - apart.first for each in found]
