"""States of linear layers between ring ranks on several tiers, each rank a thread: the numbers of whole rows."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from terrace.model.delta_net import ROWS
from terrace.model.delta_rule import gated_delta_rule, short_convolution
from terrace.runtime.context.states import RingRuns
from tests.support.allocations import seeded
from tests.support.nightly import nightly

ROWS_OF_BATCH, TOKENS, GROUPS, HEADS, KEY, VALUE, TAPS = 2, 5, 2, 4, 3, 2, 4
FEATURES = 6


class Ring:
    """Ranks that exchange by a barrier."""

    def __init__(self, degrees: Sequence[int]) -> None:
        self.degrees, self.size = degrees, prod(degrees)
        self._barrier, self._sent = Barrier(self.size, timeout=60), dict[tuple[int, int], Tensor]()

    def runs(self, rank: int) -> RingRuns:
        def exchange(_: object, sends: Sequence[tuple[int, Tensor]], others: Sequence[tuple[int, Tensor]]) -> None:
            self._sent.update({(rank, member): tensor.clone() for member, tensor in sends})
            self._barrier.wait()
            for member, tensor in others:
                tensor.copy_(self._sent[member, rank])
            self._barrier.wait()

        lane = SimpleNamespace(submit=lambda work, _: work(), wait=lambda *_: None)
        group, among = SimpleNamespace(members=range(self.size)), SimpleNamespace(exchange=exchange)
        comm: Any = SimpleNamespace(member=rank, group=group, in_block=lane, among=among)
        return RingRuns(comm, self.degrees, ROWS_OF_BATCH)

    def part(self, rank: int, x: Tensor) -> Tensor:
        """The local tokens (1, R c, ...) of whole rows: an early and a late chunk of each."""
        chunks = x.reshape(ROWS_OF_BATCH, 2 * self.size, TOKENS, *x.shape[2:])
        pair = torch.stack([chunks[:, rank], chunks[:, 2 * self.size - 1 - rank]], 1)
        return pair.reshape(1, -1, *x.shape[2:])


Layer = Callable[[Any, Sequence[Tensor], Tensor], Tensor]


def delta_rule(runs: Any, inputs: Sequence[Tensor], positions: Tensor) -> Tensor:
    found = gated_delta_rule([*map(runs.cut, inputs[:5]), *inputs[5:]], runs.begins(positions), runs.states)
    return found.reshape(*positions.shape, HEADS, VALUE)


def convolution(runs: Any, inputs: Sequence[Tensor], positions: Tensor) -> Tensor:
    cut, begins = runs.cut(inputs[0]), runs.begins(positions)
    found = short_convolution(cut, inputs[1], runs.halo(cut[:, 1 - TAPS :]), runs.ages(positions, begins))
    return found.reshape(*positions.shape, FEATURES)


def graded(layer: Layer, runs: Any, given: Sequence[Tensor], positions: Tensor, weights: Tensor) -> list[Tensor]:
    """The output, and the gradients of all inputs."""
    inputs = [each.clone().requires_grad_() for each in given]
    found = layer(runs, inputs, positions)
    return [found.detach(), *torch.autograd.grad((found * weights).sum(), inputs)]


@pytest.mark.parametrize("degrees", [(2, 3), (2, 1, 2), *nightly(((3, 2),), ((2, 2, 2),))])
@pytest.mark.parametrize("share", [0.0, 0.15])
def test_ranks_of_all_tiers_equal_whole_rows(degrees: tuple[int, ...], share: float) -> None:
    """Outputs and gradients, without documents and with beginnings anywhere."""
    ring, generator = Ring(degrees), seeded(0)
    length = 2 * ring.size * TOKENS
    places = torch.arange(length).expand(ROWS_OF_BATCH, -1)
    begins = torch.rand(ROWS_OF_BATCH, length, generator=generator) < share
    positions = places - torch.where(begins, places, 0).cummax(1).values

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    whole = ROWS_OF_BATCH, length
    keys, values, numbers = (*whole, GROUPS, KEY), (*whole, HEADS, VALUE), (*whole, HEADS)
    of_rule = [random(*shape) for shape in (keys, keys, values, numbers, numbers, (HEADS,), (HEADS,))]
    of_taps = [random(*whole, FEATURES), random(FEATURES, 1, TAPS)]
    for layer, given, tokens, width in (
        (delta_rule, of_rule, 5, (HEADS, VALUE)),
        (convolution, of_taps, 1, (FEATURES,)),
    ):
        weights = random(*whole, *width)
        wanted = graded(layer, ROWS, given, positions, weights)

        def own(
            rank: int, layer: Layer = layer, given: Any = given, tokens: int = tokens, weights: Tensor = weights
        ) -> list[Tensor]:
            inputs = [ring.part(rank, each) for each in given[:tokens]] + list(given[tokens:])
            return graded(layer, ring.runs(rank), inputs, ring.part(rank, positions), ring.part(rank, weights))

        with ThreadPoolExecutor(ring.size) as pool:
            found = list(pool.map(own, range(ring.size)))
        for index, each in enumerate(wanted):
            if index <= tokens:
                for rank in range(ring.size):
                    torch.testing.assert_close(found[rank][index], ring.part(rank, each), atol=1e-11, rtol=0)
            else:
                total = sum((of_rank[index] for of_rank in found), torch.zeros_like(each))
                torch.testing.assert_close(total, each, atol=1e-11, rtol=0)
