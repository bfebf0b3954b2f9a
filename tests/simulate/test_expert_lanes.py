"""Messages of experts on the lanes of tiers: they share each link with messages between blocks."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from itertools import pairwise, product
from typing import Any

import pytest
from rich.console import Console

from terrace.cluster.cluster import Cluster, Kernels, Tier
from terrace.cluster.presets import load_cluster
from terrace.model.block_operations import layer_operations
from terrace.model.blocks import block_specs
from terrace.plan.plan import Plan
from terrace.plan.presets import preset
from terrace.plan.wire import ROUTED, MessageClass
from terrace.program.block_program.routed import expert_steps
from terrace.program.block_program.steps import InBlockMessage
from terrace.program.instruction import PASSES, Op
from terrace.program.program import Program
from terrace.report.routing import routed_table
from terrace.simulate.block_tape import Backend
from terrace.simulate.cost import Costs
from terrace.simulate.critical import critical_path, exposed_by_axis
from terrace.simulate.events import simulate
from terrace.simulate.footprint import work_of
from terrace.simulate.gap_shares import idle_s
from terrace.simulate.inside import InBlockPrices, block_prices
from terrace.simulate.priced_instruction import Doing, Event, PassStep
from terrace.simulate.recording import record
from terrace.simulate.routed import RoutedSeconds, alone_s, pass_steps
from terrace.simulate.step import Step, predict_step, resolved
from tests.support.expert_traffic import traffic_of
from tests.support.mixtures import PLAIN, mixture
from tests.support.nightly import in_turns

MODEL = mixture(replace(PLAIN, num_experts=16))
SEQUENCE = 128


def cluster_of(backend: Backend = "cuda", rate: float = 1e9, penalty: float = 0.0) -> Cluster:
    """Three tiers of two; the rate falls fourfold from one to the next."""
    device = replace(load_cluster("dgx-a100").device, backend=backend, overlap_penalty=penalty)
    tiers = tuple(
        Tier(name=name, size=2, bandwidth_bytes_per_s=rate / 4**index, latency_s=1e-5)
        for index, name in enumerate(("package", "node", "system"))
    )
    return Cluster(name="toy", device=device, tiers=tiers)


SPREAD = {"system": {"expert": 2}, "node": {"expert": 2}}


def step_of(cluster: Cluster, name: str = "three-level", num_micros: int = 3, **changes: Any) -> Step:
    plan: Plan = replace(preset(name, cluster), **({"experts": SPREAD} | changes))
    plan = replace(
        plan, expert_chunks={"forward": 1, "backward": 1, **plan.expert_chunks}
    )  # what is left out is chosen
    blocks = tuple(block_specs(MODEL))
    work = work_of(cluster, plan, layer_operations(MODEL), SEQUENCE)
    return Step(cluster=cluster, plan=plan, blocks=blocks, num_micros=num_micros, sequence=SEQUENCE, work=work)


def played(step: Step) -> tuple[Program, Costs]:
    predicted = predict_step(step)
    return predicted.programs[0], predicted.costs[0]


PLANS: list[dict[str, Any]] = [
    {},
    {"name": "zero3", "unit": 3},
    {"name": "ddp", "recompute": ("layers.*",)},
    {"name": "zero1", "experts": {"package": {"rows": 2}, "system": {"expert": 2}}},
    {"name": "zero3", "expert_gaps": (0.2, 0.3, 0.1, 0.4), "expert_chunks": {"backward": 2}},
    {"name": "hsdp", "experts": {"node": {"expert": 2}}, "expert_gaps": (0, 0.5, 0.5), "recompute": ("layers.*",)},
]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("backend", ["cuda", "cpu"])
def test_a_link_carries_one_message_at_a_time(plan: dict[str, Any], backend: Backend) -> None:
    """Whatever it is: the messages of a lane follow one another, and no step is shorter than a link is busy."""
    program, costs = played(step_of(cluster_of(backend, penalty=0.1), **plan))
    recording = record(program, costs)
    busy_s, of_experts = defaultdict[int, float](float), set[tuple[int, str]]()
    ends_s = dict[int, float]()
    for number, span in enumerate(recording.spans):
        if span.lane < 0:
            continue
        assert span.start_s >= ends_s.get(span.lane, span.start_s) - 1e-12
        ends_s[span.lane] = span.end_s
        if program.instructions[span.position].op in PASSES:
            of_experts.add((span.lane, span.category))
        if number >= recording.first:
            busy_s[span.lane] += span.end_s - span.start_s
    tiers = program.layout.tiers
    wanted = {tiers.index(name) for name, degrees in program.plan.experts.items() if max(degrees.values()) > 1}
    assert {lane for lane, _ in of_experts} == wanted
    assert {category for _, category in of_experts} == set(ROUTED)
    assert max(busy_s.values()) <= recording.report.step_s * (1 + 1e-12)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("backend", ["cuda", "cpu"])
def test_a_recording_is_what_is_played(plan: dict[str, Any], backend: Backend) -> None:
    program, costs = played(step_of(cluster_of(backend, penalty=0.1), **plan))
    recording = record(program, costs)
    assert recording.report == simulate(program, costs)
    path = critical_path(recording)
    assert sum(path.seconds.values()) == pytest.approx(recording.report.step_s)
    waits_s = sum(seconds for name, seconds in recording.report.time_s.items() if name.startswith("wait "))
    if backend == "cuda":
        assert sum(exposed_by_axis([recording]).values()) == pytest.approx(waits_s)


def test_a_dispatch_waits_behind_gradients_and_they_behind_it() -> None:
    """One layer's numbers by hand: the step is longer by the messages on the link beside it."""
    slow = cluster_of(rate=1e8)
    program, costs = played(step_of(slow, "ddp", num_micros=1))
    apart = replace(slow, tiers=(*slow.tiers[:2], replace(slow.tiers[2], bandwidth_bytes_per_s=1e15, latency_s=0.0)))
    gradients = [each for each in program.instructions if each.message_class in ("reduce", "sync")]
    lanes = {program.message(each).lane for each in gradients if program.message(each).sends}
    assert 2 in lanes, "gradients cross the tier of the experts"
    recording = record(program, costs)
    spans = [span for span in recording.spans[recording.first :] if span.lane == 2]
    kinds = [span.category in ROUTED for span in spans]
    assert True in kinds, "experts are on it"
    assert False in kinds, "gradients are on it"
    queued = [
        after
        for before, after in pairwise(spans)
        if after.category in ROUTED and before.category not in ROUTED and after.start_s == before.end_s
    ]
    assert queued, "some message of experts waits behind gradients"
    assert predict_step(step_of(apart, "ddp", num_micros=1)).step_s < recording.report.step_s


