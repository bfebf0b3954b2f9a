"""Chunks of experts that a plan leaves out: every command prints their numbers and the cost of others."""

import json
import re

from terrace.train.prediction import resolved_run
from terrace.train.resolve import resolve
from tests.support.planning import Planning, here

__all__ = ["here"]

MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": 1000,
    "hidden_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 2048,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
SAID = re.compile(r"experts on (.+); tokens go to them in (\d+) chunks? in a forward and (\d+) in a backward")


def test_a_step_says_its_chunks_and_what_others_would_cost(here: Planning) -> None:
    here.model.write_text(json.dumps(MIXTRAL))
    given = ("--model", here.model, "--plan", "zero1", "--cluster", "frontier", "--cluster.tiers.system.size", "2")
    words = (*given, "--train.batch", "64", "--train.sequence", "256", "--plan.experts.node.expert", "4")
    for view in ("step", "program"):
        code, out, _ = here.call("simulate", "--view", view, *words, "--plan.micro_batch", "4")
        assert code == 0
        out = " ".join(out.split())
        told = SAID.findall(out)
        assert len(told) == 1
        assert told[0][0] == "node expert 4"
        assert re.search(r"with experts one tier out \(.*system expert 2\) the step would take .*, [+-]\d", out)
    flags = {"model": str(here.model), "plan": "zero1", "cluster": "frontier"}
    tables = {
        "cluster": {"tiers": {"system": {"size": 2}}},
        "train": {"batch": 64, "sequence": 256},
        "plan": {"experts": {"node": {"expert": 4}}, "micro_batch": 4},
    }
    run = resolve(None, flags, tables)
    assert not run.plan.expert_chunks, "a run's file has what was given"
    chosen = resolved_run(run).plan.expert_chunks
    assert told[0][1:] == (str(chosen["forward"]), str(chosen["backward"]))


def test_a_planned_file_has_the_numbers_that_were_priced(here: Planning) -> None:
    here.model.write_text(json.dumps(MIXTRAL))
    code, out, _ = here.say("plan", "--nodes", "2", "--axes", "data", "--pin", "expert=8", "--best", "1")
    assert code == 0
    plan = resolve(None, {"plan": "plan.toml"}, {}).plan
    forward, backward = plan.expert_chunks["forward"], plan.expert_chunks["backward"]
    assert [each[1:] for each in SAID.findall(" ".join(out.split()))] == [(str(forward), str(backward))]
