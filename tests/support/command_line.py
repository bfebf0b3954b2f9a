"""The command line called in this process, and programs that tests start in a process of their own."""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from terrace.cli.main import main
from tests.support.tiny_runs import environment, one_line


class Said(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    error: str


class CommandLine:
    """A folder, and the command line called in it."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capsys = folder, capsys

    def call(self, *words: object) -> Said:
        code = main([str(word) for word in words])
        return Said(code, *self._capsys.readouterr())

    def refusal(self, *words: object, code: int = 2) -> str:
        """The one line of a refusal; nothing may have been printed, or written but the token cache and bytecode."""
        before = self.listing()
        said = self.call(*words)
        assert (said.code, said.out) == (code, "")
        assert self.listing() == before
        return one_line(said.error)

    def listing(self) -> dict[str, bytes | None]:
        made = {"cache", "__pycache__"}
        found = (path for path in self.folder.rglob("*") if not made & {path.name, path.parent.name})
        return {str(path): path.read_bytes() if path.is_file() else None for path in found}


@contextmanager
def own_modules(folder: Path) -> Iterator[None]:
    """Folders and modules of rewards in `folder` go with the command: each is a process of its own elsewhere."""
    path = [*sys.path]
    try:
        yield
    finally:
        sys.path[:] = path
        for name, module in [*sys.modules.items()]:
            if (getattr(module, "__file__", None) or "").startswith(str(folder)):
                del sys.modules[name]


def leave_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset the variables by which a launcher tells a process that it is a rank."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def torchrun(num_ranks: int, *words: object, cwd: Path, timeout_s: float = 200.0) -> "subprocess.CompletedProcess[str]":
    """Run a script or `-m module` on `num_ranks` ranks under torchrun, to the end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return subprocess.run(
        [*command, *map(str, words)],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def without_torch(
    *words: object, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run `terrace` with these arguments where importing torch or numpy fails."""
    program = (
        "import sys; sys.modules['torch'] = None; sys.modules['numpy'] = None\n"
        f"from terrace.cli.main import main\nsys.exit(main({[str(word) for word in words]}))"
    )
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=cwd or Path(__file__).parents[2],
        env={**environment(), **(env or {})},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def interpreted(module: str, *words: str) -> str:
    """Output of a module run by Triton's interpreter: in a process of its own, as Triton asks for it at its import."""
    done = subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=Path(__file__).parents[2],
        env={**environment(), "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=330,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
