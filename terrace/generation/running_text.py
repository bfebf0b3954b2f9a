"""Requests on their way: their tokens so far and the pages of keys and values. Pure: needs no torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from terrace.generation.request import Completion, Request

Decode = Callable[[Sequence[int]], str]


@dataclass(eq=False, slots=True)
class Member:
    """A request on its way, with the log-probabilities and versions of its tokens so far."""

    number: int
    request: Request
    logprobs: list[float]
    versions: list[int]


@dataclass(eq=False, slots=True)
class Text:
    """The tokens of requests with the same prompt that have drawn the same tokens so far: they pass once for all.

    Places are counted from token `begin`, the first that is read; the keys and values of the first `computed` places
    are kept. `pages[i]` has places i P ... (i + 1) P - 1; the first `num_dropped` pages lie behind a sliding window.
    """

    members: list[Member]  # one or more, in the order in which they came
    tokens: list[int]  # prompt and completion
    begin: int = 0
    computed: int = 0
    num_dropped: int = 0
    pages: list[int] = field(default_factory=list)

    @staticmethod
    def of(number: int, request: Request) -> "Text":
        begun = request.begun or Completion((), (), (), "aborted")
        member = Member(number, request, list(begun.logprobs), list(begun.versions))
        return Text([member], [*request.prompt, *begun.tokens])

    @property
    def number(self) -> int:
        """The number of the request that came first."""
        return self.members[0].number

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.members[0].request.prompt

    @property
    def requests(self) -> list[Request]:
        return [member.request for member in self.members]

    @property
    def pending(self) -> int:
        """Tokens that must pass before the next one can be drawn."""
        return len(self.tokens) - self.begin - self.computed

    @property
    def made(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def held(self) -> list[int]:
        """The pages that it holds."""
        return self.pages[self.num_dropped :]

    def branch(self, members: list[Member]) -> "Text":
        """The same text for some of its members alone; its pages have one holder more."""
        return Text(members, list(self.tokens), self.begin, self.computed, self.num_dropped, list(self.pages))

    def completion(self, member: Member, finish: Literal["stop", "length", "aborted"]) -> Completion:
        return Completion(tuple(self.made), tuple(member.logprobs), tuple(member.versions), finish)

    def ending(self, member: Member, decode: Decode | None) -> Literal["stop", "length"] | None:
        """How its last token ends a member, if it does."""
        request = member.request
        if self.tokens[-1] in request.stop_tokens:
            return "stop"
        if request.stop_texts and decode is not None and _ends(self.made, request.stop_texts, decode):
            return "stop"
        return "length" if len(member.logprobs) == request.num_tokens else None


def _ends(made: Sequence[int], stop_texts: Sequence[str], decode: Decode) -> bool:
    # Only the end is decoded: a stop text further back would have ended the completion there. Characters are at most as
    # many as bytes, so a tail with more characters than a stop text has bytes holds all of it; three more, since the
    # tail may begin inside a character.
    wanted = max(len(text.encode()) for text in stop_texts) + 3
    num_tokens = wanted
    while len(tail := decode(made[-num_tokens:])) < wanted and num_tokens < len(made):
        num_tokens *= 2
    return any(text in tail for text in stop_texts)
