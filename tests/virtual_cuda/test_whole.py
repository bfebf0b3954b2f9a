"""Whole commands on virtual devices, at their smallest sizes: no fault, NCCL's messages, and the numbers of the CPU."""

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import PARTS
from terrace.cli.here import named_table
from terrace.cluster.presets import parse_cluster
from terrace.launch.start import LocalPool
from tests.support.nightly import nightly
from tests.support.tiny_runs import metrics, terrace, write_run
from tests.virtual_cuda.rank import difference
from tests.virtual_cuda.whole import Ran, run

pytestmark = pytest.mark.timeout(360)

EXACT = ("--plan.compute", "fp64", "--plan.master", "fp64")
SIZES: dict[str, object] = {
    "task": "sort",
    "plan": "ddp",
    "plan.micro_batch": 2,
    "cluster.tiers.system.size": 1,
    "cluster.tiers.node.size": 1,
    "model.hidden_size": 32,
    "model.num_hidden_layers": 1,
    "run.prompts": 2,
    "run.responses": 4,
    "run.mini_batch": 8,
    "run.start_steps": 1,
    "run.start_batch": 8,
    "run.steps": 1,
    "folder": "run",
}
ROLES = [word for key, value in SIZES.items() for word in (f"--{key}", str(value))]
TRAINED: dict[str, tuple[str, ...]] = {
    "checkpoints and validation": (
        *("--train.eval_every", "2", "--train.checkpoint_every", "2", "--data.holdout", "0.1"),
        *("--train.profile", "3"),
    ),
    "LoRA on documents": ("--lora.rank", "2", "--data.documents", "separate"),
    "stages": ("--plan", "ddp", "--plan.mapping.package.pipeline", "2"),
    "compiled": ("--train.compile", "true"),
}
# Of `bench/gpu.py`: "tests" starts those that need a device, and kernels of Triton have none here.
WITHOUT = {"tests", "codecs"}
EVERY_DAY = ("exactness:streams", "training:fsdp2", "attention", "generation")


def checked(ran: Ran, ranks: int) -> None:
    """The command has ended well on so many ranks, whose messages were NCCL's, and nobody has noticed a fault."""
    assert ran.code == 0, (ran.error, ran.out[-2000:])
    assert not [each.error for each in ran.noticed if each.error], ran.noticed[0].error
    assert not ran.faults, "\n".join(ran.faults)
    logs = [each.log for each in ran.noticed if each.name.startswith("rank")]
    assert len(logs) == ranks
    assert all(any(entry.what in ("collective", "send", "receive") for entry in log) for log in logs)


def numbers(folder: Path) -> list[float]:
    """Losses, norms and evaluations of a run."""
    found: list[float] = []
    for line in metrics(folder):
        found += [line["loss"], line["grad_norm"], *(each["loss"] for each in line.get("eval", {}).values())]
    return found


@pytest.mark.parametrize("name", [*[*TRAINED][:1], *nightly(*[*TRAINED][1:])])
def test_a_run_has_the_numbers_of_the_cpu(pool: LocalPool, name: str, tmp_path: Path) -> None:
    write_run(tmp_path, 2, plan="zero3", steps=3)
    words = ["train", "--config", "run.toml", *EXACT, *TRAINED[name]]
    checked(run(tmp_path, "terrace", *words, "--folder", "there"), 2)
    on_cpu = terrace(*words, "--train.compile", "false", "--folder", "here", cwd=tmp_path)
    assert on_cpu.returncode == 0, on_cpu.stderr
    assert len(numbers(tmp_path / "there")) >= 6
    assert difference(numbers(tmp_path / "there"), numbers(tmp_path / "here")) < 1e-10
    if "--train.profile" in words:
        # Every allocation of the traced step is in the device's record; a CPU has none.
        (history,) = pickle.loads((tmp_path / "there" / "profile" / "memory-rank-0.pickle").read_bytes())[
            "device_traces"
        ]
        assert {each["action"] for each in history} == {"alloc", "free_completed"}
        assert not (tmp_path / "here" / "profile" / "memory-rank-0.pickle").exists()
        shown = json.loads((tmp_path / "there" / "profile" / "step-3-rank-0.json").read_text())["traceEvents"]
        in_use = [each["args"]["in use"] for each in shown if each["ph"] == "C" and "in use" in each["args"]]
        assert min(in_use) > 0
        assert max(in_use) - min(in_use) <= sum(each["size"] for each in history if each["action"] == "alloc")


