"""Numbers of chunks that a plan leaves out: a layer alone is its program played, and the choice is the best of all."""

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest

from bench.validation import fsmoe, fsmoe_layers
from terrace.cluster.cluster import Cluster, Kernels, Tier
from terrace.cluster.presets import load_cluster
from terrace.model.block_operations import layer_operations
from terrace.model.blocks import block_specs
from terrace.model.config import ModelConfig
from terrace.plan.expert_traffic import ExpertTraffic
from terrace.plan.plan import Plan
from terrace.plan.presets import preset
from terrace.program.block_program.routed import expert_steps
from terrace.program.instruction import Op
from terrace.simulate.chunks import Layer, Numbers, best_chunks
from terrace.simulate.footprint import work_of
from terrace.simulate.inside import InBlockPrices
from terrace.simulate.routed import RoutedSeconds, alone_s, pass_steps
from terrace.simulate.step import Step, predict_step, resolved
from tests.support.expert_traffic import traffic_of
from tests.support.mixtures import MIXTRAL, PLAIN, mixture
from tests.support.nightly import every

MODEL = mixture(replace(PLAIN, num_experts=16), hidden_size=256)
LARGE = replace(MIXTRAL, num_layers=4, vocab_size=1000)
SEQUENCE = 128
DEGREES = (1, 2, 4, 8)
PAIRS = list(product(DEGREES, DEGREES))
IN_ORDERS = [Numbers(*pair, ahead) for pair in PAIRS for ahead in sorted({1, max(1, max(pair) - 1)})]


def cluster_of(rate: float, penalty: float = 0.0, latency_s: float = 1e-6) -> Cluster:
    """Three tiers of two; the rate falls fourfold from one to the next."""
    device = replace(load_cluster("dgx-a100").device, overlap_penalty=penalty, kernels=Kernels())
    names = ("package", "node", "system")
    tiers = tuple(
        Tier(name=name, size=2, bandwidth_bytes_per_s=rate / 4**at, latency_s=latency_s)
        for at, name in enumerate(names)
    )
    return Cluster(name="toy", device=device, tiers=tiers)


def step_of(cluster: Cluster, model: ModelConfig = MODEL, sequence: int = SEQUENCE, **changes: Any) -> Step:
    spread = {"experts": {"system": {"expert": 2}, "node": {"expert": 2}}, "compute": "bf16"}
    plan: Plan = replace(preset("three-level", cluster), **(spread | changes))
    return Step(
        cluster=cluster,
        plan=plan,
        blocks=tuple(block_specs(model)),
        num_micros=3,
        sequence=sequence,
        work=work_of(cluster, plan, layer_operations(model), sequence),
    )


def chosen(step: Step) -> Numbers:
    return Numbers(**resolved(step).plan.expert_chunks)


@pytest.mark.parametrize("degrees", [{"expert": (1, 2)}, {"expert": (2, 2), "rows": (2, 1)}, {"rows": (2,)}])
@pytest.mark.parametrize("shares", [False, True])
def test_a_layer_alone_is_its_program_played(degrees: dict[str, tuple[int, ...]], shares: bool) -> None:
    alone = (1,) * len(next(iter(degrees.values())))
    lines = {axis: degrees.get(axis, alone) for axis in ("expert", "rows")}
    traffic = traffic_of(64, (2, 8), 32, expert=lines["expert"], rows=lines["rows"], shares=shares)
    cluster = cluster_of(1e9)

    def seconds_of(traffic: ExpertTraffic) -> RoutedSeconds:
        pieces = traffic.pieces
        return RoutedSeconds((3e-5, 4e-5 + pieces * 1e-6, 5e-5), (1e-5, 2e-5, 3e-5), pieces, traffic.chunks[True])

    layer = Layer(cluster, traffic, seconds_of)
    for numbers in IN_ORDERS:
        here = replace(traffic, chunks=numbers[:2], ahead=numbers.ahead)
        prices, own = InBlockPrices(cluster, experts=here), seconds_of(here)
        for op, steps, found, waits_s in zip(
            (Op.FORWARD, Op.BACKWARD), expert_steps(here), layer.of(numbers), layer.waits_s(numbers), strict=True
        ):
            assert found == pytest.approx(alone_s(tuple(pass_steps(steps, op, "", 0, own, prices))), rel=1e-12)
            assert waits_s == pytest.approx(found - sum(map(own.of, steps)), rel=1e-9, abs=1e-15)


# With the part of a step by which another choice may be faster. A link that never idles takes as long with more chunks,
# which alone does not show that they wait less for gradients and gathers on other lanes.
CASES: list[tuple[float, float, dict[str, Any], float]] = [
    (1e10, 0.0, {}, 0.011),
    (1e11, 0.2, {}, 0.005),
    (4e11, 0.0, {"recompute": ("layers.*",)}, 0.005),
    (1e11, 0.0, {"experts": {"package": {"rows": 2}, "system": {"expert": 2}}}, 0.005),
]


