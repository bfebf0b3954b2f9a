"""The site of `make docs`: its navigation names every document and every public module, and links lead to its pages."""

import ast
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_NAVIGATION = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
NAMED = re.findall(r"^ +- (?:[^:\n]+: )?([\w./-]+\.md)$", _NAVIGATION, re.M)
MODULES = {Path(uri).name.removesuffix(".md") for uri in NAMED if uri.startswith("reference/")}
HOOK = runpy.run_path(str(ROOT / "docs" / ".site" / "pages.py"))


def test_the_navigation_names_every_document_once() -> None:
    pages = [uri for uri in NAMED if not uri.startswith("reference/")]
    documents = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(pages) == sorted(documents | HOOK["PAGES"].keys())
    assert all((ROOT / path).is_file() for path in HOOK["PAGES"].values())


def _public_modules() -> set[str]:
    """Those that documents and examples import from, and those of the tables whose keys a document lists."""
    texts = [
        block for path in ROOT.glob("docs/*.md") for block in re.findall(r"```python\n(.*?)```", path.read_text(), re.S)
    ]
    texts += [path.read_text() for path in ROOT.glob("examples/*.py")]
    texts.append((ROOT / "tests" / "test_docs.py").read_text())
    nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
    named = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    return {name for name in named if name.split(".")[0] == "terrace"} - {
        "terrace.train.trainer"
    }  # that is in `terrace`


def test_the_reference_has_every_public_module() -> None:
    assert _public_modules() > {"terrace.plan.plan", "terrace.cluster.presets", "terrace.train.keys"}
    assert _public_modules() | {"terrace", "terrace.base.errors"} <= MODULES
    for name in MODULES:
        path = ROOT / name.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__init__.py").is_file(), name
        assert f"::: {name}\n" in HOOK["reference"](name)
    assert "::: terrace.train.trainer.Trainer\n" in HOOK["reference"]("terrace")


@pytest.mark.parametrize(
    ("page", "written", "expected"),
    [
        ("index.md", "[a](docs/training.md#keys)", "[a](training.md#keys)"),
        ("index.md", "[a](bench/README.md)", "[a](project/benchmarks.md)"),
        ("slurm.md", "[a](../SECURITY.md#ports)", "[a](project/security.md#ports)"),
        ("benchmarks/summary.md", "[a](../../bench/README.md)", "[a](../project/benchmarks.md)"),
        ("project/benchmarks.md", "[a](../docs/benchmarks/summary.md)", "[a](../benchmarks/summary.md)"),
        ("project/examples.md", "[a.py](a.py)", "a.py"),  # no page
        ("plans.md", "[a](https://a.org/b) [c](#d)", "[a](https://a.org/b) [c](#d)"),
    ],
)
def test_links_of_the_repository_become_those_of_the_site(page: str, written: str, expected: str) -> None:
    assert HOOK["linked"](written, page, set(NAMED)) == expected
