"""A tokenizer's chat template: renders messages to text and marks the characters of the assistant.

A Hugging Face folder has the template in `chat_template.jinja` or, older, under `chat_template` of
`tokenizer_config.json`, which also names the special tokens that it may use. Of several named templates, `default` is
used, and `tool_use` for conversations with tools. A template is an untrusted Jinja program, so it runs in Jinja's
sandbox, in a process with limits of memory and time (terrace.data.template_process). It is given the messages, the
tools, the special tokens, and the helpers that templates expect: `raise_exception`, `strftime_now`, a `tojson` that
keeps characters as they are, and loop controls.

The assistant's text is found in one of two ways:

- A template with `{% generation %}` ... `{% endgeneration %}` marks it. Marks are put around each such part, and
  removed from the text after rendering.
- Otherwise by prefixes: the conversation before an assistant turn, rendered with the generation prompt, must be a
  prefix of the conversation up to the end of that turn, which must be a prefix of the whole; the text between the two
  ends is the turn. A template that rewrites earlier turns, such as one that drops old reasoning, is refused.
"""

import functools
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from terrace.base.errors import ConfigError, DataError
from terrace.base.files import read_bounded
from terrace.base.foreign import read_file
from terrace.base.schema import read_table
from terrace.data.message_forms import Messages, forms_of
from terrace.data.rendering import TemplateRefusalError, renderers
from terrace.data.template_process import BEGIN, END
from terrace.data.text_tokens import CONFIG_FILE, read_tables, token_text
from terrace.data.tokenizer import BYTES

Tools = Sequence[Any] | None
# Messages and tools, also with further variables of the template.
Conversation = tuple[Messages, Tools] | tuple[Messages, Tools, Mapping[str, Any]]
Conversations = Sequence[Conversation]
Spans = list[tuple[int, int]]  # of characters, first and one past the last

