"""Attention of responses that stand behind one copy of their prompt.

A row of a micro-batch is runs of tokens, end to end. A run that begins at position 0 begins a document. One that begins
at position p > 0, and does not continue its left neighbour, continues the first p tokens of its document: another
response to the same prompt. Its tokens see those p tokens and themselves. Prompts are thus computed once for all of
their responses, and their gradients are the sums that autograd makes: the same function as one row a response.

Only on a CPU, where the pieces of a row are cut on the host (terrace.model.attention says why). Short runs share a
piece under a mask, which costs less than another call of the kernel. Rows beyond `LONGEST_SHARED` share no prompt, and
need no mask.

Shape legend: T tokens of a row, N query heads, K key-value heads, D head_dim, L queries of a piece, M its keys.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from terrace.base.errors import ModelError
from terrace.model.attention import MaskPlan, PerMicroBatch, attend
from terrace.model.layers import Attention

# Masks of shared rows are as large as the squares of their lengths; a guess.
LONGEST_SHARED = 512
# Tokens. A step of the task sort, responses of 8 tokens by eights behind prompts of 8, takes 3 % less than with 64, and
# as long as with 160 (fp32, one AVX-512 core).
_SHORT_PIECE = 96


@dataclass(frozen=True)
class _Run:
    begin: int
    end: int
    document: int  # place of its document's first token
    position: int  # of its first token: so many tokens of the document come before it

    @property
    def begins_document(self) -> bool:
        return self.begin == self.document


@dataclass(frozen=True)
class _Piece:
    """`size` tokens attend to themselves and to `num_before` tokens of piece `source`, from its token `offset` on."""

    size: int
    source: int
    offset: int
    num_before: int
    mask: Tensor | None  # (L, M); without one, causal


@dataclass(frozen=True)
class _Pieces:
    """The mask plan of a row."""

    pieces: tuple[_Piece, ...]

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention output (1, N, T, D) of query over key and value (1, K, T, D)."""
        sizes = [piece.size for piece in self.pieces]
        # Not slices: the gradient of each would be as large as the whole.
        queries, keys, values = (torch.split(part, sizes, 2) for part in (query, key, value))
        mixed = []
        for index, piece in enumerate(self.pieces):
            own = [keys[index], values[index]]
            if piece.num_before:
                seen = slice(piece.offset, piece.offset + piece.num_before)
                own = [torch.cat([run[piece.source][:, :, seen], run[index]], 2) for run in (keys, values)]
            mixed.append(attend(queries[index], own[0], own[1], piece.mask).transpose(1, 2))
        return torch.cat(mixed, 1).transpose(1, 2)


class SharedPromptPlans:
    """The mask plans of a model whose rows are runs; a `window` of 0 means none. One object serves all layers."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._made = PerMicroBatch()

    def plan(self, positions: Tensor | None, query: Tensor) -> MaskPlan:
        """The plan for query (1, N, T, D), with runs marked by `positions` (1, T)."""
        if positions is None or len(positions) != 1:
            raise ModelError("responses behind shared prompts stand in one row, with positions")
        return self._made.get(positions, query.dtype, lambda: _cut(positions[0], self._window, query.dtype))


def share_prompts(blocks: Iterable[nn.Module], window: int) -> None:
    """Have all layers of a decoder's blocks attend as this module says."""
    plans = SharedPromptPlans(window)
    for block in blocks:
        for module in block.modules():
            if isinstance(module, Attention):
                module.plans = plans


def has_shared_prompts(blocks: Iterable[nn.Module]) -> bool:
    """Whether `share_prompts` has been here."""
    return any(
        isinstance(module, Attention) and isinstance(module.plans, SharedPromptPlans)
        for block in blocks
        for module in block.modules()
    )


def run_begins(positions: Tensor) -> Tensor:
    """Whether a run begins at each token, bool (T), for positions (T)."""
    begins = torch.ones_like(positions, dtype=torch.bool)
    begins[1:] = positions[1:] != positions[:-1] + 1
    return begins


def _cut(positions: Tensor, window: int, dtype: torch.dtype) -> _Pieces:
    groups: list[list[_Run]] = []
    for run in _runs(positions):
        if not groups or run.end - groups[-1][0].begin > _SHORT_PIECE:
            groups.append([])
        groups[-1].append(run)
    # A run lies in one piece, and so does what its siblings see of it.
    begins = [group[0].begin for group in groups]
    made = []
    for group in groups:
        source = bisect_right(begins, group[0].document) - 1
        made.append(_piece(group, source, begins[source], positions, window, dtype))
    return _Pieces(tuple(made))


def _runs(positions: Tensor) -> list[_Run]:
    bounds = [*torch.nonzero(run_begins(positions)).flatten().tolist(), len(positions)]
    firsts = positions[bounds[:-1]].tolist()
    found, document = list[_Run](), 0
    for index, first in enumerate(firsts):
        document = bounds[index] if first == 0 else document
        found.append(_Run(bounds[index], bounds[index + 1], document, first))
    return found


def _piece(
    runs: Sequence[_Run], source: int, source_begin: int, positions: Tensor, window: int, dtype: torch.dtype
) -> _Piece:
    begin, end, before = runs[0].begin, runs[-1].end, runs[0].document
    # Other runs of that document in this piece may continue more of it.
    num_before = 0
    if not runs[0].begins_document:
        num_before = max(run.position for run in runs if run.document == before)
    if len(runs) == 1 and not num_before and not 0 < window < end - begin:
        return _Piece(end - begin, source, 0, 0, None)
    queries = torch.arange(begin, end)
    keys = torch.cat([torch.arange(before, before + num_before), queries])
    lengths = torch.tensor([run.end - run.begin for run in runs])
    own, document, position = (
        torch.tensor([getattr(run, name) for run in runs]).repeat_interleave(lengths).unsqueeze(1)
        for name in ("begin", "document", "position")
    )
    sees = (keys >= own) & (keys <= queries.unsqueeze(1))
    sees |= (keys >= document) & (keys < document + position)
    if window:
        sees &= positions[keys] > (positions[queries] - window).unsqueeze(1)
    mask = torch.zeros(sees.shape, dtype=dtype).masked_fill_(~sees, -torch.inf)
    return _Piece(end - begin, source, before - source_begin, num_before, mask)
