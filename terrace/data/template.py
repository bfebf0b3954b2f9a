"""A tokenizer's chat template: renders messages to text and marks the characters of the assistant.

A Hugging Face folder has the template in `chat_template.jinja` or, older, under `chat_template` of
`tokenizer_config.json`, which also names the special tokens that it may use. It is somebody else's Jinja program, so it
runs in Jinja's sandbox, with the messages, the tools, the special tokens, and the helpers that templates expect:
`raise_exception`, `strftime_now`, a `tojson` that keeps characters as they are, loop controls.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terrace.base.errors import DataError
from terrace.data.text_tokens import CONFIG_FILE, read_tables, token_text
from terrace.data.tokenizer import BYTES

if TYPE_CHECKING:
    from jinja2 import Template

Messages = Sequence[Mapping[str, Any]]
Spans = list[tuple[int, int]]  # of characters, first and one past the last

TEMPLATE_FILE = "chat_template.jinja"
_BEGIN, _END = "\ufdd0", "\ufdd1"  # code points that no text may hold: Unicode keeps them for marks inside a program
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_REASONING = ("reasoning_content", "thinking", "reasoning")  # one thing under the names that templates and data use


class TemplateRefusalError(Exception):
    """An objection of a template, or of its use on one conversation; the caller adds the line of the data."""


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
    def _compiled(self) -> "Template":
        return _compile(self.source, self.name)

    def check(self) -> None:
        """Raises `DataError` when this is not a template, or Jinja is not installed."""
        assert self._compiled is not None, "compiled"

    def render(
        self, messages: Messages, tools: Sequence[Any] | None = None, *, add_generation_prompt: bool = False
    ) -> tuple[str, Spans | None]:
        """Text of `messages`, and the spans between generation tags; None where the template has no tags.

        Raises `TemplateRefusalError` with the template's message.
        """
        from jinja2 import TemplateError

        try:
            marked = self._compiled.render(
                messages=[_as_templates_expect(message) for message in messages],
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.tokens,
            )
        except TemplateError as error:
            raise TemplateRefusalError(f"{self.name} refuses it: {_one_line(error)}") from error
        # A template is a program: it may fail in any of these ways on one conversation.
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError, RecursionError) as error:
            raise TemplateRefusalError(f"{self.name} fails: {type(error).__name__}: {_one_line(error)}") from error
        return _without_marks(marked) if self.has_tags else (marked, None)

    @functools.cached_property
    def has_tags(self) -> bool:
        from jinja2 import nodes

        calls = self._compiled.environment.parse(self.source).find_all(nodes.CallBlock)
        return any(isinstance(call.call.node, nodes.ExtensionAttribute) for call in calls)

    def assistant_spans(self, messages: Messages, tools: Sequence[Any] | None = None) -> tuple[str, Spans]:
        """Text of a conversation and the character spans of the assistant.

        Raises `TemplateRefusalError` with the template's message, or when its prefixes do not agree.
        """
        whole, spans = self.render(messages, tools)
        # Generation tags mark the turns exactly, so no prefixes are needed.
        if spans is not None:
            return whole, spans
        spans = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            # The turn is the text between the prompt that leads to it and the conversation that ends with it.
            before, _ = self.render(messages[:index], tools, add_generation_prompt=True)
            after = whole if index == len(messages) - 1 else self.render(messages[: index + 1], tools)[0]
            # Otherwise the model would be trained on text in a form that it never sees as a prompt.
            if not (whole.startswith(after) and after.startswith(before) and len(before) < len(after)):
                raise TemplateRefusalError(
                    f"{self.name} renders turn {index + 1} in another way as a prompt or once more turns follow, so "
                    "what the assistant said cannot be told: put {% generation %} and {% endgeneration %} around it "
                    "in a template of your own, and name that with data.chat_template"
                )
            spans.append((len(before), len(after)))
        return whole, spans


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
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"cannot read the chat template {path}: {error.strerror}; name another file") from error
    except UnicodeDecodeError as error:
        raise DataError(f"the chat template {path} is not UTF-8 text; convert it") from error


@functools.lru_cache(maxsize=8)
def _compile(source: str, name: str) -> "Template":
    try:
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension, LoopControlExtension
        from jinja2.parser import Parser
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise DataError("chat templates need the package 'jinja2': pip install 'terrace[hf]'") from error

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012  # as Jinja has it

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return f"{_BEGIN}{caller()}{_END}"

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    # The sandbox keeps a downloaded template from running arbitrary Python. Published templates expect trimming.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, LoopControlExtension]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise DataError(f"{name} is no chat template: {_one_line(error)}") from error


def _as_templates_expect(message: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in message.items() if value is not None}
    # Templates read different keys for reasoning, so it is given under all that they use.
    reasoning = next((kept[name] for name in _REASONING if name in kept), None)
    return kept if reasoning is None else {"thinking": reasoning, **kept, "reasoning_content": reasoning}


def _without_marks(marked: str) -> tuple[str, Spans]:
    text, spans = [], []
    place = 0
    head, *parts = marked.split(_BEGIN)
    text.append(head)
    place += len(head)
    # Spans count characters of the text without marks.
    for part in parts:
        inside, end, after = part.partition(_END)
        if not end or _END in after:
            raise TemplateRefusalError("the chat template has generation tags inside generation tags")
        spans.append((place, place + len(inside)))
        text += [inside, after]
        place += len(inside) + len(after)
    return "".join(text), spans


def marks_in(text: str) -> bool:
    """Whether `text` holds the code points that serve as marks here."""
    return _BEGIN in text or _END in text


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