def test_a_pass_alone_takes_its_computing_and_its_messages() -> None:
    """Without anything else on the lanes every message is waited for, and seconds of both add up."""
    program, costs = played(step_of(cluster_of(), "ddp"))
    layer = next(each for each in program.instructions if program.model.block_program(each.block).routed_steps(each.op))
    steps = costs.steps(layer, costs.forward_s[layer.block], "forward")
    prices = block_prices(program, layer.block)
    sent_s = [
        prices.seconds(message)
        for step in program.model.block_program(layer.block).routed_steps(layer.op)
        for message in getattr(step, "messages", ())
    ]
    assert [step.event.seconds for step in steps if step.does is Doing.SEND] == sent_s
    computed_s = sum(step.event.seconds for step in steps if step.does is Doing.COMPUTE)
    assert computed_s == pytest.approx(costs.forward_s[layer.block])
    assert 0 < costs.routed[layer.block].passed[0] < costs.forward_s[layer.block]


CHUNKS = [{}, {"forward": 2, "backward": 2}, {"forward": 1, "backward": 4}, {"forward": 4, "backward": 2}]


@pytest.mark.parametrize("chunks", CHUNKS)
def test_chunks_send_the_same_rows(chunks: dict[str, int]) -> None:
    """As many bytes on every tier, but for one table for each piece, and all computing of one chunk."""
    sent: list[Counter[tuple[str, int]]] = []
    for each in ({}, chunks):
        program, _ = played(step_of(cluster_of(), "ddp", expert_chunks=each))
        number = Counter[tuple[str, int]]()
        for instruction, times in program.counts.items():
            for message in program.messages_inside(instruction):
                pieces = max(each.values(), default=1) if message.message_class == "route" else 1
                for tier, num_bytes in message.sends:
                    number[message.message_class, tier] += times * num_bytes // pieces
        sent.append(number)
    assert sent[0].keys() == sent[1].keys()
    assert all(sent[1][key] == pytest.approx(num_bytes, rel=1e-3) for key, num_bytes in sent[0].items())


