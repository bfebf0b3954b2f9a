"""How turns become text and answers become tokens: as plain text, or in the model's chat template.

Responses are append-only. What the model drew is never tokenised again; an answer adds the tokens that the template
writes between the end of the assistant's turn and its next beginning. They are found in a conversation of a word in
place of that turn and the answer alone, so a template that rewrites earlier turns, such as one that drops their
reasoning, leaves them as they are.

Tool calls are read in the form in which the template itself writes one: an object of JSON, or a list of them, behind
what the template puts before it.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from typing import Any, Protocol

from terrace.base.errors import DataError
from terrace.data.chat import check_chat_text
from terrace.data.chat_prompt import ChatPrompts
from terrace.data.message_forms import given
from terrace.data.rendering import TemplateRefusalError
from terrace.data.tokenizer import FileTokenizer, Tokenizer
from terrace.rl.values.environment import ToolCall, Turn

_ASKED = {"role": "user", "content": "?"}
_NAME = "zyxwvut"  # of a tool in a probe: a word that no template writes itself
_IS_NAME = re.compile(r"[\w.:/-]+").fullmatch
_JSON = json.JSONDecoder()


class Dialect(Protocol):
    """Between tokens and what an environment hears and says."""

    def of(self, data: Mapping[str, Any]) -> "Dialect":
        """The dialect of a prompt whose line has `data` beside it."""

    def turn(self, ids: Sequence[int]) -> Turn:
        """The turn of these tokens, the one that ended it included."""

    def answer(self, turn: Turn, texts: Sequence[str]) -> list[int]:
        """Tokens of an answer to `turn`: one text, or one for each of its calls.

        Raises `DataError` for a text that cannot be said.
        """

    def check(self) -> None:
        """Raise `DataError` if nothing can be answered, or tools could not be called."""


@dataclass(frozen=True)
class PlainText:
    """Answers stand between turns as they are."""

    tokenizer: Tokenizer

    def of(self, data: Mapping[str, Any]) -> "PlainText":
        return self

    def turn(self, ids: Sequence[int]) -> Turn:
        return Turn(self.tokenizer.decode(ids))

    def answer(self, turn: Turn, texts: Sequence[str]) -> list[int]:
        return [int(token) for token in self.tokenizer.encode("".join(texts))]

    def check(self) -> None:
        """Any text can be said."""


@dataclass(frozen=True)
class Chat:
    """Turns and answers in the template of `prompts`; `stops` end a turn, `tools` are those that prompts name.

    `variables` are further ones of the template.
    """

    prompts: ChatPrompts
    stops: frozenset[int]
    tools: Sequence[Mapping[str, Any]] | None
    variables: Mapping[str, Any] = field(default_factory=dict)

    def of(self, data: Mapping[str, Any]) -> "Chat":
        own = given({**data, "messages": ()}, self.prompts.template.source)
        tools = own["tools"] if "tools" in data else self.tools
        is_same = tools == self.tools and not own["variables"]
        return self if is_same else replace(self, tools=tools, variables=own["variables"])

    def turn(self, ids: Sequence[int]) -> Turn:
        said = ids[:-1] if ids and ids[-1] in self.stops else ids
        text, form = self.prompts.tokenizer.decode(said), self.calls
        if form is None:
            return Turn(text)
        # Special tokens may mark a call.
        found = list(form.read(self.prompts.tokenizer.decode(said, keep_special=True)))
        calls = tuple(call for call in found if call is not None)
        return Turn(text, calls, len(found) - len(calls))

    def answer(self, turn: Turn, texts: Sequence[str]) -> list[int]:
        if turn.calls and len(texts) not in (1, len(turn.calls)):
            raise DataError(f"{len(texts)} texts answer {len(turn.calls)} calls: give one for each, or one text")
        for text in texts:
            check_chat_text(text, "its text", self.prompts.encoder)
        if not turn.calls:
            said: dict[str, Any] = {"role": "assistant", "content": _NAME}
            return self._added(said, [{"role": "user", "content": "".join(texts)}])
        # Nine letters and digits, which is the form that Mistral's templates demand.
        ids = [f"call{number:05d}" for number in range(len(turn.calls))]
        named = zip(ids, turn.calls, strict=True)
        said = {"role": "assistant", "content": "", "tool_calls": [_call(*each) for each in named]}
        of_calls = zip(ids, turn.calls, texts, strict=False)  # one text answers all calls in the first one's name
        return self._added(
            said,
            [
                {"role": "tool", "tool_call_id": number, "name": call.name, "content": text}
                for number, call, text in of_calls
            ],
        )

    def check(self) -> None:
        """As of all dialects; found out with an answer to a turn, and one to a call."""
        name = self.prompts.template.name
        if self.tools and self.calls is None:
            raise DataError(
                f"{name} does not write tool calls as JSON, so none could be read: leave out the tools of the "
                "environment, or name a model whose template has them"
            )
        for turn in (Turn("?"), *([Turn("", (ToolCall(_NAME, {}),))] if self.calls is not None else [])):
            try:
                self.answer(turn, ["?"])
            except DataError as error:
                raise DataError(f"{name} cannot say what an environment answers: {error}") from error

    @cached_property
    def calls(self) -> "CallForm | None":
        """The form of tool calls in this template; None if it has none."""
        probe = _call("call00000", ToolCall(_NAME, {_NAME: _NAME}))

        def written(content: str) -> str:
            return self._rendered([_ASKED, {"role": "assistant", "content": content, "tool_calls": [probe]}])

        try:
            text = written("").removeprefix(self._rendered([_ASKED], is_asking=True))
        except DataError:
            return None
        # A template may write more before a call, such as an empty block of reasoning. What stands behind a text as
        # well belongs to the call.
        with suppress(DataError):
            pairs = zip(reversed(text), reversed(written("?")), strict=False)
            num_alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            text = text[len(text) - num_alike :]
        return CallForm.of(text)

    def _added(self, said: Mapping[str, Any], answers: Sequence[Mapping[str, Any]]) -> list[int]:
        num_ends = len(self._stop_names.findall(self._rendered([_ASKED, said])))
        whole = self._rendered([_ASKED, said, *answers], is_asking=True)
        ends = [found.end() for found in self._stop_names.finditer(whole)]
        if not 0 < num_ends <= len(ends) or said["content"] not in whole[: ends[num_ends - 1]]:
            raise DataError("the template leaves out a turn, or does not end it, when another follows")
        ids = self.prompts.tokenizer.encode_prompt(whole[ends[num_ends - 1] :], begins_text=False)
        return [int(token) for token in ids]

    @cached_property
    def _stop_names(self) -> re.Pattern[str]:
        tokenizer = self.prompts.tokenizer
        assert isinstance(tokenizer, FileTokenizer), "a chat template belongs to a tokenizer's folder"
        names = [name for name, token in tokenizer.vocabulary.special.items() if token in self.stops]
        return re.compile("|".join(map(re.escape, names)) or r"(?!)")  # without names nothing matches

    def _rendered(self, messages: Sequence[Mapping[str, Any]], *, is_asking: bool = False) -> str:
        render = self.prompts.template.render
        try:
            text, _ = render(messages, self.tools, self.variables, add_generation_prompt=is_asking)
        except TemplateRefusalError as error:
            raise DataError(str(error)) from error
        return text


def _call(number: str, call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": dict(call.arguments)}
    return {"id": number, "type": "function", "function": function}


@dataclass(frozen=True)
class CallForm:
    """Calls as JSON behind `marker` ("": a turn that begins with an object), with arguments under `key`."""

    marker: str
    key: str

    @staticmethod
    def of(turn: str) -> "CallForm | None":
        """The form of the call in a turn that a template has written for a probe; None if it is not JSON."""
        for found in re.finditer(r"\{", turn[: max(0, turn.find(_NAME))]):
            for call in _objects(turn, found.start()):
                key = next((name for name in ("arguments", "parameters") if name in call), None)
                if call.get("name") == _NAME and key is not None:
                    return CallForm(turn[: found.start()].strip().removesuffix("[").strip(), key)
        return None

    def read(self, text: str) -> Iterator[ToolCall | None]:
        """The calls in a turn; None for one that begins and cannot be read."""
        if self.marker:
            starts = [found.end() for found in re.finditer(re.escape(self.marker), text)]
        else:
            starts = [0] if text.lstrip().startswith(("{", "[")) else []
        for start in starts:
            objects = _objects(text, start)
            for each in objects or [{}]:
                name, arguments = each.get("name"), each.get(self.key)
                # Some templates write the name into the answer, where no special token may be spelled.
                is_call = isinstance(name, str) and _IS_NAME(name) and isinstance(arguments, dict)
                yield ToolCall(str(name), arguments or {}) if is_call else None


def _objects(text: str, start: int) -> list[dict[str, Any]]:
    """The functions in the JSON value at `start`, an object or a list of them; empty if there is none."""
    try:
        value, _ = _JSON.raw_decode(text, start + len(text[start:]) - len(text[start:].lstrip()))
    except (ValueError, RecursionError):
        return []
    listed = value if isinstance(value, list) else [value]
    functions = [each.get("function", each) if isinstance(each, dict) else {} for each in listed]
    return [each if isinstance(each, dict) else {} for each in functions]
