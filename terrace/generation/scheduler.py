"""Scheduler of the generation engine: which tokens run in each step, and which pages hold their keys and values.

A step has at most `token_budget` tokens: one of every decoding sequence, the rest for chunks of prompts (chunked
prefill). Sequences are served in order of arrival, each with at least one token, so none starves. Pages of
`page_tokens` positions are reference-counted and allocated on the first write. When no page is free, the newest
sequence is preempted: it releases its pages, keeps its tokens and is prefilled again later. The oldest sequence
therefore always advances, and every request ends.

Requests with the same prompt form one sequence group (`Text`) until they sample different tokens. Groups that split
share their pages with copy on write. A new request also shares the pages of a prompt that is in the cache already, and
waits while that prompt is still being prefilled.

Without a sliding window a sequence attends to at most `context` tokens. When it reaches that limit, it is prefilled
again from its last `context / 2` tokens. With a window no longer than the context this is not needed, and pages behind
the window are released. Models with learned positions always use the first rule.

Needs no torch. Decisions depend only on requests and sampled tokens, so ranks that sample the same tokens schedule
identically.
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
    """A chunk of a sequence in one step: `num_tokens` tokens from position `first`, relative to `Text.begin`."""

    text: Text
    first: int
    num_tokens: int
    draws: bool  # whether a token is sampled after the chunk


@dataclass(frozen=True)
class Turn:
    """One scheduled step: its chunks, and the page copies (source, target) to make before it, in order."""

    parts: tuple[Part, ...]
    copies: tuple[tuple[int, int], ...]

    @property
    def drawing(self) -> list[Part]:
        """The chunks after which one token per member of the group is sampled."""
        return [part for part in self.parts if part.draws]


class Scheduler:
    """Running and waiting sequences. `window` is 0 unless pages behind a sliding window may be released."""

    def __init__(self, *, num_pages: int, page_tokens: int, token_budget: int, context: int, window: int = 0) -> None:
        for name, value in (("page_tokens", page_tokens), ("token_budget", token_budget), ("context", context)):
            if value < 1:
                raise ConfigError(f"{name} = {value} must be at least 1")
        self.counts = PageCounts(num_pages)
        self._num_pages, self._page_tokens, self._token_budget = num_pages, page_tokens, token_budget
        self._context, self._window = context, window
        self._kept = max(1, context // 2)  # tokens that are prefilled again when the context is full
        self._next = 0
        self._running: list[Text] = []  # in order of arrival
        self._waiting: list[tuple[int, Text]] = []  # a heap
        self._copies: list[tuple[int, int]] = []

    def is_idle(self) -> bool:
        """Whether every request has ended."""
        return not self._running and not self._waiting

    def check(self, request: Request) -> None:
        """Raise `ConfigError` for a request that may need more pages than the pool has."""
        needed = self._most_pages(request)
        if needed > self._num_pages:
            raise ConfigError(
                f"a prompt of {len(request.prompt)} tokens with {request.num_tokens} to draw needs {needed} pages of "
                f"{self._page_tokens} tokens, but there are {self._num_pages}: give more memory, or ask for less"
            )

    def add(self, request: Request) -> int:
        """Queue a request and return its id. Raises as `check` does."""
        self.check(request)
        text = Text.of(self._next, request)
        if not self._window:
            text.begin = max(0, len(request.prompt) - self._context)
            # A resumed request restarts its context where an uninterrupted one would have.
            while len(text.tokens) - text.begin > self._context:
                text.begin += self._context + 1 - self._kept
        heapq.heappush(self._waiting, (text.number, text))
        self._next += 1
        return text.number

    def turn(self) -> Turn:
        """Schedule the next step; it is empty when idle. Call `advance` before the next one."""
        parts: list[Part] = []
        self._copies = []
        left = self._token_budget
        index = 0
        # Preemption shrinks the list from its end.
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
        """Record the tokens sampled for the members of `turn.drawing`. Returns ended completions by request id."""
        for part in turn.parts:
            part.text.computed += part.num_tokens
        drawn = zip(tokens, logprobs, strict=True)
        ended: dict[int, Completion] = {}
        for part in turn.parts:
            texts = [part.text]
            if part.draws:
                by_token: dict[int, list[Member]] = {}
                # `drawn` is the second argument, so that zip does not consume a pair when the members are exhausted.
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
        """Preempt all sequences: after a change of weights their cached keys and values are invalid."""
        while self._running:
            self._wait_again(self._running[-1])

    def abort(self) -> dict[int, Completion]:
        """Abort all requests. Returns partial completions by request id."""
        self.drop_pages()
        texts = [text for _, text in self._waiting]
        found = {each.number: text.completion(each, "aborted") for text in texts for each in text.members}
        self._waiting = []
        return dict(sorted(found.items()))

    def _parted(self, text: Text, by_token: dict[int, list[Member]]) -> list[Text]:
        """Split a sequence group by sampled token; the original keeps one of the branches."""
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
        """Remove the members that end with the last token. Returns their completions by request id."""
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
        """Largest number of pages that a group of these requests can hold at once."""
        num_tokens = max(request.num_tokens for request in requests)
        longest = len(requests[0].prompt) + num_tokens - 1  # the last token is never computed
        if self._window:
            # A chunk also reads the window before it; neither is aligned to pages.
            longest = min(longest, self._window + self._token_budget + self._page_tokens)
        else:
            longest = min(longest, self._context)
        return self._pages_of(longest)

    def _pages_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_tokens)

    def _part(self, text: Text, num_tokens: int) -> Part:
        return Part(text, text.computed, num_tokens, draws=num_tokens == text.pending)

    def _admit(self, parts: list[Part], left: int) -> int:
        """Admit waiting sequences while tokens and pages last. Returns the remaining token budget."""
        if not self._waiting or not left:
            return left
        skipped: list[tuple[int, Text]] = []
        growing = sum(map(self._may_grow, self._running))
        num_members = sum(len(text.members) for text in self._running)
        readers = self._readers()
        # Each running request may need a token per step, so their number is limited by the budget.
        while self._waiting and left and num_members < self._token_budget:
            text = self._waiting[0][1]
            siblings = readers.get((text.prompt, text.begin), [])
            twin = next((each for each in siblings if each.tokens == text.tokens and each.number < text.number), None)
            sibling, shared = self._sibling(text, siblings) if twin is None else (None, 0)
            if sibling is not None and not shared:
                skipped.append(heapq.heappop(self._waiting))
                continue
            # With a window most shared pages may be released already, so they are subtracted before the cap is applied.
            unshared = self._pages_of(len(text.tokens) - text.begin + 1) - shared // self._page_tokens
            needed = min(unshared, self._most_pages(*text.requests)) if twin is None else len(text.members)
            # Reserve a page for each sequence that may grow; otherwise it would soon preempt this one.
            if self._running and self.counts.num_free < needed + growing:
                break
            heapq.heappop(self._waiting)
            num_members += len(text.members)
            if twin is not None:
                # The twin is computed in this step and samples for all members.
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
            # After its pages have been allocated.
            growing += self._may_grow(text)
            readers.setdefault((text.prompt, text.begin), []).append(text)
        for each in skipped:
            heapq.heappush(self._waiting, each)
        return left

    def _may_grow(self, text: Text) -> int:
        """Number of pages that a group may soon allocate; after a split each branch writes to pages of its own."""
        return len(text.members) - (self._most_pages(*text.requests) <= len(text.held))

    def _readers(self) -> dict[tuple[tuple[int, ...], int], list[Text]]:
        """Running sequences by (prompt, begin)."""
        found: dict[tuple[tuple[int, ...], int], list[Text]] = {}
        for text in self._running:
            found.setdefault((text.prompt, text.begin), []).append(text)
        return found

    def _sibling(self, text: Text, readers: Sequence[Text]) -> tuple[Text | None, int]:
        """Sequence with the same prompt, and the number of its positions that `text` can share.

        The number is 0 while that prompt is still being prefilled; the sequence is None if there is none to wait for.
        """
        # The last token is computed again, since its logits are needed.
        wanted = min(len(text.prompt) - text.begin, len(text.tokens) - text.begin - 1)
        if wanted < 1:
            return None, 0
        reading = None
        for other in readers:
            # With a window, keys that `text` needs may have been released.
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
        """Allocate pages for the next tokens of a sequence. Returns False if the sequence itself was preempted."""
        first, end = text.computed // self._page_tokens, self._pages_of(text.computed + num_tokens)
        for index in range(first, end):
            if index < len(text.pages) and self.counts.holders(text.pages[index]) == 1:
                continue
            while not self.counts.num_free:
                last = self._running[-1]
                self._wait_again(last)
                if last is text:
                    return False
            # The preempted sequence may have held the other reference.
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
        """Release pages behind the window, or all pages of a sequence whose context is full."""
        if not text.pages:
            return
        if self._window:
            # The next token, at position `computed`, sees the window - 1 positions before it.
            behind = max(0, text.computed - self._window + 1) // self._page_tokens
            self.counts.release(text.pages[text.num_dropped : behind])
            text.num_dropped = max(text.num_dropped, behind)
        elif len(text.tokens) - text.begin > self._context:
            self.counts.release(text.held)
            text.begin = len(text.tokens) - self._kept
            text.pages, text.computed = [], 0
