"""An optimizer of the user's own: any `torch.optim.Optimizer` whose update is element by element.

A rank owns a slice of a flat buffer, not whole parameters. An instance of the class lives for one update of one slice:
its parameters are the elements that take weight decay and those that do not, and its `state` is what is stored, so that
nothing else can outlive a step. A state is a tensor of the parameter's shape or a number of the parameter, which is
stored for every element; one that counts the steps is not stored.

Whether the class bears this is tried, not looked up: `check_own` trains a small matrix and a vector as the class itself
would, and again cut in two ways.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from terrace.base.errors import ConfigError
from terrace.base.user_modules import load_object, shown_error
from terrace.runtime.elementwise import Elementwise
from terrace.runtime.settings import OptimizerConfig
from terrace.runtime.states import FROZEN, OUTER_MESSAGE, OUTER_MOMENTUM, OUTER_START, PROJECTION

Make = Callable[..., Optimizer]

_TAKEN = ("master", FROZEN, PROJECTION, OUTER_MOMENTUM, OUTER_START, OUTER_MESSAGE)  # kinds of a checkpoint's own
_RATES = (1e-2, 3e-2, 2e-2, 1e-2)  # of the steps of a trial
_GRADIENTS = (1.0, 30.0, 0.0, 1e-2)  # their scales: a class that clips by a norm does so in some step
_MATRIX, _VECTOR = (4, 6), 5
_CUTS = ((0, 7, 29), (0, 16, 24, 29))  # of the matrix and the vector behind it
_INSTEAD = "take a class that updates every element by itself, or an optimizer of Terrace by its name"
_RTOL = 1e-5  # of classes that compute in fp32, whatever the parameters' dtype


class ShardedOwn(Elementwise):
    """The user's class on the slice of one flat buffer that this rank owns."""

    _trial: "_Trial | None" = None  # on the device of the gradient, from the first step on

    def _step(self, values: list[Tensor], gradient: Tensor, num_decayed: int, lr: float) -> None:
        if self._trial is None:
            self._trial = _Trial(class_of(self._config), values[0])
        self._trial.step(sorted(self._config.states), values, gradient, num_decayed, self.num_steps, lr)


def class_of(config: OptimizerConfig) -> Make:
    """The user's class with its arguments. Raises `ConfigError` if it cannot be imported or is no optimizer."""
    made: Callable[..., Any]
    (made,) = config.given or (load_object(config.name, os.getcwd(), "optimizer", "class", "my_optimizers:Sign"),)
    if not (isinstance(made, type) and issubclass(made, Optimizer)):
        raise ConfigError(f"optimizer.name = {config.name!r} must be a class that is a torch.optim.Optimizer")
    return partial(made, **config.arguments)


