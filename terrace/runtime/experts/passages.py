"""The micro-batches of a step, as the routers of a rank's mixtures need to know them."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from terrace.base.errors import ModelError
from terrace.model.experts.balance import LOSSES, BalanceConfig
from terrace.model.experts.gating import Gating, Passage
from terrace.model.experts.mixture import Router
from terrace.plan.dims import has_routers
from terrace.plan.mesh import position
from terrace.plan.tensor_traffic import row_tokens
from terrace.program.program import Program
from terrace.runtime.batch import Batch


class Passages:
    """Tells the mixtures of a rank which micro-batch runs; without any, all methods do nothing."""

    def __init__(
        self,
        modules: Iterable[nn.Module],
        program: Program,
        balance: BalanceConfig,
        rank: int,
        device: torch.device,
    ) -> None:
        rows = program.tensor.rows
        self._row = rows.degree, position(rows.degrees, rows.coordinates(rank))
        # All stages agree on the numbers of CLIP, also one without a mixture.
        self._counts = has_routers(program.blocks)
        self._gating = Gating(balance, device)
        self._passages: list[Passage] = []
        found = (each for module in modules for each in module.modules()) if self._counts else ()
        self._routers = [each for each in found if isinstance(each, Router)]
        for router in self._routers:
            router.gating = self._gating

    @property
    def names(self) -> tuple[str, ...]:
        """Names of `sums`."""
        return LOSSES if self._counts else ()

    @property
    def losses(self) -> tuple[str, ...]:
        """The losses that the run asks for."""
        return self._gating.balance.losses

    @property
    def sums(self) -> Tensor:
        """Sums of this rank's tokens and layers since `take`, one for each of `names`, fp64."""
        return self._gating.sums[: len(self.names)]

    def take(self, batches: Sequence[Batch], *, trains: bool) -> None:
        """Prepare for a step, or for its forwards alone, on a rank's parts of its micro-batches.

        Raises `ModelError` where losses need the places of tokens, and a batch has none.
        """
        if not self._counts:
            return
        self._gating.sums.zero_()
        self._gating.trains = trains
        for batch in batches:
            if batch.places is None and self.losses:
                raise ModelError(
                    f"balance.{self.losses[0]} counts the tokens that take part, and a micro-batch does not say where "
                    "its tokens stand: give Batch their places (terrace.runtime.batch.places_of)"
                )
        self._passages = [_passage(batch, *self._row) for batch in batches]

    def remove(self) -> None:
        """Leave the routers to themselves."""
        for router in self._routers:
            router.gating = None

    def begin(self, micro: int) -> None:
        """Select the micro-batch that the next pass is of."""
        if self._counts:
            self._gating.passage = self._passages[micro]


def _passage(batch: Batch, num_rows: int, row: int) -> Passage:
    """The passage of a micro-batch on a tensor row, which routes a part of its tokens."""
    num, sequence = batch.labels.shape[0], batch.labels.shape[-1]
    places = torch.arange(batch.labels.numel(), device=batch.labels.device) if batch.places is None else batch.places
    taking = places.flatten()[row_tokens(places.numel(), num_rows, row)] >= 0
    # The one read of a micro-batch: most have nothing to leave out.
    kept = None if bool(taking.all()) else taking.nonzero().squeeze(1)
    if batch.token_layout is not None or num_rows > 1:
        return Passage(kept, None)
    index = torch.arange(taking.numel(), device=taking.device) if kept is None else kept
    return Passage(kept, index // sequence, num)
