"""Imports among the modules of `terrace`: those at module level, inside functions, and under TYPE_CHECKING."""

import ast
import gc
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class _Names(NamedTuple):
    """Names that a module imports, also of no modules."""

    at_import: set[str]  # at module level
    inside: set[str]  # in a function or a class
    for_types: set[str]  # under TYPE_CHECKING


@cache
def imports(*, for_types: bool) -> Mapping[str, frozenset[str]]:
    """Module -> the modules of `terrace` that it imports, at any time; with `for_types` also under TYPE_CHECKING."""
    found = {}
    for name, names in _imported().items():
        named = names.at_import | names.inside | (names.for_types if for_types else set())
        found[name] = frozenset(named & _imported().keys() - {name})
    return found


@cache
def at_import() -> Mapping[str, set[str]]:
    """File of `terrace` -> the files that it imports at module level; rooms are left out."""
    files = {_module(path) for path in _files() if path.name != "__init__.py"}
    return {name: names.at_import & files for name, names in _imported().items() if name in files}


@cache
def _imported() -> Mapping[str, _Names]:
    found = {}
    gc.disable()  # each tree is gone before the next: looking for garbage would be a third of the time
    try:
        for path in _files():
            names = found[_module(path)] = _Names(set(), set(), set())
            _add_names(ast.parse(path.read_text(encoding="utf-8")).body, names, names.at_import)
    finally:
        gc.enable()
    return found


@cache
def _files() -> tuple[Path, ...]:
    return tuple((ROOT / "terrace").rglob("*.py"))


def reached(module: str) -> set[str]:
    """The modules that an import of `module`, and a call of each function in them, would load.

    The package `terrace` itself is left out: its public names load only when they are used.
    """
    found, waiting = set[str](), [module]
    while waiting:
        name = waiting.pop()
        if name not in found | {"terrace"}:
            found.add(name)
            # Importing a module runs the packages around it.
            waiting += [*imports(for_types=False)[name], name.rpartition(".")[0]]
    return found


def circles() -> list[set[str]]:
    """Sets of modules each of which imports the others, maybe by way of yet others."""
    left = {name: set(imported) for name, imported in imports(for_types=True).items()}
    # A module that imports none of those left is on no circle.
    while ends := {name for name, imported in left.items() if not imported}:
        left = {name: imported - ends for name, imported in left.items() if name not in ends}
    above = {name: _above(name, left) for name in left}
    found = [{name, *(other for other in above[name] if name in above[other])} for name in left if name in above[name]]
    return [circle for index, circle in enumerate(found) if circle not in found[:index]]


def _above(name: str, imported: Mapping[str, set[str]]) -> set[str]:
    found, waiting = set[str](), [*imported[name]]
    while waiting:
        each = waiting.pop()
        if each not in found:
            found.add(each)
            waiting += imported[each]
    return found


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _add_names(statements: Sequence[ast.stmt], names: _Names, found: set[str]) -> None:
    for node in statements:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            # `from room import module` names a module, `from module import name` a name in it.
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            _add_names(node.body, names, names.for_types)
            _add_names(node.orelse, names, found)
        else:
            is_inner = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            within = names.inside if is_inner and found is names.at_import else found
            for part in ("body", "orelse", "finalbody"):
                _add_names(getattr(node, part, ()), names, within)
            for part in ("handlers", "cases"):
                for each in getattr(node, part, ()):
                    _add_names(each.body, names, within)
