"""Pins on the schedule that no plan can satisfy: one line before the search."""

import pytest

from terrace.cli import plan
from tests.support.nightly import nightly
from tests.support.planning import Planning, here

__all__ = ["here"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("schedule=zb-2p", "pin one of 1f1b, breadth-first, gpipe, interleaved, zb-h1, zb-h2, zbv, zeropp, and price"),
        ("schedule=zb-auto chunks=1", "terrace simulate FILE --plan.schedule zb-auto"),
        ("schedule=zb-h9", "did you mean 'zb-h2'?"),
        ("schedule=zb-h1 --axes=data,tensor", "add --axes data,tensor,pipeline"),
        (
            "schedule=zb-h1 pipeline=1",
            "pin schedule=zb-h1 needs a pipeline, and the other pins or the ranks leave one stage",
        ),
        ("chunks>=2 pipeline=1", "pin chunks>=2 needs a pipeline, and the other pins or the ranks leave one stage"),
        ("schedule=zbv chunks=3", "pin chunks=3: schedule zbv has 2 chunks a stage"),
        (
            "schedule=interleaved chunks<=1",
            "pin chunks<=1: schedule interleaved has 2, 3, 4, 5, 6, 7, 8 chunks a stage",
        ),
        ("chunks>=9", "pin chunks>=9: schedules have 1, 2, 3, 4, 5, 6, 7, 8 chunks a stage"),
        (
            "chunks=4 pipeline=2",
            "pin chunks=4 and pipeline=2: 2 stages x 4 chunks are 8 virtual stages, and each needs one of the 4 "
            "layers, embedding and head; pin chunks to at most 3",
        ),
        ("pipeline>=4 chunks>=2", "pin chunks>=2 and pipeline>=4: 4 stages x 2 chunks are 8 virtual stages"),
        ("schedule=zbv pipeline=4", "needs one of the 4 layers, embedding and head; pin pipeline to at most 3"),
        ("schedule=interleaved chunks=4", "2 stages x 4 chunks are 8 virtual stages"),
        ("schedule=interleaved:3", "write schedule=interleaved and chunks=3"),
    ],
)
def test_a_schedule_that_no_plan_has_is_named_before_the_search(
    here: Planning, monkeypatch: pytest.MonkeyPatch, words: str, said: str
) -> None:
    monkeypatch.setattr(plan, "find_with", None)  # a search would raise
    options = [part for word in words.split() for part in ([word] if word.startswith("--") else ["--pin", word])]
    # Little memory, which is not to be blamed.
    assert said in here.refused("plan", "--nodes", "1", "--cluster.device.memory_bytes", "1e9", *options)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("schedule=zbv chunks=2", "zbv, 2 chunks"),
        ("chunks<=2", ""),
        *nightly(("schedule=gpipe", "gpipe"), ("chunks>=2", "2 chunks")),
    ],
)
def test_a_schedule_that_some_plan_has_is_searched(here: Planning, words: str, said: str) -> None:
    pins = [part for word in words.split() for part in ("--pin", word)]
    code, out, _ = here.say("plan", "--nodes", "1", "--best", "1", *pins)
    assert code == 0
    assert said in out


def test_stages_of_the_embedding_or_the_head_alone_are_searched_and_simulated(here: Planning) -> None:
    narrow = ("plan", "--nodes", "3", "--cluster.tiers.package.size", "1")
    code, out, _ = here.say(*narrow, "--pin", "pipeline=6", "--force", batch=24)
    assert code == 0
    assert "played" in out
    said = here.refused(*narrow, "--pin", "pipeline=12", "--force", batch=24)
    assert "pipeline = 12" in said
    cluster = ("--cluster", "frontier", "--cluster.tiers.package.size", "1", "--cluster.tiers.system.size", "3")
    numbers = ("--train.batch", "24", "--train.sequence", "256", "--plan.mapping.system.pipeline", "3")
    words = ("simulate", "ddp", "--model", here.model, *cluster, *numbers, "--plan.mapping.node.pipeline", "2")
    code, out, _ = here.call(
        *words, "--plan.mapping.node.data", "2", "--view", "stages", "--plan.stages", "[1,1,1,1,1,1]"
    )
    assert code == 0
    assert "embedding" in out
    assert "virtual stages" in here.refusal(*words, "--plan.mapping.node.data", "2", "--plan.schedule", "zbv")
