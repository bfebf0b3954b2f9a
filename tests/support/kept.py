"""A case with and without states or inputs of layers below the device."""

from dataclasses import replace

import torch

from terrace.cluster.cluster import Cluster
from terrace.launch.start import LocalPool, World
from terrace.plan.keep import Keep
from terrace.plan.presets import preset
from terrace.program.program import Program
from terrace.runtime.tracing import Tracer
from tests.support.parity import Case, data_rows, engine_of, run
from tests.support.toys import cluster_of


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
