"""Tells the routers of a rank's mixtures about the micro-batches of a step."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from terrace.accelerator import placed
from terrace.base.errors import ModelError
from terrace.model.attention import on_host
from terrace.model.balance import FIGURES, BalanceConfig
from terrace.model.decoder import IGNORE_INDEX
from terrace.model.experts.gating import Gating, Kept, Passage
from terrace.model.experts.mixture import Router
from terrace.plan.dims import has_routers
from terrace.plan.mesh import position
from terrace.plan.tensor_traffic import row_tokens
from terrace.program.program import Program
from terrace.runtime.batch import Batch

# Column of a batch, (B, S, L k): the experts that tokens pass in the model's L layers with experts, whatever routers
# would choose. Routers weigh them by their own scores.
CHOSEN = "chosen experts"
_BY_PLACE = ("gate = 'noisy'", "gate = 'expert_choice'")


class Passages:
    """Tells a rank's mixtures which micro-batch runs. Does nothing in a model without routers."""

    def __init__(
        self,
        modules: Iterable[nn.Module],
        program: Program,
        balance: BalanceConfig,
        rank: int,
        device: torch.device,
        seed: int = 0,
        ignored: int = IGNORE_INDEX,
    ) -> None:
        rows = program.model.tensor.rows
        self._row = rows.degree, position(rows.degrees, rows.coordinates(rank))
        self._plan, self._sequence = program.plan, program.model.sequence
        # All stages agree on the numbers of CLIP, also one without a mixture.
        self._counts = has_routers(program.blocks)
        self._gating, self._ignored = Gating(balance, device, seed), ignored
        self._passages: list[Passage] = []
        self._kept: dict[tuple[int | None, int], Kept] = {}  # by block and micro-batch, between its two forwards
        self._routers: list[Router] = []
        for block, module in enumerate(modules if self._counts else ()):
            for router in (each for each in module.modules() if isinstance(each, Router)):
                router.gating, router.layer = self._gating, block
                self._routers.append(router)
        # Of the whole model, in the order of `CHOSEN`.
        self._mixtures = [index for index, block in enumerate(program.blocks) if has_routers([block])]
        self._chosen: list[Tensor | None] = []  # (T, L, k) of each micro-batch
        self._layers: frozenset[int | None] = frozenset(router.layer for router in self._routers)
        # Whether a loss, a capacity or a gate depends on a token's sequence.
        is_noncausal = any(router.config.is_noncausal for router in self._routers)
        self._by_sequence = bool(balance.sequence or balance.capacity) or is_noncausal
        # Why this rank needs the places of tokens; "" if it does not.
        gates = {f"gate = {router.config.gate!r}" for router in self._routers} & set(_BY_PLACE)
        self._reason = next(iter((*(f"balance.{name}" for name in balance.active), *sorted(gates))), "")

    @property
    def names(self) -> tuple[str, ...]:
        return FIGURES if self._counts else ()

    @property
    def balance(self) -> BalanceConfig:
        """The router losses and capacity of the run."""
        return self._gating.balance

    @property
    def sums(self) -> Tensor:
        """Sums over this rank's tokens and layers since `take`, fp64, one for each of `names`."""
        return self._gating.sums[: len(self.names)]

    def follow(self, choices: Mapping[int, Tensor]) -> None:
        """Use last step's token counts per expert, by block, in the balance losses."""
        self._gating.choices = choices

    def take(self, batches: Sequence[Batch], *, trains: bool) -> None:
        """Prepare for a training step or an evaluation on this rank's part of the micro-batches.

        Raises `ModelError` if losses or gates need `places` and a batch has none.
        """
        if not self._counts:
            return
        self._gating.sums.zero_()
        self._kept.clear()
        self._gating.trains = trains
        for batch in batches:
            if batch.places is None and self._reason:
                raise ModelError(
                    f"{self._reason} goes by the tokens that take part, and a micro-batch does not say where its "
                    "tokens stand: give Batch their places (terrace.runtime.batch.places_of)"
                )
        # A table of choices deals with all tokens, so that loads are even whatever the labels.
        all_take_part = any(router.config.route == "even" for router in self._routers)
        weighs = trains and bool(self.balance.losses)
        self._passages = [
            self._passage(batch, all_take_part, self._shares(batch) if weighs else None) for batch in batches
        ]
        self._chosen = [self._chosen_of(*each) for each in zip(batches, self._passages, strict=True)]

    def remove(self) -> None:
        for router in self._routers:
            router.gating = None

    def begin(self, micro: int, block: int, *, again: bool = False) -> None:
        """Select the block and micro-batch of the next pass; `again` if the backward reruns the block's forward."""
        if not self._counts:
            return
        self._gating.passage, self._gating.kept = self._passages[micro], None
        if block not in self._layers:
            return
        if again:
            # The second pass takes what the first has left.
            kept = self._kept.pop((block, micro), None)
            if kept is None:
                kept = self._kept[block, micro] = Kept()
            self._gating.kept = kept
        if (chosen := self._chosen[micro]) is not None:
            self._gating.kept = kept = self._gating.kept or Kept()
            if kept.experts is None:
                kept.experts = chosen[:, self._mixtures.index(block)].int()

    def _shares(self, batch: Batch) -> Tensor:
        if batch.shares is not None:
            return batch.shares
        if batch.token_layout is not None:
            raise ModelError(
                f"{self._reason} weighs tokens by the labels of their documents, and a part of rows does not have "
                "all of them: give Batch their shares (terrace.runtime.batch.shares_of)"
            )
        return batch.shares_of_tokens(self._ignored)

    def _chosen_of(self, batch: Batch, passage: Passage) -> Tensor | None:
        if CHOSEN not in batch.columns:
            return None
        chosen = batch.columns[CHOSEN]
        chosen = chosen.reshape(batch.labels.numel(), len(self._mixtures), -1)  # (B S, L, k)
        own = chosen[row_tokens(batch.labels.numel(), *self._row)]
        return own if passage.kept is None else own[passage.kept]

    def _passage(self, batch: Batch, all_take_part: bool, shares: Tensor | None) -> Passage:
        """The passage of a micro-batch on this tensor row, which routes a part of its tokens."""
        of_row = row_tokens(batch.labels.numel(), *self._row)
        device, places = batch.labels.device, batch.places
        own = (torch.arange(batch.labels.numel(), device=device) if places is None else places.flatten())[of_row]
        kept = None
        if places is not None and not all_take_part:
            # On the host, which waits for the device only if places were made there.
            taking = on_host(places).flatten()[of_row] >= 0
            kept = None if bool(taking.all()) else placed(taking.nonzero().squeeze(1), device)

        def taken(values: Tensor) -> Tensor:
            return values if kept is None else values[kept]

        weights = None if shares is None else taken(shares.flatten()[of_row])
        found = Passage(kept, places=taken(own), weights=weights)
        # With `balance = "cost"` a rank's tokens are documents of any rows.
        if not self._by_sequence or (batch.token_layout is not None and self._plan.balance == "cost"):
            return found
        num = batch.labels.shape[0] if batch.token_layout is None else self._plan.micro_batch
        return replace(found, sequences=taken(self._sequences(batch)[of_row]), num_sequences=num)

    def _sequences(self, batch: Batch) -> Tensor:
        """Sequence index of each token, of the whole micro-batch or of this rank's part (T)."""
        num, device = batch.labels.numel(), batch.labels.device
        if batch.token_layout is None:
            return torch.arange(num, device=device) // batch.labels.shape[-1]
        places = [torch.arange(start, stop) for start, stop in batch.token_layout.tokens]
        # Padding takes no part, so that it may be of any sequence.
        sequences = torch.zeros(num, dtype=torch.int64)
        sequences[: sum(map(len, places))] = torch.cat([sequences[:0], *places]) // self._sequence
        return placed(sequences, device)
