"""A tokenizer's chat template: renders messages to text and marks the characters of the assistant.

A Hugging Face folder has the template in `chat_template.jinja` or, older, under `chat_template` of
`tokenizer_config.json`, which also names the special tokens that it may use. It is somebody else's Jinja program, so it
runs in Jinja's sandbox, in a process with limits of memory and time (terrace.data.template_process), with the messages,
the tools, the special tokens, and the helpers that templates expect: `raise_exception`, `strftime_now`, a `tojson` that
keeps characters as they are, loop controls.

The assistant's text is found in one of two ways:

- A template with `{% generation %}` ... `{% endgeneration %}` marks it. Marks are put around each such part, and
  removed from the text after rendering.
- Otherwise by prefixes: the conversation before an assistant turn, with the generation prompt, must be a prefix of the
  one that ends with the turn, and that a prefix of the whole conversation; the text between the two ends is the turn. A
  template that renders earlier turns anew, such as one that drops old reasoning, has no such prefixes and is refused.
"""

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from terrace.base.errors import DataError
from terrace.base.files import read_bounded
from terrace.data.rendering import TemplateRefusalError, renderers
from terrace.data.template_process import BEGIN, END
from terrace.data.text_tokens import CONFIG_FILE, read_tables, token_text
from terrace.data.tokenizer import BYTES

Messages = Sequence[Mapping[str, Any]]
Conversations = Sequence[tuple[Messages, Sequence[Any] | None]]  # messages and tools
Spans = list[tuple[int, int]]  # of characters, first and one past the last

TEMPLATE_FILE = "chat_template.jinja"
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class ChatTemplate:
    """A template and the special tokens it may name."""

    source: str
    tokens: Mapping[str, Any] = field(default_factory=dict)
    name: str = "the chat template"

    @property
    def fingerprint(self) -> str:
        """Equal for two templates only if they render alike."""
        whole = json.dumps([self.source, sorted(self.tokens.items())])
        return f"chat-1-{hashlib.sha256(whole.encode()).hexdigest()}"

    @functools.cached_property
    def has_tags(self) -> bool:
        """Whether `{% generation %}` marks the assistant's text; raises as `check` does."""
        try:
            return renderers().has_tags(self.source, self.name, self.tokens)
        except TemplateRefusalError as error:
            raise DataError(str(error)) from error

    def check(self) -> None:
        """Raises `DataError` when this is not a template, or Jinja is not installed."""
        assert self.has_tags in (True, False)

    def render(
        self, messages: Messages, tools: Sequence[Any] | None = None, *, add_generation_prompt: bool = False
    ) -> tuple[str, Spans | None]:
        """Text of `messages`, and the spans between generation tags; None where the template has no tags.

        Raises `TemplateRefusalError` with the template's message, or for a template that takes too long or too much
        memory.
        """
        made = self._made([(messages, tools)], prompting=add_generation_prompt, spans=False)
        text, spans = next(made)
        return text, None if spans is None else [(first, end) for first, end in spans]

    def prompts(self, conversations: Conversations) -> Iterator[str]:
        """Texts of conversations (messages, tools) up to where the assistant answers.

        Raises `TemplateRefusalError` as `render` does, after the texts before.
        """
        for text, _ in self._made(conversations, prompting=True, spans=False):
            yield text

    def assistant_spans(self, conversations: Conversations) -> Iterator[tuple[str, Spans]]:
        """Texts of conversations (messages, tools) and the character spans of the assistant.

        Raises `TemplateRefusalError` as `render` does, or when the prefixes do not agree, after the texts before.
        """
        for text, spans in self._made(conversations, spans=True):
            yield text, [(first, end) for first, end in spans]

    def _made(self, conversations: Conversations, **more: bool) -> Iterator[Any]:
        asked = {"conversations": conversations, **more}
        made, refusal = renderers().ask(self.source, self.name, self.tokens, asked)
        yield from made
        if refusal is not None:
            raise refusal


def load_template(tokenizer: str | Path, path: str | Path = "", *, needed: bool = True) -> ChatTemplate:
    """The template in the file `path`, or else the one in the folder of `tokenizer`, with its special tokens.

    If not `needed`, a missing one is empty. Raises `DataError` when there is none, it is not a template, or Jinja is
    not installed.
    """
    folder = None
    # The template lies in the tokenizer's folder.
    if str(tokenizer) != BYTES:
        folder = Path(tokenizer) if Path(tokenizer).is_dir() else Path(tokenizer).parent
    config = read_tables(folder).get(CONFIG_FILE, {})
    tokens = {name: token for name in _TOKENS if (token := token_text(config, name)) is not None}
    if not needed:
        return ChatTemplate("", tokens)
    if path:
        template = ChatTemplate(_read(Path(path)), tokens, str(path))
    else:
        template = _own_template(tokenizer, folder, config, tokens)
    template.check()
    return template


def _own_template(
    tokenizer: str | Path, folder: Path | None, config: Mapping[str, Any], tokens: Mapping[str, Any]
) -> ChatTemplate:
    if folder is not None and (folder / TEMPLATE_FILE).is_file():
        return ChatTemplate(_read(folder / TEMPLATE_FILE), tokens, str(folder / TEMPLATE_FILE))
    own = config.get("chat_template")
    if isinstance(own, list):  # several by name; the one without a purpose of its own is called default
        named = {each.get("name"): each.get("template") for each in own if isinstance(each, dict)}
        own = named.get("default")
    if isinstance(own, str):
        return ChatTemplate(own, tokens, f"the chat template of {folder}")
    where = f"{folder} has no {TEMPLATE_FILE}, and no chat_template in a {CONFIG_FILE}"
    raise DataError(
        f"chat data need a chat template, but {where if folder else f'the tokenizer {str(tokenizer)!r} has none'}: "
        "name one with data.chat_template, or take the tokenizer's folder of a chat model"
    )


def _read(path: Path) -> str:
    try:
        return read_bounded(path).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except OSError as error:
        raise DataError(f"cannot read the chat template {path}: {error.strerror}; name another file") from error
    except UnicodeDecodeError as error:
        raise DataError(f"the chat template {path} is not UTF-8 text; convert it") from error


def marks_in(text: str) -> bool:
    """Whether `text` holds the code points that serve as marks here."""
    return BEGIN in text or END in text
