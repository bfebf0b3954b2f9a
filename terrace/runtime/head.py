"""A decoder's last block with its loss, a chunk of tokens at a time, so that the whole logits are never allocated.

The logits of a chunk are computed, replaced in place by their gradient, and multiplied back:

    x = h W^T,   loss += logsumexp(x) - x[label],   dx = softmax(x) - onehot(label),   dh = dx W,   dW += dx^T h

The loss is a sum, so the gradient of each chunk needs no later result: all three products run in the block's
BACKWARD, and its FORWARD computes nothing. There are as many products as with whole logits, and the memory is that of
one chunk. (Keeping a log-sum per token and recomputing logits in the backward, as Wijmans et al. do, arXiv
2411.09009, would add a fourth product; computing the weight gradient in the forward would need its buffer there.)

A chunk's weight gradient is added at once, even in a backward that defers other weight gradients, because deferring
it would keep the gradient of the logits. A bf16 gradient would round once per chunk, so chunks are summed in fp32.

`terrace.model.decoder.token_loss` of whole logits gives the same number. The tensor axis has its own form
(terrace.runtime.tensor.loss).

Shape legend: N tokens, H hidden, V vocabulary.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor, nn

from terrace.model import decoder
from terrace.model.loss_chunks import CACHED_NUMEL, chunk_rows, slices
from terrace.runtime.linear import record_product, record_sum


class LossBackward(Protocol):
    """(Input of the block, labels, scale) -> sum of the losses, unscaled."""

    def __call__(self, inputs: Tensor, labels: Tensor, scale: float = 1.0) -> Tensor: ...


def chunked_head(module: nn.Module, objective: object) -> LossBackward | None:
    """A function that runs a last block, its loss and both backwards in chunks, or None.

    Only a `terrace.model.decoder.Head` with `token_loss` has one. It takes the block's input (B, S, H) and labels
    (B, S), and sets the input's `grad`. All gradients, which go where any backward's go, are multiplied by `scale`. It
    returns the unscaled loss, a scalar without a graph.
    """
    if objective is not decoder.token_loss or type(module) is not decoder.Head:
        return None

    def run(inputs: Tensor, labels: Tensor, scale: float = 1.0) -> Tensor:
        hidden: Tensor = module.entering(inputs)  # (B, S, H)
        flat, flat_labels = hidden.detach().flatten(0, 1), labels.flatten()
        loss, gradient, rest = loss_and_gradients(
            flat, module.weight, flat_labels, scale, module.to_gradient, module.cap
        )
        # A weight gradient without a queue goes through autograd together with the hidden states' gradient.
        of_weight = () if rest is None else ((module.weight, rest),)
        roots, gradients = zip((hidden, gradient.view_as(hidden)), *of_weight, strict=True)
        torch.autograd.backward(roots, gradients)
        return loss

    return run


@torch.no_grad()
def head_loss(module: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Summed loss of a decoder's head for input (B, S, H) and labels (B, S), in chunks, without gradients."""
    assert isinstance(module, decoder.Head), "only a decoder's head has its loss in chunks"
    hidden, flat_labels, matrix = module.entering(inputs).flatten(0, 1), labels.flatten(), module.weight.detach()
    num_rows = chunk_rows(len(matrix), hidden.device.type)
    loss = torch.zeros((), dtype=torch.float64, device=hidden.device)
    for rows in slices(len(hidden), num_rows):
        loss += decoder.token_loss(cap_(hidden[rows] @ matrix.t(), module.cap), flat_labels[rows])
    return loss


