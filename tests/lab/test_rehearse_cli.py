"""`terrace rehearse`: bad input is one line before anything is built; the paced mode; its help."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from terrace.base.errors import ClusterError
from terrace.cli.main import _split_program, main
from terrace.lab.rehearse import tools
from terrace.lab.rehearse.names import existing, owner_of
from tests.support.tiny_runs import one_line, terrace

RUN = ("rehearse", "run", "--cluster", "lab")


def _refused(capfd: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 2
    out, error = capfd.readouterr()
    assert out == ""
    assert not [name for name in existing() if (owner := owner_of(name)) and owner.pid == os.getpid()]
    return one_line(error)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("rehearse",), "the following arguments are required: run|check|clean; see terrace rehearse --help"),
        (("rehearse", "walk"), "invalid choice: 'walk'"),
        (RUN, "no command given: write it after --"),
        ((*RUN, "--"), "no command given: write it after --"),
        ((*RUN, "python"), "no command given: write it after --"),
        ((*RUN, "--", "nowhere-to-be-found"), "no program 'nowhere-to-be-found' to run"),
        (("rehearse", "run", "--", "ls"), "a rehearsal needs --cluster NAME|FILE"),
        (("rehearse", "check"), "a rehearsal needs --cluster NAME|FILE"),
        (("rehearse", "run", "--cluster", "labb", "--", "ls"), "no cluster preset or file 'labb'; did you mean 'lab'?"),
        ((*RUN, "--scale", "x", "--", "ls"), "argument --scale: invalid float value: 'x'"),
        ((*RUN, "--scale", "0", "--", "ls"), "--scale 0.0 must be a number above 0"),
        ((*RUN, "--scale", "nan", "--", "ls"), "--scale nan must be a number above 0"),
        ((*RUN, "--scale", "1e-6", "--", "ls"), "'package' at scale 1e-06 has 1500 bytes/s, and links below 20000"),
        ((*RUN, "--cluster.tiers.sytem.size", "4", "--", "ls"), "unknown name 'sytem' in tiers"),
        ((*RUN, "--cluster.tiers.system.size", "40", "--", "ls"), "has 160 ranks, and one machine emulates at most 64"),
        ((*RUN, "--train.steps", "4", "--", "ls"), "put the program's own options after --"),
        ((*RUN, "--counters", "/proc/here.json", "--", "ls"), "--counters /proc/here.json cannot be written"),
        ((*RUN, "--counters", "/", "--", "ls"), "--counters / cannot be written (it is a folder): name a file"),
        (("rehearse", "check", "--cluster", "lab", "--", "ls"), "rehearse check runs no command"),
        (("rehearse", "clean", "all"), "unknown argument 'all'"),
        ((*RUN, "--paced", "--", "terrace", "train"), "the command names its cluster: leave out --cluster"),
        (("rehearse", "run", "--paced", "--", "ls"), "--paced needs a command that begins with terrace, not 'ls'"),
        (("rehearse", "run", "--paced", "--scale", "-1", "--", "terrace"), "--scale -1.0 must be a number above 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_bad_command_is_one_line(capfd: pytest.CaptureFixture[str], words: tuple[str, ...], said: str) -> None:
    assert said in _refused(capfd, *words)


def test_without_rights_it_names_the_paced_mode(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tools, "capabilities", lambda: 0)
    assert "needs root (CAP_NET_ADMIN and CAP_SYS_ADMIN): use sudo, or add --paced" in _refused(capfd, *RUN, "--", "ls")


def test_without_tools_it_names_their_package(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tools, "capabilities", lambda: -1)
    monkeypatch.setattr(tools, "_PATH", "/nowhere")
    assert "no program 'ip' in /nowhere: install the package iproute2" in _refused(capfd, *RUN, "--", "ls")


def test_a_refusal_of_the_kernel_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of `ip` in a container without privileges."""
    for name in ("ip", "tc"):
        (tmp_path / name).write_text(
            '#!/bin/sh\necho "mount --make-shared /run/netns failed: Not permitted" >&2\nexit 1\n'
        )
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(tools, "capabilities", lambda: -1)
    monkeypatch.setattr(tools, "_PATH", str(tmp_path))
    said = _refused(capfd, *RUN, "--", "ls")
    assert "the kernel refused `ip -batch -`: mount --make-shared /run/netns failed: Not permitted" in said


def test_the_line_of_a_batch_that_failed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tc").write_text('#!/bin/sh\necho "Error: No such thing.\nCommand failed -:2" >&2\nexit 1\n')
    (tmp_path / "tc").chmod(0o755)
    monkeypatch.setattr(tools, "_PATH", str(tmp_path))
    with pytest.raises(ClusterError, match=r"the kernel refused `tc second`: No such thing\."):
        tools.call(["tc", "-batch", "-"], "first\nsecond\n")


def test_the_command_begins_after_the_first_two_dashes() -> None:
    assert _split_program(["rehearse", "run", "--", "git", "--", "x"]) == (["rehearse", "run"], ["git", "--", "x"])
    assert _split_program(["train", "--", "x"]) == (["train", "--", "x"], [])


def test_the_paced_mode_becomes_the_command_and_says_the_pace() -> None:
    program = "import os, sys; print(os.environ['TERRACE_PACE'], os.getpid()); sys.exit(3)"
    words = f"from terrace.lab.rehearse.launch import run_paced; run_paced({[sys.executable, '-c', program]!r}, 0.25)"
    with subprocess.Popen([sys.executable, "-c", words], stdout=subprocess.PIPE, text=True) as process:
        said, _ = process.communicate(timeout=150)
    assert process.returncode == 3
    assert said == f"0.25 {process.pid}\n", "one process: a signal to it reaches the command"
    done = terrace("rehearse", "run", "--paced", "--", "terrace", "--version", cwd=Path.cwd())
    assert done.returncode == 0
    assert "terrace" in done.stdout


def test_help_says_that_compute_does_not_scale(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(("rehearse", "run", "--help"))
    assert "Compute does not scale" in " ".join(capsys.readouterr().out.split())
