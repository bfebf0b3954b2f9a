"""How turns become text and answers become tokens: as plain text, or in the model's chat template.

Responses are append-only. What the model drew is never tokenised again; an answer adds the tokens that the template
writes between the end of the assistant's turn and its next beginning. They are found in a conversation of that turn
and the answer alone, so a template that rewrites earlier turns leaves them as they are.

Tool calls are read in the form in which the template itself writes one: an object of JSON, or a list of them, behind
what the template puts before it.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from terrace.base.errors import DataError
from terrace.data.chat import check_chat_text
from terrace.data.chat_prompt import ChatPrompts
from terrace.data.rendering import TemplateRefusalError
from terrace.data.tokenizer import FileTokenizer, Tokenizer
from terrace.rl.values.environment import ToolCall, Turn

_ASKED = {"role": "user", "content": "?"}
_NAME = "zyxwvut"  # of a tool in a probe: a word that no template writes itself
_JSON = json.JSONDecoder()


class Dialect(Protocol):
    """Between tokens and what an environment hears and says."""

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

    def turn(self, ids: Sequence[int]) -> Turn:
        return Turn(self.tokenizer.decode(ids))

    def answer(self, turn: Turn, texts: Sequence[str]) -> list[int]:
        return [int(token) for token in self.tokenizer.encode("".join(texts))]

    def check(self) -> None:
        """Any text can be said."""


@dataclass(frozen=True)
class Chat:
    """Turns and answers in the template of `prompts`; `stops` end a turn, `tools` are those that prompts name."""

    prompts: ChatPrompts
    stops: frozenset[int]
    tools: Sequence[Mapping[str, Any]] | None

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
            said: dict[str, Any] = {"role": "assistant", "content": turn.text or "?"}
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
        try:
            before = self._rendered([_ASKED], is_asking=True)
            text = self._rendered([_ASKED, {"role": "assistant", "content": "", "tool_calls": [probe]}])
        except DataError:
            return None
        return CallForm.of(text[len(before) :] if text.startswith(before) else text.partition("?")[2])

    def _added(self, said: Mapping[str, Any], answers: Sequence[Mapping[str, Any]]) -> list[int]:
        turn = self._rendered([_ASKED, said])
        ends = [found.end() for found in re.finditer(self._stop_names, turn)]
        whole = self._rendered([_ASKED, said, *answers], is_asking=True)
        if not ends or not whole.startswith(turn[: ends[-1]]):
            raise DataError("the template rewrites a turn, or does not end it, when another follows")
        ids = self.prompts.tokenizer.encode_prompt(whole[ends[-1] :], begins_text=False)
        return [int(token) for token in ids]

    @cached_property
    def _stop_names(self) -> str:
        tokenizer = self.prompts.tokenizer
        assert isinstance(tokenizer, FileTokenizer), "a chat template belongs to a tokenizer's folder"
        return "|".join(re.escape(name) for name, token in tokenizer.vocabulary.special.items() if token in self.stops)

    def _rendered(self, messages: Sequence[Mapping[str, Any]], *, is_asking: bool = False) -> str:
        try:
            return self.prompts.template.render(messages, self.tools, add_generation_prompt=is_asking)[0]
        except TemplateRefusalError as error:
            raise DataError(str(error)) from error


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
                is_call = isinstance(name, str) and isinstance(arguments, dict)
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
