"""Mask plans of a model's layers, and the selection of the attention kernel.

terrace.model.attention_kernel ranks the kernels for a device, dtype and shape. Whether one runs depends on torch's
version, the device and Triton as well: a kernel that refuses its first call leaves all further ones to the next in the
ranking, with a warning. If it was chosen by name (`choose_kernel`), that is an error.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from terrace.base.errors import ConfigError, ModelError, first_line
from terrace.model import attention
from terrace.model.attention import (
    NO_SINKS,
    Capped,
    Declared,
    MaskPieces,
    MaskPlan,
    PerLength,
    PerMicroBatch,
    PlannedAttention,
    document_begins,
    first_keys,
    on_host,
)
from terrace.model.attention_kernel import (
    AttentionCase,
    AttentionChoice,
    AttentionKernel,
    candidates,
    expected,
    refusal,
)
from terrace.model.config import ModelConfig
from terrace.model.fused_attention import BlockMasked, Documents
from terrace.model.sinks import attend

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
_WORDS = {
    "sdpa": "scaled_dot_product_attention of torch",
    "pieces": "scaled_dot_product_attention of torch, piece by piece",
    "varlen": "varlen attention of torch (flash attention 2)",
    "flex": "FlexAttention of torch, compiled",
}
_MASKED = "scaled_dot_product_attention of torch, under masks of whole rows"


class Queries(NamedTuple):
    """The properties of a query (B, N, S, D) on which a mask plan depends."""

    batch: int
    sequence: int
    head_dim: int
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def of(cls, query: Tensor) -> "Queries":
        """The properties of `query` (B, N, S, D)."""
        return cls(query.shape[0], query.shape[2], query.shape[3], query.device, query.dtype)


@dataclass
class Refusable:
    """The plan of a kernel that may not run here; if it raises, `instead` gives the plan that takes over."""

    plan: MaskPlan
    instead: Callable[[Exception], MaskPlan]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor = NO_SINKS) -> Tensor:
        """Attention output (B, N, S, D) of query over key and value (B, K, S, D), with `sinks` (N)."""
        try:
            return attend(query, key, value, self.plan, sinks)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # anything that a loader, a compiler or a kernel raises
            self.plan = self.instead(error)
            return attend(query, key, value, self.plan, sinks)


class AttentionPlans:
    """Mask plans, shared by all layers with the same window.

    `window` 0 and `cap` 0 mean none. `is_grouped`: several query heads share a key-value head. `choice` is the kernel,
    "auto" for the best one.
    """

    def __init__(
        self, window: int, *, is_grouped: bool = False, cap: float = 0.0, choice: AttentionChoice = "auto"
    ) -> None:
        self.window, self.is_grouped, self.cap, self.choice = window, is_grouped, cap, choice
        self._refused = set[AttentionKernel]()
        self._packed = PerMicroBatch()
        self._whole = PerLength()

    def plan(self, positions: Tensor | None, query: Tensor) -> MaskPlan:
        """Mask plan for query (B, N, S, D) and documents given by `positions` (B, S) int64.

        Raises `ModelError` for positions of another shape, `ConfigError` if the chosen kernel cannot serve.
        """
        batch, sequence = query.shape[0], query.shape[2]
        if positions is not None and positions.shape != (batch, sequence):
            raise ModelError(f"positions {tuple(positions.shape)} must be (batch, sequence) = {batch, sequence}")
        # No cache look-up on this path, so that torch.compile has no graph break.
        is_cut = positions is not None or 0 < self.window < sequence
        if not is_cut and expected(self._case(Queries.of(query), is_cut=False), self.choice) == "sdpa":
            return Capped(None, self.cap) if self.cap else None
        return self.made(positions, query)

    def made(self, positions: Tensor | None, query: Tensor) -> MaskPlan:
        queries = Queries.of(query)
        if positions is not None:
            return self._packed.get(positions, (queries, self.choice), lambda: self.build(positions, queries))
        return self._whole.made((queries, self.choice), lambda: self.build(None, queries))

    def build(self, positions: Tensor | None, queries: Queries) -> MaskPlan:
        is_windowed = 0 < self.window < queries.sequence
        is_cut = positions is not None or is_windowed
        kernel = self._kernel(queries, is_cut=is_cut)
        if positions is None:
            num_rows = queries.batch if kernel == "varlen" else 1
            begins = (torch.arange(queries.sequence) == 0).expand(num_rows, queries.sequence)
        elif kernel in ("varlen", "pieces"):
            begins = document_begins(on_host(positions))
            # If every row is one document, a faster kernel applies.
            if kernel == "varlen" and not is_windowed:
                is_cut = bool(begins[:, 1:].any())
        else:
            begins = document_begins(positions)
        return self._of_rows(begins, queries, is_cut=is_cut)

    def _of_rows(self, begins: Tensor, queries: Queries, *, is_cut: bool) -> MaskPlan:
        kernel = self._kernel(queries, is_cut=is_cut)
        plan = make_plan(kernel, begins, self.window, queries.device, queries.dtype, self.cap)
        if not isinstance(plan, (Documents, BlockMasked)):
            return plan

        # Holds no positions: the cache of plans lives as long as these.
        def instead(error: Exception) -> MaskPlan:
            self._refuse(kernel, queries, error)
            return self._of_rows(begins, queries, is_cut=is_cut)

        return Refusable(plan, instead)

    def _kernel(self, queries: Queries, *, is_cut: bool) -> AttentionKernel:
        ranked = kernels_for(self._case(queries, is_cut=is_cut), self.choice)
        return next(kernel for kernel in ranked if kernel not in self._refused)

    def _refuse(self, kernel: AttentionKernel, queries: Queries, error: Exception) -> None:
        if self.choice != "auto":
            raise _cannot_serve(self.choice, first_line(error)) from error
        if kernel not in self._refused:  # plans that were made before share one warning
            self._refused.add(kernel)
            where = f"{queries.device}, {queries.dtype}"
            warnings.warn(f"attention goes without {_WORDS[kernel]} ({where}): {first_line(error)}", stacklevel=4)

    def _case(self, queries: Queries, *, is_cut: bool) -> AttentionCase:
        return _case(queries.device, queries.dtype, queries.head_dim, self.is_grouped, is_cut, self.cap > 0)


def plans_of(config: ModelConfig) -> AttentionPlans:
    """Mask plans for one layer's configuration (`ModelConfig.of_layer`)."""
    is_grouped = config.num_kv_heads != config.num_heads
    return AttentionPlans(config.sliding_window, is_grouped=is_grouped, cap=config.scales.attention_cap)


