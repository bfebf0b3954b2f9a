"""Islands that train apart and agree by an outer optimizer, in fp64 in one process: the reference of an outer loop.

Plain loops, written from the section "An outer loop as a placement (design)" of docs/architecture.md alone; it imports
nothing from Terrace. Every island has a copy of the model and an optimizer of its own. Per fragment, with anchor a and
momentum v that islands share, and island i's parameters x_i:

    start    d_i = ref_i - x_i ;  s_i = x_i
    mean     D = sum_i w_i d_i ,  w_i = valid tokens of i since its last start / those of all
    apply    D <- D / Lambda ;  v <- clip(beta v + D, -phi, phi) ;  u = D + beta v | v | D ;  a <- a - eta u
    merge    x_i <- a + keep (x_i - s_i) ;  ref_i <- a

With delay = every the next start comes before this apply. Changes are then counted since the last start: ref_i <- s_i
at each start too, or the first change would be sent twice; and that s_i moves with x_i, ref_i with it.
Lambda = 1 + mean over islands of ||x_i - s_i|| / ||d_i||, both of the exchange before, with x_i as it was before that
merge; 1 without the penalty, and for the first exchange.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.independent import IGNORED, optimizer_of
from tests.support.outer_exchanges import Exchange, exact_mean

Micro = tuple[Tensor, Tensor, Tensor | None]  # tokens, labels and, of packed documents, positions, each (B, S)
Values = dict[str, Tensor]
Objective = Callable[[Tensor, Tensor], Tensor]  # logits and labels to the loss, summed over valid tokens


@dataclass(frozen=True, kw_only=True)
class OuterLoop:
    """The table `[outer]` of a plan without its tier; `clip` 0 clips nothing."""

    every: int
    fragments: int = 1
    delay: int = 0
    optimizer: str = "nesterov"
    lr: float = 0.7
    momentum: float = 0.9
    keep: float = 1.0
    penalty: bool = False
    clip: float = 0.0

    def starting(self, step: int) -> list[int]:
        """Fragments that start at the end of a step, counted from 0."""
        ends = [(fragment + 1) * self.every // self.fragments - 1 for fragment in range(self.fragments)]
        return [fragment for fragment, end in enumerate(ends) if step % self.every == end]


@dataclass(frozen=True)
class Exchanged:
    """An exchange that was applied: steps of its start and its apply, weights of islands, and its norms.

    `changes` are ||d_i||, `gaps` ||x_i - s_i|| before the merge, both by island; `mean` is ||D|| before the division by
    `penalty`, which is Lambda.
    """

    fragment: int
    started: int
    applied: int
    weights: list[float]
    mean: float
    changes: list[float]
    gaps: list[float]
    penalty: float


@dataclass(frozen=True)
class OuterStep:
    """A step: the loss over all islands and of each, gradient norms of islands, exchanges applied at its end."""

    loss: float
    island_losses: list[float]
    norms: list[float]
    exchanged: list[Exchanged]


@dataclass
class UnderWay:
    """An exchange between start and apply: s_i by island, and D."""

    started: int
    weights: list[float]
    kept: list[Values]
    mean: Values
    changes: list[float]


@dataclass
class Island:
    """A copy of the model with an optimizer of its own; `ref` are the values from which the next change is counted."""

    blocks: list[nn.Module]
    values: Values  # trained parameters, those that blocks share once
    optimizer: Any
    ref: Values = field(default_factory=dict)

    def gradients(self, micros: Sequence[Micro], objective: Objective) -> tuple[float, int, Values]:
        """Summed loss, number of valid tokens and gradients of their mean loss."""
        for value in self.values.values():
            value.grad = None
        count = sum(int((labels != IGNORED).sum()) for _, labels, _ in micros)
        total = 0.0
        for tokens, labels, positions in micros:
            hidden = tokens
            for block in self.blocks:
                hidden = block(hidden) if positions is None else block(hidden, positions)
            loss = objective(hidden, labels)
            torch.autograd.backward(loss)
            total += float(loss.detach())
        found = {name: _gradient(value) / max(1, count) for name, value in self.values.items()}
        return total, count, found


class OuterReference:
    """Islands that begin as copies of `blocks`, a model in fp64 whose blocks run one after the other.

    `optimizer` is the table `[optimizer]`, whose clipping is by the norm of an island. `exchange` gives the sum of
    the islands' contributions, w_i d_i of a block as a flat row (matrices first), as it arrives decoded everywhere.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        objective: Objective,
        num_islands: int,
        optimizer: Mapping[str, Any],
        outer: OuterLoop,
        exchange: Exchange = exact_mean,
    ) -> None:
        self.outer, self.objective, self.exchange = outer, objective, exchange
        self.clip = float(optimizer.get("clip", 1.0))
        self.islands = []
        for _ in range(num_islands):
            own = copy.deepcopy(list(blocks))
            self.islands.append(Island(own, trained(own), optimizer_of(optimizer)))
        self.anchor: Values = copies(self.islands[0].values)
        self.momentum: Values = {name: torch.zeros_like(value) for name, value in self.anchor.items()}
        for island in self.islands:
            island.ref = copies(self.anchor)
        self.under_way: list[list[UnderWay]] = [[] for _ in range(outer.fragments)]
        self.tokens = [[0] * num_islands for _ in range(outer.fragments)]  # since the last start
        self.last: dict[int, tuple[list[float], list[float]]] = {}  # fragment -> gaps and changes
        self.num_steps = 0

    def step(self, batches: Sequence[Sequence[Micro]], lr: float, *, last: bool = False) -> OuterStep:
        """A step of every island on its micro-batches; the `last` ends with an exchange of everything."""
        sums, counts, norms = [], [], []
        for number, (island, micros) in enumerate(zip(self.islands, batches, strict=True)):
            total, count, gradients = island.gradients(micros, self.objective)
            norm = norm_of(gradients)
            # as torch.nn.utils.clip_grad_norm_
            scale = min(1.0, self.clip / (norm + 1e-6)) if self.clip else 1.0
            with torch.no_grad():
                for name, value in island.values.items():
                    island.optimizer.update(name, value, gradients[name] * scale, lr)
            for tokens in self.tokens:
                tokens[number] += count
            sums.append(total)
            counts.append(count)
            norms.append(norm)
        with torch.no_grad():
            exchanged = self.finish() if last else self.end_of_step()
        self.num_steps += 1
        losses = [total / max(1, count) for total, count in zip(sums, counts, strict=True)]
        return OuterStep(math.fsum(sums) / sum(counts), losses, norms, exchanged)

    def end_of_step(self) -> list[Exchanged]:
        """Starts, then applies, of the fragments whose turn it is."""
        for fragment in self.outer.starting(self.num_steps):
            self.start(fragment)
        due = self.num_steps - self.outer.delay
        return [
            self.apply(fragment)
            for fragment, waiting in enumerate(self.under_way)
            if waiting and waiting[0].started == due
        ]

    def finish(self) -> list[Exchanged]:
        """End of a run: exchanges under way are applied, then every fragment starts one and applies it.

        With delay = every a start comes before the apply of the last one, here as in a cycle.
        """
        exchanged = []
        for fragment, waiting in enumerate(self.under_way):
            if self.outer.delay != self.outer.every:
                exchanged += [self.apply(fragment) for _ in tuple(waiting)]
            self.start(fragment)
            exchanged += [self.apply(fragment) for _ in tuple(waiting)]
        return exchanged

    def start(self, fragment: int) -> None:
        names = self.names(fragment)
        changes = [{name: island.ref[name] - island.values[name] for name in names} for island in self.islands]
        self.send(fragment, changes)

    def send(self, fragment: int, changes: Sequence[Values]) -> None:
        """Put under way the mean of the islands' changes, with a copy of their present values."""
        tokens = self.tokens[fragment]
        assert sum(tokens), f"no valid token since the last start of fragment {fragment}: the mean has no weights"
        weights = [count / sum(tokens) for count in tokens]
        self.tokens[fragment] = [0] * len(tokens)
        mean: Values = {}
        for block in range(fragment, len(self.islands[0].blocks), self.outer.fragments):
            names = self.names_of_block(block)
            if names:
                rows = [w * flat(each, names) for w, each in zip(weights, changes, strict=True)]
                mean |= apart(self.exchange(block, rows), {name: self.anchor[name] for name in names})
        kept = [copies({name: island.values[name] for name in self.names(fragment)}) for island in self.islands]
        if self.outer.delay == self.outer.every:
            for island, values in zip(self.islands, kept, strict=True):
                island.ref |= copies(values)
        norms = [norm_of(each) for each in changes]
        self.under_way[fragment].append(UnderWay(self.num_steps, weights, kept, mean, norms))

    def apply(self, fragment: int) -> Exchanged:
        outer, now = self.outer, self.under_way[fragment].pop(0)
        gaps = [
            norm_of({name: island.values[name] - kept[name] for name in kept})
            for island, kept in zip(self.islands, now.kept, strict=True)
        ]
        divisor = self.divisor(fragment) if outer.penalty else 1.0
        self.last[fragment] = gaps, now.changes
        for name, mean in now.mean.items():
            given = mean / divisor
            v = outer.momentum * self.momentum[name] + given
            if outer.clip:
                v = v.clamp(-outer.clip, outer.clip)
            u = {"nesterov": given + outer.momentum * v, "momentum": v, "average": given}[outer.optimizer]
            self.momentum[name] = v
            self.anchor[name] = self.anchor[name] - outer.lr * u
        self.merge(fragment, now)
        applied = self.num_steps
        return Exchanged(fragment, now.started, applied, now.weights, norm_of(now.mean), now.changes, gaps, divisor)

    def divisor(self, fragment: int) -> float:
        """Lambda, of the gaps and changes of the fragment's last exchange."""
        gaps, changes = self.last.get(fragment, ([0.0], [1.0]))
        ratios = [gap / change if gap else 0.0 for gap, change in zip(gaps, changes, strict=True)]
        return 1.0 + math.fsum(ratios) / len(ratios)

    def merge(self, fragment: int, now: UnderWay) -> None:
        for number, island in enumerate(self.islands):
            for name, kept in now.kept[number].items():
                value = island.values[name]
                value.copy_(self.anchor[name] + self.outer.keep * (value - kept))
                island.ref[name] = self.anchor[name].clone()
                for later in self.under_way[fragment]:  # one that started in this very step
                    later.kept[number][name] = value.clone()
                    island.ref[name] = value.clone()

    def names_of_block(self, block: int) -> list[str]:
        """Trained parameters that a block holds first, matrices before vectors, as they stand in its flat buffer."""
        names = [name for name in self.anchor if int(name.partition(".")[0]) == block]
        return sorted(names, key=lambda name: self.anchor[name].ndim < 2)

    def names(self, fragment: int) -> list[str]:
        blocks = range(fragment, len(self.islands[0].blocks), self.outer.fragments)
        return [name for block in blocks for name in self.names_of_block(block)]

    def parameters(self, island: int) -> Tensor:
        """All parameters of an island as one row, shared ones repeated."""
        return torch.cat([p.detach().reshape(-1) for block in self.islands[island].blocks for p in block.parameters()])


