"""The doctor: findings about a machine and about a run, the slow tier and a faster plan."""

import json
import re
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from terrace.base.errors import ConfigError
from terrace.base.extras import install
from terrace.base.words import seconds
from terrace.cli import checks, first_screen
from terrace.cli.checks import check_run, slow_warning, task_of
from terrace.cli.doctor import _plan_command
from terrace.cli.main import main
from terrace.launch.start import LocalPool, World
from terrace.model.pair_kernels import describe
from terrace.planner.bottleneck import better_plan, bottleneck
from terrace.planner.evaluate import Evaluator
from terrace.planner.search import find
from terrace.planner.space import Space
from terrace.planner.task import plan_of
from terrace.planner.verdicts import refusal
from terrace.probe.environment import launcher_variables
from terrace.probe.findings import Finding, findings
from terrace.probe.machine import NEEDED, PACKAGES, Gpu, look
from terrace.probe.network import MeasuredTier, measure_links
from terrace.simulate.links import latency_and_rate
from terrace.train.config import RunConfig
from terrace.train.prediction import predict
from terrace.train.resolve import resolve
from tests.support.command_line import without_torch
from tests.support.effort import lines_run
from tests.support.machines import SOUND
from tests.support.tiny_runs import terrace, write_run
from tests.support.toys import cluster_of

FP32 = {"compute": "fp32"}
H100 = Gpu(name="H100", memory_bytes=80_000_000_000)


def test_a_sound_machine_has_nothing_to_be_done() -> None:
    found = findings(SOUND)
    assert {each.level for each in found} == {"fine"}
    assert _of(found, "backend").words == "gloo on the CPU: this machine has no usable CUDA device"
    assert not any(each.fix for each in found)


def _of(found: list[Finding], about: str) -> Finding:
    return next(each for each in found if each.about == about)


@pytest.mark.parametrize(
    ("changes", "about", "level", "words", "fix"),
    [
        ({"python": (3, 10, 2)}, "python", "blocks", "3.10.2 is too old", "install Python 3.11"),
        ({"packages": {"torch": None}}, "torch", "blocks", "planning works", install("torch")),
        ({"packages": {"safetensors": None}}, "safetensors", "blocks", "absent", install("torch")),
        ({"packages": {"torch": "2.9.1+cu128"}}, "torch", "note", "was not tried", "pip install 'torch>=2.11'"),
        ({"torch_error": "OSError: libcudart"}, "torch", "blocks", "libcudart", "--force-reinstall"),
        ({"packages": {"wandb": None}}, "wandb", "absent", "train.metrics", "pip install wandb"),
        (
            {"packages": {"tokenizers": None}},
            "tokenizers",
            "absent",
            "tokenizer.json",
            install("jinja2"),
        ),
        ({"has_nvidia": True}, "backend", "note", "built for the CPU", "CUDA build"),
        ({"has_nvidia": True, "torch_cuda": "12.8"}, "backend", "note", "sees no device", "nvidia-smi"),
        ({"gpus": (H100,) * 8}, "backend", "note", "without nccl", "nccl"),
        ({"gpus": (H100,) * 8, "has_nccl": True}, "backend", "fine", "nccl on CUDA: 8 x H100", ""),
        ({"has_gloo": False}, "backend", "blocks", "ranks cannot communicate", "gloo"),
        ({"free_memory_bytes": 10**8}, "memory", "note", "less than one rank", "end other"),
        ({"free_disk_bytes": 10**8}, "disk", "note", "0.1 GB", "--folder"),
        ({"open_files": 256}, "open files", "note", "256", "ulimit -n"),
        ({"fabrics": ("mlx5_0",), "locked_bytes": 65536}, "locked memory", "note", "mlx5_0", "ulimit -l"),
        ({"interfaces": ("lo",)}, "network", "note", "only the loopback", ""),
        ({"variables": {"RANK": "0", "WORLD_SIZE": "2"}}, "launcher", "blocks", "WORLD_SIZE=2", "MASTER_ADDR"),
        ({"variables": {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}}, "launcher", "fine", "none", ""),
    ],
)
def test_what_is_wrong_is_named_with_what_helps(
    changes: dict[str, Any], about: str, level: str, words: str, fix: str
) -> None:
    if "packages" in changes:
        changes = changes | {"packages": {**SOUND.packages, **changes["packages"]}}
    found = _of(findings(replace(SOUND, **changes)), about)
    assert found.level == level
    assert words in found.words
    assert fix in found.fix
    assert bool(fix) == bool(found.fix)


def test_triton_is_told_of_where_it_would_help() -> None:
    cuda = replace(SOUND, gpus=(H100,), has_nccl=True, packages={**SOUND.packages, "triton": None})
    assert _of(findings(cuda), "codecs").fix == "pip install triton"
    assert _of(findings(replace(cuda, packages=SOUND.packages)), "codecs").level == "fine"


