"""Rules of `plan.recompute`: each entry must name blocks or operations that can be recomputed separately."""

import fnmatch
from collections.abc import Sequence

from terrace.base.errors import PlanError, did_you_mean
from terrace.model.spec import BlockSpec
from terrace.plan.context import is_context_parallel
from terrace.plan.mesh import Mesh
from terrace.plan.plan import Plan
from terrace.plan.recompute import WHOLE, Recomputation, operations_named, parse_recomputation, recomputed_parts


def check_recompute(mesh: Mesh, plan: Plan, blocks: Sequence[BlockSpec]) -> None:
    """Raise `PlanError` for an entry that matches nothing, or an operation that cannot be recomputed separately."""
    names = [block.name for block in blocks]
    for entry in plan.recompute:
        _check_names(entry, parse_recomputation(entry), names, blocks)
    parts = recomputed_parts(plan.recompute, blocks)
    named = {operation for each in parts if each != WHOLE for operation in each}
    if "attention" in named and is_context_parallel(mesh, plan):
        raise PlanError(
            "recompute names attention, and this plan's ranks attend together (a context axis, or balance = 'cost'): "
            "its messages would be sent again; recompute whole layers, or leave attention out"
        )
    if "norms" in named and mesh.total("tensor") > 1:
        raise PlanError(
            "recompute names norms under a tensor axis, whose ranks gather what norms compute: recompute attention, "
            "mlp or whole layers"
        )
    if named and plan.tensor_chunks != 1:
        raise PlanError(
            f"recompute names {', '.join(sorted(named))} with tensor_chunks = {plan.tensor_chunks!r}, which pads and "
            "keeps the parts of their results: leave tensor_chunks out, or recompute whole layers"
        )
    for block, each in zip(blocks, parts, strict=True):
        if "norms" in each and block.declared.each and not operations_named(block.declared, "norms"):
            raise PlanError(
                f"recompute names norms of {block.name}, which has none before attention and MLP: recompute attention, "
                "mlp or the whole layer"
            )
        if block.has_stacks and {"mlp", "norms"} & {*each}:
            raise PlanError(
                f"recompute names {', '.join({'mlp', 'norms'} & {*each})} of {block.name}, a mixture of experts, which "
                "keeps what its gate and experts read: recompute its attention, or the whole layer"
            )


def _check_names(entry: str, read: Recomputation, names: Sequence[str], blocks: Sequence[BlockSpec]) -> None:
    if not fnmatch.filter(names, read.pattern):
        raise PlanError(f"recompute pattern {read.pattern!r} matches no block{_meant(read.pattern, names)}")
    if not read.selects(names, [block.attends for block in blocks]):
        raise PlanError(
            f"recompute {entry!r}: no decoder layer matches {read.pattern!r}, and no other block has operations; leave "
            f"{', '.join(read.operations)} out"
        )


def _meant(pattern: str, names: Sequence[str]) -> str:
    # Layers are many and alike, so one pattern stands for all of them.
    kinds = [name.rpartition(".")[0] for name in names]
    known = dict.fromkeys(f"{kind}.*" if kind else name for kind, name in zip(kinds, names, strict=True))
    return did_you_mean(pattern, known)
