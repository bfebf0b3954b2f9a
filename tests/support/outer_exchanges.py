"""The sum of islands' contributions to a mean, exactly or coded, in one process; imports nothing from Terrace.

A code is a function that gives back a row of elements as it arrives. Error feedback adds to a message the rounding
error of the last message of the same sender, over the same hop, of the same elements (docs/plans.md, "Wire formats").
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

Exchange = Callable[[int, Sequence[Tensor]], Tensor]  # block and w_i d_i of every island, flat rows, to their sum
Code = Callable[[Tensor], Tensor]


def exact_mean(block: int, rows: Sequence[Tensor]) -> Tensor:
    """The sum as it is."""
    return torch.stack(list(rows)).sum(0)


class Coded:
    """Messages that are coded on their way; `residuals` by (block, hop, part, sender) with error feedback, in fp32.

    A flat row is cut evenly, after padding, among the `ranks_inside` of an island, and each part by itself is exchanged
    with the other islands.
    """

    def __init__(self, code: Code, *, ranks_inside: int = 1, feedback: bool = False) -> None:
        self.code, self.ranks_inside, self.feedback = code, ranks_inside, feedback
        self.residuals: dict[tuple[int, str, int, int], Tensor] = {}

    def arrives(self, key: tuple[int, str, int, int], values: Tensor) -> Tensor:
        """Values as they arrive, with the residuals of this sender's earlier roundings added."""
        if not self.feedback:
            return self.code(values).to(values.dtype)
        # residuals and what they are added to are fp32
        given = values.float() + self.residuals.get(key, torch.zeros(()))
        decoded = self.code(given).float()
        self.residuals[key] = given - decoded
        return decoded.to(values.dtype)

    def parts(self, rows: Sequence[Tensor], cuts: int) -> list[Tensor]:
        """Rows (numel) as (cuts, numel / cuts), with zeros at their ends."""
        return [pad(row, (0, -len(row) % cuts)).view(cuts, -1) for row in rows]


class Summed(Coded):
    """As SYNC: each island adds up a share of the elements, whose sum is coded once more and goes to all.

    An island's contribution to its own share is not coded, or is if `rounds_own`, as under a format that is a dtype.
    """

    def __init__(self, code: Code, *, ranks_inside: int = 1, feedback: bool = False, rounds_own: bool = False) -> None:
        super().__init__(code, ranks_inside=ranks_inside, feedback=feedback)
        self.rounds_own = rounds_own

    def __call__(self, block: int, rows: Sequence[Tensor]) -> Tensor:
        shares = self.parts(rows, self.ranks_inside * len(rows))
        found = []
        for part in range(len(shares[0])):
            owner = part % len(rows)
            own = shares[owner][part]
            total = self.code(own).to(own.dtype) if self.rounds_own else own.clone()
            for sender, share in enumerate(shares):
                if sender != owner:
                    total += self.arrives((block, "reduce", part, sender), share[part])
            found.append(self.arrives((block, "gather", part, owner), total))
        return torch.cat(found)[: len(rows[0])]


class Whole(Coded):
    """As sparse formats, and all between two islands: messages go whole to every island.

    Each adds up all, its own too, in the order of islands.
    """

    def __call__(self, block: int, rows: Sequence[Tensor]) -> Tensor:
        # A buffer is padded for all ranks that hold the same, then cut.
        whole = [pad(row, (0, -len(row) % (self.ranks_inside * len(rows)))) for row in rows]
        shares = self.parts(whole, self.ranks_inside)
        found = []
        for part in range(self.ranks_inside):
            total = torch.zeros_like(shares[0][part])
            for sender, share in enumerate(shares):
                total += self.arrives((block, "whole", part, sender), share[part])
            found.append(total)
        return torch.cat(found)[: len(rows[0])]
