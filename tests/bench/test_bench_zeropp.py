"""ZeroPP in the planner, gathered and reduced once a unit and chunk, and its contest with Megatron's three axes."""

import math
from collections import Counter
from dataclasses import replace

import pytest

from bench.zeropp import HEADER, PARTS_HEADER, clusters, contest, gpt, parts, parts_rows, percent, plan_words, row
from bench.zeropp import summary as summary_of
from terrace.planner.evaluate import step_of
from terrace.planner.explain import reasons
from terrace.planner.pins import Pins, parse_pins
from terrace.planner.search import Search
from terrace.planner.space import Space
from terrace.planner.stages import traits
from terrace.planner.task import Candidate, Placement, Task, num_micros, plan_of
from terrace.program.instruction import Op
from terrace.program.schedules.registry import schedule_names, takes_unit
from terrace.simulate.step import predict_step
from tests.support.exhaustive import exhaustive
from tests.support.nightly import nightly
from tests.support.planner_cases import CLUSTERS, evaluator_of, mesh_of, sized, small_task
from tests.support.planner_cases import gpt as small_gpt

EIGHT = small_gpt(8, 512, 4, vocab=1000, positions=512)
DGX = CLUSTERS["dgx 4x2"]
MESH = mesh_of((4, 1, 1, 1), (1, 1, 1, 2))  # four data ranks inside the node, two stages across nodes
ZEROPP = Pins({"pipeline": (2, 8)}, "zeropp")


def candidate_in(unit: int, chunks: int = 4) -> Candidate:
    return Candidate(0, unit, "zeropp", chunks, 1, Placement(0, 0, 0), MESH)


@pytest.mark.parametrize("unit", [1, 2, 4, 8])
def test_a_block_is_gathered_once_a_unit_and_pass_and_reduced_once_a_unit(unit: int) -> None:
    task = small_task(DGX, batch=32, model=EIGHT)
    program = predict_step(step_of(task, plan_of(task, candidate_in(unit)))).programs[0]
    counts = Counter(instruction.op for instruction in program.instructions)
    units, blocks = 8 // unit, len(program.stage.own)
    assert counts[Op.FORWARD] == counts[Op.BACKWARD_INPUT] == counts[Op.BACKWARD_WEIGHT] == 8 * blocks
    assert counts[Op.REDUCE] == units * blocks
    # The last block stays from its forward to its backward, the first from one unit to the next.
    assert counts[Op.GATHER] == blocks + (units - 1) * (blocks - 1) + units * (blocks - 1)


def test_bytes_follow_the_published_formula() -> None:
    """36 B h^2 / U elements a layer (2402.03791, abstract), but for the chunks that stay; B counts a rank's own."""
    own, hidden = evaluator_of(small_task(DGX, batch=64, model=EIGHT)), 512
    sent = {unit: own.played(candidate_in(unit)).sent_bytes for unit in (1, 2, 4, 8)}
    micros, layers, ranks = 16, 4, 4
    for unit, found in sent.items():
        moved = sum(found.get((name, "node"), 0) for name in ("gather", "gather backward", "gather_backward", "reduce"))
        formula = layers * 36 * micros / unit * hidden**2 * 2 * (ranks - 1) / ranks
        assert 0.7 < moved / formula < 1.45  # the embedding is more, what stays is less
    halved = [sum(sent[unit].values()) - sum(sent[2 * unit].values()) for unit in (1, 2, 4)]
    assert halved[0] > 1.9 * halved[1] > 3.6 * halved[2] > 0


def test_longer_units_wait_less_and_keep_more() -> None:
    slow = sized("pcie-a100", 4, 2)
    own = evaluator_of(small_task(slow, batch=64, model=EIGHT))
    found = [own.played(candidate_in(unit)) for unit in (2, 4, 8)]
    steps = [each.step_s for each in found]
    kept = [each.memory_bytes["activations"] for each in found]
    assert steps == sorted(steps, reverse=True)
    assert kept == sorted(kept)
    assert kept[2] > 1.5 * kept[1]
    # Two chunks of four are whole at once, their gradients too.
    whole = found[0].memory_bytes["gathered"]
    fewer = own.played(candidate_in(2, chunks=2)).memory_bytes["gathered"]
    assert 1.5 * whole < fewer < 2.1 * whole
    assert found[0].memory_bytes["grads_full"] == whole


