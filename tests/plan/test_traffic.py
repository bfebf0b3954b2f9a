"""The bytes of programs against closed forms per preset, against the formula, and counted once more by hand.

Sizes below: P elements of all padded parameters, b bytes of the compute dtype, a micro-batches, and a
cluster of tiers n0 x n1 x n2, the innermost first.
"""

import math
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings

from terrace.cluster.cluster import Cluster
from terrace.model.params import ParamSpec
from terrace.model.spec import BlockSpec
from terrace.plan.plan import Plan
from terrace.plan.presets import PRESETS, preset
from terrace.plan.wire import MessageClass
from terrace.program.instruction import Op
from terrace.program.lowering import build
from tests.support.byte_formula import step_bytes
from tests.support.strategies import Setting, settings_of_a_step
from tests.support.toys import cluster_of

Bytes = dict[tuple[str, str], int]
Degrees = tuple[int, int, int]

TIERS = ("package", "node", "system")
SHAPES: tuple[Degrees, ...] = ((2, 2, 2), (4, 2, 3), (3, 1, 5))
ELEMENTS = (60, 67, 41, 119)  # of each block; untied, so that every block is gathered for itself alone


def blocks() -> tuple[BlockSpec, ...]:
    return tuple(
        BlockSpec(name=f"block.{index}", params=(ParamSpec(name="weight", shape=(numel,)),))
        for index, numel in enumerate(ELEMENTS)
    )


