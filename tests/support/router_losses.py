"""The losses of routers once more, from their definitions: token by token and sequence by sequence."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from terrace.model.experts.balance import BalanceConfig
from terrace.model.experts.mixture import Router
from tests.support.toys import Rows

Seen = dict[Router, list[tuple[Tensor, Tensor]]]  # of every pass: tokens (T, H), their experts (T, k)


@contextmanager
def scored(blocks: Sequence[nn.Module]) -> Iterator[Seen]:
    """The tokens that each router sees meanwhile."""
    seen: Seen = defaultdict(list)

    def look(router: Any, given: Any, choice: Any) -> None:
        seen[router].append((given[0], choice.experts))

    routers = [module for block in blocks for module in block.modules() if isinstance(module, Router)]
    hooks = [router.register_forward_hook(look) for router in routers]
    yield seen
    for hook in hooks:
        hook.remove()


def router_losses(routers: Seen, rows: Rows, labels: Tensor, balance: BalanceConfig) -> list[Tensor]:
    """The sums over layers and tokens of the losses that are on; the tokens of `labels` (B, S) in order."""
    sums = {"sequence": torch.zeros(()).double(), "z": torch.zeros(()).double()}
    taking = [place for document in _documents(rows, labels) for place in document]
    for router, passes in routers.items():
        tokens, chosen = (torch.cat(each) for each in zip(*passes, strict=True))
        logits = tokens @ router.weight.t()
        for place in taking:
            sums["z"] = sums["z"] + balance.z * logits[place].exp().sum().log() ** 2
        scores = logits.sigmoid() if router.config.gate == "sigmoid" else logits.softmax(-1)
        for row in range(len(labels)):
            places = [place for place in taking if place // labels.shape[1] == row]
            for expert in range(router.config.num_experts) if places else ():
                share = torch.stack([scores[place, expert] / scores[place].sum() for place in places]).mean()
                number = sum(expert in chosen[place] for place in places)
                load = router.config.num_experts * number / (router.config.per_token * len(places))
                sums["sequence"] = sums["sequence"] + balance.sequence * len(places) * load * share
    return [sums[name] for name in balance.losses]


def _documents(rows: Rows, labels: Tensor) -> Iterator[range]:
    """Places of the documents that have a label."""
    for row, of_row in enumerate(labels):
        start = row * len(of_row)
        for length in rows.lengths(row):
            inside = of_row[start - row * len(of_row) :][:length]
            if bool((inside != -100).any()):
                yield range(start, start + length)
            start += length
