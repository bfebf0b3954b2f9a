"""`terrace probe`: bad input is one line before a process starts; a run writes a cluster that `load_cluster` reads."""

import os
from pathlib import Path

import pytest

from terrace.cli import probing
from terrace.cli.main import main
from terrace.cluster.presets import load_cluster
from tests.support.command_line import leave_launcher, torchrun
from tests.support.tiny_runs import one_line, terrace


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def launch(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(probing, "launch_local", launch)
    monkeypatch.chdir(tmp_path)
    leave_launcher(monkeypatch)
    (tmp_path / "there.toml").write_text("irreplaceable")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--seconds", "0"), "--seconds 0 must be a number above 0"),
        (("--seconds", "-3"), "--seconds -3 must be a number above 0"),
        (("--seconds", "nan"), "--seconds nan must be a number above 0"),
        (("--seconds", "1e21"), "--seconds 1e+21 must be at most 86400, a day"),
        (("--seconds", "x"), "argument --seconds: invalid float value: 'x'"),
        (("--cluster", "locl"), "no cluster preset or file 'locl'; did you mean 'local'?"),
        (("--cluster.tiers.system.size", "100"), "has 400 ranks, and one machine starts at most 64"),
        (("--cluster.tiers.sytem.size", "2"), "unknown name 'sytem' in tiers"),
        (("--train.steps", "2"), "a probe takes only --cluster.key VALUE"),
        (("more",), "unknown argument 'more'"),
        (("--out", "/proc/cluster.toml"), "--out /proc/cluster.toml cannot be written"),
        (("--out", "there.toml/cluster.toml"), "cannot be written"),
        (("--out", "."), "--out . cannot be written (it is a folder)"),
        (("--out", "a\0b.toml"), "--out a\\x00b.toml cannot be written"),
        (("--out", "cluster.json"), "must end in .toml"),
        (("--out", "there.toml"), "--out there.toml is there already: name another file, or replace it with --force"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_line(
    here: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    before = {path: path.read_bytes() for path in here.iterdir()}
    assert main(["probe", *words]) == 2
    out, error = capsys.readouterr()
    assert said in one_line(error)
    assert out == ""
    assert {path: path.read_bytes() for path in here.iterdir()} == before


@pytest.mark.timeout(300)
def test_a_probe_writes_a_cluster(tmp_path: Path) -> None:
    words = ("--ranks", "2", "--seconds", "0.3", "--out", "my.toml")
    done = terrace("probe", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "wrote my.toml: use it as --cluster my.toml" in done.stdout
    assert "kernels.gemm" in done.stdout
    cluster = load_cluster(str(tmp_path / "my.toml"))
    assert [(tier.name, tier.size) for tier in cluster.tiers] == [("package", 2), ("node", 1), ("system", 1)]
    assert cluster.tiers[0].marks["bandwidth_bytes_per_s"] == "fitted"
    assert list(tmp_path.iterdir()) == [tmp_path / "my.toml"]


@pytest.mark.timeout(300)
@pytest.mark.nightly
def test_a_launcher_of_too_few_ranks_is_refused_once(tmp_path: Path) -> None:
    done = torchrun(2, "-m", "terrace", "probe", "--seconds", "2", cwd=tmp_path)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("terrace: error:")]
    assert len(lines) == 1
    assert "2 ranks were started, but cluster 'local' has 8" in lines[0]
    assert os.listdir(tmp_path) == []
