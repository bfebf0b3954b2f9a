"""Clocks of the lanes that pass states below the device."""

from collections import deque
from dataclasses import replace
from typing import Any

import pytest

from bench.models import llama_of
from terrace.model.blocks import block_specs
from terrace.plan.keep import Keep
from terrace.plan.presets import preset
from terrace.plan.wire import MessageClass
from terrace.program.lowering import build
from terrace.program.program import Program
from terrace.simulate import below
from terrace.simulate.below import Slots
from terrace.simulate.cost import step_costs
from terrace.simulate.critical import critical_path, critical_words, exposed_by_axis
from terrace.simulate.events import simulate
from terrace.simulate.priced_instruction import Stream
from terrace.simulate.recording import record
from tests.support.toys import MODELS, cluster_of

BLOCKS = MODELS["llama tied"].declared


def program(rate: float, slots: int = 4, piece: int = 64) -> Program:
    cluster = cluster_of(2)
    disk = replace(cluster.device.below["disk"], read_bytes_per_s=rate, write_bytes_per_s=rate)
    cluster = replace(cluster, device=replace(cluster.device, below={"disk": disk}))
    keep = Keep(optimizer="disk", ring=slots, piece=piece)
    return build(cluster, replace(preset("zero1", cluster), keep=keep), BLOCKS, 2)


def naive(stream: Stream, slots: int, steps: int, between_s: float) -> float:
    """The end of the last of some steps: every piece of every step in a list, each with the slot that it takes."""
    now_s = read_s = write_s = 0.0
    free = deque([0.0] * slots)
    for step in range(steps):
        now_s += between_s * (step > 0)
        for _ in range(stream.number):
            # A slot is read into as soon as it is free, also before the step begins.
            read_s = max(free.popleft(), read_s) + stream.read_s
            now_s = max(now_s, read_s) + stream.update_s
            write_s = max(write_s, now_s) + stream.write_s
            free.append(write_s)
    return now_s


@pytest.mark.parametrize(
    ("read_s", "write_s", "update_s"), [(3.0, 1.0, 0.5), (1.0, 3.0, 0.5), (1.0, 1.0, 4.0), (2.0, 2.0, 2.0)]
)
@pytest.mark.parametrize("number", [4, 9, 200])
def test_lanes_are_those_of_a_list_of_pieces(number: int, read_s: float, write_s: float, update_s: float) -> None:
    stream = Stream(number, read_s, write_s, update_s)
    slots, now_s = Slots(program(1e9)), 0.0
    for step in range(3):
        now_s += 7.0 * (step > 0)
        now_s = slots.passed_s(stream, now_s) + number * update_s
    assert now_s == pytest.approx(naive(stream, 4, 3, 7.0), rel=0.01)


