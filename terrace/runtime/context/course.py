"""A spread made ready for its device: what the layers of a model share of one micro-batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from terrace.model.blockwise import DensePair, dense_mask
from terrace.plan.context import Heads
from terrace.runtime.context.moves import Move, Mover
from terrace.sequence.view import Kind, Mask, Pair, Spread, num_rows


class PartHeads:
    """Which of the heads of a place each of its parts attends with."""

    def __init__(self, heads: Heads, parts: int) -> None:
        part = heads.of_part(parts)
        self.queries, self.keys = part.queries, part.keys
        self.shared = max(1, parts // heads.keys)  # neighbouring parts that have the same key-value head
        self._parts = parts

    def of_queries(self, member: int) -> slice:
        """Return the query heads of a member of the pool."""
        part = member % self._parts
        return slice(part * self.queries, (part + 1) * self.queries)

    def of_keys(self, member: int) -> slice:
        """Return the key-value heads that they need."""
        first = member % self._parts // self.shared * self.keys
        return slice(first, first + self.keys)


@dataclass(frozen=True)
class Turn:
    """A round: `exchange` brought the keys of its `num_rows` rows, `home` takes gradients of those not passed on."""

    num_rows: int
    exchange: Move
    home: Move
    pairs: tuple[Pair, ...]


class Course:
    """A spread of the rank that `mover` belongs to; masks and indexes are made once, on `device`."""

    def __init__(self, spread: Spread, mover: Mover, device: torch.device) -> None:
        assert spread.member == mover.member, f"a spread of member {spread.member} on member {mover.member}"
        self.spread, self.mover = spread, mover
        self.num_held, self.num_attended = spread.num_held, spread.num_attended
        self.into = Move.of(spread.into, spread.member, device)
        self.back = self.into.reversed()
        self.turns = [
            Turn(
                each.num_rows,
                Move.of(each.exchange, spread.member, device),
                Move.of(each.home, spread.member, device),
                each.pairs,
            )
            for each in spread.rounds
        ]
        self.query_runs = [pair.queries for turn in self.turns for pair in turn.pairs]
        self._device = device
        self._masks: dict[tuple[int, int, Mask, torch.dtype], Tensor] = {}
        self._pairs: dict[tuple[int, torch.dtype], list[DensePair]] = {}

    def pairs(self, step: int, dtype: torch.dtype) -> Sequence[DensePair]:
        """Return the pairs of a round for queries of `dtype`."""
        if (step, dtype) not in self._pairs:
            with torch.inference_mode(False), torch.no_grad():
                self._pairs[step, dtype] = [self._dense(pair, dtype) for pair in self.turns[step].pairs]
        return self._pairs[step, dtype]

    def _dense(self, pair: Pair, dtype: torch.dtype) -> DensePair:
        if pair.kind is not Kind.MASK:
            return DensePair(pair.queries, pair.keys, pair.kind.value)
        assert pair.mask is not None, "a pair of this kind has one"
        sizes = num_rows((pair.queries,)), num_rows((pair.keys,))
        key = (*sizes, pair.mask, dtype)
        if key not in self._masks:
            mask = pair.mask
            self._masks[key] = dense_mask(*sizes, mask.shift, mask.begins, mask.window, dtype, self._device)
        return DensePair(pair.queries, pair.keys, pair.kind.value, self._masks[key])
