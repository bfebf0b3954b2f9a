"""A plan on the CPU and on the virtual device, in one process for each rank."""

import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from terrace.checkpoint.layout import folder_of
from terrace.checkpoint.reading import Checkpoint, resume
from terrace.checkpoint.writing import save
from terrace.cluster.below import Medium
from terrace.cluster.cluster import Cluster
from terrace.launch.start import LocalPool, World
from terrace.plan.keep import ALL_ON_DEVICE
from terrace.plan.plan import Plan
from terrace.plan.products import FP8
from terrace.runtime.batch import Batch
from tests.support.lanes import use_lane
from tests.support.parity import Case, engine_of
from tests.support.toys import MODELS, cluster_of
from tests.virtual_cuda.findings import Fault
from tests.virtual_cuda.norms import fused
from tests.virtual_cuda.plans import Planned
from tests.virtual_cuda.rehearsal import rehearsed
from tests.virtual_cuda.rules import Entry, faults_of

DEVICE = torch.device("cuda", 0)


@dataclass(frozen=True)
class Rehearsed:
    """What a rank of a case has found."""

    difference: float  # largest of any number from the CPU's
    faults: tuple[str, ...]
    waits: dict[tuple[str, str], int]
    log: tuple[Entry, ...]
    error: str = ""


def on_cuda(cluster: Cluster) -> Cluster:
    """The cluster with a device of CUDA, which has products in 8 bits."""
    device = cluster.device
    peaks = {**device.peak_flops_per_s, FP8: max(device.peak_flops_per_s.values())}
    host = Medium(memory_bytes=1e9, read_bytes_per_s=1e10, write_bytes_per_s=1e10, update_bytes_per_s=1e10)
    below = {**device.below, "host": host}
    return replace(cluster, device=replace(device, backend="cuda", peak_flops_per_s=peaks, below=below))


def numbers(world: World, cluster: Cluster, case: Case, device: torch.device) -> list[float]:
    """Losses, gradient norms and this rank's parameters of a case."""
    blocks = MODELS[case.model].blocks(torch.float64)
    engine = engine_of(world, cluster, case, blocks, device=device)
    found: list[float] = []
    for step in range(case.num_steps):
        result = engine.step(on_device(case.batches(engine, case, step), device), case.optimizer.lr)
        found += [result.loss, result.grad_norm, *result.router_losses.values()]
    engine.drain()
    engine.check_bytes()
    found += [value for flat in engine.state for value in flat.working.values.cpu().flatten().tolist()]
    engine.close()
    return found


def resumed(world: World, cluster: Cluster, case: Case, device: torch.device, folder: Path) -> list[float]:
    """The same of a case that is saved after each step, and goes on in a new engine."""
    found: list[float] = []
    for step in range(case.num_steps):
        engine = engine_of(world, cluster, case, MODELS[case.model].blocks(torch.float64), device=device)
        if step:
            resume(engine, Checkpoint(folder_of(folder, step)))
        result = engine.step(on_device(case.batches(engine, case, step), device), case.optimizer.lr)
        found += [result.loss, result.grad_norm]
        engine.drain()
        save(engine, folder, step + 1, {}, keep=0)
        found += [value for flat in engine.state for value in flat.working.values.cpu().flatten().tolist()]
        engine.close()
    return found


def difference(found: Sequence[float], wanted: Sequence[float]) -> float:
    """The largest difference of two numbers, relative above 1; infinite if there are not as many, or one is nan."""
    if len(found) != len(wanted):
        return math.inf
    pairs = zip(found, wanted, strict=True)
    return max(math.inf if one != one or two != two else abs(one - two) / max(1.0, abs(two)) for one, two in pairs)


def on_device(batches: Sequence[Batch], device: torch.device) -> Sequence[Batch]:
    """Micro-batches where `train` has them."""
    return [pinned(batch).to(device) for batch in batches] if device.type == "cuda" else batches


def pinned(batch: Batch) -> Batch:
    """The batch in page-locked memory, as `train` makes it."""
    named = ((each.name, getattr(batch, each.name)) for each in fields(batch))
    locked: dict[str, Any] = {name: value.pin_memory() for name, value in named if isinstance(value, Tensor)}
    return replace(batch, **locked)