def test_a_long_stream_is_extrapolated(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(1000, 2.0, 3.0, 0.5)
    quick = Slots(program(1e9)).passed_s(stream, 0.0)
    monkeypatch.setattr(below, "_EXACT", 1000)
    assert quick == pytest.approx(Slots(program(1e9)).passed_s(stream, 0.0), rel=1e-9)


def test_a_step_takes_as_long_as_its_slow_disk_reads_parameters() -> None:
    """Two reads of every block and one write; the lanes work beside each other, and beside all else."""
    cluster = cluster_of(1)
    disk = replace(cluster.device.below["disk"], read_bytes_per_s=1e6, write_bytes_per_s=4e6)
    cluster = replace(cluster, device=replace(cluster.device, below={"disk": disk}))
    built = build(cluster, replace(preset("ddp", cluster), keep=Keep(params="disk", piece=64)), BLOCKS, 1)
    costs = step_costs(built, [1e3] * len(BLOCKS))
    report, recorded = simulate(built, costs), record(built, costs)
    assert recorded.report.time_s == report.time_s
    read_s = built.sent_bytes[MessageClass.KEEP_READ, "disk"] / 1e6
    written_s = built.sent_bytes[MessageClass.KEEP_WRITE, "disk"] / 4e6
    assert read_s < report.step_s < (read_s + written_s) * 1.01
    spans = [span for span in recorded.spans[recorded.first :] if span.category == MessageClass.KEEP_READ]
    assert sum(span.end_s - span.start_s for span in spans) == pytest.approx(read_s)
    waits = sum(exposed_by_axis([recorded]).values())
    assert waits == pytest.approx(sum(each for name, each in report.time_s.items() if name.startswith("wait ")))


@pytest.mark.parametrize("update", ["adamw", "muon"])
@pytest.mark.parametrize("sizes", [(1,), (2, 2)])
@pytest.mark.parametrize(
    "states",
    [
        ("optimizer",),
        ("params",),
        ("grads",),
        ("params", "grads"),
        ("optimizer", "params", "grads"),
        ("activations",),
        ("optimizer", "params", "activations"),
    ],
)
def test_the_critical_path_and_the_waits_name_the_medium(
    states: tuple[str, ...], sizes: tuple[int, ...], update: str
) -> None:
    cluster = cluster_of(*sizes)
    disk = replace(cluster.device.below["disk"], read_bytes_per_s=1e6, write_bytes_per_s=4e6)
    cluster = replace(cluster, device=replace(cluster.device, below={"disk": disk}))
    keep = Keep(piece=64, **dict.fromkeys(states, "disk"))  # type: ignore[arg-type]
    built = build(cluster, replace(preset("zero3", cluster), update=update, unit=2, keep=keep), BLOCKS, 2, 64)
    recorded = record(built, step_costs(built, [1e3] * len(BLOCKS)))
    path, clock_s = critical_path(recorded), 0.0
    for piece in path.pieces:
        assert piece.start_s == pytest.approx(clock_s, abs=1e-12)
        clock_s = piece.end_s
    step_s, time_s = recorded.report.step_s, recorded.report.time_s
    assert sum(path.seconds.values()) == pytest.approx(step_s)
    below_s = sum(spent for (place, _), spent in path.seconds.items() if place == "disk")
    assert f"{round(100 * below_s / step_s)} % the disk (" in critical_words(path)
    assert below_s > 0.5 * step_s
    exposed = exposed_by_axis([recorded])
    assert exposed.keys() <= {("disk", "disk"), *(("data", tier) for tier in built.layout.tiers)}
    assert sum(exposed.values()) == pytest.approx(sum(each for name, each in time_s.items() if "wait " in name))


@pytest.mark.parametrize("changes", [{}, {"unit": 4}, {"recompute": ("*",)}])
def test_inputs_pass_beside_computing_where_the_disk_is_fast_and_delay_it_by_their_bytes_where_not(
    changes: dict[str, Any],
) -> None:
    """Forwards wait for writes and backwards for reads: both lanes are never busy at once."""
    cluster, blocks = cluster_of(1), MODELS["deep llama tied"].declared

    def step(rate: float, keep: Keep) -> tuple[dict[str, float], float]:
        disk = replace(cluster.device.below["disk"], read_bytes_per_s=rate, write_bytes_per_s=rate / 2)
        there = replace(cluster, device=replace(cluster.device, below={"disk": disk}))
        built = build(there, replace(preset("ddp", there), keep=keep, **changes), blocks, 4, 64)
        costs = step_costs(built, [1e6] * len(blocks))
        report = simulate(built, costs)
        assert record(built, costs).report.time_s == report.time_s
        return dict(report.time_s), built.sent_bytes.get((MessageClass.KEEP_READ, "disk"), 0)

    resident, _ = step(1e9, Keep())
    fast, moved = step(1e15, Keep(activations="disk"))
    slow, _ = step(1e4, Keep(activations="disk"))
    assert sum(fast.values()) == pytest.approx(sum(resident.values()), rel=1e-6)
    assert slow["wait keep_read"] + slow["wait keep_write"] == pytest.approx(3 * moved / 1e4, rel=0.05)
    assert slow["wait keep_write"] == pytest.approx(2 * moved / 1e4, rel=0.05)


def test_a_slower_disk_makes_the_step_longer_by_its_bytes() -> None:
    flops = [1e6] * len(BLOCKS)

    def step(rate: float) -> tuple[float, float]:
        built = program(rate)
        costs = step_costs(built, flops)
        report = simulate(built, costs)
        recorded = record(built, costs)
        assert recorded.report.time_s == report.time_s
        assert any(recorded.lane_name(lane) == "disk" for lane in recorded.lanes)
        return report.step_s, sum(size for key, size in report.sent_bytes.items() if key[0] == "keep_read")

    fast, moved = step(1e15)
    slow, _ = step(1e6)
    assert slow - fast == pytest.approx(2 * moved / 1e6, rel=0.05), "two ranks share it"
    resident = replace(program(1e6).plan, keep=Keep())
    without = build(program(1e6).cluster, resident, BLOCKS, 2)
    assert fast == pytest.approx(simulate(without, step_costs(without, flops)).step_s, rel=1e-3)


def queued(blocks: int, slots: int, read_s: float, write_s: float, gradient_s: float, steps: int) -> float:
    """Seconds of the last of some steps that compute nothing: reads and writes of equal blocks, as they are queued."""
    writer_s = now_s = begin_s = 0.0
    there = deque((slot + 1) * read_s for slot in range(slots))
    reader_s = there[-1]
    for _ in range(steps):
        begin_s = now_s
        for _ in range(blocks):  # a backward waits for the write of the gradient before
            now_s, writer_s = max(now_s, writer_s), max(now_s, writer_s) + gradient_s
        now_s = max(now_s, writer_s)
        gradients = deque[float]()
        for block in range(blocks):
            for _ in range((block == 0) + (block < blocks - 1)):  # its own, and the next ones ahead
                reader_s = max(reader_s, now_s) + gradient_s
                gradients.append(reader_s)
            now_s = max(now_s, gradients.popleft(), there.popleft())
            writer_s = max(writer_s, now_s) + write_s
            reader_s = max(reader_s, writer_s) + read_s  # a piece waits in the queue for the write of its slot
            there.append(reader_s)
    return now_s - begin_s


@pytest.mark.parametrize("rate", [1e6, 1e7])
def test_gradients_are_read_before_pieces_whose_slots_are_still_written(rate: float) -> None:
    """States and gradients on one disk: the order in which a rank queues their reads."""
    config = llama_of(128, 8, 4, 4, 256, 64)
    layers = block_specs(config)[1:-1]
    cluster = cluster_of(1)
    disk = replace(cluster.device.below["disk"], read_bytes_per_s=rate, write_bytes_per_s=rate)
    cluster = replace(cluster, device=replace(cluster.device, below={"disk": disk}))
    keep = Keep(optimizer="disk", grads="disk", ring=3)
    built = build(cluster, replace(preset("ddp", cluster), compute="bf16", keep=keep), layers, 1)
    found = simulate(built, step_costs(built, [1.0] * len(layers))).step_s
    piece, gradient = (12 * layers[0].num_trainable / rate, 4 * layers[0].num_trainable / rate)
    assert found == pytest.approx(queued(len(layers), 3, piece, piece, gradient, 4), rel=0.05)
