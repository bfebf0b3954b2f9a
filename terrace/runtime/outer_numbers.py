"""Figures of the outer loop on one rank: its position among islands, its own figures, and those of all islands.

Tensors keep their storage, because checkpoints copy them like parameters.
"""

import torch
from torch import Tensor

from terrace.plan.layout import Layout, island_ranks
from terrace.plan.outer import Outer
from terrace.plan.routes import OUTER_FIGURES
from terrace.program.exchange import OuterResult

TOKENS, LOSS, CHANGE, MEANWHILE, MEAN = range(len(OUTER_FIGURES))
BEFORE = len(OUTER_FIGURES)  # the CHANGE of the exchange before
NUM_HEARD = BEFORE + 1
_UNDER_WAY, _CHANGED = range(2)


class OuterNumbers:
    """Figures and marks of the exchanges between I islands, for F fragments. fp64 except `marks`.

    `own_figures` (F, 5) are this rank's share of the figures since each fragment's last exchange began, to be summed
    over the island. `heard` (F, I, 6) holds all islands' figures of its last exchange, equal on all ranks, and BEFORE.
    `marks` (F, 2), int64 on the CPU, say whether an exchange is in flight and whether steps were made since it began.
    `island` is the index among `num_islands`, `island_rank` this rank's index among the island's `num_ranks`;
    `num_steps` counts the run's steps.
    """

    def __init__(self, outer: Outer, world: Layout, rank: int, device: torch.device) -> None:
        """`world` is the layout of all ranks."""
        ranks, num = island_ranks(world, rank), outer.fragments
        self.island_rank, self.num_ranks = ranks.index(rank), len(ranks)
        self.island, self.num_islands = world.island_of(world.coordinates(rank)), world.num_islands
        self.num_steps = 0
        self.own_figures = torch.zeros(num, len(OUTER_FIGURES), dtype=torch.float64, device=device)
        self.heard = torch.zeros(num, self.num_islands, NUM_HEARD, dtype=torch.float64, device=device)
        self.marks = torch.zeros(num, 2, dtype=torch.int64)

    def begin_again(self, num_steps: int) -> None:
        """Reset to the start of a run, at step `num_steps`."""
        self.num_steps = num_steps
        for values in (self.own_figures, self.heard, self.marks):
            values.zero_()

    @property
    def under_way(self) -> set[int]:
        return self._marked(_UNDER_WAY)

    @property
    def changed(self) -> set[int]:
        """Fragments with steps since their last exchange began."""
        return self._marked(_CHANGED)

    def _marked(self, mark: int) -> set[int]:
        return {fragment for fragment, is_marked in enumerate(self.marks[:, mark].tolist()) if is_marked}

    def stepped(self, loss: Tensor, num_tokens: Tensor) -> None:
        """Count a step of the island, of mean `loss` over `num_tokens`, both fp64 scalars."""
        self.num_steps += 1
        if not len(self.marks):  # one island exchanges nothing
            return
        if not self.island_rank:  # one rank reports the island's tokens, which all its ranks know
            self.own_figures[:, TOKENS] += num_tokens
            self.own_figures[:, LOSS] += loss * num_tokens
        self.marks[:, _CHANGED] = 1

    def begin(self, fragment: int) -> Tensor:
        """Start an exchange. Returns this rank's share of its figures (5)."""
        assert not self.marks[fragment, _UNDER_WAY], "an exchange is under way"
        figures = self.own_figures[fragment].clone()
        self.own_figures[fragment] = 0.0
        self.marks[fragment, _UNDER_WAY], self.marks[fragment, _CHANGED] = 1, 0
        return figures

    def hear(self, fragment: int, figures: Tensor) -> None:
        """Store the `figures` (I, 5) of the exchange in flight."""
        heard = self.heard[fragment]
        heard[:, BEFORE] = heard[:, CHANGE]
        heard[:, :BEFORE] = figures

    def end(self, fragment: int) -> None:
        self.marks[fragment, _UNDER_WAY] = 0

    def weight(self, fragment: int) -> Tensor:
        """Weight w_i of this island in the mean, fp64."""
        tokens = self.heard[fragment, :, TOKENS]
        return tokens[self.island] / tokens.sum().clamp(min=1.0)

    def stretch(self, fragment: int) -> Tensor:
        """Lambda of the staleness gap penalty, fp64; 1 before the first change."""
        meanwhile, before = self.heard[fragment, :, MEANWHILE], self.heard[fragment, :, BEFORE]
        return 1.0 + torch.where(before > 0.0, meanwhile / before, 0.0).sqrt().mean()

    def result(self, fragment: int) -> OuterResult:
        """Result of a fragment's last exchange whose figures have arrived."""
        figures = self.heard[fragment].cpu()  # at once: on CUDA the host waits for computing each time it reads one
        tokens, before = figures[:, TOKENS].sum(), figures[:, BEFORE].mean().sqrt()
        return OuterResult(
            fragment=fragment,
            loss=float(figures[:, LOSS].sum() / tokens.clamp(min=1.0)),
            num_tokens=int(tokens),
            change=float(figures[:, CHANGE].mean().sqrt()),
            # Before the second exchange, and after one of no change, no direction is known.
            agreement=float(figures[0, MEAN].sqrt() / before) if before else None,
        )