TEMPLATE_FILE, TEMPLATE_FOLDER = "chat_template.jinja", "additional_chat_templates"
_TOKENS_FILE = "special_tokens_map.json"  # of older folders
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class ChatTemplate:
    """A template and the special tokens it may name. `with_tools` is another template of the folder, for conversations
    with tools.
    """

    source: str
    tokens: Mapping[str, Any] = field(default_factory=dict)
    name: str = "the chat template"
    with_tools: str | None = None

    @property
    def fingerprint(self) -> str:
        """Equal for two templates only if they render identically."""
        sources = [self.source] if self.with_tools is None else [self.source, self.with_tools]
        whole = json.dumps([*sources, sorted(self.tokens.items())])
        return f"chat-1-{hashlib.sha256(whole.encode()).hexdigest()}"

    @functools.cached_property
    def _for_tools(self) -> "ChatTemplate":
        if self.with_tools is None:
            return self
        return replace(self, source=self.with_tools, with_tools=None, name=f"{self.name} for tools")

    def of(self, tools: Tools) -> "ChatTemplate":
        """The template that renders a conversation with `tools`."""
        return self if tools is None else self._for_tools

    @functools.cached_property
    def has_tags(self) -> bool:
        """Whether `{% generation %}` marks the assistant's text. Raises as `check` does."""
        try:
            return renderers().has_tags(self.source, self.name, self.tokens)
        except TemplateRefusalError as error:
            raise DataError(str(error)) from error

    def check(self) -> None:
        """Raises `DataError` if this is not a valid template, or Jinja is not installed."""
        for each in (self, self._for_tools):
            assert each.has_tags in (True, False)

    def render(
        self,
        messages: Messages,
        tools: Tools = None,
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> tuple[str, Spans | None]:
        """Renders `messages`. Returns the text and the spans between generation tags, None if the template has no tags.

        Raises `TemplateRefusalError` with the template's message, or if it takes too long or too much memory.
        """
        conversation = (messages, tools, variables or {})
        made = self.of(tools)._made([conversation], prompting=add_generation_prompt, spans=False)
        text, spans = next(made)
        return text, None if spans is None else [(first, end) for first, end in spans]

    def prompts(self, conversations: Conversations) -> Iterator[str]:
        """Yields the texts of conversations (messages, tools, variables) up to the assistant's answer.

        Raises `TemplateRefusalError` as `render` does, after yielding the texts before the refused one.
        """
        for text, _ in self._in_order(conversations, prompting=True, spans=False):
            yield text

    def assistant_spans(self, conversations: Conversations) -> Iterator[tuple[str, Spans]]:
        """Yields the text of each conversation (messages, tools, variables) with the character spans of the assistant.

        Raises `TemplateRefusalError` as `render` does, or if the prefixes do not agree, after yielding the texts
        before.
        """
        for text, spans in self._in_order(conversations, spans=True):
            yield text, [(first, end) for first, end in spans]

    def _in_order(self, conversations: Conversations, **more: bool) -> Iterator[Any]:
        # In runs of one template, so that texts come in the order of the conversations.
        for _, group in itertools.groupby(conversations, key=lambda conversation: conversation[1] is None):
            run = list(group)
            yield from self.of(run[0][1])._made(run, **more)

    def _made(self, conversations: Conversations, **more: bool) -> Iterator[Any]:
        asked = {"conversations": [_asked(*conversation) for conversation in conversations], **more}
        made, refusal = renderers().ask(self.source, self.name, self.tokens, asked)
        yield from made
        if refusal is not None:
            raise refusal


def load_template(tokenizer: str | Path, path: str | Path = "", *, needed: bool = True) -> ChatTemplate:
    """The template in the file `path`, or else in the folder of `tokenizer`, with its special tokens.

    If not `needed`, it is left empty. Raises `DataError` if there is none, it is invalid, or Jinja is not installed.
    """
    folder = None
    # The template lies in the tokenizer's folder.
    if str(tokenizer) != BYTES:
        folder = Path(tokenizer) if Path(tokenizer).is_dir() else Path(tokenizer).parent
    config = read_tables(folder).get(CONFIG_FILE, {})
    tokens = _tokens(folder, config)
    if not needed:
        return ChatTemplate("", tokens)
    if path:
        template = ChatTemplate(_read(Path(path)), tokens, str(path))
    else:
        template = _own_template(tokenizer, folder, config, tokens)
    template.check()
    return template


def _asked(messages: Messages, tools: Tools, variables: Mapping[str, Any] | None = None) -> dict[str, Any]:
    forms = [{"messages": form.messages, "unfit": form.unfit, "parts": form.parts} for form in forms_of(messages)]
    return {"forms": forms, "tools": tools, "variables": variables or {}}


def _tokens(folder: Path | None, config: Mapping[str, Any]) -> dict[str, str]:
    # As `transformers` does: a folder that lists its added tokens in the configuration has no need of the older file.
    older: Mapping[str, Any] = {}
    if folder is not None and "added_tokens_decoder" not in config and (folder / _TOKENS_FILE).is_file():
        try:
            older = read_table(folder / _TOKENS_FILE)
        except ConfigError as error:
            raise DataError(str(error)) from error
    declared = {**config, **older}
    return {name: token for name in _TOKENS if (token := token_text(declared, name)) is not None}


def _own_template(
    tokenizer: str | Path, folder: Path | None, config: Mapping[str, Any], tokens: Mapping[str, Any]
) -> ChatTemplate:
    sources = {} if folder is None else _sources(folder, config)
    if "default" in sources:
        file = TEMPLATE_FILE if folder is not None and (folder / TEMPLATE_FILE).is_file() else None
        name = f"the chat template of {folder}" if file is None else str(Path(str(folder)) / file)
        return ChatTemplate(sources["default"], tokens, name, sources.get("tool_use"))
    if sources:
        raise DataError(
            f"{folder} has chat templates of the names {', '.join(sorted(sources))}, but none of the name default: "
            "name a file that holds one of them with data.chat_template"
        )
    where = f"{folder} has no {TEMPLATE_FILE}, and no chat_template in a {CONFIG_FILE}"
    raise DataError(
        f"chat data need a chat template, but {where if folder else f'the tokenizer {str(tokenizer)!r} has none'}: "
        "name one with data.chat_template, or take the tokenizer's folder of a chat model"
    )


def _sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The templates of `folder` by name. Template files replace all templates in the configuration, as in
    `transformers`.
    """
    files = {file.stem: file for file in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))}
    if (folder / TEMPLATE_FILE).is_file():
        files.setdefault("default", folder / TEMPLATE_FILE)
    if files:
        return {name: _read(file, folder) for name, file in files.items()}
    own = config.get("chat_template")
    if isinstance(own, list):
        own = {each.get("name"): each.get("template") for each in own if isinstance(each, dict)}
    named = own if isinstance(own, dict) else {"default": own}
    return {name: source for name, source in named.items() if isinstance(name, str) and isinstance(source, str)}


def _read(path: Path, within: Path | None = None) -> str:
    try:
        raw = read_bounded(path) if within is None else read_file(path, within)
        return raw.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except OSError as error:
        raise DataError(f"cannot read the chat template {path}: {error.strerror}; name another file") from error
    except UnicodeDecodeError as error:
        raise DataError(f"the chat template {path} is not UTF-8 text; convert it") from error


def marks_in(text: str) -> bool:
    """Whether `text` contains a code point that is used as a mark here."""
    return BEGIN in text or END in text
