"""Nobody outside terrace.model names a field of a model's configuration (docs/operations.md)."""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path

import pytest

import terrace
from terrace.model.config import ModelConfig

ROOT = Path(terrace.__file__).parent
PROPERTIES = {name for name, value in vars(ModelConfig).items() if isinstance(value, property)}
NAMES = {field.name for field in fields(ModelConfig)} | PROPERTIES | {"of_layer"}
# Names that other classes have too, with an example of each: read from a configuration they are faults, from anything
# else they are not.
SHARED = {
    "delta": "Operations.delta",
    "experts": "Plan.experts",
    "family": "a family of anything",
    "head_dim": "Core.head_dim",
    "intermediate_size": "ExpertsConfig.intermediate_size",
    "kinds": "Task.kinds",
    "norm": "Head.norm, a module",
    "norms": "norms that a probe times",
    "num_blocks": "blocks of a codec",
    "num_layers": "layers of a pipeline's split",
    "scales": "scales of codes",
    "vocab_size": "Tokenizer.vocab_size",
    "windows": "windows of a text that is evaluated",
}
# Files that make the configuration of a part of a model, whose modules are those of terrace.model.
ALLOWED = {"rl/workers/sliced.py"}
# Names by which variables and fields of type ModelConfig go.
CONFIGURATIONS = {"model", "config"}


def named_fields(source: str) -> Iterator[tuple[int, str]]:
    """(Line, expression) of each field of a configuration that a file reads or sets."""
    nodes = list(ast.walk(ast.parse(source)))
    configurations = CONFIGURATIONS | (_annotated(nodes) if "ModelConfig" in source else set())
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr in NAMES:
            is_told = node.attr not in SHARED or _last_name(node.value) in configurations
            yield from [(node.lineno, ast.unparse(node))] * is_told
        if isinstance(node, ast.Call) and _last_name(node.func) == "replace" and node.args:
            changed = [each.arg for each in node.keywords if each.arg in NAMES]
            if changed and _last_name(node.args[0]) in configurations:
                yield node.lineno, f"replace(..., {changed[0]}=...)"


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        # Functions that give a configuration.
        return "config" if _last_name(node.func) in ("parse_model", "load_model") else ""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _annotated(nodes: Sequence[ast.AST]) -> set[str]:
    """Names that a file annotates as configurations."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            name = node.arg if isinstance(node, ast.arg) else _last_name(node.target)
            found |= {name} if "ModelConfig" in ast.unparse(node.annotation) else set()
    return found


def files() -> list[Path]:
    each = {path.relative_to(ROOT).as_posix(): path for path in sorted(ROOT.rglob("*.py"))}
    return [path for name, path in each.items() if not name.startswith("model/") and name not in ALLOWED]


def test_no_field_of_a_configuration_is_named_outside_the_model() -> None:
    assert len(files()) > 300
    found = [
        f"{path.relative_to(ROOT.parent)}:{line}: {expression}"
        for path in files()
        for line, expression in named_fields(path.read_text())
    ]
    assert not found, "ask operations or terrace.model.facts in place of\n" + "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "run.model.vocab_size",
        "block.config.norms",
        "work.model.sliding_window",
        "layer.query_factor",
        "config.of_layer(2)",
        "def f(dense: ModelConfig): return dense.experts",
        "replace(run.model, num_layers=1)",
        "load_model(folder).num_layers",
    ],
)
def test_a_field_of_a_configuration_is_seen(source: str) -> None:
    assert list(named_fields(source))


@pytest.mark.parametrize("source", ["tokenizer.vocab_size", "plan.experts", "work.layer.core.head_dim", "run.model"])
def test_other_attributes_of_the_same_name_are_not(source: str) -> None:
    assert not list(named_fields(source))


def test_names_that_are_shared_are_fields() -> None:
    assert SHARED.keys() <= NAMES
