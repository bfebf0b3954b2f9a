"""Adapts a tokenizer's files to declare the tokens around a run's texts, so that whoever loads the model adds the same
ones.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from terrace.base.errors import DataError
from terrace.base.parsing import parse_json
from terrace.data.text_tokens import (
    AUTO,
    CONFIG_FILE,
    GENERATION_FILE,
    declared_ids,
    find_text_tokens,
    put_before,
    token_text,
)
from terrace.data.tokenizer import FileTokenizer

_TOKENIZER, _MAP = "tokenizer.json", "special_tokens_map.json"
# Classes of `transformers` that make a post-processor of their own, and not the one of tokenizer.json.
_REBUILT = ("GPTNeoXTokenizer", "GPTNeoXTokenizerFast")
_TEMPLATES = ("TemplateProcessing", "BertProcessing", "RobertaProcessing")


def agreeing(files: Mapping[str, bytes], tokenizer: FileTokenizer) -> dict[str, bytes]:
    """Those of `files` (name -> content), changed, that must declare the text tokens of `tokenizer`; empty if they
    already agree.
    """
    tables = {name: _parsed(name, raw) for name, raw in files.items() if name.endswith("config.json")}
    whole = _parsed(_TOKENIZER, files[_TOKENIZER])
    try:
        there = find_text_tokens(tokenizer.vocabulary, whole.get("post_processor") or {}, tables, AUTO, AUTO)
    except DataError:  # tokens that do not exist, which is why the run names others
        there = None
    here = tokenizer.text_tokens
    # `transformers` prepends what tokenizer.json says, regardless of add_bos_token.
    puts = (put_before(whole.get("post_processor") or {}, tokenizer.vocabulary.path) or ()) == here.begin
    config = dict(tables.get(CONFIG_FILE, {"tokenizer_class": "PreTrainedTokenizerFast"}))
    # lm-eval begins a text with the bos_token, wherever the template has it from.
    names_begin = not here.begin or token_text(config, "bos_token") is not None
    is_rebuilt = bool(here.begin) and config.get("tokenizer_class") in _REBUILT
    is_said = there is not None and (there.begin, there.end) == (here.begin, here.end)
    if is_said and names_begin and puts and not is_rebuilt:
        return {}
    changed: dict[str, Any] = {CONFIG_FILE: config}
    config["add_bos_token"] = bool(here.begin)
    if here.begin:
        config["bos_token"] = tokenizer.name(here.begin[-1])
    else:
        # Some classes of transformers have a bos_token of their own where the key is missing.
        config.setdefault("bos_token", None)
    if here.end is not None:
        config["eos_token"] = tokenizer.name(here.end)
        for name in tables.keys() - {CONFIG_FILE}:
            ends = tables[name].get("eos_token_id")
            if here.end not in (ends if isinstance(ends, list) else [ends]):
                changed[name] = {**tables[name], "eos_token_id": here.end}
    if is_rebuilt:
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if not puts:
        changed[_TOKENIZER] = {
            **whole,
            "post_processor": _processor(whole.get("post_processor"), here.begin, tokenizer),
        }
    return {name: _written(table) for name, table in changed.items()}


def _processor(old: Any, begin: tuple[int, ...], tokenizer: FileTokenizer) -> Any:
    flat = [] if old is None else old["processors"] if old["type"] == "Sequence" else [old]
    kept = [each for each in flat if each["type"] not in _TEMPLATES]
    if begin:
        names = [tokenizer.name(token) for token in begin]
        put = [[{"SpecialToken": {"id": name, "type_id": kind}} for name in names] for kind in (0, 1)]
        text = [[{"Sequence": {"id": sequence, "type_id": kind}}] for kind, sequence in enumerate("AB")]
        special = {
            name: {"id": name, "ids": [token], "tokens": [name]} for name, token in zip(names, begin, strict=True)
        }
        single, pair = put[0] + text[0], put[0] + text[0] + put[1] + text[1]
        kept.append({"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special})
    return {"type": "Sequence", "processors": kept} if len(kept) > 1 else kept[0] if kept else None


def _parsed(name: str, raw: bytes) -> dict[str, Any]:
    try:
        table = parse_json(raw)
    except ValueError as error:
        raise DataError(f"{name} of the tokenizer is not valid JSON: {error}; download it again") from error
    if not isinstance(table, dict):
        raise DataError(f"{name} of the tokenizer holds no object; download it again")
    return table


def ending(files: Mapping[str, bytes], ends: Sequence[int]) -> dict[str, bytes]:
    """A generation_config.json that stops generation at each of `ends`; empty if `files` already declare them."""
    tables = {name: _parsed(name, files[name]) for name in (GENERATION_FILE, "config.json") if name in files}
    declared = next((ids for table in tables.values() if (ids := declared_ids(table.get("eos_token_id")))), ())
    more = [end for end in ends if end not in declared]
    # A single end of text is in config.json in any case.
    if not more or (not declared and len(ends) == 1):
        return {}
    return {GENERATION_FILE: _written({**tables.get(GENERATION_FILE, {}), "eos_token_id": [*declared, *more]})}


def filling(files: Mapping[str, bytes], name: str) -> dict[str, bytes]:
    """Those of `files` that declare a pad token, changed to `name`."""
    changed = {CONFIG_FILE: {**_parsed(CONFIG_FILE, files[CONFIG_FILE]), "pad_token": name}}
    if _MAP in files:
        changed[_MAP] = {**_parsed(_MAP, files[_MAP]), "pad_token": name}
    return {file: _written(table) for file, table in changed.items()}


def with_special(tokenizer: bytes, name: str, token: int) -> bytes:
    """A tokenizer.json with one more special token."""
    whole = _parsed(_TOKENIZER, tokenizer)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return _written({**whole, "added_tokens": [*whole["added_tokens"], {"id": token, "content": name, **flags}]})


def _written(table: Mapping[str, Any]) -> bytes:
    return (json.dumps(table, indent=2, ensure_ascii=False) + "\n").encode()
