"""A case with and without states or inputs of layers below the device."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from terrace.checkpoint.reading import Checkpoint, resume
from terrace.checkpoint.writing import save
from terrace.cluster.cluster import Cluster
from terrace.launch.start import LocalPool, World
from terrace.plan.keep import Keep
from terrace.plan.presets import preset
from terrace.program.program import Program
from terrace.runtime.settings import OptimizerConfig
from terrace.runtime.tracing import Tracer
from tests.support.checkpoints import contents, differing, make, train
from tests.support.parity import Case, data_rows, engine_of, run
from tests.support.toys import cluster_of

OPTIMIZERS = {
    "adamw": OptimizerConfig(lr=3e-3),
    "lion": OptimizerConfig(name="lion", lr=3e-3),
    "muon": OptimizerConfig(name="muon", lr=3e-3),
    "galore": OptimizerConfig(name="galore", lr=3e-3, rank=3, check_every=2),
    "lsp": OptimizerConfig(name="lsp", lr=3e-3, rank=3, density=2, check_every=2),
}


def check_same_bits(pool: LocalPool, cluster: Cluster, case: Case, keep: Keep) -> None:
    """Losses, gradient norms and parameters are equal bit by bit, and bytes are those of the program."""
    cases = [replace(case, plan=replace(case.plan, keep=each)) for each in (Keep(), keep)]
    before, after = run(pool, cluster, cases)
    assert not any(outcome.complaint for outcome in after), [outcome.complaint for outcome in after]
    for one, other in zip(before, after, strict=True):
        assert one.losses == other.losses
        assert one.norms == other.norms
        assert torch.equal(one.parameters, other.parameters)


def traced_steps(world: World, keep: Keep) -> tuple[Program, list[tuple[str, str]]]:
    """The program of a small model on one rank, and (lane, category) of each span of the second of two traced steps."""
    cluster = cluster_of(1)
    case = Case(replace(preset("ddp", cluster), keep=keep), model="llama tied")
    engine = engine_of(world, cluster, case)
    tracer = Tracer(engine)
    for step in range(2):
        with tracer.step():
            engine.step(data_rows(engine, case, step), 1e-3)
    engine.drain()
    recording = tracer.recordings()[-1]
    spans = [(recording.lane_name(span.lane), span.category) for span in recording.spans[recording.first :]]
    engine.close()
    return engine.program, spans


def resumed(
    world: World,
    folder: Path,
    stored: dict[str, Any],
    optimizer: OptimizerConfig,
    compute: str = "fp32",
    model: str = "llama tied",
) -> tuple[list[list[float]], list[list[str]]]:
    """Losses of steps 3 and 4 without a stop, and after a resume with and without states below the device.

    Beside them the tensors of each resume's first checkpoint that differ.
    """
    engine = make(world, (2,), "zero1", compute, model=model, optimizer=optimizer, stored=stored)
    train(engine, 0, 2)
    engine.drain()
    save(engine, folder, 2, {}, 2)
    found, names = [train(engine, 2, 4)], list[list[str]]()
    engine.close()
    (checkpoint,) = (folder / "checkpoints").glob("step-*")
    for changes in ({}, {"keep": Keep()}):
        again = make(world, (2,), "zero1", compute, model=model, optimizer=optimizer, stored=stored | changes, scale=9)
        resume(again, Checkpoint(checkpoint))
        again.drain()
        copy = folder / f"again{len(names)}"
        save(again, copy, 2, {}, 2)
        names.append(differing(contents(checkpoint), contents(next((copy / "checkpoints").glob("step-*")))))
        found.append(train(again, 2, 4))
        again.close()
    return found, names
