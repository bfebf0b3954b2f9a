"""Click-through prediction: a table of many rows, of which every rank has a part, and a small network above it.

    python -m examples.click_through
    torchrun --nproc-per-node 2 -m examples.click_through --ranks 2
    torchrun --nproc-per-node 4 -m examples.click_through --ranks 4 --rows 20000000 --width 16
    python -m examples.click_through --rows 20000000 --keep disk

An impression is a user, an item and the place where it is shown. Each value of these fields is a row of one table,
which `vocabulary` spreads over all ranks (docs/tables.md). The clicks are synthetic: users and items have hidden kinds,
and how much a kind of users likes a kind of items decides most clicks. Logistic regression has one weight per row, so
it cannot learn pairs of kinds; vectors of rows and a network can. The script prints the AUC of both on held-out
impressions.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import terrace
from terrace.cluster.cluster import Cluster
from terrace.cluster.presets import load_cluster
from terrace.model.params import ParamSpec
from terrace.model.spec import BlockSpec

FIELDS = (0.6, 0.39, 0.01)  # shares of the rows: users, items, places
KINDS = 8  # hidden kinds of users and of items
NO_LABEL = -100


@dataclass(frozen=True)
class Clicks:
    """Impressions and clicks of `rows` users, items and places in all. Every rank draws the same in a step."""

    rows: int
    batch: int = 1024

    def draw(self, step: int) -> tuple[Tensor, Tensor]:
        """Ids (batch, fields) and labels (batch, fields): the click, then `NO_LABEL` for the other fields."""
        generator = torch.Generator().manual_seed(step)
        ids, first = [], 0
        for share in FIELDS:
            size = max(1, int(self.rows * share))
            # A few values are frequent, most are rare.
            drawn = torch.rand(self.batch, generator=generator) ** 4
            ids.append(first + (drawn * size).long())
            first += size
        users, items, places = ids
        # How much a kind of users likes a kind of items, with mean zero over either, so that no row alone tells it.
        likes = torch.randn(KINDS, KINDS, generator=torch.Generator().manual_seed(1))
        likes = likes - likes.mean(0) - likes.mean(1, keepdim=True) + likes.mean()
        logit = 2.0 * likes[_hashed(users, 1) % KINDS, _hashed(items, 2) % KINDS]
        # A part that each row decides alone, which logistic regression can learn.
        logit = logit + sum(0.4 * (_hashed(each, 3) % 5 - 2) for each in (users, items, places))
        clicks = torch.rand(self.batch, generator=generator) < torch.sigmoid(logit)
        labels = torch.full((self.batch, len(FIELDS)), NO_LABEL)
        labels[:, 0] = clicks
        return torch.stack(ids, 1), labels


def _hashed(ids: Tensor, salt: int) -> Tensor:
    """A number for each id that looks random, and takes no memory."""
    return ((ids + salt) * 2654435761 >> 7) % 65521


class Table(nn.Module):
    """Ids (B, fields) to vectors (B, fields, width)."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        # One zero, expanded to a table: each rank allocates its own rows. Elements of a row begin equal, and become
        # different in the first update, since the network's weights differ.
        self.weight = nn.Parameter(torch.zeros(1, 1).expand(rows, width))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class Network(nn.Module):
    """Vectors (B, fields, width) to logits of clicks (B)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(len(FIELDS) * width, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, vectors: Tensor) -> Tensor:
        logits: Tensor = self.layers(vectors.flatten(1)).squeeze(1)
        return logits


class ClickLoss:
    """Sum of the cross entropies of logits (B) and labels (B, fields); `seen` has (logits, clicks) of all calls."""

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, Tensor]] = []

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        known = labels[:, 0] != NO_LABEL
        logits, clicks = logits[known], labels[known, 0]
        self.seen.append((logits.detach(), clicks))
        return F.binary_cross_entropy_with_logits(logits, clicks.to(logits.dtype), reduction="sum")


def auc(scores: Tensor, clicks: Tensor) -> float:
    """The share of (click, no click) pairs in which the click has the higher score; assumes that no scores tie."""
    order = torch.argsort(torch.argsort(scores)).double() + 1
    positive = clicks.bool()
    num = int(positive.sum())
    return float((order[positive].sum() - num * (num + 1) / 2) / (num * (len(clicks) - num)))


def cluster_here(ranks: int) -> Cluster:
    """All ranks of this machine as one tier."""
    local = load_cluster("local")
    return replace(local, tiers=(replace(local.tiers[0], name="machine", size=ranks),))


def train(
    clicks: Clicks, width: int, steps: int, ranks: int, say: Callable[[str], None], keep: str = "device"
) -> tuple[int, float]:
    """Train table and network. Returns the rank, and the AUC of its part of the held-out impressions.

    `keep` is where the rows are kept: on the "device", or on the "disk" below it.
    """
    torch.manual_seed(0)
    table, network, loss = Table(clicks.rows, width), Network(width), ClickLoss()
    dims = (("vocab", clicks.rows), ("hidden", width))
    declared = [
        BlockSpec(name="table", params=(ParamSpec(name="weight", shape=(clicks.rows, width), dims=dims),)),
        BlockSpec(
            name="network",
            params=tuple(ParamSpec(name=name, shape=tuple(each.shape)) for name, each in network.named_parameters()),
        ),
    ]
    plan: dict[str, object] = {"preset": "ddp", "micro_batch": clicks.batch // ranks, "vocabulary": {"machine": ranks}}
    plan["keep"] = {"table": keep}
    with terrace.Trainer(
        {"table": table, "network": network},
        plan=plan,
        cluster=cluster_here(ranks),
        loss=loss,
        lr=1e-2,
        optimizer={"weight_decay": 0.0},
        declared=declared,
        activation=(len(FIELDS), width),
        broadcast=False,  # the seed is the same on every rank
        say=say,
    ) as trainer:
        for step in range(steps):
            result = trainer.step(*clicks.draw(step), lr=1e-2 * min(1.0, 2 - 2 * step / steps))
            if trainer.rank == 0 and step % 100 == 0:
                say(f"step {step:4}: loss {result.loss:.4f}")
        loss.seen.clear()
        for step in range(8):
            trainer.evaluate(*clicks.draw(10_000_000 + step))
        scores, labels = (torch.cat(each) for each in zip(*loss.seen, strict=True))
        return trainer.rank, auc(scores, labels)


def logistic_regression(clicks: Clicks, steps: int) -> float:
    """The AUC of logistic regression on the same impressions: one weight for each row."""
    weights, bias = nn.EmbeddingBag(clicks.rows, 1, mode="sum", sparse=True), nn.Parameter(torch.zeros(1))
    nn.init.zeros_(weights.weight)
    optimizers = [torch.optim.SparseAdam(weights.parameters(), lr=2e-2), torch.optim.Adam([bias], lr=2e-2)]

    def scored(ids: Tensor) -> Tensor:
        found: Tensor = weights(ids).squeeze(1) + bias
        return found

    for step in range(steps):
        ids, labels = clicks.draw(step)
        loss = F.binary_cross_entropy_with_logits(scored(ids), labels[:, 0].float())
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            optimizer.step()
    with torch.no_grad():
        held_out = [clicks.draw(10_000_000 + step) for step in range(8)]
        return auc(torch.cat([scored(ids) for ids, _ in held_out]), torch.cat([labels[:, 0] for _, labels in held_out]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=1, help="ranks that torchrun starts (default: 1)")
    parser.add_argument("--rows", type=int, default=20_000, help="rows of the table (default: 20000)")
    parser.add_argument("--width", type=int, default=16, help="elements of a row (default: 16)")
    parser.add_argument("--keep", choices=("device", "disk"), default="device", help="where rows are (default: device)")
    parser.add_argument("--steps", type=int, default=600, help="steps of 1024 impressions (default: 600)")
    options = parser.parse_args()
    impressions = Clicks(options.rows)
    rank, found = train(impressions, options.width, options.steps, options.ranks, print, options.keep)
    if rank == 0:
        beside = logistic_regression(impressions, options.steps)
        print(f"AUC of the table and its network {found:.4f}, of logistic regression {beside:.4f}")
