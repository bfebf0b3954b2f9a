"""Predicted steps whose updates run on the host's cores."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from bench.models import llama_of
from terrace.cluster.below import Medium
from terrace.model.blocks import block_specs
from terrace.model.spec import BlockSpec
from terrace.plan.keep import CORES, Keep
from terrace.plan.kept import updated_bytes
from terrace.plan.presets import preset
from terrace.plan.wire import MessageClass
from terrace.program.lowering import build
from terrace.program.program import Program
from terrace.simulate.cost import Costs, step_costs
from terrace.simulate.critical import critical_path, critical_words, exposed_by_axis
from terrace.simulate.events import simulate
from terrace.simulate.recording import record
from tests.support.toys import MODELS, cluster_of

BLOCKS = MODELS["llama tied"].declared
ON_HOST = Keep(optimizer="host", grads="host", update="host", piece=1 << 16)


def priced(
    name: str,
    sizes: tuple[int, ...],
    link: float,
    cores: float,
    keep: Keep = ON_HOST,
    blocks: Sequence[BlockSpec] = BLOCKS,
) -> tuple[Program, Costs]:
    cluster = cluster_of(*sizes)
    host = Medium(memory_bytes=1e9, read_bytes_per_s=link, write_bytes_per_s=link, update_bytes_per_s=cores)
    below = {**cluster.device.below, "host": host}
    cluster = replace(cluster, device=replace(cluster.device, backend="cuda", below=below))
    built = build(cluster, replace(preset(name, cluster), keep=keep, compute="bf16"), blocks, 1)
    return built, step_costs(built, [1e3] * len(blocks))


def test_updates_follow_their_gradients_and_parameters_their_updates() -> None:
    """A list of moments by hand, for passes that take no time: out, update, back, each lane in its order."""
    program, costs = priced("ddp", (1,), 1e6, 2e6)
    out_s = back_s = cores_s = 0.0
    leaving = {}
    blocks = range(len(BLOCKS))
    for block in reversed(blocks):
        out_s += costs.gradients_s(block)
        leaving[block] = out_s
    for block in blocks:
        (flat,) = program.model.flats[block]
        cores_s = max(cores_s, out_s) + updated_bytes(program.plan, flat) / 2e6  # CLIP waits for all gradients
        back_s = max(back_s, cores_s) + costs.gradients_s(block)
    report = simulate(program, costs)
    assert report.step_s == pytest.approx(back_s, rel=0.01)
    assert report.sent_bytes[MessageClass.KEEP_READ, "host"] == report.sent_bytes[MessageClass.KEEP_WRITE, "host"]


@pytest.mark.parametrize("sizes", [(1,), (2, 2)])
@pytest.mark.parametrize("name", ["ddp", "zero1", "zero3"])
@pytest.mark.parametrize("keep", [ON_HOST, replace(ON_HOST, params="host"), replace(ON_HOST, optimizer="disk")])
def test_a_recording_has_the_lane_of_the_hosts_cores(name: str, sizes: tuple[int, ...], keep: Keep) -> None:
    program, costs = priced(name, sizes, 1e6, 1e6, keep)
    report, recorded = simulate(program, costs), record(program, costs)
    assert recorded.report.time_s == report.time_s
    spans = [span for span in recorded.spans[recorded.first :] if recorded.lane_name(span.lane) == CORES]
    assert len(spans) == sum(block.num_trainable > 0 for block in BLOCKS)
    path = critical_path(recorded)
    assert sum(path.seconds.values()) == pytest.approx(report.step_s, rel=0.01)
    assert path.seconds[CORES, "update"] > 0
    assert f"the {CORES} (update" in critical_words(path)
    waits = sum(exposed_by_axis([recorded]).values())
    assert waits <= sum(each for name, each in report.time_s.items() if name.startswith("wait ")) * (1 + 1e-9)


def test_updates_on_the_host_beat_the_ring_where_the_link_is_slow() -> None:
    """12 B a parameter each way through the ring, 2 B for the host's cores."""
    link, fast, slow = 1e6, 1e8, 1e6
    ring, blocks = Keep(optimizer="host", piece=1 << 12, ring=2), block_specs(llama_of(64, 4, 4, 4, 128, 256))
    on_device, on_cores, by_slow = (
        simulate(*priced("ddp", (1,), link, cores, keep, blocks)).step_s
        for cores, keep in ((fast, ring), (fast, ON_HOST), (slow, ON_HOST))
    )
    assert on_cores < 0.4 * on_device
    assert by_slow > on_device


def test_updates_in_the_backward_begin_with_the_last_block() -> None:
    """By hand, for passes that take no time: each update follows its gradient, and the next forward the last update."""
    program, costs = priced("ddp", (1,), 1e6, 2e6, replace(ON_HOST, order="backward"))
    out_s = back_s = cores_s = 0.0
    for block in reversed(range(len(BLOCKS))):
        (flat,) = program.model.flats[block]
        out_s += costs.gradients_s(block)
        cores_s = max(cores_s, out_s) + updated_bytes(program.plan, flat) / 2e6
        back_s = max(back_s, cores_s) + costs.gradients_s(block)
    report = simulate(program, costs)
    assert report.step_s == pytest.approx(back_s, rel=0.01)
    assert record(program, costs).report.time_s == report.time_s
    at_the_end = simulate(*priced("ddp", (1,), 1e6, 2e6)).step_s
    assert report.step_s < at_the_end
