"""Scheduler of the generation engine: which tokens run in each step, and which pages hold their keys and values.

A step has at most `token_budget` tokens: one of every decoding sequence, the rest for chunks of prompts (chunked
prefill). Sequences are served in order of arrival, each with at least one token, so none starves. Pages of
`page_tokens` positions are reference-counted and allocated on the first write. When no page is free, the newest
sequence is preempted: it releases its pages, keeps its tokens and is prefilled again later. The oldest sequence
therefore always advances, and every request ends.

Requests with the same prompt form one `SequenceGroup` until they sample different tokens. Groups that split share their
pages with copy on write. A new request also shares the pages of a prompt that is in the cache already, and waits while
that prompt is still being prefilled.

Without a sliding window a sequence attends to at most `context` tokens. When it reaches that limit, it is prefilled
again from its last `context / 2` tokens. With a window no longer than the context this is not needed, and pages behind
the window are released. Models with learned positions always use the first rule.

Needs no torch. Decisions depend only on requests and sampled tokens, so ranks that sample the same tokens schedule
identically.
"""

import bisect
import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from terrace.base.errors import ConfigError
from terrace.generation.page_counts import PageCounts
from terrace.generation.request import Completion, Request
from terrace.generation.sequence_group import Decode, Member, SequenceGroup


@dataclass(frozen=True)
class Chunk:
    """A chunk of a sequence in one step: `num_tokens` from position `first`, relative to `SequenceGroup.begin`."""

    group: SequenceGroup
    first: int
    num_tokens: int
    samples: bool  # whether a token is sampled after the chunk


@dataclass(frozen=True)
class ScheduledStep:
    """One scheduled step: its chunks, and the copies (source, target) of pages and slots before it, in order."""

    chunks: tuple[Chunk, ...]
    copies: tuple[tuple[int, int], ...]
    slot_copies: tuple[tuple[int, int], ...] = ()

    @property
    def sampling(self) -> list[Chunk]:
        """The chunks after which one token per member of the group is sampled."""
        return [chunk for chunk in self.chunks if chunk.samples]


