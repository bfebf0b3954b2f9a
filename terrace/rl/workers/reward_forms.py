"""The three supported signatures of reward functions, distinguished by parameter names.

    f(samples)                                              Terrace's: all samples at once, a number for each
    f(completions, **columns), f(prompts, completions, ...) TRL's: keyword arguments, a list for each prompt column;
                                                            also f(**columns)
    f(data_source, solution_str, ground_truth, extra_info)  verl's: one response per call, by keyword

TRL's functions receive texts and token ids of responses and the columns of the prompt file. verl's receive
`data_source` and `extra_info` of the prompt's line, and `ground_truth` from the line or from its table `reward_model`;
they return a number, or a mapping with the number under `score`.
"""

import inspect
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from terrace.base.errors import ConfigError, TrainingError
from terrace.rl.values.prompts import Sample

_SHOWN = 60  # characters of a prompt in an error message

Call = Callable[[Sequence[Sample], Sequence[Sequence[int]]], Iterable[Any]]  # (samples, tokens of responses) -> numbers
_TRL, _VERL = "completions", "solution_str"  # the parameter that identifies the signature
_OF_TRL = ("prompts", "completions", "completion_ids")  # arguments that are not prompt columns
_OF_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_BY_PLACE = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
)


@dataclass(frozen=True)
class _Signature:
    required: Mapping[str, bool]  # name -> whether it has no default
    takes_all: bool  # has **kwargs
    by_place: bool  # accepts a positional argument

    def takes(self, name: str) -> bool:
        return self.takes_all or name in self.required


def call_of(function: Callable[..., Any], name: str) -> Call:
    """Adapt the reward `function` to be called on samples; raises `ConfigError` for an unsupported signature."""
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(f"the reward {name!r} is async, and rewards are called without an event loop: write def")
    found = _signature(function, name)
    if found is None:
        return lambda samples, tokens: function(list(samples))
    if _VERL in found.required:
        return lambda samples, tokens: _by_verl(function, name, found, samples)
    if _TRL in found.required or (found.takes_all and not found.required and not found.by_place):
        return lambda samples, tokens: _by_trl(function, name, found, samples, tokens)
    needed = [each for each, must in found.required.items() if must]
    if len(needed) > 1 or not found.by_place:
        raise ConfigError(
            f"the reward {name!r} takes ({', '.join(found.required)}): give it the parameters (samples), (completions, "
            f"...) as of TRL, or ({', '.join(_OF_VERL)}) as of verl"
        )
    return lambda samples, tokens: function(list(samples))


def _signature(function: Callable[..., Any], name: str) -> _Signature | None:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a function that is not written in Python
        return None
    by_place = [each.name for each in parameters if each.kind is inspect.Parameter.POSITIONAL_ONLY]
    if len(by_place) > 1 or {_TRL, _VERL} & set(by_place):
        raise ConfigError(f"the reward {name!r} takes ({', '.join(by_place)}) by place alone: give them names")
    own = [each for each in parameters if each.kind not in _VARIADIC]
    required = {each.name: each.default is inspect.Parameter.empty for each in own}
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    return _Signature(required, takes_all, any(each.kind in _BY_PLACE for each in parameters))


def check_columns(function: Callable[..., Any], name: str, columns: Iterable[str]) -> None:
    """Raise `ConfigError` for a required parameter that no prompt column provides."""
    found, known = _signature(function, name), set(columns)
    if found is None or not {_TRL, _VERL} & found.required.keys():
        return
    given = _OF_TRL if _VERL not in found.required else ("solution_str",)
    for each, must in found.required.items():
        in_model = each == "ground_truth" and "reward_model" in known
        if must and each not in given and each not in known and not in_model:
            has = ", ".join(sorted(known)) or "nothing"
            raise ConfigError(
                f"the reward {name!r} needs {each!r}, and lines of prompts have {has} "
                f"beside the prompt: add a column {each!r}, or give the parameter a default"
            )


def _by_trl(
    function: Callable[..., Any],
    name: str,
    signature: _Signature,
    samples: Sequence[Sample],
    tokens: Sequence[Sequence[int]],
) -> Iterable[Any]:
    columns = dict.fromkeys(key for sample in samples for key in sample.data)
    given: dict[str, list[Any]] = {key: [sample.data.get(key) for sample in samples] for key in columns}
    given |= {
        "prompts": [sample.prompt for sample in samples],
        "completions": [sample.response for sample in samples],
        "completion_ids": [list(each) for each in tokens],
    }
    _check_given(name, signature, given, samples[0])
    found: Iterable[Any] = function(**{key: value for key, value in given.items() if signature.takes(key)})
    return found


def _by_verl(
    function: Callable[..., Any], name: str, signature: _Signature, samples: Sequence[Sample]
) -> Iterator[Any]:
    for sample in samples:
        line = sample.data
        of_model = line.get("reward_model")
        given = {**(of_model if isinstance(of_model, Mapping) else {}), **line}
        given = {key: value for key, value in given.items() if key in _OF_VERL} | {"solution_str": sample.response}
        _check_given(name, signature, given, sample)
        yield _score(name, function(**{key: value for key, value in given.items() if signature.takes(key)}), sample)


def _score(name: str, given: Any, sample: Sample) -> Any:
    if not isinstance(given, Mapping):
        return given
    others = [str(key) for key in given if key != "score"]
    if "score" not in given or others:
        what = f"the key {others[0]!r}, which has no effect" if "score" in given else "no key 'score'"
        raise TrainingError(
            f"the reward {name} gave a table with {what}, for the response to {shown(sample)}: give the number alone, "
            "or {'score': number}"
        )
    return given["score"]


def _check_given(name: str, signature: _Signature, given: Mapping[str, Any], sample: Sample) -> None:
    for each, must in signature.required.items():
        if must and each not in given:
            has = ", ".join(sorted(map(str, sample.data))) or "nothing"
            raise TrainingError(
                f"the reward {name} needs {each!r}, and the line of the prompt {shown(sample)} has {has} beside it: "
                f"add {each!r} to the file of prompts"
            )


def shown(sample: Sample) -> str:
    return shown_prompt(sample.prompt)


def shown_prompt(text: str) -> str:
    """A prompt, shortened for an error message."""
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")


def shown_value(value: Any) -> str:
    """A short, one-line repr for an error message, even if the value's own __repr__ raises."""
    if isinstance(value, (Tensor, np.ndarray)) and value.ndim:
        return f"an array of shape {tuple(value.shape)}"
    try:
        return " ".join(reprlib.repr(value).split())
    except (Exception, SystemExit):  # its own __repr__ raises
        return f"a {type(value).__name__}"
