"""Generation requests and their results. Needs no torch."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from terrace.base.errors import ConfigError

_LIMIT = 2**63
_LEAST_TEMPERATURE = 1e-6  # logit differences divided by it stay well inside the range of fp32; a guess


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters. Raises `ConfigError` for values out of range.

    Probabilities are p^(1 / temperature), normalised. Cuts are applied in this order: the `top_k` likeliest tokens
    (0: all), of these the likeliest that together reach probability `top_p` (Holtzman et al. 1904.09751, section 3.1),
    of these the tokens with at least `min_p` times the largest probability (Nguyen et al. 2407.01082).
    """

    temperature: float = 0.8  # 0 takes the likeliest
    top_k: int = 40
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # random numbers depend on this, the request's own seed and the token's position

    def __post_init__(self) -> None:
        for name, least in (("temperature", 0), ("top_k", 0), ("seed", 0)):
            if not least <= getattr(self, name) < _LIMIT:
                raise ConfigError(f"{name} = {getattr(self, name)} must be at least {least} and below 2^63")
        if 0 < self.temperature < _LEAST_TEMPERATURE:
            raise ConfigError(
                f"temperature = {self.temperature} must be 0, which takes the likeliest, or at least "
                f"{_LEAST_TEMPERATURE}"
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p = {self.top_p} must be above 0 and at most 1, which keeps all")
        if not 0 <= self.min_p <= 1:
            raise ConfigError(f"min_p = {self.min_p} must be at least 0, which keeps all, and at most 1")

    def without_effect(self, given: Collection[str]) -> str:
        """Message about the first of the fields `given` by the user that has no effect; "" if there is none.

        Neutral values (a cut that keeps all, a seed of 0) are never reported.
        """
        if self.temperature and self.top_k != 1:
            return ""
        why = "top_k = 1" if self.temperature else "temperature = 0"
        neutral = {"temperature": (0.0,), "top_k": (0, 1), "top_p": (1.0,), "min_p": (0.0,), "seed": (0,)}
        for name in given:
            value = getattr(self, name)
            if value not in neutral[name]:
                return f"{name} = {value} has no effect: {why} always takes the likeliest token; leave it out"
        return ""


class Recorder:
    """Of the experts that a pass chooses; this one records none (terrace.generation.routes.Routes)."""

    def begin(self) -> None:
        """Record the choices of the next pass."""

    def take(self) -> list[bytes]:
        """The packed experts of every token of the pass, in order; empty if none are recorded."""
        return []


UNRECORDED = Recorder()


@dataclass(frozen=True)
class Completion:
    """Sampled tokens, and for each its log-probability and the version of the weights that sampled it.

    Log-probabilities are of the distribution sampled from, after temperature and cuts: 0.0 at temperature 0. `tokens`
    includes the stop token, or the tokens of the stop text. `finish` is "length" after `Request.num_tokens` tokens;
    an "aborted" completion can be resumed as `Request.begun`. `routes` are the experts of every token of prompt and
    completion but the last, packed by terrace.generation.routes; empty unless the engine keeps them, and if aborted.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish: Literal["stop", "length", "aborted"]
    routes: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.logprobs) == len(self.versions):
            raise ConfigError(
                f"{len(self.tokens)} tokens, {len(self.logprobs)} log-probabilities and {len(self.versions)} versions "
                "of a completion: there must be one of each for every token"
            )


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt to continue by up to `num_tokens` tokens, including those of `begun`.

    Generation stops after a token of `stop_tokens`, or one that completes a text of `stop_texts`. Raises `ConfigError`
    for an empty prompt, `num_tokens` below 1, a seed out of range, an empty stop text, and a `begun` that was not
    aborted or already has `num_tokens` tokens.
    """

    prompt: tuple[int, ...]
    num_tokens: int
    seed: int = 0
    sampling: Sampling = Sampling()
    stop_tokens: frozenset[int] = frozenset()
    stop_texts: tuple[str, ...] = ()
    begun: Completion | None = None  # an aborted completion to resume, possibly with newer weights

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ConfigError("a request needs a prompt of at least one token")
        if self.num_tokens < 1:
            raise ConfigError(f"num_tokens = {self.num_tokens} must be at least 1")
        if not 0 <= self.seed < _LIMIT:
            raise ConfigError(f"seed = {self.seed} must be at least 0 and below 2^63")
        if "" in self.stop_texts:
            raise ConfigError("an empty stop text would end every completion: leave it out")
        if self.begun is not None and self.begun.finish != "aborted":
            raise ConfigError(f'a completion that ended by "{self.begun.finish}" cannot be resumed: leave it out')
        if self.begun is not None and len(self.begun.tokens) >= self.num_tokens:
            raise ConfigError(
                f"num_tokens = {self.num_tokens} counts the {len(self.begun.tokens)} tokens already begun: ask for more"
            )