class DeclaredAttention(PlannedAttention):
    """Attention of one layer of another library, between its projections; it has no parameters.

    Takes projected queries, keys and values to the outputs of the heads. The context axis replaces `plans`.
    """

    def __init__(self, window: int, is_grouped: bool) -> None:
        super().__init__()
        self.plans = AttentionPlans(window, is_grouped=is_grouped)
        self.window, self.is_running = window, False
        self._positions: Tensor | None = None

    @contextmanager
    def on(self, positions: Tensor | None) -> Iterator[None]:
        """Context in which the layer uses this module; `positions` (B, S) mark documents."""
        before = self.is_running, self._positions
        self.is_running, self._positions = True, positions
        try:
            yield
        finally:
            self.is_running, self._positions = before

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Attention output (B, N, S, D) of query (B, N, S, D) over keys and values (B, K, S, D).

        Raises `ModelError` if `scale` is given and is not 1 / sqrt(D).
        """
        size = query.shape[3]
        if scale is not None and abs(scale * size**0.5 - 1) > 1e-6:
            raise ModelError(
                f"the layer scales its scores by {scale:.6g}, and declared attention by 1 / sqrt({size}): leave the "
                "declaration out"
            )
        return attend(query, key, value, self.plans.plan(self._positions, query))


def make_plan(
    kernel: AttentionKernel, begins: Tensor, window: int, device: torch.device, dtype: torch.dtype, cap: float = 0.0
) -> MaskPieces | Tensor | Declared | None:
    """Mask plan of `kernel` for rows whose documents begin where `begins` (B, S) is true; `cap` 0: none.

    For varlen and pieces `begins` must be on the host. For sdpa and flex, B may be 1 if all rows are alike.
    """
    if cap and kernel != "flex":
        plan = make_plan(kernel, begins, window, device, dtype)
        assert plan is None or isinstance(plan, (Tensor, MaskPieces)), f"{kernel} cannot cap scores"
        return Capped(plan, cap)
    match kernel:
        case "varlen":
            return Documents.of(begins, window, device)
        case "flex":
            return BlockMasked.of(first_keys(begins.to(device), window), cap)
        case "pieces":
            # Through the module, so that a test can count the calls.
            return attention.cut(begins, window, dtype)
        case "sdpa":
            if begins.device.type == "cpu" and not (0 < window < begins.shape[1] or bool(begins[:, 1:].any())):
                return None
            return attention.whole_mask(begins.to(device), window, dtype)


def kernels_for(case: AttentionCase, choice: AttentionChoice = "auto") -> tuple[AttentionKernel, ...]:
    """Attention kernels for a case, fastest first; only `choice` unless that is "auto".

    Raises `ConfigError` if the chosen kernel does not support the case.
    """
    if choice == "auto":
        return candidates(case)
    if reason := refusal(choice, case):
        raise _cannot_serve(choice, reason)
    return (choice,)


def _cannot_serve(choice: AttentionChoice, reason: str) -> ConfigError:
    return ConfigError(f"train.attention = {choice!r} cannot serve: {reason}; leave train.attention out")


def _case(
    device: torch.device, dtype: torch.dtype, head_dim: int, is_grouped: bool, is_cut: bool, is_capped: bool
) -> AttentionCase:
    # This runs inside compiled blocks.
    name = _NAMES[dtype] if dtype in _NAMES else str(dtype)
    return AttentionCase(device.type, name, head_dim, is_grouped, is_cut, is_capped)


def choose_kernel(blocks: Iterable[nn.Module], choice: AttentionChoice) -> None:
    for block in blocks:
        for module in block.modules():
            plans = getattr(module, "plans", None)
            if isinstance(plans, AttentionPlans):
                plans.choice = choice


def describe(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    *,
    is_grouped: bool = False,
    is_cut: bool = False,
    is_capped: bool = False,
    choice: AttentionChoice = "auto",
) -> str:
    """Describe the attention kernel used on a device. Raises as `kernels_for` does."""
    kernel = kernels_for(_case(device, dtype, head_dim, is_grouped, is_cut, is_capped), choice)[0]
    if is_capped and kernel != "flex":
        pieces = ", piece by piece" if kernel == "pieces" and is_cut else ""
        return f"two products and a softmax of capped scores{pieces} ({device}, {str(dtype).removeprefix('torch.')})"
    words = _MASKED if kernel == "sdpa" and is_cut else _WORDS["sdpa" if not is_cut and kernel == "pieces" else kernel]
    return f"{words} ({device}, {str(dtype).removeprefix('torch.')})"
