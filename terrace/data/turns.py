"""Converts a list of turns, in any form found in data sets, to messages with a role and a content.

ShareGPT's turns have `from` and `value`, and their own names for roles. Other sets have `input` and `output` per turn,
or plain texts in which human and assistant alternate. Turns that already are messages stay as they are, except for
weights that only state the default.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from terrace.base.errors import DataError
from terrace.base.parsing import parse_json

USER, ASSISTANT, SYSTEM, TOOL = "user", "assistant", "system", "tool"
# Names under `from`; any other is passed on, since a template may know it.
SPEAKERS = {
    **dict.fromkeys(("human", "prompter"), USER),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "bot", "model"), ASSISTANT),
    **dict.fromkeys(("function", "observation", "function_response", "function-response", "tool_response"), TOOL),
}
_CALLS = ("function_call", "function-call", "tool_call")
# Turns that a text spells out: of Anthropic's helpful and harmless answers, and of OpenAssistant's Guanaco.
_SPELLED = (re.compile(r"(?:\A|\n\n)(Human|Assistant):"), re.compile(r"(?:\A|\n?)### (Human|Assistant|System):"))

_PYTHON_LIST = re.compile(r"\s*\[\s*\{'(role|content|from|value)'\s*:")


def messages_of(turns: list[Any], where: str, key: str) -> list[Any]:
    """The messages of `turns`, the list under `key` of the row at `where`.

    Turns of an unknown form are passed on unchanged. Raises `DataError` for a function call that is not JSON.
    """
    if turns and all(isinstance(turn, str) for turn in turns):
        return [message(ASSISTANT if number % 2 else USER, text) for number, text in enumerate(turns)]
    return [each for number, turn in enumerate(turns, 1) for each in _of_turn(turn, f"{where}: {key!r}, turn {number}")]


def message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def role_of(turn: Any) -> str:
    role = turn.get("role") if isinstance(turn, Mapping) else None
    return role if isinstance(role, str) else ""


def spelled_turns(text: Any) -> list[dict[str, Any]]:
    """The messages of a text that spells out its turns from the beginning; empty for any other value."""
    if not isinstance(text, str):
        return []
    for marks in _SPELLED:
        before, *parts = marks.split(text.lstrip("\n"))
        if parts and not before.strip():
            speakers = {"Human": USER, "Assistant": ASSISTANT, "System": SYSTEM}
            return [
                message(speakers[name], content.strip()) for name, content in zip(parts[::2], parts[1::2], strict=True)
            ]
    return []


def listed_turns(text: Any, words: str) -> list[Any]:
    """The turns in a JSON text; empty for any other value. Raises `DataError` for a list printed by Python."""
    if not isinstance(text, str) or not text.lstrip().startswith("["):
        return []
    if _PYTHON_LIST.match(text):
        raise DataError(f"{words} is a list as Python prints it, not JSON; write the data as .jsonl")
    try:
        turns = parse_json(text)
    except (ValueError, RecursionError):
        return []
    return turns if all(isinstance(turn, dict) and {"role", "from"} & turn.keys() for turn in turns) else []


def _of_turn(turn: Any, where: str) -> Iterator[Any]:
    if not isinstance(turn, Mapping):
        yield turn
    elif "role" in turn:
        yield _message(turn)
    elif "from" in turn and "value" in turn:
        yield _speech(turn, where)
    elif "input" in turn and "output" in turn:
        yield message(USER, turn["input"])
        yield message(ASSISTANT, turn["output"])
    else:
        yield turn


def _message(turn: Mapping[str, Any]) -> dict[str, Any]:
    made = {key: value for key, value in turn.items() if value is not None}
    # A weight that equals the default changes nothing, so it is dropped.
    if made.get("weight") == (1 if made["role"] == ASSISTANT else 0):
        del made["weight"]
    return made


def _speech(turn: Mapping[str, Any], where: str) -> dict[str, Any]:
    speaker, content = turn["from"], turn["value"]
    weight = {} if turn.get("weight") is None else {"weight": turn["weight"]}
    if speaker in _CALLS:
        return {"role": ASSISTANT, "tool_calls": _calls(content, where), **weight}
    role = SPEAKERS.get(speaker, speaker) if isinstance(speaker, str) else speaker
    return _message({"role": role, "content": content, **weight})


def _calls(content: Any, where: str) -> list[dict[str, Any]]:
    try:
        found = parse_json(content) if isinstance(content, str) else content
    except ValueError:
        found = None
    calls = found if isinstance(found, list) else [found]
    if not calls or not all(isinstance(call, Mapping) and isinstance(call.get("name"), str) for call in calls):
        raise DataError(
            f"{where} is a function call, which must be JSON with a 'name' and 'arguments'; repair or drop it"
        )
    return [
        {"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments", {})}}
        for call in calls
    ]