class Scheduler:
    """Running and waiting sequences. `window` is 0 unless pages behind a sliding window may be released.

    Every running sequence has a slot, for what linear layers keep of it. With `has_states` no prompt is shared after it
    has been prefilled, since only the state after the last token of a sequence is kept.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_tokens: int,
        token_budget: int,
        context: int,
        window: int = 0,
        has_states: bool = False,
    ) -> None:
        for name, value in (("page_tokens", page_tokens), ("token_budget", token_budget), ("context", context)):
            if value < 1:
                raise ConfigError(f"{name} = {value} must be at least 1")
        self.counts = PageCounts(num_pages)
        self._num_pages, self._page_tokens, self._token_budget = num_pages, page_tokens, token_budget
        self._context, self._window = context, window
        self._kept = max(1, context // 2)  # tokens that are prefilled again when the context is full
        self._next = 0
        self._running: list[SequenceGroup] = []  # in order of arrival
        self._waiting: list[tuple[int, SequenceGroup]] = []  # a heap
        self._copies: list[tuple[int, int]] = []
        self._has_states = has_states
        self._free_slots: list[int] = []  # a heap, below `_num_slots`
        self._num_slots = 0
        self._slot_copies: list[tuple[int, int]] = []

    def is_idle(self) -> bool:
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
        group = SequenceGroup.of(self._next, request)
        if not self._window:
            group.begin = max(0, len(request.prompt) - self._context)
            # A resumed request restarts its context where an uninterrupted one would have.
            while len(group.tokens) - group.begin > self._context:
                group.begin += self._context + 1 - self._kept
        heapq.heappush(self._waiting, (group.number, group))
        self._next += 1
        return group.number

    def schedule(self) -> ScheduledStep:
        """Schedule the next step; it is empty when idle. Call `advance` before the next one."""
        chunks: list[Chunk] = []
        self._copies = []
        left = self._token_budget
        index = 0
        # Preemption shrinks the list from its end.
        while index < len(self._running):
            group = self._running[index]
            num_tokens = min(group.pending, left - (len(self._running) - index - 1))
            if self._allocate(group, num_tokens):
                chunks.append(self._chunk(group, num_tokens))
                left -= num_tokens
            index += 1
        left = self._admit(chunks, left)
        assert left >= 0, "a step exceeds its budget"
        slot_copies, self._slot_copies = self._slot_copies, []
        return ScheduledStep(tuple(chunks), tuple(self._copies), tuple(slot_copies))

    def advance(
        self,
        step: ScheduledStep,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        version: int,
        decode: Decode | None = None,
        routes: Iterable[bytes] = (),
    ) -> dict[int, Completion]:
        """Record the tokens sampled for the members of `step.sampling`. Returns ended completions by request id.

        `routes` are those of all tokens of the step, or none.
        """
        of_tokens = iter(routes)
        for chunk in step.chunks:
            chunk.group.routes[chunk.first :] = islice(of_tokens, chunk.num_tokens)
            chunk.group.computed += chunk.num_tokens
        drawn = zip(tokens, logprobs, strict=True)
        ended: dict[int, Completion] = {}
        for chunk in step.chunks:
            groups = [chunk.group]
            if chunk.samples:
                by_token: dict[int, list[Member]] = {}
                # `drawn` is the second argument, so that zip does not consume a pair when the members are exhausted.
                for member, (token, logprob) in zip(chunk.group.members, drawn, strict=False):
                    member.logprobs.append(logprob)
                    member.versions.append(version)
                    by_token.setdefault(token, []).append(member)
                groups = self._split(chunk.group, by_token)
            for group in groups:
                ended |= self._ended(group, decode) if chunk.samples else {}
                self._release_pages(group)
        assert next(drawn, None) is None, "a token was drawn for nobody"
        return ended

    def drop_pages(self) -> None:
        """Preempt all sequences: after a change of weights their cached keys and values are invalid."""
        while self._running:
            self._preempt(self._running[-1])

    def abort(self) -> dict[int, Completion]:
        """Abort all requests. Returns partial completions by request id."""
        self.drop_pages()
        groups = [group for _, group in self._waiting]
        found = {each.number: group.completion(each, "aborted") for group in groups for each in group.members}
        self._waiting = []
        return dict(sorted(found.items()))

    def _split(self, group: SequenceGroup, by_token: dict[int, list[Member]]) -> list[SequenceGroup]:
        """Split a sequence group by sampled token; the original keeps one of the branches."""
        (token, group.members), *others = by_token.items()
        groups = [group]
        for other, members in others:
            groups.append(group.branch(members))
            groups[-1].tokens.append(other)
            groups[-1].slot = self._take_slot()
            self._slot_copies.append((group.slot, groups[-1].slot))
            self.counts.share(group.held)
            bisect.insort(self._running, groups[-1], key=lambda each: each.number)
        group.tokens.append(token)
        return groups

    def _ended(self, group: SequenceGroup, decode: Decode | None) -> dict[int, Completion]:
        """Remove the members that end with the last token. Returns their completions by request id."""
        ended: dict[int, Completion] = {}
        for member in group.members:
            finish = group.ending(member, decode)
            if finish is not None:
                ended[member.number] = group.completion(member, finish)
        if len(ended) == len(group.members):
            self._remove(group)
        elif ended:
            group.members = [member for member in group.members if member.number not in ended]
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

    def _chunk(self, group: SequenceGroup, num_tokens: int) -> Chunk:
        return Chunk(group, group.computed, num_tokens, samples=num_tokens == group.pending)

    def _admit(self, chunks: list[Chunk], left: int) -> int:
        """Admit waiting sequences while tokens and pages last. Returns the remaining token budget."""
        if not self._waiting or not left:
            return left
        skipped: list[tuple[int, SequenceGroup]] = []
        growing = sum(map(self._may_grow, self._running))
        num_members = sum(len(group.members) for group in self._running)
        readers = self._readers()
        # Each running request may need a token per step, so their number is limited by the budget.
        while self._waiting and left and num_members < self._token_budget:
            group = self._waiting[0][1]
            siblings = readers.get((group.prompt, group.begin), [])
            twin = next((each for each in siblings if each.tokens == group.tokens and each.number < group.number), None)
            sibling, shared = self._sibling(group, siblings) if twin is None else (None, 0)
            if sibling is not None and not shared:
                skipped.append(heapq.heappop(self._waiting))
                continue
            # With a window most shared pages may be released already, so they are subtracted before the cap is applied.
            unshared = self._pages_of(len(group.tokens) - group.begin + 1) - shared // self._page_tokens
            needed = min(unshared, self._most_pages(*group.requests)) if twin is None else len(group.members)
            # Reserve a page for each sequence that may grow; otherwise it would soon preempt this one.
            if self._running and self.counts.num_free < needed + growing:
                break
            heapq.heappop(self._waiting)
            num_members += len(group.members)
            if twin is not None:
                # The twin is computed in this step and samples for all members.
                twin.members = sorted([*twin.members, *group.members], key=lambda each: each.number)
                growing += len(group.members)
                continue
            if sibling is not None:
                self._share(sibling, group, shared)
            bisect.insort(self._running, group, key=lambda each: each.number)
            group.slot = self._take_slot()
            num_tokens = min(group.pending, left)
            allocated = self._allocate(group, num_tokens)
            assert allocated, "a group was admitted without pages"
            chunks.append(self._chunk(group, num_tokens))
            left -= num_tokens
            # After its pages have been allocated.
            growing += self._may_grow(group)
            readers.setdefault((group.prompt, group.begin), []).append(group)
        for each in skipped:
            heapq.heappush(self._waiting, each)
        return left

    def _may_grow(self, group: SequenceGroup) -> int:
        """Number of pages that a group may soon allocate; after a split each branch writes to pages of its own."""
        return len(group.members) - (self._most_pages(*group.requests) <= len(group.held))

    def _readers(self) -> dict[tuple[tuple[int, ...], int], list[SequenceGroup]]:
        found: dict[tuple[tuple[int, ...], int], list[SequenceGroup]] = {}
        for group in self._running:
            found.setdefault((group.prompt, group.begin), []).append(group)
        return found

    def _sibling(self, group: SequenceGroup, readers: Sequence[SequenceGroup]) -> tuple[SequenceGroup | None, int]:
        """Sequence with the same prompt, and the number of its positions that `group` can share.

        The number is 0 while that prompt is still being prefilled; the sequence is None if there is none to wait for.
        """
        if self._has_states:
            return None, 0
        # The last token is computed again, since its logits are needed.
        wanted = min(len(group.prompt) - group.begin, len(group.tokens) - group.begin - 1)
        if wanted < 1:
            return None, 0
        reading = None
        for other in readers:
            # With a window, keys that `group` needs may have been released.
            is_there = not self._window or other.num_dropped * self._page_tokens <= max(0, wanted - self._window + 1)
            if other.computed >= wanted and is_there:
                return other, wanted
            if other.computed < wanted:
                reading = other
        return reading, 0

    def _share(self, sibling: SequenceGroup, group: SequenceGroup, shared: int) -> None:
        group.pages = sibling.pages[: self._pages_of(shared)]
        group.num_dropped, group.computed = sibling.num_dropped, shared
        group.routes = sibling.routes[:shared]
        self.counts.share(group.held)

    def _allocate(self, group: SequenceGroup, num_tokens: int) -> bool:
        first, end = group.computed // self._page_tokens, self._pages_of(group.computed + num_tokens)
        for index in range(first, end):
            if index < len(group.pages) and self.counts.holders(group.pages[index]) == 1:
                continue
            while not self.counts.num_free:
                last = self._running[-1]
                self._preempt(last)
                if last is group:
                    return False
            # The preempted sequence may have held the other reference.
            if index < len(group.pages):
                source = group.pages[index]
                if self.counts.holders(source) > 1:
                    group.pages[index] = self.counts.take(group.pages[index - 1] if index else -1)
                    self._copies.append((source, group.pages[index]))
                    self.counts.release([source])
            else:
                group.pages.append(self.counts.take(group.pages[-1] if group.pages else -1))
        return True

    def _preempt(self, group: SequenceGroup) -> None:
        self._remove(group)
        heapq.heappush(self._waiting, (group.number, group))

    def _remove(self, group: SequenceGroup) -> None:
        self._running.remove(group)
        self.counts.release(group.held)
        group.pages, group.num_dropped, group.computed = [], 0, 0
        heapq.heappush(self._free_slots, group.slot)
        group.slot = -1

    def _take_slot(self) -> int:
        if self._free_slots:
            return heapq.heappop(self._free_slots)
        self._num_slots += 1
        return self._num_slots - 1

    def _release_pages(self, group: SequenceGroup) -> None:
        """Release pages behind the window, or all pages of a sequence whose context is full."""
        if not group.pages:
            return
        if self._window:
            # The next token, at position `computed`, sees the window - 1 positions before it.
            behind = max(0, group.computed - self._window + 1) // self._page_tokens
            self.counts.release(group.pages[group.num_dropped : behind])
            group.num_dropped = max(group.num_dropped, behind)
        elif len(group.tokens) - group.begin > self._context:
            self.counts.release(group.held)
            group.begin = len(group.tokens) - self._kept
            group.pages, group.computed = [], 0