def test_this_machine_is_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("RANK", "3")
    assert launcher_variables() | {"NCCL_DEBUG": "WARN", "RANK": "3"} == launcher_variables()
    machine = look(tmp_path)
    assert machine.packages.keys() == PACKAGES.keys()
    assert all(machine.packages[name] for name in NEEDED)
    assert machine.packages["wandb"] is None or machine.packages["wandb"]
    assert machine.num_cores >= 1
    assert 0 < machine.free_memory_bytes <= machine.memory_bytes < 2**60
    assert machine.has_gloo
    assert "lo" in machine.interfaces
    assert machine.variables["NCCL_DEBUG"] == "WARN"


@pytest.fixture(scope="module")
def slow_run() -> RunConfig:
    """ZeRO-3 of a small model over a slow Ethernet, where most of the step is waiting."""
    run = resolve(
        None,
        {"cluster": "ethernet", "plan": "zero3"},
        {
            "train": {"batch": 64, "sequence": 1024},
            "model": {"hidden_size": 640, "max_position_embeddings": 1024},
            "plan": {"micro_batch": 1, "unit": 1},
        },
    )
    return run


def test_most_of_a_step_on_one_tier_is_told_with_a_plan_that_is_faster(slow_run: RunConfig) -> None:
    task = task_of(slow_run, slow_run.cluster)
    slow = bottleneck(task, slow_run.plan)
    assert slow.is_most
    assert slow.tier == "system"
    evaluator = Evaluator(task)
    assert slow.step_s == predict(slow_run, slow_run.cluster).step_s
    better = better_plan(task, slow.step_s, 400)
    assert better is not None
    gain = slow.step_s / better.step_s
    assert gain == pytest.approx(slow.step_s / evaluator.played(better.candidate).step_s)
    assert gain > 1.5
    assert refusal(task.cluster, plan_of(task, better.candidate), task.blocks) == ""
    assert better_plan(task, better.step_s, 400) is None, "the best plan has no better"
    speed = _of(check_run(slow_run, SOUND, "terrace plan --model m.json"), "speed")
    assert speed.level == "note"
    assert "wait for messages on tier system" in speed.words
    assert f"predicted to be {gain:.2g} times as fast" in speed.fix
    assert speed.fix.endswith("to have it written: terrace plan --model m.json")


def test_the_start_of_a_run_warns_or_points_to_the_doctor(slow_run: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    warning = slow_warning(slow_run, slow_run.cluster, 10.0)
    assert lines_run(lambda: slow_warning(slow_run, slow_run.cluster, 10.0)) < 1_500_000
    assert "% of the predicted step wait for messages on tier system; predicted to be " in warning
    monkeypatch.setattr(checks, "_SMALL_WORLD", 4)
    hint = slow_warning(slow_run, slow_run.cluster, 10.0)
    assert "terrace doctor with the same options says whether another plan is faster" in hint
    fast = [replace(tier, bandwidth_bytes_per_s=1e15, latency_s=0.0, half_bytes=0.0) for tier in slow_run.cluster.tiers]
    assert slow_warning(slow_run, replace(slow_run.cluster, tiers=tuple(fast)), 10.0) == ""


def test_a_plan_that_no_search_finds_is_looked_at_as_well(slow_run: RunConfig) -> None:
    odd = replace(slow_run, plan=replace(slow_run.plan, prefetch=2))
    speed = _of(check_run(odd, SOUND, "terrace plan"), "speed")
    assert f"predicted step {seconds(predict(odd, odd.cluster).step_s)}" in speed.words


def test_a_plan_of_stages_is_looked_at_as_well(slow_run: RunConfig) -> None:
    plan = replace(slow_run.plan, mapping={"system": {"pipeline": 2}}, schedule="1f1b")
    slow = bottleneck(task_of(slow_run, slow_run.cluster), plan)
    assert 0 <= slow.share < 1
    assert slow.step_s > 0


def test_a_run_on_pairs_is_priced_by_its_sequences(slow_run: RunConfig) -> None:
    rows = replace(slow_run.train, batch=32, sequence=256)
    pairs = replace(rows, batch=16, objective="dpo")
    plan = replace(slow_run.plan, micro_batch=2)
    run, like = (replace(slow_run, train=train, plan=plan) for train in (pairs, rows))
    assert task_of(run, run.cluster) == task_of(like, like.cluster)
    assert _of(check_run(run, SOUND, ""), "speed") == _of(check_run(like, SOUND, ""), "speed")
    warning = slow_warning(run, run.cluster, 10.0)
    assert warning
    assert warning == slow_warning(like, like.cluster, 10.0)
    options = Namespace(model="m.json", cluster="ethernet")
    assert "--batch 32 " in _plan_command(options, run)


def test_what_does_not_fit_blocks(slow_run: RunConfig) -> None:
    device = replace(slow_run.cluster.device, memory_bytes=4e8)
    small = replace(slow_run, cluster=replace(slow_run.cluster, device=device))
    found = check_run(small, SOUND, "terrace plan")
    assert any(each.level == "blocks" for each in found)
    fix = _of(found, "memory of a rank").fix
    assert fix == "no plan fits here; nor with up to 64 times as many members of 'system'"
    # Replicated, the model lacks a quarter of a gigabyte.
    device = replace(slow_run.cluster.device, memory_bytes=1.95e9)
    plan = replace(slow_run.plan, params="device", grads="device", optimizer="device", micro_batch=4, compute="fp32")
    tight = replace(slow_run, plan=plan, cluster=replace(slow_run.cluster, device=device))
    best = find(Space(task=task_of(tight, tight.cluster)), 1)[0].best[0]
    fix = _of(check_run(tight, SOUND, "terrace plan"), "memory of a rank").fix
    assert fix.startswith(f"the fastest plan that fits takes {seconds(best.step_s)} a step: params ")
    assert fix.endswith("; to have it written: terrace plan")
    ranks = _of(check_run(slow_run, SOUND, "terrace plan"), "ranks")
    assert ranks.level == "note"
    assert "one CUDA device each for 16 ranks; this machine has 0" in ranks.words
    assert not [each for each in check_run(slow_run, replace(SOUND, gpus=(H100,) * 16), "") if each.about == "ranks"]


def test_the_start_of_a_run_says_what_bf16_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_screen, "bf16_slowdown", lambda: 9.6)
    asked, left_out, exact = (resolve(None, {}, {"plan": plan}) for plan in ({"compute": "bf16"}, {}, FP32))
    words = 'warning: plan.compute = "bf16": products take 9.6 times as long as in fp32'
    assert first_screen.dtype_words(asked)[0].startswith(words)
    links = "\n".join(first_screen.dtype_words(left_out, verbose=True))
    assert "computes in fp32, sends parameters and gradients in bf16" in links
    assert "2.0 times as long" in links
    (line,) = first_screen.dtype_words(left_out)
    assert "2.0 times as long" in line
    assert len(line) <= 80
    assert first_screen.dtype_words(exact) == []
    monkeypatch.setattr(first_screen, "bf16_slowdown", lambda: 0.5)
    assert first_screen.dtype_words(asked) == []


