"""Merges the layers of a run's configuration into one table.

Each layer overrides the one before: the embedded defaults, the `[task]` of the plan's file (terrace.train.planned), the
file of `--config`, the flags `--model`, `--cluster`, `--plan` (a name or a file replaces the whole section), `--data`,
then `--section.key value`. Relative paths in a file are relative to that file; in a flag, to the working directory.
"""

import os
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from terrace.base import hub
from terrace.base.errors import ConfigError, PlanError, did_you_mean
from terrace.base.schema import merge, read_table
from terrace.cluster.presets import UNNAMED, cluster_table, lay_over, preset_names
from terrace.data.config import PATHS
from terrace.data.sources import beside, eval_beside
from terrace.plan.order_file import order_beside
from terrace.plan.presets import PRESETS
from terrace.train.folder import with_folder
from terrace.train.keys import ON_PAIRS
from terrace.train.planned import TASK, read_planned
from terrace.train.rates import with_rate

Here = Callable[[Any], Any]  # of the value of section cluster, UNNAMED where none is
_WHOLE = ("model", "cluster", "plan")  # sections that a name or a file replaces as a whole


def resolve_table(
    path: str | None, flags: Mapping[str, str | None], overrides: Mapping[str, Any], here: Here | None = None
) -> dict[str, Any]:
    """The unchecked table of a run. Arguments and errors are those of `terrace.train.resolve.resolve`.

    `here` replaces the cluster's name.
    """
    table = read_table(Path(str(resources.files(__package__) / "default.toml")))
    table |= {} if here is None else {"cluster": UNNAMED}
    folder = Path() if path is None else Path(path).parent
    own = {} if path is None else hub.with_folders(read_table(Path(path)), folder)
    overrides = hub.with_folders(overrides, Path())
    if path is not None and not own:
        raise ConfigError(
            f"{path} has no key, so it changes nothing: give it a section, such as [train], or leave it out"
        )
    # A plan's file may carry the task that it was made for, with its model and cluster.
    planned = read_planned(flags["plan"] if flags.get("plan") is not None else _beside(folder, "plan", own.get("plan")))
    if planned is not None:
        table = merge(table, {"train": planned.train}) | {"model": planned.model, "cluster": planned.cluster}
    # Order of the layers: defaults, the plan's task, the file, the flags, the dotted overrides.
    table = _lay_over(with_one_length(table, own), own, folder)
    for name in _WHOLE:
        if (given := flags.get(name)) is not None:
            table[name] = hub.model_folder(given) if name == "model" else given
    if (given := flags.get("data")) is not None:
        table = merge(table, {"data": {"path": hub.data_folder(given)}})
    table |= {} if here is None else {"cluster": here(table["cluster"])}
    # The model's path is needed below, after `section` has replaced it by its table.
    model = table.get("model")
    table = with_one_length({name: section(name, value) for name, value in table.items()}, overrides)
    table = lay_over(table, overrides)
    check_one_length(overrides)
    data = [given.get("data") for given in (own, overrides)]
    names_tokenizer = any(isinstance(given, Mapping) and "tokenizer" in given for given in data)
    return with_rate(with_folder(with_teacher(_with_formats(table)), model, names_tokenizer), (own, overrides))


