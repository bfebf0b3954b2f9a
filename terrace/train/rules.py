"""Rules across the sections of a run that need no plan of their own. Pure: needs no torch."""

import fnmatch
from collections.abc import Sequence
from typing import TYPE_CHECKING

from terrace.base.errors import ConfigError
from terrace.model.attention_kernel import AttentionCase, refusal
from terrace.model.block_operations import layer_operations
from terrace.model.facts import layer_windows, rope_limit
from terrace.model.part_kernel import PARTS, Part, PartsCase, left_to_torch
from terrace.model.part_kernel import refusal as parts_refusal
from terrace.model.spec import BlockSpec
from terrace.plan.context import is_context_parallel
from terrace.plan.mesh import Mesh

if TYPE_CHECKING:
    from terrace.train.config import RunConfig


def attention_case(run: "RunConfig", backend: str) -> AttentionCase:
    """Inputs of attention in the layers of a run on devices of a type."""
    core = layer_operations(run.model).core
    is_cut = run.has_documents or any(0 < window < run.train.sequence for window in layer_windows(run.model))
    return AttentionCase(backend, run.plan.compute, core.head_dim, core.is_grouped, is_cut, core.cap > 0)


def check_positions(run: "RunConfig") -> None:
    """Raise `ConfigError` for rows whose RoPE depends on the longest row of the batch, where no rank knows that."""
    limit, sequence = rope_limit(run.model), run.train.sequence
    if not 0 < limit < sequence:
        return
    spread = is_context_parallel(Mesh.of(run.cluster, run.plan), run.plan)
    if run.has_documents or spread:
        why = "a context axis divides rows" if spread else "rows hold several documents"
        raise ConfigError(
            f"train.sequence = {sequence}: beyond {limit} positions this model's RoPE depends on the longest row, "
            f"which no rank knows, since {why}: use at most {limit}, or whole rows of one document"
        )


def check_attention(run: "RunConfig") -> None:
    """Raise `ConfigError` for a kernel of attention that the run's devices, dtype or plan do not allow."""
    choice = run.train.attention
    if choice == "auto":
        return
    if is_context_parallel(Mesh.of(run.cluster, run.plan), run.plan):
        raise ConfigError(
            f"train.attention = {choice!r} has no effect where ranks attend together (a context axis, or balance = "
            '"cost"), with kernels of their own: leave train.attention out'
        )
    if reason := refusal(choice, attention_case(run, run.cluster.device.backend)):
        raise ConfigError(f"train.attention = {choice!r} cannot serve: {reason}; leave train.attention out")


def parts_case(run: "RunConfig", backend: str) -> PartsCase:
    """Facts of a run that decide which kernels can run the parts of its blocks between products."""
    mesh = Mesh.of(run.cluster, run.plan)
    return PartsCase(
        run.model, backend, run.plan.compute, mesh.total("rows"), mesh.total("columns"), run.train.objective
    )


def check_kernels(run: "RunConfig") -> None:
    """Raise `ConfigError` for `train.kernels` that the run's devices, dtype or model do not allow."""
    if run.train.kernels == "torch":
        return
    if reason := parts_refusal(parts_case(run, run.cluster.device.backend)):
        raise ConfigError(f"train.kernels = {run.train.kernels!r} cannot serve: {reason}; leave train.kernels out")


def parts_of(run: "RunConfig") -> list[Part]:
    """The parts of a run's blocks that run in kernels of liger-kernel."""
    if run.train.kernels == "torch":
        return []
    left = left_to_torch(parts_case(run, run.cluster.device.backend))
    return [part for part in PARTS if part not in left]


def parts_words(run: "RunConfig") -> str:
    """A line with the parts that run in kernels of liger-kernel, and the others with the reason; "" without them."""
    if run.train.kernels == "torch":
        return ""
    left = left_to_torch(parts_case(run, run.cluster.device.backend))
    served = ", ".join(parts_of(run))
    others = "".join(f"; {part} by torch: {reason}" for part, reason in left.items())
    return f"kernels of liger-kernel: {served}{others}"


def check_moved(run: "RunConfig", blocks: Sequence[BlockSpec]) -> None:
    """Raise `ConfigError` where a moved bias of a router belongs to parameters that the run does not train."""
    if run.lora is not None:
        raise ConfigError(
            "balance.bias moves a bias of the base model, and [lora] leaves the base as it is: leave one of them out"
        )
    moved = [f"{block.name}.{param.name}" for block in blocks for param in block.params if param.is_moved]
    for pattern in run.train.freeze:
        if found := fnmatch.filter(moved, pattern):
            raise ConfigError(
                f"balance.bias moves {found[0]}, and train.freeze pattern {pattern!r} names it: leave balance.bias "
                "out, or freeze other parameters"
            )
