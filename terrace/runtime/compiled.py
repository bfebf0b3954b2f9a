"""Blocks through `torch.compile`: whole blocks, or only the parts between matrix products.

**Whole blocks** where the plan allows it. A block's parameters keep their storage when they are freed and gathered,
so a compiled block reads current values. A compiled backward computes all weight gradients itself.

**Parts** everywhere else: norms, the product of a gated activation, rotary positions, and the gradient of a chunk of
logits. Matrix products, messages and attention stay eager. So weight gradients can be computed later, when the
program says (terrace.runtime.linear), a backward can run in two parts, ranks can communicate inside a layer, and
single operations can be recomputed. Parts that run as liger kernels (terrace.model.liger) are left alone.
"""

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from terrace.base.errors import ConfigError, TrainingError, first_line
from terrace.base.own_path import safe_flags
from terrace.launch.signals import ended_words
from terrace.model import attention, delta_net
from terrace.model.attention_plans import AttentionPlans, Refusable
from terrace.model.decoder import Head
from terrace.model.layers import MLP, Attention, RMSNorm
from terrace.model.liger import is_served
from terrace.model.rotary import Rotary
from terrace.plan.context import is_context_parallel
from terrace.plan.order_file import schedule_words
from terrace.plan.products import why_apart
from terrace.plan.recompute import operations_in
from terrace.program.instruction import Op
from terrace.program.program import Program
from terrace.program.routed import uneven_rows
from terrace.runtime.scores import MeasuredPlans, Scores

_COMPILER = ("torch._inductor", "torch._dynamo")
# As torch shows the call of a compiler of C++ that has failed.
_COMMAND, _OUTPUT = re.compile(r"^Command:\s*(\S+)", re.M), re.compile(r"^Output:\s*(\S.*)$", re.M)
_FIX = "install its compiler (C++ with linker and OpenMP, CXX names one; on CUDA Triton)"


def why_parts(programs: Sequence[Program], has_kernels: bool = False) -> str:
    """Why blocks of these programs are compiled in parts; empty if whole blocks can be.

    `has_kernels` says that some of their parts run as liger kernels.
    """
    program = programs[0]
    if has_kernels:
        return "other parts have kernels of liger-kernel"
    if program.model.tensor.degree > 1:
        return "with a tensor axis blocks talk to other ranks in the middle of a layer"
    if is_context_parallel(program.mesh, program.plan):
        return "ranks attend together, so that layers talk to other ranks in their middle"
    if why := why_apart(program.plan) or uneven_rows(program.blocks):
        return why
    if any(map(operations_in, program.model.recomputed)):
        return f"recompute = {list(program.plan.recompute)} names operations of layers"
    if any(instruction.op is Op.BACKWARD_INPUT for each in programs for instruction in each.instructions):
        return f"schedule = {schedule_words(program.plan.schedule)} runs a backward in two parts"
    return ""


def compiles_words(programs: Sequence[Program], has_kernels: bool = False) -> str:
    """One line for the user: whether blocks are compiled whole or in parts, and why. Arguments as for `why_parts`."""
    why = why_parts(programs, has_kernels)
    return f"torch.compile: the parts between products, since {why}" if why else "torch.compile: whole blocks"


def check_compiler(device: torch.device) -> None:
    """Compile a small function. Raises `ConfigError` with the reason if that fails."""
    try:
        # A trial now: a missing compiler would otherwise show in the first step, on every rank.
        if device.type == "cpu":
            torch.compile(lambda x: x * 2 + 1)(torch.ones(8))
        else:
            # In another process: this one, which starts the ranks, would keep memory of the device.
            trial = f"import torch; torch.compile(lambda x: x * 2 + 1)(torch.ones(8, device={device.type!r}))"
            subprocess.run([sys.executable, *safe_flags(), "-c", trial], capture_output=True, text=True, check=True)
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or [f"the trial {ended_words(error.returncode)}"])[-1]
        raise _no_compiler(last) from error
    except Exception as error:  # whatever a compiler, a linker or a missing header makes of it
        raise _no_compiler(reason_of(error)) from error


def _no_compiler(why: str) -> ConfigError:
    return ConfigError(
        f"train.compile = true, but torch.compile does not work here ({why}): {_FIX}, or give --train.compile false"
    )


def reason_of(error: BaseException) -> str:
    """Why torch.compile failed, in one line: the compiler and the first line that it or its linker printed."""
    text = str(error).strip()
    command, output = (found[1] if (found := each.search(text)) else "" for each in (_COMMAND, _OUTPUT))
    if command and output:
        return f"{command} printed: {output}"
    return first_line(error)


@contextmanager
def compiler_named() -> Iterator[None]:
    """Turns an error of torch.compile into a one-line `TrainingError`.

    `check_compiler` may have hit torch's cache, so a broken compiler may first show in the first step.
    """
    try:
        yield
    except Exception as error:
        found: BaseException | None = error
        while found is not None and not type(found).__module__.startswith(_COMPILER):
            found = found.__cause__
        if found is None:
            raise
        raise TrainingError(
            f"torch.compile failed in a step ({reason_of(found)}): {_FIX}, or give --train.compile false"
        ) from error


def compile_blocks(modules: Iterable[nn.Module], backend: str = "inductor") -> None:
    """Compile each block at its first call.

    Functions that depend on document boundaries stay eager: they would be recompiled for every batch.
    """
    made: tuple[tuple[object, str], ...] = ((attention.PerMicroBatch, "get"), (AttentionPlans, "made"))
    made = (*made, (Refusable, "attend"), (attention, "attend_in_pieces"), (delta_net, "gated_delta_rule"))
    made = (*made, (MeasuredPlans, "first"), (Scores, "add_rows"))
    for owner, name in made:
        function = getattr(owner, name)
        # Patched once per process; a second engine finds it done.
        if not hasattr(function, "_torchdynamo_disable"):
            setattr(owner, name, torch.compiler.disable(function))  # type: ignore[no-untyped-call]
    for module in modules:
        if isinstance(module, Head):
            compile_parts([module], backend)  # a step takes its logits a chunk at a time, not by its forward
        else:
            module.compile(backend=backend)


def compile_parts(modules: Iterable[nn.Module], backend: str = "inductor") -> int:
    """Compile the parts of blocks of `terrace.model`, each at its first call. Returns the number of parts."""
    number = 0
    for each in (each for module in modules for each in module.modules()):
        if isinstance(each, (RMSNorm, nn.LayerNorm)) and not is_served(each, "normal"):
            each.compile(backend=backend)
        elif isinstance(each, MLP) and each.gate is not None and not is_served(each, "_gated"):
            _fuse(each, "_gated", backend)
        elif isinstance(each, Head) and not is_served(each, "to_gradient"):
            _fuse(each, "to_gradient", backend)
        elif isinstance(each, Attention) and isinstance(each.rotary, Rotary):
            if is_served(each.rotary, "rotate_both"):
                continue
            _fuse(each.rotary, "rotate", backend)  # one object serves all layers
        else:
            continue
        number += 1
    return number


def _fuse(owner: object, name: str, backend: str) -> None:
    # On the object, so that those of other engines in this process stay as they are.
    if name not in vars(owner) or not hasattr(vars(owner)[name], "_torchdynamo_orig_callable"):
        object.__setattr__(owner, name, torch.compile(getattr(owner, name), backend=backend))
