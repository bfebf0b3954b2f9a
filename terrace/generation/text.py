"""A request on its way: its tokens so far and the pages of its keys and values. Pure: needs no torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from terrace.generation.request import Completion, Request

Decode = Callable[[Sequence[int]], str]


@dataclass(eq=False, slots=True)
class Text:
    """What is read of a text begins at token `begin`; the keys and values of the first `computed` of these are kept.

    `pages[i]` has places i P ... (i + 1) P - 1 of what is read; the first `num_dropped` lie behind a sliding window.
    """

    number: int
    request: Request
    tokens: list[int]  # prompt and completion
    logprobs: list[float]
    versions: list[int]
    begin: int = 0
    computed: int = 0
    num_dropped: int = 0
    pages: list[int] = field(default_factory=list)

    @staticmethod
    def of(number: int, request: Request) -> "Text":
        begun = request.begun or Completion((), (), (), "aborted")
        tokens = [*request.prompt, *begun.tokens]
        return Text(number, request, tokens, list(begun.logprobs), list(begun.versions))

    @property
    def pending(self) -> int:
        """Tokens that must pass before the next one can be drawn."""
        return len(self.tokens) - self.begin - self.computed

    @property
    def made(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]

    @property
    def held(self) -> list[int]:
        """The pages that it holds."""
        return self.pages[self.num_dropped :]

    def completion(self, finish: Literal["stop", "length", "aborted"]) -> Completion:
        return Completion(tuple(self.made), tuple(self.logprobs), tuple(self.versions), finish)

    def ending(self, decode: Decode | None) -> Literal["stop", "length"] | None:
        """How its last token ends it, if it does."""
        if self.tokens[-1] in self.request.stop_tokens:
            return "stop"
        if self.request.stop_texts and decode is not None and _ends(self.made, self.request.stop_texts, decode):
            return "stop"
        return "length" if len(self.logprobs) == self.request.num_tokens else None


def _ends(made: Sequence[int], stop_texts: Sequence[str], decode: Decode) -> bool:
    # Only the end is decoded: a stop text further back would have ended the completion there. Characters are at most as
    # many as bytes, so a tail with more characters than a stop text has bytes holds all of it; three more, since the
    # tail may begin inside a character.
    wanted = max(len(text.encode()) for text in stop_texts) + 3
    num_tokens = wanted
    while len(tail := decode(made[-num_tokens:])) < wanted and num_tokens < len(made):
        num_tokens *= 2
    return any(text in tail for text in stop_texts)
