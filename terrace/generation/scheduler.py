"""Decides by turn which tokens of which texts pass the model, and which pages hold their keys and values.

A turn takes at most `token_budget` tokens: one of every text that writes, and parts of prompts that are still read.
Texts are served in the order in which they came, each with at least one token, so none starves. Keys and values lie in
pages of `page_tokens` places with counts of holders. A text takes a page when it writes into it. If none is free, the
text that came last gives up all of its pages and is read again later, which is exact: its tokens stay. So the text
that came first always proceeds, and every request ends.

Requests with the same prompt are one text until they draw different tokens: common tokens pass once. Texts that part
share pages, and copy one when they write into it (copy on write). So does a request that comes when another
text has read its prompt; it waits while that prompt is still being read.

Without a sliding window a text attends to at most `context` tokens. When they are used up, the last half of them is
read again as if the text began there. With a window no longer than the context nothing is read again, and pages that
fall behind the window are given back; models with learned positions have an end and are always read again.

Pure: needs no torch. All decisions follow from the requests and the tokens drawn, so ranks that draw the same tokens
decide alike.
"""

import bisect
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from terrace.base.errors import ConfigError
from terrace.generation.page_counts import PageCounts
from terrace.generation.request import Completion, Request
from terrace.generation.running_text import Decode, Member, Text


@dataclass(frozen=True)
class Part:
    """`num_tokens` tokens of a text that pass in a turn, from place `first`, counted from `Text.begin`."""

    text: Text
    first: int
    num_tokens: int
    draws: bool  # whether a token is drawn behind the last of them


@dataclass(frozen=True)
class Turn:
    """The parts of a turn, and the pages that are copied before it, in this order: (source, target)."""

    parts: tuple[Part, ...]
    copies: tuple[tuple[int, int], ...]

    @property
    def drawing(self) -> list[Part]:
        """The parts behind which tokens are drawn, one for each member of their texts."""
        return [part for part in self.parts if part.draws]


