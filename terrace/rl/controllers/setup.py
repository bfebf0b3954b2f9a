"""The arguments of a controller: roles, sizes, numbers of the algorithm, and the state that it keeps between steps."""

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
    """Global sizes of an iteration: `prompts` times `responses` rows, learned in `mini_batch` rows, `epochs` times."""

    prompts: int
    responses: int
    mini_batch: int
    num_tokens: int  # of the longest response
    epochs: int = 1


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The roles of an algorithm, each with the calls of its worker (`terrace.rl.workers`). `rewards` have a weight.

    Their stream has the role that draws, which is the actor or follows it.
    """

    actor: Any
    rewards: tuple[tuple[float, Any], ...]
    reference: Any = None
    critic: Any = None
    cost: Any = None
    cost_critic: Any = None


@dataclass(kw_only=True)
class Progress:
    """The state of a run beside its weights and its stream: steps and updates done, coefficients."""

    kl_coefficient: float
    multiplier: Multiplier | None = None
    step: int = 0
    updates: int = 0  # of the actor: several a step


@dataclass(frozen=True, kw_only=True)
class Setup:
    """All that a controller reads; `lr(step)` are the learning rates of the actor and of critics, from step 0."""

    roles: Roles
    algorithm: Algorithm
    stream: Stream
    sizes: Sizes
    progress: Progress
    lr: Callable[[int], float]
    critic_lr: Callable[[int], float] = field(default=lambda step: 0.0)
    # Sees the rows that a step learns from, with the advantages of their tokens, before it does.
    observe: Callable[[Rows, Ragged], None] = field(default=lambda rows, advantages: None)
    rollout_is_exact: bool = False  # generation finds the numbers of training, but for rounding: `is_own`
