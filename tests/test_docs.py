"""Every `terrace` or `torchrun` command that the docs show is run, and every `make` target exists."""

import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from terrace.cluster.cluster import Cluster, Device, Kernels, Tier
from terrace.cluster.failures import Failures
from terrace.data.config import DataConfig
from terrace.model.balance import BalanceConfig
from terrace.model.lora.config import LoraConfig
from terrace.plan.outer import Outer
from terrace.plan.plan import Plan
from terrace.plan.pruning import BlockPruning
from terrace.rl.algorithms.algorithm import Algorithm
from terrace.rl.keys import EnvironmentKeys, RewardKeys, RunKeys
from terrace.runtime.settings import OptimizerConfig
from terrace.train.keys import TrainConfig
from tests.support.documents import DOCS, runs_here, shown_commands
from tests.support.tiny_runs import environment, terrace

ROOT = Path(__file__).parents[1]


def test_the_docs_show_commands() -> None:
    assert {"README.md", "plans.md", "training.md"} <= {name for name, _ in shown_commands()}
    for name, command in shown_commands():
        assert command.split()[0] in ("terrace", "torchrun", "make", "git", "cd"), f"{name}: {command}"


def _keys(*tables: type) -> list[str]:
    fields = (field for table in tables for field in dataclasses.fields(table))
    return [field.name for field in fields if field.init and field.metadata.get("key", True)]


@pytest.mark.parametrize(
    ("document", "keys"),
    [
        ("clusters.md", _keys(Cluster, Device, Kernels, Tier, Failures)),
        ("plans.md", _keys(Plan)),
        ("slow-networks.md", _keys(Outer)),
        ("lora.md", _keys(LoraConfig)),
        ("experts.md", _keys(BalanceConfig)),
        ("pruning.md", _keys(BlockPruning)),
        ("rl.md", _keys(RunKeys, RewardKeys, EnvironmentKeys, Algorithm)),
        ("training.md", _keys(DataConfig, TrainConfig, OptimizerConfig)),
    ],
)
def test_every_key_of_a_file_is_documented(document: str, keys: list[str]) -> None:
    """In a TOML example, or named in backticks, with its table or without."""
    text = (ROOT / "docs" / document).read_text(encoding="utf-8")
    named = r"`\[?(\w+\.)*{0}\b|^\[*(\w+\.)*{0}([].]| =)"
    missing = [key for key in keys if not re.search(named.format(key), text, re.M)]
    assert not missing


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for name, command in shown_commands():
        if command.split()[0] == "make":
            assert re.search(rf"^{command.split()[1]}:", makefile, re.M), f"{name}: {command}"


# Long pages whose commands have tests of their own.
_NIGHTLY = (
    "checkpoints.md",
    "coming-from.md",
    "context.md",
    "distillation.md",
    "failures.md",
    "experts.md",
    "fine-tuning.md",
    "generating.md",
    "hugging-face.md",
    "lora.md",
    "metrics.md",
    "offload.md",
    "one-machine.md",
    "pipelines.md",
    "planning.md",
    "probing.md",
    "pruning.md",
    "quick-start.md",
    "renting.md",
    "rl-mapping.md",
    "rl.md",
    "simulating.md",
    "slurm.md",
    "slow-networks.md",
    "training.md",
)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "document",
    [
        pytest.param(name, marks=pytest.mark.nightly if name in _NIGHTLY else ())
        for name in sorted({name for name, _ in runs_here()})
    ],
)
def test_commands_of_a_document_run_in_order(document: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    commands = [
        command.replace("/tmp/", f"{shlex.quote(str(tmp_path))}/") for name, command in runs_here() if name == document
    ]
    for command in commands:
        program, *words = shlex.split(command)
        if program == "terrace" and not set(command) & set("|<>&;*$`~"):
            done = terrace(*words, cwd=tmp_path)
        else:  # the shell must read it
            done = _in_a_shell(command, tmp_path)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        assert done.stdout.strip(), f"{command} printed nothing"


def _in_a_shell(command: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    scripts = str(Path(sys.executable).parent)
    path = {**environment(), "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(
        command, shell=True, cwd=folder, env=path, capture_output=True, text=True, timeout=400, check=False
    )


def _python_blocks() -> dict[str, list[str]]:
    found = {path.name: re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.S) for path in DOCS}
    return {name: blocks for name, blocks in found.items() if blocks}


@pytest.mark.parametrize("document", sorted(_python_blocks()))
def test_python_of_a_document_runs_in_order(document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of a page share their names, as in one session, in this process."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in _python_blocks()[document]:
        exec(compile(block, document, "exec"), names)


def test_every_argument_of_the_trainer_is_documented() -> None:
    import inspect

    from terrace.train.trainer import Trainer

    text = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    arguments = set(inspect.signature(Trainer).parameters) - {"blocks", "say"}
    assert arguments == set(re.findall(r"^\| `(\w+)`", text, re.M))
