"""Point-to-point messages between the stages of a pipeline.

A receive is posted before the message is needed, so that it arrives while the stage computes. Messages between a pair
of ranks arrive in the order sent, per direction. On NCCL sends and receives are enqueued, and a wait makes the
current stream wait, not the host. On gloo a send completes only when the caller waits for it, and keeps its values
until then. Therefore one thread per peer stage sends, one message after the other.
"""

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from terrace.comm.groups import TierGroups
from terrace.comm.lane import ThreadLane, Ticket
from terrace.comm.ledger import Ledger
from terrace.comm.pace import UNPACED, Pace
from terrace.plan.mesh import Mesh
from terrace.plan.wire import MessageClass


class _WorkTicket(Ticket):
    def __init__(self, work: dist.Work | None) -> None:
        assert work is not None, "only members of a process group send in it"
        self._work = work

    def wait(self) -> None:
        self._work.wait()

    @property
    def is_done(self) -> bool:
        return self._work.is_completed()


class StageP2P:
    """Sends and receives between a rank and its counterparts in other stages."""

    def __init__(
        self,
        groups: TierGroups,
        mesh: Mesh,
        rank: int,
        *,
        tiers: tuple[str, ...],
        ledger: Ledger,
        pacer: Pace = UNPACED,
    ) -> None:
        self._groups, self._mesh, self._tiers, self._ledger, self._pacer = groups, mesh, tiers, ledger, pacer
        self._rank, self._stage = rank, mesh.stage(rank)
        self._lanes: dict[int, ThreadLane] = {}
        self._peers: dict[int, tuple[int, str]] = {}
        self.around: Callable[[Callable[[], None]], Callable[[], None]] | None = None  # times a send, in a traced step

    def send(self, message: MessageClass, values: Tensor, stage: int) -> Ticket:
        """Start sending contiguous `values`. Do not modify them until the ticket is done."""
        peer, tier = self._peer(stage)
        group = self._groups.between(peer, upward=self._stage < stage)
        self._ledger.add(message, tier, values.nbytes)
        if self._groups.backend == "nccl":
            return _WorkTicket(dist.isend(values, peer, group=group))
        # The link is busy from now on, not from the moment at which the thread gets to the message.
        begin_s = self._pacer.begin()

        def blocking() -> None:
            # Paced before sending, because the receiver just waits.
            self._pacer.sent(tier, values.nbytes, 1, begin_s)
            dist.send(values, peer, group=group)

        # A thread per peer stage, so that a slow stage does not hold up messages to another.
        if stage not in self._lanes:
            self._lanes[stage] = ThreadLane()
        return self._lanes[stage].submit(blocking if self.around is None else self.around(blocking))

    def receive(self, values: Tensor, stage: int) -> Ticket:
        """Start receiving into contiguous `values`. Read them only after waiting for the ticket."""
        peer, _ = self._peer(stage)
        group = self._groups.between(peer, upward=stage < self._stage)
        return _WorkTicket(dist.irecv(values, peer, group=group))

    def _peer(self, stage: int) -> tuple[int, str]:
        # The counterpart in a stage, and the outermost tier between.
        if stage not in self._peers:
            tier = self._tiers[self._mesh.edge_tier(self._stage, stage)]
            self._peers[stage] = self._mesh.at_stage(self._rank, stage), tier
        return self._peers[stage]

    @property
    def failed(self) -> bool:
        return any(lane.failed for lane in self._lanes.values())

    def close(self, wait: bool = True) -> None:
        for lane in self._lanes.values():
            lane.close(wait=wait)
