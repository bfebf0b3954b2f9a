"""Point-to-point messages in a context group: each rank sends to and receives from several others at once.

All ranks of a group share one process group. An exchange blocks the thread of a lane or, on NCCL, is enqueued on the
current stream. Any two ranks issue their exchanges in the same order, so messages need no tag. Values are sent in
their own dtype.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from terrace.comm.groups import TierGroups
from terrace.comm.ledger import Ledger
from terrace.comm.pace import UNPACED, Pace
from terrace.plan.context import ContextGroup
from terrace.plan.wire import MessageClass

Messages = Sequence[tuple[int, Tensor]]  # (member of the group, contiguous values)


class GroupP2P:
    """Sends and receives of the rank with index `member` in a context group."""

    def __init__(
        self,
        groups: TierGroups,
        group: ContextGroup,
        member: int,
        *,
        tiers: Sequence[str],
        ledger: Ledger,
        pacer: Pace = UNPACED,
    ) -> None:
        self._context, self._member, self._tiers = group, member, tiers
        self._ledger, self._pacer = ledger, pacer
        self._group = groups.pool

    def exchange(self, message: MessageClass, sends: Messages, receives: Messages, *, again: bool = False) -> None:
        """Send values to other members, and fill the buffers of values received from them.

        `again`: plain values after packed messages that do not fit, which both sides have read in those.
        """
        if not sends and not receives:
            return
        by_tier: dict[str, list[int]] = defaultdict(list)
        for member, values in sends:
            by_tier[self._tiers[self._context.tier(self._member, member)]].append(values.nbytes)
        record = self._ledger.add_again if again else self._ledger.add
        for tier, sizes in by_tier.items():
            record(message, tier, sum(sizes))
        begin_s = self._pacer.begin()
        ranks, group = self._context.members, self._group
        # All at once: one after the other, two ranks could each wait for the other's receive.
        operations = [dist.P2POp(dist.irecv, values, ranks[member], group) for member, values in receives]
        operations += [dist.P2POp(dist.isend, values, ranks[member], group) for member, values in sends]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        for tier, sizes in by_tier.items():
            self._pacer.sent(tier, sum(sizes), 1, begin_s)  # all leave at once: one latency
