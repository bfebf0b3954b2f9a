"""Measuring the model state of a rank twice: by looking at live tensors, and by the engine's own meter.

The live measure knows nothing of the runtime: it asks the garbage collector for every tensor made since
the start and adds up their storages, at every instruction and whenever the meter hears of an allocation.

The eager lane of tests.support.lanes makes gathers as early as possible, and the lazy one lets gradients wait for their
reduction as long as possible.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from terrace.cluster.cluster import Cluster
from terrace.comm.codecs import cpu, sparse_cpu
from terrace.comm.ledger import Meter
from terrace.launch.start import World
from terrace.model.spec import BlockSpec
from terrace.plan.plan import Plan
from terrace.runtime import comm as comm_module
from terrace.runtime.batch import Batch
from terrace.runtime.engine import Engine
from terrace.runtime.setup import Blocks, RankSetup, Workload
from tests.support.lanes import use_lane


def live_bytes() -> int:
    """Bytes of all storages that tensors made since the last `gc.freeze` refer to."""
    sizes = {}
    for candidate in gc.get_objects():
        if issubclass(type(candidate), Tensor) and candidate.device.type == "cpu":
            storage = candidate.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    for scratch in codec_scratch():
        sizes.pop(scratch.untyped_storage().data_ptr(), None)  # of one size whatever the plan: not model state
    return sum(sizes.values())


def codec_scratch() -> list[Tensor]:
    """The buffers that the block codecs of this thread keep between calls."""
    return [buffer for module in (cpu, sparse_cpu) for buffer in getattr(module._local, "buffers", ())]


class _WatchedMeter(Meter):
    """A meter that calls `heard` at each allocation."""

    def __init__(self, heard: Callable[[], None]) -> None:
        super().__init__()
        self._heard = heard

    def add(self, category: str, num_bytes: int) -> None:
        super().add(category, num_bytes)
        if num_bytes > 0:
            self._heard()


def _import_all_of_torch() -> None:
    """Have torch import the modules of an optimizer's first use, so that scans need not look through them."""
    leaf = torch.zeros(1)
    leaf.grad = torch.zeros(1)
    torch.optim.AdamW([leaf], fused=True).step()


@dataclass(frozen=True)
class Held:
    """Peaks of a run: live bytes in all, and the meter's by category. `specs` are the engine's blocks."""

    live_bytes: int
    metered_bytes: dict[str, int]
    specs: tuple[BlockSpec, ...]


def measure(
    build_blocks: Callable[[], list[nn.Module]],
    cluster: Cluster,
    plan: Plan,
    num_micros: int,
    lane: str,
    batch: Batch,
    rank: int = 0,
    look_at_tensors: bool = True,
) -> Held:
    """Run two steps and return the peaks. `batch` is every micro-batch.

    Rank 0 alone looks at tensors, and not while a thread makes and drops them; others report 0 live bytes.
    """
    peak = [0]
    patched: Any = comm_module
    scans = look_at_tensors and rank == 0 and lane != "thread"

    def look() -> None:
        if scans:
            peak[0] = max(peak[0], live_bytes())

    def look_at_instruction(counter: int, instruction: object, waiting_on: tuple[int, ...]) -> None:
        look()

    if scans:
        _import_all_of_torch()
        gc.collect()
        gc.freeze()
    original = patched.Meter
    patched.Meter = lambda: _WatchedMeter(look)
    try:
        with use_lane(lane):
            engine = Engine(
                Blocks(build_blocks()),
                Workload(cluster=cluster, plan=plan, num_micros=num_micros),
                lambda output, labels: output.float().square().sum(),
                setup=RankSetup(rank=rank, progress=look_at_instruction),
            )
        if scans:
            gc.collect()  # modules may refer to themselves; their first parameters are gone after this
        peak[0] = 0  # building holds whole parameters for a moment; only steps count
        for _ in range(2):
            engine.step([batch] * num_micros, 1e-3)
        engine.check_bytes()
        metered = dict(engine.report({}).memory_bytes)
        engine.close()
        return Held(peak[0], metered, engine.program.blocks)
    finally:
        patched.Meter = original


class WideBlock(nn.Module):
    """One matrix and one vector, so wide that activations weigh nothing beside them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.vector = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + torch.nn.functional.linear(x, self.matrix, self.vector)
        return out


WIDTH = 160


def wide_blocks(number: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [WideBlock(WIDTH) for _ in range(number)]


def measure_wide(world: World, cluster: Cluster, runs: Sequence[tuple[Plan, int, str]], num_blocks: int) -> list[Held]:
    """Measure (plan, micro-batches, lane) on this rank."""
    results = []
    for plan, num_micros, lane in runs:
        dtype = torch.bfloat16 if plan.compute == "bf16" else torch.float32
        batch = Batch(torch.ones(1, 2, WIDTH, dtype=dtype), torch.zeros(1, 2, dtype=torch.int64))
        results.append(measure(partial(wide_blocks, num_blocks), cluster, plan, num_micros, lane, batch, world.rank))
    return results
