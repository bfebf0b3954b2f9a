"""The plan: where every state lives, on which tier every axis runs, in which format messages travel."""

from terrace.plan.layout import Layout
from terrace.plan.plan import AXES, Plan
from terrace.plan.presets import PRESETS, parse_plan, preset
from terrace.plan.traffic import step_bytes
from terrace.plan.validate import num_micro_batches, validate
from terrace.plan.wire import MessageClass

__all__ = [
    "AXES",
    "PRESETS",
    "Layout",
    "MessageClass",
    "Plan",
    "num_micro_batches",
    "parse_plan",
    "preset",
    "step_bytes",
    "validate",
]
