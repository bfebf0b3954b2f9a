"""The identity of a feedback run: values that must be the same when it is resumed.

Files are identified by content, not by name: prompts by their tokens, weights by their bytes, a reward function by the
source of its module. So a file may be moved, but not changed.
"""

import hashlib
import json
import sys
import zlib
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from modulefinder import ModuleFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terrace.base.schema import dump
from terrace.data.tokenizer import Tokenizer
from terrace.model.hf.folder import CONFIG, METADATA, SINGLE, is_dcp, weight_files
from terrace.rl.config import RlConfig
from terrace.rl.placing import COST
from terrace.rl.stream.prompt_file import PromptFile
from terrace.train.weights import version_of

if TYPE_CHECKING:
    from terrace.rl.values.prompts import PromptSource

# Keys of [run] that may differ when a run is resumed: its length, where it runs, and the files that it writes.
_MAY_CHANGE = (
    *("steps", "rows", "reference", "metrics", "timeout_s", "reward_timeout_s", "high_lr"),
    *("evaluate_every", "checkpoint_every", "keep_checkpoints"),
)
# And of [environment], what decides about waiting and faults alone.
_MAY_CHANGE_OF_ENVIRONMENT = ("deadline_s", "most_faults")
_OURS = "terrace."  # reward functions of these modules are identified by name alone
_READ_BYTES, _NUM_READERS = 4 << 20, 8


def identity(
    config: RlConfig, tokenizer: Tokenizer, stops: Collection[int], contents: Mapping[str, str]
) -> dict[str, Any]:
    """The values that must not change on resume, by dotted name; `contents` as from `contents_of`.

    `stops` are the tokens that end a response.
    """
    sections = {name: dump(getattr(config, name)) for name in ("run", "algorithm", "optimizer", "cost")}
    sections |= {f"reward[{index}]": dump(reward) for index, reward in enumerate(config.reward)}
    found = {f"{name}.{key}": value for name, section in sections.items() for key, value in (section or {}).items()}
    for name in _MAY_CHANGE:
        del found[f"run.{name}"]
    if config.environment.name:
        kept = {key: value for key, value in dump(config.environment).items() if key not in _MAY_CHANGE_OF_ENVIRONMENT}
        found |= {f"environment.{key}": value for key, value in kept.items()}
    known: dict[str, Any] = {"weights": config.weights, "tokenizer": tokenizer.fingerprint, "ends": sorted(stops)}
    return {**found, **known, **contents}


def fixes_of(config: RlConfig) -> dict[str, str]:
    """What to do if a value of `identity` has changed on resume (which file to restore), by its name."""
    found = {
        "run.prompts_file": f"restore {config.run.prompts_file}",
        "run.reference": f"restore the weights and config.json in {config.reference_folder}",
        "weights": f"restore the weights and config.json in {config.weights}",
        "tokenizer": f"restore the tokenizer's files in {config.weights}",
        "ends": f"restore generation_config.json and the tokenizer's files in {config.weights}",
    }
    named = {f"reward[{index}]": reward for index, reward in enumerate(config.reward)}
    for name, reward in (named | ({} if config.cost is None else {COST: config.cost})).items():
        module = reward.function.partition(":")[0]
        found[f"{name}.function"] = f"restore the module {module} and those beside it that it imports"
        found[f"{name}.model"] = f"restore the weights and config.json in {reward.model}"
    module = config.environment.name.partition(":")[0]
    found["environment.name"] = f"restore the module {module} and those beside it that it imports"
    return found


def contents_of(config: RlConfig, prompts: "PromptSource") -> dict[str, str]:
    """Digests of all files that a run depends on, by the key that names them.

    Raises `ModelError` for a folder without weights. Reward modules must have been imported.
    """
    found = {}
    if isinstance(prompts, PromptFile):
        found["run.prompts_file"] = _prompts_digest(prompts)
    if config.weights:
        found["weights"] = _weights_digest(Path(config.weights))
    if config.reference_folder:
        reference = Path(config.reference_folder)
        is_run = (reference / "config.toml").is_file()
        found["run.reference"] = " ".join(version_of(str(reference))) if is_run else _weights_digest(reference)
    if config.environment.name:
        found["environment.name"] = _function_digest(config.environment.name)
    rewards = {f"reward[{index}]": reward for index, reward in enumerate(config.reward)}
    for name, reward in (rewards | ({} if config.cost is None else {COST: config.cost})).items():
        if reward.model:
            found[f"{name}.model"] = _weights_digest(Path(reward.model))
        else:
            found[f"{name}.function"] = _function_digest(reward.function)
    return found


def _prompts_digest(prompts: PromptFile) -> str:
    digest = hashlib.sha256()
    for each in prompts.prompts:
        # Parquet columns may hold values that JSON cannot represent.
        line = json.dumps([each.text, each.tokens, each.data], sort_keys=True, default=repr)
        digest.update(line.encode() + b"\n")
    return f"sha256-{digest.hexdigest()}"


def _weights_digest(folder: Path) -> str:
    """Digest of all weight files and config.json, from CRC-32 of each, since folders may have hundreds of GB."""
    if is_dcp(folder):
        names = {METADATA, *(path.name for path in folder.glob("*.distcp"))}
    else:
        names = set((weight_files(folder) or {"": SINGLE}).values())
    paths = [folder / name for name in sorted(names | ({CONFIG} if (folder / CONFIG).is_file() else set()))]
    digest = hashlib.sha256()
    with ThreadPoolExecutor(_NUM_READERS) as readers:
        for path, (size, crc) in zip(paths, readers.map(_checksum, paths), strict=True):
            digest.update(f"{path.name} {size} {crc:08x}\n".encode())
    return f"sha256-{digest.hexdigest()}"


def _checksum(path: Path) -> tuple[int, int]:
    size = crc = 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_READ_BYTES):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return size, crc


def _function_digest(name: str) -> str:
    """The function's name with a digest of its module's source and of the local modules that it imports."""
    module_name, _, function = name.partition(":")
    file = getattr(sys.modules.get(module_name), "__file__", None)
    if module_name.startswith(_OURS) or file is None:
        return name
    digest, root = hashlib.sha256(), Path(file).parents[module_name.count(".") + (Path(file).stem == "__init__")]
    for path in _sources(module_name, Path(file), root):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return f"{function} of sha256-{digest.hexdigest()}"


def _sources(module_name: str, file: Path, root: Path) -> list[Path]:
    """Files under `root` that importing a module reads; for an installed package, only the module's own file."""
    if root.name in ("site-packages", "dist-packages"):
        return [file]
    finder = ModuleFinder(path=[str(root)], excludes=["terrace"])
    with suppress(Exception):  # a source that does not compile, which the module may never import
        finder.import_hook(module_name)
    named = [getattr(each, "__file__", None) for each in finder.modules.values()]
    found = [Path(name) for name in named if name]
    return sorted({path for path in found if root in path.parents} | {file})
