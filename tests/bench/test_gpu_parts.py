"""`bench/gpu.py` on a machine without a GPU: parts run at their smallest, and none that fails costs another."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import pytest
import tomli_w
import torch

from bench import gpu
from bench.gpu import PARTS, again, chosen, missing, peak_tflops
from bench.gpu_parts import fp8, prediction, running
from bench.gpu_parts import tests as gpu_tests
from bench.gpu_parts.running import Part, run_parts
from bench.gpu_parts.setting import NOT_RUN, SKIPPED, Row, Setting
from bench.gpu_parts.summary import Summary
from terrace.base.errors import PlanError, ProgramError
from terrace.base.schema import dump
from terrace.cli import here
from terrace.cli.checks import check_devices_here, check_memory_here
from terrace.cli.overrides import read_cluster
from terrace.probe.gpus import Gpus
from terrace.probe.machine import Gpu
from terrace.simulate.fullest import Job, fullest_stage
from terrace.train.prediction import checked_programs, predict

HERE = (
    "exactness:parity",
    "exactness:streams",
    "codecs",
    "bandwidth",
    "products",
    "fp8",
    pytest.param("fused", marks=pytest.mark.nightly),  # starts ranks for every way
    "attention",
    "generation",
    "training:engine",
    "training:plain",
    "training:8B engine",
)
# A part without torch, in a process and by the entry point of all parts.
PART = """
import sys, types
from bench.gpu_parts.setting import Row
from bench.gpu_parts.__main__ import main
def rows(setting):
    yield Row("before", "1")
    {failure}
    yield Row("after", "2")
