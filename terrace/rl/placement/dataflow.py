"""The dataflow of learning from feedback: its roles and the sizes of an iteration. Pure values.

An iteration has sequential stages (HybridFlow, Sheng et al. 2409.19256, section 2.1):

    reshard    parameters of the trained role are sent to those that generate
    generate   `samples` responses to each of `prompts` prompts
    prepare    scores: log-probabilities of a reference, values of a critic, rewards, costs
    train      `epochs` times `updates` optimizer steps of the roles that train

All responses count as `response_tokens` tokens long. A reward that is a Python function is not a role.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from terrace.base.errors import ModelError, PlanError, did_you_mean
from terrace.model.blocks import block_specs
from terrace.model.config import ModelConfig
from terrace.model.facts import has_scalar_head, longest_row
from terrace.model.spec import BlockSpec, freeze

RESHARD, GENERATE, PREPARE, TRAIN = STAGES = ("reshard", "generate", "prepare", "train")


@dataclass(frozen=True, kw_only=True)
class Role:
    """A model of the dataflow and its work in an iteration.

    A model of values, rewards or costs has a scalar head. `follows`: for a role that generates but does not train, the
    role whose parameters it uses.
    """

    name: str
    model: ModelConfig
    generates: bool = False
    scores: bool = False
    trains: bool = False
    follows: str = ""

    @cached_property
    def blocks(self) -> tuple[BlockSpec, ...]:
        """Its blocks; frozen where it does not train."""
        whole = block_specs(self.model)
        return whole if self.trains else freeze(whole, ["*"])

    @property
    def does(self) -> str:
        words = [word for word, is_so in zip(_DOES, (self.generates, self.scores, self.trains), strict=True) if is_so]
        return ", ".join(words)


_DOES = ("generates", "scores", "trains")


@dataclass(frozen=True, kw_only=True)
class Dataflow:
    """Roles, and the sizes of an iteration: prompts and responses in sequences and tokens, over all ranks.

    The batch of `prompts` x `samples` sequences is trained on in `updates` equal parts, `epochs` times. `compute` is
    the dtype of working copies, keys and values. Raises `PlanError` for a dataflow that no iteration can run.
    """

    roles: tuple[Role, ...]
    prompts: int
    prompt_tokens: int
    response_tokens: int
    samples: int = 1
    updates: int = 1
    epochs: int = 1
    compute: Literal["bf16", "fp16", "fp32", "fp64"] = "bf16"
    master: Literal["bf16", "fp32", "fp64"] | None = (
        None  # as in the plans of its roles; None: as wide as `compute`, fp32 at least
    )
    messages: Literal["bf16", "fp32"] | None = None
    ahead: bool = False  # a role that only generates draws for the next iteration while the others learn

    @property
    def masters(self) -> Literal["bf16", "fp32", "fp64"]:
        """Dtype of master weights and optimizer state."""
        return self.master or ("fp64" if self.compute == "fp64" else "fp32")

    def __post_init__(self) -> None:
        for name in ("prompts", "prompt_tokens", "response_tokens", "samples", "updates", "epochs"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} = {getattr(self, name)} of a dataflow must be at least 1")
        if self.sequences % self.updates:
            raise PlanError(
                f"updates = {self.updates} do not divide the {self.sequences} responses of an iteration "
                f"({self.prompts} prompts x {self.samples} samples): give a divisor"
            )
        for name, times in Counter(role.name for role in self.roles).items():
            if times > 1:
                raise PlanError(f"{times} roles are called {name!r}: give each a name of its own")
        for role in self.roles:
            _check(role, self)
        generating = [role.name for role in self.roles if role.generates]
        if len(generating) != 1:
            named = ", ".join(generating) or "none"
            raise PlanError(f"one role of a dataflow generates, and here {named}: set `generates` on one role")
        if self.ahead and not self.generator.follows:
            raise PlanError(f"role {generating[0]!r} trains, so it cannot draw ahead: let another role generate for it")

    def iteration_s(self, generate_s: float, prepare_s: float, train_s: float) -> float:
        learn_s = prepare_s + train_s
        return max(generate_s, learn_s) if self.ahead else generate_s + learn_s

    @property
    def sequences(self) -> int:
        return self.prompts * self.samples

    @property
    def sequence(self) -> int:
        return self.prompt_tokens + self.response_tokens

    @property
    def update_batch(self) -> int:
        return self.sequences // self.updates

    @property
    def tokens(self) -> int:
        """Tokens of prompts and responses per iteration, the basis of throughput (HybridFlow, section 8.1)."""
        return self.sequences * self.sequence

    def role(self, name: str) -> Role:
        """The role with this name. Raises `PlanError` if there is none."""
        for role in self.roles:
            if role.name == name:
                return role
        raise PlanError(f"no role {name!r} in the dataflow{did_you_mean(name, [role.name for role in self.roles])}")

    @property
    def generator(self) -> Role:
        return next(role for role in self.roles if role.generates)

    @property
    def source(self) -> Role:
        """The role whose parameters are used to generate."""
        return self.role(self.generator.follows) if self.generator.follows else self.generator


def ppo(
    actor: ModelConfig,
    critic: ModelConfig | None = None,
    reward: ModelConfig | None = None,
    cost: ModelConfig | None = None,
    *,
    standalone: bool = False,
) -> tuple[Role, ...]:
    """Roles of PPO: actor, reference, and the given models.

    Without a critic these are the roles of GRPO and similar methods; with `cost` those of Safe-RLHF, whose cost has a
    critic like the reward's. `standalone`: a role `rollout` generates for the actor.
    """
    critic, reward, cost = (each and replace(each, scalar_head=True) for each in (critic, reward, cost))
    found = [Role(name="actor", model=actor, trains=True, generates=not standalone)]
    if standalone:
        found.append(Role(name="rollout", model=actor, generates=True, follows="actor"))
    found.append(Role(name="reference", model=actor, scores=True))
    if critic is not None:
        found.append(Role(name="critic", model=critic, scores=True, trains=True))
    if reward is not None:
        found.append(Role(name="reward", model=reward, scores=True))
    if cost is not None:
        found.append(Role(name="cost", model=cost, scores=True))
        if critic is not None:
            found.append(replace(found[-1], name="cost critic", model=critic, trains=True))
    return tuple(found)


def _check(role: Role, dataflow: Dataflow) -> None:
    if not (role.generates or role.scores or role.trains):
        raise PlanError(f"role {role.name!r} does nothing: it generates, scores or trains, so set one, or leave it out")
    if role.generates and has_scalar_head(role.model):
        raise PlanError(f"role {role.name!r} generates, so it cannot have a scalar head: give it the model without")
    if 0 < (most := longest_row(role.model)) < dataflow.sequence:
        raise ModelError(
            f"prompt and response have {dataflow.sequence} tokens, and the model of role {role.name!r} has "
            f"{most} positions: make them shorter"
        )
    if bool(role.follows) != (role.generates and not role.trains):
        rule = "needs `follows`, the role that trains its parameters" if role.generates else "follows nobody"
        raise PlanError(f"role {role.name!r} {rule}: set it so (follows = {role.follows!r})")
    if role.follows:
        other = dataflow.role(role.follows)
        if not other.trains or other.model != role.model:
            raise PlanError(
                f"role {role.name!r} follows {other.name!r}, which does not train a model like its own: name one that "
                "does"
            )


def names_of(roles: Sequence[Role]) -> str:
    return " + ".join(role.name for role in roles)