class Scheduler:
    """Texts that run and texts that wait; `window` is 0 unless pages behind a sliding window may be given back."""

    def __init__(self, *, num_pages: int, page_tokens: int, token_budget: int, context: int, window: int = 0) -> None:
        for name, value in (("page_tokens", page_tokens), ("token_budget", token_budget), ("context", context)):
            if value < 1:
                raise ConfigError(f"{name} = {value} must be at least 1")
        self.counts = PageCounts(num_pages)
        self._num_pages, self._page_tokens, self._token_budget = num_pages, page_tokens, token_budget
        self._context, self._window = context, window
        self._kept = max(1, context // 2)  # tokens of a text that has used up its context
        self._next = 0
        self._running: list[Text] = []  # in the order in which they came
        self._waiting: list[tuple[int, Text]] = []  # a heap
        self._copies: list[tuple[int, int]] = []

    def is_idle(self) -> bool:
        """Whether every request has ended."""
        return not self._running and not self._waiting

    def check(self, request: Request) -> None:
        """Raise `ConfigError` for a request that all pages together could not hold."""
        needed = self._most_pages(request)
        if needed > self._num_pages:
            raise ConfigError(
                f"a prompt of {len(request.prompt)} tokens with {request.num_tokens} to draw needs {needed} pages of "
                f"{self._page_tokens} tokens, but there are {self._num_pages}: give more memory, or ask for less"
            )

    def add(self, request: Request) -> int:
        """Have a request wait; its number. Raises as `check` does."""
        self.check(request)
        text = Text.of(self._next, request)
        if not self._window:
            text.begin = max(0, len(request.prompt) - self._context)
            # One that was begun goes on from where it would be now.
            while len(text.tokens) - text.begin > self._context:
                text.begin += self._context + 1 - self._kept
        heapq.heappush(self._waiting, (text.number, text))
        self._next += 1
        return text.number

    def turn(self) -> Turn:
        """The next turn; it has no parts if nothing waits or runs. `advance` must follow before the next turn."""
        parts: list[Part] = []
        self._copies = []
        left = self._token_budget
        index = 0
        # The list shrinks from its end while texts give up their pages.
        while index < len(self._running):
            text = self._running[index]
            num_tokens = min(text.pending, left - (len(self._running) - index - 1))
            if self._has_places(text, num_tokens):
                parts.append(self._part(text, num_tokens))
                left -= num_tokens
            index += 1
        left = self._admit(parts, left)
        assert left >= 0, "a turn exceeds its budget"
        return Turn(tuple(parts), tuple(self._copies))

    def advance(
        self,
        turn: Turn,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        version: int,
        decode: Decode | None = None,
    ) -> dict[int, Completion]:
        """Take the tokens drawn for the members of `turn.drawing`; the completions that end, by number."""
        for part in turn.parts:
            part.text.computed += part.num_tokens
        drawn = zip(tokens, logprobs, strict=True)
        ended: dict[int, Completion] = {}
        for part in turn.parts:
            texts = [part.text]
            if part.draws:
                by_token: dict[int, list[Member]] = {}
                # The zip comes second: it must not lose a pair when the members are at their end.
                for member, (token, logprob) in zip(part.text.members, drawn, strict=False):
                    member.logprobs.append(logprob)
                    member.versions.append(version)
                    by_token.setdefault(token, []).append(member)
                texts = self._parted(part.text, by_token)
            for text in texts:
                ended |= self._ended(text, decode) if part.draws else {}
                self._move_on(text)
        assert next(drawn, None) is None, "a token was drawn for nobody"
        return ended

    def drop_pages(self) -> None:
        """Have all texts be read again: their keys and values are worth nothing under other weights."""
        while self._running:
            self._wait_again(self._running[-1])

    def abort(self) -> dict[int, Completion]:
        """Let go of all texts; their completions so far, by number."""
        self.drop_pages()
        texts = [text for _, text in self._waiting]
        found = {each.number: text.completion(each, "aborted") for text in texts for each in text.members}
        self._waiting = []
        return dict(sorted(found.items()))

    def _parted(self, text: Text, by_token: dict[int, list[Member]]) -> list[Text]:
        """A text for each token that members of `text` have drawn, with the token; one of them is `text`."""
        (token, text.members), *others = by_token.items()
        texts = [text]
        for other, members in others:
            texts.append(text.branch(members))
            texts[-1].tokens.append(other)
            self.counts.share(text.held)
            bisect.insort(self._running, texts[-1], key=lambda each: each.number)
        text.tokens.append(token)
        return texts

    def _ended(self, text: Text, decode: Decode | None) -> dict[int, Completion]:
        """The completions of members whose last token ends them, which leave."""
        ended: dict[int, Completion] = {}
        for member in text.members:
            finish = text.ending(member, decode)
            if finish is not None:
                ended[member.number] = text.completion(member, finish)
        if len(ended) == len(text.members):
            self._leave(text)
        elif ended:
            text.members = [member for member in text.members if member.number not in ended]
        return ended

    def _most_pages(self, *requests: Request) -> int:
        """The most pages that the text of requests with the same prompt may hold at once."""
        num_tokens = max(request.num_tokens for request in requests)
        longest = len(requests[0].prompt) + num_tokens - 1  # nothing is drawn behind the last token
        if self._window:
            # A part of a prompt also sees the window before it, and neither begins with a page.
            longest = min(longest, self._window + self._token_budget + self._page_tokens)
        else:
            longest = min(longest, self._context)
        return self._pages_of(longest)

    def _pages_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_tokens)

    def _part(self, text: Text, num_tokens: int) -> Part:
        return Part(text, text.computed, num_tokens, draws=num_tokens == text.pending)

    def _admit(self, parts: list[Part], left: int) -> int:
        """Have waiting texts run while there are tokens and pages for them; the tokens left."""
        if not self._waiting or not left:
            return left
        skipped: list[tuple[int, Text]] = []
        growing = sum(map(self._may_grow, self._running))
        num_members = sum(len(text.members) for text in self._running)
        readers = self._readers()
        # At most as many requests run as there are tokens in a turn: each may come to need one.
        while self._waiting and left and num_members < self._token_budget:
            text = self._waiting[0][1]
            siblings = readers.get((text.prompt, text.begin), [])
            twin = next((each for each in siblings if each.tokens == text.tokens and each.number < text.number), None)
            sibling, shared = self._sibling(text, siblings) if twin is None else (None, 0)
            if sibling is not None and not shared:
                skipped.append(heapq.heappop(self._waiting))
                continue
            # Under a window most of the shared pages may be gone: they count before the cap, which is of its own pages.
            unshared = self._pages_of(len(text.tokens) - text.begin + 1) - shared // self._page_tokens
            needed = min(unshared, self._most_pages(*text.requests)) if twin is None else len(text.members)
            # A page more for each text that may grow, or it would soon take this one's away.
            if self._running and self.counts.num_free < needed + growing:
                break
            heapq.heappop(self._waiting)
            num_members += len(text.members)
            if twin is not None:
                # It passes in this turn, and draws for all.
                twin.members = sorted([*twin.members, *text.members], key=lambda each: each.number)
                growing += len(text.members)
                continue
            if sibling is not None:
                self._share(sibling, text, shared)
            bisect.insort(self._running, text, key=lambda each: each.number)
            num_tokens = min(text.pending, left)
            has_places = self._has_places(text, num_tokens)
            assert has_places, "a text was admitted without pages"
            parts.append(self._part(text, num_tokens))
            left -= num_tokens
            # Counted with the pages that it has now.
            growing += self._may_grow(text)
            readers.setdefault((text.prompt, text.begin), []).append(text)
        for each in skipped:
            heapq.heappush(self._waiting, each)
        return left

    def _may_grow(self, text: Text) -> int:
        """How many pages a text may soon take: members that part write into pages of their own."""
        return len(text.members) - (self._most_pages(*text.requests) <= len(text.held))

    def _readers(self) -> dict[tuple[tuple[int, ...], int], list[Text]]:
        """The texts that run, by the prompt that they read and where it begins."""
        found: dict[tuple[tuple[int, ...], int], list[Text]] = {}
        for text in self._running:
            found.setdefault((text.prompt, text.begin), []).append(text)
        return found

    def _sibling(self, text: Text, readers: Sequence[Text]) -> tuple[Text | None, int]:
        """One of the texts that read the same prompt, and how many of its tokens `text` can take over: none yet while
        the prompt is being read.
        """
        # The last token passes once more: its logits are wanted.
        wanted = min(len(text.prompt) - text.begin, len(text.tokens) - text.begin - 1)
        if wanted < 1:
            return None, 0
        reading = None
        for other in readers:
            # Under a window the first keys that `text` needs may be gone.
            is_there = not self._window or other.num_dropped * self._page_tokens <= max(0, wanted - self._window + 1)
            if other.computed >= wanted and is_there:
                return other, wanted
            if other.computed < wanted:
                reading = other
        return reading, 0

    def _share(self, sibling: Text, text: Text, shared: int) -> None:
        text.pages = sibling.pages[: self._pages_of(shared)]
        text.num_dropped, text.computed = sibling.num_dropped, shared
        self.counts.share(text.held)

    def _has_places(self, text: Text, num_tokens: int) -> bool:
        """Take the pages that the next tokens of a text are written to; False if the text gave up its own for it."""
        first, end = text.computed // self._page_tokens, self._pages_of(text.computed + num_tokens)
        for index in range(first, end):
            if index < len(text.pages) and self.counts.holders(text.pages[index]) == 1:
                continue
            while not self.counts.num_free:
                last = self._running[-1]
                self._wait_again(last)
                if last is text:
                    return False
            # Whoever gave up its pages may have been the other holder.
            if index < len(text.pages):
                source = text.pages[index]
                if self.counts.holders(source) > 1:
                    text.pages[index] = self.counts.take(text.pages[index - 1] if index else -1)
                    self._copies.append((source, text.pages[index]))
                    self.counts.release([source])
            else:
                text.pages.append(self.counts.take(text.pages[-1] if text.pages else -1))
        return True

    def _wait_again(self, text: Text) -> None:
        self._leave(text)
        heapq.heappush(self._waiting, (text.number, text))

    def _leave(self, text: Text) -> None:
        self._running.remove(text)
        self.counts.release(text.held)
        text.pages, text.num_dropped, text.computed = [], 0, 0

    def _move_on(self, text: Text) -> None:
        """Give back pages behind the window, or all pages of a text that has used up its context."""
        if not text.pages:
            return
        if self._window:
            # The next token, at place `computed`, sees the window - 1 before it.
            behind = max(0, text.computed - self._window + 1) // self._page_tokens
            self.counts.release(text.pages[text.num_dropped : behind])
            text.num_dropped = max(text.num_dropped, behind)
        elif len(text.tokens) - text.begin > self._context:
            self.counts.release(text.held)
            text.begin = len(text.tokens) - self._kept
            text.pages, text.computed = [], 0
