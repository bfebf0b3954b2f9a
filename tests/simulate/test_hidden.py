"""Hidden seconds of a step on the outermost tier: by hand, against a step that hides nothing, and as reported."""

from dataclasses import replace

import pytest

from terrace.cluster.cluster import Cluster
from terrace.plan.presets import preset
from terrace.planner.evaluate import step_of
from terrace.planner.task import Task
from terrace.program.instruction import PASSES
from terrace.report.plans import hidden_words
from terrace.simulate.cost import Costs
from terrace.simulate.hidden import HiddenMessages, hidden_between_nodes
from terrace.simulate.links import hop_s
from terrace.simulate.step import Prediction, predict_step
from tests.support.planner_cases import gpt, sized, without_penalties

DGX = without_penalties(sized("dgx-h100", 8, 4))
MODEL = gpt(8, 2048, 16)


def _predicted(cluster: Cluster, name: str, **more: object) -> Prediction:
    task = Task(model=MODEL, cluster=cluster, batch=64, sequence=2048)
    return predict_step(step_of(task, replace(preset(name, cluster), **more)))  # type: ignore[arg-type]


def _sent_s(costs: Costs, tier: int) -> float:
    """Seconds of all messages of a program on a tier."""
    program = costs.program
    sends = [each for each in program.instructions if each.message_class is not None and each.op not in PASSES]
    return sum(
        hop_s(program.cluster, tier, hop.degree, hop.sent_bytes)
        for each in sends
        for hop in program.message(each).hops
        if hop.tier == tier
    )


@pytest.mark.parametrize("name", ["zero3", "ddp", "hsdp"])
def test_hidden_and_waited_for_are_all_that_is_sent(name: str) -> None:
    """Of one tier alone: a message is hidden, waited for, or queued behind another of its lane."""
    cluster = replace(DGX, tiers=(replace(DGX.tiers[0], size=1), DGX.tiers[1]))
    predicted = _predicted(cluster, name)
    found = hidden_between_nodes(predicted)
    assert found is not None
    times_s = predicted.times_s[predicted.busiest]
    waits_s = sum(spent for category, spent in times_s.items() if category.startswith("wait "))
    sent_s = _sent_s(predicted.costs[0], 1)
    assert 0 < found.hidden_s < sent_s
    assert found.hidden_s + waits_s == pytest.approx(sent_s, rel=0.02)
    assert found.exposed_s == pytest.approx(predicted.step_s + found.hidden_s)


def test_messages_inside_blocks_count() -> None:
    """A ring of context ranks across nodes hides its keys behind attention."""
    context = {"system": {"context": 4}}
    found = hidden_between_nodes(_predicted(DGX, "ddp", mapping=context, micro_batch=2))
    alone = hidden_between_nodes(_predicted(DGX, "ddp", micro_batch=2))
    assert found is not None
    assert alone is not None
    assert found.hidden_s > alone.hidden_s > 0


def test_one_machine_and_islands_say_nothing() -> None:
    assert hidden_between_nodes(_predicted(DGX.resized(1), "zero3")) is None


def test_what_hidden_messages_cost() -> None:
    """A penalty of a tenth is a tenth of the hidden seconds, and a step that hides nothing does not pay it."""
    free = _predicted(DGX, "zero3")
    tiers = tuple(replace(tier, overlap_penalty=0.1) for tier in DGX.tiers)
    paid = _predicted(replace(DGX, tiers=tiers), "zero3")
    found = hidden_between_nodes(paid)
    assert found is not None
    assert free.step_s < paid.step_s
    assert found.exposed_s == pytest.approx(paid.step_s + 0.9 * found.hidden_s)


def test_words_only_where_the_step_rests_on_it() -> None:
    little = HiddenMessages(tier="system", hidden_s=0.01, step_s=1.0, exposed_s=1.01)
    much = HiddenMessages(tier="system", hidden_s=0.25, step_s=1.0, exposed_s=1.24)
    assert hidden_words(None) == hidden_words(little) == ""
    assert hidden_words(much) == (
        "This plan hides 250.0 ms of messages on tier system behind computing: a step that hid none of them would take "
        "1.24 s instead of 1.00 s"
    )
