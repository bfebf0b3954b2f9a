"""The house keeps itself: budgets of files and functions, docs whose paths exist and whose commands run."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.command_line import without_torch

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for folder in ("terrace", "tests", "bench", "examples") for path in (ROOT / folder).rglob("*.py"))
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

# They start or join ranks, switch torch's recorder on, or show (`terrace doctor`) the variables that decide how ranks
# talk.
ENVIRONMENT = (
    "bench/lab/launch.py",
    "terrace/__main__.py",  # a shell's question for completion
    "terrace/base/own_path.py",  # before any other module is imported
    "terrace/launch/flight.py",
    "terrace/launch/fork_server.py",
    "terrace/launch/refusals.py",
    "terrace/launch/start.py",
    "terrace/launch/device.py",
    "terrace/probe/environment.py",
    "terrace/lab/rehearse/launch.py",
)

ACCELERATOR = "terrace/accelerator.py"  # all that depends on a device's vendor
# What belongs there, in code that imports torch; a cluster's description of a device names no torch.
_OF_A_VENDOR = re.compile(r'\b(torch\.(cuda|xpu|mps|version\.)|is_cuda\b|torch\.device\("cuda"|type [!=]= "cuda")')

MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 80
# Files that are one thing and longer, with the reason why their parts are not files of their own.
HUBS: dict[str, str] = {"terrace/cli/lines.py": "a table: the options of every command"}


_OF_THE_ENVIRONMENT = ("environ", "getenv", "putenv")
_TOUCHES = re.compile(rf"\.({'|'.join(_OF_THE_ENVIRONMENT)})\b")


class Facts(NamedTuple):
    """Facts of a file."""

    num_lines: int
    functions: dict[str, int]  # lines of each
    environment: list[int]  # lines that touch it
    imported: list[str]  # modules that names are taken from


@cache
def facts() -> dict[str, Facts]:
    return {path.relative_to(ROOT).as_posix(): _facts(path.read_text(encoding="utf-8")) for path in SOURCES}


def _facts(text: str) -> Facts:
    # Parsing all files would take ten seconds: only those that may touch the environment are.
    environment = []
    if _TOUCHES.search(text):
        nodes = ast.walk(ast.parse(text))
        environment = [
            node.lineno for node in nodes if isinstance(node, ast.Attribute) and node.attr in _OF_THE_ENVIRONMENT
        ]
    imported = re.findall(r"^\s*from\s+([\w.]+)\s+import\b", text, re.MULTILINE)
    return Facts(len(text.splitlines()), _functions(text), environment, imported)


def _functions(text: str) -> dict[str, int]:
    """Lines of each function, by their indentation: `ruff format` has set it."""
    blanked = re.sub(r'""".*?"""', _blanked, text, flags=re.DOTALL)
    found, open_functions, last = dict[str, int](), list[tuple[int, str, int]](), 0
    for number, line in enumerate([*blanked.splitlines(), "end"], 1):
        code = line.lstrip()
        if not code or code[0] == "#":
            continue
        if code[0] not in ")]}":  # which end a header or a call, not a function
            indent = len(line) - len(code)
            while open_functions and indent <= open_functions[-1][0]:
                _, name, first = open_functions.pop()
                found[f"{name}, line {first}"] = last - first + 1
            if named := re.match(r"(?:async )?def (\w+)", code):
                open_functions.append((indent, named[1], number))
        last = number
    # Texts that hold a function, or quotes in quotes, need the syntax.
    return found if len(found) == len(re.findall(r"^ *(?:async )?def \w", text, re.MULTILINE)) else _in_syntax(text)


def _blanked(text: re.Match[str]) -> str:
    return "x" + "".join(f"\n{' ' * 200}x" for _ in range(text[0].count("\n")))  # inside of every function


def _in_syntax(text: str) -> dict[str, int]:
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return {f"{node.name}, line {node.lineno}": (node.end_lineno or 0) - node.lineno + 1 for node in nodes}


@pytest.mark.parametrize("name", ["tests/test_house.py", "terrace/data/tokenizer.py"])
def test_lines_of_functions_are_those_of_their_syntax(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert _functions(text) == _in_syntax(text)


def test_files_and_functions_stay_small() -> None:
    assert {path for path, each in facts().items() if each.num_lines > MAX_FILE_LINES} == HUBS.keys()
    functions = {(path, name): lines for path, each in facts().items() for name, lines in each.functions.items()}
    assert {name: lines for name, lines in functions.items() if lines > MAX_FUNCTION_LINES} == {}


def test_ranks_and_trainers_have_few_attributes() -> None:
    """What a rank needs beyond these is in a hook, or in a part of the trainer."""
    for path, name in (("train/rank.py", "RankOfRun"), ("train/trainer.py", "Trainer")):
        tree = ast.parse((ROOT / "terrace" / path).read_text(encoding="utf-8"))
        (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
        stored = {
            node.attr
            for node in ast.walk(found)
            if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        }
        assert len(stored) <= 10, (name, sorted(stored))


def test_only_launch_modules_read_the_environment() -> None:
    found = {path: each.environment for path, each in facts().items() if each.environment}
    assert {path for path in found if not path.startswith("tests/")} == set(ENVIRONMENT), found


def test_one_module_knows_a_device_by_its_vendor() -> None:
    """Everything else speaks to `torch.accelerator`, `torch.Stream` and `torch.Event`, or to that module."""
    assert facts()[ACCELERATOR].num_lines <= 150
    found = {}
    for path in (ROOT / "terrace").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if re.search(r"^ *(import|from) torch\b", text, re.MULTILINE) and (named := _OF_A_VENDOR.findall(text)):
            found[path.relative_to(ROOT).as_posix()] = named
    assert found.keys() == {ACCELERATOR}, found


def test_wall_time_decides_nothing() -> None:
    """A clock that jumps changes only displayed times: of events and steps, in the name of a folder, in a template."""
    showing = {"train/gauges.py", "train/recorder.py", "train/run_folder.py", "data/template_process.py"}
    showing.add("rl/calls/spans.py")
    showing.add("data/originals.py")  # against the file system's own stamps: a clock set back costs a look at contents
    reading = re.compile(r"\btime\.time(_ns)?\b|\bdatetime\.(now|utcnow|today)\b|\bdate\.today\b")
    found = {
        str(path.relative_to(ROOT / "terrace"))
        for path in (ROOT / "terrace").rglob("*.py")
        if reading.search(path.read_text(encoding="utf-8"))
    }
    assert found == showing


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_paths_named_in_the_docs_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    named = re.findall(r"`((?:terrace|tests|bench|docs|examples)/[\w./-]+)`", text)
    links = re.findall(r"\]\((?!http)([\w./-]+)\)", text)
    missing = [name for name in named if not (ROOT / name).exists()]
    missing += [link for link in links if not (path.parent / link).exists()]
    assert not missing


def test_no_test_module_is_imported() -> None:
    """Code that several tests share is in `tests/support`."""
    found = [(path, name) for path, each in facts().items() for name in each.imported]
    assert [(path, name) for path, name in found if name.rpartition(".")[2].startswith("test_")] == []


def test_names_of_test_modules_are_unique() -> None:
    """Their folders are no packages, so two of one name would be one module."""
    names = Counter(path.name for path in SOURCES if path.name.startswith("test_"))
    assert [name for name, times in names.items() if times > 1] == []


def test_planning_works_without_torch() -> None:
    """`terrace explain` must run on a laptop that has no torch: importing it would fail here."""
    done = without_torch("simulate", "--view", "program", "--plan", "zero3", "--lines", "4")
    assert done.returncode == 0, done.stderr
    assert "verified" in done.stdout
