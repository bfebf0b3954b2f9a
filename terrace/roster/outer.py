"""Anchor, momentum and message of one rank of an island, and the sums of an exchange.

They lie beside the optimizer states of a run without islands, each as large as this rank's slices of them. The message
has memory of its own, since an attempt that was given up may leave it half written while the next one is made; it is
taken again from anchor and parameters, which only APPLY changes (terrace.runtime.outer_state has the equations).

Sums over n islands of a message of N elements: each island adds up an n-th of it, in the order of the islands' names,
and sends the result to all. A rank sends 2 (n - 1)/n N elements, and all islands hold the same bits. Whoever has the
newest anchor sends an equal part of anchor and momentum to each island that is healed.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from terrace.comm.ledger import Meter
from terrace.comm.rounding import Origin
from terrace.plan.outer import Outer
from terrace.roster.entries import Attempted
from terrace.roster.links import Links
from terrace.runtime.outer_state import OuterState


def num_slices(outer: Outer) -> int:
    """Slices, each as large as the optimizer's, that a rank keeps: the anchor, the message, and a momentum if any."""
    return 2 + (outer.optimizer != "average")


def _part(numel: int, place: int, num: int) -> slice:
    return slice(numel * place // num, numel * (place + 1) // num)


class RosterState:
    """What one rank of an island keeps for the exchanges of its roster.

    `slices` are this rank's slices of the parameters, 1-D, in the master dtype; `numel` is the sum of their sizes.
    `sums` is the dtype of anchor, momentum and message. Messages are made on the host.
    """

    def __init__(self, outer: Outer, slices: Iterable[Tensor], sums: torch.dtype) -> None:
        slices = list(slices)
        device = slices[0].device
        self.numel, self.outer = sum(each.numel() for each in slices), replace(outer, delay=0)
        self._kept = torch.zeros((1 + (outer.optimizer != "average")) * self.numel, dtype=sums, device=device)
        self._message = torch.zeros(self.numel, dtype=sums, device=device)
        self._states: list[OuterState] = []
        begin = 0
        for values in slices:
            part = slice(begin, begin + values.numel())
            state = OuterState(self.outer, values, self._message[part], Origin("roster", device, Meter()))
            # Views of one buffer, so that a part of all of it can be sent.
            state.anchor = self._kept[part].copy_(state.anchor)
            if state.momentum is not None:
                state.momentum = self._kept[self.numel + part.start : self.numel + part.stop]
            self._states.append(state)
            begin = part.stop
        self._healed: Tensor | None = None  # of the attempt whose sums are held
        self._host = self._message if device.type == "cpu" else torch.zeros(self.numel, dtype=sums)

    @property
    def nbytes(self) -> int:
        return self._kept.nbytes + self._message.nbytes

    @property
    def anchor(self) -> Tensor:
        """All anchors of this rank, (numel)."""
        return self._kept[: self.numel]

    def digest(self) -> int:
        """Checksum of the bits of the anchors; the sum over an island's ranks is equal on all islands."""
        return sum(int(state.digest()) for state in self._states)

    @torch.no_grad()
    def exchange(self, attempt: Attempted, own: str, links: Links) -> None:
        """Replace the message by the weighted mean of all changes. Nothing else changes. Raises `LinkError`."""
        brought = attempt.islands[own]
        self._take(brought.window >= 0, brought.tokens / max(1, sum(each.tokens for each in attempt.islands.values())))
        holders = [name for name, each in attempt.islands.items() if each.version == attempt.version]
        stale = [name for name, each in attempt.islands.items() if each.version != attempt.version]
        self._healed = None
        if own in holders:
            part = self._kept[_part(self._kept.numel(), holders.index(own), len(holders))].cpu()
            for name in stale:
                links.send(name, part)
        else:
            healed = torch.empty(self._kept.numel(), dtype=self._kept.dtype)
            for place, name in enumerate(holders):
                links.receive(name, healed[_part(len(healed), place, len(holders))])
            self._healed = healed
        links.sent()
        self._sum(sorted(attempt.islands), own, links)

    def _take(self, has_change: bool, weight: float) -> None:
        if has_change:
            for state in self._states:
                state.take()
            self._message.mul_(weight)
        else:
            self._message.zero_()
        if self._host is not self._message:
            self._host.copy_(self._message)

    def _sum(self, names: list[str], own: str, links: Links) -> None:
        if len(names) == 1:
            return
        message, parts = self._host, {name: _part(self.numel, place, len(names)) for place, name in enumerate(names)}
        for name in names:
            if name != own:
                links.send(name, message[parts[name]])
        total = torch.zeros_like(message[parts[own]])
        there = torch.empty_like(total)
        # In the order of names on every island, so that the bits do not depend on the order of arrival.
        for name in names:
            if name != own:
                links.receive(name, there)
            total += message[parts[own]] if name == own else there
        links.sent()  # before the message is overwritten
        message[parts[own]] = total
        for name in names:
            if name != own:
                links.send(name, total)
        for name in names:
            if name != own:
                links.receive(name, message[parts[name]])
        links.sent()

    @torch.no_grad()
    def apply(self, attempt: Attempted) -> None:
        """Take the outer step with the mean that `exchange` has left: parameters become the new anchor."""
        if self._healed is not None:
            self._kept.copy_(self._healed)
            self._healed = None
        if self._host is not self._message:
            self._message.copy_(self._host)
        if not any(each.tokens for each in attempt.islands.values()):
            # Nobody has trained, so there is no step, not even of the momentum.
            for state in self._states:
                state.begin_again()
            return
        for state in self._states:
            state.apply(None, waits=True, moved=False)
