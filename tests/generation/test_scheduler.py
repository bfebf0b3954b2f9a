"""The scheduler alone, without a model: pages, budgets and ends under random requests."""

from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
from hypothesis import given, settings

from terrace.generation.page_counts import PageCounts
from terrace.generation.request import Completion, Request, Sampling
from terrace.generation.scheduler import ScheduledStep, Scheduler

_PROMPTS = [tuple(range(length)) for length in (1, 4, 9, 9, 17, 60, 60)]


@dataclass(frozen=True)
class Case:
    requests: list[Request]
    sizes: dict[str, Any]
    aborts: int  # steps after which all is aborted and resumed; 0: never
    late: int = 0  # steps after which every second request comes


@st.composite
def cases(draw: st.DrawFn) -> Case:
    requests = [
        Request(
            prompt=draw(st.sampled_from(_PROMPTS)),
            num_tokens=draw(st.integers(1, 12)),
            seed=seed,
            sampling=Sampling(temperature=0.0),
            stop_tokens=frozenset([draw(st.integers(0, 40))]),
        )
        for seed in range(draw(st.integers(1, 8)))
    ]
    page_tokens, budget = draw(st.integers(1, 6)), draw(st.integers(1, 12))
    window, context = draw(st.sampled_from([(0, 40), (0, 7), (0, 1), (5, 7), (5, 40)]))
    longest = max(len(request.prompt) + request.num_tokens for request in requests)
    reach = min(longest, window + budget + page_tokens) if window else min(longest, context)
    least = -(-reach // page_tokens)
    sizes = {"num_pages": least + draw(st.integers(0, 12)), "page_tokens": page_tokens, "token_budget": budget}
    return Case(
        requests, sizes | {"context": context, "window": window}, draw(st.integers(0, 9)), draw(st.integers(0, 6))
    )


class Memory:
    """Pages that hold the token written at each place, to which a model would attend."""

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        self._size = page_tokens
        self._pages: list[list[object]] = [[None] * page_tokens for _ in range(num_pages)]

    def passes(self, step: ScheduledStep, window: int) -> None:
        for source, target in step.copies:
            self._pages[target] = list(self._pages[source])
        written: set[tuple[int, int]] = set()
        for chunk in step.chunks:
            for place in range(chunk.first, chunk.first + chunk.num_tokens):
                page, within = chunk.group.pages[place // self._size], place % self._size
                assert (page, within) not in written
                written.add((page, within))
                self._pages[page][within] = (place, chunk.group.tokens[chunk.group.begin + place])
        for chunk in step.chunks:
            end = chunk.first + chunk.num_tokens
            for place in range(max(0, chunk.first - window + 1) if window else 0, end):
                kept = self._pages[chunk.group.pages[place // self._size]][place % self._size]
                assert kept == (place, chunk.group.tokens[chunk.group.begin + place])


def drawn(text_tokens: list[int], seed: int) -> int:
    """The token after a sequence: any function of the tokens and the seed alone. Some seeds draw alike for a while."""
    return (31 * len(text_tokens) + 7 * sum(text_tokens) + seed % 4 * (len(text_tokens) % 3 == 0)) % 41


def finished(case: Case) -> list[Completion]:
    scheduler = Scheduler(**case.sizes)
    memory = Memory(case.sizes["num_pages"], case.sizes["page_tokens"])
    late = list(enumerate(case.requests))[1::2] if case.late else []
    rows = {scheduler.add(each): row for row, each in enumerate(case.requests) if (row, each) not in late}
    ended: dict[int, Completion] = {}
    num_steps = 0
    while not scheduler.is_idle() or late:
        if num_steps >= case.late or scheduler.is_idle():
            rows |= {scheduler.add(each): row for row, each in late}
            late = []
        step = scheduler.schedule()
        num_steps += 1
        assert step.chunks, "nothing passes: a deadlock"
        assert num_steps < 5000
        assert 0 < sum(chunk.num_tokens for chunk in step.chunks) <= case.sizes["token_budget"]
        assert len({id(chunk.group) for chunk in step.chunks}) == len(step.chunks)
        memory.passes(step, case.sizes["window"])
        tokens = [drawn(chunk.group.tokens, each.seed) for chunk in step.sampling for each in chunk.group.requests]
        for number, completion in scheduler.advance(step, tokens, [0.0] * len(tokens), num_steps).items():
            ended[rows[number]] = completion
        if num_steps == case.aborts:
            partial = scheduler.abort()
            assert scheduler.is_idle()
            assert scheduler.counts.num_free == case.sizes["num_pages"]
            begun = {rows[number]: completion for number, completion in partial.items()}
            rows = {
                scheduler.add(Request(**{**vars(case.requests[row]), "begun": completion})): row
                for row, completion in begun.items()
            }
    assert scheduler.counts.num_free == case.sizes["num_pages"]
    return [ended[row] for row in range(len(case.requests))]


@settings(max_examples=300, deadline=None)
@given(cases())
def test_every_request_ends_as_it_would_alone_and_no_page_is_lost(case: Case) -> None:
    for request, made in zip(case.requests, finished(case), strict=True):
        tokens = list(request.prompt)
        while True:
            tokens.append(drawn(tokens, request.seed))
            if tokens[-1] in request.stop_tokens or len(tokens) - len(request.prompt) == request.num_tokens:
                break
        assert list(made.tokens) == tokens[len(request.prompt) :]
        assert made.finish == ("stop" if tokens[-1] in request.stop_tokens else "length")


def test_a_prompt_far_longer_than_the_window_is_shared_in_few_pages() -> None:
    """The second sequence takes over pages of the first, of which the window has left less than the prompt once had."""
    greedy = Sampling(temperature=0.0)
    requests = [Request(prompt=tuple(range(61)), num_tokens=7, seed=seed, sampling=greedy) for seed in (0, 4)]
    sizes = {"num_pages": 3, "page_tokens": 8, "token_budget": 8, "context": 40, "window": 5}
    for late in (0, 10):
        first, second = finished(Case(requests, sizes, aborts=0, late=late))
        assert first.tokens == second.tokens
        assert len(first.tokens) == 7


def test_what_requests_have_in_common_passes_once() -> None:
    requests = [Request(prompt=_PROMPTS[4], num_tokens=3, seed=seed) for seed in (1, 1, 2, 5)]
    scheduler = Scheduler(num_pages=40, page_tokens=4, token_budget=64, context=40)
    for request in requests:
        scheduler.add(request)
    passed = []
    for token in (0, 1, 2):
        step = scheduler.schedule()
        passed.append([chunk.num_tokens for chunk in step.chunks])
        drawing = [each.seed for chunk in step.sampling for each in chunk.group.requests]
        # All draw alike, then one other than the rest.
        scheduler.advance(step, [token + 9 * (token == 1 and seed == 2) for seed in drawing], [0.0] * len(drawing), 0)
    assert passed == [[17], [1], [1, 1]]
    assert scheduler.is_idle()
    assert scheduler.counts.num_free == 40


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=60))
def test_a_page_behind_a_text_is_kept_for_it_while_there_are_others(moves: list[tuple[bool, int]]) -> None:
    counts, runs = PageCounts(24), []
    for begins, number in moves:
        free = {page for page in range(24) if not counts.holders(page)}
        assert counts.num_free == len(free)
        if begins and free:
            page = counts.take()
            assert page in free
            # Not behind another sequence, unless the longest free run has one page alone.
            longest = max(len(run) for run in "".join("x" if p in free else " " for p in range(24)).split())
            assert page == 0 or page - 1 in free or longest == 1
            runs.append([page])
        elif free and runs:
            run = runs[number % len(runs)]
            page = counts.take(run[-1])
            assert page in free
            assert page == run[-1] + 1 or run[-1] + 1 not in free
            run.append(page)
        elif runs:
            counts.release(runs.pop(number % len(runs)))