class _Trial:
    """What two steps on one element show of the states of a class, on the device and in the dtype of `like`."""

    def __init__(self, make: Make, like: Tensor) -> None:
        self._make = make
        param = nn.Parameter(torch.zeros_like(like[:1]))
        optimizer = _optimizer(make, [], [param], _RATES[0])
        seen = []
        for _ in range(2):
            param.grad = torch.zeros_like(param)
            optimizer.step()
            seen.append({kind: _number(value) for kind, value in _states(optimizer, param).items()})
        self._like = _states(optimizer, param)
        self._counts = [kind for kind, value in seen[1].items() if (seen[0].get(kind), value) == (1, 2)]

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the states that are stored, in order."""
        return tuple(sorted(self._like.keys() - set(self._counts)))

    @property
    def num_states(self) -> int:
        """How many states a parameter has, with those that count."""
        return len(self._like)

    @torch.no_grad()
    def step(
        self,
        kinds: Sequence[str],
        values: Sequence[Tensor],
        gradient: Tensor,
        num_decayed: int,
        num_steps: int,
        lr: float,
    ) -> None:
        """Update `values`, parameters and the states `kinds` (n each), in place, after `num_steps` steps."""
        ends = (slice(0, num_decayed), slice(num_decayed, len(gradient)))
        decayed, rest = (
            [(part, nn.Parameter(values[0][part]))] if part.start < part.stop else list[tuple[slice, nn.Parameter]]()
            for part in ends
        )
        optimizer = _optimizer(self._make, [each for _, each in decayed], [each for _, each in rest], lr)
        for part, param in (*decayed, *rest):
            param.grad = gradient[part]
            if num_steps:
                optimizer.state[param] = {kind: _as(self._like[kind], num_steps) for kind in self._counts} | {
                    kind: _as(self._like[kind], each[part]) for kind, each in zip(kinds, values[1:], strict=True)
                }
        optimizer.step()
        for part, param in (*decayed, *rest):
            for kind, each in zip(kinds, values[1:], strict=True):
                # A tensor that the class has changed in place is the stored one itself.
                each[part] = optimizer.state[param][kind]


def _optimizer(make: Make, decayed: list[nn.Parameter], rest: list[nn.Parameter], lr: float) -> Optimizer:
    """An instance in which `rest` takes no weight decay, if the class has a `weight_decay`."""
    optimizer = make([{"params": each} for each in (decayed, rest) if each], lr=lr)
    if rest and "weight_decay" in optimizer.param_groups[-1]:
        optimizer.param_groups[-1]["weight_decay"] = 0.0
    return optimizer


def _states(optimizer: Optimizer, param: nn.Parameter) -> dict[str, Any]:
    return {kind: value for kind, value in optimizer.state[param].items() if value is not None}


def _number(value: Any) -> float | None:
    """The value of a state that is a number, None of one by element."""
    if isinstance(value, Tensor):
        return float(value) if not value.ndim else None
    return float(value) if isinstance(value, (int, float)) else None


def _as(like: Any, value: Tensor | int) -> Any:
    """A state as the class keeps it, from what is stored: elements, or a number in each of them."""
    if isinstance(like, Tensor) and like.ndim:
        return value
    number = value[0].item() if isinstance(value, Tensor) else value
    return torch.full_like(like, number) if isinstance(like, Tensor) else type(like)(number)


def own_states(config: OptimizerConfig) -> tuple[str, ...]:
    """The states of the user's class. Raises `ConfigError` for a class that cannot be sharded, in one line."""
    said, make = f"optimizer.name = {config.name!r}", class_of(config)
    try:
        with torch.random.fork_rng(devices=[]):
            return _tried(said, make)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # whatever the user's class raises
        raise ConfigError(
            f"{said}: a step on small tensors {shown_error(error)}: a class must take groups of parameters and lr, and "
            "step without a closure"
        ) from error


def check_own(config: OptimizerConfig) -> None:
    """Raise `ConfigError` if `config` names a class that cannot be sharded, or other states than it has."""
    if config.is_own and (states := own_states(config)) != tuple(sorted(config.states)):
        words = ", ".join(f'"{each}"' for each in states)
        raise ConfigError(
            f"optimizer.states = {list(config.states)}, and {config.name} has {list(states)}: write states = [{words}]"
        )


def own_config(made: object, lr: float) -> OptimizerConfig:
    """The settings of a class, or of `functools.partial` of one, given in Python."""
    own, arguments = (made.func, made.keywords) if isinstance(made, partial) else (made, {})
    if (isinstance(made, partial) and made.args) or not (isinstance(own, type) and issubclass(own, Optimizer)):
        raise ConfigError(
            f"optimizer must be a name, such as 'muon', a table of keys, a torch.optim.Optimizer's class or "
            f"functools.partial of one with named arguments, not {type(made).__qualname__}: the states of an optimizer "
            "are placed by the plan"
        )
    name = f"{own.__module__}:{own.__qualname__}"
    config = OptimizerConfig(name=name, lr=lr, arguments=arguments, given=(own,))
    return replace(config, states=own_states(config))


