"""Mask plans of a model's layers, and the selection of the attention kernel.

terrace.model.attention_kernel ranks the kernels for a device, dtype and shape. Which of them work depends on torch's
version, the device and Triton, so each is tested once against the reference on a few tokens, forward and backward. If
it fails, a warning names the reason and the next kernel is used; if it was chosen by name (`choose_kernel`), that is an
error.
"""

import warnings
from collections.abc import Iterable
from functools import cache, partial

import torch
from torch import Tensor, nn

from terrace.base.errors import ConfigError, ModelError, first_line
from terrace.model import attention
from terrace.model.attention import (
    Capped,
    MaskPieces,
    MaskPlan,
    PerLength,
    PerMicroBatch,
    attend,
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
from terrace.model.block_masks import BlockMasked
from terrace.model.config import ModelConfig
from terrace.model.documents import Documents

_TRIED_CAP = 2.0  # small enough to affect the scores of the trial
# Relative to the largest element. Half precision has 8 or 11 significant bits.
_TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 1e-4}
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
_WORDS = {
    "sdpa": "scaled_dot_product_attention of torch",
    "pieces": "scaled_dot_product_attention of torch, piece by piece",
    "varlen": "varlen attention of torch (flash attention 2)",
    "flex": "FlexAttention of torch, compiled",
}
_MASKED = "scaled_dot_product_attention of torch, under masks of whole rows"


class AttentionPlans:
    """Mask plans, shared by all layers with the same window.

    `window` 0 and `cap` 0 mean none. `is_grouped`: several query heads share a key-value head. `choice` is the kernel,
    "auto" for the best one.
    """

    def __init__(
        self, window: int, *, is_grouped: bool = False, cap: float = 0.0, choice: AttentionChoice = "auto"
    ) -> None:
        self.window, self.is_grouped, self.cap, self.choice = window, is_grouped, cap, choice
        self._packed = PerMicroBatch()
        self._whole = PerLength()

    def plan(self, positions: Tensor | None, query: Tensor) -> MaskPlan:
        """Mask plan for query (B, N, S, D) and documents given by `positions` (B, S) int64.

        Raises `ModelError` for positions of another shape, `ConfigError` if the chosen kernel does not work.
        """
        batch, sequence = query.shape[0], query.shape[2]
        if positions is not None and positions.shape != (batch, sequence):
            raise ModelError(f"positions {tuple(positions.shape)} must be (batch, sequence) = {batch, sequence}")
        # No cache look-up on this path, so that torch.compile has no graph break.
        is_cut = positions is not None or 0 < self.window < sequence
        if not is_cut and expected(self._case(query, is_cut=False), self.choice) == "sdpa":
            return Capped(None, self.cap) if self.cap else None
        return self.made(positions, query)

    def made(self, positions: Tensor | None, query: Tensor) -> MaskPlan:
        """The plan, from the cache or newly built."""
        key = (*query.shape[:1], *query.shape[2:], query.device, query.dtype, self.choice)
        if positions is not None:
            return self._packed.get(positions, key, lambda: self._of(positions, query))
        return self._whole.made(key, lambda: self._of(None, query))

    def _of(self, positions: Tensor | None, query: Tensor) -> MaskPlan:
        batch, sequence, device = query.shape[0], query.shape[2], query.device
        is_windowed = 0 < self.window < sequence
        serves = partial(self.kernel, device, query.dtype, query.shape[3])
        kernel = serves(is_cut=positions is not None or is_windowed)
        if positions is None:
            begins = (torch.arange(sequence) == 0).expand(1 if kernel != "varlen" else batch, sequence)
        elif kernel in ("varlen", "pieces"):
            begins = document_begins(on_host(positions))
            # If every row is one document, a faster kernel applies.
            if kernel == "varlen" and not is_windowed and not bool(begins[:, 1:].any()):
                kernel = serves(is_cut=False)
        else:
            begins = document_begins(positions)
        return make_plan(kernel, begins, self.window, device, query.dtype, self.cap)

    def kernel(self, device: torch.device, dtype: torch.dtype, head_dim: int, *, is_cut: bool) -> AttentionKernel:
        """The kernel used; raises as `kernel_for` does."""
        return kernel_for(device, dtype, head_dim, self.is_grouped, is_cut, self.choice, self.cap > 0)

    def _case(self, query: Tensor, *, is_cut: bool) -> AttentionCase:
        return _case(query.device, query.dtype, query.shape[3], self.is_grouped, is_cut, self.cap > 0)


def plans_of(config: ModelConfig) -> AttentionPlans:
    """Mask plans for one layer's configuration (`ModelConfig.of_layer`)."""
    is_grouped = config.num_kv_heads != config.num_heads
    return AttentionPlans(config.sliding_window, is_grouped=is_grouped, cap=config.scales.attention_cap)