@torch.no_grad()
def loss_and_gradients(
    hidden: Tensor,
    weight: nn.Parameter,
    labels: Tensor,
    scale: float = 1.0,
    to_gradient: Callable[[Tensor, Tensor, float], Tensor] = decoder.to_gradient,
    cap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Summed cross entropy, its gradient times `scale` (N, H), and the weight gradient if it was not recorded.

    Takes hidden states (N, H) and labels (N). The gradient of a trainable `weight` (V, H) is recorded, and returned
    only if there is no queue, as with compiled blocks. Labels are as for `token_loss`, `to_gradient` as in
    `terrace.model.decoder`. Losses and softmax are computed in fp32 at least, products in the dtype of `hidden`.
    `cap` bounds the logits; 0 is no cap.
    """
    matrix = weight.detach()
    num_rows = chunk_rows(len(matrix), hidden.device.type)
    chunks = slices(len(hidden), num_rows)
    # fp64, so that the sum does not depend on how tokens are chunked.
    loss = torch.zeros((), dtype=torch.float64, device=hidden.device)
    gradient = torch.empty_like(hidden)
    # One buffer for all chunks: the last may use a part of it.
    logits = hidden.new_empty(min(num_rows, len(hidden)), len(matrix))

    def chunk_gradient(rows: slice) -> Tensor:
        x = logits[: len(hidden[rows])]
        torch.mm(hidden[rows], matrix.t(), out=x)
        by_cap = slopes(cap_(x, cap), cap)
        loss.add_(to_gradient(x, labels[rows], scale))
        if by_cap is not None:
            x.mul_(by_cap)
        torch.mm(x, matrix, out=gradient[rows])
        return x

    products = ((chunk_gradient(rows), hidden[rows]) for rows in chunks)
    rest = add_weight_gradient(weight, products, len(chunks), weight.requires_grad, at_once=True)
    return loss.to(torch.promote_types(hidden.dtype, torch.float32)), gradient, rest


def add_weight_gradient(
    weight: Tensor, products: Iterable[tuple[Tensor, Tensor]], num_chunks: int, needed: bool, at_once: bool = False
) -> Tensor | None:
    """Record the sum of dx^T h over the chunks dx (n, V), h (n, H). Returns it if there is no queue, else None.

    Each chunk is used before the next is computed. If not `needed`, chunks are computed and dropped. The queue may
    defer a single chunk, unless `at_once`. In half precision, several chunks are summed in fp32.
    """
    total: Tensor | None = None
    wide = torch.promote_types(weight.dtype, torch.float32) if num_chunks > 1 else weight.dtype
    for gradient, hidden in products:
        # A single chunk, or a full-precision weight, needs no wider sum.
        exact = wide == weight.dtype and total is None
        # The product goes straight into the gradient buffer.
        if not needed or (exact and record_product(weight, gradient, hidden, at_once or num_chunks > 1)):
            continue
        if total is None:
            total = torch.zeros(weight.shape, dtype=wide, device=hidden.device)
        _add_product(total, gradient, hidden)
    return None if total is None or record_sum(weight, total) else total.to(weight.dtype)


def gradients_through_logits(
    hidden: Tensor,
    weight: Tensor,
    logits: Tensor | None,
    to_gradient: Callable[[Tensor, slice], None],
    *,
    of_hidden: bool,
    of_weight: bool,
    cap: float = 0.0,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of hidden states (N, H) and of an output matrix (V, H) from the gradient of their logits, in chunks.

    `to_gradient` replaces the logits (n, V) of a slice of tokens by their gradient, in place. `logits` are the kept,
    capped logits of all tokens; if None, each chunk is recomputed. The matrix's gradient is recorded as by
    `add_weight_gradient`. Gradients that are not requested are None.
    """
    matrix = weight.detach()
    gradient = torch.empty_like(hidden) if of_hidden else None

    def of_chunk(chunk: slice) -> Tensor:
        x: Tensor = logits if logits is not None else cap_(hidden[chunk] @ matrix.t(), cap)
        by_cap = slopes(x, cap)
        to_gradient(x, chunk)
        if by_cap is not None:
            x.mul_(by_cap)
        if gradient is not None:
            torch.mm(x, matrix, out=gradient[chunk])
        return x

    rows = len(hidden) if logits is not None else chunk_rows(len(matrix), hidden.device.type)
    chunks = slices(len(hidden), max(1, rows))
    products = ((of_chunk(chunk), hidden[chunk]) for chunk in chunks)
    return gradient, add_weight_gradient(weight, products, len(chunks), of_weight)


def _add_product(total: Tensor, gradient: Tensor, hidden: Tensor) -> None:
    # total (V, H) += dx^T h of dx (n, V), h (n, H), in parts, since the product in a wider dtype is a second copy.
    step = max(1, 4 * CACHED_NUMEL // total.shape[1])
    for rows in slices(len(total), step):
        total[rows] += gradient[:, rows].t() @ hidden


def cap_(logits: Tensor, cap: float) -> Tensor:
    """Cap logits in place; `cap` 0: none."""
    return logits.div_(cap).tanh_().mul_(cap) if cap else logits


def slopes(capped: Tensor, cap: float) -> Tensor | None:
    """Elementwise dy/dx of capped logits y; None without a cap."""
    return (capped * capped).mul_(-1.0 / cap**2).add_(1.0) if cap else None