def rehearse(world: World, cluster: Cluster, cases: Sequence[Case], completes: str, limit_s: float) -> list[Rehearsed]:
    """Run every case on the CPU, and again on the virtual device."""
    found = []
    for case in cases:
        with use_lane("eager"), fused():
            wanted = numbers(world, cluster, replace(case, plan=_of_a_cpu(case.plan)), torch.device("cpu"))
        found.append(run(world, cluster, case, wanted, completes, limit_s))
    return found


def _of_a_cpu(plan: Plan) -> Plan:
    # Where states rest changes no bit, and a CPU has no products that are fused with messages.
    return replace(plan, keep=ALL_ON_DEVICE, tensor_chunks=1 if plan.fuses_tensor else plan.tensor_chunks)


def run(
    world: World,
    cluster: Cluster,
    case: Case,
    wanted: Sequence[float] | None,
    completes: str,
    limit_s: float,
    work: Callable[[World, Cluster, Case, torch.device], list[float]] = numbers,
) -> Rehearsed:
    """Run a case on the virtual device, and compare its numbers with those `wanted`, if any."""
    error, far = "", math.inf
    with rehearsed(completes=completes, limit_s=limit_s, agrees=wanted is None) as rehearsal:
        try:
            found = work(world, on_cuda(cluster), case, DEVICE)
            far = difference(found, found if wanted is None else wanted)
        except Exception:
            error = traceback.format_exc()
    faults = tuple(map(str, rehearsal.faults))
    return Rehearsed(far, faults, dict(rehearsal.findings.waits), tuple(rehearsal.log), error)


def check_resumed(pool: LocalPool, found: Sequence[Planned], folder: Path) -> None:
    """Runs that are saved and resumed have the CPU's numbers, and its files."""
    cluster = cluster_of(*found[0].sizes)
    for number, each in enumerate(found):
        places = [folder / f"{number} {name}" for name in ("cpu", "cuda")]
        outcomes = pool.run(cluster.world_size, _resumed, cluster, each.case, *places, timeout_s=300.0)
        assert not [outcome.error for outcome in outcomes if outcome.error], outcomes[0].error
        assert not [outcome.faults for outcome in outcomes if outcome.faults], outcomes[0].faults
        assert max(outcome.difference for outcome in outcomes) <= each.within, each.case
        for path in sorted(places[0].rglob("*.safetensors")):
            one, other = (load_file(place / path.relative_to(places[0])) for place in places)
            assert one.keys() == other.keys(), each.case
            far = max(difference(one[name].double().flatten().tolist(), other[name].flatten().tolist()) for name in one)
            assert far <= each.within, (each.case, far)


def _resumed(world: World, cluster: Cluster, case: Case, on_cpu: Path, on_gpu: Path) -> Rehearsed:
    with use_lane("eager"), fused():
        wanted = resumed(world, cluster, case, torch.device("cpu"), on_cpu)
    return run(world, cluster, case, wanted, "late", 60.0, partial(resumed, folder=on_gpu))


def check(
    pool: LocalPool, found: Sequence[Planned], *, completes: str = "late", limit_s: float = 60.0
) -> list[list[Rehearsed]]:
    """Every case has the CPU's numbers on every rank, and no fault is noticed. Returns outcomes by rank and case.

    All cases have the tiers of the first.
    """
    cluster, cases = cluster_of(*found[0].sizes), [each.case for each in found]
    by_rank = pool.run(cluster.world_size, rehearse, cluster, cases, completes, limit_s, timeout_s=300.0)
    for (case, within), outcomes in zip((each[1:3] for each in found), zip(*by_rank, strict=True), strict=True):
        assert not [each.error for each in outcomes if each.error], (case, outcomes[0].error or outcomes[1].error)
        faults: list[str | Fault] = [fault for each in outcomes for fault in each.faults]
        faults += faults_of([each.log for each in outcomes])
        assert not faults, (case, "\n".join(map(str, faults)))
        assert max(each.difference for each in outcomes) <= within, (case, [each.difference for each in outcomes])
    return by_rank
