"""Attention over several sequences in one row, with common prefixes stored once.

The sequences of a micro-batch are sorted, and each adds to the row only the tokens after the longest prefix that it
shares with the sequence before it: responses to one prompt share the prompt and their common first tokens, prompts
share their instructions. A token at position p attends, at each position up to p, to the last token of the row there
that is not after it. So the row is the prefix tree in depth-first order, and autograd sums the gradients of a shared
token as it would over copies: the function is that of one row per sequence.

CPU only, where a row's pieces are computed on the host (terrace.model.attention says why). Short runs share a piece
under a mask, which costs less than another kernel call. Sequences beyond `LONGEST_SHARED` share nothing and need no
mask.

Shape legend: T tokens of a row, N query heads, K key-value heads, D head_dim, L queries of a piece, M its keys.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from terrace.base.errors import ModelError
from terrace.model.attention import NO_SINKS, Capped, MaskPlan, PerMicroBatch, PlannedAttention
from terrace.model.attention_plans import AttentionPlans
from terrace.model.sinks import attend

# Tokens. Masks grow with the square of the length of shared rows; the bound is a guess.
LONGEST_SHARED = 512
# Tokens. A step of the task sort takes 3 % less time than with 64, and the same as with 160 (fp32, one AVX-512 core).
_SHORT_PIECE = 96


@dataclass(frozen=True)
class _Pieces:
    """The mask plan of a row: piece i has `sizes[i]` queries, which also attend to tokens `before` it in the row."""

    sizes: tuple[int, ...]
    before: Tensor  # int64, indices into the row, concatenated over pieces
    num_before: tuple[int, ...]  # indices of each piece
    masks: tuple[Tensor | None, ...]  # (L, M) each; None is causal
    cap: float = 0.0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor = NO_SINKS) -> Tensor:
        """Attention output (1, N, T, D) of query over key and value (1, K, T, D), with `sinks` (N)."""
        # One split and one gather, since the gradient of each slice would be as large as the whole tensor.
        queries = torch.split(query, list(self.sizes), 2)
        mixed = [
            attend(one, keys, values, Capped(mask, self.cap) if self.cap else mask, sinks).transpose(1, 2)
            for one, keys, values, mask in zip(queries, self._seen(key), self._seen(value), self.masks, strict=True)
        ]
        return torch.cat(mixed, 1).transpose(1, 2)

    def _seen(self, part: Tensor) -> Sequence[Tensor]:
        """The keys or values (1, K, M, D) of each piece, from `part` (1, K, T, D)."""
        own = torch.split(part, list(self.sizes), 2)
        if not len(self.before):
            return own
        before = torch.split(part.index_select(2, self.before), list(self.num_before), 2)
        return [torch.cat(both, 2) if both[0].shape[2] else both[1] for both in zip(before, own, strict=True)]


class SharedPrefixPlans:
    """Mask plans for rows that are prefix trees. `window` 0 is no window, `cap` 0 no soft cap of scores.

    All layers with the same window and cap share one object.
    """

    def __init__(self, window: int, cap: float = 0.0) -> None:
        self._window, self._cap = window, cap
        self._made = PerMicroBatch()

    def plan(self, positions: Tensor | None, query: Tensor) -> MaskPlan:
        """The plan for query (1, N, T, D); `positions` (1, T) are the tokens' positions in their sequences."""
        if positions is None or len(positions) != 1:
            raise ModelError("texts with shared prefixes stand in one row, with positions")
        return self._made.get(positions, query.dtype, lambda: self._of(positions[0], query.dtype))

    def _of(self, positions: Tensor, dtype: torch.dtype) -> _Pieces:
        pieces = _cut(positions, self._window, dtype)
        return replace(pieces, cap=self._cap) if self._cap else pieces


def share_prefixes(blocks: Iterable[nn.Module]) -> None:
    """Switch all attention layers of `blocks` to `SharedPrefixPlans`, keeping each layer's window and cap."""
    made: dict[tuple[int, float], SharedPrefixPlans] = {}
    for block in blocks:
        for module in block.modules():
            if isinstance(module, PlannedAttention):
                own = module.plans
                assert isinstance(own, AttentionPlans), "a decoder's layers have their own plans until now"
                kind = own.window, own.cap
                module.plans = made[kind] = made.get(kind) or SharedPrefixPlans(*kind)


def has_shared_prefixes(blocks: Iterable[nn.Module]) -> bool:
    """Whether `share_prefixes` has been applied to `blocks`."""
    return any(
        isinstance(module, PlannedAttention) and isinstance(module.plans, SharedPrefixPlans)
        for block in blocks
        for module in block.modules()
    )


def places_of(texts: Sequence[list[int]]) -> list[list[int]]:
    """The index in the row of each sequence's tokens, where the row stores every shared prefix once."""
    found: list[list[int]] = [[] for _ in texts]
    before, places, end = list[int](), list[int](), 0
    # In sorted order, no earlier sequence shares a longer prefix than the one just before.
    for index in sorted(range(len(texts)), key=texts.__getitem__):
        text = texts[index]
        shared = _num_common(before, text) if len(text) <= LONGEST_SHARED else 0
        first, end = end, end + len(text) - shared
        before, places = list(text), [*places[:shared], *range(first, end)]
        found[index] = places
    return found


def _num_common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((place for place, (x, y) in enumerate(pairs) if x != y), min(len(one), len(other)))


def _cut(positions: Tensor, window: int, dtype: torch.dtype) -> _Pieces:
    begins = torch.ones_like(positions, dtype=torch.bool)
    begins[1:] = positions[1:] != positions[:-1] + 1
    bounds = [*torch.nonzero(begins).flatten().tolist(), len(positions)]
    firsts = positions[bounds[:-1]].tolist()
    path = list[int]()  # row index of the token at each position that the next token attends to
    unseen_from = [len(positions)] * len(positions)  # for each token, the first later token that does not attend to it
    piece_begins, before = list[int](), list[list[int]]()
    for (begin, end), first in zip(pairwise(bounds), firsts, strict=True):
        if not piece_begins or end - piece_begins[-1] > _SHORT_PIECE:
            piece_begins.append(begin)
            # Later runs of the piece attend to no further tokens before it.
            before.append(path[:first])
        for place in path[first:]:
            unseen_from[place] = begin
        path[first:] = range(begin, end)
    is_run = set(pairwise(bounds))
    seen, until, masks = torch.tensor(sum(before, list[int]())), torch.tensor(unseen_from), list[Tensor | None]()
    for (begin, end), places in zip(pairwise([*piece_begins, len(positions)]), before, strict=True):
        if not places and (begin, end) in is_run and not 0 < window < end - begin:
            masks.append(None)
            continue
        queries = torch.arange(begin, end)
        keys = torch.cat([torch.tensor(places, dtype=torch.int64), queries])
        sees = (keys <= queries.unsqueeze(1)) & (until[keys] > queries.unsqueeze(1))
        if window:
            sees &= positions[keys] > (positions[queries] - window).unsqueeze(1)
        masks.append(torch.zeros(sees.shape, dtype=dtype).masked_fill_(~sees, -torch.inf))
    sizes = tuple(end - begin for begin, end in pairwise([*piece_begins, len(positions)]))
    return _Pieces(sizes, seen.long(), tuple(map(len, before)), tuple(masks))
