"""Kernels of `liger-kernel` compared with fp64, forward and backward, on a few rows of a model's sizes."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from terrace.model import decoder, layers, liger
from terrace.model.config import ModelConfig
from terrace.model.part_kernel import LARGEST_ROW, Part
from terrace.model.rotary import rotary_of

# Relative to the largest element. Rotary tables are rounded to the dtype as well.
_TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 1e-5}
_ROWS = 6
# The package has separate kernels, of several rows each, for norms of at most _SHORT elements over many rows.
_SHORT, _MANY_ROWS = 256, 4096 * 8
_SCALE = 0.125
_Function = Callable[..., Tensor | tuple[Tensor, ...]]


def difference(part: Part, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> str:
    """The first difference of a part's kernels from torch in fp64; empty if they agree."""
    return next(filter(None, _TRIALS[part](config, device, dtype)), "")


def _norms(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Iterator[str]:
    shapes = [(_ROWS, config.hidden_size)]
    if config.whole_qk_norm:
        shapes += [(_ROWS, number * config.head_dim) for number in (config.num_heads, config.num_kv_heads)]
    elif config.qk_norm:
        # On a CPU kernels run in an interpreter, which is too slow for many rows.
        shapes += [(_ROWS, config.head_dim)]
        shapes += [(_MANY_ROWS + 1, config.head_dim)] if config.head_dim <= _SHORT and device.type == "cuda" else []
    for shape in shapes:
        own = partial(liger.rms_norm, eps=config.norm_eps)
        reference = partial(layers.rms_norm, eps=config.norm_eps)
        yield _compared(own, reference, _normal(device, dtype, shape, shape[1:], shape))


def _gated(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Iterator[str]:
    activation, size = layers.ACTIVATIONS[config.activation], config.mlp_size or config.intermediate_size
    shape = (_ROWS, min(size, LARGEST_ROW))  # ranks of a tensor axis may have a slice each
    inputs = _normal(device, dtype, shape, shape, shape)
    yield _compared(liger.GATED[config.activation], lambda gate, up: activation(gate) * up, inputs)


def _rotary(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Iterator[str]:
    rotary = rotary_of(config)
    assert rotary is not None, "the table of parts names no rotary positions where nothing is rotated"
    heads = [(2, _ROWS, number, config.head_dim) for number in (config.num_heads, config.num_kv_heads)]
    inputs = [each.transpose(1, 2) for each in _normal(device, dtype, *heads, *heads)]
    # Rows of one document, and rows whose tokens have positions of their own.
    positions = torch.arange(2 * _ROWS, device=device).view(2, _ROWS).flip(0)
    for places in (None, positions):
        cos, sin = rotary.tables_of(inputs[0], places)

        def own(query: Tensor, key: Tensor, cos: Tensor = cos, sin: Tensor = sin) -> tuple[Tensor, ...]:
            # Copies, since the kernel writes in place, which leaves do not allow.
            return liger.rotate_both(config.rotary_dim, query.clone(), key.clone(), cos, sin)

        def reference(query: Tensor, key: Tensor, cos: Tensor = cos, sin: Tensor = sin) -> tuple[Tensor, ...]:
            return rotary.rotate_both(query, key, cos.double(), sin.double())

        yield _compared(own, reference, inputs)


def _loss(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Iterator[str]:
    (logits,) = _normal(device, dtype, (_ROWS, config.vocab_size))
    labels = torch.arange(_ROWS, device=device) * 7 % config.vocab_size
    labels[1] = decoder.IGNORE_INDEX
    for scale in (1.0, _SCALE):
        found, wanted = logits.clone(), logits.double()
        losses = liger.to_gradient(found, labels, scale), decoder.to_gradient(wanted, labels, scale)
        yield _difference("loss", *losses, torch.float32) or _difference("gradient", found, wanted, dtype)


_TRIALS: dict[Part, Callable[[ModelConfig, torch.device, torch.dtype], Iterator[str]]] = {
    "norms": _norms,
    "gated activations": _gated,
    "rotary positions": _rotary,
    "loss": _loss,
}


def _normal(device: torch.device, dtype: torch.dtype, *shapes: Sequence[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator).to(device, dtype) for shape in shapes]


def _compared(own: _Function, reference: _Function, tensors: Sequence[Tensor]) -> str:
    """Describe the first difference between two functions; empty if they agree.

    The first two `tensors` are the arguments, the others the gradients of the outputs.
    """
    inputs, grads, dtype = tensors[:2], tensors[2:], tensors[0].dtype
    found = _results(own, inputs, grads)
    wanted = _results(reference, [each.double() for each in inputs], [each.double() for each in grads])
    names = [f"output {place}" for place in range(len(grads))] + ["first gradient", "second gradient"]
    differences = (_difference(*each, dtype) for each in zip(names, found, wanted, strict=True))
    return next(filter(None, differences), "")


def _results(function: _Function, inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    leaves = [each.detach().clone().requires_grad_() for each in inputs]
    outputs = function(*leaves)
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    # Copies, since kernels overwrite gradients and results.
    kept = [each.detach().clone() for each in outputs]
    return [*kept, *torch.autograd.grad(outputs, leaves, [each.clone() for each in grads])]


def _difference(name: str, found: Tensor, wanted: Tensor, dtype: torch.dtype) -> str:
    # "<=", so that NaN fails.
    if (found.double() - wanted).abs().max() <= _TOLERANCE[dtype] * wanted.abs().max():
        return ""
    return f"it differs from the reference ({name})"
