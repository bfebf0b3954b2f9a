"""One rank stands for all: a world whose ranks are played together gives each of them the one rank's step."""

import gc
import math
import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrace.cluster.cluster import Cluster, Tier
from terrace.cluster.presets import load_cluster
from terrace.model.blocks import block_specs, forward_flops
from terrace.model.params import ParamSpec
from terrace.model.spec import BlockSpec
from terrace.plan.presets import PRESETS, preset
from terrace.program.lowering import build
from terrace.program.program import Program
from terrace.simulate.cost import Costs, step_costs
from terrace.simulate.events import simulate
from tests.support.byte_formula import step_bytes
from tests.support.effort import lines_run
from tests.support.joint_simulator import joint_time_s
from tests.support.nightly import every
from tests.support.planner_cases import gpt
from tests.support.state_formula import model_state_bytes

LOCAL = load_cluster("local")
FLOPS = [2.0 * 64 * 64 * 256 * (1 + index % 2) for index in range(5)]


def _block(index: int) -> BlockSpec:
    """The third is frozen in part, the fourth whole; the last is tied to the first."""
    params = tuple(
        ParamSpec(name=name, shape=(64, 64 + index), trainable=not (frozen or index == 3))
        for name, frozen in (("w", False), ("f", index == 2))
    )
    return BlockSpec(name=f"b{index}", params=params, tied_to=(0,) if index == 4 else ())


BLOCKS = tuple(_block(index) for index in range(5))


def _cluster(sizes: tuple[int, ...], penalty: float = 0.0) -> Cluster:
    tiers = tuple(
        Tier(name=f"t{i}", size=size, bandwidth_bytes_per_s=1e8 / 3**i, latency_s=1e-5 * (i + 1))
        for i, size in enumerate(sizes)
    )
    return Cluster(name="test", device=replace(LOCAL.device, backend="cuda", overlap_penalty=penalty), tiers=tiers)


def _step(name: str, cluster: Cluster, num_micros: int, **changes: object) -> tuple[Program, Costs]:
    plan = replace(preset(name, cluster), **changes)  # type: ignore[arg-type]
    program = build(cluster, plan, BLOCKS, num_micros)
    return program, step_costs(program, FLOPS)


def _same(one: dict[str, float], other: dict[str, float]) -> bool:
    """Whether two steps agree in every category, to the rounding of sums in another order."""
    least_s = 1e-9 * sum(one.values())
    return all(one.get(name, 0.0) == pytest.approx(other.get(name, 0.0), abs=least_s) for name in one | other)


@pytest.mark.parametrize("name", every(3, sorted(PRESETS)))
@settings(max_examples=12, deadline=None)
@given(
    sizes=st.sampled_from([(2,), (3, 2), (1, 4), (2, 2, 2), (2, 1, 3)]),
    num_micros=st.integers(1, 4),
    unit=st.integers(1, 3),
    prefetch=st.integers(0, 3),
    recompute=st.sampled_from([(), ("b*",), ("b1",)]),
    penalty=st.sampled_from([0.0, 0.2, 1.0]),
)
def test_each_rank_of_a_world_takes_the_one_rank_s_step(
    name: str,
    sizes: tuple[int, ...],
    num_micros: int,
    unit: int,
    prefetch: int,
    recompute: tuple[str, ...],
    penalty: float,
) -> None:
    cluster = _cluster(sizes, penalty)
    program, costs = _step(name, cluster, num_micros, unit=unit, prefetch=prefetch, recompute=recompute)
    alone = dict(simulate(program, costs).time_s)
    together = joint_time_s(program, costs)
    assert len(together) == cluster.world_size
    for time_s in together:
        assert _same(alone, time_s)


@pytest.mark.parametrize("name", every(3, sorted(PRESETS)))
@settings(max_examples=6, deadline=None)
@given(
    tensor=st.sampled_from([{"rows": 2}, {"columns": 2}, {"rows": 2, "columns": 2}]),
    num_micros=st.integers(1, 3),
    sequence_parallel=st.booleans(),
    recompute=st.sampled_from([(), ("layers.*",)]),
    penalty=st.sampled_from([0.0, 0.2]),
)
def test_so_does_each_rank_of_a_world_with_a_tensor_axis(
    name: str,
    tensor: dict[str, int],
    num_micros: int,
    sequence_parallel: bool,
    recompute: tuple[str, ...],
    penalty: float,
) -> None:
    """Data ranks, ranks that share norms, and lines of tensor ranks: every group is made of its own ranks."""
    cluster, model = _cluster((4, 2), penalty), gpt(2, 64, 4, vocab=100)
    data = 4 // math.prod(tensor.values())
    plan = replace(
        preset(name, cluster),
        mapping={"t0": {"tensor": tensor, "data": data}},
        sequence_parallel=sequence_parallel,
        recompute=recompute,
        wire={},
    )
    program = build(cluster, plan, block_specs(model), num_micros, 32)
    costs = step_costs(program, [forward_flops(model, block, 1, 32) for block in range(4)])
    alone = simulate(program, costs)
    assert alone.time_s["wait tensor"] > 0
    assert alone.sent_bytes == step_bytes(cluster, plan, program.blocks, num_micros, 32)
    assert alone.memory_bytes == model_state_bytes(cluster, plan, program.blocks, num_micros, 32)
    for time_s in joint_time_s(program, costs):
        assert _same(dict(alone.time_s), time_s)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_one_slow_rank_keeps_all_others_waiting(name: str) -> None:
    """Equal steps come from equal ranks: with one that is not, the world's answer is another one."""
    program, costs = _step(name, _cluster((2, 2, 2)), 2)
    alone = dict(simulate(program, costs).time_s)
    compute_s = sum(alone[category] for category in ("forward", "backward", "update"))
    slower = 1 + 3 * sum(alone.values()) / compute_s
    for time_s in joint_time_s(program, costs, {5: slower}):
        assert not _same(alone, time_s)
        assert sum(time_s.values()) > 2 * sum(alone.values())


def _large(num_nodes: int) -> tuple[int, int]:
    """Lines of Python and peak bytes of building and simulating a rank's step of GPT-3."""
    blocks = block_specs(gpt(96, 12288, 96))
    cluster = load_cluster("dgx-a100").resized(num_nodes)

    def step() -> None:
        program = build(cluster, preset("zero3", cluster), blocks, 4)
        simulate(program, step_costs(program, [1e12] * len(blocks)))

    step()  # what is cached is there afterwards
    effort = lines_run(step)
    gc.collect()  # of other tests
    tracemalloc.start()
    step()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return effort, peak


def test_a_rank_of_16384_costs_what_a_rank_of_16_does() -> None:
    (few_lines, few_bytes), (many_lines, many_bytes) = _large(2), _large(2048)
    assert many_lines < 1.05 * few_lines
    assert many_bytes < 1.05 * few_bytes
