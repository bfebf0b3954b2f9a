"""Rewards by a Python function of the user's, `module:function`.

    def reward(samples: Sequence[Sample]) -> Iterable[float]: ...

It gets the responses of a call and gives a number for each, in their order; other signatures are those of
terrace.rl.workers.reward_forms. It runs in a thread with a deadline. A function that yields its numbers one by one has
the prompt named that it stood at.
"""

import math
import os
import reprlib
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from numbers import Number
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from terrace.base.errors import ConfigError, TrainingError, did_you_mean
from terrace.base.words import counted
from terrace.data.tokenizer import Tokenizer
from terrace.launch.world import World
from terrace.rl.calls.call import call
from terrace.rl.values.prompts import Sample
from terrace.rl.values.rows import Rows
from terrace.rl.workers.reward_forms import call_of, shown

Function = Callable[..., Iterable[float]]
_OBJECTS = ("prompt_texts", "finish", "data")  # columns


def load_function(name: str, folder: str) -> Function:
    """The function `module:function`, of a module that is installed or lies in `folder`.

    Raises `ConfigError` where it cannot be imported.
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise ConfigError(f"the reward {name!r} must be module:function, such as my_rewards:exact")
    if module_name.endswith(".py") or not all(each.isidentifier() for each in module_name.split(".")):
        raise ConfigError(
            f"the reward {name!r} must be module:function, such as my_rewards:exact for exact of my_rewards.py in the "
            "working folder: give the module without its folder and without .py"
        )
    _check_name(name, module_name, folder)
    if folder not in sys.path:
        # Last: the folder has the modules that the user's own imports, and must not stand for any that is installed.
        sys.path.append(folder)
    try:
        module = import_module(module_name)
    except (Exception, SystemExit) as error:  # whatever the user's module raises
        raise ConfigError(
            f"the reward {name!r} cannot be imported: {shown_error(error).removeprefix('raised ')}"
        ) from error
    found = getattr(module, function_name, None)
    if not callable(found):
        names = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        raise ConfigError(f"the reward {name!r}: no function of {module_name}{did_you_mean(function_name, names)}")
    call_of(found, name)  # refuses another signature before a run begins
    function: Function = found
    return function


def _check_name(name: str, module_name: str, folder: str) -> None:
    """Raises `ConfigError` if both the folder and Python have the first part of a module's name."""
    first = module_name.partition(".")[0]
    own = next(
        (path for path in (Path(folder, f"{first}.py"), Path(folder, first, "__init__.py")) if path.is_file()), None
    )
    if own is None or folder in sys.path:
        return
    try:
        installed = find_spec(first)
    except ValueError:  # of a module that was made by hand
        return
    if installed is not None:
        raise ConfigError(
            f"the reward {name!r}: {own} has the name of an installed module ({installed.origin}), which would be "
            "imported in its place: rename the file"
        )


class RewardFunction:
    """A worker that gives `column` to rows of responses; a call ends after `deadline_s` seconds."""

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
        """The function's module lies in `folder`, the working folder by default."""
        self._name, self._call = function, call_of(load_function(function, folder or os.getcwd()), function)
        self._tokenizer, self._deadline_s, self._column = tokenizer, deadline_s, column

    @call(split="data", take="data", reads=("responses", *_OBJECTS))
    def rewards(self, rows: Rows) -> Rows:
        """The column, fp32 (R). Raises `TrainingError` naming the prompt of a number that is missing, late or none.

        A share without rows does not call the function.
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
                # One more than is asked for is enough to tell a function that gives too many, or never ends.
                for number in islice(given_numbers(self._call(samples, tokens)), len(samples) + 1):
                    found.append(number)
            except BaseException as error:
                failed.append(error)

        # A thread that hangs cannot be ended: as a daemon it does not keep the process.
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
        # Without the error itself as a cause: its own words may fail, and another process may not know its class.
        raise TrainingError(
            f"the reward {self._name} {shown_error(error)}, in line {last.lineno} of {last.filename}, at the response "
            f"to {shown(sample)}"
        ) from None


def given_numbers(found: Any) -> Iterator[Any]:
    """The numbers of a reward's result, one by one; raises `TypeError` for a result that is no series of numbers."""
    if isinstance(found, (str, bytes, Mapping, AbstractSet)) or not isinstance(found, Iterable) or _is_one(found):
        raise TypeError(f"it gave {shown_value(found)}, which is no list: give a number for each response, in order")
    yield from found


def in_fp32(given: Any) -> float:
    """The number as it will be kept; NaN where it is none, infinite beyond fp32."""
    try:
        if isinstance(given, (Tensor, np.ndarray)):
            # The value below a mask is none.
            if not _is_one(given) or given is np.ma.masked:
                return math.nan
            given = given.item()
        # A bool of numpy is no number to Python.
        if isinstance(given, complex) or not isinstance(given, (Number, np.bool_)):
            return math.nan
        return float(torch.tensor(float(given), dtype=torch.float32))  # type: ignore[arg-type]
    except OverflowError:  # an int beyond fp64
        return math.inf
    except Exception:  # its own __float__ raises, or it is a tensor without values, as on the device "meta"
        return math.nan


def _is_one(value: Any) -> bool:
    """Whether it is an array without dims."""
    return isinstance(value, (Tensor, np.ndarray)) and value.ndim == 0


def shown_value(value: Any) -> str:
    """A value in an error, on one line and short, whatever its own words do."""
    if isinstance(value, (Tensor, np.ndarray)) and value.ndim:
        return f"an array of shape {tuple(value.shape)}"
    try:
        return " ".join(reprlib.repr(value).split())
    except (Exception, SystemExit):  # its own __repr__ raises
        return f"a {type(value).__name__}"


def shown_error(error: BaseException) -> str:
    """The type of an error and the first line of its message, whatever its own words do."""
    try:
        lines = str(error).strip().splitlines()
    except (Exception, SystemExit):  # its own __str__ raises
        lines = []
    if isinstance(error, SystemExit):
        return f"called sys.exit({lines[0] if lines else ''})"
    return f"raised {type(error).__name__}{f': {lines[0][:200]}' if lines else ''}"
