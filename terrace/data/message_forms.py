"""Converts messages to the forms that chat templates accept.

Data hold the arguments of a call as an object, as in `transformers`, or as JSON text, as in OpenAI's API. Tables, which
cannot hold objects of different keys, also hold lists of calls and tools as JSON text. Some templates print an object
as JSON, and would encode a text twice; others concatenate a text, and would print an object as Python does. A content
may be a text, or a list of parts, which not all templates support. So a template is given objects and parts first, and
other forms if it fails or prints them as Python.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from terrace.base.errors import DataError
from terrace.base.parsing import parse_json
from terrace.data.pieces import kind_of

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Form:
    """One form of the messages. The template cannot take it if it prints one of `unfit`, or not all of `parts`."""

    messages: Messages
    unfit: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()


def forms_of(messages: Messages) -> list[Form]:
    """The forms of `messages` to try with a template, in order.

    Raises `DataError` as `with_objects` does.
    """
    messages = [with_calls(message) for message in messages]
    objects = [with_objects(message) for message in messages]
    pairs = [
        (old["arguments"], new["arguments"])
        for message, made in zip(messages, objects, strict=True)
        for old, new in zip(_functions(message), _functions(made), strict=True)
        if "arguments" in old
    ]
    # Arguments that were given as objects are printed as `transformers` prints them.
    printed = tuple(repr(new) for old, new in pairs if isinstance(old, str) and new)
    lists = [message["content"] for message in messages if isinstance(message.get("content"), list)]
    unfit = tuple(map(repr, lists))
    parts = tuple(part["text"].strip() for content in lists for part in content)
    forms = [Form(objects, printed + unfit, parts)]
    if pairs:
        forms.append(Form([_with_arguments(message, _as_text) for message in messages], unfit, parts))
    if lists:
        forms += [Form([_without_parts(message) for message in form.messages], form.unfit) for form in forms]
    return forms


def with_calls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """`message` with its calls as objects. Raises `DataError` if they are neither objects nor JSON text of objects."""
    made = dict(message)
    if isinstance(calls := made.get("tool_calls"), str):
        made["tool_calls"] = calls = decoded(calls, list, "'tool_calls'")
    if isinstance(calls, list):
        made["tool_calls"] = [decoded(call, dict, "an entry of 'tool_calls'") for call in calls]
    if isinstance(call := made.get("function_call"), str):
        made["function_call"] = decoded(call, dict, "'function_call'")
    return made


def with_objects(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """`message` with its calls and their arguments as objects. Raises `DataError` if they are neither objects nor JSON
    text of objects.
    """
    return _with_arguments(with_calls(message), _as_object)


def text_of(parts: Sequence[Mapping[str, Any]]) -> str:
    return "".join(part["text"] for part in parts)


def calls_of(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return _functions(with_objects(message))


def tools_of(tools: Any) -> Any:
    """`tools` as a list of objects. Raises `DataError` if it is neither that nor JSON text of it."""
    tools = decoded(tools, list, "'tools'")
    return [_changed(decoded(tool, dict, "an entry of 'tools'"), _with_parameters) for tool in tools]


def given(record: Mapping[str, Any], template: str) -> dict[str, Any]:
    """Arguments for a template besides the messages: "tools", a list or None, and further "variables".

    `template` is the template's source. Raises `DataError` for calls, tools and variables of an unknown form.
    """
    for number, message in enumerate(record["messages"], start=1):
        try:
            with_objects(message)
        except DataError as error:
            raise DataError(f"message {number}: {error}") from error
    tools, variables = record.get("tools"), dict[str, Any]()
    if record.get("chat_template_kwargs") is not None:
        variables.update(decoded(record["chat_template_kwargs"], dict, "'chat_template_kwargs'"))
        for name in ("messages", "tools", "add_generation_prompt"):
            if name in variables:
                raise DataError(f"'chat_template_kwargs' has {name!r}, which is given to every template; remove it")
    # Other data may have a column of this name.
    if record.get("documents") is not None and "documents" in template:
        documents = decoded(record["documents"], list, "'documents'")
        variables["documents"] = [decoded(each, dict, "an entry of 'documents'") for each in documents]
    return {"tools": None if tools in (None, "", "null") else tools_of(tools), "variables": variables}


def decoded(value: Any, kind: type, words: str) -> Any:
    """`value`, parsed if it is JSON text. Raises `DataError` if the result is not of type `kind`, list or dict."""
    found = value
    if isinstance(value, str):
        try:
            found = parse_json(value)
        except ValueError as error:
            raise DataError(
                f"{words} must be {_called(kind)}, not a string that is no JSON ({error}); write it as one"
            ) from error
    if not isinstance(found, kind):
        of = "JSON text of " if isinstance(value, str) else ""
        raise DataError(f"{words} must be {_called(kind)}, not {of}{kind_of(found)}; write it as one")
    return found


def _called(kind: type) -> str:
    return "a list" if kind is list else "an object"


def _functions(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    calls = message.get("tool_calls")
    found = [call.get("function", call) for call in calls] if isinstance(calls, list) else []
    return [each for each in (*found, message.get("function_call")) if isinstance(each, Mapping)]


def _with_arguments(message: Mapping[str, Any], change: Callable[[Mapping[str, Any]], Any]) -> Mapping[str, Any]:
    made = dict(message)

    def changed(function: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**function, "arguments": change(function)} if "arguments" in function else function

    if isinstance(made.get("tool_calls"), list):
        made["tool_calls"] = [_changed(call, changed) for call in made["tool_calls"]]
    if isinstance(made.get("function_call"), Mapping):
        made["function_call"] = changed(made["function_call"])
    return made


def _changed(call: Mapping[str, Any], change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> Mapping[str, Any]:
    # Some data have the name and the arguments, or a tool's parameters, without an object around them.
    function = call.get("function")
    return {**call, "function": change(function)} if isinstance(function, Mapping) else change(call)


def _as_object(function: Mapping[str, Any]) -> Any:
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        return arguments
    # In some APIs a call without arguments has an empty string.
    if arguments.strip() in ("", "null"):
        return {}
    words = f"'arguments' of the call of {function.get('name')!r}"
    return decoded(arguments, dict, words)


def _as_text(function: Mapping[str, Any]) -> str:
    arguments = function["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _with_parameters(function: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = function.get("parameters")
    if not isinstance(parameters, str):
        return function
    return {**function, "parameters": decoded(parameters, dict, f"'parameters' of the tool {function.get('name')!r}")}


def _without_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    return {**message, "content": text_of(content)} if isinstance(content, list) else message
