"""The mask plans of a model's layers, by the kernel that serves: one dispatcher, with a trial of each kernel.

terrace.model.attention_kernel says which kernel is best for a device, a dtype and rows. Here it is tried, once, on a
few tokens, forward and backward against the reference, before it is trusted: kernels of torch come and go with its
version, with the device and with Triton. Where it fails, a warning names the reason and the next one serves. If it was
chosen by name (`choose_kernel`), that is an error instead.
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

_TRIED_CAP = 2.0  # within the scores of the trial, so that it shows
# Of the largest element: the error of kernels in half precision, whose products keep 8 or 11 bits.
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
    """The mask plans of a model, shared by its layers.

    A `window` of 0 means none, as does a `cap` of scores of 0; `is_grouped`: several query heads share a key-value
    head. `choice` is the kernel that serves, "auto" for the best one.
    """

    def __init__(
        self, window: int, *, is_grouped: bool = False, cap: float = 0.0, choice: AttentionChoice = "auto"
    ) -> None:
        self.window, self.is_grouped, self.cap, self.choice = window, is_grouped, cap, choice
        self._packed = PerMicroBatch()
        self._whole = PerLength()

    def plan(self, positions: Tensor | None, query: Tensor) -> MaskPlan:
        """The mask plan for query (B, N, S, D), with documents marked by `positions` (B, S) int64.

        Raises `ModelError` for positions of another shape, `ConfigError` where the chosen kernel cannot serve.
        """
        batch, sequence = query.shape[0], query.shape[2]
        if positions is not None and positions.shape != (batch, sequence):
            raise ModelError(f"positions {tuple(positions.shape)} must be (batch, sequence) = {batch, sequence}")
        # Nothing is looked up here, so a compiled block has no break in its graph.
        is_cut = positions is not None or 0 < self.window < sequence
        if not is_cut and expected(self._case(query, is_cut=False), self.choice) == "sdpa":
            return Capped(None, self.cap) if self.cap else None
        return self.made(positions, query)

    def made(self, positions: Tensor | None, query: Tensor) -> MaskPlan:
        """The plan, made where it is not known yet."""
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
            # Rows that turn out to be whole have a faster kernel.
            if kernel == "varlen" and not is_windowed and not bool(begins[:, 1:].any()):
                kernel = serves(is_cut=False)
        else:
            begins = document_begins(positions)
        return make_plan(kernel, begins, self.window, device, query.dtype, self.cap)

    def kernel(self, device: torch.device, dtype: torch.dtype, head_dim: int, *, is_cut: bool) -> AttentionKernel:
        """The kernel that serves; raises as `kernel_for` does."""
        return kernel_for(device, dtype, head_dim, self.is_grouped, is_cut, self.choice, self.cap > 0)

    def _case(self, query: Tensor, *, is_cut: bool) -> AttentionCase:
        return _case(query.device, query.dtype, query.shape[3], self.is_grouped, is_cut, self.cap > 0)


def plans_of(config: ModelConfig) -> AttentionPlans:
    """The mask plans of a model's layers, which attend alike (`ModelConfig.of_layer`)."""
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
    """The plan of a kernel for rows in which documents begin where `begins` (B, S) is true, with a `cap` of scores.

    For varlen and pieces `begins` is on the host; where rows are alike the others take one row.
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
    """The kernel that serves attention; tried once.

    Raises `ConfigError` where a kernel that is chosen by name cannot serve. Warns where the best one fails its trial.
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
    # A compiled block passes here.
    name = _NAMES[dtype] if dtype in _NAMES else str(dtype)
    return AttentionCase(device.type, name, head_dim, is_grouped, is_cut, is_capped)


@cache
def problem(
    kernel: AttentionKernel, device: torch.device, dtype: torch.dtype, head_dim: int, is_capped: bool = False
) -> str:
    """Why a kernel does not work on a device, in words, or nothing: it runs a few documents, forward and backward."""
    if kernel in ("sdpa", "pieces"):
        return ""
    try:
        with torch.enable_grad(), torch.inference_mode(False):
            return disagreement(kernel, device, dtype, head_dim, _TRIED_CAP if is_capped else 0.0)
    except Exception as error:  # whatever a loader, a compiler or a kernel makes of it
        return first_line(error)


def disagreement(
    kernel: AttentionKernel, device: torch.device, dtype: torch.dtype, head_dim: int, cap: float = 0.0
) -> str:
    """A kernel's difference from masks in fp64 in words, or nothing: documents, one of a token, and a window."""
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
    """Have the layers of a decoder's blocks attend by a kernel."""
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
    """Words that name the kernel of a device; raises as `kernel_for` does."""
    kernel = kernel_for(device, dtype, head_dim, is_grouped, is_cut, choice, is_capped)
    if is_capped and kernel != "flex":
        pieces = ", piece by piece" if kernel == "pieces" and is_cut else ""
        return f"two products and a softmax of capped scores{pieces} ({device}, {str(dtype).removeprefix('torch.')})"
    words = _MASKED if kernel == "sdpa" and is_cut else _WORDS["sdpa" if not is_cut and kernel == "pieces" else kernel]
    return f"{words} ({device}, {str(dtype).removeprefix('torch.')})"