def _tried(said: str, make: Make) -> tuple[str, ...]:
    generator = torch.Generator().manual_seed(0)
    numel, num_decayed = _CUTS[0][-1], _MATRIX[0] * _MATRIX[1]
    initial = torch.randn(numel, generator=generator, dtype=torch.float64)
    gradients = [scale * torch.randn(numel, generator=generator, dtype=torch.float64) for scale in _GRADIENTS]
    matrix, vector = (
        nn.Parameter(initial[:num_decayed].view(_MATRIX).clone()),
        nn.Parameter(initial[num_decayed:].clone()),
    )
    whole = _optimizer(make, [matrix], [vector], _RATES[0])
    trial = _Trial(make, initial)
    kinds = trial.kinds
    for gradient, lr in zip(gradients, _RATES, strict=True):
        matrix.grad, vector.grad = gradient[:num_decayed].view(_MATRIX).clone(), gradient[num_decayed:].clone()
        for group in whole.param_groups:
            group["lr"] = lr
        before = [_settings(group) for group in whole.param_groups]
        whole.step()
        if before != [_settings(group) for group in whole.param_groups]:
            raise ConfigError(f"{said} changes its groups of parameters in a step, of which no checkpoint has anything")
        for param in (matrix, vector):
            _check_states(said, _states(whole, param), param, trial)
    wanted = torch.cat([matrix.detach().view(-1), vector.detach()])
    for cuts in _CUTS:
        found = torch.cat([_piece(trial, initial, gradients, slice(*cut), num_decayed) for cut in pairwise(cuts)])
        if not torch.allclose(found, wanted, rtol=_RTOL, atol=_RTOL):
            raise ConfigError(
                f"{said} is not element by element: a small matrix and a vector that it updates in pieces differ by "
                f"{float((found - wanted).abs().max()):.2g} from those it updates whole, so no rank could update a "
                f"slice alone: {_INSTEAD}"
            )
    return kinds


def _settings(group: Mapping[str, Any]) -> dict[str, str]:
    return {key: repr(value) for key, value in group.items() if key != "params"}


def _check_states(said: str, states: Mapping[str, Any], param: Tensor, trial: _Trial) -> None:
    kinds = trial.kinds
    for kind, value in states.items():
        if not kind.isidentifier() or kind in _TAKEN:
            raise ConfigError(f"{said}: its state {kind!r} needs another name, under which a checkpoint can hold it")
        shape = tuple(value.shape) if isinstance(value, Tensor) else ()
        if _number(value) is None and (
            not isinstance(value, Tensor) or shape != param.shape or not value.is_floating_point()
        ):
            raise ConfigError(
                f"{said}: its state {kind!r} of a parameter of shape {tuple(param.shape)} is "
                f"{f'{value.dtype} of shape {shape}' if isinstance(value, Tensor) else type(value).__name__}, neither "
                f"floating-point numbers of this shape nor a number, so ranks cannot share it: {_INSTEAD}"
            )
    if missing := set(kinds) - states.keys():
        raise ConfigError(f"{said}: the state {sorted(missing)[0]!r} is there for some parameters only")
    if len(states) != trial.num_states:
        raise ConfigError(f"{said} has other states in later steps than in its first: {sorted(states)}")


def _piece(trial: _Trial, initial: Tensor, gradients: Sequence[Tensor], piece: slice, num_decayed: int) -> Tensor:
    """A piece of the parameters after all steps on this piece alone."""
    values = [
        initial[piece].clone(),
        *(torch.zeros(piece.stop - piece.start, dtype=torch.float64) for _ in trial.kinds),
    ]
    decayed = min(max(num_decayed - piece.start, 0), piece.stop - piece.start)
    for number, (gradient, lr) in enumerate(zip(gradients, _RATES, strict=True)):
        trial.step(trial.kinds, values, gradient[piece].clone(), decayed, number, lr)
    return values[0]
