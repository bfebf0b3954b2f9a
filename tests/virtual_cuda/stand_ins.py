"""Parts of torch and of this project that exist only on CUDA, and their definitions that stand in for them."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch

from terrace.comm import codecs, groups
from terrace.model import fused_attention
from terrace.runtime import scaled_products
from terrace.train import prepare
from tests.virtual_cuda import kernels
from tests.virtual_cuda.functions import Patch


def stand_ins() -> Iterator[Patch]:
    """What is replaced."""
    # Kernels of Triton have tests of their own, in its interpreter.
    yield codecs, "_has_triton", lambda: False
    # Nothing is compiled.
    yield torch, "compile", uncompiled
    yield torch.nn.Module, "compile", lambda self, **options: None
    yield prepare, "check_compiler", lambda device: None
    # The CPU has two kernels, none of which has the names of CUDA's.
    yield torch.nn.attention, "sdpa_kernel", lambda kernels, **options: nullcontext()
    # What is kept would be uncompiled later.
    yield fused_attention, "_flex_kernel", fused_attention._flex_kernel.__wrapped__
    yield scaled_products, "_compiled", scaled_products._compiled.__wrapped__
    # Groups of this device are communicators, those made before are not.
    yield groups, "_made", WeakKeyDictionary()


def uncompiled(model: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`torch.compile`: the function as it is, and FlexAttention, which exists only compiled, by its definition."""
    if model is None:
        return uncompiled
    return kernels.flex if getattr(model, "__name__", "") == "flex_attention" else model
