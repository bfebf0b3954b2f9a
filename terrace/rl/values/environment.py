"""What a user writes to answer a model between the turns of a response: an `Environment`.

A response has turns. The model writes one up to a token that ends it, the environment answers, and the model goes on
with the answer in its context, until the environment says that the response is done. One instance answers one response.
"""

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from terrace.rl.values.prompts import Prompt

Answer = tuple[str | Sequence[str], float, bool]  # text, or one for each call; reward of the turn; whether it is over


@dataclass(frozen=True)
class ToolCall:
    """A call that the model wrote in the form of its chat template."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Turn:
    """What the model wrote in one turn: its `text` without special tokens, and the tool calls in it.

    `unread` counts calls that it began and that are not valid JSON with a name and arguments. Both are empty where
    prompts are texts, not messages, and where the template has no form for calls.
    """

    text: str
    calls: tuple[ToolCall, ...] = ()
    unread: int = 0


class Environment(Protocol):
    """Answers the turns of one response. Both methods may be `async def`; a plain one runs in a thread of its own.

    The same prompt and the same turns must get the same answers: a response that is resumed is played again from its
    first turn, and an answer that differs from the recorded one counts as a fault. A class may have a list `tools`, in
    the form of chat templates, and a method `close()`, called when its response is over or put aside.
    """

    def reset(self, prompt: Prompt) -> Awaitable[None] | None:
        """Begin with the response to `prompt`."""

    def step(self, turn: Turn) -> Answer | Awaitable[Answer]:
        """Answer a turn. The text may be empty only if the response is done."""
