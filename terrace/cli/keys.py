"""`terrace keys [SECTION | SECTION.KEY | WORD]`: the keys of runs with type, default and description, for every
command.

Descriptions are the comments beside the dataclass fields, so each is written once. Defaults are those of a run: of
`terrace train` from its default file, of `terrace rl` from its dataclasses.
"""

import argparse
import ast
import dataclasses
import inspect
import io
import json
import shutil
import textwrap
import tokenize
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any

from terrace.base.errors import ConfigError, did_you_mean
from terrace.data.config import DataConfig
from terrace.data.sources import SourceConfig
from terrace.model.balance import BalanceConfig
from terrace.model.lora.config import LoraConfig
from terrace.plan.outer import Outer
from terrace.plan.plan import Plan
from terrace.rl.algorithms.algorithm import TRAITS, Algorithm
from terrace.rl.config_layers import task_table
from terrace.rl.keys import TASKS, RewardKeys, RunKeys
from terrace.rl.placing import PoolKeys
from terrace.runtime.settings import OptimizerConfig
from terrace.train.config import RunConfig
from terrace.train.effects import value_at
from terrace.train.keys import TrainConfig
from terrace.train.rates import usual_rate
from terrace.train.resolve import resolve

_OF_TRAIN: Mapping[str, type[Any]] = {
    "train": TrainConfig,
    "optimizer": OptimizerConfig,
    "data": DataConfig,
    "data.mixture": SourceConfig,
    "plan": Plan,
    "plan.outer": Outer,
    "lora": LoraConfig,
    "balance": BalanceConfig,
}
_OF_RL: Mapping[str, type[Any]] = {
    "run": RunKeys,
    "algorithm": Algorithm,
    "reward": RewardKeys,
    "cost": RewardKeys,
    "pool": PoolKeys,
}
SECTIONS: Mapping[str, type[Any]] = {**_OF_TRAIN, **_OF_RL}
# Sections with the keys of another, and those that are lists of tables in a file.
_ALSO_OF_RL = ("optimizer", "plan")
_PLANS = "plans"
_LISTS = ("data.mixture", "reward", "pool")
_SAID = {
    "run": "of terrace rl",
    "algorithm": "of terrace rl",
    "reward": "of terrace rl; [[reward]] again for another",
    "cost": "of terrace rl, for safe-rlhf",
    "pool": "of terrace rl; [[pool]] for each",
    _PLANS: "of terrace rl: plans.ROLE has the keys of [plan], or is the name of a plan; ROLE is actor, reference, "
    "critic, cost_critic, cost or reward_0",
}
_NAMES = {int: "integer", float: "number", str: "string", bool: "true or false"}
_ELSEWHERE = {"cluster": "docs/clusters.md", "model": "docs/hugging-face.md"}
# Key -> objectives whose usual rate it is by default (terrace.train.rates), in words.
_RATES: Mapping[str, Mapping[str, str]] = {
    "optimizer.lr": {
        "next-token": "on loaded weights",
        "reward": "of reward",
        "dpo": "of dpo",
        "feedback": "in terrace rl",
    },
    "run.critic_lr": {"critic": "on loaded weights"},
    "run.start_lr": {"next-token": "on loaded weights"},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
    """A key. `default` is JSON, or says that there is none; `others` lists defaults of other kinds of runs."""

    name: str
    kind: str
    default: str
    line: str
    others: str = ""

    @property
    def text(self) -> str:
        return f"{self.name} = {self.default} ({self.kind}): {self.line}{self.others and f'; {self.others}'}"


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "keys",
        description="List the keys of runs with type, default and one line, as --SECTION.KEY VALUE takes them: of "
        "terrace train, simulate and rl.",
        epilog=f"Keys of clusters are in {_ELSEWHERE['cluster']}, of models in {_ELSEWHERE['model']}.",
    )
    parser.add_argument(
        "asked",
        nargs="?",
        metavar="SECTION|KEY|WORD",
        help=f"a section ({', '.join((*SECTIONS, _PLANS))}), a key such as optimizer.lr, or a part of a key's name "
        "(default: all)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Prints the keys; returns 0."""
    # As on other command lines, a key may have leading dashes.
    if options.asked is None and len(rest) == 1 and rest[0].startswith("--") and "." in rest[0]:
        options.asked, rest = rest[0].removeprefix("--"), ()
    if rest:
        raise ConfigError(f"unknown argument {rest[0]!r}; see terrace keys --help")
    asked = options.asked
    head = "" if asked is None else asked.partition(".")[0]
    if head in _ELSEWHERE:
        raise ConfigError(f"keys of the section {head!r} are not listed here: see {_ELSEWHERE[head]}")
    if asked is None or asked in SECTIONS or asked == _PLANS:
        print("\n\n".join(_block(name) for name in (*SECTIONS, _PLANS) if _is_in(name, asked)))
        return 0
    found = _found(asked)
    if not found:
        known = (*SECTIONS, _PLANS, *dotted(), *(name.rpartition(".")[2] for name in dotted()))
        near = get_close_matches(asked, known, n=1)
        hint = did_you_mean(asked, near) if near else " and no key with that in its name: terrace keys lists all"
        raise ConfigError(f"there is no section {asked!r}{hint}")
    print("\n".join(_wrapped(f"{section}.{key.text}", "", "    ") for section, key in found))
    return 0


def _is_in(name: str, asked: str | None) -> bool:
    # A section comes with the tables inside it.
    return asked is None or name == asked or name.startswith(f"{asked}.")


def _found(asked: str) -> list[tuple[str, Key]]:
    """The key with this dotted name, else keys with the word in their name, else in their description."""
    every = [(section, key) for section in SECTIONS for key in keys_of(section)]
    word = asked.lower().replace("-", "_")
    tests: list[Callable[[str, Key], bool]] = [
        lambda section, key: f"{section}.{key.name}" == word,
        lambda section, key: word in f"{section}.{key.name}" if "." in word else word in key.name.split("_"),
        lambda section, key: word in key.name,
        lambda section, key: word.replace("_", " ") in key.line.lower(),
    ]
    # A role's plan has the keys of [plan].
    head, _, rest = word.partition(".")
    if head == _PLANS and rest:
        role, _, name = rest.partition(".")
        return [(f"{_PLANS}.{role}", key) for key in keys_of("plan") if key.name == (name or key.name)]
    return next((hits for test in tests if (hits := [each for each in every if test(*each)])), [])


def _block(name: str) -> str:
    title = f"[[{name}]]" if name in _LISTS else f"[{name}]"
    head = f"{title}  {_SAID[name]}" if name in _SAID else title
    keys = [] if name == _PLANS else keys_of(name)
    return "\n".join([_wrapped(head, "", "  "), *(_wrapped(key.text, "  ", "      ") for key in keys)])


def _wrapped(text: str, first: str, later: str) -> str:
    width = shutil.get_terminal_size((80, 24)).columns
    return textwrap.fill(text, width, initial_indent=first, subsequent_indent=later, break_on_hyphens=False)


def dotted(command: str | None = None) -> dict[str, str]:
    """Description of every key by dotted name; with `command`, only of those that it accepts as --SECTION.KEY."""
    of_rl = [name for name in (*_OF_RL, *_ALSO_OF_RL) if name not in _LISTS]
    of_train = [name for name in _OF_TRAIN if name not in _LISTS]
    sections = {None: [*SECTIONS], "rl": of_rl}.get(command, of_train)
    return {f"{section}.{key.name}": key.line for section in sections for key in keys_of(section)}


@cache
def _default_run() -> RunConfig:
    return resolve(None, {}, {})


@cache
def keys_of(section: str) -> list[Key]:
    """The keys of `section`, in the order of its dataclass."""
    kind = SECTIONS[section]
    hints = typing.get_type_hints(kind)
    said = dict(each for part in kind.__mro__[:-1] for each in _comments(part))
    # Sections of every run have a value in the default run of terrace train.
    default_run = getattr(_default_run(), section, None) if section in _OF_TRAIN else None
    found = []
    for field in dataclasses.fields(kind):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if default_run is not None:
            default = getattr(default_run, field.name)
        is_absent = default == field.metadata.get("absent")  # `None`, or its substitute
        shown = "required" if default is dataclasses.MISSING else "none" if is_absent else json.dumps(default)
        others = _others(section, field.name, default)
        kind_of_key = kind_words(hints[field.name])
        found.append(Key(name=field.name, kind=kind_of_key, default=shown, line=said[field.name], others=others))
    return found


def _others(section: str, name: str, default: Any) -> str:
    """Defaults of a key that differ from its usual one: for loaded weights, an algorithm or a task."""
    key, found = f"{section}.{name}", list[str]()
    for objective, words in _RATES.get(key, {}).items():
        found.append(f"{usual_rate('adamw', objective, adapters=False):g} {words}")
    if key == "optimizer.lr":
        found.append(f"{usual_rate('adamw', 'next-token', adapters=True):g} with [lora]")
    if section == "algorithm":
        papers = {paper: traits.paper[name] for paper, traits in TRAITS.items() if name in traits.paper}
        by_value: dict[str, list[str]] = {}
        for paper, value in papers.items():
            by_value.setdefault(json.dumps(value), []).append(paper)
        found += [f"{value} for {', '.join(names)}" for value, names in by_value.items()]
    for task in TASKS if section in (*_OF_RL, *_ALSO_OF_RL) else ():
        value = value_at(task_table(task), key)
        found += [f"{json.dumps(value)} of --task {task}"] if value is not None and value != default else []
    return ", ".join(found)


def kind_words(hint: Any) -> str:
    """A type in words: `"a" | "b"` for a Literal, else "integer", "list", "table" and so on."""
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return " | ".join(json.dumps(value) for value in typing.get_args(hint))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(kind_words(each) for each in typing.get_args(hint) if each is not types.NoneType)
    if hint in _NAMES:
        return _NAMES[hint]
    return "list" if origin is tuple else "table"


def _comments(kind: type[Any]) -> Iterator[tuple[str, str]]:
    """Yields each field of the dataclass `kind` with its comment, beside it or in the lines above."""
    source = inspect.getsource(kind)
    comments = {
        token.start[0]: token.string.removeprefix("#").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    lines = source.splitlines()
    for node in tree.body:
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        above, number = list[str](), node.lineno - 1
        while number in comments and lines[number - 1].lstrip().startswith("#"):
            above.insert(0, comments[number])
            number -= 1
        beside = [comments[at] for at in range(node.lineno, (node.end_lineno or node.lineno) + 1) if at in comments]
        yield node.target.id, " ".join(above + beside)
