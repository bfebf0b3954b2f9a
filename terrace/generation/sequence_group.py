"""Unfinished requests: their tokens so far and their pages of keys and values. Needs no torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from terrace.generation.request import Completion, Request

Decode = Callable[[Sequence[int]], str]


@dataclass(eq=False, slots=True)
class Member:
    """An unfinished request, with the log-probabilities and weight versions of its tokens so far."""

    number: int
    request: Request
    logprobs: list[float]
    versions: list[int]


@dataclass(eq=False, slots=True)
class SequenceGroup:
    """A sequence group: requests with the same prompt and the same tokens so far, computed once for all of them.

    Position 0 is token `begin`, the first one in the context. The first `computed` positions are cached. `pages[i]` has
    positions i P ... (i + 1) P - 1, P tokens per page; the first `num_dropped` pages are behind the sliding window and
    have been released.
    """

    members: list[Member]  # one or more, in order of arrival
    tokens: list[int]  # prompt and completion
    begin: int = 0
    computed: int = 0
    num_dropped: int = 0
    slot: int = -1  # of the states of linear layers, while it runs
    pages: list[int] = field(default_factory=list)
    routes: list[bytes] = field(default_factory=list)  # experts of the computed tokens, if the engine keeps them

    @staticmethod
    def of(number: int, request: Request) -> "SequenceGroup":
        begun = request.begun or Completion((), (), (), "aborted")
        member = Member(number, request, list(begun.logprobs), list(begun.versions))
        return SequenceGroup([member], [*request.prompt, *begun.tokens])

    @property
    def number(self) -> int:
        return self.members[0].number

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.members[0].request.prompt

    @property
    def requests(self) -> list[Request]:
        return [member.request for member in self.members]

    @property
    def pending(self) -> int:
        """Number of tokens to compute before the next one can be sampled."""
        return len(self.tokens) - self.begin - self.computed

    @property
    def made(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def held(self) -> list[int]:
        return self.pages[self.num_dropped :]

    def branch(self, members: list[Member]) -> "SequenceGroup":
        """A copy of this group for `members`. The caller must count the new references to its pages."""
        return SequenceGroup(
            members,
            list(self.tokens),
            self.begin,
            self.computed,
            self.num_dropped,
            pages=list(self.pages),
            routes=list(self.routes),
        )

    def completion(self, member: Member, finish: Literal["stop", "length", "aborted"]) -> Completion:
        routes = () if finish == "aborted" else tuple(self.routes)
        return Completion(tuple(self.made), tuple(member.logprobs), tuple(member.versions), finish, routes)

    def ending(self, member: Member, decode: Decode | None) -> Literal["stop", "length"] | None:
        """Finish reason of a member after the last token, or None if it goes on."""
        request = member.request
        if self.tokens[-1] in request.stop_tokens:
            return "stop"
        if request.stop_texts and decode is not None and _ends(self.made, request.stop_texts, decode):
            return "stop"
        return "length" if len(member.logprobs) == request.num_tokens else None


def _ends(made: Sequence[int], stop_texts: Sequence[str], decode: Decode) -> bool:
    # Decoding a tail is enough: an earlier stop text would have ended the completion already. A text has no more
    # characters than UTF-8 bytes, so a tail of that many characters contains any stop text. Three more, since the tail
    # may start inside a character.
    wanted = max(len(text.encode()) for text in stop_texts) + 3
    num_tokens = wanted
    while len(tail := decode(made[-num_tokens:])) < wanted and num_tokens < len(made):
        num_tokens *= 2
    return any(text in tail for text in stop_texts)
