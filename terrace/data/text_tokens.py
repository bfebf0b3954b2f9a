"""The tokens that begin and end a text: those that the tokenizer's folder declares, or a run gives instead.

end     `eos_token` of tokenizer_config.json, else the first `eos_token_id` of generation_config.json, else of
        config.json, else a guess: the first of `END_OF_TEXT_NAMES` that tokenizer.json declares as special
begin   the tokens that the post-processor of tokenizer.json puts before a text; where it has no template, the
        `bos_token` of tokenizer_config.json if `add_bos_token` is true there
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from terrace.base.errors import ConfigError, DataError, did_you_mean
from terrace.base.schema import read_table

AUTO = "auto"
CONFIG_FILE = "tokenizer_config.json"
GENERATION_FILE = "generation_config.json"
ID_FILES = (GENERATION_FILE, "config.json")
Tables = Mapping[str, Mapping[str, Any]]  # file name -> contents, of the files above that exist

# The order matters for families that kept an older tokenizer's </s> beside their own <|endoftext|>.
END_OF_TEXT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")


@dataclass(frozen=True, kw_only=True)
class TextTokens:
    """Token ids around a text, and a description of where each comes from.

    `context` precedes the first token when a text is evaluated: the token that begins texts, or the declared
    `bos_token`, or else the end-of-text token.
    """

    begin: tuple[int, ...] = ()
    end: int | None = None
    context: int | None = None
    begin_from: str = ""
    end_from: str = ""


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Tokens of a tokenizer.json by name; `special` are those declared as special."""

    path: Path
    special: Mapping[str, int]
    id_of: Callable[[str], int | None]

    @property
    def guess(self) -> int | None:
        return next((self.special[name] for name in END_OF_TEXT_NAMES if name in self.special), None)

    def named(self, token: str, source: str) -> int:
        """Id of `token`. Raises `DataError`, naming the `source` of the token, if it is not in the vocabulary."""
        found = self.id_of(token)
        if found is None:
            raise DataError(
                f"{source} = {token!r} is no token of {self.path}{did_you_mean(token, self.special)}; name one with "
                f"--data.{'bos' if 'bos' in source else 'eos'} TOKEN"
            )
        return found


def find_text_tokens(
    vocabulary: Vocabulary, post_processor: Mapping[str, Any], files: Tables, bos: bool | str, eos: str
) -> TextTokens:
    """The tokens around a text according to the `files` beside a tokenizer, unless `bos` or `eos` override them.

    `bos` is "auto", true (the folder's `bos_token`), false or a token; `eos` is "auto" or a token. Raises `DataError`
    for a token that is not in the vocabulary, and for true if the folder has no `bos_token`.
    """
    end, end_from = _end(vocabulary, files, eos)
    begin, begin_from = _begin(vocabulary, post_processor, files.get(CONFIG_FILE, {}), bos)
    declared = token_text(files.get(CONFIG_FILE, {}), "bos_token")
    known = None if declared is None else vocabulary.id_of(declared)
    context = begin[-1] if begin else end if known is None else known
    return TextTokens(begin=begin, end=end, context=context, begin_from=begin_from, end_from=end_from)


def read_tables(folder: Path | None) -> dict[str, dict[str, Any]]:
    """The files of `folder` that declare the tokens around a text. Raises `DataError` for a damaged one."""
    if folder is None:
        return {}
    try:
        return {
            name: read_table(folder / name, folder) for name in (CONFIG_FILE, *ID_FILES) if (folder / name).is_file()
        }
    except ConfigError as error:
        raise DataError(str(error)) from error


def state_of(part: Any) -> Mapping[str, Any]:
    """The JSON state of a post-processor or decoder of the `tokenizers` package; empty without one."""
    if part is None:
        return {}
    state = json.loads(part.__getstate__())
    assert isinstance(state, dict), "a part of a tokenizer is an object"
    return state


def token_text(config: Mapping[str, Any], key: str) -> str | None:
    """A token of a tokenizer_config.json, given as a string or as a table with "content"."""
    token = config.get(key)
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def declared_ids(given: Any) -> tuple[int, ...]:
    """Ids of a key that holds one id or a list of them."""
    ids = given if isinstance(given, list) else [given]
    return tuple(each for each in ids if isinstance(each, int) and not isinstance(each, bool))


def _end(vocabulary: Vocabulary, files: Tables, eos: str) -> tuple[int | None, str]:
    if eos != AUTO:
        return vocabulary.named(eos, "data.eos"), "as data.eos says"
    declared = token_text(files.get(CONFIG_FILE, {}), "eos_token")
    if declared is not None:
        return vocabulary.named(declared, f"eos_token in {CONFIG_FILE}"), f"from {CONFIG_FILE}"
    for name in ID_FILES:
        ids = declared_ids(files.get(name, {}).get("eos_token_id"))
        if ids:
            return ids[0], f"from {name}"
    return vocabulary.guess, "guessed by its name: say otherwise with data.eos"


def _begin(
    vocabulary: Vocabulary, post_processor: Mapping[str, Any], config: Mapping[str, Any], bos: bool | str
) -> tuple[tuple[int, ...], str]:
    if isinstance(bos, str) and bos != AUTO:
        return (vocabulary.named(bos, "data.bos"),), "as data.bos says"
    if bos is False:
        return (), "as data.bos says"
    put = put_before(post_processor, vocabulary.path)
    if bos == AUTO and put is not None:
        return put, "from the post-processor of tokenizer.json"
    if bos == AUTO and config.get("add_bos_token") is not True:
        return (), ""
    declared = token_text(config, "bos_token")
    if declared is None:
        reason = "data.bos = true" if bos is True else f"{CONFIG_FILE} says add_bos_token"
        raise DataError(
            f"{reason}, but no {CONFIG_FILE} beside {vocabulary.path} has a bos_token: name it with --data.bos TOKEN"
        )
    origin = "as data.bos says" if bos is True else f"from {CONFIG_FILE}"
    return (vocabulary.named(declared, f"bos_token in {CONFIG_FILE}"),), origin


def put_before(processor: Mapping[str, Any], path: Path) -> tuple[int, ...] | None:
    """Ids that a post-processor puts before a text; None if it has no template for texts."""
    kind = processor.get("type")
    if kind not in ("Sequence", "TemplateProcessing", "BertProcessing", "RobertaProcessing"):
        return None
    if kind == "Sequence":
        found = [before for each in processor["processors"] if (before := put_before(each, path)) is not None]
        # A later processor puts its tokens around those of an earlier one.
        return tuple(token for before in reversed(found) for token in before) if found else None
    if kind != "TemplateProcessing":
        return (processor["cls"][1],)
    put: list[int] = []
    for piece in processor["single"]:
        if "SpecialToken" not in piece:
            break
        name = piece["SpecialToken"]["id"]
        if name not in processor["special_tokens"]:
            raise DataError(
                f"the post-processor of {path} puts {name!r} before a text and does not say which token it is: name "
                "one with --data.bos TOKEN, or none with --data.bos false"
            )
        put += processor["special_tokens"][name]["ids"]
    return tuple(put)
