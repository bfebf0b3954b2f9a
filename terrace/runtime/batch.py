"""Micro-batches: whole rows, or one rank's part of rows that are split over ranks."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from terrace.model.attention import document_begins, moved_from, on_host
from terrace.model.decoder import IGNORE_INDEX
from terrace.sequence.token_layout import TokenLayout

_ASKED_ON_HOST = {"positions", "places"}  # tensors of which the runtime reads the host's copy


@dataclass(frozen=True, eq=False)
class Batch:
    """One micro-batch. Inputs and labels are whole rows (B, S) or, with a `token_layout`, this rank's tokens (1, T).

    `reads`, int64 (1, N), lets a token have any number of labels: inputs are then one row (1, T), labels are (1, N),
    and label n belongs to the output at token `reads[0, n]`. Only losses of token numbers or values support it, in
    models without routers.

    The other fields are optional. `positions`, int64 of the inputs' shape: position of each token in its document,
    for rows that hold several. `places`, int64 of the same shape: index of each token in the run (`places_of`), equal
    under every plan, -1 for tokens that routers do not choose for; only models with routers need it. `shares`, fp64
    of the same shape: weight of each token in router losses (`shares_of`), only for a part of rows. `columns`, of the
    labels' shape, or with further dims: further inputs of a loss. `weights`, fp64 of the labels' shape: what each
    counted label adds to the divisor of the loss, 1 by default (terrace.runtime.objective); `shares` already include
    them. `mix`, fp64 (B) with B even: rows 2i and 2i + 1 are mixed where they are embedded; a row has this share of
    itself and the rest of the other, and of a loss of mixed rows (terrace.runtime.distilled) the labels likewise.
    """

    inputs: Tensor
    labels: Tensor
    positions: Tensor | None = None
    token_layout: TokenLayout | None = field(default=None, kw_only=True)
    places: Tensor | None = field(default=None, kw_only=True)
    shares: Tensor | None = field(default=None, kw_only=True)
    columns: Mapping[str, Tensor] = field(default_factory=dict, kw_only=True)
    weights: Tensor | None = field(default=None, kw_only=True)
    reads: Tensor | None = field(default=None, kw_only=True)
    mix: Tensor | None = field(default=None, kw_only=True)

    def to(self, device: torch.device) -> "Batch":
        """Copy to a device; from pinned memory without blocking the host."""
        moved = {
            each.name: value.to(device, non_blocking=True)
            for each in fields(self)
            if isinstance(value := getattr(self, each.name), Tensor)
        }
        for name in _ASKED_ON_HOST & moved.keys():
            if (before := getattr(self, name)) is not moved[name]:
                moved_from(moved[name], before)
        columns = {name: column.to(device, non_blocking=True) for name, column in self.columns.items()}
        return replace(self, columns=columns, **moved)  # type: ignore[arg-type]  # tensors alone

    def with_places(self, first_row: int, ignored: int = IGNORE_INDEX, lengths: Tensor | None = None) -> "Batch":
        """Set `places` of this micro-batch of whole rows, whose first row is row `first_row` of the run.

        Tokens whose place is -1 keep it. With `lengths` (B), tokens at or after their row's length are padding and
        get -1 too.
        """
        rows = torch.arange(first_row, first_row + len(self.labels), device=self.labels.device)
        places = places_of(rows, self.labels, self.positions, ignored=ignored)
        if self.places is not None:
            places = places.masked_fill(self.places < 0, -1)
        if lengths is not None:
            is_padding = torch.arange(places.shape[1], device=places.device) >= lengths.unsqueeze(1)
            places = places.masked_fill(is_padding, -1)
        return replace(self, places=places)

    def shares_of_tokens(self, ignored: int = IGNORE_INDEX) -> Tensor:
        """`shares` of this micro-batch of whole rows, (B, S)."""
        return shares_of(self.labels, self.positions, ignored=ignored, places=self.places, weights=self.weights)

    def document_begins(self) -> tuple[int, ...]:
        """Flat indices of the first token of each document; every row begins one."""
        num, sequence = self.labels.shape
        # Without positions every row is one document.
        if self.positions is None:
            return tuple(range(0, num * sequence, sequence))
        return tuple(torch.nonzero(document_begins(on_host(self.positions)).flatten()).flatten().tolist())

    def local(self, token_layout: TokenLayout) -> "Batch":
        """This rank's tokens of a whole micro-batch, (1, T), padded at the end with tokens that do not count."""
        positions = self.positions
        if positions is None:
            # A part of a row still needs its tokens' places in the row.
            positions = torch.arange(self.labels.shape[1], device=self.labels.device).expand(self.labels.shape)

        def part(x: Tensor, padding: int) -> Tensor:
            flat = x.flatten(0, 1)
            held = torch.cat([flat[:0], *(flat[start:stop] for start, stop in token_layout.tokens)])
            inner = (0, 0) * (held.dim() - 1)
            return F.pad(held, (*inner, 0, token_layout.num_local_tokens - len(held)), value=padding)[None]

        return Batch(
            part(self.inputs, 0),
            part(self.labels, IGNORE_INDEX),
            part(positions, 0),
            token_layout=token_layout,
            places=None if self.places is None else part(self.places, -1),
            # A model without places has no losses of routers.
            shares=None if self.places is None else part(self.shares_of_tokens(), 0),
            columns={name: part(column, 0) for name, column in self.columns.items()},
            weights=None if self.weights is None else part(self.weights, 0),
        )


def places_of(rows: Tensor, labels: Tensor, positions: Tensor | None = None, *, ignored: int = IGNORE_INDEX) -> Tensor:
    """Indices in the run of the tokens of whole rows with labels (B, S); int64 (B, S).

    `rows` (B) are row numbers counted through all global batches, in the order of terrace.data.batches. A document
    (as `positions` delimit them) whose labels are all ignored gets -1, and so does padding.
    """
    documents, counts = _labels_of_documents(labels, positions, ignored)
    places = rows.unsqueeze(1) * labels.shape[1] + torch.arange(labels.shape[1], device=labels.device)
    return places.masked_fill((counts[documents] == 0).view(labels.shape), -1)


def shares_of(
    labels: Tensor,
    positions: Tensor | None = None,
    *,
    ignored: int = IGNORE_INDEX,
    places: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Weight of each token in router losses: counted labels of its document / tokens of it. fp64 (B, S).

    With `weights` (B, S) the numerator is their sum over the counted labels. A document then weighs as much in a router
    loss, a sum over tokens, as in the divisor of the main loss. Tokens with -1 in `places` (B, S) are not counted.
    """
    documents, counts = _labels_of_documents(labels, positions, ignored, weights)
    taking = torch.ones_like(documents) if places is None else (places >= 0).flatten().long()
    # bincount would wait for the device, to learn its length.
    lengths = torch.zeros_like(documents).index_add_(0, documents, taking).clamp_(min=1)
    return (counts.double() / lengths)[documents].view(labels.shape)


def _labels_of_documents(
    labels: Tensor, positions: Tensor | None, ignored: int, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Document index of each token, (B S), and each document's number of counted labels or sum of their weights."""
    begins = torch.zeros(labels.shape, dtype=torch.bool, device=labels.device)
    begins[:, 0] = True
    if positions is not None:
        begins |= document_begins(positions)
    documents = begins.flatten().cumsum(0) - 1
    counted = labels.flatten() != ignored
    added = counted.long() if weights is None else torch.where(counted, weights.flatten().double(), 0.0)
    counts = torch.zeros(labels.numel(), dtype=added.dtype, device=labels.device)
    return documents, counts.index_add_(0, documents, added)
