"""Losses of routers once more, by their definitions, token by token and sequence by sequence; noise in one process."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from terrace.model.balance import BalanceConfig
from terrace.model.experts.config import ExpertsConfig
from terrace.model.experts.gates import Choice
from terrace.model.experts.gating import Gating, Passage
from terrace.model.experts.mixture import Router
from tests.support.toys import Rows

# Of every pass: tokens (T, H), the experts that they choose (T, k), and those that they pass, -1 for none.
Seen = dict[Router, list[tuple[Tensor, Tensor, Tensor]]]


@contextmanager
def scored(blocks: Sequence[nn.Module], rows: Rows, balance: BalanceConfig) -> Iterator[Seen]:
    """The tokens that each router sees in the body of a `with`, and its choices before and after any are dropped."""
    seen: Seen = defaultdict(list)

    def look(router: Any, given: Any, choice: Any) -> Any:
        chosen = choice.experts
        choice = bounded(choice, rows.sequence, balance.capacity, router.config) if balance.capacity else choice
        seen[router].append((given[0], chosen, choice.experts))
        return choice

    routers = [module for block in blocks for module in block.modules() if isinstance(module, Router)]
    hooks = [router.register_forward_hook(look) for router in routers]
    yield seen
    for hook in hooks:
        hook.remove()


def bounded(choice: Choice, sequence: int, factor: float, config: ExpertsConfig) -> Choice:
    """`choice` of whole rows of tokens, without the choices beyond the capacity."""
    experts, weights = choice.experts.clone(), choice.weights
    most = math.ceil(round(factor * config.per_token * sequence / config.num_experts, 9))
    for row in range(0, len(experts), sequence):
        for expert in range(config.num_experts):
            of_row = (choice.experts[row : row + sequence] == expert).nonzero().tolist()
            by_weight = sorted(of_row, key=lambda at: (-round(float(weights[row + at[0], at[1]].detach()), 9), at[0]))
            for place, index in by_weight[most:]:
                experts[row + place, index] = -1
    return Choice(experts, weights * (experts >= 0), is_whole=False)


def begin_noise(blocks: Sequence[nn.Module], places: Tensor) -> None:
    """Have noisy gates draw the noise of tokens at these places of the run."""
    for index, block in enumerate(blocks):
        for router in (module for module in block.modules() if isinstance(module, Router)):
            if router.config.gate == "noisy":
                router.gating, router.layer = Gating(BalanceConfig()), index
                router.gating.trains = True
                router.gating.passage = Passage(None, places=places.flatten())


def router_losses(
    routers: Seen, rows: Rows, labels: Tensor, balance: BalanceConfig, before: Mapping[Router, list[int]]
) -> list[Tensor]:
    """The sums over layers and tokens of the losses that are on; the tokens of `labels` (B, S) in order.

    `before` are the tokens of each expert in the step before, none in the first step.
    """
    sums = {name: torch.zeros(()).double() for name in ("sequence", "step", "z")}
    # A document weighs as many labels as it has, whichever of its tokens have them.
    weights = {
        place: int((labels.flatten()[list(document)] != -100).sum()) / len(document)
        for document in counting_documents(rows, labels)
        for place in document
    }
    taking = list(weights)
    for router, passes in routers.items():
        tokens, chosen, _ = (torch.cat(each) for each in zip(*passes, strict=True))
        logits = _logits(router, tokens)
        for place in taking:
            sums["z"] = sums["z"] + balance.z * weights[place] * logits[place].exp().sum().log() ** 2
        scores = logits.sigmoid() if router.config.gate == "sigmoid" else logits.softmax(-1)
        for expert, number in enumerate(before.get(router, ())):
            shares = [weights[place] * scores[place, expert] / scores[place].sum() for place in taking]
            load = router.config.num_experts * number / sum(before[router])
            sums["step"] = sums["step"] + balance.step * load * torch.stack(shares).sum()
        for row in range(len(labels)):
            places = [place for place in taking if place // labels.shape[1] == row]
            for expert in range(router.config.num_experts) if places else ():
                shares = [weights[place] * scores[place, expert] / scores[place].sum() for place in places]
                number = sum(expert in chosen[place] for place in places)
                load = router.config.num_experts * number / (router.config.per_token * len(places))
                sums["sequence"] = sums["sequence"] + balance.sequence * load * torch.stack(shares).sum()
    return [sums[name] for name in balance.losses]


def _logits(router: Router, tokens: Tensor) -> Tensor:
    if router.config.gate != "cosine":
        logits = tokens @ router.weight.t()
        return logits if router.logit_bias is None else logits + router.logit_bias
    projected = tokens @ router.projection.t()
    return torch.cosine_similarity(projected[:, None], router.weight, dim=-1) / router.temperature.exp()


def router_counts(routers: Seen, rows: Rows, labels: Tensor) -> dict[Router, list[int]]:
    """Tokens that pass each expert of every router; the tokens of `labels` (B, S) in order."""
    taking = {place for document in counting_documents(rows, labels) for place in document}
    found = {router: [0] * router.config.num_experts for router in routers}
    for router, passes in routers.items():
        for place, experts in enumerate(torch.cat([passed for _, _, passed in passes]).tolist()):
            for expert in experts if place in taking else ():
                found[router][expert] += expert >= 0
    return found


def counting_documents(rows: Rows, labels: Tensor) -> Iterator[range]:
    """Places of the documents that have a label."""
    for row, of_row in enumerate(labels):
        start = row * len(of_row)
        for length in rows.lengths(row):
            inside = of_row[start - row * len(of_row) :][:length]
            if bool((inside != -100).any()):
                yield range(start, start + length)
            start += length
