"""A `TokenLayout` with its masks and indexes on the device, shared by all layers of a model for one micro-batch."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from terrace.model.blockwise import DensePair, dense_mask
from terrace.plan.context import Heads
from terrace.runtime.context.peer_exchange import PeerComm, PeerExchange
from terrace.sequence.token_layout import Mask, Pair, Run, TokenLayout, num_rows


class UlyssesHeads:
    """The heads that each Ulysses rank of a ring rank attends with."""

    def __init__(self, heads: Heads, ulysses: int) -> None:
        ulysses_rank = heads.per_ulysses_rank(ulysses)
        self.queries, self.keys = ulysses_rank.queries, ulysses_rank.keys
        self.shared = max(1, ulysses // heads.keys)  # neighbouring ranks that have the same key-value head
        self._ulysses = ulysses

    def of_queries(self, member: int) -> slice:
        """Query heads of a group member."""
        ulysses_rank = member % self._ulysses
        return slice(ulysses_rank * self.queries, (ulysses_rank + 1) * self.queries)

    def of_keys(self, member: int) -> slice:
        """Key-value heads that a group member's queries use."""
        first = member % self._ulysses // self.shared * self.keys
        return slice(first, first + self.keys)


@dataclass(frozen=True)
class RingStep:
    """A round: `exchange` receives `num_rows` key rows, `return_gradients` returns gradients of rows not passed on."""

    num_rows: int
    exchange: PeerExchange
    return_gradients: PeerExchange
    pairs: tuple[tuple[Pair, ...], ...]  # for each window of the layers


class DeviceLayout:
    """The `TokenLayout` of the rank of `comm`; masks and indexes are built once, on `device`."""

    def __init__(self, token_layout: TokenLayout, comm: PeerComm, device: torch.device) -> None:
        member = token_layout.member
        assert member == comm.member, f"a token layout of member {member} on member {comm.member}"
        self.token_layout, self.comm = token_layout, comm
        self.num_local_tokens = token_layout.num_local_tokens
        self.num_attention_tokens = token_layout.num_attention_tokens
        self.into = PeerExchange.of(token_layout.into, member, device)
        self.back = self.into.reversed()
        self.ring_steps = [
            RingStep(
                each.num_rows,
                PeerExchange.of(each.exchange, member, device),
                PeerExchange.of(each.return_gradients, member, device),
                (each.pairs, *each.other_pairs),
            )
            for each in token_layout.rounds
        ]
        self._window = 0
        self._device = device
        self._masks: dict[tuple[int, int, Mask, torch.dtype], Tensor] = {}
        self._pairs: dict[tuple[int, torch.dtype], list[DensePair]] = {}

    @cached_property
    def query_runs(self) -> list[Run]:
        """The query runs of all pairs."""
        return [pair.queries for ring_step in self.ring_steps for pair in ring_step.pairs[self._window]]

    def of_window(self, index: int) -> "DeviceLayout":
        """The layout for layers with another window, by index into the model's windows; 0 is this object."""
        return self._others[index - 1] if index else self

    @cached_property
    def _others(self) -> "list[DeviceLayout]":
        # This object is not among them: a circle of references would keep its masks until the next collection.
        return [self._copied(index) for index in range(1, len(self.ring_steps[0].pairs))]

    def _copied(self, index: int) -> "DeviceLayout":
        other = copy(self)
        other._window, other._pairs = index, {}
        other.__dict__.pop("query_runs", None)  # those of this object's window
        return other

    def pairs(self, step: int, dtype: torch.dtype) -> Sequence[DensePair]:
        """The (query run, key run) pairs of a round, with masks for queries of `dtype`."""
        if (step, dtype) not in self._pairs:
            # Masks made in inference mode could not be saved for a later backward.
            with torch.inference_mode(False), torch.no_grad():
                self._pairs[step, dtype] = [
                    self._dense(pair, dtype) for pair in self.ring_steps[step].pairs[self._window]
                ]
        return self._pairs[step, dtype]

    def _dense(self, pair: Pair, dtype: torch.dtype) -> DensePair:
        if pair.mask is None:
            return DensePair(pair.queries, pair.keys, pair.kind.value)
        sizes = num_rows((pair.queries,)), num_rows((pair.keys,))
        key = (*sizes, pair.mask, dtype)
        # Pairs of one shape share a mask, across rounds too.
        if key not in self._masks:
            mask = pair.mask
            self._masks[key] = dense_mask(*sizes, mask.shift, mask.begins, mask.window, dtype, self._device)
        return DensePair(pair.queries, pair.keys, pair.kind.value, self._masks[key])
