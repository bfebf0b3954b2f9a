"""Messages of two tiers on one bus: a rank's clocks, by hand and against links of their own."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrace.base.errors import ClusterError
from terrace.cluster.cluster import Cluster
from terrace.cluster.presets import load_cluster, parse_cluster
from terrace.plan.presets import preset
from terrace.program.instruction import Op
from terrace.program.lowering import build, build_stages
from terrace.program.recording import COMPUTE
from terrace.simulate.below import Moment
from terrace.simulate.bus import Bus
from terrace.simulate.cost import step_costs
from terrace.simulate.events import simulate
from terrace.simulate.priced_instruction import Event
from terrace.simulate.rank import Rank
from terrace.simulate.recording import record
from terrace.simulate.stages import record_stages, simulate_stages
from tests.support.toys import MODELS, cluster_of

START: Moment = (0.0, -1)


def on_a_bus(cluster: Cluster, share: float) -> Cluster:
    """The cluster with its two innermost tiers on one bus."""
    inner, outer, *others = cluster.tiers
    return replace(cluster, tiers=(inner, replace(outer, bus={inner.name: share}), *others))


def rank_on(share: float, backend: str = "cuda") -> Rank:
    cluster = on_a_bus(cluster_of(2, 2), share)
    device = replace(cluster.device, backend=backend)  # type: ignore[arg-type]
    blocks = MODELS["llama tied"].declared
    return Rank(build(replace(cluster, device=device), preset("ddp", cluster), blocks, 1))


def message(seconds: float, lane: int) -> Event:
    return Event(Op.GATHER, 0, seconds, lane, "")


def computing(seconds: float) -> Event:
    return Event(Op.FORWARD, 0, seconds, -1, "forward")


def wall_s(rank: Rank) -> float:
    return sum(rank.time_s.values())


def test_two_messages_at_once_take_as_long_as_one_after_the_other() -> None:
    rank = rank_on(1.0)
    first, second = rank.issue(message(2.0, 0), START), rank.issue(message(3.0, 1), START)
    rank.wait(first, "wait")
    assert wall_s(rank) == 4.0
    rank.wait(second, "wait")
    assert wall_s(rank) == 5.0


def test_computing_is_not_slowed_by_the_bus() -> None:
    rank = rank_on(0.5)
    first, second = rank.issue(message(2.0, 0), START), rank.issue(message(2.0, 1), START)
    rank.compute(computing(1.5))  # half of the 3 s that both take
    assert (wall_s(rank), rank.now_s) == (1.5, 1.0)
    late = rank.issue(message(4.0, 0), START)  # begins when the first has arrived, at 3, and meets nobody
    rank.compute(computing(2.0))
    assert wall_s(rank) == 3.5
    rank.wait(second, "wait")
    rank.wait(first, "wait")
    assert wall_s(rank) == 3.5
    rank.wait(late, "wait")
    assert wall_s(rank) == 7.0


def test_cores_and_a_bus_are_counted_apart() -> None:
    """On a CPU messages that need half of the cores each leave none to computing, and are slowed by the bus as well."""
    rank = rank_on(1.0, backend="cpu")
    for lane in (0, 1):
        rank.issue(Event(Op.GATHER, 0, 2.0, lane, "", penalty=0.5), START)
    rank.compute(computing(4.0))
    # 2 s of the clock, which the bus makes 4, and 2 s of cores for the messages.
    assert wall_s(rank) == 6.0


stretches = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=5)


@settings(deadline=None, max_examples=60)
@given(lanes=st.tuples(stretches, stretches, stretches), share=st.sampled_from((0.25, 1.0)), asked=st.integers(0, 30))
def test_the_clock_and_the_wall_agree(lanes: tuple[list[tuple[int, int]], ...], share: float, asked: int) -> None:
    """Against a count, in quarters of a second, of the lanes that are busy."""
    bus, busy = Bus([(1, 0, share)]), [set[int](), set[int](), set[int]()]
    for lane, each in enumerate(lanes):
        end = 0
        for gap, size in each:
            begin, end = end + gap, end + gap + size
            bus.add(lane, float(begin), float(end))
            busy[lane] |= set(range(4 * begin, 4 * end))
    now = 2.0
    both = busy[0] & busy[1]
    longer_s = share * sum(0.25 for quarter in both if 8 <= quarter < 8 + 4 * asked)
    assert bus.longer_s(now, float(asked)) == pytest.approx(longer_s)
    assert bus.clock_s(now, asked + longer_s) == pytest.approx(float(asked))


@pytest.mark.parametrize("name", ["zero3", "three-level", "hsdp"])
def test_a_step_on_a_bus(name: str) -> None:
    """Between that on links of their own and twice as long; no share is no bus; a recording says the same."""
    cluster = replace(cluster_of(2, 2), device=load_cluster("dgx-a100").device)
    reports = []
    for share in (None, 0.0, 0.5, 1.0):
        own = cluster if share is None else on_a_bus(cluster, share)
        program = build(own, preset(name, own), MODELS["llama tied"].declared, 2)
        costs = step_costs(program, [1e6] * len(program.blocks))
        reports.append(simulate(program, costs))
        recorded = record(program, costs)
        assert recorded.report.time_s == pytest.approx(reports[-1].time_s)
        stream = [span for span in recorded.spans[recorded.first :] if span.lane == COMPUTE]
        assert sum(span.end_s - span.start_s for span in stream) == pytest.approx(recorded.report.step_s)
    alone, none, half, whole = (report.step_s for report in reports)
    assert none == alone
    assert alone <= half <= whole <= 2 * alone
    assert (whole > alone) == (name == "three-level")  # else all messages take one lane


def test_stages_on_a_bus() -> None:
    cluster = on_a_bus(cluster_of(2, 2, 2), 1.0)
    plan = replace(preset("three-level", cluster), mapping={"system": {"pipeline": 2}})
    programs = build_stages(cluster, plan, MODELS["deep llama tied"].declared, 4, sequence=6)
    costs = [step_costs(program, [1e6] * len(program.blocks)) for program in programs]
    for report, recorded in zip(simulate_stages(programs, costs).reports, record_stages(programs, costs), strict=True):
        assert recorded.report.time_s == pytest.approx(report.time_s)


@pytest.mark.parametrize(
    ("tier", "bus", "words"),
    [
        (1, {"package": 1.5}, "tiers.node.bus.package = 1.5 must lie between 0 and 1"),
        (1, {"packet": 1.0}, "did you mean 'package'"),
        (0, {"node": 1.0}, "no tier inside 'package'"),
    ],
)
def test_a_bus_that_is_not_there_is_refused(tier: int, bus: dict[str, float], words: str) -> None:
    table = {
        "name": "lab",
        "device": {
            "name": "d",
            "memory_bytes": 1e9,
            "memory_bandwidth_bytes_per_s": 1e9,
            "peak_flops_per_s": {"fp32": 1e12},
        },
        "tiers": [
            {"name": name, "size": 2, "bandwidth_bytes_per_s": 1e9, "latency_s": 0.0} for name in ("package", "node")
        ],
    }
    tiers: list[dict[str, object]] = table["tiers"]  # type: ignore[assignment]
    tiers[tier]["bus"] = bus
    with pytest.raises(ClusterError, match=words):
        parse_cluster(table)


def test_an_exchange_that_has_yet_to_begin_does_not_go_on_while_the_clock_stands_still() -> None:
    rank = rank_on(0.0, "cpu")
    rank.outside = range(1, 2)
    rank.lanes_s[1], rank.penalties[1] = 5.0, 0.5
    rank.begins_s[1] = 2.0
    assert rank.stand(1.0) == 1.0
    assert rank.lanes_s[1] == 5.0
    rank.begins_s[1] = 0.0
    assert rank.stand(1.0) > 1.0
    assert rank.lanes_s[1] < 5.0
