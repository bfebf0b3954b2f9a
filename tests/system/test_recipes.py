"""The Slurm script of the docs runs as it is printed, with commands of Slurm that this file puts in their place."""

import json
import os
import re
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import tomli_w

from terrace.train.resolve import resolve
from tests.support.tiny_runs import MODEL, environment, write_run

pytestmark = pytest.mark.timeout(300)

DOCS = Path(__file__).parents[2] / "docs"

# Two tasks on this machine. Once the run has two lines of metrics they get the signal that Slurm would send before its
# time is over, but not in a requeued job.
SRUN = """#!{python}
import multiprocessing, os, sys, time
from terrace.cli.main import main
from terrace.runtime import engine  # once for both tasks

def task(rank, words):
    os.environ.update({{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NTASKS": "2"}})
    sys.argv = words
    sys.exit(main())

tasks = [multiprocessing.get_context("fork").Process(target=task, args=(rank, sys.argv[1:])) for rank in range(2)]
for each in tasks:
    each.start()
told = "SLURM_RESTART_COUNT" in os.environ
while any(each.is_alive() for each in tasks):
    lines = 0
    if os.path.exists("runs/llm/metrics.jsonl"):
        lines = len(open("runs/llm/metrics.jsonl").readlines())
    if not told and lines >= 2:
        told = True
        for each in tasks:
            each.terminate()
    time.sleep(0.02)
sys.exit(max(each.exitcode if each.exitcode >= 0 else 128 - each.exitcode for each in tasks))
"""


def _block(page: str, kind: str) -> str:
    found: list[str] = re.findall(rf"```{kind}\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.S)
    return found[0]


def _command(folder: Path, name: str, text: str) -> None:
    path = folder / name
    if text.startswith("#!/") and " " in (interpreter := text.partition("\n")[0][2:]):
        # The first line of a script cannot name a path with a space.
        script = folder / f"{name}.text"
        script.write_text(text)
        text = f'#!/bin/sh\nexec "{interpreter}" "{script}" "$@"\n'
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_the_job_runs_ends_in_time_requeues_itself_and_goes_on(tmp_path: Path) -> None:
    write_run(tmp_path, 1, 1, 2, steps=20, checkpoint_every=2, rank_logs=True)
    (tmp_path / "bin").mkdir()
    _command(tmp_path / "bin", "srun", SRUN.format(python=sys.executable))
    _command(tmp_path / "bin", "scontrol", '#!/bin/sh\necho "$@" >> requeued\n')
    (tmp_path / "job.sh").write_text(_block("slurm.md", "bash"))
    job = environment() | {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NAME": "llm",
        "SLURM_JOB_NODELIST": "127.0.0.1",
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_NNODES": "2",
        "TERRACE_SECRET": "only the ranks know this",
    }
    first = subprocess.run(
        ["bash", "job.sh"], cwd=tmp_path, env=job, capture_output=True, text=True, timeout=140, check=False
    )
    assert first.returncode == 143, first.stdout + first.stderr
    assert (tmp_path / "requeued").read_text() == f"requeue {os.getpid()}\n"
    again = job | {"SLURM_RESTART_COUNT": "1"}
    second = subprocess.run(
        ["bash", "job.sh"], cwd=tmp_path, env=again, capture_output=True, text=True, timeout=140, check=False
    )
    assert second.returncode == 0, second.stdout + second.stderr
    lines = [json.loads(line) for line in (tmp_path / "runs" / "llm" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 21))


def test_the_file_of_the_job_is_a_run(tmp_path: Path) -> None:
    """Its ranks are the tasks of the script; model and data are those of a tiny run."""
    write_run(tmp_path, 1)
    table = tomllib.loads(_block("slurm.md", "toml"))
    (tmp_path / "config.json").write_text(json.dumps(MODEL | {"max_position_embeddings": 4096}))
    table |= {"model": str(tmp_path / "config.json"), "data": {"path": str(tmp_path / "text.txt")}}
    path = tmp_path / "job.toml"
    path.write_text(tomli_w.dumps(table))
    script = _block("slurm.md", "bash")
    nodes, tasks = (int(re.findall(rf"--{name}=(\d+)", script)[0]) for name in ("nodes", "ntasks-per-node"))
    run = resolve(str(path), {}, {"cluster": {"tiers": {"system": {"size": nodes}}}})
    assert run.cluster.world_size == nodes * tasks
    assert run.train.rank_logs
