"""Converts rows of data sets, in the forms in which they are published, to the three forms that Terrace uses.

    conversation    {"messages": [...]}, or {"prompt": text, "completion": text}, plain text that needs no template
    preference      {"prompt": ..., "chosen": ..., "rejected": ...}, three texts or three lists of messages
    prompt          a text, or messages that the assistant is to answer

`CHATS` and `QUESTIONS` list the forms. The first that fits a row is used, keys that it does not name are ignored, and
null counts as absent. A list of messages may be JSON text, as in csv, which has no lists. A row of no form is refused
with its keys and the list of forms. Messages are checked where they are rendered (terrace.data.chat).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from terrace.base.errors import DataError
from terrace.data.pieces import kind_of, shown_keys
from terrace.data.turns import ASSISTANT, SYSTEM, USER, listed_turns, message, messages_of, role_of, spelled_turns

Row = Mapping[str, Any]
Messages = list[Any]

MEMBERS = ("chosen", "rejected")
NUM_ASKED = "num_asked"  # the messages of a conversation that ask: their assistant's turns are not trained on
_PAIR = '{"prompt": ..., "chosen": ..., "rejected": ...}, with texts or lists of messages'
FOR_TEMPLATE = ("tools", "documents", "chat_template_kwargs")  # what a chat template is given besides messages
_SYSTEM_TEXTS = ("system", "system_prompt")
_LISTS = ("messages", "conversations", "conversation", "trajectory")
_MATERIAL = ("input", "context")


@dataclass(frozen=True)
class Form:
    """A form of a row. The key `asked` holds the question or a list of turns, `answered` the answer if the list does
    not include it.

    The first of the keys `material` that is present is added to the question.
    """

    asked: str
    answered: str = ""
    material: tuple[str, ...] = ()
    name: str = ""

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.asked, self.answered) if self.answered else (self.asked,)

    def fits(self, row: Row) -> bool:
        return all(row.get(key) is not None for key in self.keys)

    def words(self) -> str:
        """The form's keys, with its name if it has one."""
        keys = " and ".join(map(repr, self.keys))
        return f"{keys} ({self.name})" if self.name else keys


COMPLETION = Form("prompt", "completion")
SPELLED = Form(
    "text", name="turns spelled out"
)  # as Guanaco has them; the last resort, as a text is usually meant as one
CHATS = (
    Form("messages"),
    COMPLETION,
    Form("conversations", name="ShareGPT"),
    Form("conversation"),
    Form("instruction", "output", _MATERIAL, "Alpaca"),
    Form("instruction", "response", _MATERIAL, "Dolly"),
    Form("question", "answer", ("context",)),
    Form("question", "response", ("context",), "OpenOrca"),
    Form("query", "response"),
    Form("problem", "solution"),
    Form("problem", "generated_solution"),
    Form("prompt", "response"),
    Form("input", "output"),
)
# What a preference or a row for feedback asks, where it has no 'prompt'.
QUESTIONS = (
    Form("messages"),
    Form("conversations", name="ShareGPT"),
    Form("conversation"),
    Form("trajectory", name="UltraInteract"),
    Form("instruction", material=_MATERIAL),
    Form("question", material=("context",)),
    Form("query"),
    Form("problem"),
    Form("input"),
)


def columns(forms: Sequence[Form], *more: str) -> tuple[str, ...]:
    keys = [key for form in forms for key in (*form.keys, *form.material)]
    return tuple(dict.fromkeys((*keys, *more, *FOR_TEMPLATE, "history", *_SYSTEM_TEXTS)))


CHAT_COLUMNS = columns((*CHATS, SPELLED), "label")
PAIR_COLUMNS = columns(QUESTIONS, "prompt", *MEMBERS)


def chat_form(row: Row) -> Form | None:
    found = next((form for form in CHATS if form.fits(row)), None)
    return SPELLED if found is None and spelled_turns(row.get("text")) else found


def is_pair(row: Row) -> bool:
    return all(row.get(key) is not None for key in MEMBERS)