@pytest.mark.nightly
def test_what_is_done_with_a_run(pool: LocalPool, tmp_path: Path) -> None:
    write_run(tmp_path, 2, plan="zero3", steps=2)
    checked(run(tmp_path, "terrace", "train", "--config", "run.toml", "--folder", "run"), 2)
    checked(run(tmp_path, "terrace", "train", "--resume", "run", "--train.steps", 4), 2)
    checked(run(tmp_path, "terrace", "replay", "run", "--step", 3), 2)
    for words in (("generate", "run", "--prompt", "The "), ("eval", "run", "--data", "text.txt"), ("doctor",)):
        checked(run(tmp_path, "terrace", *words), 0)


@pytest.mark.nightly  # by day the parts of it: generation, pages and the hand-over in test_virtual_pages.py
@pytest.mark.parametrize(
    ("program", "more"), [("mapped", ()), ("terrace", ("--algorithm.name", "ppo", "--run.mini_batch", "4"))]
)
def test_roles_learn_from_feedback(pool: LocalPool, program: str, more: tuple[str, ...], tmp_path: Path) -> None:
    """With keys and values in mapped pages, which go back before each update, or in gathered ones."""
    ran = run(tmp_path, program, "rl", *ROLES, *EXACT, *more, "--cluster.device.backend", "cuda")
    checked(ran, 2)
    there = _of_roles(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    on_cpu = terrace("rl", *ROLES, *EXACT, *more, "--cluster.device.backend", "cpu", cwd=tmp_path)
    assert on_cpu.returncode == 0, on_cpu.stderr
    assert difference(there, _of_roles(tmp_path / "run")) < 1e-10


def _of_roles(folder: Path) -> list[float]:
    lines: list[dict[str, Any]] = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    wanted = [name for name in lines[0] if name.split("/")[0] in ("reward", "kl", "policy", "response", "actor")]
    assert len(wanted) > 3, sorted(lines[0])
    return [float(line[name]) for line in lines for name in wanted]


@pytest.mark.parametrize(
    "parts",
    [EVERY_DAY, *nightly(([each.name for each in PARTS if each.name not in {*EVERY_DAY, *WITHOUT}],))],
    ids=["every day", "the rest"],
)
def test_parts_for_a_gpu(pool: LocalPool, parts: tuple[str, ...], tmp_path: Path) -> None:
    ran = run(tmp_path, "gpu_parts", *parts)
    assert ran.code == 0, ran.error
    assert not ran.faults, "\n".join(ran.faults)
    found = {each.name.replace(" ", ":", 1): each for each in ran.noticed if not each.name.startswith("rank")}
    for part in parts:
        assert not found[part].error, (part, found[part].error)
        rows = found[part].rows
        wrong = [row for row in rows if row[-1] not in ("ok", "skipped")]
        assert rows, part
        assert not wrong, (part, wrong)


@pytest.mark.nightly
def test_a_probe_of_two_ranks_measures_their_link(pool: LocalPool, tmp_path: Path) -> None:
    # In less time, a message of this device would take longer than its share, and small ones be repeated for it.
    words = ("probe", "--cluster", "auto", "--ranks", "2", "--seconds", "8", "--out", "cluster.toml")
    checked(run(tmp_path, "terrace", *words), 2)
    cluster = parse_cluster(named_table(str(tmp_path / "cluster.toml")))
    assert cluster.world_size == 2
    assert cluster.device.backend == "cuda"


@pytest.mark.nightly
@pytest.mark.timeout(1300)  # a process for each of twenty parts, none of which starts warm
def test_the_command_for_a_gpu(pool: LocalPool, tmp_path: Path) -> None:
    """Its entry, which asks a process for the device and starts one for each part, as on a machine with a GPU."""
    parts = [each.name for each in PARTS if each.name not in WITHOUT]
    words = ["--tiny", "--peak-tflops", "1", "--minutes", "30", "--out", tmp_path / "out", "--only", ",".join(parts)]
    ran = run(tmp_path, "python", "-m", "bench.gpu", *words, takes_s=1200.0)
    assert ran.code == 0, (ran.error, ran.out)
    assert not ran.faults, "\n".join(ran.faults)
    lines = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert {line["part"] for line in lines} == set(parts)
    assert {line["verdict"] for line in lines} <= {"ok", "skipped"}, lines
    started = {each.name for each in ran.noticed}
    assert {"python code", *(f"python bench.gpu_parts {part.replace(':', ' ')}" for part in parts)} <= started
