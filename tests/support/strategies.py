"""Random clusters, plans and models for property tests; everything drawn is valid."""

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from terrace.cluster.cluster import Cluster
from terrace.model.params import ParamSpec
from terrace.model.spec import BlockSpec
from terrace.plan.layout import Layout
from terrace.plan.plan import Plan
from terrace.plan.wire import FORMATS, GRADIENTS, PACKABLE, PLACEABLE, MessageClass
from tests.support.toys import cluster_of


@dataclass(frozen=True)
class Setting:
    """The inputs from which a program is built."""

    cluster: Cluster
    plan: Plan
    blocks: tuple[BlockSpec, ...]
    num_micros: int


@st.composite
def block_lists(draw: st.DrawFn, max_blocks: int = 6) -> tuple[BlockSpec, ...]:
    """Blocks of odd sizes, some frozen in part or whole, some empty, some borrowing from earlier ones."""
    blocks = []
    for index in range(draw(st.integers(1, max_blocks))):
        sizes = draw(st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=3))
        params = tuple(
            ParamSpec(name=f"p{place}", shape=(size,), trainable=trainable)
            for place, (size, trainable) in enumerate(sizes)
        )
        tied_to = draw(st.sets(st.integers(0, index - 1), max_size=2)) if index else set()
        blocks.append(BlockSpec(name=f"block.{index}", params=params, tied_to=tuple(sorted(tied_to))))
    return tuple(blocks)


@st.composite
def wire_tables(draw: st.DrawFn, layout: Layout, compute: str, master: str) -> dict[str, dict[str, str]]:
    """Formats no wider than the values they carry, on tiers that the message class crosses."""
    table: dict[str, dict[str, str]] = {}
    for message in draw(st.sets(st.sampled_from(PLACEABLE))):
        parameters = message in (MessageClass.GATHER, MessageClass.GATHER_BACKWARD, MessageClass.REFRESH)
        widest = FORMATS[compute if parameters else master].mantissa_bits
        # fp16 is refused where it is not computed with (terrace.plan.validate).
        fits = {name: wire for name, wire in FORMATS.items() if wire.mantissa_bits <= widest and name != "fp16"}
        names = [name for name, wire in fits.items() if not wire.kept_of and (message in PACKABLE or not wire.packed)]
        names += ["int4:16", "int8:16", "fp8:32"]
        names += ["packed:32"] if message in PACKABLE else []
        names += [] if parameters else ["int4:16+feedback", "int8+feedback"]
        names += ["topk:64", "topk:32+feedback"] if message in GRADIENTS else []
        tiers = [layout.tiers[index] for index in layout.route(message)]
        if tiers:
            table[message.value] = draw(st.dictionaries(st.sampled_from(tiers), st.sampled_from(names)))
    return table


def _placements(num: int) -> list[tuple[int, int, int, int]]:
    """All of params <= grads <= optimizer with each place of a secondary copy inside params; 0 is none."""
    return [
        (params, grads, optimizer, backward)
        for params in range(num)
        for grads in range(params, num)
        for optimizer in range(grads, num)
        for backward in range(max(1, params))
    ]


@st.composite
def plans(draw: st.DrawFn, cluster: Cluster) -> Plan:
    """Any placement, formats and schedule numbers."""
    tiers = [tier.name for tier in cluster.tiers]
    places = ["device", *tiers]
    # Enumerated, so that placements far out, with a secondary copy, come up as often as simple ones.
    params, grads, optimizer, backward = draw(st.sampled_from(_placements(len(places))))
    compute, master = draw(
        st.sampled_from(
            [
                ("bf16", "fp32"),
                ("fp32", "fp32"),
                ("fp32", "fp64"),
                ("bf16", "fp64"),
                ("fp64", "fp64"),
                ("bf16", "bf16"),
            ]
        )
    )
    states = draw(st.sampled_from([None, None, "bf16", "int8"]))
    values: dict[str, Any] = {"compute": compute, "master": master, "optimizer_states": states}
    plan = Plan(
        params=places[params],
        grads=places[grads],
        optimizer=places[optimizer],
        params_backward=places[backward] if backward else None,
        prefetch=draw(st.integers(0, 7)),
        unit=draw(st.integers(1, 3)),  # in bf16 no more than 8
        **values,
    )
    layout = Layout.written(cluster, plan)
    wire = draw(wire_tables(layout, compute, plan.sums))
    # Outside the optimizer's tier, what is outside a sparse format has the same.
    row, found = wire.get("sync", {}), ""
    for tier in tiers[optimizer:]:
        found = found or (row[tier] if row.get(tier, "").startswith("topk") else "")
        row |= {tier: found} if found else {}
    return replace(plan, wire=wire)


@st.composite
def settings_of_a_step(draw: st.DrawFn, max_world: int = 64) -> Setting:
    """A cluster of one to four tiers, a plan for it, blocks and a number of micro-batches."""
    sizes: list[int] = []
    world = 1
    for _ in range(draw(st.sampled_from((1, 2, 3, 4)))):
        sizes.append(draw(st.sampled_from([size for size in (2, 1, 3, 4) if size * world <= max_world or size == 1])))
        world *= sizes[-1]
    cluster = cluster_of(*sizes)
    return Setting(cluster, draw(plans(cluster)), draw(block_lists()), draw(st.integers(1, 4)))


@st.composite
def expert_tables(draw: st.DrawFn, cluster: Cluster) -> dict[str, dict[str, int]]:
    """A plan's `experts` for 8 experts of an inner size that 4 divides: some of the ranks of some tiers."""
    table: dict[str, dict[str, int]] = {}
    expert = rows = 1
    for tier in cluster.tiers:
        own = draw(st.sampled_from([each for each in (1, 2, 4) if tier.size % each == 0 and expert * each <= 8]))
        left = tier.size // own
        cut = draw(st.sampled_from([each for each in (1, 2) if left % each == 0 and rows * each <= 4]))
        expert, rows = expert * own, rows * cut
        row = {axis: degree for axis, degree in (("expert", own), ("rows", cut)) if degree > 1}
        if row:
            table[tier.name] = row
    return table
