"""Runs an engine on rows of prompts and responses: creates it from a role's settings, and makes its micro-batches.

A step always has `num_micros` micro-batches of `plan.micro_batch` rows on each data rank; missing rows are filled up
with rows that have no response and so no labels.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from terrace.accelerator import HOST, TYPE
from terrace.checkpoint.writing import save
from terrace.comm.process_group import rank_device
from terrace.launch.world import World
from terrace.model.blocks import block_specs
from terrace.model.config import to_table
from terrace.model.decoder import build_blocks
from terrace.model.facts import has_linear_layers, is_dense
from terrace.model.init import initial_value
from terrace.plan.mesh import CONTEXT, PIPELINE, TENSOR, Mesh
from terrace.plan.update import parse_update
from terrace.rl.algorithms.aggregation import Aggregation
from terrace.rl.algorithms.batches import at_valid_tokens, batch_of
from terrace.rl.algorithms.shared_prefixes import has_shared_prefixes, share_prefixes
from terrace.rl.values.ragged import Ragged, joined, offsets_of
from terrace.rl.values.rows import ROUTES, Rows, cat
from terrace.rl.workers.settings import EngineSettings
from terrace.runtime.batch import Batch
from terrace.runtime.engine import Engine
from terrace.runtime.model_state import InitialValue
from terrace.runtime.objective import Objective
from terrace.runtime.setup import Blocks, RankSetup, Training, Workload
from terrace.train.weights import values_in

TEXTS = ("prompts", "responses", "emitted")  # columns from which micro-batches are made
ALL = ("*",)  # pattern of all parameters
_EACH = Aggregation("token-mean")  # for scoring, which has no loss, so any aggregation serves


def engine_of(
    world: World | None,
    settings: EngineSettings,
    objective: Objective,
    device: torch.device | str,
    *,
    freeze: Sequence[str] = (),
) -> Engine:
    """Create a role's engine on this rank of `world` (None: a single rank).

    Roles that only score pass `freeze=ALL`, and then have no gradients or optimizer states. Raises `PlanError`,
    `ProgramError` or `ModelError`, on all ranks.
    """
    specs, blocks = block_specs(settings.model), build_blocks(settings.model)
    if joins(settings, torch.device(device)):
        share_prefixes(blocks)
    return Engine(
        Blocks(blocks, names=[spec.name for spec in specs], declared=specs, freeze=freeze, initial=_initial(settings)),
        Workload(
            cluster=settings.cluster, plan=settings.plan, num_micros=settings.num_micros, sequence=settings.sequence
        ),
        objective,
        Training(optimizer=settings.optimizer, seed=settings.seed),
        RankSetup(rank=0 if world is None else world.rank, device=device),
    )


def joins(settings: EngineSettings, device: torch.device) -> bool:
    """Whether sequences are joined with shared prefixes: on a CPU, for dense models, without pipeline, tensor and
    context axes, whose messages need a fixed size, without linear layers, whose state has no branches, and without
    QK-clip, which measures scores of plain rows.
    """
    mesh = Mesh.of(settings.cluster, settings.plan)
    parts_rows = any(mesh.total(axis) > 1 for axis in (*PIPELINE, *TENSOR, *CONTEXT))
    branches = is_dense(settings.model) and not has_linear_layers(settings.model)
    measures = parse_update(settings.plan.update).clips_scores
    return device.type == "cpu" and branches and not parts_rows and not measures


def _initial(settings: EngineSettings) -> InitialValue:
    def fresh(block: str, name: str, shape: tuple[int, ...]) -> Tensor:
        return initial_value(settings.model, block, name, shape, settings.seed)

    # A critic that starts from a policy has a head that the policy lacks.
    return values_in(settings.weights, settings.model, fresh) if settings.weights else fresh


def device_of(settings: EngineSettings) -> torch.device:
    """This rank's device: its GPU with nccl, GPU 0 for a single rank of a CUDA cluster, else the CPU."""
    if dist.is_initialized():
        return rank_device()
    # With an index, since the devices of tensors have one.
    return HOST if settings.cluster.device.type == "cpu" else torch.device(TYPE, 0)


