"""Micro-batches: whole rows, or a rank's part of rows that are spread over ranks."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from terrace.model.attention import document_begins, moved_from
from terrace.model.decoder import IGNORE_INDEX
from terrace.sequence.token_layout import TokenLayout


@dataclass(frozen=True, eq=False)
class Batch:
    """One micro-batch: inputs and labels, both (B, S), of whole rows; with a `token_layout`, this rank's part (1, T).

    With `reads`, inputs are one row (1, T) and labels another (1, N): label n belongs to the output at token
    `reads[0, n]`, int64, so that a token may have several labels, or none. Losses of token numbers and of values know
    them, and models without routers.

    `positions`, int64 of the inputs' shape, count the tokens of each document from 0, where a row holds several.
    `places`, alike, are the places of the tokens in the run (`places_of`), the same under every plan, and -1 for tokens
    that take no part in choices of routers; models without any need none. `shares`, alike, fp64, weigh tokens in
    losses of routers (`shares_of`); only a part of rows needs them. `columns`, of the labels' shape, are read by a loss
    of token numbers; `weights`, fp64, alike, are the counted labels' shares of the loss' divisor, 1 each if left out
    (terrace.runtime.objective); losses of routers have the same divisor, and `shares` know them.
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

    def to(self, device: torch.device) -> "Batch":
        """The batch on a device; from pinned memory the host does not wait."""
        moved = {
            each.name: value.to(device, non_blocking=True)
            for each in fields(self)
            if isinstance(value := getattr(self, each.name), Tensor)
        }
        if self.positions is not None and moved["positions"] is not self.positions:
            moved_from(moved["positions"], self.positions)
        columns = {name: column.to(device, non_blocking=True) for name, column in self.columns.items()}
        return replace(self, columns=columns, **moved)  # type: ignore[arg-type]  # tensors alone

    def with_places(self, first_row: int, ignored: int = IGNORE_INDEX, lengths: Tensor | None = None) -> "Batch":
        """This micro-batch of whole rows, the first of which is row `first_row` of the run, with its places.

        Tokens whose place is -1 keep it; behind the first `lengths` (B) of their rows all are padding, and have it too.
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
        """The `shares` of this micro-batch of whole rows, (B, S)."""
        return shares_of(self.labels, self.positions, ignored=ignored, places=self.places, weights=self.weights)

    def document_begins(self) -> tuple[int, ...]:
        """Indices of the tokens that documents begin with, row after row; every row begins one."""
        num, sequence = self.labels.shape
        # Without positions every row is one document.
        if self.positions is None:
            return tuple(range(0, num * sequence, sequence))
        return tuple(torch.nonzero(document_begins(self.positions).flatten()).flatten().tolist())

    def local(self, token_layout: TokenLayout) -> "Batch":
        """A rank's part of a whole micro-batch, (1, T), padded at the end with tokens that do not count."""
        positions = self.positions
        if positions is None:
            # A part of a row still needs its tokens' places in the row.
            positions = torch.arange(self.labels.shape[1], device=self.labels.device).expand(self.labels.shape)

        def part(x: Tensor, padding: int) -> Tensor:
            flat = x.reshape(-1)
            held = torch.cat([flat[:0], *(flat[start:stop] for start, stop in token_layout.tokens)])
            return F.pad(held, (0, token_layout.num_local_tokens - held.numel()), value=padding)[None]

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
    """Places in the run of the tokens of whole rows with labels (B, S), int64 (B, S).

    `rows` (B) number the rows through all global batches, in the order of terrace.data.batches. Documents, which
    `positions` tell apart, have the place -1 if all their labels are ignored; so does padding.
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
    """The labels of the document of each token over its tokens, for whole rows with labels (B, S); fp64 (B, S).

    So a document weighs as much in losses of routers, which are sums over its tokens, as in the divisor of the main
    loss: with `weights` (B, S) the sum of these. Tokens with a place of -1 in `places` (B, S) are none.
    """
    documents, counts = _labels_of_documents(labels, positions, ignored, weights)
    taking = torch.ones_like(documents) if places is None else (places >= 0).flatten().long()
    # bincount would wait for the device, to learn its length.
    lengths = torch.zeros_like(documents).index_add_(0, documents, taking).clamp_(min=1)
    return (counts.double() / lengths)[documents].view(labels.shape)


def _labels_of_documents(
    labels: Tensor, positions: Tensor | None, ignored: int, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The document of each token, (B S), and the labels of each document, or the sum of their `weights`."""
    begins = torch.zeros(labels.shape, dtype=torch.bool, device=labels.device)
    begins[:, 0] = True
    if positions is not None:
        begins |= document_begins(positions)
    documents = begins.flatten().cumsum(0) - 1
    counted = labels.flatten() != ignored
    added = counted.long() if weights is None else torch.where(counted, weights.flatten().double(), 0.0)
    counts = torch.zeros(labels.numel(), dtype=added.dtype, device=labels.device)
    return documents, counts.index_add_(0, documents, added)
