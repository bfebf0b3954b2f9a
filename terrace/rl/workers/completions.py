"""A completion of OpenAI's protocol: its request, and its answer, checked before anything learns from it.

Tokens go out and tokens come back: `return_token_ids`, or `return_tokens_as_token_ids` with names "token_id:7".
Sampling is that of training, temperature 1 without cuts; a server's own defaults are overruled. A request with begun
tokens, as each turn after the first has, continues the prompt and them.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from terrace.base.errors import TrainingError
from terrace.generation.request import Completion, Request

PATH = "/v1/completions"
_NAMED = "token_id:"
_ROUNDING = 1e-3  # by which a log-probability may be above 0


def request_body(request: Request, model: str, more: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a request for one response; `more` has a server's further fields."""
    return {
        "model": model,
        "prompt": [*request.prompt, *_begun(request).tokens],
        "max_tokens": request.num_tokens - len(_begun(request).tokens),
        "temperature": request.sampling.temperature,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": _seed(request),
        "stop_token_ids": sorted(request.stop_tokens),
        "skip_special_tokens": False,
        # That of the drawn token alone.
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        **more,
    }


def _begun(request: Request) -> Completion:
    return request.begun or Completion((), (), (), "aborted")


def _seed(request: Request) -> int:
    """One of 63 bits from the seeds of the run and of the response, and from the place at which a turn begins."""
    place = [] if request.begun is None else [len(request.begun.tokens)]
    seeds = " ".join(map(str, [request.sampling.seed, request.seed, *place])).encode()
    return int.from_bytes(hashlib.blake2b(seeds, digest_size=8).digest()) >> 1


def completion_of(answer: Any, request: Request, url: str, vocabulary: int, version: int) -> Completion:
    """The response in an answer, drawn by weights `version`. Raises `TrainingError` for one that cannot be trusted."""

    def wrong(what: str) -> NoReturn:
        raise TrainingError(f"rollout server {url} {what}")

    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        wrong("answered a completion without its one choice: it does not speak OpenAI's completions")
    choice = choices[0]
    given = choice.get("logprobs")
    by_name: Mapping[str, Any] = given if isinstance(given, dict) else {}
    tokens = _tokens(choice.get("token_ids"), by_name.get("tokens"))
    if tokens is None:
        wrong("returned no token ids (return_token_ids): start a release that has them, vLLM 0.10.2 or SGLang 0.5.16")
    logprobs = by_name.get("token_logprobs")
    if not isinstance(logprobs, list):
        wrong("returned no log-probabilities: start it so that it may (vLLM: --max-logprobs above 0)")
    if len(logprobs) != len(tokens):
        wrong(f"returned {len(logprobs)} log-probabilities of {len(tokens)} tokens: its engine and its answer differ")
    numbers = [_number(each) for each in logprobs]
    if not all(each <= _ROUNDING for each in numbers):
        wrong("returned a log-probability that is above 0 or no number")
    if bad := [token for token in tokens if not 0 <= token < vocabulary]:
        wrong(f"drew token {bad[0]}, and the model's vocabulary has {vocabulary}: it serves another model")
    begun, prompt = _begun(request), choice.get("prompt_token_ids")
    if prompt is not None and prompt != [*request.prompt, *begun.tokens]:
        wrong("continued another prompt than the one that was sent: it may add tokens of its own before it")
    finish = choice.get("finish_reason")
    most = request.num_tokens - len(begun.tokens)
    if len(tokens) > most:
        wrong(f"returned {len(tokens)} tokens, and max_tokens was {most}")
    ends = [place for place, token in enumerate(tokens) if token in request.stop_tokens]
    if ends and ends[0] < len(tokens) - 1:
        wrong(f"went on after token {tokens[ends[0]]}, which ends a response")
    if finish == "length" and not ends and len(tokens) < most:
        wrong(
            f"cut a response at {len(tokens)} tokens, and max_tokens was {most}: raise its longest text "
            "(vLLM: --max-model-len, SGLang: --context-length), or lower run.max_response"
        )
    if finish == "stop" and not ends:
        last = tokens[-1] if tokens else "none"
        wrong(
            f"ended a response with token {last}, and the run's end with {sorted(request.stop_tokens)}: serve the "
            "run's model, with its generation_config.json"
        )
    if finish not in ("stop", "length"):
        wrong(f"ended a response with finish_reason = {finish!r}, which is neither 'stop' nor 'length'")
    return Completion(
        tokens=(*begun.tokens, *tokens),
        logprobs=(*begun.logprobs, *(min(each, 0.0) for each in numbers)),
        versions=(*begun.versions, *[version] * len(tokens)),
        finish="stop" if ends else "length",
    )


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def _tokens(ids: Any, names: Any) -> Sequence[int] | None:
    if isinstance(ids, list) and all(type(each) is int for each in ids):
        return ids
    if isinstance(names, list) and all(isinstance(each, str) and each.startswith(_NAMED) for each in names):
        numbers = [each.removeprefix(_NAMED) for each in names]
        return [int(each) for each in numbers] if all(each.isdecimal() for each in numbers) else None
    return None
