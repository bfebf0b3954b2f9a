"""Checks of the section [balance] of a run, and of the gates of its model, against the plan."""

import math
from collections.abc import Sequence

from terrace.base.errors import ModelError, PlanError
from terrace.model.config import DecoderBlock
from terrace.model.experts.balance import BalanceConfig
from terrace.model.spec import BlockSpec
from terrace.plan.context import is_context_parallel
from terrace.plan.dims import has_routers
from terrace.plan.mesh import Mesh
from terrace.plan.plan import Plan


def splits_sequences(mesh: Mesh, plan: Plan) -> bool:
    """Whether several ranks have tokens of one sequence where a router chooses."""
    return is_context_parallel(mesh, plan) or mesh.total("rows") > 1


def check_balance(balance: BalanceConfig, mesh: Mesh, plan: Plan, blocks: Sequence[BlockSpec]) -> None:
    """Raise `ModelError` for losses of routers that are not there, and for a bias that is not.

    Raises `PlanError` for a loss or a gate that goes by the tokens of a sequence where ranks share sequences, and for
    islands, whose counts and so whose biases would differ.
    """
    if balance.active and not has_routers(blocks):
        raise ModelError(
            f"balance.{balance.active[0]} has no effect: no block of this model declares a router of experts; leave it "
            "out"
        )
    if balance.bias and not any(param.is_moved for block in blocks for param in block.params):
        raise ModelError(
            f"balance.bias = {balance.bias} has no effect: no gate of this model has a bias, which the family glm4_moe "
            "has; leave it out, or use balance.sequence"
        )
    if balance.bias and plan.island is not None:
        raise PlanError(
            f"balance.bias = {balance.bias} counts the tokens of all ranks, and islands (plan.island = "
            f"{plan.island!r}) count their own: leave one of them out"
        )
    mixtures = {block.config.experts for block in blocks if isinstance(block, DecoderBlock) and block.config.experts}
    are_chosen = any(config.gate == "expert_choice" for config in mixtures)
    counting = [name for name in ("sequence", "capacity") if getattr(balance, name)]
    if counting and are_chosen:
        raise ModelError(
            f"balance.{counting[0]} has no effect with gate = 'expert_choice', whose experts have equal loads: leave "
            "it out"
        )
    if balance.bias and any(config.route == "even" for config in mixtures):
        raise ModelError(
            f"balance.bias = {balance.bias} has no effect with route = 'even', which looks at no score: leave one of "
            "them out"
        )
    # An expert gets a token at most once, so S choices of a sequence of S are all it can get.
    least = max((each.num_experts / each.per_token for each in mixtures), default=math.inf)
    if balance.capacity >= least:
        raise ModelError(
            f"balance.capacity = {balance.capacity} has no effect: an expert may then take every token of a sequence; "
            f"use a factor below {least:g}, the experts over those that a token passes, or leave it out"
        )
    if balance.capacity and any(config.route == "even" for config in mixtures):
        raise ModelError("balance.capacity drops choices, and route = 'even' measures with all: leave one of them out")
    wanted = [f"balance.{name} = {getattr(balance, name)}" for name in counting]
    wanted += ["gate = 'expert_choice'"] if are_chosen else []
    if wanted and splits_sequences(mesh, plan):
        raise PlanError(
            f"{wanted[0]} goes by the tokens of whole sequences, and under this plan ranks share them (a context axis, "
            'tensor rows, or balance = "cost"): give their tiers to the data axis'
        )
