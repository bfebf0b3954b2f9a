"""Rules of `compute = "fp16"`, whose loss is scaled (terrace.runtime.loss_scale)."""

from collections.abc import Sequence

from terrace.base.errors import PlanError
from terrace.model.spec import BlockSpec
from terrace.plan.plan import Plan
from terrace.plan.stack_rules import refuse_unscaled_losses


def check_fp16(plan: Plan, blocks: Sequence[BlockSpec]) -> None:
    """Raise `PlanError` for settings that do not work with loss scaling, or for fp16 messages without it."""
    if plan.compute != "fp16":
        for message, row in plan.wire.items():
            for tier, name in row.items():
                if name == "fp16":
                    raise PlanError(
                        f"wire.{message}.{tier} = 'fp16' under compute = {plan.compute!r}: gradients beyond 65504 "
                        "would be infinite; write 'bf16'"
                    )
        return
    asked = "compute = 'fp16'"
    if plan.master == "bf16":
        raise PlanError(
            f"{asked} with master = 'bf16', which is less precise: use master = 'fp32', or compute in 'bf16'"
        )
    if plan.messages is not None or plan.wire:
        named = f"messages = {plan.messages!r}" if plan.messages is not None else f"formats for {', '.join(plan.wire)}"
        raise PlanError(f"{asked} with {named}: what it computes travels in fp16 alone; leave them out, or use 'bf16'")
    if plan.outer.has_islands:
        raise PlanError(
            f"{asked} with islands: a step that is skipped is skipped by all ranks, and islands meet only now and "
            "then; leave outer out, or use 'bf16'"
        )
    refuse_unscaled_losses(asked, blocks)
