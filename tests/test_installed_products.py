"""Products come and go: each of Terrace's is taken away from a copy of the tree, and one from outside is installed."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from terrace.base import products
from terrace.cli.main import HELP, main
from tests.support.command_line import CommandLine
from tests.support.tiny_runs import environment

ROOT = Path(__file__).parents[1]
OWN = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][products.GROUP]
# Tests of every room that a copy without a product still passes, chosen for their short time.
QUICK = ("base/test_words.py", "base/test_sealed.py", "cluster/test_width.py")


def install(folder: Path, name: str, declared: dict[str, str]) -> None:
    """Makes the metadata of the distribution `name` in `folder`, as an installer leaves it."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n")
    lines = [f"{key} = {value}" for key, value in declared.items()]
    (info / "entry_points.txt").write_text("\n".join(["[console_scripts]", "x = y:z", f"[{products.GROUP}]", *lines]))


@pytest.fixture(params=[*OWN], scope="module")
def left(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree without one product, its tests and its entry point."""
    name: str = request.param
    folder = tmp_path_factory.mktemp(f"without-{name}")
    # With bytecode, which fits the copies, since they have the times of the originals: nothing is compiled again.
    for room in ("terrace", "tests"):
        shutil.copytree(ROOT / room, folder / room)
    shutil.rmtree(folder / "terrace" / name)
    shutil.rmtree(folder / "tests" / name)
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (folder / "pyproject.toml").write_text(tomli_w.dumps(_without(table, f"terrace.{name}")))
    # Before the installed one on the path, so in its place.
    install(folder, "terrace_train", {other: value for other, value in OWN.items() if other != name})
    return folder


def _without(value: Any, module: str) -> Any:
    """Settings without the names of modules in `module`, and without contracts that have nothing left."""
    if isinstance(value, dict):
        found = {key: _without(each, module) for key, each in value.items()}
        return {} if [] in (found.get("layers"), found.get("source_modules")) else found
    if isinstance(value, list):
        return [each for each in (_without(each, module) for each in value) if each not in ("", {})]
    if isinstance(value, str) and value.startswith("terrace."):
        names = [name for name in value.split(" | ") if not f"{name}.".startswith(f"{module}.")]
        return "" if value.startswith(f"{module}.") else " | ".join(names)
    return value


def run(folder: Path, *words: str, timeout_s: float = 300.0) -> str:
    """Output of Python with these words in the copy, whose modules it imports. It must end well and say no error."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**environment(), "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout


def test_without_a_product_the_command_line_has_the_rest(left: Path) -> None:
    (gone,) = (product for product in products.products() if f"without-{product.name}" in left.name)
    said = run(left, "-m", "terrace", "--help")
    for name in (*HELP, *products.commands()):
        is_gone = name in {command.name for command in gone.commands}
        assert (f"\n    {name} " in said) != is_gone, name
    assert ("lengths" in run(left, "-m", "terrace", "data", "--help")) == (gone.name != "lab")
    assert ("[algorithm]" in run(left, "-m", "terrace", "keys")) == (gone.name != "rl")


def test_without_a_product_the_contracts_of_imports_hold(left: Path) -> None:
    run(left, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command(['--no-cache'])")


@pytest.mark.nightly  # by day contracts of imports and the command line say so, too
def test_without_a_product_tests_of_the_rest_pass(left: Path) -> None:
    tests = [f"tests/{name}" for name in QUICK]
    assert " passed" in run(left, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", *tests)


@pytest.mark.nightly
def test_without_a_product_every_module_is_imported(left: Path) -> None:
    program = """
import importlib, pathlib
from terrace.base.extras import EXTRAS
for path in sorted(pathlib.Path("terrace").rglob("*.py")):
    if path.name != "__main__.py":
        try:
            importlib.import_module(".".join(path.with_suffix("").parts).removesuffix(".__init__"))
        except ModuleNotFoundError as error:  # of an extra that is not installed
            assert error.name.partition(".")[0] in EXTRAS, error
"""
    run(left, "-W", "ignore", "-c", program)


def test_only_the_tests_of_a_product_import_it() -> None:
    """And those of all documents, examples and whole commands; so the others run where the product is not."""
    folders = {"bench", "chaos", "support", *OWN}
    found = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        room = path.relative_to(ROOT / "tests").parts[0]
        if room not in folders and re.search(rf"\bterrace\.({'|'.join(OWN)})\.\w.* import ", path.read_text()):
            found.append(path.name)
    assert found == ["test_docs.py", "test_examples_run.py", "whole.py"]


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path, where distributions can be installed."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    products.products.cache_clear()
    yield folder
    products.products.cache_clear()
    for name in [name for name in sys.modules if name.startswith("greeting")]:
        del sys.modules[name]


GREETING = """
from terrace.base.products import Command, Product, RunKind

PRODUCT = Product(
    name="greeting",
    commands=(
        Command(name="greet", help="greet a run", module="greeting.command", takes_program=True),
        Command(name="data greet", help="greet a corpus", module="greeting.command"),
        Command(name="train", help="no", module="greeting.command"),
        Command(name="broken", help="raises", module="greeting.broken"),
    ),
    runs=(RunKind(command="greet", sections=("greeting",), folder="greeting.command:gone"),),
    sections=("greeting.command:sections", "greeting.command:gone"),
)
"""
COMMAND = """
from terrace.report.sections import Section


def add_parser(commands):
    parser = commands.add_parser("greet")
    parser.add_argument("--name", required=True)
    parser.set_defaults(run=run)


def sections(record):
    return [Section(title="Greetings", words=[f"hello {record.folder.name}"])]


def run(options, rest):
    print("hello", options.name, *options.command_words, *rest)
    return 7
"""


def put_greeting(site: Path) -> None:
    package = site / "greeting"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "product.py").write_text(GREETING)
    (package / "command.py").write_text(COMMAND)
    (package / "broken.py").write_text("1 / 0\n")
    install(site, "greeting", {"greeting": "greeting.product:PRODUCT"})


def test_a_product_from_outside_adds_commands(
    outside: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put_greeting(outside)
    here = CommandLine(tmp_path, capsys)
    assert here.call("greet", "--name", "Ada", "--a.b", "c", "--", "d", "--e") == (7, "hello Ada d --e --a.b c\n", "")
    assert here.call("data", "greet", "--name", "Ada") == (7, "hello Ada\n", "")
    assert "did you mean 'greet'?" in here.call("gret").error
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr()
    assert "\n    greet        greet a run\n" in said.out
    # A name that is taken stays Terrace's.
    assert said.out.count("\n    train ") == 1
    assert said.err == "terrace: command 'train' of a product is left out: Terrace has a command of that name\n"


@pytest.mark.parametrize("settings", ["", "[greeting]\nname = 1\n"])
def test_a_product_from_outside_adds_sections_to_pages(
    outside: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: str
) -> None:
    """Of any run, and of its own: a kind of runs that brings no page of its own."""
    put_greeting(outside)
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "config.toml").write_text(settings)
    (tmp_path / "made" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    said = CommandLine(tmp_path, capsys).call("report", tmp_path / "made")
    assert said.code == 0
    page = (tmp_path / "made" / "report.html").read_text()
    assert "Greetings</h2>" in page
    assert "hello made" in page
    assert "missing: sections of product 'greeting': " in said.out
    assert "greeting.command has no gone" in said.out
    if settings:
        assert f"{tmp_path / 'made'} is a run of terrace greet" in CommandLine(tmp_path, capsys).refusal(
            "train", "--resume", tmp_path / "made"
        )


def test_a_broken_product_is_one_line_and_the_rest_works(
    outside: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put_greeting(outside)
    missing = {"a": "nowhere.product:PRODUCT", "b": "greeting.product:GONE", "c": "greeting.product", "d": "json:load"}
    install(outside, "others", missing)
    here = CommandLine(tmp_path, capsys)
    said = here.call("data", "greet", "--name", "Ada")
    assert (said.code, said.out) == (7, "hello Ada\n")
    words = ("No module named 'nowhere'", "has no GONE", "must be MODULE:NAME", "no Product")
    for name, why, line in zip("abcd", words, said.error.splitlines(), strict=True):
        assert line.startswith(f"terrace: product {name!r} is left out: ")
        assert why in line
    said = here.call("broken")
    assert said.code == 2
    assert said.error.splitlines()[-1] == (
        "terrace: error: greeting.broken cannot be imported (ZeroDivisionError: division by zero): install its package "
        "again, or uninstall it"
    )


def test_products_are_found_as_by_the_standard_library(outside: Path) -> None:
    put_greeting(outside)
    found = {(each.name, each.value) for each in importlib.metadata.entry_points(group=products.GROUP)}
    assert set(products.declared()) == found
    assert found >= {("greeting", "greeting.product:PRODUCT"), *OWN.items()}


def test_help_imports_little_of_a_product() -> None:
    program = "import sys; from terrace.cli.main import all_help; all_help(); print(*sys.modules)"
    done = run(ROOT, "-c", program)
    inside = {name for name in done.split() if name.startswith(tuple(f"terrace.{each}." for each in OWN))}
    assert inside == {value.partition(":")[0] for value in OWN.values()}
    assert "importlib.metadata" not in done.split() or os.environ.get("COVERAGE_RUN")


def test_the_first_of_two_products_with_a_command_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [
        products.Product(name=name, commands=(products.Command(name="brew", help=name, module=f"{name}.brew"),))
        for name in ("first", "second")
    ]
    monkeypatch.setattr(products, "products", lambda: tuple(both))
    with pytest.warns(products.ProductWarning, match="command 'brew' of product 'second' is left out"):
        found = products.commands()
    assert found["brew"].module == "first.brew"