@pytest.mark.parametrize(("rate", "penalty", "changes", "most"), every(2, CASES))
def test_the_choice_is_as_fast_as_the_best_of_all_steps(
    rate: float, penalty: float, changes: dict[str, Any], most: float
) -> None:
    """Whole steps, with all other messages on the lanes."""
    step = step_of(cluster_of(rate, penalty), LARGE, 4096, **changes)
    seconds = {}
    for numbers in IN_ORDERS:
        plan = replace(step.plan, expert_chunks=numbers.table)
        seconds[numbers] = predict_step(replace(step, plan=plan)).step_s
    assert seconds[Numbers()] > 1.01 * min(seconds.values()), "nothing to choose"
    assert predict_step(step).step_s <= (1 + most) * min(seconds.values())
    assert predict_step(step).step_s == seconds[chosen(step)]


def test_the_choice_follows_the_links() -> None:
    """Links without bytes' time, or latencies alone: one chunk. Links that take as long as the experts: several."""
    assert chosen(step_of(cluster_of(1e18, latency_s=0.0))) == Numbers()
    assert chosen(step_of(cluster_of(1e18, latency_s=1.0))) == Numbers()
    assert min(chosen(step_of(cluster_of(4e11), LARGE, 4096))[:2]) > 1


def test_numbers_that_are_given_stay() -> None:
    cluster = cluster_of(4e11)
    for given in ({"forward": 3}, {"backward": 6}, {"forward": 4, "backward": 1}):
        numbers = resolved(step_of(cluster, LARGE, 4096, expert_chunks=given)).plan.expert_chunks
        assert {**numbers, **given} == numbers
        assert Numbers(**numbers).pieces % min(numbers["forward"], numbers["backward"]) == 0
    whole = resolved(step_of(cluster))
    assert resolved(whole).plan == whole.plan
    assert not resolved(step_of(cluster, experts={})).plan.expert_chunks
    # FLOPs say nothing of small products.
    by_flops = replace(step_of(cluster), work=(1e9,) * len(block_specs(MODEL)))
    assert not resolved(by_flops).plan.expert_chunks


def test_even_routing_cuts_whole_rounds_of_experts() -> None:
    """128 tokens are 8 for each of 16 experts, so pieces are 1, 2, 4 or 8 of them; 48 tokens are three: one piece."""
    cluster = cluster_of(1e10, latency_s=0.0)
    even = mixture(replace(PLAIN, num_experts=16, route="even"), hidden_size=256)
    for sequence, most in ((128, 8), (48, 1)):
        step = step_of(cluster, even, sequence)
        assert max(chosen(step)) <= most
        predict_step(step)


def test_the_choice_for_fsmoes_layers_is_the_best_that_is_played_and_of_its_closed_form() -> None:
    """Forwards of the paper's sweep on bed B (2501.10714), 1 to 32 chunks: within 0.5 % of the best of both.

    Its closed forms are of all chunks ahead, which is faster than one ahead in some layers.
    """
    found, gains, degrees = set[Numbers](), list[float](), (*DEGREES, 16, 32)
    for layer in fsmoe_layers.layers()[::29]:
        alone = Layer(fsmoe.BED_B, layer.traffic, partial(_products, layer))
        # Products of a backward would have pieces of their own.
        chosen = best_chunks([(1, alone)], Numbers(0, 1, 0))
        numbers = [Numbers(degree, 1, ahead) for degree in degrees for ahead in {1, max(1, degree - 1)}]
        closed = {each: fsmoe_layers.closed_s(fsmoe_layers.chunk_of(layer, each), each) for each in degrees}
        assert alone.of(chosen)[0] <= 1.005 * min(alone.of(each)[0] for each in numbers)
        assert closed[chosen.forward] <= 1.005 * min(closed.values())
        found.add(chosen)
        gains.append(alone.of(best_chunks([(1, alone)], Numbers(0, 1, 1)))[0] / alone.of(chosen)[0])
    assert len({each.forward for each in found}) > 2
    assert {each.ahead > 1 for each in found} == {True, False}
    assert min(gains) >= 1
    assert max(gains) > 1.05


def _products(layer: fsmoe.Layer, traffic: ExpertTraffic) -> RoutedSeconds:
    # A backward that costs nothing leaves the choice to the forward.
    pieces = traffic.pieces
    return RoutedSeconds((pieces * layer.products_s(pieces), 0.0, 0.0), pieces=pieces, chunks=traffic.chunks[True])