def test_two_chunks_by_hand() -> None:
    """One tier, D to the experts, P products, C back: chunk 2 goes there during P of chunk 1, C of chunk 1 during P."""
    for there_s, products_s, back_s in ((1.0, 4.0, 1.0), (4.0, 1.0, 3.0), (2.0, 2.0, 2.0)):
        halves = [each / 2 for each in (there_s, products_s, back_s)]
        there, products, back = halves
        # The link carries both dispatches, then both combines; a combine follows its products.
        first = there + products
        second = max(first, 2 * there) + products
        link = max(2 * there, first) + back
        wanted = max(link, second) + back
        assert alone_s(hand_made(halves)) == pytest.approx(wanted)


def hand_made(halves: Sequence[float]) -> tuple[PassStep, ...]:
    traffic = traffic_of(8, (1, 2), 1, expert=(2,), chunks=(2, 1))
    there, products, back = halves
    seconds = {MessageClass.ROUTE: 0.0, MessageClass.DISPATCH: there, MessageClass.COMBINE: back}

    class Prices(InBlockPrices):
        def price(self, message: InBlockMessage) -> tuple[float, float]:
            return seconds[message.message_class], 0.0

    own = RoutedSeconds(passed=(2 * products, 0.0, 0.0), pieces=2)
    steps = expert_steps(traffic)[0]
    return tuple(pass_steps(steps, Op.FORWARD, "forward", 0, own, Prices(cluster_of(), experts=traffic)))


@pytest.mark.parametrize("backend", ["cuda", "cpu"])
def test_chunks_hide_messages_behind_products(backend: Backend) -> None:
    """Where small kernels and small messages take no longer, and a link takes as long as the experts."""
    cluster = cluster_of(backend, rate=2e11)
    device = replace(cluster.device, kernels=Kernels(), memory_bandwidth_bytes_per_s=1e18)
    tiers = tuple(replace(tier, latency_s=0.0) for tier in cluster.tiers)
    cluster = replace(cluster, device=device, tiers=tiers)
    steps_s = [
        predict_step(step_of(cluster, "ddp", expert_chunks={"forward": chunks, "backward": chunks})).step_s
        for chunks in (1, 2, 4)
    ]
    assert steps_s[0] > steps_s[1] > steps_s[2]


@pytest.mark.parametrize("chunks", CHUNKS)
def test_chunks_are_listed_in_their_order(chunks: dict[str, int]) -> None:
    program, _ = played(step_of(cluster_of(), "ddp", expert_chunks=chunks))
    console = Console(width=120, record=True, file=StringIO())
    console.print(routed_table(program))
    text = console.export_text()
    forward = chunks.get("forward", 1)
    rows = [line for line in text.splitlines() if "dispatch" in line or "experts," in line]
    first = [line for line in rows[: 3 * forward + 3] if f"dispatch {min(2, forward)}" in line]
    assert first, text
    if forward > 1:
        position = {word: text.index(word) for word in ("dispatch 2", "experts, 1", "combine 1", "wait for dispatch 2")}
        assert list(position) == sorted(position, key=position.__getitem__)


