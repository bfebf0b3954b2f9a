"""QK-clip on one rank: the largest attention scores of a step, and the parameters that they scale.

The first forward of every layer on every micro-batch measures (terrace.runtime.scores). CLIP takes the maximum over
ranks, in the message of loss and norm. Behind its UPDATE, and before its REFRESH, a block's parameters are scaled
(terrace.plan.score_clip) in the slice that this rank owns.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from terrace.base.errors import ModelError
from terrace.model.attention import PerMicroBatch, PlannedAttention
from terrace.model.attention_plans import AttentionPlans
from terrace.plan.routes import num_scores
from terrace.plan.score_clip import HeadRows, head_rows
from terrace.plan.slices import rank_slices
from terrace.program.program import Program
from terrace.runtime.context.axis import LayerPlans
from terrace.runtime.flat_param import FlatParam
from terrace.runtime.scores import MeasuredPlans, Scores


class ScoreClip:
    """The largest scores of a step (all heads of the model), and the scaling at its end. Empty if the plan has none.

    Raises `ModelError` for a layer whose attention is not Terrace's own.
    """

    def __init__(
        self, program: Program, rank: int, modules: Mapping[int, nn.Module], limit: float, device: torch.device
    ) -> None:
        self._program, self._rank, self._limit = program, rank, limit
        self.largest = torch.zeros(num_scores(program.plan, program.blocks), dtype=torch.float64, device=device)
        self._scores: dict[int, Scores] = {}  # of this rank's heads, by block
        self._heads: dict[int, slice] = {}  # of all heads of a block in `largest`
        self._factors: dict[int, list[float]] = {}  # gamma of every head, of blocks where one is below 1
        self._measured: list[tuple[PlannedAttention, MeasuredPlans]] = []
        start, firsts = 0, PerMicroBatch()
        for index, block in enumerate(program.blocks if len(self.largest) else ()):
            heads = block.operations.core.heads
            self._heads[index], start = slice(start, start + heads), start + heads
            if heads and index in program.stage.own:
                self._measure(index, modules[index], firsts)

    def _measure(self, index: int, block: nn.Module, firsts: PerMicroBatch) -> None:
        mesh, of_block = self._program.mesh, self.largest[self._heads[index]]
        local, place = len(of_block) // mesh.total("rows"), mesh.part(self._rank, "rows")
        scores = self._scores[index] = Scores(of_block[place * local : (place + 1) * local])
        layers = [module for module in block.modules() if isinstance(module, PlannedAttention)]
        for module in layers:
            plans = module.plans
            if isinstance(plans, LayerPlans):
                plans.scores = scores
            elif isinstance(plans, AttentionPlans):
                module.plans = MeasuredPlans(plans, plans.window, scores, firsts)
                self._measured.append((module, module.plans))
            else:
                layers = []
        if not layers:
            raise ModelError(
                f"optimizer.qk_clip measures scores inside attention, and {self._program.blocks[index].name} attends "
                "in a way of its own: leave it out, or build the layer with terrace.model.layers.Attention"
            )

    def remove(self) -> None:
        """Give layers their own mask plans back."""
        for module, measured in self._measured:
            module.plans = measured.plans

    def begin(self) -> None:
        """Forget the scores of the last step."""
        self.largest.zero_()

    @contextmanager
    def measuring(self, block: int) -> Iterator[None]:
        """Context for the first forward of a block on a micro-batch."""
        scores = self._scores.get(block)
        if scores is None:
            yield
            return
        scores.is_open = True
        try:
            yield
        finally:
            scores.is_open = False

    def settle(self, largest: Sequence[float]) -> None:
        """Take the largest scores over all ranks, of the step that ends."""
        limit = self._limit
        factors = {
            block: [limit / each if each > limit else 1.0 for each in largest[part]]
            for block, part in self._heads.items()
        }
        self._factors = {block: each for block, each in factors.items() if min(each, default=1.0) < 1.0}

    @torch.no_grad()
    def scale(self, block: int, flats: Sequence[FlatParam]) -> None:
        """Scale this rank's part of the parameters of a block that was updated."""
        if block not in self._factors:
            return
        rows = {each.name: each for each in head_rows(self._program.blocks[block])}
        for flat in flats:
            for param, begin, _ in flat.spec.extents:
                if param.name in rows:
                    own = rows[param.name]
                    first = rank_slices(param, self._program.mesh, self._rank)[0].start // own.size
                    gammas = self._factors[block][first : first + param.shape[0] // own.size]
                    _scale(flat, own, begin, math.prod(param.shape[1:]), gammas)


def _scale(flat: FlatParam, rows: HeadRows, begin: int, width: int, gammas: Sequence[float]) -> None:
    """Scale the heads of a parameter from element `begin` on, whose rows have `width` elements."""
    own = flat.part(flat.layout.optimizer)
    scaled = [
        (begin + (head * rows.size + start) * width, begin + (head * rows.size + stop) * width, gamma**power)
        for head, gamma in enumerate(gammas)
        for start, stop, power in rows.parts
        if gamma < 1.0
    ]
    for offset, state in flat.optimizer.masters:
        of_state = own.start + offset
        for start, stop, factor in scaled:
            part = slice(max(start - of_state, 0), min(stop - of_state, len(state.tensor)))
            if part.start < part.stop:
                state.write(part, state.read(part).mul_(factor), flat.optimizer.num_steps)