def chat_row(row: Row, where: str) -> dict[str, Any]:
    """A row as a conversation: messages, or a prompt and its completion.

    Raises `DataError`, naming the place `where`, for a row of no form, and for values that do not fit its form.
    """
    row = _with_lists(row, where)
    form = chat_form(row)
    if form is None and is_pair(row):
        raise DataError(f'{where} holds a preference, not a conversation: set data.format = "pairs"')
    if form is None:
        raise DataError(
            f"{where} has no form of a conversation (keys: {shown_keys(row)}); the forms are "
            f"{', '.join(each.words() for each in CHATS)}: rename its keys"
        )
    # It is ambiguous which of the two is meant.
    if form.asked == "messages" and row.get("completion") is not None:
        raise DataError(f"{where} has 'messages' beside 'completion'; keep one of the two forms")
    # As data for KTO have it; training would teach the answer.
    if form == COMPLETION and row.get("label") is False:
        raise DataError(f"{where} has the label false, so its completion is one to avoid; drop such records")
    if form is SPELLED:
        return {"messages": spelled_turns(row["text"])}
    if form == COMPLETION and _is_plain(row, COMPLETION.keys):
        return {key: row[key] for key in COMPLETION.keys}
    if form.asked == "messages" and not isinstance(row["messages"], list):
        return {"messages": row["messages"]}  # which is refused where messages are
    asked = _asked(row, form, where)
    if not form.answered:
        return {"messages": asked, **_tools(row)}
    answer = _responses(row[form.answered], where, form.answered)
    # Of a conversation up to its completion, the completion alone is trained on.
    made = {"messages": [*asked, *answer], **_tools(row)}
    return made | {NUM_ASKED: len(asked)} if form == COMPLETION else made


def pair_row(row: Row, where: str) -> dict[str, Any]:
    """A row as a preference: three texts, or the messages of the prompt and of each member after it.

    If members hold whole conversations, their common beginning becomes the prompt. Raises `DataError` as `chat_row`
    does, and if the members' conversations begin differently.
    """
    row = _with_lists(row, where)
    missing = [key for key in MEMBERS if row.get(key) is None]
    if missing:
        raise DataError(f"{where} has no key {missing[0]!r} (keys: {shown_keys(row)}); a preference is {_PAIR}")
    if _is_plain(row, ("prompt", *MEMBERS)):
        for key in MEMBERS:
            if not row[key]:
                raise DataError(f"{where}: {key!r} is empty; drop the record")
        return {key: row[key] for key in ("prompt", *MEMBERS)}
    spelled = [spelled_turns(row[key]) for key in MEMBERS] if row.get("prompt") is None else []
    members = spelled if spelled and all(spelled) else [_responses(row[key], where, key) for key in MEMBERS]
    for key, member in zip(MEMBERS, members, strict=True):
        _check_member(member, f"{where}: {key!r}")
    form = next((each for each in (Form("prompt"), *QUESTIONS) if each.fits(row)), None)
    # A response is the assistant's; a member in which somebody else speaks first holds a conversation.
    is_whole = [role_of(member[0]) != ASSISTANT for member in members]
    if all(is_whole) and not isinstance(row.get("prompt"), list):
        return _parted(row, members, where)
    asked = [] if form is None else _asked(row, form, where)
    if all(is_whole):
        whole = [member if member[: len(asked)] == asked else [*asked, *member] for member in members]
        return _parted(row, whole, where)
    for key, whole_here in zip(MEMBERS, is_whole, strict=True):
        if whole_here:
            raise DataError(f"{where}: {key!r} is a whole conversation, and the other is not; write both alike")
        if form is None and isinstance(row[key], str):
            raise DataError(f"{where}: {key!r} is a string without a 'prompt'; a preference is {_PAIR}")
    return {"prompt": asked, **dict(zip(MEMBERS, members, strict=True)), **_tools(row)}


def prompt_row(row: Row, column: str, where: str) -> str | dict[str, Any]:
    """The prompt of a row: the text in `column`, or messages with their tools.

    If the column is "prompt" and absent, a conversation in another form becomes a prompt up to its last answer. Raises
    `DataError` as `chat_row` does.
    """
    row = _with_lists(row, where)
    value = row.get(column)
    if isinstance(value, str) and value and (column != "prompt" or _system(row) is None):
        return value
    form = Form(column) if value else None
    if value is None and column == "prompt":
        form = next((each for each in QUESTIONS if each.fits(row)), None)
    if form is None or not isinstance(row[form.asked], str | list):
        raise DataError(
            f"{where} has no text in {column!r}: it has {', '.join(map(str, row)) or 'no keys'}; name the key of the "
            "prompts, texts or lists of messages, with run.prompt_column"
        )
    messages = _asked(row, form, where)
    while messages and form.asked != "prompt" and role_of(messages[-1]) == ASSISTANT:
        messages.pop()  # the answers of a conversation
    if not messages or role_of(messages[-1]) == ASSISTANT:
        raise DataError(
            f"{where}: {form.asked!r} ends with the assistant's answer, so nothing is asked; leave that out"
        )
    return checked_json({"messages": messages, **_tools(row)}, where)


