"""Imports among the modules of `terrace`: those at module level, inside functions, and under TYPE_CHECKING."""

import ast
from collections.abc import Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def imports(*, for_types: bool) -> Mapping[str, frozenset[str]]:
    """Module -> the modules of `terrace` that it imports, at any time; with `for_types` also under TYPE_CHECKING."""
    found = {}
    for name, (always, types) in _imported().items():
        named = always | types if for_types else always
        found[name] = named & _imported().keys() - {name}
    return found


@cache
def _imported() -> Mapping[str, tuple[frozenset[str], frozenset[str]]]:
    """Module -> the names that it imports, and those under TYPE_CHECKING."""
    found = {}
    for path in (ROOT / "terrace").rglob("*.py"):
        always, types = set[str](), set[str]()
        _add_names(ast.parse(path.read_text(encoding="utf-8")), always, types)
        found[_module(path)] = (frozenset(always), frozenset(types))
    return found


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


def _add_names(tree: ast.AST, always: set[str], types: set[str]) -> None:
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for each in node.body:
                _add_names(each, types, types)
            waiting += node.orelse
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            # `from room import module` names a module, `from module import name` a name in it.
            always |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            always |= {alias.name for alias in node.names}
        elif not isinstance(node, ast.expr):  # which holds no statement
            waiting += ast.iter_child_nodes(node)
