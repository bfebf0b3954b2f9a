"""Checks of the section [balance] of a run against its model and plan."""

from collections.abc import Sequence

from terrace.base.errors import ModelError, PlanError
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
    """Raise `ModelError` for losses of routers that are not there.

    Raises `PlanError` for a loss that counts the tokens of a sequence where ranks share sequences.
    """
    if balance.losses and not has_routers(blocks):
        raise ModelError(
            f"balance.{balance.losses[0]} has no effect: no block of this model declares a router of experts; leave it "
            "out"
        )
    if balance.sequence and splits_sequences(mesh, plan):
        raise PlanError(
            f"balance.sequence = {balance.sequence} counts the choices of whole sequences, and under this plan ranks "
            'share them (a context axis, tensor rows, or balance = "cost"): give their tiers to the data axis, or use '
            "balance.z"
        )
