"""The micro-batches of a step, as the routers of a rank's mixtures need to know them."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from terrace.base.errors import ModelError
from terrace.model.experts.balance import FIGURES, BalanceConfig
from terrace.model.experts.gating import Gating, Passage
from terrace.model.experts.mixture import Router
from terrace.plan.dims import has_routers
from terrace.plan.mesh import position
from terrace.plan.tensor_traffic import row_tokens
from terrace.program.program import Program
from terrace.runtime.batch import Batch

_BY_PLACE = ("gate = 'noisy'", "gate = 'expert_choice'")


class Passages:
    """Tells the mixtures of a rank which micro-batch runs; without any, all methods do nothing."""

    def __init__(
        self,
        modules: Iterable[nn.Module],
        program: Program,
        balance: BalanceConfig,
        rank: int,
        device: torch.device,
        seed: int = 0,
    ) -> None:
        rows = program.tensor.rows
        self._row = rows.degree, position(rows.degrees, rows.coordinates(rank))
        # All stages agree on the numbers of CLIP, also one without a mixture.
        self._counts = has_routers(program.blocks)
        self._gating = Gating(balance, device, seed)
        self._passages: list[Passage] = []
        self._routers: list[Router] = []
        for block, module in enumerate(modules if self._counts else ()):
            for router in (each for each in module.modules() if isinstance(each, Router)):
                router.gating, router.layer = self._gating, block
                self._routers.append(router)
        # Why this rank needs the places of tokens; "" if it does not.
        gates = {f"gate = {router.config.gate!r}" for router in self._routers} & set(_BY_PLACE)
        self._reason = next(iter((*(f"balance.{name}" for name in balance.active), *sorted(gates))), "")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of `sums`."""
        return FIGURES if self._counts else ()

    @property
    def balance(self) -> BalanceConfig:
        """The losses and the capacity that the run asks for."""
        return self._gating.balance

    @property
    def sums(self) -> Tensor:
        """Sums of this rank's tokens and layers since `take`, one for each of `names`, fp64."""
        return self._gating.sums[: len(self.names)]

    def take(self, batches: Sequence[Batch], *, trains: bool) -> None:
        """Prepare for a step, or for its forwards alone, on a rank's parts of its micro-batches.

        Raises `ModelError` where losses or gates need the places of tokens, and a batch has none.
        """
        if not self._counts:
            return
        self._gating.sums.zero_()
        self._gating.trains = trains
        for batch in batches:
            if batch.places is None and self._reason:
                raise ModelError(
                    f"{self._reason} goes by the tokens that take part, and a micro-batch does not say where its "
                    "tokens stand: give Batch their places (terrace.runtime.batch.places_of)"
                )
        # A table of choices deals with all tokens, so that loads are even whatever the labels.
        all_take_part = any(router.config.route == "even" for router in self._routers)
        self._passages = [_passage(batch, *self._row, all_take_part) for batch in batches]

    def remove(self) -> None:
        """Leave the routers to themselves."""
        for router in self._routers:
            router.gating = None

    def begin(self, micro: int) -> None:
        """Select the micro-batch that the next pass is of."""
        if self._counts:
            self._gating.passage = self._passages[micro]


def _passage(batch: Batch, num_rows: int, row: int, all_take_part: bool) -> Passage:
    """The passage of a micro-batch on a tensor row, which routes a part of its tokens."""
    num, sequence = batch.labels.shape[0], batch.labels.shape[-1]
    places = torch.arange(batch.labels.numel(), device=batch.labels.device) if batch.places is None else batch.places
    of_row = places.flatten()[row_tokens(places.numel(), num_rows, row)]
    taking = of_row >= 0
    # The one read of a micro-batch: most have nothing to leave out.
    kept = None if all_take_part or bool(taking.all()) else taking.nonzero().squeeze(1)
    of_kept = of_row if kept is None else of_row[kept]
    if batch.token_layout is not None or num_rows > 1:
        return Passage(kept, None, places=of_kept)
    index = torch.arange(taking.numel(), device=taking.device) if kept is None else kept
    return Passage(kept, index // sequence, num, of_kept)
