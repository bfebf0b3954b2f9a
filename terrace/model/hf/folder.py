"""Files of a Hugging Face folder other than config.json. Needs no torch.

weights     model.safetensors, or model.safetensors.index.json and the files it names
tokenizer   tokenizer.json and related files
generation  generation_config.json
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from terrace.base.errors import ConfigError, ModelError
from terrace.base.foreign import read_file
from terrace.base.parsing import parse_json
from terrace.base.schema import read_table
from terrace.model.hf.keys import NEXTN, NEXTN_ALIAS, PROJECTION

ADAPTER = "adapter_config.json"  # of a folder of peft
METADATA = ".metadata"  # of a folder of torch.distributed.checkpoint
SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
CHAT_TEMPLATE, MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"
TOKENIZER_FILES = (
    TOKENIZER,
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    CHAT_TEMPLATE,
    "chat_template.json",
)
GENERATION = "generation_config.json"

_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_MOST_HEADER_BYTES = 100_000_000  # of safetensors
_OTHER_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "tf_model.h5", "flax_model.msgpack", "consolidated.*.pth")


def config_file(name: str | Path) -> Path:
    """Path of the config.json that `name` is or contains.

    Raises `ModelError` for the folder of an adapter and for a run folder, which are not models.
    """
    path = Path(name)
    if words := adapter_words(path):
        raise ModelError(words)
    if not path.is_dir():
        return path
    if (path / "config.toml").is_file() and not (path / CONFIG).is_file():
        raise ModelError(f"{path} is a run folder: make a model of it first with terrace export {path} FOLDER")
    return path / CONFIG


def read_model_table(path: str) -> dict[str, Any]:
    """Read the table of `config_file`. Raises `ConfigError`.

    A folder whose weights lack the layers for further tokens has none of them: `transformers` names one in every table
    that it writes for their families, and keeps no such weights.
    """
    file = config_file(path)
    if file == Path(path):
        return read_table(file)
    table = read_table(file, Path(path))
    named = [key for key in (NEXTN, NEXTN_ALIAS) if table.get(key)]
    stored = _tensor_names(Path(path)) if named else ()
    if stored and not any(name.endswith(f".{PROJECTION}.weight") for name in stored):
        table |= dict.fromkeys(named, 0)
    return table


def _tensor_names(folder: Path) -> tuple[str, ...]:
    """Names of the tensors in a folder; empty where it has no weights, or files that reading them refuses."""
    try:
        if (folder / INDEX).is_file():
            return tuple(read_table(folder / INDEX, folder)["weight_map"])
        with (folder / SINGLE).open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            found = parse_json(file.read(size)) if size <= _MOST_HEADER_BYTES else {}
        return tuple(found)
    except (ConfigError, OSError, KeyError, TypeError, ValueError):
        return ()


def holds_weights(folder: str) -> bool:
    """Whether `folder` has weights in any format, including those that `weight_files` rejects."""
    if not os.path.isdir(folder):
        return False
    return any(any(Path(folder).glob(pattern)) for pattern in (INDEX, METADATA, *_OTHER_WEIGHTS))


def adapter_words(folder: Path) -> str:
    """Error text for a folder with a peft adapter instead of a model, with the remedy; "" for any other folder."""
    if not (folder / ADAPTER).is_file() or (folder / CONFIG).is_file():
        return ""
    try:
        named = read_table(folder / ADAPTER).get("base_model_name_or_path")
    except ConfigError as error:
        return f"{folder} holds an adapter, not a model, and {error}"
    base = named if isinstance(named, str) and named else "BASE"
    return (
        f"{folder} holds an adapter of {base}, not a model: merge it in Python, as "
        f"PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({base!r}), {str(folder)!r})"
        ".merge_and_unload().save_pretrained('MERGED'), and give MERGED with the tokenizer of the base; or train new "
        f"adapters with --model on the folder of {base} and --lora.rank"
    )


def is_dcp(folder: Path) -> bool:
    """Whether the weights of a folder are in `torch.distributed.checkpoint` format and not in safetensors."""
    return (folder / METADATA).is_file() and not any((folder / name).is_file() for name in (INDEX, SINGLE))


def weight_files(folder: Path) -> dict[str, str] | None:
    """Tensor -> file according to the index, or None if all tensors are in one `model.safetensors`.

    Raises `ModelError` for a folder without weights or with weights in another format, and for a damaged index.
    """
    if (folder / INDEX).is_file():
        index = read_table(folder / INDEX, folder).get("weight_map")
        if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
            raise ModelError(f"{folder / INDEX} has no weight_map of tensors to files: download it again")
        for file in sorted(set(index.values())):
            # Files must be inside the folder.
            if os.path.basename(file) != file or not (folder / file).is_file():
                raise ModelError(f"{folder / INDEX} names {file}, which is not in the folder: download it")
        return index
    if (folder / SINGLE).is_file():
        return None
    if words := adapter_words(folder):
        raise ModelError(words)
    # Other formats (pickles) are named in the error, but never opened.
    others = sorted(path.name for pattern in _OTHER_WEIGHTS for path in folder.glob(pattern))
    if others:
        raise ModelError(
            f"{folder} has {others[0]}, but weights are read from {SINGLE} or {INDEX} alone: save the model again "
            "with save_pretrained of transformers, or give --train.weights '' to start from scratch"
        )
    raise ModelError(
        f"{folder} has no weights ({SINGLE}, {INDEX}, or {METADATA} of DCP): name another folder, or give "
        "--train.weights '' to start from scratch"
    )


def token_ids(source: str | Path | None, end_of_text: int | None) -> dict[str, Any]:
    """BOS, EOS and padding ids from the config.json of `source`; by default `end_of_text` is the EOS id.

    All three keys are present, since `transformers` has its own defaults for missing ones.
    """
    table: dict[str, Any] = dict.fromkeys(_TOKEN_IDS) | {"eos_token_id": end_of_text}
    if source is not None and (Path(source) / CONFIG).is_file():
        given = read_table(Path(source) / CONFIG, Path(source))
        table |= {key: given[key] for key in _TOKEN_IDS if key in given}
    return table


def quantisation(source: Path) -> str:
    """The form in which the config.json of `source` says that its weights are stored; empty for plain floats."""
    stored = read_table(source / CONFIG, source).get("quantization_config") if (source / CONFIG).is_file() else None
    return str(stored.get("quant_method", "")).upper() if isinstance(stored, dict) else ""


def carried_files(source: str | Path | None, end_of_text: int | None = None) -> dict[str, bytes]:
    """Files (name -> content) of `source` that are copied with any weights: tokenizer and generation config.

    Adds a tokenizer_config.json if only tokenizer.json exists; otherwise `transformers` would load the original
    tokenizer of the family. Raises `ModelError` for a file that cannot be read.
    """
    found = {} if source is None else read_files(Path(source), (*TOKENIZER_FILES, GENERATION))
    if TOKENIZER in found and TOKENIZER_CONFIG not in found:
        table = _tokenizer_config(found[TOKENIZER], end_of_text)
        found[TOKENIZER_CONFIG] = (json.dumps(table, indent=2, sort_keys=True) + "\n").encode()
    return found if source is None else with_templates(Path(source), found)


def read_files(folder: Path, names: Sequence[str]) -> dict[str, bytes]:
    """Read those of `names` that exist, as name -> content.

    Raises `ModelError` for a file that is not readable, or is a link out of the folder, since contents are exported.
    """
    found = {}
    for name in names:
        try:
            if (folder / name).exists():
                found[name] = read_file(folder / name, folder)
        except OSError as error:
            raise ModelError(f"cannot read {folder / name}: {error.strerror}") from error
    return found


def with_templates(folder: Path, found: Mapping[str, bytes]) -> dict[str, bytes]:
    """Add the folder's additional chat templates to `found`, in its tokenizer_config.json.

    Raises `ModelError` for a file that cannot be read.
    """
    names = sorted(path.name for path in (folder / MORE_TEMPLATES).glob("*.jinja"))
    if not names:
        return dict(found)
    named = {"default": found[CHAT_TEMPLATE]} if CHAT_TEMPLATE in found else {}
    # Confined to the model's folder, since the folder of templates may itself be a link.
    named |= {
        Path(name).stem: raw for name, raw in read_files(folder, [f"{MORE_TEMPLATES}/{n}" for n in names]).items()
    }
    try:
        sources = {name: source.decode() for name, source in named.items()}
        table = parse_json(found.get(TOKENIZER_CONFIG, b"{}"))
        if not isinstance(table, dict):
            raise ValueError("it holds no object")
    except ValueError as error:
        raise ModelError(
            f"a chat template or {TOKENIZER_CONFIG} in {folder} is damaged ({error}): repair it"
        ) from error
    listed = [{"name": name, "template": source} for name, source in sources.items()]
    # transformers ignores the list if the file chat_template.jinja exists.
    kept = {name: content for name, content in found.items() if name != CHAT_TEMPLATE}
    return {**kept, TOKENIZER_CONFIG: json.dumps({**table, "chat_template": listed}, ensure_ascii=False).encode()}


def _tokenizer_config(tokenizer: bytes, end_of_text: int | None) -> dict[str, Any]:
    table: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    try:
        added = parse_json(tokenizer).get("added_tokens", [])
    except (ValueError, AttributeError) as error:
        raise ModelError(f"{TOKENIZER} is damaged ({error}): save the tokenizer again") from error
    for token in added if isinstance(added, list) else []:
        if isinstance(token, Mapping) and end_of_text is not None and token.get("id") == end_of_text:
            table["eos_token"] = token.get("content")
    return table
