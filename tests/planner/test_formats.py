"""Allowed wire formats are used where they shorten the step, no narrower than it takes, and never unasked."""

from dataclasses import replace
from itertools import product

import pytest

from terrace.base.errors import PlanError
from terrace.plan.plan import Plan
from terrace.plan.wire import OF_PARAMETERS, PACKABLE, PLACEABLE, MessageClass, parse_format
from terrace.planner.formats import Choice, find_allowed, of_every_class, parse_allowed, shortens
from terrace.planner.pins import Pins
from terrace.planner.ranking import TIE
from terrace.planner.search import find
from terrace.planner.space import Space
from terrace.report.loops import formats_words
from tests.support.planner_cases import CLUSTERS, evaluator_of, slow, task_on


def test_nothing_is_rounded_unasked() -> None:
    space = Space(task=task_on(slow(1e8)))
    searched = find_allowed(space, {}, 5, 400)
    assert searched.space is space
    assert searched.found == find(space, 5, 400)[0]


@pytest.mark.parametrize("rate", [1e7, 1e9, 1e11, 1e13])
def test_a_message_is_coded_where_that_takes_less_than_it_saves(rate: float) -> None:
    cluster, numel = slow(rate), 1 << 20
    device, link = cluster.device, cluster.tiers[-1]
    saved_s = (2 * numel - numel * (1 + 2 / 128)) / (rate * link.efficiency)
    # Values and codes are read and written on either side.
    coding_s = 2 * (4 + 1 + 2 / 128) * numel / (device.memory_bandwidth_bytes_per_s * device.kernels.codec)
    bf16, int8 = parse_format("bf16"), parse_format("int8")
    assert shortens(cluster, "system", bf16, int8, "fp32") == (saved_s > coding_s)
    choice = parse_allowed(["sync=int8"], task_on(cluster), islands=False)["sync", "system"]
    assert choice.useless == (() if saved_s > coding_s else ("int8",))


@pytest.mark.parametrize(("cluster", "rate"), [("dgx 4x2", 3e8), ("frontier 2x2x2", 1e9)])
def test_formats_are_the_widest_that_leave_the_step_as_short_as_any(cluster: str, rate: float) -> None:
    texts = ["sync=int8", "sync=int4+feedback", "refresh.system=int8"]
    task = task_on(slow(rate, cluster))
    allowed = parse_allowed(texts, task, islands=False)
    space = Space(task=task, axes=("data",), pins=Pins({"optimizer": (1, 9)}))
    searched = find_allowed(space, allowed, 2, 400)
    wire, best = searched.space.task.wire, searched.found.best[0]
    assert wire
    assert best.step_s < (1 - TIE) * searched.plain_s
    tried: dict[tuple[str, ...], float] = {}
    for names in product(*(choice.formats for choice in allowed.values())):
        table: dict[str, dict[str, str]] = {}
        for (message, tier), name in zip(allowed, names, strict=True):
            if name != allowed[message, tier].default:
                table.setdefault(message, {})[tier] = name
        try:
            tried[names] = evaluator_of(replace(task, wire=table)).played(best.candidate).step_s
        except PlanError:
            continue
    assert best.step_s <= (1 + 3 * TIE) * min(tried.values())
    own = tuple(wire.get(message, {}).get(tier, choice.default) for (message, tier), choice in allowed.items())
    assert best.step_s == pytest.approx(tried[own])
    for place, choice in enumerate(allowed.values()):
        for wider in choice.formats[: choice.formats.index(own[place])]:
            assert tried[(*own[:place], wider, *own[place + 1 :])] > best.step_s * (1 + TIE / 2)


def test_a_slow_boundary_between_stages_is_coded() -> None:
    task = task_on(slow(2e8))
    space = Space(task=task, axes=("data", "pipeline"), pins=Pins({"pipeline": (2, 2), "data": (4, 4)}))
    allowed = parse_allowed(["pipeline=int8", "pipeline_backward=int8", "context=int8"], task, islands=False)
    searched = find_allowed(space, allowed, 1, 400)
    plain = find(space, 1, 400)[0].best[0]
    assert searched.plain_s == plain.step_s
    assert searched.found.best[0].step_s < (1 - TIE) * plain.step_s
    assert "pipeline" in searched.space.task.wire
    assert "context" not in searched.space.task.wire


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sync", "write CLASS=FORMAT or CLASS.TIER=FORMAT"),
        ("snc=int8", "did you mean 'sync'"),
        ("control=int8", "names 'control', which is no message class or state; known: combine, context, dispatch,"),
        ("optimiser_states=int8", "did you mean 'optimizer_states'?"),
        ("sync.nod=int8", "did you mean 'node'"),
        ("sync=int9", "is not a wire format"),
        ("sync=bf16", "sync travels in bf16 anyway"),
        ("sync=fp32", "travels in bf16, which is narrower"),
        ("sync=fp64", "wider than the fp32 values"),
        ("gather=topk", "a sparse format is for gradients"),
        ("pipeline=int8+feedback", "error feedback is for gradients"),
        ("outer=int4", "all ranks are one island; give --outer"),
    ],
)
def test_formats_that_cannot_be(text: str, said: str) -> None:
    with pytest.raises(PlanError) as error:
        parse_allowed([text], task_on(CLUSTERS["dgx 4x2"]), islands=False)
    assert said in str(error.value)
    assert text in str(error.value)