def make_plan(
    kernel: AttentionKernel,
    begins: Tensor,
    window: int,
    device: torch.device,
    dtype: torch.dtype,
    cap: float = 0.0,
) -> MaskPlan:
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


@cache
def kernel_for(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    is_grouped: bool,
    is_cut: bool,
    choice: AttentionChoice = "auto",
    is_capped: bool = False,
) -> AttentionKernel:
    """Select the attention kernel; each is tested once.

    Raises `ConfigError` if a kernel that was chosen by name does not work. Warns if a better one fails its trial.
    """
    case = _case(device, dtype, head_dim, is_grouped, is_cut, is_capped)
    if choice != "auto":
        reason = refusal(choice, case) or problem(choice, device, dtype, head_dim, is_capped)
        if reason:
            raise ConfigError(f"train.attention = {choice!r} cannot serve: {reason}; leave train.attention out")
        return choice
    for kernel in candidates(case):
        reason = problem(kernel, device, dtype, head_dim, is_capped)
        if not reason:
            return kernel
        warnings.warn(f"attention goes without {_WORDS[kernel]} ({device}, {dtype}): {reason}", stacklevel=2)
    raise AssertionError("sdpa and pieces are not tried")


def _case(
    device: torch.device, dtype: torch.dtype, head_dim: int, is_grouped: bool, is_cut: bool, is_capped: bool
) -> AttentionCase:
    # This runs inside compiled blocks.
    name = _NAMES[dtype] if dtype in _NAMES else str(dtype)
    return AttentionCase(device.type, name, head_dim, is_grouped, is_cut, is_capped)


@cache
def problem(
    kernel: AttentionKernel, device: torch.device, dtype: torch.dtype, head_dim: int, is_capped: bool = False
) -> str:
    """Why a kernel does not work on a device, or "". Runs it on a few documents, forward and backward."""
    if kernel in ("sdpa", "pieces"):
        return ""
    try:
        with torch.enable_grad(), torch.inference_mode(False):
            return disagreement(kernel, device, dtype, head_dim, _TRIED_CAP if is_capped else 0.0)
    except Exception as error:  # anything that a loader, a compiler or a kernel raises
        return first_line(error)


def disagreement(
    kernel: AttentionKernel, device: torch.device, dtype: torch.dtype, head_dim: int, cap: float = 0.0
) -> str:
    """Compare a kernel with masked attention in fp64, with and without a window, for three documents, one of one token.

    Returns a description of the first difference, or "".
    """
    generator = torch.Generator().manual_seed(0)

    def normal(heads: int) -> Tensor:
        return torch.randn(1, 200, heads, head_dim, generator=generator).to(device, dtype).transpose(1, 2)

    query, key, value, grad = normal(4), normal(2), normal(2), normal(4)
    begins = torch.zeros(1, 200, dtype=torch.bool)
    begins[0, [0, 150, 151]] = True
    for window in (0, 20):
        found = _results((query, key, value), grad, make_plan(kernel, begins, window, device, dtype, cap))
        mask: MaskPlan = attention.whole_mask(begins.to(device), window, torch.float64)
        if cap:
            assert isinstance(mask, Tensor), "the mask of whole rows is a tensor"
            mask = Capped(mask, cap)
        wanted = _results(tuple(each.double() for each in (query, key, value)), grad.double(), mask)
        for name, one, other in zip(("output", "dq", "dk", "dv"), found, wanted, strict=True):
            if not (one.double() - other).abs().max() <= _TOLERANCE.get(dtype, 1e-10) * other.abs().max():
                return f"it differs from the reference ({name}, window {window})"
    return ""


def _results(inputs: tuple[Tensor, ...], grad: Tensor, plan: MaskPlan) -> tuple[Tensor, ...]:
    leaves = [each.detach().requires_grad_() for each in inputs]
    output = attend(leaves[0], leaves[1], leaves[2], plan)
    return (output, *torch.autograd.grad(output, leaves, grad))


def choose_kernel(blocks: Iterable[nn.Module], choice: AttentionChoice) -> None:
    """Set the attention kernel of all layers in `blocks`."""
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
    """Describe the attention kernel used on a device. Raises as `kernel_for` does."""
    kernel = kernel_for(device, dtype, head_dim, is_grouped, is_cut, choice, is_capped)
    if is_capped and kernel != "flex":
        pieces = ", piece by piece" if kernel == "pieces" and is_cut else ""
        return f"two products and a softmax of capped scores{pieces} ({device}, {str(dtype).removeprefix('torch.')})"
    words = _MASKED if kernel == "sdpa" and is_cut else _WORDS["sdpa" if not is_cut and kernel == "pieces" else kernel]
    return f"{words} ({device}, {str(dtype).removeprefix('torch.')})"