def test_the_exit_code_is_that_of_what_blocks(tmp_path: Path) -> None:
    write_run(tmp_path, 2)
    good = terrace("doctor", "--config", "run.toml", cwd=tmp_path)
    assert good.returncode == 0, good.stderr
    assert "gloo" in good.stdout
    assert f"  {describe(torch.device('cpu'), torch.bfloat16)}, " in good.stdout
    assert re.search(r"  products +in bf16 \d+\.\d times the time of fp32: ", good.stdout)
    assert "nothing blocks" in good.stdout
    assert "suits cluster test with 2 ranks" in good.stdout
    bad = terrace("doctor", "--config", "run.toml", "--plan", "no-such-plan", "--json", cwd=tmp_path)
    assert bad.returncode == 1
    table = json.loads(bad.stdout)
    (blocking,) = [each for each in table["findings"] if each["level"] == "blocks"]
    assert "no plan preset or file 'no-such-plan'" in blocking["words"]
    assert table["machine"]["num_cores"] >= 1
    assert table["links"] == []
    assert main(["doctor", "--seconds", "31"]) == 2


def test_without_torch_it_says_what_gets_it() -> None:
    done = without_torch("doctor", "--cluster", "dgx-h100", "--network")
    assert done.returncode == 1, done.stderr
    assert install("torch") in done.stdout
    assert "blocked by torch, numpy, links" in done.stdout
    assert "suits cluster" in done.stdout, "planning needs no torch"


def test_links_are_measured_by_tier(pool: LocalPool) -> None:
    cluster = cluster_of(2, 1, 2)
    found = pool.run(4, links_of, cluster)
    assert found[0] == found[3], "all ranks have the same figures"
    assert [link.tier for link in found[0]] == ["package", "system"]
    for link in found[0]:
        assert link.bandwidth_bytes_per_s > 1e6
        assert 0 <= link.latency_s < 1
        assert link.given_bandwidth_bytes_per_s == cluster.tiers[0].bandwidth_bytes_per_s


def links_of(world: World, cluster: Any) -> list[MeasuredTier]:
    return measure_links(world, cluster, 0.5, lambda what: None)


def test_latency_and_bandwidth_come_from_two_sizes() -> None:
    small, large = 4096, 1 << 20
    assert latency_and_rate(small, 1e-3 + small / 5e8, large, 1e-3 + large / 5e8) == pytest.approx((1e-3, 5e8))
    assert latency_and_rate(small, 2.0, large, 1.0) == (0.0, float(large))


def test_a_network_that_is_slower_than_its_file_is_told() -> None:
    from terrace.cli.doctor import _link_finding

    link = MeasuredTier(
        tier="node", latency_s=1e-4, bandwidth_bytes_per_s=4e8, given_latency_s=1e-5, given_bandwidth_bytes_per_s=1e9
    )
    assert _link_finding(link).level == "note"
    assert "terrace probe" in _link_finding(link).fix
    assert _link_finding(replace(link, bandwidth_bytes_per_s=9e8)).level == "fine"


def test_seconds_are_checked() -> None:
    for number in ("0", "nan", "-1", "31"):
        assert main(["doctor", "--seconds", number]) == 2
    with pytest.raises(ConfigError):
        resolve(None, {}, {"train": {"nothing": 1}})