def test_islands_exchange_nothing_but_changes() -> None:
    task = task_on(CLUSTERS["dgx 4x2"])
    with pytest.raises(PlanError, match="no sync message crosses tier 'system'"):
        parse_allowed(["sync.system=int8"], task, islands=True)
    found = parse_allowed(["sync=int8", "outer=fp32"], task, islands=True)
    assert set(found) == {("sync", "node"), ("outer", "node"), ("outer", "system")}
    assert found["outer", "system"].formats == ("fp32", "bf16")


def test_rounding_is_allowed_for_every_class_that_it_can_shorten() -> None:
    task = task_on(CLUSTERS["dgx 4x2"])
    classes = {message.value for message in PLACEABLE}
    found = of_every_class("int8", task, islands=False)
    assert set(found) == {f"{message}=int8" for message in classes - {"outer"}}
    assert "outer=int8" in of_every_class("int8", task, islands=True)
    assert set(parse_allowed(found, task, islands=False)) == {
        (message, tier) for message in classes - {"outer"} for tier in ("node", "system")
    }
    # By the rules of each class: only gradients feed rounding errors back, and only gradients may be sparse.
    for name in ("int8+feedback", "topk"):
        asked = of_every_class(name, task, islands=False)
        assert set(asked) == {f"{message}={name}" for message in ("reduce", "sync", "pipeline_backward")}


@pytest.mark.parametrize(
    ("cluster", "text", "said"),
    [
        ("dgx 4x2", "int9", "--allow-rounding int9: 'int9' is not a wire format; did you mean 'int8'"),
        ("dgx 4x2", "int8:3", "--allow-rounding int8:3: wire format 'int8:3': a block is a power of two"),
        ("dgx 4x2", "bf16", "--allow-rounding bf16 has no effect: messages are as narrow without it"),
        ("dgx 4x2", "fp32", "--allow-rounding fp32 has no effect: messages are as narrow without it"),
        ("dgx 1x1", "int8", "--allow-rounding int8 has no effect: there are no messages"),
    ],
)
def test_rounding_that_cannot_be_is_refused(cluster: str, text: str, said: str) -> None:
    where = CLUSTERS["dgx 4x2"]
    if cluster == "dgx 1x1":
        where = replace(where, tiers=tuple(replace(tier, size=1) for tier in where.tiers))
    with pytest.raises(PlanError) as error:
        of_every_class(text, task_on(where), islands=False)
    assert str(error.value).startswith(said)
    assert "\n" not in str(error.value)


def test_packed_is_allowed_for_parameters_and_activations_and_shortens_a_step() -> None:
    task = task_on(slow(1e9))
    allowed = parse_allowed(["packed"], task, islands=False)
    assert {MessageClass(message) for message, _ in allowed} == set(PACKABLE)
    choice = allowed["gather", "system"]
    assert choice.formats == ("bf16", "packed")
    # Inside a node of NVLink coding would take longer than it saves.
    assert allowed["gather", "node"].useless == ("packed",)
    space = Space(task=task, axes=("data",), pins=Pins({"params": (1, 9)}))
    searched = find_allowed(space, allowed, 2, 400)
    best = searched.found.best[0]
    assert searched.space.task.wire["gather"] == {"system": "packed"}
    assert (1 - 0.25) * searched.plain_s < best.step_s < (1 - TIE) * searched.plain_s
    said = formats_words(allowed, searched.evaluator.plan(best.candidate), best.step_s, searched.plain_s)
    assert "allowed and used: gather (system: packed)" in said
    assert "rounded" not in said


def test_packed_stands_for_no_class_that_it_would_round() -> None:
    task = replace(task_on(slow(1e9)), compute="fp32")
    with pytest.raises(PlanError, match=r"--allow packed: .* messages are fp32, which it would round; .*gather=packed"):
        parse_allowed(["packed"], task, islands=False)
    # Parameters travel in bf16, activations in fp32.
    allowed = parse_allowed(["packed"], replace(task, messages="bf16"), islands=False)
    assert {message for message, _ in allowed} == set(OF_PARAMETERS)
    asked = parse_allowed(["gather.system=packed"], task, islands=False)
    plan = Plan(params="device", grads="device", optimizer="device", wire={"gather": {"system": "packed"}})
    assert "rounded messages change what is learned" in formats_words(asked, plan, 1.0, 2.0)
    with pytest.raises(PlanError, match=r"--allow packed\+feedback: .*packed is lossless"):
        parse_allowed(["packed+feedback"], task, islands=False)


def test_words_on_formats_of_boundaries() -> None:
    allowed = {
        ("pipeline", "system"): Choice("bf16", ("bf16", "int8", "int4")),
        ("gather", "system"): Choice("bf16", ("bf16", "packed")),
    }
    plan = Plan(
        params="device", grads="device", optimizer="device", compute="bf16", wire={"pipeline": {"system": "bf16, int8"}}
    )
    said = formats_words(allowed, plan, 1.0, 2.0)
    assert "allowed and used: pipeline (system: bf16, int8); step 1.00 s, 2.00 s without" in said
    assert "rounded messages" in said
    assert "allowed and not used: pipeline (system int4: no shorter step or no such message)" in said
