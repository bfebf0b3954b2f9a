"""A small policy for the task sort, its settings on one rank and on four, and calls as a controller makes them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from terrace.launch.world import World
from terrace.rl.calls.call import calls_of
from terrace.rl.calls.host import tokens_of
from terrace.rl.calls.layout import RoleLayout
from terrace.rl.resolve import resolve
from terrace.rl.values.rows import Rows, cat
from terrace.rl.workers.settings import EngineSettings
from tests.support.parity import exact
from tests.support.pipelines import OUTER, pipelined
from tests.support.toys import cluster_of

NUM_PROMPTS, MINI_BATCH, NUM_TOKENS = 6, 8, 5
MODEL = replace(
    resolve("sort", None, {}, {}).model, hidden_size=32, num_layers=2, intermediate_size=48, head_dim=8, rotary_dim=8
)
TOLERANCE = 1e-10
Say = Callable[..., Any]


def settings_of(num_ranks: int, **more: Any) -> EngineSettings:
    cluster = cluster_of(1) if num_ranks == 1 else cluster_of(2, 2)
    plan = exact("ddp", cluster) if num_ranks == 1 else pipelined("zero3", OUTER, "1f1b")
    plan = replace(plan, micro_batch=MINI_BATCH if num_ranks == 1 else 2)
    sequence, num_micros = 11 + NUM_TOKENS - 1, 1 if num_ranks == 1 else 2
    made = EngineSettings(model=MODEL, cluster=cluster, plan=plan, num_micros=num_micros, sequence=sequence, seed=3)
    return replace(made, **more)


def spoken_to(world: World | None, worker: Any, layout: RoleLayout) -> Say:
    """Calls of a worker as a controller makes them, from every rank of its world."""

    def say(method: str, rows: Rows | None = None, **values: Any) -> Any:
        call, rank = calls_of(type(worker))[method], 0 if world is None else world.rank
        given = () if rows is None else (rows.part(*layout.bounds(call, tokens_of(rows))[rank]),)
        result = getattr(worker, method)(*given, **values)
        found = [result]
        if world is not None:
            found = [None] * world.world_size
            dist.all_gather_object(found, result)
        taken = [found[source] for source in layout.sources(call)]
        return cat(taken) if isinstance(taken[0], Rows) else taken[0]

    return say
