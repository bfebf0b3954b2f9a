"""The band of predicted figures on the screens and pages that show them, and MFU with either count of attention."""

import re
from dataclasses import replace

import pytest

from terrace.cli.main import main
from terrace.model.config import parse_model
from terrace.plan.presets import preset
from terrace.planner.figures import hfu, mfu
from terrace.planner.scaling import evaluate_plan
from terrace.planner.stages import SERIAL
from terrace.planner.task import Candidate, Placement
from terrace.planner.ties import slowest_tier
from terrace.simulate.bands import band_of
from terrace.train.resolve import resolve
from terrace.train.utilisation import step_flops
from tests.support.mixtures import mixture
from tests.support.planner_cases import CLUSTERS, evaluator_of, mesh_of, small_task
from tests.support.planning import Planning, here

__all__ = ["here"]

_A100 = ("--nodes", "2", "--axes", "data")


def joined(text: str) -> str:
    return " ".join(text.split())


def test_a_plan_its_step_and_its_curve_have_the_band_of_its_rows(here: Planning) -> None:
    code, out, _ = here.say("plan", *_A100, cluster="dgx-a100", batch=32)
    assert code == 0
    run = resolve(None, {"plan": "plan.toml"}, {})
    band = band_of(run.cluster, run.plan)
    assert re.fullmatch(r"\+-\d+ %", str(band))
    said = joined(out)
    assert f"step, tokens/s and MFU {band}: {band.words}" in said
    assert f"of one ({band})" in said
    assert f"seconds of a step, {band}" in said
    assert re.search(rf"MFU [\d.]+ % \({re.escape(str(band))}\) = ", out)
    assert f" {band}. [task] below says" in (here.folder / "plan.toml").read_text()
    assert main(["simulate", "plan.toml", "--page", "page.html"]) == 0
    out = here.out()
    assert re.search(rf"predicted step [\d.]+ ms {re.escape(str(band))}: {re.escape(band.words)}", joined(out))
    assert f"step, {band}" in (here.folder / "page.html").read_text()
    assert main(["plan", "--scale", "--plan", "plan.toml"]) == 0
    assert f"{band}: {band.words}" in joined(here.out())
    assert main(["doctor", "--plan", "plan.toml"]) == 0
    assert re.search(rf"predicted step [\d.]+ ms {re.escape(str(band))}, of which", joined(here.out()))


def test_a_pipeline_has_its_band_on_screen_and_page(here: Planning) -> None:
    assert here.say("plan", "--nodes", "1", "--pin", "pipeline=2", "--best", "1")[0] == 0
    assert main(["simulate", "plan.toml", "--view", "all", "--page", "page.html"]) == 0
    assert re.search(r"^step [\d.]+ ms \+-\d+ %; bubble", here.out(), re.M)
    assert re.search(r"step, \+-\d+ %", (here.folder / "page.html").read_text())


def test_plans_that_tie_are_told_and_settled_by_bytes(here: Planning) -> None:
    code, out, _ = here.say("plan", "--nodes", "2", "--axes", "data", batch=32)
    assert code == 0
    said = joined(out)
    tied = re.search(
        r"(plans 1 to \d|at least 5 plans) tie: predictions of two plans are off each other by up to [\d.]+ %", said
    )
    assert tied is not None
    assert "the fewest bytes across the slowest tier, system (" in said
    assert "the cheapest of " in said
    for title in ("fastest plan for each headroom", "what one change would cost", "each with its best numbers"):
        assert re.search(rf"{title}, steps \+-\d+ %", said), title
    # The file has the first of them.
    first = re.findall(r"^ 1 .*?(\d[\d.]* [kM]?B|[\d.]+ GB) +(\w+) +(\w+) +(\w+) ", out, re.M)[0]
    plan = resolve(None, {"plan": "plan.toml"}, {}).plan
    assert (plan.params, plan.grads, plan.optimizer) == first[1:]


@pytest.mark.nightly
def test_new_words_fit_in_eighty_columns(here: Planning) -> None:
    asked = ("--tokens", "2e12", "--price", "2", "--plan", "ddp", "--full-attention-flops")
    code, out, _ = here.say("plan", "--nodes", "2", *asked, batch=64)
    assert code == 0
    about = out.split("step, tokens/s and MFU")[1].split("plan planned on")[0]
    figures = out.split("throughput: ")[1].split("seconds of a step")[0]
    assert max(len(line.rstrip()) for line in (about + figures).splitlines()) <= 80
    assert main(["plan", "--scale", "--plan", "plan.toml"]) == 0
    part = here.out().split("step, tokens/s and MFU")[1].split("\n\n")[0]
    assert max(len(line.rstrip()) for line in part.splitlines()) <= 80