def checked_json(row: dict[str, Any], where: str) -> dict[str, Any]:
    """Returns the row. Raises `DataError` for values that JSON cannot hold, such as times and bytes in tables."""
    for key, value in row.items():
        try:
            json.dumps(value)
        except TypeError as error:
            raise DataError(f"{where}: {key!r}: {error}; write the value as a string") from error
    return row


def _asked(row: Row, form: Form, where: str) -> Messages:
    """The messages of a prompt: a list of turns, or a text with its material, after the system message and earlier
    turns.
    """
    value = row[form.asked]
    if isinstance(value, list):
        turns = messages_of(value, where, form.asked)
    else:
        if form.asked in _LISTS:
            raise DataError(f"{where}: {form.asked!r} must be a list of messages, not {kind_of(value)}; write it so")
        text, key = _string(row, form.asked, where), next((key for key in form.material if row.get(key)), "")
        material = row.get(key, "")
        if not isinstance(material, str):
            raise DataError(f"{where}: {key!r} must be a string, not {kind_of(material)}; convert it")
        turns = [*_history(row, where), message(USER, f"{text}\n\n{material}" if material else text)]
    system = _system(row)
    if system is None or any(role_of(turn) == SYSTEM for turn in turns):
        return turns
    return [message(SYSTEM, system), *turns]


def _with_lists(row: Row, where: str) -> Row:
    """`row` with lists of messages that are JSON text parsed."""
    texts = ("prompt", "completion", *MEMBERS)
    found = {key: turns for key in (*_LISTS, *texts) if (turns := listed_turns(row.get(key), f"{where}: {key!r}"))}
    # These may be meant as texts, unless what they belong to is a list, too.
    if "prompt" not in found:
        found.pop("completion", None)
        if not all(key in found for key in MEMBERS):
            found = {key: turns for key, turns in found.items() if key not in MEMBERS}
    return {**row, **found} if found else row


def _history(row: Row, where: str) -> Messages:
    turns = row.get("history") or []
    if not isinstance(turns, list) or not all(isinstance(each, list) and len(each) == 2 for each in turns):
        raise DataError(f"{where}: 'history' must be a list of [question, answer]; convert it")
    return [message(role, text) for turn in turns for role, text in zip((USER, ASSISTANT), turn, strict=True)]


def _responses(value: Any, where: str, key: str) -> Messages:
    """The messages of an answer, which is a text, a message, or a list of messages."""
    turns = [value] if isinstance(value, Mapping) else value
    if isinstance(turns, list) and all(isinstance(turn, Mapping) and {"role", "from"} & turn.keys() for turn in turns):
        return messages_of(turns, where, key)
    if not isinstance(value, str):
        raise DataError(f"{where}: {key!r} must be a string, not {kind_of(value)}; convert it or drop the record")
    return [message(ASSISTANT, value)]


def _parted(row: Row, conversations: Sequence[Messages], where: str) -> dict[str, Any]:
    """Splits two conversations into their common beginning and the two continuations."""
    chosen, rejected = conversations
    num = 0
    # Each keeps its last message, the answer.
    while num < min(len(chosen), len(rejected)) - 1 and chosen[num] == rejected[num]:
        num += 1
    if not num and chosen and rejected and chosen[:1] != rejected[:1]:
        raise DataError(f"{where}: 'chosen' and 'rejected' begin with different messages; repair or drop the record")
    system = _system(row)
    first = [message(SYSTEM, system)] if system and all(role_of(turn) != SYSTEM for turn in chosen) else []
    return {"prompt": [*first, *chosen[:num]], "chosen": chosen[num:], "rejected": rejected[num:], **_tools(row)}


def _check_member(member: Messages, where: str) -> None:
    last = member[-1] if member else {}
    if role_of(last) != ASSISTANT:
        raise DataError(f"{where} does not end with a message of the assistant; repair or drop the record")
    if not last.get("content") and not last.get("tool_calls"):
        raise DataError(f"{where} is empty, or ends with an empty message of the assistant; drop the record")


def _is_plain(row: Row, keys: Sequence[str]) -> bool:
    # A text for the system asks for a conversation.
    return all(isinstance(row.get(key), str) for key in keys) and _system(row) is None


def _system(row: Row) -> str | None:
    return next((row[key] for key in _SYSTEM_TEXTS if isinstance(row.get(key), str) and row[key].strip()), None)


def _tools(row: Row) -> dict[str, Any]:
    return {key: row[key] for key in FOR_TEMPLATE if row.get(key) is not None}


def _string(row: Row, key: str, where: str) -> str:
    value = row[key]
    if not isinstance(value, str):
        raise DataError(f"{where}: {key!r} must be a string or a list of messages, not {kind_of(value)}; convert it")
    return value