def trained(blocks: Sequence[nn.Module]) -> Values:
    """Trained parameters by "<block>.layers.<name>", of the first and the last block by "<block>.<name>"."""
    # Muon of tests/support/independent.py takes the matrices of layers, and knows them by their names.
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for index, block in enumerate(blocks):
        prefix = f"{index}." if index in (0, len(blocks) - 1) else f"{index}.layers."
        for name, parameter in block.named_parameters():
            if parameter.requires_grad:
                found.setdefault(id(parameter), (prefix + name, parameter))
    return dict(found.values())


def copies(values: Mapping[str, Tensor]) -> Values:
    return {name: value.detach().clone() for name, value in values.items()}


def norm_of(values: Mapping[str, Tensor]) -> float:
    return math.sqrt(math.fsum(float(value.square().sum()) for value in values.values()))


def flat(values: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    return torch.cat([values[name].reshape(-1) for name in names])


def apart(row: Tensor, like: Mapping[str, Tensor]) -> Values:
    """A flat row as tensors with the names and the shapes of `like`."""
    parts = torch.split(row, [value.numel() for value in like.values()])
    return {name: part.view(value.shape) for (name, value), part in zip(like.items(), parts, strict=True)}


def _gradient(value: Tensor) -> Tensor:
    return torch.zeros_like(value) if value.grad is None else value.grad
