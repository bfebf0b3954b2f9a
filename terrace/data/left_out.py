"""Counts what a chat template or a tokenizer leaves out of conversations, for one warning.

A template may drop reasoning, calls or a system message, or cut or change a text; the model is then trained on less
than the data hold. White space between words is ignored, because many templates trim it, and so is the JSON spelling of
characters. A text is searched for as a whole; one spread over more than two places counts as left out.
"""

import json
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from terrace.data.chat_encoder import Ids
from terrace.data.message_forms import calls_of
from terrace.data.template import Spans
from terrace.data.template_process import REASONING

_NOTHING = 3  # characters that a text shares with another by chance
_SHOWN = 60  # characters of an example


@dataclass
class LeftOut:
    """Counts of conversations by what is left out, each with its first example."""

    num_conversations: int = 0
    found: dict[str, tuple[int, str]] = field(default_factory=dict)

    def note(self, record: Mapping[str, Any], text: str, turns: Spans | None, where: str) -> list[int]:
        """Counts a conversation rendered as `text`. `turns` are the character spans of the assistant's turns, if the
        template marks them.

        Returns the indices of messages whose turns contain none of their text.
        """
        self.num_conversations += 1
        rendering, spans = _Rendering(text), iter(turns or ())
        lost, empty = dict[str, str](), list[int]()
        for place, message in enumerate(record["messages"]):
            is_turn = message["role"] == "assistant"
            span = next(spans) if is_turn and turns is not None else None
            missing = [(what, *rendering.missing(piece, span)) for what, piece in _pieces(message)]
            if missing and span is not None and all(is_whole for _, _, is_whole in missing):
                empty.append(place)
            for what, part, _ in missing:
                if part:
                    lost.setdefault(what, part)
        for tool in record.get("tools") or ():
            name = _function(tool).get("name")
            if isinstance(name, str) and rendering.missing(name, None)[0]:
                lost.setdefault("tools", name)
        for what, example in lost.items():
            self._add(what, example, where)
        return empty

    def note_unknown(self, characters: str, where: str) -> None:
        """Counts a conversation whose assistant text has `characters` without tokens."""
        if characters:
            self._add("characters of the assistant that the tokenizer has no token for", characters, where)

    def line(self, path: object) -> str:
        if not self.found:
            return ""
        parts = [
            f"{what} in {count} of {self.num_conversations} conversations ({example})"
            for what, (count, example) in self.found.items()
        ]
        return (
            f"warning: {path} holds what is not in the text that a model sees: {'; '.join(parts)}; a template that "
            "renders it can be named with data.chat_template"
        )

    def _add(self, what: str, example: str, where: str) -> None:
        count, first = self.found.get(what, (0, f"{where}: {_short(example)}"))
        self.found[what] = count + 1, first


class _Rendering:
    def __init__(self, text: str) -> None:
        self._text = text
        self._squeezed: dict[tuple[int, int], str] = {}

    def missing(self, piece: str, span: tuple[int, int] | None) -> tuple[str, bool]:
        """The part of `piece` that is missing in the rendering (within `span`, if given), and whether that is all of
        it.
        """
        first, end = span or (0, len(self._text))
        if self._text.find(piece.strip(), first, end) >= 0:
            return "", False
        here = self._without_spaces(first, end)
        places = [place for place, character in enumerate(piece) if not character.isspace()]
        wanted = "".join(piece[place] for place in places)
        if span is not None:
            # A prompt may end with the beginning of an answer, such as <think>.
            here = self._without_spaces(0, first)[-len(wanted) + 1 :] + here if len(wanted) > 1 else here
        spelled = [json.dumps(piece.strip(), ensure_ascii=is_ascii)[1:-1] for is_ascii in (False, True)]
        if any("".join(each.split()) in here for each in (wanted, *spelled)):
            return "", False
        begin = _longest(lambda size: wanted[:size] in here, len(wanted))
        finish = _longest(lambda size: wanted[len(wanted) - size :] in here, len(wanted))
        # A template may part a text in two, as the reasoning from the answer.
        if begin + finish >= len(wanted) and max(begin, finish) > _NOTHING:
            return "", False
        begin, finish = (0 if size <= _NOTHING else size for size in (begin, finish))
        return piece[places[begin] : places[len(wanted) - finish - 1] + 1], not begin + finish

    def _without_spaces(self, first: int, end: int) -> str:
        if (first, end) not in self._squeezed:
            self._squeezed[first, end] = "".join(self._text[first:end].split())
        return self._squeezed[first, end]


def unknown_characters(text: str, spans: Spans, firsts: Ids, ends: Ids) -> str:
    """The characters of `text` in `spans` that no token covers, without spaces; tokens cover `firsts` ... `ends`."""
    edges = np.zeros(len(text) + 1, dtype=np.int64)
    np.add.at(edges, firsts, 1)
    np.subtract.at(edges, ends, 1)
    bare = np.flatnonzero(np.cumsum(edges[:-1]) == 0).tolist()
    return "".join(text[place] for place in bare if _counts(text, place) and any(a <= place < b for a, b in spans))


def _counts(text: str, place: int) -> bool:
    # White space, marks and controls may be dropped, and a normalizer composes characters into one.
    if text[place].isspace() or unicodedata.category(text[place])[0] in "MC":
        return False
    stretches = [text[max(0, place - size) : place + 1] for size in (1, 2)]
    return all(len(unicodedata.normalize("NFC", stretch)) > 1 or len(stretch) == 1 for stretch in stretches)


def _pieces(message: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The texts of a message, each with a description."""
    role = message["role"]
    content = message.get("content")
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, Mapping) else part
        if isinstance(text, str) and text.strip():
            yield f"text of the {role}", text
    if role != "assistant":
        return
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    if isinstance(reasoning, str) and reasoning.strip():
        yield "reasoning of the assistant", reasoning
    for call in calls_of(message):
        for text in (call.get("name"), *_leaves(call.get("arguments"))):
            if isinstance(text, str) and text.strip():
                yield "calls of the assistant", text


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield str(key)
            yield from _leaves(each)
    elif isinstance(value, list):
        for each in value:
            yield from _leaves(each)
    elif isinstance(value, str):
        yield value
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield json.dumps(value)


def _function(tool: Any) -> Mapping[str, Any]:
    found = tool.get("function", tool) if isinstance(tool, Mapping) else {}
    return found if isinstance(found, Mapping) else {}


def _longest(is_there: Callable[[int], bool], most: int) -> int:
    """The largest size up to `most` at which `is_there` holds; it must hold at all smaller sizes."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if is_there(middle) else (low, middle - 1)
    return low


def _short(text: str) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= _SHOWN else f"{line[: _SHOWN - 3]}...")
