"""Models and data sets of the Hugging Face hub by their ids, `ORG/NAME` or `ORG/NAME@REVISION`.

An id becomes a folder of the hub's own cache (`huggingface_hub`), whose path has repository and commit:
`.../models--ORG--NAME/snapshots/COMMIT`. A run's `config.toml` has this path, so it pins the revision, and resumes and
further runs read the files without a network. A path that exists here is never an id. The address of the hub, its
cache, tokens and an offline mode are those of the library's own environment variables (`HF_ENDPOINT`, `HF_HOME`).
"""

import importlib
import os
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from terrace.base.errors import ConfigError
from terrace.base.extras import needs

Kind = Literal["model", "dataset"]

_ID = re.compile(r"([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@([\w./-]{1,250}))?", re.ASCII)
_SNAPSHOT = re.compile(r"(.+)/(model|dataset)s--([\w.-]+?)--([\w.-]+)/snapshots/([0-9a-f]{40})", re.ASCII)
_DESCRIPTION = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")  # of a model: shape, tokenizer, template
_WEIGHTS = ("*.safetensors",)
_BELOW = ("*/*",)  # other formats of a model, such as onnx/ and original/


def is_id(name: str, folder: Path = Path()) -> bool:
    """Whether `name`, in a file of `folder`, can be an id: there is no such path, and no suffix of a file."""
    if _ID.fullmatch(name) is None or re.search(r"\.[a-z]{2,7}$", name):
        return False
    return not any(os.path.exists(each / part) for each in {Path(), folder} for part in (name, name.split("/")[0]))


def model_folder(name: str, *, whole: bool = False, folder: Path = Path()) -> str:
    """The folder of a model with its description, and `whole` with its weights; any other name unchanged.

    Raises `ConfigError` if the id cannot be fetched.
    """
    if not is_id(name, folder):
        return name
    found = _fetched(name, "model", _DESCRIPTION, _BELOW)
    if whole:
        fetch_weights(found)
    return found


def data_folder(name: str, folder: Path = Path()) -> str:
    """The folder of a data set; any other name unchanged. Raises `ConfigError` if the id cannot be fetched."""
    return _fetched(name, "dataset") if is_id(name, folder) else name


def is_snapshot(folder: str) -> bool:
    """Whether `folder` is a commit in the hub's cache, of whose model the weights may not have been fetched yet."""
    return _SNAPSHOT.fullmatch(folder) is not None


def fetch_weights(folder: str) -> None:
    """Fetch the weights of a model in the hub's cache. Raises `ConfigError` if there are none."""
    if not is_snapshot(folder):
        return
    fetch_again(folder, allow_patterns=list(_WEIGHTS), ignore_patterns=list(_BELOW))
    if not any(any(Path(folder).glob(pattern)) for pattern in _WEIGHTS):
        found = _SNAPSHOT.fullmatch(folder)
        assert found is not None
        raise ConfigError(
            f"no *.safetensors of {found[3]}/{found[4]} could be fetched: the hub cannot be reached, or has the "
            "weights in other files, which transformers can convert (save_pretrained); --train.weights '' starts from "
            "scratch"
        )


def fetch_again(path: str, **patterns: Any) -> bool:
    """Fetch files of a commit in the hub's cache into the same cache; False for any other path."""
    found = _SNAPSHOT.fullmatch(path)
    if found is None:
        return False
    cache, kind, owner, name, commit = found.groups()
    where = {"repo_type": kind, "revision": commit, "cache_dir": cache, **patterns}
    _asked(f"{owner}/{name}", "model" if kind == "model" else "dataset", _library(f"{owner}/{name}"), where)
    return True


def with_folders(table: Mapping[str, Any], folder: Path, *, whole: bool = False) -> dict[str, Any]:
    """A layer of a run's configuration with folders in place of ids, wherever it names a model or data.

    `folder` is that of the layer's file. `whole` fetches the weights of the model as well.
    """

    def model(name: str) -> str:
        return model_folder(name, whole=whole, folder=folder)

    def data(name: str) -> str:
        return data_folder(name, folder)

    found: dict[str, Any] = _at(dict(table), ("model", "weights"), model)
    for section, keys, local in (
        ("data", ("path",), data),
        ("data", ("tokenizer",), model),
        ("train", ("weights",), model),
        ("teacher", ("model",), lambda name: model_folder(name, whole=True, folder=folder)),
        ("cost", ("model",), model),
    ):
        if isinstance(found.get(section), Mapping):
            found[section] = _at(found[section], keys, local)
    of_data = found.get("data")
    if isinstance(of_data, dict):
        if isinstance(given := of_data.get("mixture"), list):
            of_data["mixture"] = [_named(each, data) for each in given]
        if isinstance(given := of_data.get("eval"), Mapping):
            of_data["eval"] = {
                name: data(each) if isinstance(each, str) else _at(each, ("path",), data)
                for name, each in given.items()
            }
    if isinstance(given := found.get("reward"), list):
        found["reward"] = [_at(each, ("model",), model) for each in given]
    return found


def _named(entry: Any, local: Callable[[str], str]) -> Any:
    """An entry of a mixture; its name stays as it was written."""
    made = _at(entry, ("path",), local)
    return made if made == entry else {"name": entry["path"], **made}


def _at(table: Any, keys: tuple[str, ...], local: Callable[[str], str]) -> Any:
    # Values of wrong types are refused when the sections are parsed.
    if not isinstance(table, Mapping):
        return table
    return {key: local(value) if key in keys and isinstance(value, str) else value for key, value in table.items()}


@cache
def _fetched(name: str, kind: Kind, allowed: tuple[str, ...] | None = None, ignored: tuple[str, ...] = ()) -> str:
    found = _ID.fullmatch(name)
    assert found is not None
    library = _library(name)  # which shows its progress
    patterns = {"allow_patterns": allowed and list(allowed), "ignore_patterns": list(ignored)}
    return _asked(found[1], kind, library, {"repo_type": kind, "revision": found[2], **patterns})


def _library(name: str) -> Any:
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise ConfigError(
            f"{name} does not exist here; as an id of the hub it {needs('huggingface_hub')}; or download it by other "
            "means, and give its folder"
        ) from error


def _asked(repository: str, kind: Kind, library: Any, where: Mapping[str, Any]) -> str:
    try:
        return str(library.snapshot_download(repository, **where))
    except Exception as error:  # whatever a network, a server or a full disk raises
        said = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"{repository} does not exist here, and could not be fetched as a {kind} of the hub: "
            f"{type(error).__name__}: {said}; check the name and the network, or download it first (hf download "
            f"{repository} --repo-type {kind} --local-dir FOLDER) and give its folder"
        ) from error
