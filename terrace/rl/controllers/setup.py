"""A controller's arguments: roles, sizes, hyperparameters, and the state that it keeps between steps."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from terrace.rl.algorithms.algorithm import Algorithm
from terrace.rl.algorithms.lagrange import Multiplier
from terrace.rl.stream.stream import Stream
from terrace.rl.values.ragged import Ragged
from terrace.rl.values.rows import Rows


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Global sizes of an iteration: `prompts` x `responses` rows, `mini_batch` rows per update, `epochs` passes."""

    prompts: int
    responses: int
    mini_batch: int
    num_tokens: int  # of the longest response
    epochs: int = 1


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The groups of an algorithm's roles, whose workers are in `terrace.rl.workers`. `rewards` are (weight, role).

    The role that generates (the actor, or a rollout) belongs to the stream.
    """

    actor: Any
    rewards: tuple[tuple[float, Any], ...]
    reference: Any = None
    critic: Any = None
    cost: Any = None
    cost_critic: Any = None


@dataclass(kw_only=True)
class Progress:
    """State of a run besides weights and stream: completed steps and updates, coefficients."""

    kl_coefficient: float
    multiplier: Multiplier | None = None
    step: int = 0
    updates: int = 0  # of the actor, several per step


@dataclass(frozen=True, kw_only=True)
class Setup:
    """All arguments of a controller. `lr(step)` and `critic_lr(step)` are learning rates, with steps from 0."""

    roles: Roles
    algorithm: Algorithm
    stream: Stream
    sizes: Sizes
    progress: Progress
    lr: Callable[[int], float]
    critic_lr: Callable[[int], float] = field(default=lambda step: 0.0)
    # Called before the update with the step's rows and the advantages of their tokens.
    observe: Callable[[Rows, Ragged], None] = field(default=lambda rows, advantages: None)
    rollout_is_exact: bool = False  # generation and training agree up to rounding; used by `step.is_own`
