"""The rollout engine against whole passes of the same blocks; a request depends on itself alone."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from terrace.base.errors import ConfigError, ModelError
from terrace.generation.engine import GenerationEngine
from terrace.generation.request import Completion, Request, Sampling
from terrace.model.config import ModelConfig
from tests.support.generation import MODELS, VOCAB, make
from tests.support.toys import run_blocks

GREEDY, FREE = Sampling(temperature=0.0), Sampling(temperature=1.0, top_k=0)


def tokens_of(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def engine_of(blocks: list[nn.Module], config: ModelConfig, **options: Any) -> GenerationEngine:
    given: dict[str, Any] = {"context": 32, "num_pages": 64, "page_tokens": 4, "token_budget": 16, **options}
    return GenerationEngine(blocks, config, **given)


def requests_of(lengths: list[int], num_tokens: int, sampling: Sampling, **options: Any) -> list[Request]:
    return [
        Request(prompt=tokens_of(length, length), num_tokens=num_tokens, seed=row, sampling=sampling, **options)
        for row, length in enumerate(lengths)
    ]


def whole_logits(blocks: list[nn.Module], request: Request, made: Completion) -> Tensor:
    """Logits (T, V) before every token of a completion, in one pass over the whole text."""
    text = [*request.prompt, *made.tokens]
    return run_blocks(blocks, torch.tensor([text]))[0, len(request.prompt) - 1 : -1]


@pytest.mark.parametrize("name", [name for name, config in MODELS.items() if not config.rope_limit])
def test_tokens_and_log_probabilities_are_those_of_a_whole_pass(name: str) -> None:
    """Prompts read in parts beside texts that write, in so few pages that texts are read again."""
    config = MODELS[name]
    blocks = make(config)
    for sampling in (GREEDY, FREE):
        requests = requests_of([1, 9, 14, 9, 20], 11, sampling)
        engine = engine_of(blocks, config, num_pages=24, page_tokens=3, token_budget=7)
        for request, made in zip(requests, engine.run(requests), strict=True):
            assert (len(made.tokens), made.finish, set(made.versions)) == (11, "length", {0})
            logits = whole_logits(blocks, request, made)
            if sampling is GREEDY:
                assert list(made.tokens) == logits.argmax(1).tolist()
                assert set(made.logprobs) == {0.0}
                continue
            wanted = logits.log_softmax(1).gather(1, torch.tensor(made.tokens)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(made.logprobs, dtype=torch.float64), wanted, atol=1e-10, rtol=0)


def test_log_probabilities_in_fp32_are_near_those_of_the_training_blocks() -> None:
    config = MODELS["llama"]
    blocks = make(config)
    for block in blocks:
        block.float()
    requests = requests_of([3, 12, 7], 16, FREE)
    for request, made in zip(requests, engine_of(blocks, config).run(requests), strict=True):
        logits = whole_logits(blocks, request, made)
        wanted = logits.log_softmax(1).gather(1, torch.tensor(made.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(made.logprobs), wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["llama", "window", "mixtral", "linear", "kimi"])
def test_a_result_depends_on_its_request_alone(name: str) -> None:
    """Alone, in any company, any order, any sizes of turns and pages; with pages shared, copied and given up."""
    config = MODELS[name]
    blocks = make(config)
    samplings = [FREE, replace(FREE, seed=2, top_p=0.9), Sampling(temperature=0.7, top_k=5), replace(FREE, min_p=0.05)]
    requests = [
        Request(prompt=tokens_of(length, length), num_tokens=num, seed=row, sampling=samplings[row % 4])
        for row, (length, num) in enumerate([(5, 7), (10, 3), (10, 12), (10, 6), (1, 9), (10, 12)])
    ]
    alone = [engine_of(blocks, config).run([request])[0] for request in requests]
    assert len({made.tokens for made in alone}) == len(alone)
    shapes: list[dict[str, int]] = [
        {"num_pages": 64, "page_tokens": 4, "token_budget": 100},
        {"num_pages": 12, "page_tokens": 3, "token_budget": 5},
        {"num_pages": 31, "page_tokens": 1, "token_budget": 2},
        {"num_pages": 2, "page_tokens": 32, "token_budget": 3},
    ]
    for shape in shapes:
        engine = engine_of(blocks, config, **shape)
        for order in (range(6), reversed(range(6))):
            rows = list(order)
            for row, made in zip(rows, engine.run([requests[row] for row in rows]), strict=True):
                assert made.tokens == alone[row].tokens, (shape, row)
                assert made.logprobs == pytest.approx(alone[row].logprobs, abs=1e-10)


def test_samples_of_a_prompt_share_its_pages() -> None:
    config = MODELS["llama"]
    blocks = make(config)
    prompt = tokens_of(17)
    requests = [Request(prompt=prompt, num_tokens=8, seed=row, sampling=FREE) for row in range(6)]
    engine = engine_of(blocks, config, num_pages=100, token_budget=64)
    counts = engine._scheduler.counts
    passed: list[int] = []
    embed = blocks[0].forward
    blocks[0].forward = lambda tokens, places: passed.append(tokens.numel()) or embed(tokens, places)  # type: ignore[func-returns-value]
    for request in requests:
        engine.add(request)
    engine.step()
    engine.step()
    taken = 100 - counts.num_free
    ended: dict[int, Completion] = {}
    while not engine.is_idle():
        ended |= engine.step()
    assert counts.num_free == 100
    del blocks[0].forward
    # The prompt once; then a token for each text, and those that have drawn the same are one.
    texts = {made.tokens[0] for made in ended.values()}
    assert 1 < len(texts) < 6
    assert passed[:2] == [17, len(texts)]
    assert taken == 4 + len(texts)  # 16 tokens together, and a page for each
    for row, request in enumerate(requests):
        assert ended[row].tokens == engine_of(blocks, config).run([request])[0].tokens


def test_an_aborted_request_goes_on_as_if_nothing_had_been() -> None:
    config = MODELS["llama"]
    blocks = make(config)
    requests = requests_of([6, 13, 30], 20, FREE)
    wanted = engine_of(blocks, config).run(requests)
    engine = engine_of(blocks, config)
    numbers = [engine.add(request) for request in requests]
    for _ in range(7):
        engine.step()
    partial = engine.abort()
    assert engine.is_idle()
    assert engine._scheduler.counts.num_free == 64
    assert [partial[number].finish for number in numbers] == ["aborted"] * 3
    assert 0 < len(partial[numbers[0]].tokens) < 20
    engine.set_version(3)
    made = engine.run([replace(request, begun=partial[row]) for row, request in enumerate(requests)])
    for row, (again, whole) in enumerate(zip(made, wanted, strict=True)):
        num_begun = len(partial[row].tokens)
        assert (again.tokens, again.finish) == (whole.tokens, "length")
        assert again.versions == (0,) * num_begun + (3,) * (20 - num_begun)
        assert again.logprobs == pytest.approx(whole.logprobs, abs=1e-10)


def test_new_weights_read_what_runs_again() -> None:
    config = MODELS["llama"]
    blocks, request = make(config), requests_of([6], 12, GREEDY)[0]
    engine = engine_of(blocks, config)
    engine.add(request)
    for _ in range(5):
        engine.step()
    with torch.no_grad():
        for block in blocks:
            for parameter in block.parameters():
                parameter.mul_(1.3)
    engine.set_version(1)
    ended: dict[int, Completion] = {}
    while not engine.is_idle():
        ended |= engine.step()
    made = ended[0]
    assert made.versions == (0,) * 5 + (1,) * 7
    # All later tokens are those of a whole pass by the new weights.
    logits = whole_logits(blocks, request, made)
    assert list(made.tokens[5:]) == logits[5:].argmax(1).tolist()
    assert list(made.tokens[:5]) != logits[:5].argmax(1).tolist()


def test_what_stops_a_request() -> None:
    config = MODELS["llama"]
    blocks, request = make(config), requests_of([6], 20, FREE)[0]

    def decode(tokens: Any) -> str:
        return "".join(chr(97 + token % 26) for token in tokens)

    whole = engine_of(blocks, config).run([request])[0]
    stop = whole.tokens[7]
    assert stop not in whole.tokens[:7]
    engine = engine_of(blocks, config, decode=decode)
    stopped = engine.run([replace(request, stop_tokens=frozenset([stop]))])[0]
    assert (stopped.tokens, stopped.finish) == (whole.tokens[:8], "stop")
    text = decode(whole.tokens[4:11])
    stopped = engine.run([replace(request, stop_texts=("zzzz", text))])[0]
    assert (stopped.tokens, stopped.finish) == (whole.tokens[:11], "stop")
    with pytest.raises(ConfigError, match="cannot decode tokens: give it decode, or stop_tokens"):
        engine_of(blocks, config).run([request, replace(request, stop_texts=("a",))])


def test_what_cannot_be_is_refused_before_any_work() -> None:
    config = MODELS["llama"]
    blocks = make(config)
    engine = engine_of(blocks, config, num_pages=4)
    fits, large = requests_of([6], 11, GREEDY)[0], requests_of([6], 12, GREEDY)[0]
    with pytest.raises(ConfigError, match="6 tokens with 12 to draw needs 5 pages of 4 tokens, but there are 4"):
        engine.run([fits, large])
    assert engine.is_idle()
    assert len(engine.run([fits])[0].tokens) == 11
    with pytest.raises(ConfigError, match="num_pages = None, memory_bytes = None: give the memory"):
        engine_of(blocks, config, num_pages=None)
    with pytest.raises(ConfigError, match="memory_bytes = 100 is less than a page of keys and values, 1024 bytes"):
        engine_of(blocks, config, num_pages=None, memory_bytes=100)
    sized = engine_of(blocks, config, num_pages=None, memory_bytes=5000)
    assert sized.pool.nbytes == 4 * 1024  # 2 layers x keys and values x 4 tokens x 2 heads x 4 elements of fp64
    for name in ("page_tokens", "token_budget", "context"):
        with pytest.raises(ConfigError, match=f"{name} = 0 must be at least 1"):
            engine_of(blocks, config, **{name: 0})
    for options, said in (
        ({"prompt": ()}, "at least one token"),
        ({"num_tokens": 0}, "num_tokens = 0 must be at least 1"),
        ({"stop_texts": ("",)}, "an empty stop text"),
        ({"begun": Completion((1,), (0.0,), (0,), "stop")}, 'ended by "stop" cannot be resumed'),
        ({"begun": Completion((1,) * 12, (0.0,) * 12, (0,) * 12, "aborted")}, "counts the 12 tokens already begun"),
    ):
        with pytest.raises(ConfigError, match=said):
            replace(large, **options)


@pytest.mark.parametrize("name", ["llama", "window", "one head of keys"])
def test_texts_attend_together_as_each_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths far apart and near each other, so that groups have masks; then every text by itself."""
    config = MODELS[name]
    blocks, requests = make(config), requests_of([1, 2, 3, 3, 17, 18, 20], 9, FREE)
    together = engine_of(blocks, config, token_budget=64).run(requests)
    monkeypatch.setattr("terrace.generation.attention._ALIKE", 0)
    near = engine_of(blocks, config, token_budget=64).run(requests)
    monkeypatch.setattr("terrace.generation.attention._SHORT", 0)
    alone = engine_of(blocks, config, token_budget=64).run(requests)
    for ways in zip(together, near, alone, strict=True):
        assert len({made.tokens for made in ways}) == 1
        for made in ways:
            assert made.logprobs == pytest.approx(ways[2].logprobs, abs=1e-10)


def test_experts_that_look_ahead_are_refused() -> None:
    config = MODELS["mixtral"]
    assert config.experts is not None
    config = replace(config, experts=replace(config.experts, gate="expert_choice", normalized=False))
    with pytest.raises(ModelError, match=r"gate = 'expert_choice': .* can neither be sampled"):
        engine_of(make(config), config)
