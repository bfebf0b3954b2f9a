"""The memory formula against two measures: live tensors, and the engine's meter category by category.

Sizes held throughout (parameters, gradients, optimizer) and the message buffers are the formula's exactly.
How many gathered blocks and unreduced gradients are held at once depends on when the lane's thread runs;
the formula states the worst case, which the eager lane reaches for gathers and the lazy lane for gradients.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from terrace.comm.ledger import Meter
from terrace.launch.start import LocalPool
from terrace.model.params import ParamSpec
from terrace.plan.flats import FlatParamSpec
from terrace.plan.layout import Layout
from terrace.plan.plan import Plan
from terrace.plan.presets import preset
from terrace.runtime.batch import Batch
from terrace.runtime.flat_param import FlatParam
from tests.support.memory_probe import Held, measure, measure_wide
from tests.support.nightly import nightly
from tests.support.state_formula import model_state_bytes
from tests.support.toys import cluster_of, with_wires

TOLERANCE = 0.05  # of live bytes: activations are counted, and the categories do not peak all at once
STEADY = ("params", "secondary", "grads", "optimizer", "feedback", "buffers")
SIZES = (1, 2, 2)  # ZeRO++ needs a tier outside the node; every tier of more than one rank is crossed

pytestmark = pytest.mark.timeout(360)


def compare(held: Held, wanted: dict[str, int], exact: tuple[str, ...]) -> None:
    for category, formula in wanted.items():
        metered = held.metered_bytes.get(category, 0)
        if category in exact:
            assert metered == formula, (category, metered, formula)
        else:
            assert metered <= formula, (category, metered, formula)


def check(pool: LocalPool, sizes: tuple[int, ...], runs: list[tuple[Plan, int, str]], num_blocks: int = 8) -> None:
    cluster = cluster_of(*sizes)
    by_rank = pool.run(cluster.world_size, measure_wide, cluster, runs, num_blocks, timeout_s=300.0)
    for index, (plan, num_micros, lane) in enumerate(runs):
        wanted = model_state_bytes(cluster, plan, by_rank[0][index].specs, num_micros)
        for rank, results in enumerate(by_rank):
            held = results[index]
            compare(held, wanted, (*STEADY, {"eager": "gathered", "lazy": "grads_full", "thread": "params"}[lane]))
            if rank == 0 and lane != "thread":
                ratio = held.live_bytes / sum(wanted.values())
                assert abs(ratio - 1) < TOLERANCE, (plan.name, num_micros, lane, ratio)


@pytest.mark.parametrize("name", ["zero3", *nightly("three-level", "ddp", "zero1", "zero2", "hsdp", "zero++")])
def test_model_state_is_what_the_formula_says(pool: LocalPool, name: str) -> None:
    plan = preset(name, cluster_of(*SIZES))
    narrow = replace(plan, compute="bf16")
    runs = [(plan, 1, "eager"), (narrow, 2, "eager"), (narrow, 1, "lazy")]
    if name in ("zero3", "three-level"):
        runs += [(plan, 2, "lazy"), (narrow, 2, "thread")]
    check(pool, SIZES, runs, num_blocks=12)  # of few, one that is held for a moment would weigh too much


@pytest.mark.nightly
def test_three_level_on_three_tiers(pool: LocalPool) -> None:
    cluster = cluster_of(2, 2, 2)
    plan = preset("three-level", cluster)
    check(pool, (2, 2, 2), [(plan, 2, "eager"), (with_wires(cluster, plan, "bf16"), 2, "lazy")])


@pytest.mark.parametrize("name", ["ddp", *nightly("zero++", "three-level-compressed")])
def test_what_messages_in_block_formats_take(pool: LocalPool, name: str) -> None:
    """The arena of messages, and the residuals of error feedback."""
    cluster = cluster_of(2, 2, 2)
    plan = preset(name, cluster)
    if name == "ddp":
        plan = replace(plan, wire={"sync": {tier.name: "int4:64+feedback" for tier in cluster.tiers}})
    check(pool, (2, 2, 2), [(plan, 2, "eager"), (replace(plan, compute="bf16"), 1, "lazy")])


@pytest.mark.parametrize("index", [2, *nightly(0, 1)])
def test_what_sparse_messages_take(pool: LocalPool, index: int) -> None:
    """Whole messages over one tier and over two, and parts to each peer."""
    cluster, sparse = cluster_of(2, 2, 2), "topk:32+feedback"
    plans = [
        replace(preset("ddp", cluster), wire={"sync": {"system": sparse}}),
        replace(preset("ddp", cluster), optimizer="package", wire={"sync": {"node": sparse, "system": sparse}}),
        replace(preset("zero2", cluster), wire={"reduce": {"node": sparse, "system": "topk:64"}}),
    ]
    check(pool, (2, 2, 2), [(plans[index], 1, "eager")])


class SpecBlock(nn.Module):
    """A block of the given sizes that uses its own parameters and those it is tied to."""

    def __init__(self, sizes: list[tuple[int, bool]], borrowed: list[nn.Parameter]) -> None:
        super().__init__()
        self.own = nn.ParameterList([nn.Parameter(torch.ones(size), requires_grad=train) for size, train in sizes])
        self.others = nn.ParameterList(borrowed)

    def forward(self, x: Tensor) -> Tensor:
        for parameter in (*self.own, *self.others):
            x = x + 1e-3 * parameter.sum()
        return x * 1.0


Shape = tuple[list[tuple[int, bool]], int]  # (size, trainable) of each parameter; which earlier block to borrow


def spec_blocks(shapes: list[Shape]) -> list[nn.Module]:
    blocks: list[SpecBlock] = []
    for sizes, owner in shapes:
        borrowed = list(blocks[owner % len(blocks)].own) if owner >= 0 and blocks else []
        blocks.append(SpecBlock(sizes, borrowed))
    return list(blocks)


SHAPES = st.lists(
    st.tuples(
        st.lists(st.tuples(st.sampled_from((1, 7, 100, 4000)), st.booleans()), max_size=2),
        st.integers(-3, 5),
    ),
    min_size=1,
    max_size=7,
)


@settings(max_examples=100, deadline=None)
@given(SHAPES, st.integers(1, 4), st.integers(0, 8), st.sampled_from((("zero3", "eager"), ("ddp", "lazy"))))
def test_peaks_of_uneven_tied_and_frozen_blocks(
    shapes: list[Shape], num_micros: int, prefetch: int, run: tuple[str, str]
) -> None:
    """One rank still gathers, frees and reduces, so the order of events shows without messages.

    The lazy lane is tried with replicated parameters: waiting for a gather runs the reductions before it.
    """
    name, lane = run
    cluster = cluster_of(1)
    plan = replace(preset(name, cluster), compute="bf16", prefetch=prefetch)
    batch = Batch(torch.ones(1, 2, dtype=torch.bfloat16), torch.zeros(1, 2, dtype=torch.int64))
    held = measure(lambda: spec_blocks(shapes), cluster, plan, num_micros, lane, batch, look_at_tensors=False)
    wanted = model_state_bytes(cluster, plan, held.specs, num_micros)
    compare(held, wanted, (*STEADY, {"eager": "gathered", "lazy": "grads_full"}[lane]))


def test_nothing_but_shards_is_held_before_the_first_step() -> None:
    """The full buffer of a sharded block has no memory until it is gathered."""
    cluster, meter = cluster_of(2, 2), Meter()
    plan = replace(preset("zero3", cluster), compute="fp32")
    params = (ParamSpec(name="weight", shape=(30, 3)), ParamSpec(name="bias", shape=(7,)))
    spec = FlatParamSpec(Layout.of(cluster, plan), params, trainable=True)
    flat = FlatParam("block", spec, 2, plan, torch.device("cpu"), meter)
    assert flat.full.untyped_storage().nbytes() == 0
    assert all(parameter.untyped_storage().nbytes() == 0 for parameter in flat.parameters)
    assert flat.shard.untyped_storage().nbytes() == 25 * 4
