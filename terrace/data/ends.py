"""The tokens that end generated text, for sampling, feedback and export alike, and the token that pads rows.

A text ends with the tokenizer's end of text, or with a token that the model's files declare. An assistant's turn ends
with the first special token that the chat template writes after the assistant's text. That may be another token: many
base models end a text with <|endoftext|> and are trained on turns that end with <|im_end|>.
"""

import re
from pathlib import Path

from terrace.base.errors import DataError
from terrace.data.rendering import TemplateRefusalError
from terrace.data.template import load_template
from terrace.data.text_tokens import CONFIG_FILE, ID_FILES, declared_ids, read_tables, token_text
from terrace.data.tokenizer import FileTokenizer, Tokenizer

_SAID = "zyxwvut"  # what the assistant says in a probe: a word that no template writes itself
_FILLERS = ("pad_token", "unk_token", "bos_token")


def ends_of(
    tokenizer: Tokenizer, tokenizer_path: str | Path, template_path: str | Path = "", folder: Path | None = None
) -> tuple[int, ...]:
    """Ids that end a text or a turn: the tokenizer's end of text, those declared in `folder`, and the end of the
    assistant's turn in the chat template (of `template_path`, or the tokenizer's own).
    """
    found = {tokenizer.text_tokens.end, turn_end(tokenizer, tokenizer_path, template_path)}
    tables = read_tables(folder)
    for name in ID_FILES:
        found |= set(declared_ids(tables.get(name, {}).get("eos_token_id")))
    return tuple(sorted(end for end in found if end is not None))


def turn_end(tokenizer: Tokenizer, tokenizer_path: str | Path, template_path: str | Path = "") -> int | None:
    """The special token with which a chat template ends the assistant's turn; None if there is no template or no such
    token.
    """
    if not isinstance(tokenizer, FileTokenizer):
        return None
    try:
        template = load_template(tokenizer_path, template_path)
    except DataError:
        return None  # nothing can be asked in it either
    conversation = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _SAID}]
    # Some templates require a system message.
    for messages in (conversation, [{"role": "system", "content": "?"}, *conversation]):
        try:
            text, _ = template.render(messages)
        except TemplateRefusalError:
            continue
        special = tokenizer.vocabulary.special
        # The longest of the tokens with a common prefix.
        names = "|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)"
        mark = re.search(names, text.rpartition(_SAID)[2]) if _SAID in text else None
        return None if mark is None else special[mark[0]]
    return None


def filler(tokenizer: FileTokenizer, folder: Path, ends: tuple[int, ...]) -> str | None:
    """A special token that can pad rows because no text ends with it; None if every special token ends texts.

    `transformers` takes the last token other than this one as the end of a text. Tokens declared in `folder` are
    preferred, then those with telling names.
    """
    config = read_tables(folder).get(CONFIG_FILE, {})
    special = tokenizer.vocabulary.special
    declared = [name for key in _FILLERS if (name := token_text(config, key)) in special and name is not None]
    likely = [name for name in special if re.search("pad|unk|reserved|unused", name, re.IGNORECASE)]
    fitting = (name for name in (*declared, *likely, *special) if special[name] not in ends)
    return next(fitting, None)