@pytest.mark.parametrize("name", ["dgx 2x3", *nightly("ethernet 2x2")])
def test_the_search_of_units_equals_trying_everything(name: str) -> None:
    task = small_task(CLUSTERS[name], batch=12 if name == "ethernet 2x2" else 6)
    space, evaluator = Space(task=task, axes=("data", "pipeline"), pins=ZEROPP), evaluator_of(task)
    everything = exhaustive(space, math.inf)
    assert len({each.candidate.unit for each in everything}) > 1
    needs = sorted(each.needed_bytes for each in everything)
    for share in (1.0, 0.3):
        capacity = needs[int(share * (len(needs) - 1))]
        fitting = [each for each in everything if each.needed_bytes <= capacity]
        found = Search(space, evaluator, capacity).run(count=3, limit=10**6)
        assert found.is_complete
        assert found.best[0].step_s <= min(each.step_s for each in fitting) * 1.02
        assert found.best[0].needed_bytes <= capacity


def test_units_are_pinned_and_explained() -> None:
    task = small_task(DGX, batch=32, model=EIGHT)
    pins = parse_pins(["schedule=zeropp", "unit=4", "pipeline=2"], DGX, schedule_names())
    space, evaluator = Space(task=task, axes=("data", "pipeline"), pins=pins), evaluator_of(task)
    found = Search(space, evaluator, 1e12).run(count=2, limit=100)
    assert {each.candidate.unit for each in found.best} == {4}
    near = {change.words for change in reasons(space, evaluator, candidate_in(2))}
    assert {"unit = 1", "unit = 4"} <= near
    assert [name for name in traits() if takes_unit(name)] == ["zeropp"]


@pytest.fixture(scope="module")
def small() -> Task:
    """Tensor ranks meet on PCIe, the case that ZeroPP is for."""
    cluster = clusters()["8 x 8 PCIe, 1 NIC"].resized(2)
    return Task(model=gpt(4096, 8, 32, 1024), cluster=cluster, batch=64, sequence=1024)


@pytest.mark.nightly
def test_both_sides_keep_their_rules_and_their_seconds(small: Task) -> None:
    found = contest(small)
    assert found.megatron is not None
    assert found.with_tensor is not None
    assert found.waiting is not None
    assert found.zeropp is not None
    for each in (found.megatron, found.with_tensor, found.waiting):
        assert (each.candidate.placement.params, each.candidate.placement.grads) == (-1, -1)
        assert each.candidate.schedule in ("serial", "1f1b", "interleaved")
    assert found.with_tensor.candidate.mesh.total("tensor") > 1
    candidate = found.zeropp.candidate
    assert (candidate.schedule, candidate.mesh.total("tensor"), candidate.placement.params) == ("zeropp", 1, 0)
    assert candidate.mesh.group("data")[0] > 1
    assert candidate.mesh.total("pipeline") > 1
    assert found.megatron.step_s <= found.with_tensor.step_s * 1.001 <= found.waiting.step_s * 1.002
    for each in (found.megatron, found.with_tensor, found.zeropp):
        assert math.fsum(parts(small, each).values()) == pytest.approx(1, abs=2e-3)
        assert each.needed_bytes <= small.cluster.device.memory_bytes
    assert parts(small, found.with_tensor)["tensor"] > 0 == parts(small, found.zeropp)["tensor"]
    # Nothing but the seconds decides: slower tensor messages, the same gain or more.
    assert found.gain(found.waiting) >= found.gain(found.with_tensor) - 1e-3
    assert found.gain(found.with_tensor) == pytest.approx(found.with_tensor.step_s / found.zeropp.step_s - 1)
    assert len(row("8B", found)) == len(HEADER)
    assert all(len(line) == len(PARTS_HEADER) for line in parts_rows("8B", found))
    assert f"M{num_micros(small, candidate)}" in plan_words(found.zeropp)
    assert "of 1 settings" in summary_of([found])[0]


@pytest.mark.nightly
def test_a_side_that_does_not_fit_is_named(small: Task) -> None:
    found = contest(small)
    assert percent(replace(found, zeropp=None).gain(found.megatron)) == "ZeroPP does not fit"
    assert percent(found.gain(None)) == "only ZeroPP fits"
    assert percent(replace(found, zeropp=None).gain(None)) == "neither fits"


def test_every_cluster_has_64_devices() -> None:
    assert {cluster.world_size for cluster in clusters().values()} == {64}
