"""Tables whose rows are on several ranks: batches that leave rows unused, and the run of one process to compare with.

The reference is torch's own optimizers on the whole table, after which rows without a gradient get back the values and
moments that they had. It shares no code with the runtime.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from terrace.cluster.cluster import Cluster
from terrace.launch.start import LocalPool
from terrace.runtime.batch import Batch, places_of
from terrace.runtime.settings import OptimizerConfig
from tests.support.parity import TOLERANCE, Case, Outcome, deviation, flatten, num_rows, run, trainable
from tests.support.toys import MODELS, NUM_IDS, TIER_NAMES, Rows, count_tokens, run_blocks

SGD = OptimizerConfig(name="sgd", lr=0.1, weight_decay=0.1)


def spread_over(*sizes: int) -> dict[str, int]:
    """The key `vocabulary` over all ranks of a cluster of these tiers."""
    return dict(zip(TIER_NAMES, sizes, strict=False))


@dataclass(frozen=True)
class DrawnRows(Rows):
    """Rows of `sequence` tokens of `NUM_IDS` ids, of which low ones are frequent."""

    def batch(self, step: int, num_rows: int) -> Batch:
        """As in `Rows`, without documents."""
        generator = torch.Generator().manual_seed(step)
        drawn = torch.rand(num_rows, self.sequence, generator=generator) ** 2 * NUM_IDS
        tokens = drawn.long()
        labels = tokens.roll(-1, dims=1)
        labels[0, :3] = -100
        return Batch(tokens, labels, places=places_of(torch.arange(step * num_rows, (step + 1) * num_rows), labels))


@cache
def row_wise(model_name: str, batch: int, num_steps: int, rows: Rows, optimizer: OptimizerConfig) -> Outcome:
    """Train in fp64 in this process, row-wise in the table of the first block."""
    model = MODELS[model_name]
    blocks = model.blocks(torch.float64)
    table = next(blocks[0].parameters())
    parameters = trainable(blocks)
    torch_optimizer = _made(parameters, optimizer)
    losses, norms = [], []
    for step in range(num_steps):
        whole = rows.batch(step, batch)
        torch_optimizer.zero_grad()
        loss = torch.zeros(()).double()
        for x, y in rows.apart(whole.inputs, whole.labels):
            loss = loss + model.objective(run_blocks(blocks, x), y) / count_tokens(whole.labels)
        torch.autograd.backward(loss)
        norms.append(float(nn.utils.clip_grad_norm_(parameters, optimizer.clip)))
        losses.append(float(loss.detach()))
        if not table.requires_grad:
            torch_optimizer.step()
            continue
        assert table.grad is not None
        unused = ~(table.grad != 0).any(1)
        before = {name: value[unused].clone() for name, value in _states(torch_optimizer, table).items()}
        torch_optimizer.step()
        for name, value in _states(torch_optimizer, table).items():
            value[unused] = before.get(name, torch.zeros(()).double())
    return Outcome(losses, norms, flatten(blocks))


def _made(parameters: Sequence[nn.Parameter], optimizer: OptimizerConfig) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": optimizer.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    if optimizer.name == "sgd":
        return torch.optim.SGD(groups, lr=optimizer.lr)
    betas = optimizer.beta1, optimizer.beta2
    return torch.optim.AdamW(groups, lr=optimizer.lr, betas=betas, eps=optimizer.eps)


def _states(optimizer: torch.optim.Optimizer, table: nn.Parameter) -> dict[str, Tensor]:
    states = {name: value for name, value in optimizer.state.get(table, {}).items() if value.dim()}
    return {"parameters": table.data, **states}


def check_tables(pool: LocalPool, cluster: Cluster, cases: Sequence[Case]) -> None:
    """Every case equals the reference on every rank, every ledger its ids, and the order of messages its program."""
    for case, outcomes in zip(cases, run(pool, cluster, cases), strict=True):
        wanted = row_wise(case.model, num_rows(cluster, case), case.num_steps, case.rows, case.optimizer)
        found = deviation(outcomes, wanted)
        assert max(found.values()) < TOLERANCE, (case, found)
        assert not any(outcome.complaint for outcome in outcomes), (case, [each.complaint for each in outcomes])
