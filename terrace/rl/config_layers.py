"""Merges the layers of a run's configuration into one table, with absolute paths of files.

Layers, each overriding the one before: the defaults, the table of `--task`, the file of `--config`, then `--model`,
`--cluster` and `--plan`, then `--section.key value`.
"""

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from terrace.base.errors import ConfigError, did_you_mean
from terrace.base.hub import with_folders
from terrace.base.schema import merge, read_table
from terrace.cluster.presets import lay_over
from terrace.rl.keys import TASKS
from terrace.train.layers import section


def resolve_table(
    task: str | None, path: str | None, flags: Mapping[str, str | None], overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """The merged table of a run, not checked yet."""
    own: dict[str, Any] = {} if path is None else _with_paths(dict(read_table(Path(path))), Path(path).parent)
    of_run = own.get("run")
    name = task or (of_run.get("task", "") if isinstance(of_run, Mapping) else "")
    if name and name not in TASKS:
        raise ConfigError(f"task {name!r} is not known{did_you_mean(str(name), TASKS)}")
    table: dict[str, Any] = {}
    if name:
        table = merge(task_table(name), {"run": {"task": name}})
    for key, value in own.items():
        # These sections replace the task's as a whole.
        table = table | {key: value} if key in ("cluster", "plan", "model") else merge(table, {key: value})
    table |= {key: value for key, value in with_folders(flags, Path(), whole=True).items() if value is not None}
    if isinstance(table.get("model"), str) and Path(table["model"]).is_dir():
        table.setdefault("weights", str(Path(table["model"]).resolve()))
    for key in ("model", "cluster", "plan"):
        if key in table:
            table[key] = section(key, table[key])
    # Paths on the command line are relative to the working folder.
    return lay_over(table, _with_paths(overrides, Path()))


def task_table(name: str) -> dict[str, Any]:
    return read_table(Path(str(resources.files(__package__) / f"{name}.toml")))


def given_table(
    path: str | None, flags: Mapping[str, str | None], overrides: Mapping[str, Any]
) -> Mapping[str, Mapping[str, Any]]:
    """The sections that the run's file or command line gives, without the task's defaults; non-tables are left out."""
    table = {} if path is None else dict(read_table(Path(path)))
    table |= {key: value for key, value in flags.items() if value is not None}
    table = merge(table, overrides)
    return {name: value for name, value in table.items() if isinstance(value, Mapping)}


def _with_paths(table: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """`table` with absolute file paths; they are given relative to `folder`, that of the configuration file."""
    found = with_folders(table, folder, whole=True)
    for key in ("model", "cluster", "plan"):
        if isinstance(found.get(key), str) and (folder / found[key]).exists():
            found[key] = str((folder / found[key]).absolute())
    if isinstance(found.get("plans"), Mapping):
        found["plans"] = {
            role: str((folder / plan).absolute()) if isinstance(plan, str) and (folder / plan).exists() else plan
            for role, plan in found["plans"].items()
        }
    found |= _absolute(found, "weights", folder)
    # Values that should be tables and are not are rejected when the sections are parsed.
    for section_name, key in (("run", "prompts_file"), ("run", "reference"), ("cost", "model")):
        if section_name in found:
            found[section_name] = _absolute(found[section_name], key, folder)
    if isinstance(found.get("reward"), list):
        found["reward"] = [_absolute(each, "model", folder) for each in found["reward"]]
    return found


def _absolute(table: Any, key: str, folder: Path) -> Any:
    if not isinstance(table, Mapping) or not isinstance(table.get(key), str) or not table[key]:
        return table
    return {**table, key: str((folder / table[key]).absolute())}