def with_one_length(table: dict[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    """`table` without the length that `layer` replaces: steps by epochs, or epochs by steps."""
    train, own = table.get("train"), layer.get("train")
    if not isinstance(train, Mapping) or not isinstance(own, Mapping):
        return table
    replaced = {"steps": "epochs", "epochs": "steps"}
    dropped = {other for key, other in replaced.items() if key in own}
    return table | {"train": {key: value for key, value in train.items() if key not in dropped}}


def check_one_length(overrides: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for both lengths. A run's own file has both: `terrace.train.epochs` compares them."""
    train = overrides.get("train")
    if isinstance(train, Mapping) and {"steps", "epochs"} <= train.keys():
        raise ConfigError("train.steps and train.epochs both say how long the run is: leave one of them out")


def _with_formats(table: dict[str, Any]) -> dict[str, Any]:
    data, train = table.get("data"), table.get("train")
    if not isinstance(data, Mapping) or not {"path", "mixture", "eval"} & data.keys():
        return table
    # Imported here: without data of their own, most commands read none.
    from terrace.data.found_format import with_formats

    on_pairs = isinstance(train, Mapping) and train.get("objective") in ON_PAIRS
    return table | {"data": with_formats(data, on_pairs=on_pairs)}


def section(name: str, value: Any) -> Any:
    """The table of a section that may be given by name or path. The `[task]` of a plan's file is left out."""
    if not isinstance(value, str) or name not in _WHOLE:
        return value
    if not value:
        raise ConfigError(f"{name} is empty: name a file, or leave it out")
    if name == "cluster":
        return cluster_table(value)
    if name == "model":
        if not os.path.exists(value):
            raise ConfigError(
                f"cannot read {value}: No such file or directory; --model takes a folder, a config.json, or a model of "
                "the hub as ORG/NAME"
            )
        if Path(value).suffix in (".safetensors", ".bin", ".pt", ".gguf"):
            raise ConfigError(f"{value} is a file of weights: give its folder, which also has the config.json")
        from terrace.model.hf.folder import read_model_table  # here, since few runs name a file

        return read_model_table(value)
    if value in PRESETS:
        return {"preset": value}
    if Path(value).suffix not in (".toml", ".json") and not os.path.exists(value):
        raise PlanError(f"no plan preset or file {value!r}{did_you_mean(value, PRESETS)}")
    if os.path.isdir(value):
        raise PlanError(
            f"{value} is a folder, not a plan: name a preset or a file; a run's own plan is in its config.toml"
        )
    table = read_table(Path(value))
    if name == "plan" and isinstance(table.get("plan"), (str, dict)):
        raise PlanError(f"{value} is the file of a run, not of a plan alone: give it as --config {value}")
    return order_beside(Path(value).parent, {key: given for key, given in table.items() if key != TASK})


def _lay_over(table: Mapping[str, Any], own: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    result = merge(table, {name: value for name, value in own.items() if name not in _WHOLE})
    # These sections replace the layer below as a whole; the others merge key by key.
    result |= {name: _beside(folder, name, own[name]) for name in _WHOLE if name in own}
    data = own.get("data")
    if isinstance(data, Mapping):
        paths = {key: at for key, at in data.items() if key in PATHS and isinstance(at, str)}
        named: dict[str, Any] = {key: str(folder / at) for key, at in paths.items() if at not in ("", PATHS[key])}
        named |= {"mixture": beside(folder, data["mixture"])} if "mixture" in data else {}
        named |= {"eval": eval_beside(folder, data["eval"])} if "eval" in data else {}
        result["data"] = merge(result["data"], named)
    if isinstance(teacher := own.get("teacher"), Mapping):
        result["teacher"] = teacher_beside(folder, teacher)
    train = own.get("train")
    if isinstance(train, Mapping) and isinstance(train.get("weights"), str) and train["weights"]:
        result["train"] = merge(result["train"], {"weights": str(folder / train["weights"])})
    return result


def teacher_beside(folder: Path, teacher: Mapping[str, Any]) -> dict[str, Any]:
    """The section `[teacher]` of a file in `folder`, whose relative paths are relative to it."""
    found = dict(teacher)
    if isinstance(model := found.get("model"), str) and model:
        found["model"] = str(folder / model)
    if "plan" in found:
        found["plan"] = _beside(folder, "plan", found["plan"])
    return found


def with_teacher(table: dict[str, Any]) -> dict[str, Any]:
    """The run's table with the paths of `[teacher]` made absolute, so that a run can be resumed from anywhere."""
    teacher = table.get("teacher")
    if not isinstance(teacher, Mapping):
        return table
    found = dict(teacher)
    if isinstance(model := found.get("model"), str) and model:
        found["model"] = os.path.abspath(model)
    if isinstance(plan := found.get("plan"), str) and plan not in PRESETS and os.path.exists(plan):
        found["plan"] = os.path.abspath(plan)
    return {**table, "teacher": found}


def _beside(folder: Path, name: str, value: Any) -> Any:
    if name == "plan" and isinstance(value, Mapping):
        return order_beside(folder, value)
    presets = {"cluster": preset_names(), "plan": list(PRESETS), "model": []}[name]
    if not isinstance(value, str) or not value or value in presets:
        return value
    path = folder / value
    # A bare word that is no file is more likely a misspelt preset, whose error then shows it as written.
    return str(path) if name == "model" or path.suffix or os.path.exists(path) else value