def step_batches(
    engine: Engine, rows: Rows, columns: Sequence[str], aggregation: Aggregation
) -> list[list[tuple[Rows, Batch]]]:
    """This data rank's micro-batches with their rows, by step; all ranks get the same number of steps."""
    program, is_joined = engine.program, has_shared_prefixes(engine.state.modules.values())
    size, num_micros = program.plan.micro_batch, program.num_micros
    num = -(-max(engine.comm.exchange(len(rows))) // (size * num_micros)) * size * num_micros
    kept = _only(rows, columns)
    whole = cat([kept, _fillers(kept, num - len(rows))]) if num > len(rows) else kept
    micros = whole.split([size] * (num // size))
    sequence, device = program.model.sequence, engine.device
    made = [
        (part, batch_of(part, columns, aggregation, sequence=sequence, is_joined=is_joined).to(device))
        for part in micros
    ]
    return [made[first : first + num_micros] for first in range(0, num // size, num_micros)]


def scores(engine: Engine, rows: Rows) -> Ragged:
    """Log-probabilities of the valid tokens of this data rank's responses; empty on stages without the head."""
    return _numbers(engine, rows, lambda batches: [numbers.log_probs for numbers in engine.score(batches)])


def values(engine: Engine, rows: Rows) -> Ragged:
    """As `scores`, for a critic's values before each valid token."""
    return _numbers(engine, rows, engine.values)


def _numbers(engine: Engine, rows: Rows, read: Callable[[Sequence[Batch]], list[Tensor]]) -> Ragged:
    found, is_joined = list[Ragged](), has_shared_prefixes(engine.state.modules.values())
    for step in step_batches(engine, rows, (), _EACH):
        by_micro = read([batch for _, batch in step])
        found += [at_valid_tokens(each.cpu(), part, is_joined) for each, (part, _) in zip(by_micro, step, strict=False)]
    if not found:
        return Ragged(torch.zeros(0), torch.zeros(1, dtype=torch.int64))
    return joined(found).take(torch.arange(len(rows)))


def own_rows(engine: Engine, rows: Rows) -> Rows:
    """This data rank's share of a step's `rows`: equal sizes, fewer on the last ranks."""
    layout = engine.program.layout
    size = -(-len(rows) // layout.data_degree)
    first = min(len(rows), layout.data_rank(engine.rank) * size)
    return rows.take(range(first, min(len(rows), first + size)))


def means_of(engine: Engine, sums: Mapping[str, float]) -> dict[str, float]:
    """Token means over all ranks: sums divided by the sum "tokens"; maxima for names that end in `_max`."""
    total, largest = defaultdict[str, float](float), defaultdict[str, float](float)
    # Only ranks with the head have sums. Tensor ranks repeat the same tokens, which leaves the means unchanged.
    for other in engine.comm.exchange(dict(sums)):
        for name, value in other.items():
            if name.endswith("_max"):
                largest[name] = max(largest[name], value)
            else:
                total[name] += value
    tokens = max(1.0, total.pop("tokens", 0.0))
    return {name: value / tokens for name, value in total.items()} | largest


def saved(
    engine: Engine, settings: EngineSettings, folder: Path, step: int, facts: Mapping[str, Any], keep: int
) -> str:
    """Write a checkpoint with `facts` and keep the newest `keep` (None: all). Returns the checkpoint's folder."""
    engine.drain()
    return str(save(engine, folder, step, {"model": to_table(settings.model), **facts}, keep))


def _only(rows: Rows, columns: Sequence[str]) -> Rows:
    wanted = {*TEXTS, ROUTES, *columns}
    return Rows({name: column for name, column in rows.columns.items() if name in wanted})


def _fillers(like: Rows, num: int) -> Rows:
    """`num` filler rows of one token and no response, with the columns of `like`."""

    def empty(column: Ragged) -> Ragged:
        return Ragged(column.values[:0], offsets_of(torch.zeros(num, dtype=torch.int64)))

    columns = {name: empty(like.ragged(name)) for name in like.columns if name != "prompts"}
    prompts = Ragged(torch.zeros(num, dtype=torch.int64), torch.arange(num + 1))
    return Rows({"prompts": prompts, **columns})
