"""Checks of a run's [balance] section and of its model's gates against the plan."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

from terrace.base.errors import ModelError, PlanError
from terrace.model.balance import BalanceConfig
from terrace.model.experts.config import ExpertsConfig
from terrace.model.operations import Mixture, Operations
from terrace.model.spec import BlockSpec
from terrace.plan.context import is_context_parallel
from terrace.plan.counts import experts_of
from terrace.plan.dims import has_routers
from terrace.plan.mesh import Mesh
from terrace.plan.plan import Plan

_BY_COUNTS = ("step", "bias")  # options that use each expert's token count over a whole step


def splits_sequences(mesh: Mesh, plan: Plan) -> bool:
    """Whether the tokens of one sequence are on several ranks at the router."""
    return is_context_parallel(mesh, plan) or mesh.total("rows") > 1


def check_balance(balance: BalanceConfig, mesh: Mesh, plan: Plan, blocks: Sequence[BlockSpec]) -> None:
    """Check balance losses and the gate bias.

    Raises `ModelError` if the model has no router or bias for them, or if they have no effect. Raises `PlanError` for a
    per-sequence loss or gate if ranks share sequences, and for step counts under islands: every island would count
    its own tokens, so biases and losses would diverge.
    """
    if balance.active and not has_routers(blocks):
        raise ModelError(
            f"balance.{balance.active[0]} has no effect: no block of this model declares a router of experts; leave it "
            "out"
        )
    if balance.bias and not any(param.is_expert_bias for block in blocks for param in block.params):
        raise ModelError(
            f"balance.bias = {balance.bias} has no effect: no gate of this model has a bias, which the family glm4_moe "
            "has; leave it out, or use balance.sequence"
        )
    uncounted = [block.name for block in blocks if has_routers([block]) and experts_of(block) is None]
    if balance.step and uncounted:
        raise ModelError(
            f"balance.step = {balance.step} goes by the tokens of each expert, and those of block {uncounted[0]!r} are "
            "not counted: declare it as a block of terrace.model.config, or use balance.sequence"
        )
    if balance.sequence and uncounted and splits_sequences(mesh, plan):
        raise PlanError(
            f"balance.sequence = {balance.sequence} goes by the choices of whole sequences, which ranks share under "
            f"this plan, and those of block {uncounted[0]!r} are not counted: declare it as a block of "
            "terrace.model.config, or give the tiers of context and tensor rows to the data axis"
        )
    for name in _BY_COUNTS:
        if getattr(balance, name) and plan.outer.has_islands:
            raise PlanError(
                f"balance.{name} = {getattr(balance, name)} counts the tokens of all ranks, and islands (outer.tier = "
                f"{plan.outer.tier!r}) count their own: leave one of them out"
            )
    mixtures = {block.declared.mixture.experts for block in blocks if block.declared.mixture.each}
    _check_effects(balance, mixtures)
    wanted = [f"balance.capacity = {balance.capacity}"] if balance.capacity else []
    wanted += ["gate = 'expert_choice'"] if any(config.is_noncausal for config in mixtures) else []
    if balance.sequence and plan.balance == "cost":
        raise PlanError(
            f'balance.sequence = {balance.sequence} goes by the choices of whole sequences, and plan.balance = "cost" '
            'deals their documents out to ranks of any data rank: write balance = "tokens", or use balance.step'
        )
    if wanted and splits_sequences(mesh, plan):
        raise PlanError(
            f"{wanted[0]} goes by the tokens of whole sequences, and under this plan ranks share them (a context axis, "
            'tensor rows, or balance = "cost"): give their tiers to the data axis'
        )


def with_exchanged_choices(balance: BalanceConfig | None, blocks: Iterable[BlockSpec]) -> tuple[BlockSpec, ...]:
    """`blocks`, marked to exchange router choices between ranks that share sequences if the sequence loss is on."""
    if balance is None or not balance.sequence > 0:
        return tuple(blocks)
    return tuple(
        block if experts_of(block) is None else replace(block, declared=_sharing_choices(block.declared))
        for block in blocks
    )


@lru_cache(maxsize=256)
def _sharing_choices(operations: Operations) -> Operations:
    # Cached, so that equal layers keep sharing one object.
    each = (
        replace(operation, experts=replace(operation.experts, shares_choices=True))
        if isinstance(operation, Mixture)
        else operation
        for operation in operations
    )
    return Operations(tuple(each))


def _check_effects(balance: BalanceConfig, mixtures: set[ExpertsConfig]) -> None:
    evened = [name for name in ("sequence", "step", "capacity") if getattr(balance, name)]
    if evened and any(config.is_noncausal for config in mixtures):
        raise ModelError(
            f"balance.{evened[0]} has no effect with gate = 'expert_choice', whose experts have equal loads: leave "
            "it out"
        )
    is_even = any(config.route == "even" for config in mixtures)
    for name in _BY_COUNTS:
        if getattr(balance, name) and is_even:
            raise ModelError(
                f"balance.{name} = {getattr(balance, name)} has no effect with route = 'even', whose loads are equal: "
                "leave one of them out"
            )
    if balance.step and balance.capacity:
        raise ModelError(
            f"balance.step = {balance.step} goes by the tokens that experts took, and balance.capacity = "
            f"{balance.capacity} bounds these: leave one of them out, or use balance.sequence, which counts all choices"
        )
    # An expert gets a token at most once, so at most S choices from a sequence of S tokens.
    least = max((each.num_experts / each.per_token for each in mixtures), default=math.inf)
    if balance.capacity >= least:
        raise ModelError(
            f"balance.capacity = {balance.capacity} has no effect: an expert may then take every token of a sequence; "
            f"use a factor below {least:g}, the experts over those that a token passes, or leave it out"
        )
    if balance.capacity and is_even:
        raise ModelError("balance.capacity drops choices, and route = 'even' measures with all: leave one of them out")