def test_utilisation_has_the_full_square_beside_it_where_it_is_asked_for(here: Planning) -> None:
    words = ("plan", "--nodes", "1", "--best", "1", "--sequence", "512")
    plain = here.say(*words, batch=64).out
    assert "attention's full square" not in plain
    asked = here.say(*words, "--force", "--full-attention-flops", batch=64).out
    mfu_s, hfu_s = ([float(share) for share in re.findall(rf"{name} ([\d.]+) %", asked)] for name in ("MFU", "HFU"))
    assert len(mfu_s) == len(hfu_s) == 2
    assert mfu_s[0] < mfu_s[1]
    assert hfu_s[0] < hfu_s[1]
    assert re.search(r"HFU [\d.]+ % \(\+-\d+ %\) = the same with forwards that run again", plain)
    assert main(["plan", "--scale", "--plan", "plan.toml", "--full-attention-flops"]) == 0
    assert here.out().count("MFU, full square") == 2
    assert main(["plan", "--scale", "--plan", "plan.toml"]) == 0
    assert "full square" not in here.out()


@pytest.mark.parametrize("window", [0, 48])
@pytest.mark.parametrize("mixed", [False, True])
def test_utilisation_of_a_plan_is_that_of_its_run(window: int, mixed: bool) -> None:
    """Model FLOPs of the planner are those by which `terrace train` measures."""
    model = mixture(vocab_size=1000, hidden_size=512, intermediate_size=512) if mixed else parse_model(LLAMA)
    model = replace(model, sliding_window=window)
    task = small_task(CLUSTERS["dgx 4x2"], batch=8, model=model)
    plan = replace(preset("zero1", task.cluster), compute="bf16")
    cost = evaluate_plan(task, plan)
    flops = step_flops(task.blocks, plan, task.batch, task.sequence)
    possible = cost.step_s * task.cluster.world_size * task.peak_flops_per_s
    assert mfu(task, cost) == pytest.approx(flops.model / possible, rel=1e-12)
    assert mfu(task, cost, full=True) == pytest.approx((flops.model + flops.masked) / possible, rel=1e-12)


def test_hardware_utilisation_of_a_plan_is_that_of_its_run() -> None:
    """Without what a causal mask hides; the full square only where it is asked for."""
    task = small_task(CLUSTERS["dgx 4x2"], batch=8, model=parse_model(LLAMA))
    for recompute in (0, 1):
        candidate = Candidate(recompute, 1, SERIAL, 1, 1, Placement(-1, -1, -1), mesh_of((4, 1, 1, 1), (2, 1, 1, 1)))
        cost = evaluator_of(task).played(candidate)
        entries = task.recomputed(candidate.recompute, candidate.first)
        plan = replace(preset("ddp", task.cluster), recompute=entries)
        flops = step_flops(task.blocks, plan, task.batch, task.sequence)
        possible = cost.step_s * task.cluster.world_size * task.peak_flops_per_s
        assert hfu(task, cost) == pytest.approx(flops.hardware / possible, rel=1e-12)
        square = flops.hardware + flops.masked + flops.masked_again
        assert hfu(task, cost, full=True) == pytest.approx(square / possible, rel=1e-12)
        assert (hfu(task, cost) > mfu(task, cost)) == bool(recompute)


LLAMA = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 1024,
    "max_position_embeddings": 512,
}


def test_the_slowest_tier_is_that_of_the_lowest_rate_of_a_device() -> None:
    assert slowest_tier(small_task(CLUSTERS["frontier 2x1x2"])) == "system"
    cluster = CLUSTERS["dgx 4x2"]
    swapped = replace(cluster, tiers=(replace(cluster.tiers[0], bandwidth_bytes_per_s=1e6), cluster.tiers[1]))
    assert slowest_tier(small_task(swapped)) == "node"


def test_a_step_that_rests_on_hidden_messages_says_so_in_every_command(here: Planning) -> None:
    slow = ("--cluster.tiers.system.bandwidth_bytes_per_s", "3e9")
    words = joined(here.say("plan", "--nodes", "2", "--axes", "data", *slow, batch=64).out)
    said = re.search(r"This (plan hides \S+ \w+ of messages on tier system .* instead of \S+ m?s)", words)
    assert said is not None
    assert said[0] in joined(here.call("simulate", "plan.toml", "--page", "p.html").out)
    assert said[0] in (here.folder / "p.html").read_text(encoding="utf-8").replace("&nbsp;", " ")
    assert joined(here.call("plan", "--scale", "--plan", "plan.toml").out).count(f"At system 2 this {said[1]}") == 2
    one = here.call("plan", "--scale", "--plan", "plan.toml", "--nodes", "1").out
    assert "plan hides" not in one