def padded(degrees: Degrees) -> list[int]:
    world = degrees[0] * degrees[1] * degrees[2]
    return [(numel + world - 1) // world * world for numel in ELEMENTS]


class Sheet:
    """Terms of the closed forms in elements; b is applied at the end."""

    def __init__(self, degrees: Degrees) -> None:
        self.degrees = degrees
        self.elements: Bytes = defaultdict(int)
        self.sizes = padded(degrees)
        self.whole = sum(self.sizes)

    def spread(self, message: str, numel: int, tiers: tuple[int, ...], times: int = 1) -> None:
        """Hierarchical gather or reduce-scatter: on tier i each rank sends (n_i - 1) parts of 1 / (n_0 .. n_i)."""
        n0, n1, n2 = self.degrees
        share = (numel // n0, numel // (n0 * n1), numel // (n0 * n1 * n2))
        for tier in tiers:
            self.elements[message, TIERS[tier]] += times * (self.degrees[tier] - 1) * share[tier]

    def gathers(self, first_time: tuple[int, ...], later: tuple[int, ...], a: int) -> None:
        """At prefetch 1: 2a gathers of an inner block, a of the last, a + 1 of the first, one of them opening."""
        first, *inner, last = self.sizes
        self.spread("gather", self.whole, first_time)
        self.spread("gather", sum(inner) + last, later, a - 1)
        self.spread("gather_backward", first + sum(inner), later, a)

    def result(self, b: int) -> Bytes:
        control = {("control", tier): 24 * (n - 1) for tier, n in zip(TIERS, self.degrees, strict=True) if n > 1}
        return {key: count * b for key, count in self.elements.items() if count} | control


def ddp(sheet: Sheet, a: int) -> None:
    sheet.spread("sync", sheet.whole, (0, 1, 2), times=2)


def zero1(sheet: Sheet, a: int) -> None:
    sheet.spread("sync", sheet.whole, (0, 1, 2))
    sheet.spread("refresh", sheet.whole, (0, 1, 2))


def zero2(sheet: Sheet, a: int) -> None:
    sheet.spread("reduce", sheet.whole, (0, 1, 2), times=a)
    sheet.spread("refresh", sheet.whole, (0, 1, 2))


def zero3(sheet: Sheet, a: int) -> None:
    sheet.gathers((0, 1, 2), (0, 1, 2), a)
    sheet.spread("reduce", sheet.whole, (0, 1, 2), times=a)


def hsdp(sheet: Sheet, a: int) -> None:
    sheet.gathers((0, 1), (0, 1), a)
    sheet.spread("reduce", sheet.whole, (0, 1), times=a)
    sheet.spread("sync", sheet.whole, (2,), times=2)


def zero_plus_plus(sheet: Sheet, a: int) -> None:
    sheet.gathers((0, 1, 2), (0, 1), a)
    sheet.spread("reduce", sheet.whole, (0, 1, 2), times=a)


def three_level(sheet: Sheet, a: int) -> None:
    sheet.gathers((0,), (0,), a)
    sheet.spread("reduce", sheet.whole, (0, 1), times=a)
    sheet.spread("sync", sheet.whole, (2,))
    sheet.spread("refresh", sheet.whole, (1, 2))


CLOSED_FORMS = {
    "ddp": ddp,
    "zero1": zero1,
    "zero2": zero2,
    "zero3": zero3,
    "hsdp": hsdp,
    "mics": hsdp,
    "zero++": zero_plus_plus,
    "three-level": three_level,
    "three-level-compressed": three_level,
}


def sent_bytes(
    cluster: Cluster, plan: Plan, blocks: tuple[BlockSpec, ...], num_micros: int
) -> dict[tuple[MessageClass, str], int]:
    return dict(build(cluster, plan, blocks, num_micros).sent_bytes)


def as_words(sent: dict[tuple[MessageClass, str], int]) -> Bytes:
    return {(message.value, tier): count for (message, tier), count in sent.items()}


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("a", [1, 2, 5])
@pytest.mark.parametrize("degrees", SHAPES)
@pytest.mark.parametrize("name", PRESETS)
def test_a_program_sends_the_closed_form(name: str, degrees: Degrees, a: int, compute: str) -> None:
    cluster = cluster_of(*degrees)
    plan = replace(preset(name, cluster), compute=compute, wire={})  # type: ignore[arg-type]
    sheet = Sheet(degrees)
    CLOSED_FORMS[name](sheet, a)
    assert as_words(sent_bytes(cluster, plan, blocks(), a)) == sheet.result(4 if compute == "fp32" else 2)


@pytest.mark.parametrize(("compute", "b"), [("fp32", 4), ("bf16", 2)])
@pytest.mark.parametrize("a", [1, 4, 32])
@pytest.mark.parametrize("num_nodes", [2, 3, 7])
def test_three_level_sends_2_n_minus_1_s_between_nodes(num_nodes: int, a: int, compute: str, b: int) -> None:
    cluster = cluster_of(2, 2, num_nodes)
    plan = replace(preset("three-level", cluster), compute=compute)  # type: ignore[arg-type]
    sent = sent_bytes(cluster, plan, blocks(), a)
    crossing = sum(count for (message, tier), count in sent.items() if tier == "system" and message != "control")
    all_parameters_bytes = sum(padded((2, 2, num_nodes))) * b
    assert crossing * cluster.world_size == 2 * (num_nodes - 1) * all_parameters_bytes


def test_ddp_shrinks_by_tier_to_the_all_reduce_bound() -> None:
    degrees: Degrees = (4, 2, 3)
    cluster = cluster_of(*degrees)
    sent = as_words(sent_bytes(cluster, preset("ddp", cluster), blocks(), 1))
    whole = sum(padded(degrees)) * 4
    assert sent["sync", "package"] == whole * 2 * 3 // 4
    assert sent["sync", "node"] == (whole // 4) * 2 * 1 // 2
    assert sent["sync", "system"] == (whole // 8) * 2 * 2 // 3
    # The tiers together send what one flat ring of all 24 ranks would.
    assert sum(count for (message, _), count in sent.items() if message == "sync") == whole * 2 * 23 // 24


def test_one_rank_sends_nothing() -> None:
    for name in PRESETS:
        assert sent_bytes(cluster_of(1), preset(name, cluster_of(1)), blocks(), 3) == {}


def recount(case: Setting) -> Bytes:
    """Walk the built program; spans, padding and formats are worked out here."""
    program = build(case.cluster, case.plan, case.blocks, case.num_micros)
    num_control = 3 + 2 * count_lossy(case)
    world, sent = case.cluster.world_size, defaultdict[tuple[str, str], int](int)
    outside_optimizer = case.cluster.index(case.plan.optimizer) + 1
    for instruction in program.instructions:
        if instruction.op in (Op.FREE, Op.FORWARD, Op.BACKWARD, Op.UPDATE):
            continue
        message, crossed = program.message(instruction).message_class.value, program.message(instruction).tiers
        spec = case.blocks[instruction.block]
        sizes = [spec.num_trainable, spec.num_frozen] if instruction.op is Op.GATHER else [spec.num_trainable]
        for tier in crossed:
            name, ways = case.cluster.tiers[tier].name, case.cluster.tiers[tier].size - 1
            if instruction.op is Op.CLIP:
                sent[message, name] += ways * 8 * num_control
                continue
            for size in (-(-size // world) * world for size in sizes if size):
                first = first_whole(case, crossed, outside_optimizer)
                if instruction.op is Op.SYNC and tier >= first:
                    sent[message, name] += ways * whole_bytes(case, tier, crossed, outside_optimizer, size)
                    continue
                if instruction.op in (Op.REDUCE, Op.SYNC):
                    part = size // case.cluster.ranks_within(tier)
                    sent[message, name] += ways * message_bytes(format_of(case, message, tier), part)
                if instruction.op in (Op.GATHER, Op.REFRESH) or (
                    instruction.op is Op.SYNC and tier >= outside_optimizer
                ):
                    # Whole messages end as sums, which the tiers inside code anew.
                    forwarded = tuple(outer for outer in crossed if instruction.op is not Op.SYNC or outer < first)
                    sent[message, name] += ways * gathered_bytes(case, message, tier, forwarded, size)
    return {key: count for key, count in sent.items() if count}


def first_whole(case: Setting, crossed: tuple[int, ...], outside_optimizer: int) -> int:
    """The innermost tier over which every rank adds up whole messages; beyond all tiers if there is none.

    Sparse messages go whole, and coded ones between the two members of the outermost tier that is crossed.
    """
    reduced = [tier for tier in crossed if tier >= outside_optimizer and case.cluster.tiers[tier].size > 1]
    whole = [tier for tier in reduced if format_of(case, "sync", tier).startswith("topk")]
    for tier in reduced:
        is_coded = format_of(case, "sync", tier) not in ("fp64", "fp32", "bf16")
        if tier == max(reduced) and case.cluster.tiers[tier].size == 2 and is_coded:
            whole.append(tier)
    return min(whole, default=len(case.cluster.tiers))


def whole_bytes(case: Setting, tier: int, crossed: tuple[int, ...], outside_optimizer: int, size: int) -> int:
    """A message of all that a rank reduced over the tiers inside, and those that the tiers outside brought."""
    first = first_whole(case, crossed, outside_optimizer)
    part = size // (case.cluster.ranks_within(first - 1) if first else 1)
    forwarded = math.prod(case.cluster.tiers[outer].size for outer in crossed if outer > tier)
    return forwarded * message_bytes(format_of(case, "sync", tier), part)


def format_of(case: Setting, message: str, tier: int) -> str:
    return case.plan.wire.get(message, {}).get(case.cluster.tiers[tier].name, case.plan.compute)


def message_bytes(name: str, numel: int) -> int:
    """Scales of two bytes, then codes, then zeros up to 16 bytes; a dtype is just its elements."""
    codec, _, block = name.removesuffix("+feedback").partition(":")
    if codec in ("fp64", "fp32", "bf16"):
        return {"fp64": 8, "fp32": 4, "bf16": 2}[codec] * numel
    if codec == "topk":  # a scale for 4096 elements, a count for 256, and a byte and a half for each that is kept
        blocks, rest = divmod(numel, 4096)
        kept = blocks * 4096 // int(block or 32) + math.ceil(rest / int(block or 32))
        used = 2 * math.ceil(numel / 4096) + math.ceil(numel / 256) + kept + math.ceil(kept / 2)
        return math.ceil(used / 16) * 16
    if codec == "packed":  # two bytes for a block, 12 bits an element, a byte for 64
        used = 2 * math.ceil(numel / int(block or 128)) + math.ceil(12 * numel / 8) + math.ceil(numel / 64)
        return math.ceil(used / 16) * 16
    num_scales = math.ceil(numel / int(block or 128))
    codes = math.ceil(numel / 2) if codec == "int4" else numel
    return math.ceil((2 * num_scales + codes) / 16) * 16


def gathered_bytes(case: Setting, message: str, tier: int, crossed: tuple[int, ...], size: int) -> int:
    """Messages that a rank passes to each peer: those that arrived over the outer tiers of the same block format."""
    name, outermost = format_of(case, message, tier), tier
    for outer in sorted(crossed):
        if outer > tier and format_of(case, message, outer) == name:
            outermost = outer
        elif outer > tier:
            break
    if name.partition(":")[0].removesuffix("+feedback") in ("fp64", "fp32", "bf16"):
        outermost = tier
    forwarded = case.cluster.ranks_within(outermost) // case.cluster.ranks_within(tier)
    return forwarded * message_bytes(name, size // case.cluster.ranks_within(outermost))


def count_lossy(case: Setting) -> int:
    """How many message classes cross some tier in a block format."""
    spans = {"device": -1} | {tier.name: index for index, tier in enumerate(case.cluster.tiers)}
    params, grads, optimizer = spans[case.plan.params], spans[case.plan.grads], spans[case.plan.optimizer]
    backward = params if case.plan.params_backward is None else spans[case.plan.params_backward]
    last = len(case.cluster.tiers) - 1
    routes = {
        "gather": range(params + 1),
        "gather_backward": range(backward + 1),
        "reduce": range(grads + 1),
        "sync": range(grads + 1, last + 1),
        "refresh": range(params + 1, optimizer + 1),
    }
    dtypes = ("fp64", "fp32", "bf16", "packed", "packed:32")  # of those that round, the error is measured
    return sum(
        any(case.cluster.tiers[tier].size > 1 and format_of(case, message, tier) not in dtypes for tier in route)
        for message, route in routes.items()
    )


@pytest.mark.parametrize("a", [1, 4])
def test_compressed_three_level_stays_below_080_s_between_nodes(a: int) -> None:
    """int4 gradients out and int8 new weights in: 0.75 S, a scale of 16 bits for 128 elements, each 4 or 8 bits."""
    cluster = cluster_of(2, 2, 2)
    block = BlockSpec(name="block", params=(ParamSpec(name="weight", shape=(1 << 20,)),))
    plan = replace(preset("three-level-compressed", cluster), compute="bf16")
    sent = as_words(sent_bytes(cluster, plan, (block,), a))
    part = (1 << 20) // 8
    assert sent["sync", "system"] == part // 2 + 2 * part // 128
    assert sent["refresh", "system"] == part + 2 * part // 128
    assert sent["refresh", "node"] == 2 * sent["refresh", "system"], "the messages are forwarded as they came"
    in_s = 8 * (sent["sync", "system"] + sent["refresh", "system"]) / (2 * (1 << 20))
    assert in_s == 0.75 + 2 / 128


@settings(max_examples=120, deadline=None)
@given(settings_of_a_step())
def test_program_sends_what_the_formula_says(case: Setting) -> None:
    sent = as_words(sent_bytes(case.cluster, case.plan, case.blocks, case.num_micros))
    assert sent == recount(case) == as_words(step_bytes(case.cluster, case.plan, case.blocks, case.num_micros))