def gradient_s(program: Program, costs: Costs) -> float:
    """Seconds on their lanes of the gradients that are in gaps."""
    return sum(times * costs.collective_s(each) for each, times in program.counts.items() if each.in_gaps)


def shared(shares: tuple[float, ...], rate: float = 2e11, **changes: Any) -> Step:
    """Without latencies, and with attention longer than a gradient takes."""
    cluster = cluster_of(rate=rate)
    tiers = tuple(replace(tier, latency_s=0.0) for tier in cluster.tiers)
    return step_of(replace(cluster, tiers=tiers), "ddp", num_micros=1, expert_gaps=shares, **changes)


def test_a_gradient_behind_the_combine_delays_no_dispatch() -> None:
    """With one chunk all messages of experts are waited for: a step is longer by those in front of a dispatch."""
    at_once, halves, behind = (predict_step(shared(shares)) for shares in ((), (0.5, 0.0, 0.5), (0.0, 0.0, 1.0)))
    taken_s = gradient_s(behind.programs[0], behind.costs[0])
    assert taken_s > 0
    assert at_once.step_s - behind.step_s == pytest.approx(taken_s, rel=1e-6)
    assert at_once.step_s - halves.step_s == pytest.approx(taken_s / 2, rel=1e-2)


@pytest.mark.parametrize(
    ("plan", "rate"),
    in_turns(
        3, [{}, {"expert_chunks": {"forward": 2, "backward": 2}}, {"name": "zero3", "unit": 3}], [1e10, 2e8, 2e11]
    ),
)
def test_shares_that_a_command_finds_are_the_best_of_many(rate: float, plan: dict[str, Any]) -> None:
    """Never slower than a gradient in one message, and within 1 % of the best of a grid of shares."""
    own = {"name": "ddp", **plan}
    step = step_of(cluster_of(rate=rate), **own, expert_gaps="auto")
    found = resolved(step)
    assert not isinstance(found.plan.expert_gaps, str)
    chunks = own.get("expert_chunks", {}).get("backward", 1)
    quarters = [each for each in product(range(5), repeat=chunks + 2) if sum(each) == 4 and each[0] < 4]
    tried = [tuple(part / 4 for part in each) for each in quarters] + [()]
    best_s = min(predict_step(replace(step, plan=replace(step.plan, expert_gaps=each))).step_s for each in tried)
    assert predict_step(found).step_s <= best_s * 1.01
    assert predict_step(step).step_s == predict_step(found).step_s


def test_idle_seconds_of_a_backward_by_hand() -> None:
    """Dispatch 1 s, products 4 s, combine 1 s, attention 2 s: the link idles for 4 s, and for 2 s."""
    event = Event(Op.BACKWARD, 0, 1.0, 2, "")
    steps = (
        PassStep(Doing.SEND, event),
        PassStep(Doing.WAIT, event, 0),
        PassStep(Doing.GAP, event, 1),
        PassStep(Doing.COMPUTE, replace(event, seconds=4.0)),
        PassStep(Doing.SEND, event),
        PassStep(Doing.GAP, event, 2),
        PassStep(Doing.WAIT, event, 1),
        PassStep(Doing.COMPUTE, replace(event, seconds=2.0)),
    )
    assert idle_s(steps, 2) == [0.0, 4.0, 2.0]
    assert idle_s(steps, 1)[-1] == 3.0


def test_parts_are_listed_in_their_gaps() -> None:
    program, _ = played(step_of(cluster_of(), "ddp", expert_gaps=(0, 0.25, 0.75)))
    console = Console(width=120, record=True, file=StringIO())
    console.print(routed_table(program))
    text = console.export_text()
    assert text.index("25% of the gradients before") < text.index("75% of the gradients before")
