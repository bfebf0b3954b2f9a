"""The plan that a run keeps, and the changes that it names when it is resumed."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from terrace.cli.checks import check_memory_here, check_run
from terrace.model.balance import BalanceConfig
from terrace.simulate.fullest import Job, fullest_stage
from terrace.train.config import RunConfig, run_toml
from terrace.train.prediction import resolved_run
from terrace.train.prepare import prepare
from terrace.train.resolve import parse_run, resolve
from terrace.train.run_folder import changes
from tests.support.machines import SOUND
from tests.support.tiny_runs import MODEL, write_run

SMALL = {key: value for key, value in MODEL.items() if key != "tie_word_embeddings"}
SMALL |= {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}


def table_of(run: RunConfig) -> dict[str, object]:
    return tomllib.loads(run_toml(run))


def run_of(folder: Path, **plan: object) -> RunConfig:
    path = write_run(folder, 2, 2, plan="zero3")
    (folder / "config.json").write_text(json.dumps(SMALL))
    return resolve(str(path), {}, {"plan": {"experts": {"node": {"expert": 2}}, **plan}})


def test_a_run_keeps_the_chunks_that_were_chosen(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    assert not run.plan.expert_chunks
    job = prepare(run, tmp_path / "run", None)
    kept = parse_run(tomllib.loads((tmp_path / "run" / "config.toml").read_text()))
    assert kept.plan.expert_chunks == job.run.plan.expert_chunks == resolved_run(run).plan.expert_chunks
    assert set(kept.plan.expert_chunks) == {"forward", "backward", "ahead"}
    others = {name: 2 * number for name, number in kept.plan.expert_chunks.items()}
    said = changes(table_of(kept), table_of(replace(kept, plan=replace(kept.plan, expert_chunks=others))))
    assert said == tuple(
        f"plan.expert_chunks.{name} {kept.plan.expert_chunks[name]} -> {others[name]}" for name in sorted(others)
    )


def test_a_run_keeps_the_shares_that_were_found(tmp_path: Path) -> None:
    """On a link on which gradients in gaps pay, and then on one on which others would be found."""
    path = write_run(tmp_path, 2, 2, plan="zero3")
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    device = {"overlap_penalty": 0.0, "memory_bandwidth_bytes_per_s": 1e8}

    def cluster(rate: float) -> dict[str, object]:
        return {"device": device, "tiers": {"node": {"bandwidth_bytes_per_s": rate, "latency_s": 0.0}}}

    plan = {"experts": {"node": {"expert": 2}}, "expert_gaps": "auto"}
    run = resolve(str(path), {}, {"cluster": cluster(1e6), "plan": plan})
    found = resolved_run(run).plan.expert_gaps
    assert not isinstance(found, str)
    assert any(found[1:])
    prepare(run, tmp_path / "run", None)
    kept = parse_run(tomllib.loads((tmp_path / "run" / "config.toml").read_text()))
    assert kept.plan.expert_gaps == found
    elsewhere = resolve(str(path), {}, {"cluster": cluster(1e7), "plan": plan})
    assert resolved_run(elsewhere).plan.expert_gaps != found
    assert resolved_run(replace(kept, cluster=elsewhere.cluster)).plan.expert_gaps == found


def test_a_changed_balance_is_said_and_an_empty_list_is_no_change(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    before, after = (table_of(replace(run, balance=BalanceConfig(z=factor))) for factor in (0.1, 0.2))
    assert changes(before, after) == ("balance.z 0.1 -> 0.2",)
    assert "balance.z unset -> 0.2" in changes(table_of(run), after)
    assert "balance.step unset -> 0.0" in changes(table_of(run), after)
    # As a version before the key wrote it.
    old, new = (table_of(run)["plan"] for _ in range(2))
    assert isinstance(old, dict)
    assert isinstance(new, dict)
    assert old.pop("expert_gaps") == []
    assert changes({"plan": old}, {"plan": new}) == ()
    assert changes({"plan": old}, {"plan": new | {"expert_gaps": [0.0, 1.0]}}) == (
        "plan.expert_gaps unset -> [0.0, 1.0]",
    )


def test_memory_is_of_the_shares_that_are_found(tmp_path: Path) -> None:
    path = write_run(tmp_path, 2, 2, plan="zero3")
    table = {"experts": {"node": {"expert": 2}}, "expert_gaps": "auto"}
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    run = resolve(str(path), {}, {"plan": table})
    assert run.plan.expert_gaps == "auto"
    with pytest.raises(AssertionError, match="shares are found before"):
        fullest_stage(Job(cluster=run.cluster, plan=run.plan, num_micros=2), run.blocks(), run.train.sequence)
    words = {each.about: each.words for each in check_run(run, SOUND, "terrace plan")}
    known = {each.about: each.words for each in check_run(resolved_run(run), SOUND, "terrace plan")}
    assert words == known
    check_memory_here(run, (), 10**12)
    free = parse_run({**table_of(run), "plan": {"preset": "zero3", **table}})
    assert free.plan.expert_gaps == "auto"
    assert free.plan.micro_batch * free.plan.unit > 1
