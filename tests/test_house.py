"""The house keeps itself: budgets of files and functions, docs whose paths exist and whose commands run."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for folder in ("terrace", "tests", "bench") for path in (ROOT / folder).rglob("*.py"))
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# They start or join ranks, or show (`terrace doctor`) the variables that decide how ranks talk.
ENVIRONMENT = (
    "bench/lab/launch.py",
    "terrace/launch/start.py",
    "terrace/probe/environment.py",
    "terrace/rehearse/launch.py",
)

MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 80


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert (node.end_lineno or 0) - node.lineno < MAX_FUNCTION_LINES, node.name


@pytest.mark.parametrize(
    "path", [p for p in SOURCES if "tests" not in p.relative_to(ROOT).parts], ids=lambda p: str(p.relative_to(ROOT))
)
def test_only_launch_modules_read_the_environment(path: Path) -> None:
    if str(path.relative_to(ROOT)) in ENVIRONMENT:
        assert "os.environ" in path.read_text(encoding="utf-8")
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        name = node.attr if isinstance(node, ast.Attribute) else None
        assert name not in ("environ", "getenv", "putenv"), f"line {getattr(node, 'lineno', 0)} touches the environment"


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_paths_named_in_the_docs_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    named = re.findall(r"`((?:terrace|tests|bench|docs)/[\w./-]+)`", text)
    links = re.findall(r"\]\((?!http)([\w./-]+)\)", text)
    missing = [name for name in named if not (ROOT / name).exists()]
    missing += [link for link in links if not (path.parent / link).exists()]
    assert not missing


def test_planning_works_without_torch() -> None:
    """`terrace explain` must run on a laptop that has no torch: importing it would fail here."""
    program = (
        "import sys; sys.modules['torch'] = None; sys.modules['numpy'] = None\n"
        "from terrace.cli.main import main\n"
        "sys.exit(main(['explain', '--plan', 'zero3', '--lines', '4']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "verified" in done.stdout
