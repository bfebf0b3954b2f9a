"""Blocks through `torch.compile`, each by itself.

A block's parameters keep their storage while it is freed and gathered, so a compiled block reads the current values.
A compiled backward computes all weight gradients itself; otherwise the runtime records them and computes them when the
program says (terrace.runtime.linear). Therefore a program with a backward in two parts cannot be compiled, nor blocks
under a tensor axis, which overlaps its messages with weight gradients, nor layers that attend over several ranks, nor
mixtures of experts, whose products depend on how many tokens chose each.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from terrace.base.errors import ConfigError, PlanError
from terrace.model import attention
from terrace.model.attention_plans import AttentionPlans
from terrace.model.block_masks import BlockMasked
from terrace.model.documents import Documents
from terrace.plan.context import is_context_parallel
from terrace.plan.dims import is_router
from terrace.plan.recompute import operations_in
from terrace.program.instruction import Op
from terrace.program.program import Program


def check_compiles(programs: Sequence[Program]) -> None:
    """Raise `PlanError` for programs with blocks that cannot be compiled."""
    program = programs[0]
    if program.tensor.degree > 1:
        raise PlanError(
            "train.compile = true with a tensor axis: its blocks talk to other ranks in the middle of a layer, which a "
            "compiled block cannot; take the tensor axis out of the mapping, or leave train.compile out"
        )
    if is_context_parallel(program.mesh, program.plan):
        raise PlanError(
            'train.compile = true with a plan whose ranks attend together (a context axis, or balance = "cost"): a '
            "layer talks to other ranks in its middle, which a compiled block cannot; give the ranks to the data axis, "
            "or leave train.compile out"
        )
    mixture = next((block.name for block in program.blocks if any(map(is_router, block.params))), None)
    if mixture is not None:
        raise PlanError(
            f"train.compile = true with a mixture of experts ({mixture}): the rows of an expert are another number in "
            "every micro-batch, and a compiled block has fixed sizes; leave train.compile out"
        )
    if any(map(operations_in, program.recomputed)):
        raise PlanError(
            f"train.compile = true with recompute = {list(program.plan.recompute)}, which names operations of layers: "
            "a compiled block keeps what its compiler decides; recompute whole blocks, or leave train.compile out"
        )
    if any(instruction.op is Op.BACKWARD_INPUT for each in programs for instruction in each.instructions):
        raise PlanError(
            f"train.compile = true with schedule = {program.plan.schedule!r}, which runs a backward in two parts: a "
            "compiled block computes both at once; take '1f1b' or 'interleaved', or leave train.compile out"
        )


def check_compiler(device: torch.device) -> None:
    """Compile a small function; raises `ConfigError` with the reason where this machine cannot."""
    try:
        # A trial now: a missing compiler would otherwise show in the first step, on every rank.
        torch.compile(lambda x: x * 2 + 1)(torch.ones(8, device=device))
    except Exception as error:  # whatever a compiler, a linker or a missing header makes of it
        reason = str(error).strip().splitlines()
        raise ConfigError(
            f"train.compile = true, but torch.compile does not work here ({type(error).__name__}: "
            f"{reason[0] if reason else 'no reason given'}): install what it wants (a C++ compiler; on CUDA "
            "Triton), or leave train.compile out"
        ) from error


def compile_blocks(modules: Iterable[nn.Module], backend: str = "inductor") -> None:
    """Compile each block at its first run.

    Functions that depend on where documents begin stay uncompiled: every batch would compile them again.
    """
    plans = ((each, "attend") for each in (Documents, BlockMasked))
    made = ((attention.PerMicroBatch, "get"), (AttentionPlans, "made"))
    for owner, name in (*made, *plans, (attention, "attend_in_pieces")):
        function = getattr(owner, name)
        # Patched once per process; a second engine finds it done.
        if not hasattr(function, "_torchdynamo_disable"):
            setattr(owner, name, torch.compiler.disable(function))  # type: ignore[no-untyped-call]
    for module in modules:
        module.compile(backend=backend)