part = sys.modules["bench.gpu_parts.made_up"] = types.ModuleType("made_up")
part.rows = rows
main()
"""
FAILURES = {
    "good": ("pass", 20.0, None),
    "exits": ("import os; os._exit(0)", 20.0, "ended with 0 before its last row: nothing was printed"),
    "is killed": ("import os; os.kill(os.getpid(), 9)", 20.0, "ended with -9: nothing was printed"),
    "aborts": ("import os; os.abort()", 20.0, "ended with -6: "),
    "has no memory": (
        "import torch; raise torch.OutOfMemoryError('CUDA out of memory')",
        20.0,
        "ended with 1: torch.OutOfMemoryError: CUDA out of memory",
    ),
    "hangs": (
        "import signal, subprocess, sys, time; signal.signal(15, signal.SIG_IGN); print('asleep', flush=True);"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(77.125)']); time.sleep(60)",
        4.0,
        "had not ended after 4 s: asleep",
    ),
    "writes no row": (
        "import sys; file = open(sys.argv[sys.argv.index('--rows') + 1], 'a'); print('[1', file=file); file.close()",
        20.0,
        None,
    ),
    "last": ("pass", 20.0, None),
}


@pytest.mark.parametrize("name", HERE)
def test_a_part_runs_on_the_cpu(name: str, tmp_path: Path) -> None:
    setting = Setting(device="cpu", tiny=True, peak_tflops=1.0, folder=tmp_path)
    module, _, argument = name.partition(":")
    rows = import_module(f"bench.gpu_parts.{module}").rows
    found = list(rows(setting, argument) if argument else rows(setting))
    assert found
    assert all(row.passes for row in found), found


def test_every_part_has_a_module_and_they_are_worth_more_than_their_time() -> None:
    for part in PARTS:
        assert hasattr(import_module(f"bench.gpu_parts.{part.name.partition(':')[0]}"), "rows")
    assert sum(part.limit_s for part in PARTS[:7]) <= 540, "the first parts always have their time"
    of = {part.name.partition(":")[0] for part in PARTS[:7]}
    assert of == {"exactness", "training", "prediction", "codecs"}


def test_a_part_that_fails_in_any_way_costs_no_other(tmp_path: Path) -> None:
    def command(part: str, file: Path) -> Sequence[str]:
        words = ["made_up", "--rows", str(file), "--folder", str(tmp_path), "--device", "cpu", "--peak-tflops", "1"]
        return [sys.executable, "-c", PART.format(failure=FAILURES[part][0]), *words]

    parts = [Part(name, limit_s) for name, (_, limit_s, _) in FAILURES.items()]
    summary, found = Summary(tmp_path, "here", [part.name for part in parts]), dict[str, list[Row]]()
    for part, row in run_parts(parts, command, tmp_path, time.monotonic() + 100):
        summary.add(part, row)
        found.setdefault(part, []).append(row)
    for name, (_, _, problem) in FAILURES.items():
        first, *rest = found[name]
        assert first == Row("before", "1"), name
        if problem is not None:
            (failed,) = rest
            assert (failed.subject, failed.passes) == ("failed", False)
            assert failed.found.startswith(problem), failed
        else:
            assert rest[-1] == Row("after", "2")
    assert found["writes no row"][1] == Row("a broken row", "[1", False)
    assert "77.125" not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [(line["part"], line["found"]) for line in lines] == [(part, row.found) for part, row in summary.found]
    assert "; WRONG: exits, is killed, aborts, has no memory, hangs, writes no row;" in summary.last_line()


def test_no_part_begins_without_time(tmp_path: Path) -> None:
    late = list(run_parts([Part("one", 9.0), Part("two", 9.0)], lambda *_: [], tmp_path, time.monotonic() + 1))
    assert [(part, row.found) for part, row in late] == [("one", "no time was left"), ("two", "no time was left")]
    assert {row.verdict for _, row in late} == {NOT_RUN}
    summary = Summary(tmp_path, "here", ["one", "two"])
    for part, row in late:
        summary.add(part, row)
    summary.add("three", Row("liger-kernel", "not installed", without=SKIPPED))
    assert summary.last_line() == "3 rows; WRONG: none; missed: none; skipped: three; not run: one, two"
    assert summary.parts_with(NOT_RUN) == ["one", "two"]


def test_a_part_that_the_end_of_all_parts_cuts_off_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of one that has its own limit, the row is WRONG: `FAILURES`.
    monkeypatch.setattr(running, "_LEAST_S", 0.1)
    words = [sys.executable, "-c", "import time; time.sleep(60)"]
    ((part, row),) = run_parts([Part("long", 60.0)], lambda *_: words, tmp_path, time.monotonic() + 1)
    assert (part, row.verdict) == ("long", NOT_RUN)
    assert row.found.startswith("the time ended after")


def test_parts_are_chosen_by_whole_names_first() -> None:
    assert [part.name for part in chosen("training:engine")] == ["training:engine"]
    assert [part.name for part in chosen("fp8,exactness")] == ["exactness:parity", "exactness:streams", "fp8"]
    assert [part.name for part in chosen(None)] == [part.name for part in PARTS]
    assert again(["training:engine", "fp8"], ["--out", "a b", "--only", "fp8,training", "--tiny"]) == (
        "python -m bench.gpu --only training:engine,fp8 --out 'a b' --tiny"
    )


def test_packages_that_are_missing_are_named_before_anything_starts() -> None:
    assert missing(["json"]) == ""
    assert missing(["json", "no_such_package"]).startswith(
        "not installed: no-such-package; pip install no-such-package (without a network: docs/cuda.md"
    )


def test_a_second_call_keeps_the_rows_of_other_parts_on_the_same_device(tmp_path: Path) -> None:
    first = Summary(tmp_path, "H200, torch 2.13", ["a", "b"])
    for part in ("a", "b"):
        first.add(part, Row("figure", "1", without=NOT_RUN if part == "b" else ""))
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"part": "cut')
    second = Summary(tmp_path, "H200, torch 2.13", ["b"], goes_on=True)
    second.add("b", Row("figure", "2"))
    assert second.found == [("a", Row("figure", "1")), ("b", Row("figure", "2"))]
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 2
    assert not Summary(tmp_path, "H100, torch 2.13", ["b"], goes_on=True).found


def test_files_that_need_a_gpu_are_those_with_its_mark() -> None:
    tests = (gpu_tests.ROOT / "tests").rglob("*.py")
    assert sorted(path for path in tests if "mark." + "gpu" in path.read_text()) == gpu_tests.files()


@pytest.mark.nightly  # of torch, transformers and all test files of a GPU, cold
def test_tests_that_need_a_gpu_are_collected_without_packages_of_others(tmp_path: Path) -> None:
    absent = ("ray", "pyarrow", "tokenizers", "transformers", "tensorboard", "liger_kernel", "torchao", "trl")
    blocked = f"import sys; sys.modules.update(dict.fromkeys({absent}))"  # an import of None raises ImportError
    (tmp_path / "sitecustomize.py").write_text(blocked)
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(gpu_tests.ROOT)])}
    files = gpu_tests.files()
    done = subprocess.run(
        [*words, *map(str, files)],
        cwd=gpu_tests.ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # Each file has one, and no other file of the suite names the mark.
    assert {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line} == {
        str(file.relative_to(gpu_tests.ROOT)) for file in files
    }


def test_a_refusal_of_products_in_fp8_is_wrong_where_the_device_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> None:
        raise PlanError("no")

    monkeypatch.setattr(fp8, "command_plan", refuses)
    for capability, verdict in (((9, 0), "WRONG"), ((8, 0), SKIPPED)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        setting = Setting(device="cuda", tiny=True, peak_tflops=1.0, folder=tmp_path)
        assert fp8._step(setting, "fp8").verdict == verdict


def test_a_summary_names_goals_and_parts_to_come(tmp_path: Path) -> None:
    summary = Summary(tmp_path, "H200, torch 2.13", ["a", "b"])
    summary.add("a", Row("MFU", "49.0% | of all", False, "50%"))
    text = (tmp_path / "summary.md").read_text()
    assert "| a | MFU | 49.0% / of all | 50% | missed |" in text
    assert "Without a row so far: b." in text
    assert (summary.parts_with("missed"), summary.parts_with("WRONG")) == (["a"], [])


# Bytes by torch's count, and by nvidia-smi's.
CARDS = {"NVIDIA H100 80GB HBM3": (85_029_158_912, 81559), "NVIDIA H200": (150_109_880_320, 143771)}


@pytest.mark.parametrize("card", CARDS)
def test_the_run_that_is_predicted_fits_the_device(card: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # All that the part does on a device, but the measurements: its arguments, checks of programs, both predictions.
    total_bytes, smi_mib = CARDS[card]
    gpus = Gpus(devices=(Gpu(name=card, memory_bytes=smi_mib * 2**20),), source="nvidia-smi")
    monkeypatch.setattr(here, "gpus_here", lambda: gpus)
    setting = Setting(device="cuda", peak_tflops=989.4, folder=tmp_path)
    words = prediction.probe_words(setting, total_bytes)
    path, rest = Path(words[words.index("--out") + 1]), words[words.index("--ranks") + 2 :]
    probed = read_cluster(words[words.index("--cluster") + 1], rest, "", 1)
    assert (probed.world_size, probed.device.memory_bytes, probed.device.backend) == (1, total_bytes, "cuda")
    path.parent.mkdir()
    path.write_text(tomli_w.dumps(dump(probed)))
    run = prediction.run_of(prediction.train_words(setting, is_compiled=True))
    check_devices_here(run, 1)
    check_memory_here(run, [total_bytes], 128 * 2**30)
    (program,) = checked_programs(run)
    job = Job(cluster=run.cluster, plan=run.plan, num_micros=run.num_micros())
    needed = sum(fullest_stage(job, run.blocks(), run.train.sequence)[1].values())
    assert sum(program.state_bytes.values()) < needed < 0.5 * run.cluster.device.usable_bytes
    for cluster in (run.cluster, prediction.starting_cluster(words)):
        assert 0.02 < predict(run, cluster).reports[0].step_s < 2
    path.write_text(tomli_w.dumps(dump(read_cluster("local", [], "", 1))))
    with pytest.raises(ProgramError, match="the model state needs"):
        checked_programs(prediction.run_of(prediction.train_words(setting, is_compiled=True)))


@pytest.mark.nightly  # all parts, one after the other
def test_all_of_the_command_on_the_cpu(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "bench.gpu", "--device", "cpu", "--tiny", "--out", str(tmp_path)]
    words += ["--only", "exactness:parity,prediction,bandwidth"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900, check=False)
    summary = (tmp_path / "summary.md").read_text()
    for subject in ("parity fp64, zero3", "probe", "step, compiled", "memory resident, plain"):
        assert f"| {subject} |" in summary, done.stdout + done.stderr
    assert done.returncode == 0, done.stdout + done.stderr
    assert "; WRONG: none; missed: none" in summary
    assert "Without a row" not in summary


def test_peaks_are_of_the_device() -> None:
    names = {"NVIDIA H100 80GB HBM3": 989.4, "NVIDIA H100 PCIe": 756.0, "NVIDIA A100-SXM4-80GB": 312.0, "T4": None}
    assert {name: peak_tflops(name) for name in names} == names


def test_without_a_device_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu, "device_name", lambda: None)
    monkeypatch.setattr(sys, "argv", ["gpu", "--only", "exactness"])
    assert gpu.main() == 0
    assert capsys.readouterr().out == "no CUDA device here: nothing was run (--device cpu --tiny tries the parts)\n"
    monkeypatch.setattr(sys, "argv", ["gpu", "--device", "cpu", "--only", "nothing"])
    with pytest.raises(SystemExit, match="2"):
        gpu.main()
    assert "no part begins so" in capsys.readouterr().err
