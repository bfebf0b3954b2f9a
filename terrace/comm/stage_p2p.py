"""Point-to-point messages between the stages of a pipeline.

A receive is posted before the message is needed, so that it arrives while the stage computes. Messages between a pair
of ranks arrive in the order sent, per direction. On NCCL sends and receives are enqueued, and a wait makes the
current stream wait, not the host. On gloo a send completes only when the caller waits for it, and keeps its values
until then. Therefore one thread per peer stage sends, one message after the other.

A packed message may say that its plain values follow (terrace.comm.codecs.packed). These travel in process groups
of their own, because receives of later messages are posted already. A sender's thread sends them right after their
message, so waiting for a message first completes all earlier ones from the same peer.
"""

from collections import defaultdict, deque
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from terrace.comm.codecs import packed
from terrace.comm.groups import TierGroups
from terrace.comm.lane import ThreadLane, Ticket
from terrace.comm.ledger import Ledger
from terrace.comm.pace import UNPACED, Pace
from terrace.plan.hops import Hop
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


class Arrival(Ticket):
    """Ticket of a message of rows that is received; `plain` are the values that follow if it is packed and too wide."""

    def __init__(
        self, message: Tensor, hop: Hop, work: dist.Work | None, after: Callable[[Tensor], None], due: "deque[Arrival]"
    ) -> None:
        assert work is not None, "only members of a process group receive in it"
        self.message = message
        self.plain: Tensor | None = None
        self._hop, self._work, self._after, self._due = hop, work, after, due
        due.append(self)

    def wait(self) -> None:
        while self in self._due:
            self._due[0]._complete()
            self._due.popleft()

    def _complete(self) -> None:
        self._work.wait()
        if self._hop.wire.packed and packed.too_wide(self.message, self._hop.wire, self._hop.numel):
            plain = self.message.new_empty(len(self.message), self._hop.numel, dtype=torch.bfloat16)
            self._after(plain)
            self.plain = plain

    @property
    def is_done(self) -> bool:
        return self not in self._due


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
        self._due: dict[int, deque[Arrival]] = defaultdict(deque)  # by peer, in the order of their receives
        self._peers: dict[int, tuple[int, str, Pace]] = {}
        self.around: Callable[[Callable[[], None]], Callable[[], None]] | None = None  # times a send, in a traced step

    def send(self, message: MessageClass, values: Tensor, stage: int, plain: Tensor | None = None) -> Ticket:
        """Start sending contiguous `values`, and `plain` after them. Do not modify them until the ticket is done."""
        peer, tier, pacer = self._peer(stage)
        upward = self._stage < stage
        group = self._groups.between(peer, upward)
        self._ledger.add(message, tier, values.nbytes)
        then = None if plain is None else self._groups.between(peer, upward, again=True)
        if plain is not None:
            self._ledger.add_again(message, tier, plain.nbytes)
        if self._groups.backend == "nccl":
            sent = _WorkTicket(dist.isend(values, peer, group=group))
            return sent if plain is None else _WorkTicket(dist.isend(plain, peer, group=then))
        # The link is busy from now on, not from the moment at which the thread gets to the message.
        begin_s = pacer.begin()

        def blocking() -> None:
            # Paced before sending, because the receiver just waits.
            pacer.sent(tier, values.nbytes, 1, begin_s)
            dist.send(values, peer, group=group)
            if plain is not None:
                pacer.sent(tier, plain.nbytes, 1, pacer.begin())
                dist.send(plain, peer, group=then)

        # A thread per peer stage, so that a slow stage does not hold up messages to another.
        if stage not in self._lanes:
            self._lanes[stage] = ThreadLane()
        return self._lanes[stage].submit(blocking if self.around is None else self.around(blocking))

    def receive(self, values: Tensor, stage: int) -> Ticket:
        """Start receiving into contiguous `values`. Read them only after waiting for the ticket."""
        peer, *_ = self._peer(stage)
        group = self._groups.between(peer, upward=stage < self._stage)
        return _WorkTicket(dist.irecv(values, peer, group=group))

    def receive_rows(self, message: Tensor, hop: Hop, stage: int) -> Arrival:
        """Start receiving `message`, rows in the format of `hop` (terrace.comm.collectives, `code_rows`)."""
        peer, *_ = self._peer(stage)
        upward = stage < self._stage

        def after(plain: Tensor) -> None:
            dist.recv(plain, peer, group=self._groups.between(peer, upward, again=True))

        work = dist.irecv(message, peer, group=self._groups.between(peer, upward))
        return Arrival(message, hop, work, after, self._due[peer])

    def _peer(self, stage: int) -> tuple[int, str, Pace]:
        # The counterpart in a stage, the outermost tier between, and its pace.
        if stage not in self._peers:
            tier, peer = self._tiers[self._mesh.edge_tier(self._stage, stage)], self._mesh.at_stage(self._rank, stage)
            self._peers[stage] = peer, tier, self._pacer.between(self._rank, peer)
        return self._peers[stage]

    @property
    def failed(self) -> bool:
        return any(lane.failed for lane in self._lanes.values())

    def close(self, wait: bool = True) -> None:
        for lane in self._lanes.values():
            lane.close(wait=wait)
