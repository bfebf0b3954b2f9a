"""Rewards from a user's Python function, `module:function`.

    def reward(samples: Sequence[Sample]) -> Iterable[float]: ...

The function receives a call's responses and returns a number for each, in order; for other signatures see
terrace.rl.workers.reward_forms. It runs in a thread with a deadline. If it yields its numbers one by one, errors name
the prompt at which it failed.
"""

import math
import os
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice
from numbers import Number
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from terrace.base.errors import TrainingError
from terrace.base.user_modules import load_object, shown_error
from terrace.base.words import counted
from terrace.data.tokenizer import Tokenizer
from terrace.launch.world import World
from terrace.rl.calls.call import call
from terrace.rl.values.prompts import Sample
from terrace.rl.values.rows import Rows
from terrace.rl.workers.reward_forms import call_of, shown, shown_value

Function = Callable[..., Iterable[float]]
_OBJECTS = ("prompt_texts", "finish", "data")  # columns


def load_function(name: str, folder: str) -> Function:
    """Import `module:function` from an installed module or from `folder`; raises `ConfigError` if that fails."""
    found: Function = load_object(name, folder, "reward", "function", "my_rewards:exact")
    call_of(found, name)  # to reject an unsupported signature before the run starts
    return found


class RewardFunction:
    """A worker that computes `column` for responses with a Python function; a call times out after `deadline_s`."""

    def __init__(
        self,
        world: World | None,
        *,
        function: str,
        tokenizer: Tokenizer,
        deadline_s: float = 60.0,
        column: str = "reward",
        folder: str | None = None,
    ) -> None:
        """The function's module may be in `folder`, by default the working folder."""
        self._name, self._call = function, call_of(load_function(function, folder or os.getcwd()), function)
        self._tokenizer, self._deadline_s, self._column = tokenizer, deadline_s, column

    @call(split="data", take="data", reads=("responses", *_OBJECTS))
    def rewards(self, rows: Rows) -> Rows:
        """The column, fp32 (R). Raises `TrainingError` with the prompt of a missing, late or non-finite number.

        The function is not called for an empty share.
        """
        tokens = [each.tolist() for each in rows.ragged("responses").rows()]
        texts = [self._tokenizer.decode(each) for each in tokens]
        columns: list[Any] = [rows.objects(name) for name in _OBJECTS]
        samples = [
            Sample(prompt, response, finish, data)
            for prompt, response, finish, data in zip(columns[0], texts, *columns[1:], strict=True)
        ]
        return Rows(
            {self._column: torch.tensor(self._numbers(samples, tokens) if samples else [], dtype=torch.float32)}
        )

    def _numbers(self, samples: Sequence[Sample], tokens: Sequence[Sequence[int]]) -> list[float]:
        found, failed = list[Any](), list[BaseException]()

        def run() -> None:
            try:
                # Read one number too many at most, to detect a function that yields too many or never ends.
                for number in islice(given_numbers(self._call(samples, tokens)), len(samples) + 1):
                    found.append(number)
            except BaseException as error:
                failed.append(error)

        # A hanging thread cannot be killed; as a daemon it does not keep the process alive.
        thread = threading.Thread(target=run, name=f"reward {self._name}", daemon=True)
        thread.start()
        thread.join(self._deadline_s)
        at = min(len(found), len(samples) - 1)
        if thread.is_alive():
            raise TrainingError(
                f"the reward {self._name} took longer than {self._deadline_s:g} s for "
                f"{counted(len(samples), 'response')}; it has given {len(found)}, the next is to "
                f"{shown(samples[at])}: raise run.reward_timeout_s if it is slow"
            )
        if failed:
            self._refuse(failed[0], samples[at])
        if len(found) != len(samples):
            given = counted(len(found), "number") if len(found) < len(samples) else f"more than {len(samples)} numbers"
            raise TrainingError(
                f"the reward {self._name} gave {given} for "
                f"{counted(len(samples), 'response')}, the first to {shown(samples[0])}: give one for each, in order"
            )
        numbers = [in_fp32(number) for number in found]
        for sample, number, given in zip(samples, numbers, found, strict=True):
            if not math.isfinite(number):
                raise TrainingError(
                    f"the reward {self._name} gave {shown_value(given)} for the response to {shown(sample)}: give a "
                    "finite number, which fp32 can hold"
                )
        return numbers

    def _refuse(self, error: BaseException, sample: Sample) -> NoReturn:
        if isinstance(error, TrainingError):
            raise error
        last = traceback.extract_tb(error.__traceback__)[-1]
        if last.filename == given_numbers.__code__.co_filename:
            raise TrainingError(f"the reward {self._name}: {error}; the first is to {shown(sample)}")
        # Not chained: the error's __str__ may raise, and another process may be unable to unpickle its class.
        raise TrainingError(
            f"the reward {self._name} {shown_error(error)}, in line {last.lineno} of {last.filename}, at the response "
            f"to {shown(sample)}"
        ) from None


def given_numbers(found: Any) -> Iterator[Any]:
    """Iterate over a reward's result; raises `TypeError` if it is not a sequence or iterator of numbers."""
    if isinstance(found, (str, bytes, Mapping, AbstractSet)) or not isinstance(found, Iterable) or _is_one(found):
        raise TypeError(f"it gave {shown_value(found)}, which is no list: give a number for each response, in order")
    yield from found


def in_fp32(given: Any) -> float:
    """Round a number to fp32; NaN if it is not a number, infinite if it overflows."""
    try:
        if isinstance(given, (Tensor, np.ndarray)):
            # A masked value is not a number.
            if not _is_one(given) or given is np.ma.masked:
                return math.nan
            given = given.item()
        # numpy.bool_ is not a numbers.Number.
        if isinstance(given, complex) or not isinstance(given, (Number, np.bool_)):
            return math.nan
        return float(torch.tensor(float(given), dtype=torch.float32))  # type: ignore[arg-type]
    except OverflowError:  # an int beyond fp64
        return math.inf
    except Exception:  # its own __float__ raises, or it is a tensor without values, as on the device "meta"
        return math.nan


def _is_one(value: Any) -> bool:
    """Whether `value` is a 0-dimensional array."""
    return isinstance(value, (Tensor, np.ndarray)) and value.ndim == 0
